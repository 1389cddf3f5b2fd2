"""The loops behind `linear_cross_entropy`: token chunks and vocabulary slabs. Only a part of the logits ever exists.

**Token chunks**, 3 GEMMs. Per chunk of C rows: logits into one preallocated [C, V] buffer, dlogits over them, the
chunk's rows of dhidden by one GEMM, and its share of dweight added in fp32 by another. Where the upstream gradients
come only in backward (`token_chunks_backward`), the logits are made twice: 4 GEMMs.

**Vocabulary slabs**, 4 GEMMs and no sum of [V, D]. Forward makes losses and dhidden: from token chunks, or from blocks
of tokens and classes (`blocks_forward`). Backward goes over slabs of classes (`vocab_slabs`): logits of all tokens made
again, dlogits from the lse that forward kept, and the slab's rows of dweight by one GEMM over all tokens, rounded once.

Both have two ways to dlogits. The plain one: a cuBLAS GEMM, then the kernel of `row_kernels.py` over its result. The
other, where `gemm.py` takes the head and the objective is plain (`uses_epilogue`): no pass over the logits but the
GEMM's own; its dlogits lack a factor for each row (`row_sums.py`), which goes into the operands of the other GEMMs.

On a GPU nothing but a vector for dbias is allocated per part; what a schedule needs in all, `plan.py` counts. fp16
inputs need fp32 buffers for all their gradients. Under autocast, fp32 inputs are copied to bf16 for as long as a loop
runs.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from . import gemm, geometry, parts, row_anchors, row_kernels, row_sums, scaling
from .parts import Gradients, Head, Upstream
from .reference import Objective, Rows


def uses_epilogue(head: Head, objective: Objective) -> bool:
    """Whether dlogits come out of the logits' own GEMM."""
    return objective.label_smoothing == 0 and objective.softcap is None and gemm.takes(head)


def row_results(head: Head, labels: Tensor, objective: Objective, chunk: int, entropies: Tensor | None = None) -> Rows:
    """Row results without gradients; `entropies` [N] fp32 are written if given."""
    rows = Rows.empty(labels.shape[0], labels.device)
    if not uses_epilogue(head, objective):
        for part, logits in _logits_of_chunks(head, chunk):
            part_of_entropies = None if entropies is None else entropies[part]
            row_kernels.forward_rows(logits, labels[part], objective, rows.slice(part), part_of_entropies)
        return rows
    chunk *= geometry.STATISTICS_ROWS
    vocab, halves = len(head.weight), 2 * geometry.class_tiles(len(head.weight))
    label_logits, _ = row_anchors.anchors(*head, labels, objective)
    buffer = parts.float_buffer(head, 3 * halves * min(chunk, len(labels)))
    for part in parts.slices(len(labels), chunk):
        partials = parts.view(buffer, halves, 3, part.stop - part.start)
        gemm.statistics(*head.part(part), labels[part], partials=partials)
        row_sums.merge_statistics(
            partials,
            labels[part],
            objective,
            vocab,
            label_logits=label_logits[part],
            rows=rows.slice(part),
            entropies=None if entropies is None else entropies[part],
        )
    return rows


def token_chunks(
    head: Head, labels: Tensor, objective: Objective, chunk: int, gradients: Gradients, factor: Tensor
) -> tuple[Rows, Tensor]:
    """Row results; the gradients of the summed loss times `factor` [1] fp32 go into the buffers `gradients`.

    The second result is what they still lack of it, [1] fp32: 1 with the epilogue, else all of `factor`.
    """
    if uses_epilogue(head, objective):
        return _epilogue_token_chunks(head, labels, objective, chunk, gradients, factor), torch.ones_like(factor)
    rows = Rows.empty(len(labels), labels.device)
    ones = head.hidden.new_ones(min(chunk, len(labels)))
    for part, logits in _logits_of_chunks(head, chunk):
        row_kernels.forward_backward_rows_(logits, labels[part], objective, rows.slice(part))
        parts.write_dhidden(head, gradients, part, logits)
        parts.add_dweight(gradients, part, logits, head.hidden[part], ones[: len(logits)])
    return rows, factor


