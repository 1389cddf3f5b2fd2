"""The Triton kernel over rows of logits: losses, statistics, and the gradient in the logits' own memory.

The formulas are those of `reference.py`. One program takes one row of V logits in tiles of BLOCK_V, with fp32 state
whatever the storage dtype:

    pass 1 reads the row once:   m' = max(m, max z),  l = l * exp(m - m') + sum exp(z - m')   (online softmax)
    pass 2 reads and writes it:  p_v = exp((z_v - m) - ln l), stored as dloss/dx_v over x_v

Each group of 8 columns of a tile keeps m and l of its own, and they are merged once, at the end of the row: a tile
needs no barrier. m and ln l are kept apart, not added up to lse: a common offset of the logits then cancels exactly.

The entropy needs no third pass: with t = sum exp(z - m) (z - m) beside l, and l * (m - m') added to t before it is
scaled to a new maximum like l, it is ln l - t / l.

`forward_rows` is pass 1, `backward_rows` is pass 2 with the upstream gradient folded in, and `forward_backward_rows_`
is both in one launch: one kernel, three launches. Traffic: 2 reads and 1 write of the logits, but pass 2 goes from the
end of the row to its start, so that it finds a part of the row in the L2 cache.

Online softmax: Milakov and Gimelshein 2018. Gradient over the logits: mgmalek/efficient_cross_entropy, Liger-Kernel.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import reference
from .reference import Objective, Rows

GROUP = tl.constexpr(8)  # neighbouring columns with a maximum and a sum of their own; one 16-byte load of bf16
REST = tl.constexpr(16)  # tiles end at a multiple of this, so that their loads stay wide; a tile of this width follows
WARP_SIZE = 64 if torch.version.hip else 32
IGNORED, BAD = tl.constexpr(-1), tl.constexpr(-2)  # what stands for a label that is ignore_index, or no class
FLOOR = tl.constexpr(-104.0)  # whose exp is 0 in fp32, so that it stands for minus infinity, which times 0 were NaN


@triton.jit
def _softcapped(x, softcap, HAS_SOFTCAP: tl.constexpr):
    """(z, dz/dx) of logits x, in fp32."""
    z = x.to(tl.float32)
    slope = 1.0
    if HAS_SOFTCAP:
        # tanh written out, because not every Triton version has one. Near 0 the quotient cancels: a series takes over.
        u = z * (1 / softcap)
        square = u * u
        series = u * (1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
        decay = tl.exp(-2 * tl.abs(u))
        inverse = 1 / (1 + decay)
        quotient = (1 - decay) * inverse
        z = softcap * tl.where(tl.abs(u) < 0.25, series, tl.where(u < 0, -quotient, quotient))
        slope = 4 * decay * inverse * inverse  # 1 - tanh^2 would lose its digits where tanh is near 1
    return z, slope


@triton.jit
def _statistics(
    row_ptr,
    stride_v,
    V,
    end,
    origin,
    softcap,
    HAS_SMOOTHING: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """(m, ln l, sum (z - origin), entropy) of one row whose tiles end at `end`.

    The sum is 0 unless HAS_SMOOTHING, and the entropy ln l unless HAS_ENTROPY.
    """
    GROUPS: tl.constexpr = BLOCK_V // GROUP
    group_max = tl.full([GROUPS], -float("inf"), tl.float32)
    group_sum = tl.zeros([GROUPS], tl.float32)
    group_total = tl.zeros([GROUPS], tl.float32)
    group_moment = tl.zeros([GROUPS], tl.float32)
    for start in range(0, end, BLOCK_V):
        columns = start + tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        is_whole = start + BLOCK_V <= end
        z, _ = _load(row_ptr, columns, stride_v, end, is_whole, softcap, HAS_SOFTCAP, "evict_last")
        if HAS_SMOOTHING:
            group_total += tl.sum(tl.where(columns < end, z - origin, 0.0), 1)
        new_max = tl.maximum(group_max, tl.max(z, 1))
        anchor = _finite(new_max)
        if HAS_ENTROPY:
            shift, shifted = group_max - anchor, z - anchor[:, None]
            group_moment = tl.exp(shift) * (group_moment + group_sum * tl.maximum(shift, FLOOR))
            group_moment += tl.sum(tl.exp(shifted) * tl.maximum(shifted, FLOOR), 1)
        group_sum = group_sum * tl.exp(group_max - anchor) + tl.sum(tl.exp(z - anchor[:, None]), 1)
        group_max = new_max

    rest = end + tl.arange(0, REST)
    z, _ = _load(row_ptr, rest, stride_v, V, False, softcap, HAS_SOFTCAP, "evict_last")
    row_max = tl.maximum(tl.max(group_max, 0), tl.max(z, 0))
    anchor = _finite(row_max)
    row_sum = tl.sum(group_sum * tl.exp(group_max - anchor), 0) + tl.sum(tl.exp(z - anchor), 0)
    total = tl.sum(group_total, 0)
    if HAS_SMOOTHING:
        total += tl.sum(tl.where(rest < V, z - origin, 0.0), 0)
    entropy = tl.log(row_sum)
    if HAS_ENTROPY:
        shift, shifted = group_max - anchor, z - anchor
        moment = tl.sum(tl.exp(shift) * (group_moment + group_sum * tl.maximum(shift, FLOOR)), 0)
        entropy -= (moment + tl.sum(tl.exp(shifted) * tl.maximum(shifted, FLOOR), 0)) / row_sum
    return row_max, tl.log(row_sum), total, entropy


@triton.jit
def _load(row_ptr, columns, stride_v, end, is_whole, softcap, HAS_SOFTCAP: tl.constexpr, EVICTION: tl.constexpr):
    """(z, dz/dx) of `columns` in fp32; z is -inf from `end` on, and `is_whole` says that no column is."""
    pointers = row_ptr + columns.to(tl.int64) * stride_v
    if is_whole:
        x = tl.load(pointers, eviction_policy=EVICTION)
    else:
        x = tl.load(pointers, mask=columns < end, other=-float("inf"), eviction_policy=EVICTION)
    z, slope = _softcapped(x, softcap, HAS_SOFTCAP)
    if HAS_SOFTCAP:
        z = tl.where(columns < end, z, -float("inf"))  # softcap(-inf) is -softcap
    return z, slope


@triton.jit
def _finite(maximum):
    """`maximum`, or 0 where all was -inf so far: there -inf - (-inf) would be NaN, and exp(-inf - 0) is 0."""
    return tl.where(maximum == -float("inf"), 0.0, maximum)


@triton.jit
def _store_gradient(
    row_ptr,
    drow_ptr,
    stride_v,
    dstride_v,
    start,
    end,
    counts,
    label_column,
    row_max,
    log_sum,
    p_scale,
    share,
    label_scale,
    softcap,
    HAS_SMOOTHING: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    EVICTION: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Writes (p_scale * p - share - label_scale at the label) * dz/dx over the WIDTH classes from `start` to `end`.

    Or 0, where the row does not count. The label's column may lie outside of the row, in another slab.
    """
    columns = start + tl.arange(0, WIDTH)
    is_whole = start + WIDTH <= end
    z, slope = _load(row_ptr, columns, stride_v, end, is_whole, softcap, HAS_SOFTCAP, EVICTION)
    gradient = p_scale * tl.exp((z - row_max) - log_sum)
    if HAS_SMOOTHING:
        gradient -= share
    if (label_column >= start) & (label_column < start + WIDTH):
        gradient -= tl.where(columns == label_column, label_scale, 0.0)
    gradient = tl.where(counts, gradient * slope, 0.0)
    pointers = drow_ptr + columns.to(tl.int64) * dstride_v
    if is_whole:
        tl.store(pointers, gradient, eviction_policy=EVICTION)
    else:
        tl.store(pointers, gradient, mask=columns < end, eviction_policy=EVICTION)


