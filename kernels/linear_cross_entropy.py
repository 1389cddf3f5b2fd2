"""Cross-entropy of a linear head without storing its logits: the public functions, which validate, plan and run.

dlogits = softmax - onehot is all that the backward of a language-model head needs. So the tokens, or the classes, are
walked in parts (`schedules.py`), each part's logits become their gradient at once, and are pushed through the two
backward GEMMs before the next part takes their memory. What part suits a budget of memory, `plan.py` computes.

Chunked heads: mgmalek/efficient_cross_entropy, Liger-Kernel (arXiv 2410.10989), CCE (arXiv 2411.09009), quack.
"""

import operator
from typing import NamedTuple

import torch
from torch import Tensor

from . import devices, gemm, geometry, head_ops, plan, reference
from .reference import LossSums, Objective

DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
PLAIN = Objective()


class Evaluation(NamedTuple):
    """Sums over the kept tokens, each [] fp32 without gradient; loss, cross-entropy, lse and entropy in nats.

    `correct` counts the tokens whose label no other logit exceeds, up to rounding.
    """

    loss: Tensor
    cross_entropy: Tensor
    lse: Tensor
    correct: Tensor
    entropy: Tensor


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    chunk: int | str = "auto",
    budget_mib: float | None = None,
    schedule: str = "auto",
) -> Tensor:
    """Cross-entropy of `input @ linear_weight.T + linear_bias` against `target`, without storing the logits.

    Inside autocast the GEMMs run in autocast's dtype; gradients come back in their inputs' dtypes, and a dweight for
    an fp32 weight is accumulated in fp32 from end to end. With token chunks and "mean" or "sum", forward makes the
    gradients, and backward only scales them and hands them over. `schedules.py` has the two schedules, `plan.py` their
    memory: what they need beyond inputs and gradients is the transient.

    Args:
        input: [..., D] hidden states, fp32, bf16 or fp16; copied where they have no [N, D] view (`hidden[:, :-1]`).
        linear_weight: [V, D], on the same device; of the same dtype, unless inside autocast.
        target: [...] int32 or int64 in [0, V), or `ignore_index`.
        linear_bias: [V], or None.
        ignore_index: tokens with this label give 0 and do not count in the mean.
        reduction: "mean" over the kept tokens (0 if there are none), "sum", or "none".
        label_smoothing: eps in [0, 1).
        z_loss: factor of lse^2, >= 0.
        softcap: c of c * tanh(logits / c), or None.
        chunk: rows of logits alive at once, >= 1; the last chunk may be short. Chunks of 2**31 logits or more are cut.
            "auto" takes the fastest plan within the budget; a compiler then compiles anew for each N. For slabs, and
            without gradients, it means at most the memory of that many rows, or the smallest part if that takes more:
            a slab of all tokens and 256 classes.
        budget_mib: largest transient in MiB, whether `chunk` is a number or "auto". None: no limit for a number; for
            "auto" a sixteenth of the device's memory, or the smallest plan if none fits into that. What the caller's
            own autograd holds is not counted, such as the copy of a sliced `hidden[:, :-1]` and its gradient.
        schedule: "tokens", "vocab", or "auto": token chunks if `chunk` is given, otherwise whichever is faster.

    Returns:
        [] fp32 in nats, or [...] like `target` for reduction "none".

    Raises:
        ValueError: a shape, dtype, device or option that is not supported; nothing fits into the budget.
        IndexError: a label outside [0, V) on a CPU; on a GPU its token is NaN with gradient 0.
        RuntimeError: a second backward (it is right for token chunks with reduction "none", for slabs where `input`
            wants no gradient, and in compiled code), or a double backward.
    """
    reference.check_reduction(reduction)
    objective = Objective(ignore_index, label_smoothing, z_loss, softcap)
    if input.dim() == 0 or input.shape[:-1] != target.shape:
        raise ValueError(f"expected one label a token, {list(input.shape[:-1])}, got {list(target.shape)}")
    hidden, labels = torch.atleast_2d(input).flatten(0, -2), target.reshape(-1)
    reference.check_labels(labels, hidden.shape[0])
    labels = labels.long()  # an ignore_index may lie outside of int32
    tensors = hidden, linear_weight, labels, linear_bias
    limits = {"chunk": chunk, "budget_mib": budget_mib, "schedule": schedule}
    if reduction == "none":
        schedule, arguments = _plan(*tensors, objective, per_token=True, **limits)
        losses, *_ = head_ops.per_token(*arguments, schedule)
        return losses.view(target.shape)
    # Known beforehand, 1/n costs nothing where the epilogue makes dlogits, and then an upstream gradient of 1 neither.
    # On the plain path backward passes over the gradients once, as it would had the sum been divided afterwards.
    factor = None if reduction == "sum" else (labels != ignore_index).sum().clamp(min=1).float().reciprocal()
    return _sums(tensors, objective, limits, factor).loss


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    chunk: int | str = "auto",
    budget_mib: float | None = None,
    schedule: str = "auto",
) -> Tensor:
    """Log-probability of each label, differentiable: what policy gradients, DPO and distillation want of a head.

    Args, errors and memory are those of `linear_cross_entropy`. A label of -100 gives 0.

    Returns:
        [...] like `labels`, fp32, in nats, <= 0.
    """
    limits = {"chunk": chunk, "budget_mib": budget_mib, "schedule": schedule}
    return -linear_cross_entropy(hidden, weight, labels, linear_bias=bias, reduction="none", softcap=softcap, **limits)


