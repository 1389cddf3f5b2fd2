"""Row results from what the GEMM of `gemm.py` leaves for every tile, and the numbers that it wants for every row.

Each row is anchored at its own label's logit k, which one dot product finds before the GEMM: exp(z - k - SHIFT) needs
no row maximum, because bf16 has the exponents of fp32. What lies more than 43 nats below the label vanishes, and is
nothing beside the label's own t = exp(-SHIFT). With r the sum of the others' exponentials E, l = r + t:

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
from .reference import Objective, Rows

SHIFT = tl.constexpr(44.0)  # nats: exp(z - k - 44) is a normal number for z from k - 43 to k + 132
LARGEST = tl.constexpr(1e26)  # of l: row_scale * hidden and E @ weight keep their range for hidden from 1e-6 to 1e6
SMALLEST_FACTOR = tl.constexpr(1e-6)  # of |f|, for the z-loss that cancels the gradient of all others exactly
LOG2E = gemm.LOG2E
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _log1p(x):
    """ln(1 + x) for x >= 0, to a relative error of 1e-6; the hardware's logarithm has only an absolute one near 1."""
    w = x / (2 + x)
    square = w * w
    series = 2 * w * (1 + square * (1 / 3 + square * (1 / 5 + square * (1 / 7 + square * (1 / 9)))))
    return tl.where(x < 0.25, series, tl.log(1 + x))


@triton.jit
def _one_minus_exp(x):
    """1 - exp(-x) for x >= 0, to a relative error of 1e-6."""
    series = x * (1 - x / 2 * (1 - x / 3 * (1 - x / 4 * (1 - x / 5 * (1 - x / 6)))))
    return tl.where(x < 0.25, series, 1 - tl.exp(-x))


@triton.jit
def _label_logit(hidden_ptr, weight_ptr, bias_ptr, D, BLOCK_D: tl.constexpr):
    """The dot product of one row of hidden states with one of the weight, plus one bias."""
    total = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, D, BLOCK_D):
        columns = start + tl.arange(0, BLOCK_D)
        hidden = tl.load(hidden_ptr + columns, mask=columns < D, other=0.0).to(tl.float32)
        total += hidden * tl.load(weight_ptr + columns, mask=columns < D, other=0.0).to(tl.float32)
    logit = tl.sum(total, 0)
    if bias_ptr is not None:
        logit += tl.load(bias_ptr).to(tl.float32)
    return logit


