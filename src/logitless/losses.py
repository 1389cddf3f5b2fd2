"""The loss backends: plain functions with one signature, chosen by `loss=` and one file in conf/loss/ each.

A backend maps hidden [N, D], weight [V, D] and labels [N] to sums in nats over the kept tokens. Sums, not means: the
training step divides by the number of kept tokens of the whole accumulation window over all ranks, so that every
mean is weighted by tokens. The options of the objective mean the same in every backend.
"""

from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from kernels import cross_entropy, linear_cross_entropy, reference
from kernels.reference import LossSums, Objective

PLAIN = Objective()


class LossBackend(Protocol):
    """What the head calls; `functools.partial` binds the options."""

    def __call__(self, hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None) -> LossSums: ...


def naive(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None, objective: Objective = PLAIN
) -> LossSums:
    """Logits in the compute dtype, then fp32, then softmax: what PyTorch does when left alone."""
    return reference.linear_cross_entropy_sums(hidden, weight, labels, objective, bias=bias)


def inplace(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None, objective: Objective = PLAIN
) -> LossSums:
    """One logits tensor, which the gradient overwrites."""
    logits = F.linear(hidden, weight, bias)
    return cross_entropy.cross_entropy_sums(logits, labels, objective)


def fused(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    objective: Objective = PLAIN,
    chunk: int,
) -> LossSums:
    """`chunk` rows of logits at a time; the whole tensor never exists."""
    return linear_cross_entropy.linear_cross_entropy_sums(hidden, weight, labels, objective, bias=bias, chunk=chunk)
