"""The loop behind `linear_cross_entropy`: token chunks, so that only `chunk` rows of logits are alive at once.

Per chunk of C rows: logits into one preallocated [C, V] buffer, dlogits over them, the chunk's rows of dhidden by one
GEMM, and its share of dweight added in fp32 by another. Three GEMMs in all, as without chunks (but for small ones, see
below); on a GPU nothing is allocated per chunk.

Peak bytes with bf16 compute beyond the inputs: 2CV for the chunk, 4VD for dweight in fp32 (the returned gradient
itself when the weight is fp32), 2ND or 4ND for dhidden. A bf16 weight with more than one chunk needs the fp32 buffer
beside the returned dweight, because a bf16 sum loses small contributions (its error grows with the number of chunks).
fp16 inputs need fp32 buffers for all their gradients. Under autocast, fp32 inputs are copied to bf16 for as long as the
loop runs: 2VD + 2ND.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import row_kernels
from .reference import Objective, Rows

# An odd V is six times slower in cuBLAS (50257 against 50304, H200). So rows of logits start at a multiple of 64
# elements, and the last V % 8 classes go through GEMMs of their own.
ROW_ALIGNMENT = 64
GEMM_ALIGNMENT = 8

# One chunk of 43008 x 50257 logits ended in an illegal memory access of cuBLAS (H200; not without the last class).
MAX_ELEMENTS = 2**31 - 1


class Head(NamedTuple):
    """hidden [N, D], weight [V, D] and bias [V] or None, all in the dtype to compute in."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None


class Gradients(NamedTuple):
    """dhidden [N, D], dweight [V, D] and dbias [V]; None where not asked for."""

    hidden: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None


def largest_chunk(vocab: int) -> int:
    """Rows of logits that may be alive at once."""
    return max(MAX_ELEMENTS // _padded(vocab), 1)


def empty_gradients(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: Sequence[bool], chunk: int
) -> Gradients:
    """Buffers for the wanted gradients in the dtypes to sum in.

    That is fp32, or the dtype of the input itself where chunks add nothing to each other: dhidden, and dweight of a
    single chunk. fp16 is always summed in fp32: the sum over all tokens may pass its range where the mean, scaled in
    backward, does not.
    """

    def buffer(tensor: Tensor | None, is_wanted: bool, is_one_sum: bool) -> Tensor | None:
        if tensor is None or not is_wanted:
            return None
        keeps_dtype = is_one_sum and tensor.dtype != torch.float16
        return tensor.new_empty(tensor.shape, dtype=tensor.dtype if keeps_dtype else torch.float32)

    one_chunk = hidden.shape[0] <= chunk
    return Gradients(*map(buffer, (hidden, weight, bias), wanted, (True, one_chunk, False)))


def token_chunks(head: Head, labels: Tensor, objective: Objective, chunk: int, gradients: Gradients) -> Rows:
    """Row results; the gradients of the summed loss go into the buffers `gradients`."""
    rows = Rows.empty(labels.shape[0], labels.device)
    kernel = row_kernels.forward_rows if gradients == Gradients() else row_kernels.forward_backward_rows_
    accumulator = _Accumulator(head, chunk, gradients)
    for part, logits in _logits_of_chunks(head, chunk):
        kernel(logits, labels[part], objective, rows.slice(part))
        accumulator.add(part, logits)
    return rows


def token_chunks_backward(
    head: Head,
    labels: Tensor,
    objective: Objective,
    chunk: int,
    gradients: Gradients,
    *,
    row_max: Tensor,
    log_sum: Tensor,
    dlosses: Tensor,
) -> None:
    """Fills `gradients` for the upstream gradients `dlosses` [N]: the logits are computed again, chunk by chunk."""
    accumulator = _Accumulator(head, chunk, gradients)
    for part, logits in _logits_of_chunks(head, chunk):
        vectors = {"row_max": row_max[part], "log_sum": log_sum[part], "dlosses": dlosses[part]}
        row_kernels.backward_rows(logits, labels[part], objective, **vectors, dlogits=logits)
        accumulator.add(part, logits)


def _logits_of_chunks(head: Head, chunk: int) -> Iterator[tuple[slice, Tensor]]:
    """Yields each slice of tokens and its logits [<= chunk, V], always in the same buffer."""
    n_tokens, vocab = head.hidden.shape[0], head.weight.shape[0]
    buffer = head.weight.new_empty(min(chunk, n_tokens), _padded(vocab))[:, :vocab]
    for start in range(0, max(n_tokens, 1), chunk):  # no tokens: one empty chunk, which makes the gradients zero
        part = slice(start, min(start + chunk, n_tokens))
        logits = buffer[: part.stop - start]
        for classes in _aligned_parts(vocab):
            weight, out = head.weight[classes].t(), logits[:, classes]
            if head.bias is None:
                torch.mm(head.hidden[part], weight, out=out)
            else:
                torch.addmm(head.bias[classes], head.hidden[part], weight, out=out)
        yield part, logits


def _padded(vocab: int) -> int:
    return -(-vocab // ROW_ALIGNMENT) * ROW_ALIGNMENT


def _aligned_parts(vocab: int) -> list[slice]:
    """All classes, as a slice whose length suits the GEMM and a slice with the few that are left, if any."""
    aligned = vocab // GEMM_ALIGNMENT * GEMM_ALIGNMENT
    return [part for part in (slice(0, aligned), slice(aligned, vocab)) if part.start < part.stop]


class _Accumulator:
    """Collects the gradients that are wanted from the dlogits of one chunk after another."""

    def __init__(self, head: Head, chunk: int, gradients: Gradients):
        self.head, self.gradients = head, gradients
        self.ones = head.hidden.new_ones(1, 0 if gradients.bias is None else min(chunk, head.hidden.shape[0]))

    def add(self, part: slice, dlogits: Tensor) -> None:
        dhidden, dweight, dbias = self.gradients
        if dhidden is not None:
            for classes in _aligned_parts(dlogits.shape[1]):
                _matmul(dlogits[:, classes], self.head.weight[classes], out=dhidden[part], add=classes.start > 0)
        if dweight is not None:
            _matmul(dlogits.t(), self.head.hidden[part], out=dweight, add=part.start > 0)
        if dbias is not None:
            _matmul(self.ones[:, : dlogits.shape[0]], dlogits, out=dbias[None], add=part.start > 0)


def _matmul(a: Tensor, b: Tensor, *, out: Tensor, add: bool = False) -> None:
    """`out` = a @ b, plus `out` if `add`: summed in fp32, then rounded to the dtype of `out`."""
    options = {} if out.dtype == a.dtype else {"out_dtype": out.dtype}
    if options and not a.is_cuda:  # CPU tensors have no out_dtype
        a, b, options = a.to(out.dtype), b.to(out.dtype), {}
    if add:
        torch.addmm(out, a, b, out=out, **options)
    else:
        torch.mm(a, b, out=out, **options)
