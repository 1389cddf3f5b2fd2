"""Cross-entropy on logits; the gradient overwrites the logits.

Forward reads the logits (`forward_rows` in `row_kernels.py`) and keeps them with two numbers a row; backward writes the
gradient, with the upstream gradient folded in, over them where that is safe.

A compiler cannot follow what may be overwritten, and would copy the logits in backward. So under torch.compile forward
makes the gradient, in a copy that the compiler does away with if nothing else needs the logits, and backward only
scales it.
"""

import torch
from torch import Tensor

from . import reference
from .reference import OBJECTIVE_SCHEMA, LossSums, Objective, Rows
from .row_kernels import backward_rows, forward_backward_rows_, forward_rows


def refuse_double_backward() -> None:
    """Raises RuntimeError in a backward with create_graph=True, whose gradients could not be differentiated rightly.

    `once_differentiable` would let pass the common case, where the upstream gradient is a constant.
    """
    if torch.is_grad_enabled():
        raise RuntimeError("cross-entropy has no second derivative here: call backward without create_graph=True")


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, objective, may_overwrite):
        rows = Rows.empty(logits.shape[0], logits.device)
        forward_rows(logits, labels, objective, rows)
        ctx.save_for_backward(logits, labels, rows.row_max, rows.log_sum)
        ctx.objective = objective
        ctx.may_overwrite = may_overwrite
        ctx.mark_non_differentiable(rows.cross_entropies, rows.log_sum)
        return rows.losses, rows.cross_entropies, rows.log_sum

    @staticmethod
    def backward(ctx, dlosses, *_):
        refuse_double_backward()
        logits, labels, row_max, log_sum = ctx.saved_tensors  # raises if the logits were overwritten since forward
        dlogits = logits if ctx.may_overwrite else torch.empty_like(logits, memory_format=torch.contiguous_format)
        vectors = {"row_max": row_max, "log_sum": log_sum, "dlosses": dlosses.contiguous()}
        backward_rows(logits, labels, ctx.objective, **vectors, dlogits=dlogits)
        return dlogits.detach(), None, None, None  # without the graph that made the logits


def _may_overwrite(logits: Tensor) -> bool:
    """Whether the gradient may take the logits' memory.

    Not that of leaves, of views of leaves, or of elements that share memory. Nor where autograd would not notice: under
    saved-tensor hooks (activation checkpointing, offloading), and for logits that compiled code returned, which its own
    backward may have saved.
    """
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        return False
    owner = logits if logits._base is None else logits._base
    reach = 0  # of the inner dimensions, in elements
    for stride, size in sorted(zip(logits.stride(), logits.shape, strict=True)):
        if size > 1 and stride <= reach:
            return False
        reach += stride * (size - 1)
    return not owner.is_leaf and type(owner.grad_fn).__name__ != "CompiledFunctionBackward"


@torch.library.custom_op(
    "logitless::cross_entropy",
    mutates_args=(),
    schema=f"(Tensor logits, Tensor labels, {OBJECTIVE_SCHEMA}) -> (Tensor, Tensor, Tensor)",
)
def _losses(logits, labels, *options):
    """Losses, plain cross-entropies and log_sum of Rows, all [N] fp32, without a gradient."""
    rows = Rows.empty(logits.shape[0], logits.device)
    forward_rows(logits, labels, Objective(*options), rows)
    return rows.losses, rows.cross_entropies, rows.log_sum


@torch.library.custom_op(
    "logitless::cross_entropy_",
    mutates_args=("logits",),
    schema=f"(Tensor(a0!) logits, Tensor labels, {OBJECTIVE_SCHEMA}) -> (Tensor, Tensor, Tensor)",
)
def _losses_(logits, labels, *options):
    """Like `_losses`, with the gradient of the summed loss written over the logits."""
    rows = Rows.empty(logits.shape[0], logits.device)
    forward_backward_rows_(logits, labels, Objective(*options), rows)
    return rows.losses, rows.cross_entropies, rows.log_sum


@_losses.register_fake
@_losses_.register_fake
def _(logits, labels, *options):
    rows = Rows.empty(logits.shape[0], logits.device)
    return rows.losses, rows.cross_entropies, rows.log_sum


