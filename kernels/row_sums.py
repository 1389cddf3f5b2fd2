"""Row results from what the GEMM of `gemm.py` leaves for every tile.

With exponentials E_v = exp(z_v - k - SHIFT), anchored at the label's logit k (`row_anchors.py`), what lies more than 43
nats below the label vanishes, and is nothing beside the label's own t = exp(-SHIFT). With r the sum of the others, and
l = r + t:

    cross_entropy = ln(1 + r / t)      p_y = t / l      1 - p_y = r / l, without cancellation
    dloss/dz_v    = E_v * f / l        f = 1 + 2 * lam * lse (1 without z-loss)
    dloss/dz_y    = -r / l + 2 * lam * lse * p_y

So a row of dlogits is `row_scale` * E, with a row scale f / l and, in the label's place, E_y = dloss/dz_y / row_scale.
E_y is rounded to bf16, and the row scale then corrected so that the label's gradient, which is no smaller than the
norm of the others, stays exact. dhidden = row_scale * (E @ weight) and dweight = E^T @ (row_scale * hidden): nobody
multiplies [N, V] numbers. Where a row of E is never whole (`finish_dhidden`), the label's part is added apart.

A label 104 nats or more below the maximum makes an l beyond LARGEST, from which the products would leave fp32. Such a
row is computed again, anchored at its maximum, by its own program: right, and slow.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import gemm
from .exact_rows import logits_tile, maximum_and_sum, weight_tile
from .reference import Objective, Rows

LARGEST = tl.constexpr(1e26)  # of l: row_scale * hidden and E @ weight keep their range for hidden from 1e-6 to 1e6
SMALLEST_FACTOR = tl.constexpr(1e-6)  # of |f|, for the z-loss that cancels the gradient of all others exactly
MERGE_ROWS = 8  # neighbours in memory: 8 fp32 numbers are what one access brings
LOG2E = gemm.LOG2E
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def log1p(x):
    """ln(1 + x) for x >= 0, to a relative error of 1e-6; the hardware's logarithm has only an absolute one near 1."""
    w = x / (2 + x)
    square = w * w
    series = 2 * w * (1 + square * (1 / 3 + square * (1 / 5 + square * (1 / 7 + square * (1 / 9)))))
    return tl.where(x < 0.25, series, tl.log(1 + x))


