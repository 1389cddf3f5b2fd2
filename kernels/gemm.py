"""The logits' GEMM with the softmax in its epilogue: logits are neither stored nor rounded.

For compute capability 9.x and 10.x (not 12.x, consumer Blackwell), bf16, and rows that TMA can read, so D a multiple of
8. `takes` says whether a head is such a one; others get a cuBLAS product and a kernel over its result.

z = hidden @ weight.T + bias, [N, V], is made in fp32 tile by tile. As a tile is done, its program writes one of these:

    exponentials  E_iv = exp(z_iv - anchor_i) in bf16, 0 at the label, and each tile's row sums of E before rounding
    gradients     scale_i * exp(z_iv - anchor_i), and label_value_i at the label
    statistics    no tile, but of each of its rows, without the label: m = max z, sum exp(z - m), sum exp(z - m) (z - m)

One program per multiprocessor takes one tile after another and reads both operands by TMA. Whoever wants row results
adds up the tiles' in a fixed order (`row_sums.py`): no atomics, the same bits every time.

Persistent GEMM: Triton's tutorial 09. Exponentials instead of logits: quack. The anchors: `row_anchors.py`.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from . import geometry, row_kernels

# The fastest of twelve combinations of tile, warps and stages on an H200, for D of 768, 2304 and 4096 together. The
# benchmark has rows of D from 512 to 4096; for a larger one nothing was tuned or measured.
BLOCK_N, BLOCK_V, BLOCK_D = geometry.TILE_ROWS, geometry.TILE_CLASSES, 64
NUM_WARPS, NUM_STAGES = 8, 3
# Sixteen tiles of rows meet each tile of classes before the next one: their operands stay in the L2 cache.
GROUP = 16
# Loading the next tile during the epilogue pays where a tile takes few steps; elsewhere it costs 3%, and on sm_100
# the registers do not suffice for it.
LONGEST_OVERLAPPED = 2048

LOG2E = tl.constexpr(1.4426950408889634)
ABSENT = tl.constexpr(-1e30)  # a logit that counts for nothing, and is finite so that 0 times it is 0


@triton.jit
def _gemm_kernel(
    hidden_desc,  # [N, D] in
    weight_desc,  # [V, D] in
    out_desc,  # [N, V] out: exponentials or gradients
    bias_ptr,  # [V] in, or None
    labels_ptr,  # [N] in
    anchors_ptr,  # [N] fp32 in, base 2; +inf makes a row of zeros. Not read for statistics
    scales_ptr,  # [N] fp32 in, for gradients
    label_values_ptr,  # [N] fp32 in, for gradients
    partials_ptr,  # [tiles of V, N] fp32 out: sums. For statistics [half tiles of V, 3, N]
    N,
    V,
    D,
    first_class,  # what labels call the first row of the weight
    EPILOGUE: tl.constexpr,
    OVERLAP: tl.constexpr,
    PROGRAMS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    HALF: tl.constexpr = BLOCK_V // 2
    row_tiles = tl.cdiv(N, BLOCK_N)
    class_tiles = tl.cdiv(V, BLOCK_V)
    steps = tl.cdiv(D, BLOCK_D)
    for tile in tl.range(tl.program_id(0), row_tiles * class_tiles, PROGRAMS, flatten=OVERLAP):
        first_row_tile = tile // (GROUP * class_tiles) * GROUP
        within = tile % (GROUP * class_tiles)
        row_tiles_of_group = min(row_tiles - first_row_tile, GROUP)
        row = (first_row_tile + within % row_tiles_of_group) * BLOCK_N
        class_tile = within // row_tiles_of_group
        column = class_tile * BLOCK_V

        # Loaded before the products, which hide how long it takes.
        rows = row + tl.arange(0, BLOCK_N)
        is_row = rows < N
        # Cut to 32 bits: a number that is no class may then look like one, but its row is made of zeros anyway.
        labels = (tl.load(labels_ptr + rows, mask=is_row, other=-1) - first_class).to(tl.int32)
        anchors = 0.0
        scales = 1.0
        label_values = 0.0
        if EPILOGUE != "statistics":
            anchors = tl.load(anchors_ptr + rows, mask=is_row, other=float("inf"))[:, None]
        if EPILOGUE == "gradients":
            scales = tl.load(scales_ptr + rows, mask=is_row, other=0.0)[:, None]
            label_values = tl.load(label_values_ptr + rows, mask=is_row, other=0.0)[:, None]
        # Most tiles hold no label, and need not compare.
        has_labels = tl.max(((labels >= column) & (labels < column + BLOCK_V)).to(tl.int32), 0) > 0

        z = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
        for step in range(steps):
            hidden = hidden_desc.load([row, step * BLOCK_D])
            weight = weight_desc.load([column, step * BLOCK_D])
            z = tl.dot(hidden, weight.T, z)
        # Half a tile at a time: less shared memory on the way out, which the loads have then.
        left, right = tl.split(tl.permute(tl.reshape(z, (BLOCK_N, 2, HALF)), (0, 2, 1)))

        if EPILOGUE == "statistics":
            part = 2 * class_tile
            _store_statistics(left, bias_ptr, labels, has_labels, partials_ptr, part, column, rows, N, V, HALF)
            column += HALF
            _store_statistics(right, bias_ptr, labels, has_labels, partials_ptr, part + 1, column, rows, N, V, HALF)
        else:
            constants = (labels, has_labels, anchors, scales, label_values)
            left = _exponentials(left, bias_ptr, constants, column, V, EPILOGUE, HALF)
            out_desc.store([row, column], left.to(out_desc.dtype))
            right = _exponentials(right, bias_ptr, constants, column + HALF, V, EPILOGUE, HALF)
            out_desc.store([row, column + HALF], right.to(out_desc.dtype))
            if EPILOGUE == "exponentials":
                sums = tl.sum(left, 1) + tl.sum(right, 1)
                tl.store(partials_ptr + class_tile.to(tl.int64) * N + rows, sums, mask=is_row)


@triton.jit
def _exponentials(z, bias_ptr, constants, column, V, EPILOGUE: tl.constexpr, WIDTH: tl.constexpr):
    """scales * exp(z + bias - anchors) for the WIDTH classes from `column`; label_values at the labels, 0 beyond V."""
    labels, has_labels, anchors, scales, label_values = constants
    columns = column + tl.arange(0, WIDTH)
    if bias_ptr is not None:
        z += tl.load(bias_ptr + columns, mask=columns < V, other=0.0).to(tl.float32)[None, :]
    values = tl.exp2(z * LOG2E - anchors)
    if EPILOGUE == "gradients":
        values *= scales
    if has_labels:
        values = tl.where(columns[None, :] == labels[:, None], label_values, values)
    if column + WIDTH > V:
        values = tl.where(columns[None, :] < V, values, 0.0)
    return values


@triton.jit
def _store_statistics(z, bias_ptr, labels, has_labels, partials_ptr, part, column, rows, N, V, WIDTH: tl.constexpr):
    """Writes m, sum exp(z - m) and sum exp(z - m) (z - m) of each row over WIDTH classes but the label."""
    columns = column + tl.arange(0, WIDTH)
    if bias_ptr is not None:
        z += tl.load(bias_ptr + columns, mask=columns < V, other=0.0).to(tl.float32)[None, :]
        z = tl.where(z < ABSENT, ABSENT, z)  # a bias of -inf; NaN stays
    if has_labels:
        z = tl.where(columns[None, :] == labels[:, None], ABSENT, z)
    if column + WIDTH > V:
        z = tl.where(columns[None, :] < V, z, ABSENT)
    maxima = tl.max(z, 1)
    below = z - maxima[:, None]
    exponentials = tl.exp2(below * LOG2E)
    pointers = partials_ptr + part.to(tl.int64) * 3 * N + rows
    tl.store(pointers, maxima, mask=rows < N)
    tl.store(pointers + N, tl.sum(exponentials, 1), mask=rows < N)
    tl.store(pointers + 2 * N, tl.sum(exponentials * below, 1), mask=rows < N)


def takes(head: tuple[Tensor, Tensor, Tensor | None]) -> bool:
    """Whether the kernel takes this head: bf16 on compute capability 9 or 10, rows that TMA can read, not empty."""
    hidden, weight, _ = head
    return (
        row_kernels.runs_triton(hidden)
        and (hidden.dtype == torch.bfloat16 or not hidden.is_cuda)  # the interpreter computes in fp32
        and _has_instructions(hidden.device)
        and hidden.shape[0] > 0
        and all(has_readable_rows(t, t.dtype) and t.data_ptr() % 16 == 0 for t in (hidden, weight))
    )


@functools.cache
def _has_instructions(device: torch.device) -> bool:
    # Capability 12 has 99 KiB of shared memory, of which this kernel needs more.
    return device.type == "cpu" or (not torch.version.hip and row_kernels.compute_capability(device)[0] in (9, 10))


def has_readable_rows(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether TMA can read the rows of a tensor [rows, D], cast to `dtype` if need be, as its layout tells.

    While compiling, which does not show where a tensor begins in its storage, as its strides tell.
    """
    row, first = tensor.stride(0), 0
    if tensor.dtype != dtype:
        row = tensor.shape[1]  # of the copy
    elif not torch.compiler.is_compiling():
        first = tensor.storage_offset()
    return tensor.stride(1) == 1 and row > 0 and row * dtype.itemsize % 16 == first * dtype.itemsize % 16 == 0