@triton.jit
def _rows_kernel(
    logits_ptr,  # [N, V] in
    dlogits_ptr,  # [N, V] out if BACKWARD: the gradient; may be logits_ptr
    labels_ptr,  # [N] in
    losses_ptr,  # [N] fp32 out if FORWARD
    cross_entropies_ptr,  # [N] fp32 out if FORWARD
    row_max_ptr,  # [N] fp32 out if FORWARD, else in
    log_sum_ptr,  # [N] fp32 out if FORWARD, else in
    entropies_ptr,  # [N] fp32 out if HAS_ENTROPY
    dlosses_ptr,  # [N] fp32 in: upstream gradients; if FORWARD they are 1 and this is not read
    stride_n,
    stride_v,
    dstride_n,
    dstride_v,
    V,
    ignore_index,
    label_smoothing,
    z_loss,
    softcap,
    first_class,  # what labels call the first column
    vocab,  # how many classes there are, or None: V
    FORWARD: tl.constexpr,
    BACKWARD: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)  # row * stride_n passes 2**31 at the lengths we sweep
    row_ptr = logits_ptr + row * stride_n
    label = tl.load(labels_ptr + row).to(tl.int64)
    if vocab is None:  # the other launches have no code for slabs
        first_class, vocab = 0, V
    is_class = (label >= 0) & (label < vocab)
    label = tl.where(label == ignore_index, IGNORED, tl.where(is_class, label, BAD)).to(tl.int32)
    counts = label >= 0
    end = V // REST * REST

    if FORWARD:
        # Read before the reductions over groups, which are barriers: no warp overwrites it before every warp has it.
        x_label = tl.load(row_ptr + label.to(tl.int64) * stride_v, mask=counts, other=0.0)
        z_label, _ = _softcapped(x_label, softcap, HAS_SOFTCAP)
        # The mean of z is taken from the label's logit, so that a common offset cancels there as well.
        origin = tl.where(tl.abs(z_label) < float("inf"), z_label, 0.0)
        row_max, log_sum, total, entropy = _statistics(
            row_ptr, stride_v, V, end, origin, softcap, HAS_SMOOTHING, HAS_SOFTCAP, HAS_ENTROPY, BLOCK_V
        )
        cross_entropy = log_sum - (z_label - row_max)
        loss = cross_entropy
        if HAS_SMOOTHING:
            uniform = log_sum - ((origin - row_max) + total / V)
            loss = (1 - label_smoothing) * cross_entropy + label_smoothing * uniform
        loss += z_loss * (row_max + log_sum) * (row_max + log_sum)
        missing = tl.where(label == IGNORED, 0.0, float("nan"))
        tl.store(losses_ptr + row, tl.where(counts, loss, missing))
        tl.store(cross_entropies_ptr + row, tl.where(counts, cross_entropy, missing))
        if HAS_ENTROPY:
            tl.store(entropies_ptr + row, tl.where(counts, entropy, missing))
        tl.store(row_max_ptr + row, row_max)
        tl.store(log_sum_ptr + row, log_sum)
        scale = 1.0
    else:
        row_max = tl.load(row_max_ptr + row)
        log_sum = tl.load(log_sum_ptr + row)
        scale = tl.load(dlosses_ptr + row)

    if BACKWARD:
        label_column = label - first_class  # in a slab it may be negative, and not for want of a label
        drow_ptr = dlogits_ptr + row * dstride_n
        p_scale = scale * (1 + 2 * z_loss * (row_max + log_sum))
        share = scale * label_smoothing / vocab
        label_scale = scale * (1 - label_smoothing)
        # The row's last use, if pass 1 was here; a backward alone is faster without the hint.
        EVICTION: tl.constexpr = "evict_first" if FORWARD else ""
        if end < V:
            _store_gradient(
                row_ptr, drow_ptr, stride_v, dstride_v, end, V, counts, label_column, row_max, log_sum,
                p_scale, share, label_scale, softcap, HAS_SMOOTHING, HAS_SOFTCAP, EVICTION, REST,
            )  # fmt: skip
        # From the end of the row to its start: what was read last is still in the cache.
        tiles = tl.cdiv(end, BLOCK_V)
        for tile in range(tiles):
            start = (tiles - 1 - tile) * BLOCK_V
            _store_gradient(
                row_ptr, drow_ptr, stride_v, dstride_v, start, end, counts, label_column, row_max, log_sum,
                p_scale, share, label_scale, softcap, HAS_SMOOTHING, HAS_SOFTCAP, EVICTION, BLOCK_V,
            )  # fmt: skip


