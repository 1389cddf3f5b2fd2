"""Cross-entropy of a linear head without storing its logits.

dlogits = softmax - onehot is all that the backward of a language-model head needs, so forward walks the tokens in
chunks (`schedules.py`), turns each chunk's logits into their gradient in place, and pushes it through the two
backward GEMMs at once. Kept from forward to backward: dhidden and dweight. For reduction "none" the upstream gradient
differs from row to row and is not known in forward: forward then keeps only two numbers a row, and backward computes
the chunks again (4 GEMMs).

Chunked heads: mgmalek/efficient_cross_entropy, Liger-Kernel (arXiv 2410.10989), CCE (arXiv 2411.09009), quack.
"""

import torch
from torch import Tensor

from . import reference, schedules
from .cross_entropy import refuse_double_backward
from .reference import LossSums, Objective
from .schedules import GradientDtypes, Head


class _Summed(torch.autograd.Function):
    """Loss sums; the gradients are made in forward, and handed over at the first backward."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, compute_dtype, objective, chunk, dtypes):
        head = _cast(hidden, weight, bias, compute_dtype)
        # The sum over all tokens may pass fp16's range where the mean does not: it stays in fp32 until it is scaled.
        wide = GradientDtypes(*(torch.float32 if dtype == torch.float16 else dtype for dtype in dtypes))
        rows, ctx.gradients = schedules.token_chunks(head, labels, objective, chunk, wide)
        ctx.dtypes = dtypes
        sums = rows.losses.sum(), rows.cross_entropies.sum()
        ctx.mark_non_differentiable(sums[1])
        return sums

    @staticmethod
    def backward(ctx, dloss, _):
        refuse_double_backward()
        if ctx.gradients is None:
            raise RuntimeError("linear_cross_entropy hands its gradients over at the first backward: call it again")
        gradients, ctx.gradients = ctx.gradients, None
        scaled = (
            None if gradient is None else gradient.mul_(dloss).to(dtype)
            for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)
        )
        return *scaled, None, None, None, None, None


class _PerToken(torch.autograd.Function):
    """Losses [N]; backward computes the logits again."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, compute_dtype, objective, chunk, dtypes):
        head = _cast(hidden, weight, bias, compute_dtype)
        rows, _ = schedules.token_chunks(head, labels, objective, chunk, GradientDtypes())
        ctx.save_for_backward(hidden, weight, bias, labels, rows.row_max, rows.log_sum)
        ctx.options = compute_dtype, objective, chunk, dtypes
        return rows.losses

    @staticmethod
    def backward(ctx, dlosses):
        refuse_double_backward()
        hidden, weight, bias, labels, row_max, log_sum = ctx.saved_tensors
        compute_dtype, *options = ctx.options
        head = _cast(hidden, weight, bias, compute_dtype)
        gradients = schedules.token_chunks_backward(head, labels, *options, row_max, log_sum, dlosses.contiguous())
        return *gradients, None, None, None, None, None


