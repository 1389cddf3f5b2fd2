"""The loop behind `linear_cross_entropy`: token chunks, so that only `chunk` rows of logits are alive at once.

Per chunk of C rows: logits into one preallocated [C, V] buffer, dlogits over them, the chunk's rows of dhidden by one
GEMM, and its share of dweight added in fp32 by another. Three GEMMs in all, as without chunks.

Peak bytes with bf16 compute beyond the inputs: 2CV for the chunk, 4VD for dweight in fp32 (the returned gradient
itself when the weight is fp32), 2ND or 4ND for dhidden. A bf16 weight with more than one chunk needs the fp32
accumulator beside the returned dweight, because a bf16 sum loses small contributions (its error grows with the number
of chunks); the chunk buffer is freed before that cast. Under autocast, fp32 inputs are copied to bf16 for as long as
the loop runs: 2VD + 2ND.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from . import cross_entropy
from .reference import Objective, Rows

# An odd V is six times slower in cuBLAS (50257 against 50304, H200). So rows of logits start at a multiple of 64
# elements, and the last V % 8 classes go through GEMMs of their own.
ROW_ALIGNMENT = 64
GEMM_ALIGNMENT = 8


class Head(NamedTuple):
    """hidden [N, D], weight [V, D] and bias [V] or None, all in the dtype to compute in."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None


class Gradients(NamedTuple):
    """dhidden [N, D], dweight [V, D] and dbias [V]; None where not asked for."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


class GradientDtypes(NamedTuple):
    """Which gradients to make, and in which dtypes; None where none is asked for."""

    hidden: torch.dtype | None = None
    weight: torch.dtype | None = None
    bias: torch.dtype | None = None


def token_chunks(
    head: Head, labels: Tensor, objective: Objective, chunk: int, dtypes: GradientDtypes
) -> tuple[Rows, Gradients]:
    """Row results, and the gradients of the summed loss that `dtypes` asks for."""
    rows = Rows.empty(labels.shape[0], labels.device)
    kernel = cross_entropy.forward_rows if dtypes == GradientDtypes() else cross_entropy.forward_backward_rows_
    accumulator = _Accumulator(head, chunk, dtypes)
    for part, logits in _logits_of_chunks(head, chunk):
        kernel(logits, labels[part], objective, rows.slice(part))
        accumulator.add(part, logits)
    del logits  # the chunk's buffer goes before the accumulator's last cast
    return rows, accumulator.finish()


def token_chunks_backward(
    head: Head,
    labels: Tensor,
    objective: Objective,
    chunk: int,
    dtypes: GradientDtypes,
    row_max: Tensor,
    log_sum: Tensor,
    dlosses: Tensor,
) -> Gradients:
    """The gradients for the upstream gradients `dlosses` [N]: the logits are computed again, chunk by chunk."""
    accumulator = _Accumulator(head, chunk, dtypes)
    for part, logits in _logits_of_chunks(head, chunk):
        vectors = (vector[part] for vector in (row_max, log_sum, dlosses))
        cross_entropy.backward_rows(logits, labels[part], objective, *vectors, logits)
        accumulator.add(part, logits)
    del logits  # as above
    return accumulator.finish()


def _logits_of_chunks(head: Head, chunk: int) -> Iterator[tuple[slice, Tensor]]:
    """Yields each slice of tokens and its logits [<= chunk, V], always in the same buffer."""
    n_tokens, vocab = head.hidden.shape[0], head.weight.shape[0]
    padded = -(-vocab // ROW_ALIGNMENT) * ROW_ALIGNMENT
    buffer = head.weight.new_empty(min(chunk, n_tokens), padded)[:, :vocab]
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


def _aligned_parts(vocab: int) -> list[slice]:
    """All classes, as a slice whose length suits the GEMM and a slice with the few that are left, if any."""
    aligned = vocab // GEMM_ALIGNMENT * GEMM_ALIGNMENT
    return [part for part in (slice(0, aligned), slice(aligned, vocab)) if part.start < part.stop]


class _Accumulator:
    """Collects the gradients that are wanted from the dlogits of one chunk after another."""

    def __init__(self, head: Head, chunk: int, dtypes: GradientDtypes):
        self.head, self.dtypes = head, dtypes
        self.dhidden = self.dweight = self.dbias = None
        if dtypes.hidden:
            self.dhidden = torch.empty_like(head.hidden, dtype=dtypes.hidden)
        if dtypes.weight:
            one_chunk = head.hidden.shape[0] <= chunk
            self.dweight = torch.empty_like(head.weight, dtype=dtypes.weight if one_chunk else torch.float32)
        if dtypes.bias:
            self.dbias = torch.zeros_like(head.bias, dtype=torch.float32)

    def add(self, part: slice, dlogits: Tensor) -> None:
        if self.dhidden is not None:
            for classes in _aligned_parts(dlogits.shape[1]):
                _matmul(dlogits[:, classes], self.head.weight[classes], out=self.dhidden[part], add=classes.start > 0)
        if self.dweight is not None:
            _matmul(dlogits.t(), self.head.hidden[part], out=self.dweight, add=part.start > 0)
        if self.dbias is not None:
            self.dbias += dlogits.sum(dim=0, dtype=torch.float32)

    def finish(self) -> Gradients:
        gradients = self.dhidden, self.dweight, self.dbias
        return Gradients(*(g if g is None else g.to(dtype) for g, dtype in zip(gradients, self.dtypes, strict=True)))


def _matmul(a: Tensor, b: Tensor, *, out: Tensor, add: bool = False) -> None:
    """`out` = a @ b, plus `out` if `add`; summed in fp32 whatever the dtypes."""
    options = {} if out.dtype == a.dtype else {"out_dtype": out.dtype}
    if options and not a.is_cuda:  # CPU tensors have no out_dtype
        a, b, options = a.to(out.dtype), b.to(out.dtype), {}
    if add:
        torch.addmm(out, a, b, out=out, **options)
    else:
        torch.mm(a, b, out=out, **options)