def runs_triton(tensor: Tensor) -> bool:
    """Whether the kernel takes `tensor`; CPU tensors go to its twins in `reference.py`."""
    return tensor.is_cuda


def forward_rows(
    logits: Tensor, labels: Tensor, objective: Objective, rows: Rows, entropies: Tensor | None = None
) -> None:
    """Writes the results of `logits` [N, V], which are left alone, into `rows`.

    And the entropies in nats into `entropies` [N] fp32, if there is one. Here and below vectors of length N are
    contiguous, and `labels` int64.
    """
    if not runs_triton(logits):
        return reference.forward_rows(logits, labels, objective, rows, entropies)
    _launch(logits, None, labels, (*rows, entropies), None, objective)


def forward_backward_rows_(logits: Tensor, labels: Tensor, objective: Objective, rows: Rows) -> None:
    """Writes the results of `logits` [N, V] into `rows`, and the gradient of their summed loss over them."""
    if not runs_triton(logits):
        return reference.forward_backward_rows_(logits, labels, objective, rows)
    _launch(logits, logits, labels, (*rows, None), None, objective)


def backward_rows(
    logits: Tensor,
    labels: Tensor,
    objective: Objective,
    *,
    row_max: Tensor,
    log_sum: Tensor,
    dlosses: Tensor,
    dlogits: Tensor,
    first_class: int = 0,
    vocab: int | None = None,
) -> None:
    """Writes the gradient for the upstream gradients `dlosses` [N] into `dlogits` [N, V], which may be `logits`.

    The V columns are the classes from `first_class` on of `vocab` classes, None for V. Labels, `row_max` and `log_sum`
    are those of the whole vocabulary, and so is the gradient, in the kernel bit for bit.
    """
    assert 0 <= first_class <= (vocab or logits.shape[1]) - logits.shape[1], (first_class, vocab, logits.shape)
    slab = {"first_class": first_class, "vocab": vocab}
    if not runs_triton(logits):
        vectors = {"row_max": row_max, "log_sum": log_sum, "dlosses": dlosses}
        return reference.backward_rows(logits, labels, objective, **vectors, dlogits=dlogits, **slab)
    _launch(logits, dlogits, labels, (None, None, row_max, log_sum, None), dlosses, objective, **slab)


