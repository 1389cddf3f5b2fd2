"""The loss backends: plain functions with one signature, chosen by `loss=` and one file in conf/loss/ each.

A backend maps hidden [N, D], weight [V, D] and labels [N] to sums over the kept tokens: losses in nats, and under
no_grad the number of right guesses. Sums, not means: the training step divides by the number of kept tokens of the
whole accumulation window over all ranks, so that every mean is weighted by tokens. The options of the objective mean
the same in every backend.

With `shard` the vocabulary is cut over ranks: weight [V_r, D] and bias [V_r] are of this rank's classes, and hidden and
labels of its own tokens.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import cross_entropy, linear_cross_entropy, reference, vocab_parallel
from kernels.reference import LossSums, Objective
from kernels.vocab_shard import VocabShard

PLAIN = Objective()


class LossBackend(Protocol):
    """What the head calls; `functools.partial` binds the options."""

    def __call__(
        self,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        *,
        bias: Tensor | None = None,
        shard: VocabShard | None = None,
    ) -> LossSums: ...


def naive(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    shard: VocabShard | None = None,
    objective: Objective = PLAIN,
) -> LossSums:
    """Logits in the compute dtype, then fp32, then softmax: what PyTorch does when left alone."""
    if shard is not None:
        return vocab_parallel.eager_sums(hidden, weight, labels, objective, shard, bias=bias)
    return reference.linear_cross_entropy_sums(hidden, weight, labels, objective, bias=bias)


def inplace(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    shard: VocabShard | None = None,
    objective: Objective = PLAIN,
) -> LossSums:
    """One logits tensor, which the gradient overwrites."""
    if shard is not None:
        return vocab_parallel.inplace_sums(hidden, weight, labels, objective, shard, bias=bias)
    reference.check_weight(weight)
    logits = F.linear(hidden, weight, bias)
    return cross_entropy.cross_entropy_sums(logits, labels, objective)


def fused(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    shard: VocabShard | None = None,
    objective: Objective = PLAIN,
    chunk: int | str,
    budget_mib: float | None = None,
) -> LossSums:
    """`chunk` rows of logits at a time, or what "auto" finds within the budget; the whole tensor never exists."""
    if shard is not None:
        return vocab_parallel.chunked_sums(hidden, weight, labels, objective, shard, bias=bias, chunk=chunk)
    options = {"bias": bias, "chunk": chunk, "budget_mib": budget_mib}
    if torch.is_grad_enabled():
        return linear_cross_entropy.linear_cross_entropy_sums(hidden, weight, labels, objective, **options)
    evaluation = linear_cross_entropy.linear_evaluation(hidden, weight, labels, objective, **options)
    return LossSums(evaluation.loss, evaluation.cross_entropy, evaluation.correct)
