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

from . import reference, scaling, schedules
from .cross_entropy import refuse_double_backward
from .reference import OBJECTIVE_SCHEMA, LossSums, Objective
from .schedules import Gradients, Head

# What the ops take; the three tensors that may have gradients come first. `wanted` says which of these to make, and an
# op returns an empty tensor for one that is not wanted.
SCHEMA = (
    "Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, ScalarType compute_dtype, SymInt chunk, bool[] wanted"
)
SCHEMA += f", {OBJECTIVE_SCHEMA}"
NO_GRADIENTS = (None,) * 8  # of labels, compute_dtype, chunk, wanted, and the four fields of Objective


@torch.library.custom_op(
    "logitless::linear_cross_entropy",
    mutates_args=(),
    schema=f"({SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _sums(hidden, weight, bias, labels, compute_dtype, chunk, wanted, *options):
    """Sums of the losses and of the plain cross-entropies, and the gradients of the former, not cast yet."""
    gradients = schedules.empty_gradients(hidden, weight, bias, wanted, chunk)
    head = _cast(hidden, weight, bias, compute_dtype)
    rows = schedules.token_chunks(head, labels, Objective(*options), chunk, gradients)
    return rows.losses.sum(), rows.cross_entropies.sum(), *_without_none(gradients, hidden)


@_sums.register_fake
def _(hidden, weight, bias, labels, compute_dtype, chunk, wanted, *options):
    sums = (hidden.new_empty((), dtype=torch.float32) for _ in range(2))
    return *sums, *_without_none(schedules.empty_gradients(hidden, weight, bias, wanted, chunk), hidden)


def _save_gradients(ctx, inputs, output):
    hidden, weight, bias, _, _, _, ctx.wanted, *_ = inputs
    ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (hidden, weight, bias)]
    ctx.is_used = False
    ctx.save_for_backward(*output[2:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _scale_gradients(ctx, dloss, *_):
    refuse_double_backward()
    if dloss is None:  # what comes after the loss has no gradient
        return None, None, None, *NO_GRADIENTS
    if ctx.is_used:
        raise RuntimeError("linear_cross_entropy hands its gradients over at the first backward: call it again")
    ctx.is_used = True
    scaled = (
        scaling.scale(gradient, dloss, dtype) if is_wanted else None
        for gradient, dtype, is_wanted in zip(ctx.saved_tensors, ctx.dtypes, ctx.wanted, strict=True)
    )
    return *scaled, *NO_GRADIENTS


_sums.register_autograd(_scale_gradients, setup_context=_save_gradients)


@torch.library.custom_op(
    "logitless::linear_cross_entropy_per_token",
    mutates_args=(),
    schema=f"({SCHEMA}) -> (Tensor, Tensor, Tensor)",
)
def _per_token(hidden, weight, bias, labels, compute_dtype, chunk, wanted, *options):
    """Losses, and what backward needs to compute the logits' gradient again: row_max and log_sum, each [N]."""
    head = _cast(hidden, weight, bias, compute_dtype)
    rows = schedules.token_chunks(head, labels, Objective(*options), chunk, Gradients())
    return rows.losses, rows.row_max, rows.log_sum


@_per_token.register_fake
def _(hidden, *_):
    return tuple(hidden.new_empty(hidden.shape[0], dtype=torch.float32) for _ in range(3))


@torch.library.custom_op(
    "logitless::linear_cross_entropy_per_token_backward",
    mutates_args=(),
    schema=f"(Tensor dlosses, Tensor row_max, Tensor log_sum, {SCHEMA}) -> (Tensor, Tensor, Tensor)",
)
def _per_token_backward(
    dlosses, row_max, log_sum, hidden, weight, bias, labels, compute_dtype, chunk, wanted, *options
):
    """The gradients for the upstream gradients `dlosses` [N], in the dtypes of the inputs."""
    gradients = schedules.empty_gradients(hidden, weight, bias, wanted, chunk)
    head = _cast(hidden, weight, bias, compute_dtype)
    vectors = {"row_max": row_max, "log_sum": log_sum, "dlosses": dlosses}
    schedules.token_chunks_backward(head, labels, Objective(*options), chunk, gradients, **vectors)
    return _without_none(_to_input_dtypes(gradients, hidden, weight, bias), hidden)


@_per_token_backward.register_fake
def _(dlosses, row_max, log_sum, hidden, weight, bias, labels, compute_dtype, chunk, wanted, *options):
    gradients = schedules.empty_gradients(hidden, weight, bias, wanted, chunk)
    return _without_none(_to_input_dtypes(gradients, hidden, weight, bias), hidden)


def _save_inputs(ctx, inputs, output):
    ctx.save_for_backward(*output[1:], *inputs[:4])
    ctx.options = inputs[4:]
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _compute_again(ctx, dlosses, *_):
    refuse_double_backward()
    if dlosses is None:
        return None, None, None, *NO_GRADIENTS
    gradients = _per_token_backward(dlosses.contiguous(), *ctx.saved_tensors, *ctx.options)
    _, _, wanted, *_ = ctx.options
    return *(g if is_wanted else None for g, is_wanted in zip(gradients, wanted, strict=True)), *NO_GRADIENTS


_per_token.register_autograd(_compute_again, setup_context=_save_inputs)


def _refuse_vmap(info, in_dims, *arguments):
    raise NotImplementedError("linear_cross_entropy has no vmap: flatten the batch into the tokens")


_sums.register_vmap(_refuse_vmap)
_per_token.register_vmap(_refuse_vmap)


def _cast(hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Head:
    return Head(hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


def _to_input_dtypes(gradients: Gradients, *inputs: Tensor | None) -> Gradients:
    return Gradients(*(g if g is None else g.to(tensor.dtype) for g, tensor in zip(gradients, inputs, strict=True)))


def _without_none(gradients: Gradients, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """An op returns tensors only: an empty one stands for None."""
    return tuple(hidden.new_empty(0) if gradient is None else gradient for gradient in gradients)


def _op_arguments(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, objective: Objective, chunk: int
) -> tuple:
    """What SCHEMA lists, checked."""
    _check(hidden, weight, bias, labels, chunk)
    wanted = [t is not None and t.requires_grad and torch.is_grad_enabled() for t in (hidden, weight, bias)]
    labels = labels.long().contiguous()  # int64, because an ignore_index may lie outside of int32
    chunk = min(chunk, schedules.largest_chunk(weight.shape[0]))
    dtype = _compute_dtype(hidden, weight, bias)
    return hidden, weight, bias, labels, dtype, chunk, wanted, *objective.arguments()


def _compute_dtype(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> torch.dtype:
    """Autocast's, or else the one that all have."""
    if torch.is_autocast_enabled(hidden.device.type):
        return torch.get_autocast_dtype(hidden.device.type)
    if any(tensor is not None and tensor.dtype != hidden.dtype for tensor in (weight, bias)):
        dtypes = [str(tensor.dtype) for tensor in (hidden, weight, bias) if tensor is not None]
        raise ValueError(f"hidden, weight and bias must have one dtype outside autocast, got {', '.join(dtypes)}")
    return hidden.dtype


def _check(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, chunk: int) -> None:
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
    reference.check_labels(labels, hidden.shape[0])


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
    loss, cross_entropy, *_ = _sums(*_op_arguments(hidden, weight, bias, labels, objective, chunk))
    return LossSums(loss, cross_entropy)


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
    only scales them and hands them over. A bf16 weight with more than one chunk costs an fp32 buffer of [V, D]; fp16
    inputs cost fp32 buffers for each gradient in any case.

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
        chunk: rows of logits alive at once, >= 1; the last chunk may be short. Chunks of 2**31 logits or more are cut.

    Returns:
        [] fp32 in nats, or [...] like `target` for reduction "none".

    Raises:
        ValueError: a shape, dtype, device or option that is not supported.
        IndexError: a label outside [0, V) on a CPU; on a GPU its token is NaN with gradient 0.
        RuntimeError: a second backward (it is right for reduction "none", and in compiled code), or a double backward.
    """
    reference.check_reduction(reduction)
    objective = Objective(ignore_index, label_smoothing, z_loss, softcap)
    if input.dim() == 0 or input.shape[:-1] != target.shape:
        raise ValueError(f"expected one label a token, {list(input.shape[:-1])}, got {list(target.shape)}")
    hidden, labels = torch.atleast_2d(input).flatten(0, -2), target.reshape(-1)
    if reduction == "none":
        losses, *_ = _per_token(*_op_arguments(hidden, linear_weight, linear_bias, labels, objective, chunk))
        return losses.view(target.shape)
    loss, _ = linear_cross_entropy_sums(hidden, linear_weight, labels, objective, bias=linear_bias, chunk=chunk)
    return reference.reduce(loss, labels.long(), ignore_index, reduction)