def _launch(
    logits: Tensor,
    dlogits: Tensor | None,
    labels: Tensor,
    results: tuple,
    dlosses: Tensor | None,
    objective: Objective,
    first_class: int = 0,
    vocab: int | None = None,
) -> None:
    """Runs the forward unless `dlosses` is given, and the backward if `dlogits` is.

    `results` are the fields of Rows and the entropies, each None if it is neither read nor written.
    """
    n_rows, width = logits.shape
    if n_rows == 0:
        return
    with torch.cuda.device_of(logits):  # Triton launches on the current device
        _rows_kernel[(n_rows,)](
            logits,
            dlogits,
            labels,
            *results,
            dlosses,
            *logits.stride(),
            *(logits if dlogits is None else dlogits).stride(),
            width,
            objective.ignore_index,
            float(objective.label_smoothing),
            float(objective.z_loss),
            float(objective.softcap or 1.0),
            first_class,
            vocab,
            FORWARD=dlosses is None,
            BACKWARD=dlogits is not None,
            HAS_SMOOTHING=objective.label_smoothing > 0,
            HAS_SOFTCAP=objective.softcap is not None,
            HAS_ENTROPY=results[-1] is not None,
            **launch_options(logits, dlogits, dlosses is None, objective.softcap is not None),
        )
    if dlogits is not None:
        # Autograd does not see a Triton store: whoever saved these logits must now raise, not read gradients.
        torch.autograd.graph.increment_version(dlogits)


def launch_options(logits: Tensor, dlogits: Tensor | None, has_forward: bool, has_softcap: bool) -> dict[str, int]:
    """Tile width, warps and register limit as keyword arguments of the kernel.

    A lane takes 16 elements of a tile, which is two 16-byte loads of bf16 in flight, and in the plain bf16 case 32
    registers, so that 2048 lanes run on a multiprocessor. Forward alone is fastest with many small programs, backward
    alone with few large ones. For both in one launch, wide rows get wide tiles: few rows are in flight then, and fit
    into the L2 cache that the second pass reads from. Measured on an H200 for rows of 8192 to 256000 bf16 logits.
    """
    width = triton.next_power_of_2(logits.shape[1])
    if dlogits is None:
        block = 2048
    elif has_forward:
        block = min(max(width // 8, 2048), 16384)
    else:
        block = 16384 if width > 16384 else 2048
    if any(tensor is not None and tensor.stride(0) % 16 for tensor in (logits, dlogits)):
        block = 1024  # rows that start anywhere are read element by element
    block = max(min(block, width), 128)  # a warp of 64 lanes has 128 elements at least, two a lane
    options = {"BLOCK_V": block, "num_warps": max(block // (16 * WARP_SIZE), 1)}
    # Without a limit the widest programs take more. fp32, softcap and sm_100, where it was not measured, would spill.
    is_plain = logits.itemsize == 2 and not has_softcap
    if options["num_warps"] == 32 and is_plain and compute_capability(logits.device) < (10, 0):
        options["maxnreg"] = 32
    return options


@functools.cache
def compute_capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
