"""Every kernel compiles, in the specialisations that are launched, for GPUs that need not be here, without spills."""

import os
import re
import subprocess
import sys

import pytest
import triton
from packaging import version
from tiny import ROOT

PROGRAM = ROOT / "tests" / "compile_ahead.py"
LARGEST_SHARED = 227 * 1024  # bytes that one program may have on compute capability 9 and 10
LARGEST_STACK = 16  # bytes a lane that are no loss: in the GEMM of a single class, and in rows that are computed again
KERNELS = ("_anchors_kernel", "_finish_rows_kernel", "_finish_dhidden_kernel", "_merge_kernel", "_scale_kernel")
EPILOGUES = ("exponentials", "gradients", "statistics")


@pytest.mark.parametrize(
    ("backend", "arch", "warp_size"),
    [("cuda", "80", 32), ("cuda", "90", 32), ("cuda", "100", 32), ("hip", "gfx942", 64)],
    ids=["sm_80", "sm_90", "sm_100", "gfx942"],
)
def test_kernels_compile_without_spills_for(backend, arch, warp_size, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    arguments = [sys.executable, PROGRAM, backend, arch, str(warp_size)]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    lines = done.stdout.splitlines()
    assert len([line for line in lines if "[N, " in line]) == 7 * 5
    assert len([line for line in lines if line.startswith("fp32 to")]) == 2
    for name in KERNELS:
        assert len([line for line in lines if line.startswith(name)]) >= 2, name
    gemms = {tuple(re.split(r"[ :]", line)[1:3]) for line in lines if line.startswith("_gemm_kernel")}
    if arch in ("90", "100"):
        assert {epilogue for epilogue, _ in gemms} == set(EPILOGUES)
        assert max(int(re.search(r"(\d+) bytes shared", line)[1]) for line in lines) <= LARGEST_SHARED
    else:
        assert gemms == set()  # other GPUs go without it
    spilled = {line: int(line.split()[-2]) for line in lines}
    largest = {line: LARGEST_STACK if line.startswith(("_gemm", "_finish")) else 0 for line in lines}
    if arch == "100" and version.parse(triton.__version__) >= version.parse("3.8"):
        largest |= {line: 72 for line in lines if line.startswith("_gemm_kernel exponentials")}  # those with a bias
    assert [line for line in lines if spilled[line] > largest[line]] == []
