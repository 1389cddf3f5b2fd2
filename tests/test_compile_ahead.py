"""Every kernel compiles, in the specialisations that are launched, for GPUs that need not be here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# In a process of its own: this one may run kernels in the interpreter, which cannot compile them.
PROGRAM = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kernels import cross_entropy as ce

capability, dtype, options = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "True"
types = {"logits_ptr": f"*{dtype}", "dlogits_ptr": f"*{dtype}", "labels_ptr": "*i64"}
types |= {name: "i32" for name in ("stride_n", "dstride_n", "V", "ignore_index")}
types |= {name: "fp32" for name in ("label_smoothing", "z_loss", "softcap")}
constants = {"stride_v": 1, "dstride_v": 1, "BLOCK_V": ce.MAX_BLOCK_V, "HAS_SOFTCAP": options, "HAS_SMOOTHING": options}

for forward, backward in ((True, False), (True, True), (False, True)):
    constexprs = constants | {"FORWARD": forward, "BACKWARD": backward}
    constexprs |= {} if backward else {"dlogits_ptr": None}
    constexprs |= {"dlosses_ptr": None} if forward else {"losses_ptr": None, "cross_entropies_ptr": None}
    names = ce._rows_kernel.arg_names
    signature = {name: "constexpr" if name in constexprs else types.get(name, "*fp32") for name in names}
    source = ASTSource(fn=ce._rows_kernel, signature=signature, constexprs=constexprs)
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options={"num_warps": ce.NUM_WARPS})
    assert len(compiled.asm["cubin"]) > 0
    print(capability, dtype, forward, backward, compiled.metadata.name)
"""


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("options", [False, True], ids=["plain", "softcap and smoothing"])
def test_kernels_compile_for(capability, dtype, options, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    arguments = [sys.executable, "-c", PROGRAM, str(capability), dtype, str(options)]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 3, done.stdout
