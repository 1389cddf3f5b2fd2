"""Gradients times factors that are numbers on the device: one for all, or one for each row.

torch.mul would do, but a factor that lies on the device and has another dtype costs it the wide loads: 2.4 ms where
reading and writing takes 0.5 (a bf16 dweight of [128256, 4096] on an H200).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import row_kernels

BLOCK = 4096
BLOCKS = 8  # of a program: so many that the programs are few where there is nothing to do
NUM_WARPS = BLOCK // (16 * row_kernels.WARP_SIZE)  # 16 elements a lane: two 16-byte loads of bf16


@triton.jit
def _scale_kernel(
    source_ptr,  # [rows, length] in
    scaled_ptr,  # [rows, length] out; source_ptr if IN_PLACE
    factors_ptr,  # [rows] fp32 in
    length,
    IN_PLACE: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    programs = tl.cdiv(length, BLOCK * BLOCKS)  # of a row
    row = (tl.program_id(0) // programs).to(tl.int64)
    first = (tl.program_id(0) % programs).to(tl.int64) * BLOCK * BLOCKS
    end = tl.minimum(first + BLOCK * BLOCKS, length)
    factor = tl.load(factors_ptr + row)
    if IN_PLACE:
        end = tl.where(factor == 1.0, first, end)  # then nothing is read, and nothing written
    for start in range(first, end, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        source = tl.load(source_ptr + row * length + offsets, mask=offsets < end)
        scaled = source.to(tl.float32) * factor
        if HAS_ROWS:  # one that does not count has the factor 0, and gradient 0 whatever was computed for it
            scaled = tl.where(factor == 0.0, 0.0, scaled)
        tl.store(scaled_ptr + row * length + offsets, scaled, mask=offsets < end)


def scale(gradient: Tensor, factors: Tensor, dtype: torch.dtype) -> Tensor:
    """`gradient` times `factors` in `dtype`: over `gradient` itself if that is its dtype.

    Args:
        gradient: contiguous.
        factors: [1] fp32, or one for each row of `gradient`.
        dtype: fp32, bf16 or fp16.
    """
    if type(gradient) is not Tensor:  # a stand-in, while compiling; the compiler reuses the memory by itself
        return (gradient * _column(factors, gradient)).to(dtype)
    scaled = gradient if gradient.dtype == dtype else torch.empty_like(gradient, dtype=dtype)
    scale_into(scaled, gradient, factors)
    return scaled.detach()  # a tensor of its own, so that autograd may keep it as .grad without a copy


def scale_into(scaled: Tensor, gradient: Tensor, factors: Tensor) -> None:
    """The same into `scaled`, contiguous, which may be `gradient`."""
    if not row_kernels.runs_triton(gradient):
        torch.mul(gradient, _column(factors, gradient), out=scaled)
    elif gradient.numel():
        length = gradient.numel() // factors.numel()
        grid = (factors.numel() * triton.cdiv(length, BLOCK * BLOCKS),)
        options = {
            "IN_PLACE": scaled is gradient,
            "HAS_ROWS": factors.numel() > 1,
            "BLOCK": BLOCK,
            "BLOCKS": BLOCKS,
            "num_warps": NUM_WARPS,
        }
        with torch.cuda.device_of(gradient):
            _scale_kernel[grid](gradient, scaled, factors, length, **options)
        torch.autograd.graph.increment_version(scaled)


def _column(factors: Tensor, gradient: Tensor) -> Tensor:
    return factors.view(-1, *[1] * (gradient.dim() - 1))
