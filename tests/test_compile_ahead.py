"""Every kernel compiles, in the specialisations that are launched, for GPUs that need not be here; none spills."""

import os
import subprocess
import sys

import pytest
from tiny import ROOT

PROGRAM = ROOT / "tests" / "compile_ahead.py"


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
    assert len(lines) == 7 * 3 + 2
    assert [line for line in lines if not line.endswith(" 0 spilled")] == []
