"""What the loops of `schedules.py` share: their types, the cutting into parts, buffers, and GEMMs of a part."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import geometry

GEMM_ALIGNMENT = 8  # the last V % 8 classes go through GEMMs of their own


class Head(NamedTuple):
    """hidden [N, D], weight [V, D] and bias [V] or None, all in the dtype to compute in."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None

    def part(self, tokens: slice, classes: slice = slice(None)) -> "Head":
        bias = None if self.bias is None else self.bias[classes]
        return Head(self.hidden[tokens], self.weight[classes], bias)


class Gradients(NamedTuple):
    """dhidden [N, D], dweight [V, D] and dbias [V]; None where not asked for."""

    hidden: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None


class Upstream(NamedTuple):
    """What backward needs of each row, [N] fp32: max and log-sum as in Rows, and the upstream gradients."""

    row_max: Tensor
    log_sum: Tensor
    dlosses: Tensor

    def part(self, tokens: slice) -> "Upstream":
        return Upstream(*(vector[tokens] for vector in self))


def empty_gradients(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    wanted: Sequence[bool],
    chunk: int,
    compute_dtype: torch.dtype,
) -> Gradients:
    """Buffers for the wanted gradients in the dtypes to sum in.

    That is fp32, or the dtype to compute in where it is also the input's, and where chunks add nothing to each other:
    dhidden, and dweight of a single chunk. fp16 is always summed in fp32: the sum over all tokens may pass its range
    where the mean, scaled in backward, does not.
    """

    def buffer(tensor: Tensor | None, is_wanted: bool, is_one_sum: bool) -> Tensor | None:
        if tensor is None or not is_wanted:
            return None
        keeps_dtype = is_one_sum and tensor.dtype == compute_dtype != torch.float16
        return tensor.new_empty(tensor.shape, dtype=tensor.dtype if keeps_dtype else torch.float32)

    one_chunk = hidden.shape[0] <= chunk
    return Gradients(*map(buffer, (hidden, weight, bias), wanted, (True, one_chunk, False)))


def slices(length: int, size: int) -> list[slice]:
    """Slices of at most `size`; of nothing, one that is empty, so that a loop over it makes gradients of zero."""
    return [slice(start, min(start + size, length)) for start in range(0, max(length, 1), size)]


def logits_buffer(head: Head, n_rows: int, n_classes: int) -> Tensor:
    return head.weight.new_empty(n_rows, geometry.padded(n_classes))[:, :n_classes]


def float_buffer(head: Head, size: int) -> Tensor:
    return head.weight.new_empty(size, dtype=torch.float32)


def view(buffer: Tensor, *shape: int) -> Tensor:
    return buffer[: math.prod(shape)].view(shape)


def write_logits(head: Head, out: Tensor) -> None:
    for classes in _aligned_parts(len(head.weight)):
        weight, part = head.weight[classes].t(), out[:, classes]
        if head.bias is None:
            torch.mm(head.hidden, weight, out=part)
        else:
            torch.addmm(head.bias[classes], head.hidden, weight, out=part)


def _aligned_parts(vocab: int) -> list[slice]:
    """All classes, as a slice whose length suits the GEMM and a slice with the few that are left, if any."""
    aligned = vocab // GEMM_ALIGNMENT * GEMM_ALIGNMENT
    return [part for part in (slice(0, aligned), slice(aligned, vocab)) if part.start < part.stop]


def write_dhidden(head: Head, gradients: Gradients, part: slice, dlogits: Tensor) -> None:
    if gradients.hidden is not None:
        multiply_classes(dlogits, head.weight, out=gradients.hidden[part])


def add_dweight(gradients: Gradients, part: slice, dlogits: Tensor, hidden: Tensor | None, row_scales: Tensor) -> None:
    """Adds a chunk: dweight from `hidden` [C, D], not read if no dweight is wanted; dbias by `row_scales` [C]."""
    if gradients.weight is not None:
        matmul(dlogits.t(), hidden, out=gradients.weight, add=part.start > 0)
    if gradients.bias is not None:
        matmul(row_scales.to(dlogits.dtype)[None], dlogits, out=gradients.bias[None], add=part.start > 0)


def multiply_classes(dlogits: Tensor, weight: Tensor, *, out: Tensor, add: bool = False) -> None:
    """`out` = dlogits @ weight, plus `out` if `add`."""
    for classes in _aligned_parts(dlogits.shape[1]):
        matmul(dlogits[:, classes], weight[classes], out=out, add=add or classes.start > 0)


def matmul(a: Tensor, b: Tensor, *, out: Tensor, add: bool = False) -> None:
    """`out` = a @ b, plus `out` if `add`: summed in fp32, then rounded to the dtype of `out`."""
    options = {} if out.dtype == a.dtype else {"out_dtype": out.dtype}
    if options and not a.is_cuda:  # CPU tensors have no out_dtype
        a, b, options = a.to(out.dtype), b.to(out.dtype), {}
    if add:
        torch.addmm(out, a, b, out=out, **options)
    else:
        torch.mm(a, b, out=out, **options)