@triton.jit
def _finish_rows_kernel(
    exponentials_ptr,  # [N, V] in and out: E, which gets its label's entry
    sums_ptr,  # [TILES, N] fp32 in: of E before rounding
    hidden_ptr,  # [N, D] in
    weight_ptr,  # [V, D] in, for rows to compute again
    bias_ptr,  # [V] in, or None
    labels_ptr,  # [N] in
    label_logits_ptr,  # [N] fp32 in
    anchors_ptr,  # [N] fp32 in
    factor_ptr,  # [1] fp32 in: what the gradients are multiplied with
    losses_ptr,  # [N] fp32 out
    cross_entropies_ptr,  # [N] fp32 out
    row_max_ptr,  # [N] fp32 out: the label's logit, or the maximum of a row computed again
    log_sum_ptr,  # [N] fp32 out: lse above it
    row_scales_ptr,  # [N] fp32 out
    scaled_hidden_ptr,  # [N, D] out: row_scale * hidden, or None
    exponentials_stride,
    hidden_stride,
    weight_stride,
    N,
    V,
    D,
    tiles,
    ignore_index,
    z_loss,
    TILES: tl.constexpr,
    BLOCK_ROW: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    label, counts, label_logit, others, log_own = _load_row(
        row, sums_ptr, labels_ptr, label_logits_ptr, anchors_ptr, N, V, tiles, ignore_index, TILES
    )
    row_ptr = exponentials_ptr + row * exponentials_stride
    row_hidden_ptr = hidden_ptr + row * hidden_stride
    row_max = label_logit
    is_again = _is_out_of_range(counts, label_logit, others, log_own)
    if is_again:
        row_max, others = maximum_and_sum(
            row_hidden_ptr, weight_ptr, bias_ptr, label, weight_stride, V, D, BLOCK_V, BLOCK_D
        )
        log_own = label_logit - row_max
        for start in range(0, V, BLOCK_V):
            z = logits_tile(row_hidden_ptr, weight_ptr, bias_ptr, label, weight_stride, start, V, D, BLOCK_V, BLOCK_D)
            columns = start + tl.arange(0, BLOCK_V)
            tl.store(row_ptr + columns, tl.exp(z - row_max), mask=(columns < V) & (columns != label))

    row_scale, dlabel = _normalise(
        row, label, counts, is_again, row_max, others, log_own, z_loss, ignore_index,
        losses_ptr, cross_entropies_ptr, row_max_ptr, log_sum_ptr,
    )  # fmt: skip
    entry = (dlabel / row_scale).to(exponentials_ptr.dtype.element_ty)
    rounded = entry.to(tl.float32)
    is_normal = (tl.abs(rounded) > 1e-30) & (tl.abs(rounded) < 1e38)
    row_scale = tl.where(is_normal, dlabel / rounded, row_scale)
    row_scale = tl.where(counts, row_scale * tl.load(factor_ptr), 0.0)
    tl.store(row_ptr + label, entry, mask=counts)
    tl.store(row_scales_ptr + row, row_scale)
    if scaled_hidden_ptr is not None:
        for start in range(0, D, BLOCK_ROW):
            columns = start + tl.arange(0, BLOCK_ROW)
            hidden = tl.load(row_hidden_ptr + columns, mask=columns < D, other=0.0).to(tl.float32)
            tl.store(scaled_hidden_ptr + row * D + columns, hidden * row_scale, mask=columns < D)


@triton.jit
def _finish_dhidden_kernel(
    products_ptr,  # [N, D] fp32 in: E @ weight
    dhidden_ptr,  # [N, D] out
    sums_ptr,  # [TILES, N] fp32 in: of E before rounding
    hidden_ptr,  # [N, D] in, for rows to compute again
    weight_ptr,  # [V, D] in
    bias_ptr,  # [V] in, or None
    labels_ptr,  # [N] in
    label_logits_ptr,  # [N] fp32 in
    anchors_ptr,  # [N] fp32 in
    losses_ptr,  # [N] fp32 out
    cross_entropies_ptr,  # [N] fp32 out
    row_max_ptr,  # [N] fp32 out: the label's logit, or the maximum of a row computed again
    log_sum_ptr,  # [N] fp32 out: lse above it
    hidden_stride,
    weight_stride,
    N,
    V,
    D,
    tiles,
    ignore_index,
    z_loss,
    TILES: tl.constexpr,
    BLOCK_ROW: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    label, counts, label_logit, others, log_own = _load_row(
        row, sums_ptr, labels_ptr, label_logits_ptr, anchors_ptr, N, V, tiles, ignore_index, TILES
    )
    row_hidden_ptr = hidden_ptr + row * hidden_stride
    products_ptr += row * D
    row_max = label_logit
    is_again = _is_out_of_range(counts, label_logit, others, log_own)
    if is_again:
        row_max, others = maximum_and_sum(
            row_hidden_ptr, weight_ptr, bias_ptr, label, weight_stride, V, D, BLOCK_V, BLOCK_D
        )
        log_own = label_logit - row_max
        for start in range(0, V, BLOCK_V):
            z = logits_tile(row_hidden_ptr, weight_ptr, bias_ptr, label, weight_stride, start, V, D, BLOCK_V, BLOCK_D)
            exponentials = tl.exp(z - row_max)
            for d in range(0, D, BLOCK_D):
                columns = d + tl.arange(0, BLOCK_D)
                weight = weight_tile(weight_ptr, weight_stride, start, d, V, D, BLOCK_V, BLOCK_D)
                before = tl.load(products_ptr + columns, mask=(columns < D) & (start > 0), other=0.0)
                tl.debug_barrier()  # all have read what some overwrite
                tl.store(products_ptr + columns, before + tl.sum(weight * exponentials[:, None], 0), mask=columns < D)
                tl.debug_barrier()

    row_scale, dlabel = _normalise(
        row, label, counts, is_again, row_max, others, log_own, z_loss, ignore_index,
        losses_ptr, cross_entropies_ptr, row_max_ptr, log_sum_ptr,
    )  # fmt: skip
    for start in range(0, D, BLOCK_ROW):
        columns = start + tl.arange(0, BLOCK_ROW)
        products = tl.load(products_ptr + columns, mask=columns < D, other=0.0)
        weight = tl.load(weight_ptr + label * weight_stride + columns, mask=(columns < D) & counts, other=0.0)
        dhidden = tl.where(counts, row_scale * products + dlabel * weight.to(tl.float32), 0.0)
        tl.store(dhidden_ptr + row * D + columns, dhidden, mask=columns < D)


@triton.jit
def _load_row(row, sums_ptr, labels_ptr, label_logits_ptr, anchors_ptr, N, V, tiles, ignore_index, TILES: tl.constexpr):
    """(label, whether it counts, its logit, the sum of the others' exponentials, ln of its own) of one row."""
    label = tl.load(labels_ptr + row)
    counts = (label != ignore_index) & (label >= 0) & (label < V)
    label_logit = tl.load(label_logits_ptr + row)
    tile = tl.arange(0, TILES)
    others = tl.sum(tl.load(sums_ptr + tile.to(tl.int64) * N + row, mask=tile < tiles, other=0.0), 0)
    # From the rounded anchor that the GEMM used, so that its rounding cancels.
    log_own = tl.where(counts, (label_logit * LOG2E - tl.load(anchors_ptr + row)) * LN2, 0.0)
    return label, counts, label_logit, others, log_own


@triton.jit
def _is_out_of_range(counts, label_logit, others, log_own):
    """Whether to compute the row again. Not if a logit is no number: then no gradient is one, by whatever way.

    A label's logit of -inf makes the sum NaN as well.
    """
    is_nan = (others != others) & (label_logit != -float("inf"))
    return counts & (is_nan == 0) & ((others + tl.exp(log_own) <= LARGEST) == 0)


@triton.jit
def _normalise(
    row,
    label,
    counts,
    is_again,
    row_max,
    others,
    log_own,
    z_loss,
    ignore_index,
    losses_ptr,
    cross_entropies_ptr,
    row_max_ptr,
    log_sum_ptr,
):
    """Stores the results of one row; (row_scale, gradient at the label).

    `row_max` is the label's logit, or the maximum if the row `is_again` computed.
    """
    own = tl.exp(log_own)
    total = others + own
    ratio = others / own
    cross_entropy = tl.where(ratio < 1e30, log1p(ratio), tl.log(total) - log_own)  # own may be 0
    log_sum = tl.where(is_again, tl.log(total), cross_entropy)
    lse = row_max + log_sum
    factor = 1 + 2 * z_loss * lse
    factor = tl.where(tl.abs(factor) < SMALLEST_FACTOR, SMALLEST_FACTOR, factor)
    missing = tl.where(label == ignore_index, 0.0, float("nan"))
    tl.store(losses_ptr + row, tl.where(counts, cross_entropy + z_loss * lse * lse, missing))
    tl.store(cross_entropies_ptr + row, tl.where(counts, cross_entropy, missing))
    tl.store(row_max_ptr + row, row_max)
    tl.store(log_sum_ptr + row, log_sum)
    return factor / total, 2 * z_loss * lse * (own / total) - others / total


@triton.jit
def _merge_kernel(
    partials_ptr,  # [parts, 3, N] fp32 in: m, sum exp(z - m), sum exp(z - m) (z - m), without the label
    labels_ptr,  # [N] in
    label_logits_ptr,  # [N] fp32 in
    losses_ptr,  # [N] fp32 out
    cross_entropies_ptr,  # [N] fp32 out
    row_max_ptr,  # [N] fp32 out
    log_sum_ptr,  # [N] fp32 out
    entropies_ptr,  # [N] fp32 out, or None
    N,
    V,
    parts,
    ignore_index,
    z_loss,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = rows < N
    labels = tl.load(labels_ptr + rows, mask=is_row, other=-1)
    counts = (labels != ignore_index) & (labels >= 0) & (labels < V)
    label_logits = tl.load(label_logits_ptr + rows, mask=is_row, other=0.0)
    part = tl.arange(0, PARTS)[:, None]
    pointers = partials_ptr + part.to(tl.int64) * 3 * N + rows[None, :]
    mask = (part < parts) & is_row[None, :]
    maxima = tl.load(pointers, mask=mask, other=-1e30)
    sums = tl.load(pointers + N, mask=mask, other=0.0)

    row_max = tl.maximum(tl.max(maxima, 0), label_logits)
    below = maxima - row_max[None, :]
    decays = tl.exp(below)
    others = tl.sum(sums * decays, 0)
    own = tl.exp(label_logits - row_max)
    log_sum = tl.where(own == 1, log1p(others), tl.log(others + own))
    cross_entropies = log_sum - (label_logits - row_max)
    lse = row_max + log_sum
    missing = tl.where(labels == ignore_index, 0.0, float("nan"))
    tl.store(losses_ptr + rows, tl.where(counts, cross_entropies + z_loss * lse * lse, missing), mask=is_row)
    tl.store(cross_entropies_ptr + rows, tl.where(counts, cross_entropies, missing), mask=is_row)
    tl.store(row_max_ptr + rows, row_max, mask=is_row)
    tl.store(log_sum_ptr + rows, log_sum, mask=is_row)
    if entropies_ptr is not None:
        weighted = tl.load(pointers + 2 * N, mask=mask, other=0.0)
        own_part = tl.where(own > 0, own * (label_logits - row_max), 0.0)
        total = tl.sum(decays * (weighted + sums * below), 0) + own_part
        entropies = log_sum - total / (others + own)
        tl.store(entropies_ptr + rows, tl.where(counts, entropies, missing), mask=is_row)


def finish_rows(
    exponentials: Tensor,
    sums: Tensor,
    head: tuple,
    labels: Tensor,
    objective: Objective,
    *,
    label_logits: Tensor,
    anchors: Tensor,
    factor: Tensor,
    rows: Rows,
    row_scales: Tensor,
    scaled_hidden: Tensor | None,
) -> None:
    """Writes the row results, and makes `exponentials` dlogits * factor / row_scale.

    Args:
        exponentials, sums: what `gemm.exponentials` left for all classes; the labels' entries are written.
        head, labels, label_logits, anchors: hidden, weight and bias, and what `anchors` returned.
        factor: [1] fp32, of all gradients.
        rows: out. row_max is the label's logit here, or the maximum of a row computed again; log_sum is lse above it.
        row_scales: [N] fp32, out: factor included.
        scaled_hidden: [N, D] contiguous, out: row_scales * hidden; or None.
    """
    outputs = (factor, *rows, row_scales, scaled_hidden, exponentials.stride(0))
    inputs = (exponentials, sums, *head, labels, label_logits, anchors)
    _launch_finish(_finish_rows_kernel, (*inputs, *outputs), sums, head, objective)


def finish_dhidden(
    products: Tensor,
    dhidden: Tensor,
    sums: Tensor,
    head: tuple,
    labels: Tensor,
    objective: Objective,
    *,
    label_logits: Tensor,
    anchors: Tensor,
    rows: Rows,
) -> None:
    """Writes the row results and `dhidden` [N, D] from `products` [N, D] fp32, the exponentials times the weight."""
    arguments = (products, dhidden, sums, *head, labels, label_logits, anchors, *rows)
    _launch_finish(_finish_dhidden_kernel, arguments, sums, head, objective)


def _launch_finish(kernel, arguments: tuple, sums: Tensor, head: tuple, objective: Objective) -> None:
    hidden, weight, _ = head
    (n_tokens, width), vocab = hidden.shape, weight.shape[0]
    with torch.cuda.device_of(hidden):
        kernel[(n_tokens,)](
            *arguments,
            hidden.stride(0),
            weight.stride(0),
            n_tokens,
            vocab,
            width,
            sums.shape[0],
            objective.ignore_index,
            float(objective.z_loss),
            TILES=triton.next_power_of_2(sums.shape[0]),
            BLOCK_ROW=min(triton.next_power_of_2(width), 1024),
            BLOCK_V=64,
            BLOCK_D=64,
            num_warps=4,
        )


def merge_statistics(
    partials, labels, objective: Objective, vocab: int, *, label_logits, rows: Rows, entropies
) -> None:
    """Writes the row results of what `gemm.statistics` left in `partials`, and `entropies` [N] unless None."""
    parts, _, n_tokens = partials.shape
    with torch.cuda.device_of(partials):
        _merge_kernel[(triton.cdiv(n_tokens, MERGE_ROWS),)](
            partials,
            labels,
            label_logits,
            *rows,
            entropies,
            n_tokens,
            vocab,
            parts,
            objective.ignore_index,
            float(objective.z_loss),
            PARTS=triton.next_power_of_2(parts),
            ROWS=MERGE_ROWS,
            num_warps=8,
        )