def exponentials(hidden, weight, bias, labels, *, anchors, out, sums, first_class: int = 0) -> None:
    """exp(z - anchor) in `out` [N, V], 0 at the label, and its sums in `sums` [geometry.class_tiles(V), N] fp32.

    Args:
        hidden: [N, D] bf16.
        weight: [V, D] bf16.
        bias: [V] bf16, or None.
        labels: [N] int64; whatever it is, if the anchor is +inf.
        anchors: [N] fp32, in base 2; +inf for rows of zeros.
        out: [N, V] bf16, with rows that begin at multiples of 16 bytes.
        sums: [geometry.class_tiles(V), N] fp32.
        first_class: what labels call the first row of `weight`.
    """
    _launch("exponentials", hidden, weight, bias, labels, anchors, None, None, sums, out, first_class)


def gradients(hidden, weight, bias, labels, *, anchors, scales, label_values, out, first_class: int = 0) -> None:
    """scale * exp(z - anchor) in `out` [N, V], and `label_values` at the labels, which count from `first_class`."""
    _launch("gradients", hidden, weight, bias, labels, anchors, scales, label_values, None, out, first_class)


def statistics(hidden, weight, bias, labels, *, partials) -> None:
    """Maxima, sums and weighted sums of each row in `partials` [2 * geometry.class_tiles(V), 3, N] fp32."""
    _launch("statistics", hidden, weight, bias, labels, None, None, None, partials, None)