def _epilogue_token_chunks(
    head: Head, labels: Tensor, objective: Objective, chunk: int, gradients: Gradients, factor: Tensor
) -> Rows:
    (n_tokens, width), vocab = head.hidden.shape, len(head.weight)
    rows = Rows.empty(n_tokens, labels.device)
    label_logits, anchors = row_anchors.anchors(*head, labels, objective)
    chunk = min(chunk, n_tokens)
    buffer, tiles = parts.logits_buffer(head, chunk, vocab), geometry.class_tiles(vocab)
    block = geometry.dhidden_rows(chunk, width, gemm.multiprocessors(head.hidden.device))
    has_products = gradients.hidden is not None and gradients.hidden.dtype != torch.float32
    # Sums of tiles, and after these products for dhidden.
    scratch = parts.float_buffer(head, max(tiles * chunk, has_products * block * width))
    row_scales = parts.float_buffer(head, chunk)
    scaled_buffer = None if gradients.weight is None else head.hidden.new_empty(chunk, width)
    for part in parts.slices(n_tokens, chunk):
        own, n_rows = head.part(part), part.stop - part.start
        exponentials, sums, scales = buffer[:n_rows], parts.view(scratch, tiles, n_rows), row_scales[:n_rows]
        scaled_hidden = None if scaled_buffer is None else scaled_buffer[:n_rows]
        gemm.exponentials(*own, labels[part], anchors=anchors[part], out=exponentials, sums=sums)
        vectors = {"label_logits": label_logits[part], "anchors": anchors[part], "factor": factor}
        outputs = {"rows": rows.slice(part), "row_scales": scales, "scaled_hidden": scaled_hidden}
        row_sums.finish_rows(exponentials, sums, own, labels[part], objective, **vectors, **outputs)
        if gradients.hidden is not None:
            _write_scaled_dhidden(gradients.hidden[part], exponentials, head.weight, scales, scratch, block)
        parts.add_dweight(gradients, part, exponentials, scaled_hidden, scales)
    return rows


def _write_scaled_dhidden(
    dhidden: Tensor, exponentials: Tensor, weight: Tensor, row_scales: Tensor, scratch: Tensor, block: int
) -> None:
    """row_scales * (exponentials @ weight), by way of fp32 products, `block` rows at a time: rounded once."""
    for rows in parts.slices(len(dhidden), block):
        own = dhidden[rows]
        products = own if own.dtype == torch.float32 else parts.view(scratch, *own.shape)
        parts.multiply_classes(exponentials[rows], weight, out=products)
        scaling.scale_into(own, products, row_scales[rows])


def token_chunks_backward(
    head: Head, labels: Tensor, objective: Objective, chunk: int, gradients: Gradients, upstream: Upstream
) -> None:
    """Fills `gradients`: the logits are computed again, chunk by chunk."""
    dlogits_of = _Dlogits(head, labels, objective, upstream, min(chunk, len(labels)), len(head.weight))
    ones = head.hidden.new_ones(min(chunk, len(labels)))
    for part in parts.slices(len(labels), chunk):
        dlogits = dlogits_of(part, slice(0, len(head.weight)))
        parts.write_dhidden(head, gradients, part, dlogits)
        parts.add_dweight(gradients, part, dlogits, head.hidden[part], ones[: len(dlogits)])


