"""Custom ops of the linear head and its loss: opaque to torch.compile, one op for a whole loss, and their autograd.

`sums` makes the gradients in forward; backward only scales them and hands them over. `per_token` is for losses whose
upstream gradients differ from row to row, and for the vocabulary schedule: forward keeps two numbers a row (and, with
slabs, dhidden), and backward computes the logits again. `evaluate` has no gradient.
"""

import torch
from torch import Tensor

from . import geometry, parts, scaling, schedules
from .cross_entropy import refuse_double_backward
from .gemm import multiprocessors
from .parts import Gradients, Head
from .reference import OBJECTIVE_SCHEMA, Objective

# What the ops take; the three tensors that may have gradients come first. `wanted` says which of these to make, and an
# op returns an empty tensor for one that is not wanted.
SCHEMA = (
    "Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, ScalarType compute_dtype, SymInt chunk, bool[] wanted, "
    + OBJECTIVE_SCHEMA
)
NO_GRADIENTS = (None,) * 9  # of labels, compute_dtype, chunk, wanted, the four fields of Objective, and one more


@torch.library.custom_op(
    "logitless::linear_cross_entropy",
    mutates_args=(),
    schema=f"({SCHEMA}, Tensor factor) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def sums(hidden, weight, bias, labels, compute_dtype, chunk, wanted, *rest):
    """Sums of the losses times `factor` [1], and of the plain cross-entropies, and the gradients of the former.

    The gradients are not cast yet, and lack the factor [1] that comes last.
    """
    *options, factor = rest
    gradients = parts.empty_gradients(hidden, weight, bias, wanted, chunk, compute_dtype)
    head, objective = cast(hidden, weight, bias, compute_dtype), Objective(*options)
    if not any(wanted):
        rows, missing = schedules.row_results(head, labels, objective, chunk), factor
    else:
        rows, missing = schedules.token_chunks(head, labels, objective, chunk, gradients, factor)
    loss = rows.losses.sum() * factor[0]
    # A copy, because an op returns none of its inputs.
    return loss, rows.cross_entropies.sum(), *_without_none(gradients, hidden), missing.clone()


@sums.register_fake
def _(hidden, weight, bias, labels, compute_dtype, chunk, wanted, *rest):
    gradients = parts.empty_gradients(hidden, weight, bias, wanted, chunk, compute_dtype)
    loss, cross_entropy, missing = (hidden.new_empty(shape, dtype=torch.float32) for shape in ((), (), (1,)))
    return loss, cross_entropy, *_without_none(gradients, hidden), missing


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
    refuse_second_backward(ctx)
    *gradients, missing = ctx.saved_tensors
    scaled = (
        scaling.scale(gradient, missing * dloss, dtype) if is_wanted else None
        for gradient, dtype, is_wanted in zip(gradients, ctx.dtypes, ctx.wanted, strict=True)
    )
    return *scaled, *NO_GRADIENTS


def refuse_second_backward(ctx) -> None:
    if ctx.is_used:
        raise RuntimeError("linear_cross_entropy hands its gradients over at the first backward: call it again")
    ctx.is_used = True


sums.register_autograd(_scale_gradients, setup_context=_save_gradients)


@torch.library.custom_op(
    "logitless::linear_cross_entropy_per_token",
    mutates_args=(),
    schema=f"({SCHEMA}, str schedule) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def per_token(hidden, weight, bias, labels, compute_dtype, chunk, wanted, *rest):
    """Losses and plain cross-entropies, and for backward row_max and log_sum, all [N].

    With schedule "vocab" also dhidden, if wanted, for upstream gradients of 1.
    """
    *options, schedule = rest
    head, objective = cast(hidden, weight, bias, compute_dtype), Objective(*options)
    if schedule != "vocab" or not wanted[0]:
        return *schedules.row_results(head, labels, objective, chunk), hidden.new_empty(0)
    dhidden = _dhidden_buffer(hidden, weight, compute_dtype)
    if schedules.uses_epilogue(head, objective):
        block = geometry.block_of(chunk, len(hidden), *weight.shape, multiprocessors(hidden.device))
        rows = schedules.blocks_forward(head, labels, objective, block, dhidden)
    else:
        one = torch.ones(1, dtype=torch.float32, device=hidden.device)
        rows, _ = schedules.token_chunks(head, labels, objective, chunk, Gradients(dhidden), one)
    return *rows, dhidden


@per_token.register_fake
def _(hidden, weight, bias, labels, compute_dtype, chunk, wanted, *rest):
    vectors = [hidden.new_empty(hidden.shape[0], dtype=torch.float32) for _ in range(4)]
    makes_dhidden = rest[-1] == "vocab" and wanted[0]
    return *vectors, _dhidden_buffer(hidden, weight, compute_dtype) if makes_dhidden else hidden.new_empty(0)


def _dhidden_buffer(hidden: Tensor, weight: Tensor, compute_dtype: torch.dtype) -> Tensor:
    wanted = (True, False, False)
    return parts.empty_gradients(hidden, weight, None, wanted, hidden.shape[0], compute_dtype).hidden


@torch.library.custom_op(
    "logitless::linear_cross_entropy_per_token_backward",
    mutates_args=(),
    schema=f"(Tensor dlosses, Tensor row_max, Tensor log_sum, {SCHEMA}, str schedule) -> (Tensor, Tensor, Tensor)",
)
def _per_token_backward(dlosses, row_max, log_sum, hidden, weight, bias, labels, compute_dtype, chunk, wanted, *rest):
    """The gradients that forward did not make, for the upstream gradients `dlosses` [N], in the inputs' dtypes."""
    *options, schedule = rest
    gradients, size = _backward_buffers(hidden, weight, bias, compute_dtype, chunk, wanted, schedule)
    head, upstream = cast(hidden, weight, bias, compute_dtype), parts.Upstream(row_max, log_sum, dlosses)
    run = schedules.vocab_slabs if schedule == "vocab" else schedules.token_chunks_backward
    run(head, labels, Objective(*options), size, gradients, upstream)
    return _without_none(_to_input_dtypes(gradients, hidden, weight, bias), hidden)


@_per_token_backward.register_fake
def _(dlosses, row_max, log_sum, hidden, weight, bias, labels, compute_dtype, chunk, wanted, *rest):
    gradients, _ = _backward_buffers(hidden, weight, bias, compute_dtype, chunk, wanted, rest[-1])
    return _without_none(_to_input_dtypes(gradients, hidden, weight, bias), hidden)


def _backward_buffers(hidden, weight, bias, compute_dtype, chunk, wanted, schedule) -> tuple[Gradients, int]:
    """Buffers to sum in, and the size of the schedule's parts."""
    if schedule == "tokens":
        return parts.empty_gradients(hidden, weight, bias, wanted, chunk, compute_dtype), chunk
    slab = geometry.slab_classes(chunk, hidden.shape[0], *weight.shape, multiprocessors(hidden.device))
    # A slab's rows of dweight are one sum, as in a single chunk.
    wanted, n_tokens = (False, *wanted[1:]), hidden.shape[0]
    return parts.empty_gradients(hidden, weight, bias, wanted, n_tokens, compute_dtype), slab


def _save_inputs(ctx, inputs, output):
    ctx.save_for_backward(*output[2:], *inputs[:4])
    ctx.options, ctx.is_used = inputs[4:], False
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _compute_again(ctx, dlosses, *_):
    refuse_double_backward()
    if dlosses is None:
        return None, None, None, *NO_GRADIENTS
    _, _, wanted, ignore_index, *_, schedule = ctx.options
    if schedule == "vocab" and wanted[0]:
        refuse_second_backward(ctx)
    row_max, log_sum, dhidden, *inputs = ctx.saved_tensors
    dlosses = dlosses.contiguous()
    gradients = [None, None, None]
    if schedule == "tokens" or any(wanted[1:]):
        gradients = list(_per_token_backward(dlosses, row_max, log_sum, *inputs, *ctx.options))
    if schedule == "vocab" and wanted[0]:
        is_ignored = inputs[3] == ignore_index  # its gradient is 0, also where the upstream gradient is inf or NaN
        gradients[0] = scaling.scale(dhidden, dlosses.masked_fill(is_ignored, 0.0), inputs[0].dtype)
    return *(g if is_wanted else None for g, is_wanted in zip(gradients, wanted, strict=True)), *NO_GRADIENTS


per_token.register_autograd(_compute_again, setup_context=_save_inputs)


@torch.library.custom_op(
    "logitless::linear_evaluation",
    mutates_args=(),
    schema=f"({SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def evaluate(hidden, weight, bias, labels, compute_dtype, chunk, wanted, *options):
    """Sums over the kept tokens: loss, cross-entropy, lse, right guesses, entropy; each [] fp32."""
    objective = Objective(*options)
    entropies = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
    head = cast(hidden, weight, bias, compute_dtype)
    rows = schedules.row_results(head, labels, objective, chunk, entropies)
    kept = labels != objective.ignore_index
    lse = torch.where(rows.losses.isnan(), rows.losses, rows.row_max + rows.log_sum).masked_fill(~kept, 0.0)
    # The label's logit is the largest where the cross-entropy is no more than the lse above the largest.
    correct = (rows.cross_entropies <= rows.log_sum) & kept
    vectors = rows.losses, rows.cross_entropies, lse, correct.float(), entropies
    return tuple(vector.sum() for vector in vectors)


@evaluate.register_fake
def _(hidden, *_):
    return tuple(hidden.new_empty((), dtype=torch.float32) for _ in range(5))


def _refuse_vmap(info, in_dims, *arguments):
    raise NotImplementedError("linear_cross_entropy has no vmap: flatten the batch into the tokens")


sums.register_vmap(_refuse_vmap)
per_token.register_vmap(_refuse_vmap)


def cast(hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Head:
    return Head(hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype).contiguous())


def _to_input_dtypes(gradients: Gradients, *inputs: Tensor | None) -> Gradients:
    return Gradients(*(g if g is None else g.to(tensor.dtype) for g, tensor in zip(gradients, inputs, strict=True)))


def _without_none(gradients: Gradients, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """An op returns tensors only: an empty one stands for None."""
    return tuple(hidden.new_empty(0) if gradient is None else gradient for gradient in gradients)