def linear_cross_entropy_sums(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    objective: Objective,
    *,
    bias: Tensor | None = None,
    chunk: int | str = "auto",
    budget_mib: float | None = None,
    schedule: str = "auto",
) -> LossSums:
    """Loss sums over the kept tokens: the form whose mean may span micro-batches and ranks.

    Args:
        hidden: [N, D].
        weight: [V, D].
        labels: [N].
        objective: the options of the loss.
        bias: [V], or None.

    The other arguments, errors and contract are those of `linear_cross_entropy`.

    Returns:
        `correct` is None, with and without gradients: `linear_evaluation` counts it.
    """
    limits = {"chunk": chunk, "budget_mib": budget_mib, "schedule": schedule}
    return _sums((hidden, weight, labels, bias), objective, limits, None)


def linear_evaluation(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    objective: Objective = PLAIN,
    *,
    bias: Tensor | None = None,
    chunk: int | str = "auto",
    budget_mib: float | None = None,
) -> Evaluation:
    """Loss and metrics of a head, without gradients and without its logits: one GEMM.

    Args and errors are those of `linear_cross_entropy_sums`.
    """
    limits = {"chunk": chunk, "budget_mib": budget_mib, "schedule": "tokens"}
    with torch.no_grad():
        _, arguments = _plan(hidden, weight, labels, bias, objective, per_token=False, **limits)
        return Evaluation(*head_ops.evaluate(*arguments))


def _sums(tensors: tuple, objective: Objective, limits: dict, factor: Tensor | None) -> LossSums:
    """Loss sums, the loss times `factor` [] fp32 if given."""
    schedule, arguments = _plan(*tensors, objective, per_token=False, **limits)
    factor = torch.ones(1, dtype=torch.float32, device=tensors[0].device) if factor is None else factor.reshape(1)
    if schedule == "tokens":
        loss, cross_entropy, *_ = head_ops.sums(*arguments, factor)
        return LossSums(loss, cross_entropy)
    losses, cross_entropies, *_ = head_ops.per_token(*arguments, schedule)
    return LossSums(losses.sum() * factor[0], cross_entropies.sum())


def _plan(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    objective: Objective,
    *,
    per_token: bool,
    chunk: int | str,
    budget_mib: float | None,
    schedule: str,
) -> tuple[str, tuple]:
    """The schedule, and what `head_ops.SCHEMA` lists, checked."""
    _check(hidden, weight, labels, bias)
    plan.check_limits(chunk, budget_mib, schedule)
    dtype = compute_dtype(hidden, weight, bias)
    wanted = [t is not None and t.requires_grad and torch.is_grad_enabled() for t in (hidden, weight, bias)]
    if chunk != "auto" and budget_mib is None:
        schedule = "tokens" if schedule == "auto" else schedule
        chunk = min(chunk, geometry.largest_chunk(weight.shape[0]))
    else:
        lacking = plan.lacking(objective.label_smoothing, objective.softcap)
        if not all(gemm.has_readable_rows(tensor, dtype) for tensor in (hidden, weight)):
            lacking = lacking or "rows that TMA cannot read"
        limits = {"chunk": chunk, "budget_mib": budget_mib, "schedule": schedule}
        schedule, chunk = _choose(
            str(hidden.device),
            limits,
            n_tokens=operator.index(hidden.shape[0]),  # a compiler's symbols become numbers
            vocab=operator.index(weight.shape[0]),
            width=operator.index(weight.shape[1]),
            dtype=DTYPES[dtype],
            weight_dtype=DTYPES[weight.dtype],
            hidden_dtype=DTYPES[hidden.dtype],
            grads=tuple(wanted),
            per_token=per_token,
            has_bias=bias is not None,
            lacking=lacking,
        )
    labels = labels.long().contiguous()  # int64, because an ignore_index may lie outside of int32
    return schedule, (hidden, weight, bias, labels, dtype, chunk, wanted, *objective.arguments())


@torch.compiler.assume_constant_result  # computed once while compiling, not traced
def _choose(device: str, limits: dict, **facts) -> tuple[str, int]:
    """Schedule and chunk. `facts` are the fields of a `plan.Head`, which a compiler would not take for a constant."""
    chosen = plan.plan(plan.Head(**facts), devices.present_device(device), **limits)
    return chosen.schedule, chosen.chunk


def compute_dtype(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> torch.dtype:
    """Autocast's, or else the one that all have."""
    if torch.is_autocast_enabled(hidden.device.type):
        return torch.get_autocast_dtype(hidden.device.type)
    if any(tensor is not None and tensor.dtype != hidden.dtype for tensor in (weight, bias)):
        dtypes = [str(tensor.dtype) for tensor in (hidden, weight, bias) if tensor is not None]
        raise ValueError(f"hidden, weight and bias must have one dtype outside autocast, got {', '.join(dtypes)}")
    return hidden.dtype


def _check(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> None:
    reference.check_weight(weight)
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"expected hidden [N, D] and weight [V, D], got {list(hidden.shape)} and {list(weight.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"expected bias [{weight.shape[0]}], got {list(bias.shape)}")
    for tensor in (hidden, weight, bias):
        if tensor is not None and tensor.dtype not in DTYPES:
            raise ValueError(f"hidden, weight and bias must be float32, bfloat16 or float16, got {tensor.dtype}")
    devices = {t.device for t in (hidden, weight, labels, bias) if t is not None}
    if len(devices) > 1:
        raise ValueError(f"all tensors must be on one device, got {sorted(map(str, devices))}")
    reference.check_labels(labels, hidden.shape[0])