@triton.jit
def _anchors_kernel(
    hidden_ptr,  # [N, D] in
    weight_ptr,  # [V, D] in
    bias_ptr,  # [V] in, or None
    labels_ptr,  # [N] in
    label_logits_ptr,  # [N] fp32 out unless BACKWARD; 0 where there is no label
    anchors_ptr,  # [N] fp32 out, base 2: label logit + SHIFT, or lse if BACKWARD; +inf where there is no label
    row_max_ptr,  # [N] fp32 in, if BACKWARD
    log_sum_ptr,  # [N] fp32 in, if BACKWARD
    dlosses_ptr,  # [N] fp32 in, if BACKWARD: upstream gradients
    scales_ptr,  # [N] fp32 out, if BACKWARD: of the probabilities in dlogits
    label_values_ptr,  # [N] fp32 out, if BACKWARD: dlogits at the labels
    hidden_stride,
    weight_stride,
    V,
    D,
    ignore_index,
    z_loss,
    BACKWARD: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels_ptr + row)
    counts = (label != ignore_index) & (label >= 0) & (label < V)
    logit = 0.0
    if counts:
        bias = None if bias_ptr is None else bias_ptr + label
        logit = _label_logit(hidden_ptr + row * hidden_stride, weight_ptr + label * weight_stride, bias, D, BLOCK_D)
    if BACKWARD:
        row_max = tl.load(row_max_ptr + row)
        log_sum = tl.load(log_sum_ptr + row)
        upstream = tl.where(counts, tl.load(dlosses_ptr + row), 0.0)
        cross_entropy = log_sum - (logit - row_max)
        slope = 2 * z_loss * (row_max + log_sum)
        anchor = row_max + log_sum
        label_value = slope * tl.exp(-cross_entropy) - _one_minus_exp(cross_entropy)
        tl.store(scales_ptr + row, tl.where(counts, upstream * (1 + slope), 0.0))
        tl.store(label_values_ptr + row, tl.where(counts, upstream * label_value, 0.0))
    else:
        anchor = logit + SHIFT
        tl.store(label_logits_ptr + row, logit)
    tl.store(anchors_ptr + row, tl.where(counts, anchor * LOG2E, float("inf")))


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
    row_max_ptr,  # [N] fp32 out: the label's logit
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
    if _is_out_of_range(counts, label_logit, others, log_own):
        maximum, others = _maximum_and_sum(
            row_hidden_ptr, weight_ptr, bias_ptr, label, weight_stride, V, D, BLOCK_V, BLOCK_D
        )
        log_own = label_logit - maximum
        for start in range(0, V, BLOCK_V):
            z = _logits(row_hidden_ptr, weight_ptr, bias_ptr, label, weight_stride, start, V, D, BLOCK_V, BLOCK_D)
            columns = start + tl.arange(0, BLOCK_V)
            tl.store(row_ptr + columns, tl.exp(z - maximum), mask=(columns < V) & (columns != label))

    row_scale, dlabel, cross_entropy, loss = _normalised(others, log_own, label_logit, z_loss)
    _store_results(
        row, label, counts, label_logit, cross_entropy, loss,
        losses_ptr, cross_entropies_ptr, row_max_ptr, log_sum_ptr, ignore_index,
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
    row_max_ptr,  # [N] fp32 out: the label's logit
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
    if _is_out_of_range(counts, label_logit, others, log_own):
        maximum, others = _maximum_and_sum(
            row_hidden_ptr, weight_ptr, bias_ptr, label, weight_stride, V, D, BLOCK_V, BLOCK_D
        )
        log_own = label_logit - maximum
        for start in range(0, V, BLOCK_V):
            z = _logits(row_hidden_ptr, weight_ptr, bias_ptr, label, weight_stride, start, V, D, BLOCK_V, BLOCK_D)
            exponentials = tl.exp(z - maximum)
            for d in range(0, D, BLOCK_D):
                columns = d + tl.arange(0, BLOCK_D)
                weight = _weight_tile(weight_ptr, weight_stride, start, d, V, D, BLOCK_V, BLOCK_D)
                before = tl.load(products_ptr + columns, mask=(columns < D) & (start > 0), other=0.0)
                tl.debug_barrier()  # all have read what some overwrite
                tl.store(products_ptr + columns, before + tl.sum(weight * exponentials[:, None], 0), mask=columns < D)
                tl.debug_barrier()

    row_scale, dlabel, cross_entropy, loss = _normalised(others, log_own, label_logit, z_loss)
    _store_results(
        row, label, counts, label_logit, cross_entropy, loss,
        losses_ptr, cross_entropies_ptr, row_max_ptr, log_sum_ptr, ignore_index,
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
    """Whether to compute the row again; not where the label's logit is no number, and so is nothing in the row."""
    return counts & (label_logit == label_logit) & ((others + tl.exp(log_own) <= LARGEST) == 0)


@triton.jit
def _normalised(others, log_own, label_logit, z_loss):
    """(row_scale, gradient at the label, cross-entropy, loss) of one row."""
    own = tl.exp(log_own)
    total = others + own
    ratio = others / own
    cross_entropy = tl.where(ratio < 1e30, _log1p(ratio), tl.log(total) - log_own)  # own may be 0
    lse = label_logit + cross_entropy
    factor = 1 + 2 * z_loss * lse
    factor = tl.where(tl.abs(factor) < SMALLEST_FACTOR, SMALLEST_FACTOR, factor)
    dlabel = 2 * z_loss * lse * (own / total) - others / total
    return factor / total, dlabel, cross_entropy, cross_entropy + z_loss * lse * lse


@triton.jit
def _store_results(
    row,
    label,
    counts,
    label_logit,
    cross_entropy,
    loss,
    losses_ptr,
    cross_entropies_ptr,
    row_max_ptr,
    log_sum_ptr,
    ignore_index,
):
    missing = tl.where(label == ignore_index, 0.0, float("nan"))
    tl.store(losses_ptr + row, tl.where(counts, loss, missing))
    tl.store(cross_entropies_ptr + row, tl.where(counts, cross_entropy, missing))
    tl.store(row_max_ptr + row, label_logit)
    tl.store(log_sum_ptr + row, cross_entropy)


@triton.jit
def _maximum_and_sum(
    hidden_ptr,
    weight_ptr,
    bias_ptr,
    label,
    weight_stride,
    V,
    D,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """(m, sum exp(z - m)) of one row over all classes but the label; m is 0 where all are -inf."""
    maximum = -float("inf")
    anchor = 0.0
    total = 0.0
    for start in range(0, V, BLOCK_V):
        z = _logits(hidden_ptr, weight_ptr, bias_ptr, label, weight_stride, start, V, D, BLOCK_V, BLOCK_D)
        new_maximum = tl.maximum(maximum, tl.max(z, 0))
        anchor = tl.where(new_maximum == -float("inf"), 0.0, new_maximum)
        total = total * tl.exp(maximum - anchor) + tl.sum(tl.exp(z - anchor), 0)
        maximum = new_maximum
    return anchor, total


@triton.jit
def _logits(
    hidden_ptr,
    weight_ptr,
    bias_ptr,
    label,
    weight_stride,
    start,
    V,
    D,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Logits of BLOCK_V classes from `start`; -inf at the label and beyond V."""
    classes = start + tl.arange(0, BLOCK_V)
    products = tl.zeros([BLOCK_V, BLOCK_D], tl.float32)
    for d in range(0, D, BLOCK_D):
        columns = d + tl.arange(0, BLOCK_D)
        hidden = tl.load(hidden_ptr + columns, mask=columns < D, other=0.0).to(tl.float32)
        products += _weight_tile(weight_ptr, weight_stride, start, d, V, D, BLOCK_V, BLOCK_D) * hidden[None, :]
    z = tl.sum(products, 1)
    if bias_ptr is not None:
        z += tl.load(bias_ptr + classes, mask=classes < V, other=0.0).to(tl.float32)
    return tl.where((classes < V) & (classes != label), z, -float("inf"))


@triton.jit
def _weight_tile(weight_ptr, weight_stride, start, d, V, D, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr):
    """[BLOCK_V, BLOCK_D] of the weight from class `start` and column `d`, in fp32, 0 beyond."""
    classes = start + tl.arange(0, BLOCK_V)
    columns = d + tl.arange(0, BLOCK_D)
    pointers = weight_ptr + classes.to(tl.int64)[:, None] * weight_stride + columns[None, :]
    return tl.load(pointers, mask=(classes < V)[:, None] & (columns < D)[None, :], other=0.0).to(tl.float32)


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
):
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels_ptr + row)
    counts = (label != ignore_index) & (label >= 0) & (label < V)
    label_logit = tl.load(label_logits_ptr + row)
    part = tl.arange(0, PARTS)
    pointers = partials_ptr + part.to(tl.int64) * 3 * N + row
    maxima = tl.load(pointers, mask=part < parts, other=-1e30)
    sums = tl.load(pointers + N, mask=part < parts, other=0.0)

    row_max = tl.maximum(tl.max(maxima, 0), label_logit)
    below = maxima - row_max
    decays = tl.exp(below)
    others = tl.sum(sums * decays, 0)
    own = tl.exp(label_logit - row_max)
    log_sum = tl.where(own == 1, _log1p(others), tl.log(others + own))
    cross_entropy = log_sum - (label_logit - row_max)
    lse = row_max + log_sum
    missing = tl.where(label == ignore_index, 0.0, float("nan"))
    tl.store(losses_ptr + row, tl.where(counts, cross_entropy + z_loss * lse * lse, missing))
    tl.store(cross_entropies_ptr + row, tl.where(counts, cross_entropy, missing))
    tl.store(row_max_ptr + row, row_max)
    tl.store(log_sum_ptr + row, log_sum)
    if entropies_ptr is not None:
        weighted = tl.load(pointers + 2 * N, mask=part < parts, other=0.0)
        total = tl.sum(decays * (weighted + sums * below), 0) + own * (label_logit - row_max)
        entropy = log_sum - total / (others + own)
        tl.store(entropies_ptr + row, tl.where(counts, entropy, missing))


def anchors(hidden, weight, bias, labels, objective: Objective) -> tuple[Tensor, Tensor]:
    """Label logits and anchors for `gemm.exponentials`, each [N] fp32; 0 and +inf for rows that do not count."""
    label_logits, anchors = (hidden.new_empty(hidden.shape[0], dtype=torch.float32) for _ in range(2))
    _launch_anchors(hidden, weight, bias, labels, objective, label_logits, anchors)
    return label_logits, anchors


def gradient_rows(
    hidden, weight, bias, labels, objective: Objective, *, row_max, log_sum, dlosses
) -> dict[str, Tensor]:
    """The `anchors`, `scales` and `label_values` for `gemm.gradients`, each [N] fp32."""
    rows = {name: torch.empty_like(row_max) for name in ("anchors", "scales", "label_values")}
    vectors = (row_max, log_sum, dlosses, rows["scales"], rows["label_values"])
    _launch_anchors(hidden, weight, bias, labels, objective, None, rows["anchors"], *vectors)
    return rows


def _launch_anchors(hidden, weight, bias, labels, objective, label_logits, anchors, *vectors) -> None:
    width = hidden.shape[1]
    with torch.cuda.device_of(hidden):
        _anchors_kernel[(hidden.shape[0],)](
            hidden,
            weight,
            bias,
            labels,
            label_logits,
            anchors,
            *(vectors or (None,) * 5),
            hidden.stride(0),
            weight.stride(0),
            weight.shape[0],
            width,
            objective.ignore_index,
            float(objective.z_loss),
            BACKWARD=bool(vectors),
            BLOCK_D=min(triton.next_power_of_2(width), 1024),
            num_warps=4,
        )


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
        rows: out. row_max is the label's logit here, and log_sum the lse above it.
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
        _merge_kernel[(n_tokens,)](
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
            num_warps=4,
        )
