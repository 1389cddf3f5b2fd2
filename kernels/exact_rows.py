"""One row of logits computed again by one program, tile by tile, where the GEMM's exponentials left their range.

Right for any row, and slow: each pass reads the whole weight.
"""

import triton
import triton.language as tl


@triton.jit
def maximum_and_sum(
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
        z = logits_tile(hidden_ptr, weight_ptr, bias_ptr, label, weight_stride, start, V, D, BLOCK_V, BLOCK_D)
        new_maximum = tl.maximum(maximum, tl.max(z, 0))
        anchor = tl.where(new_maximum == -float("inf"), 0.0, new_maximum)
        total = total * tl.exp(maximum - anchor) + tl.sum(tl.exp(z - anchor), 0)
        maximum = new_maximum
    return anchor, total


@triton.jit
def logits_tile(
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
        products += weight_tile(weight_ptr, weight_stride, start, d, V, D, BLOCK_V, BLOCK_D) * hidden[None, :]
    z = tl.sum(products, 1)
    if bias_ptr is not None:
        z += tl.load(bias_ptr + classes, mask=classes < V, other=0.0).to(tl.float32)
    return tl.where((classes < V) & (classes != label), z, -float("inf"))


@triton.jit
def weight_tile(weight_ptr, weight_stride, start, d, V, D, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr):
    """[BLOCK_V, BLOCK_D] of the weight from class `start` and column `d`, in fp32, 0 beyond."""
    classes = start + tl.arange(0, BLOCK_V)
    columns = d + tl.arange(0, BLOCK_D)
    pointers = weight_ptr + classes.to(tl.int64)[:, None] * weight_stride + columns[None, :]
    return tl.load(pointers, mask=(classes < V)[:, None] & (columns < D)[None, :], other=0.0).to(tl.float32)