def _cast(hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Head:
    return Head(hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


@torch.compiler.disable  # one graph break, where tracing the chunks would make a graph of each shape
def _apply(
    function: type[torch.autograd.Function],
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    objective: Objective,
    chunk: int,
):
    _check(hidden, weight, bias, labels, objective, chunk)
    compute_dtype = hidden.dtype
    if torch.is_autocast_enabled(hidden.device.type):
        compute_dtype = torch.get_autocast_dtype(hidden.device.type)
    elif any(tensor is not None and tensor.dtype != hidden.dtype for tensor in (weight, bias)):
        dtypes = [str(tensor.dtype) for tensor in (hidden, weight, bias) if tensor is not None]
        raise ValueError(f"hidden, weight and bias must have one dtype outside autocast, got {', '.join(dtypes)}")

    def wanted_dtype(tensor: Tensor | None) -> torch.dtype | None:
        # ctx.needs_input_grad would be true under no_grad as well.
        is_wanted = tensor is not None and tensor.requires_grad and torch.is_grad_enabled()
        return tensor.dtype if is_wanted else None

    dtypes = GradientDtypes(*map(wanted_dtype, (hidden, weight, bias)))
    return function.apply(hidden, weight, bias, labels.long().contiguous(), compute_dtype, objective, chunk, dtypes)


def _check(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, objective: Objective, chunk: int
) -> None:
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"expected hidden [N, D] and weight [V, D], got {list(hidden.shape)} and {list(weight.shape)}")
    if weight.shape[0] == 0:
        raise ValueError(f"weight {list(weight.shape)} has no rows: it is not materialised (sharded?)")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"expected bias [{weight.shape[0]}], got {list(bias.shape)}")
    for tensor in (hidden, weight, bias):
        if tensor is not None and tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"hidden, weight and bias must be float32, bfloat16 or float16, got {tensor.dtype}")
    devices = {t.device for t in (hidden, weight, labels, bias) if t is not None}
    if len(devices) > 1:
        raise ValueError(f"all tensors must be on one device, got {sorted(map(str, devices))}")
    if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:
        raise ValueError(f"chunk must be an integer >= 1, got {chunk!r}")
    reference.check_labels(labels, hidden.shape[0], weight.shape[0], objective.ignore_index)


def linear_cross_entropy_sums(
    hidden: Tensor, weight: Tensor, labels: Tensor, objective: Objective, *, bias: Tensor | None = None, chunk: int
) -> LossSums:
    """Loss sums over the kept tokens: the form whose mean may span micro-batches and ranks.

    Args:
        hidden: [N, D].
        weight: [V, D].
        labels: [N].
        objective: the options of the loss.
        bias: [V], or None.
        chunk: rows of logits alive at once, >= 1.

    Errors and contract are those of `linear_cross_entropy`.
    """
    return LossSums(*_apply(_Summed, hidden, weight, bias, labels, objective, chunk))


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
    chunk: int = 1024,
) -> Tensor:
    """Cross-entropy of `input @ linear_weight.T + linear_bias` against `target`, without storing the logits.

    Inside autocast the GEMMs run in autocast's dtype; gradients come back in their inputs' dtypes, and a dweight for
    an fp32 weight is accumulated in fp32 from end to end. For "mean" and "sum" forward makes the gradients, backward
    only scales them and hands them over. A bf16 or fp16 weight with more than one chunk costs an fp32 buffer of [V, D].

    Args:
        input: [..., D] hidden states, fp32, bf16 or fp16.
        linear_weight: [V, D], on the same device; of the same dtype, unless inside autocast.
        target: [...] int32 or int64 in [0, V), or `ignore_index`.
        linear_bias: [V], or None.
        ignore_index: tokens with this label give 0 and do not count in the mean.
        reduction: "mean" over the kept tokens (0 if there are none), "sum", or "none".
        label_smoothing: eps in [0, 1).
        z_loss: factor of lse^2, >= 0.
        softcap: c of c * tanh(logits / c), or None.
        chunk: rows of logits alive at once, >= 1; the last chunk may be short.

    Returns:
        [] fp32 in nats, or [...] like `target` for reduction "none".

    Raises:
        ValueError: a shape, dtype, device or option that is not supported.
        IndexError: a label outside [0, V) on a CPU; on a GPU its token is NaN with gradient 0.
        RuntimeError: a second backward (unless reduction is "none"), or a double backward.
    """
    reference.check_reduction(reduction)
    objective = Objective(ignore_index, label_smoothing, z_loss, softcap)
    if input.dim() == 0 or input.shape[:-1] != target.shape:
        raise ValueError(f"expected one label a token, {list(input.shape[:-1])}, got {list(target.shape)}")
    hidden, labels = input.reshape(-1, input.shape[-1]), target.reshape(-1)
    if reduction == "none":
        return _apply(_PerToken, hidden, linear_weight, linear_bias, labels, objective, chunk).view(target.shape)
    loss, _ = linear_cross_entropy_sums(hidden, linear_weight, labels, objective, bias=linear_bias, chunk=chunk)
    return reference.reduce(loss, labels.long(), ignore_index, reduction)