class _CompiledCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, *options):
        dlogits = logits.clone()
        losses, cross_entropies, log_sum = _losses_(dlogits, labels, *options)
        ctx.save_for_backward(dlogits)
        ctx.mark_non_differentiable(cross_entropies, log_sum)
        return losses, cross_entropies, log_sum

    @staticmethod
    def backward(ctx, dlosses, *_):
        (dlogits,) = ctx.saved_tensors
        return (dlogits * dlosses[:, None]).to(dlogits.dtype), None, None, None, None, None


def cross_entropy_per_row(logits: Tensor, labels: Tensor, objective: Objective) -> tuple[Tensor, Tensor, Tensor]:
    """Losses with a gradient, plain cross-entropies and log_sum of Rows without, all [N] fp32 in nats.

    The first two are 0 for ignored rows. Arguments, errors and what is destroyed are those of `cross_entropy`.
    """
    if logits.dim() != 2:
        raise ValueError(
            f"logits must be [N, V], got {list(logits.shape)}: flatten [B, T, V] with .flatten(0, 1), and move the "
            "classes of [B, V, T] to the end first"
        )
    if logits.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"logits must be float32, bfloat16 or float16, got {logits.dtype}")
    if logits.shape[1] == 0:
        raise ValueError(f"logits {list(logits.shape)} have no classes")
    if labels.device != logits.device:
        raise ValueError(f"logits are on {logits.device}, labels on {labels.device}")
    reference.check_labels(labels, logits.shape[0])
    labels = labels.long().contiguous()  # int64, because an ignore_index may lie outside of int32
    if torch.compiler.is_compiling():
        needs_gradient = logits.requires_grad and torch.is_grad_enabled()
        return (_CompiledCrossEntropy.apply if needs_gradient else _losses)(logits, labels, *objective.arguments())
    return _CrossEntropy.apply(logits, labels, objective, _may_overwrite(logits))


def cross_entropy_sums(logits: Tensor, labels: Tensor, objective: Objective) -> LossSums:
    """`cross_entropy_per_row` summed: the form whose mean may span micro-batches and ranks."""
    losses, cross_entropies, log_sum = cross_entropy_per_row(logits, labels, objective)
    correct = None
    if not torch.is_grad_enabled():
        # log_sum is the cross-entropy of a label whose logit is the largest.
        correct = ((cross_entropies <= log_sum) & (labels.long() != objective.ignore_index)).sum(dtype=torch.float32)
    return LossSums(losses.sum(), cross_entropies.sum(), correct)


def cross_entropy(
    input: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """Cross-entropy of `input` against `target`; backward overwrites `input` with its gradient.

    Forward leaves `input` alone, so metrics may be taken from it until backward. Backward destroys it, and with it that
    part of a tensor it is a view of. Autograd then raises RuntimeError if anything else has saved that tensor or a view
    of it: a softmax or tanh that made `input`, a second loss on it, or a loss on another part of it. The gradient takes
    a buffer of its own if `input` is a leaf, a view of a leaf, or has rows that share memory, if compiled code returned
    it, or if forward ran under saved-tensor hooks, such as those of activation checkpointing. Inside torch.compile
    forward makes the gradient, `input` is never overwritten, and a second backward is right.

    Autograd checks neither what was saved under hooks nor what compiled autograd reads. So if the operations that made
    `input` run under saved-tensor hooks, let the loss run under them too, and give compiled autograd a compiled loss.

    Args:
        input: [N, V] logits, fp32, bf16 or fp16, any strides.
        target: [N] int32 or int64 in [0, V), or `ignore_index`.
        ignore_index: rows with this label give 0 and do not count in the mean.
        reduction: "mean" over the kept rows (0 if there are none), "sum", or "none".
        label_smoothing: eps in [0, 1).
        z_loss: factor of lse^2, >= 0.
        softcap: c of c * tanh(input / c), or None.

    Returns:
        [] fp32 in nats, or [N] for reduction "none".

    Raises:
        ValueError: a shape, dtype or option that is not supported.
        IndexError: a label outside [0, V) on a CPU; on a GPU its row is NaN with gradient 0.
        RuntimeError: a second backward after `input` was overwritten, or a double backward (which compiled code with
            backend="eager" does not notice).
    """
    reference.check_reduction(reduction)
    objective = Objective(ignore_index, label_smoothing, z_loss, softcap)
    losses, *_ = cross_entropy_per_row(input, target, objective)
    return reference.reduce(losses, target.long(), ignore_index, reduction)
