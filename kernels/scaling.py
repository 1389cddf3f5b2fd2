"""Gradients times the upstream gradient, which is a number on the device.

torch.mul would do, but a factor that lies on the device and has another dtype costs it the wide loads: 2.4 ms where
reading and writing takes 0.5 (a bf16 dweight of [128256, 4096] on an H200).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import row_kernels

BLOCK = 4096
NUM_WARPS = BLOCK // (16 * row_kernels.WARP_SIZE)  # 16 elements a lane: two 16-byte loads of bf16


@triton.jit
def _scale_kernel(
    source_ptr,  # [n] in
    scaled_ptr,  # [n] out; source_ptr if IN_PLACE
    factor_ptr,  # [] fp32 in
    n,
    IN_PLACE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    factor = tl.load(factor_ptr)
    if IN_PLACE:
        n = tl.where(factor == 1.0, 0, n)  # then nothing is read, and nothing written
    mask = offsets < n
    source = tl.load(source_ptr + offsets, mask=mask)
    tl.store(scaled_ptr + offsets, source.to(tl.float32) * factor, mask=mask)


def scale(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """`gradient` (contiguous) times `factor` ([] fp32) in `dtype`: over `gradient` itself if that is its dtype."""
    if type(gradient) is not Tensor:  # a stand-in, while compiling; the compiler reuses the memory by itself
        return (gradient * factor).to(dtype)
    in_place = gradient.dtype == dtype
    scaled = gradient if in_place else torch.empty_like(gradient, dtype=dtype)
    if not row_kernels.runs_triton(gradient):
        torch.mul(gradient, factor, out=scaled)
    elif gradient.numel():
        grid = (triton.cdiv(gradient.numel(), BLOCK),)
        with torch.cuda.device_of(gradient):
            _scale_kernel[grid](
                gradient, scaled, factor, gradient.numel(), IN_PLACE=in_place, BLOCK=BLOCK, num_warps=NUM_WARPS
            )
        torch.autograd.graph.increment_version(scaled)
    return scaled.detach()  # a tensor of its own, so that autograd may keep it as .grad without a copy
