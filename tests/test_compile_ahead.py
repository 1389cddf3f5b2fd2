"""Every kernel compiles, in the specialisations that are launched, for GPUs that need not be here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# In a process of its own: this one may run kernels in the interpreter, which cannot compile them.
PROGRAM = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kernels import cross_entropy as ce

capability, dtype, has_softcap = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "True"
rows = {name: "*fp32" for name in ("losses_ptr", "cross_entropies_ptr", "row_max_ptr", "log_sum_ptr", "dlosses_ptr")}
types = rows | {"logits_ptr": f"*{dtype}", "dlogits_ptr": f"*{dtype}", "labels_ptr": "*i64"}
types |= {name: "i32" for name in ("stride_n", "dstride_n", "V", "ignore_index")}
types |= {name: "fp32" for name in ("label_smoothing", "z_loss", "softcap")}
constants = {"stride_v": 1, "dstride_v": 1, "BLOCK_V": ce.MAX_BLOCK_V, "HAS_SOFTCAP": has_softcap}
constants |= {"GRADIENT": True, "HAS_SMOOTHING": has_softcap}

result = {}
for kernel in (ce._forward_kernel, ce._backward_kernel):
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    constexprs = {name: constants[name] for name, kind in signature.items() if kind == "constexpr"}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": ce.NUM_WARPS})
    result[kernel.__name__] = len(compiled.asm["cubin"])
print(json.dumps(result))
"""


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("has_softcap", [False, True], ids=["plain", "softcap and smoothing"])
def test_kernels_compile_for(capability, dtype, has_softcap, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    arguments = [sys.executable, "-c", PROGRAM, str(capability), dtype, str(has_softcap)]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(size > 0 for size in json.loads(done.stdout).values())
