"""Why bf16 kernels are tested on a GPU only."""

import pytest
import torch
import triton
import triton.language as tl
from conftest import HAS_GPU


@triton.jit
def _add(x_ptr, y_ptr, CAST: tl.constexpr):
    x, y = tl.load(x_ptr), tl.load(y_ptr)
    if CAST:
        x, y = x.to(tl.float32), y.to(tl.float32)
    tl.store(x_ptr, x + y)


@pytest.mark.skipif(HAS_GPU, reason="about the interpreter")
def test_bf16_arithmetic_in_the_interpreter_is_wrong_unless_cast_first():
    """If this fails, Triton has mended its interpreter, and bf16 kernels can be tested without a GPU."""

    def add(cast):
        x = torch.tensor(2.5, dtype=torch.bfloat16)
        _add[(1,)](x, torch.tensor(2.0, dtype=torch.bfloat16), CAST=cast)
        return x.item()

    assert add(cast=True) == 4.5
    assert add(cast=False) != 4.5