def _launch(epilogue, hidden, weight, bias, labels, anchors, scales, label_values, partials, out, first_class=0):
    (n_tokens, width), vocab = hidden.shape, weight.shape[0]
    programs = min(multiprocessors(hidden.device), triton.cdiv(n_tokens, BLOCK_N) * geometry.class_tiles(vocab))
    with torch.cuda.device_of(hidden):  # Triton launches on the current device
        _gemm_kernel[(programs,)](
            TensorDescriptor.from_tensor(hidden, [BLOCK_N, BLOCK_D]),
            TensorDescriptor.from_tensor(weight, [BLOCK_V, BLOCK_D]),
            None if out is None else TensorDescriptor.from_tensor(out, [BLOCK_N, BLOCK_V // 2]),
            bias,
            labels,
            anchors,
            scales,
            label_values,
            partials,
            n_tokens,
            vocab,
            width,
            first_class,
            EPILOGUE=epilogue,
            OVERLAP=width <= LONGEST_OVERLAPPED and row_kernels.compute_capability(hidden.device) < (10, 0),
            PROGRAMS=multiprocessors(hidden.device),
            GROUP=GROUP,
            BLOCK_N=BLOCK_N,
            BLOCK_V=BLOCK_V,
            BLOCK_D=BLOCK_D,
            num_warps=NUM_WARPS,
            num_stages=NUM_STAGES,
        )


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many a GPU has; on a CPU a small number, for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