def blocks_forward(head: Head, labels: Tensor, objective: Objective, block: tuple[int, int], dhidden: Tensor) -> Rows:
    """Row results and `dhidden` [N, D], over blocks of tokens and classes; for a head that uses the epilogue."""
    n_tokens, vocab = len(labels), len(head.weight)
    n_rows, n_classes = min(block[0], n_tokens), min(block[1], vocab)
    rows = Rows.empty(n_tokens, labels.device)
    label_logits, anchors = row_anchors.anchors(*head, labels, objective)
    buffer = parts.logits_buffer(head, n_rows, n_classes)
    tiles = geometry.class_tiles(vocab)
    sums_buffer = parts.float_buffer(head, tiles * n_rows)
    products_buffer = parts.float_buffer(head, n_rows * head.hidden.shape[1])
    for part in parts.slices(n_tokens, n_rows):
        n_own = len(labels[part])
        sums = parts.view(sums_buffer, tiles, n_own)
        products = parts.view(products_buffer, n_own, head.hidden.shape[1])
        for classes in parts.slices(vocab, n_classes):
            own, first_tile = head.part(part, classes), classes.start // geometry.TILE_CLASSES
            exponentials = buffer[:n_own, : len(own.weight)]
            gemm.exponentials(
                *own,
                labels[part],
                anchors=anchors[part],
                out=exponentials,
                sums=sums[first_tile : first_tile + geometry.class_tiles(len(own.weight))],
                first_class=classes.start,
            )
            parts.multiply_classes(exponentials, own.weight, out=products, add=classes.start > 0)
        vectors = {"label_logits": label_logits[part], "anchors": anchors[part]}
        own = head.part(part)
        row_sums.finish_dhidden(
            products, dhidden[part], sums, own, labels[part], objective, **vectors, rows=rows.slice(part)
        )
    return rows


def vocab_slabs(
    head: Head, labels: Tensor, objective: Objective, slab: int, gradients: Gradients, upstream: Upstream
) -> None:
    """Fills dweight and dbias: the logits are computed again, `slab` classes at a time."""
    vocab, ones = len(head.weight), head.hidden.new_ones(1, len(labels))
    dlogits_of = _Dlogits(head, labels, objective, upstream, len(labels), min(slab, vocab))
    for classes in parts.slices(vocab, slab):
        dlogits = dlogits_of(slice(0, len(labels)), classes)
        if gradients.weight is not None:
            parts.matmul(dlogits.t(), head.hidden, out=gradients.weight[classes])
        if gradients.bias is not None:
            parts.matmul(ones, dlogits, out=gradients.bias[None, classes])


class _Dlogits:
    """Makes dlogits for given upstream gradients, of any tokens and classes, always in the same buffer."""

    def __init__(
        self, head: Head, labels: Tensor, objective: Objective, upstream: Upstream, n_rows: int, n_classes: int
    ):
        self.head, self.labels, self.objective, self.upstream = head, labels, objective, upstream
        self.buffer = parts.logits_buffer(head, n_rows, n_classes)
        self.gradient_rows = None
        if uses_epilogue(head, objective):
            self.gradient_rows = row_anchors.gradient_rows(*head, labels, objective, **upstream._asdict())

    def __call__(self, tokens: slice, classes: slice) -> Tensor:
        part, labels = self.head.part(tokens, classes), self.labels[tokens]
        dlogits = self.buffer[: len(labels), : len(part.weight)]
        if self.gradient_rows is not None:
            rows = {name: vector[tokens] for name, vector in self.gradient_rows.items()}
            gemm.gradients(*part, labels, **rows, out=dlogits, first_class=classes.start)
        else:
            parts.write_logits(part, dlogits)
            vectors = self.upstream.part(tokens)._asdict()
            place = {"first_class": classes.start, "vocab": len(self.head.weight)}
            row_kernels.backward_rows(dlogits, labels, self.objective, **vectors, dlogits=dlogits, **place)
        return dlogits


def _logits_of_chunks(head: Head, chunk: int) -> Iterator[tuple[slice, Tensor]]:
    """Yields each slice of tokens and its logits [<= chunk, V], always in the same buffer."""
    buffer = parts.logits_buffer(head, min(chunk, len(head.hidden)), len(head.weight))
    for part in parts.slices(len(head.hidden), chunk):
        own = head.part(part)
        logits = buffer[: len(own.hidden)]
        parts.write_logits(own, logits)
        yield part, logits
