"""Every kernel compiles, in the specialisations that are launched, for GPUs that need not be here; none spills."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# In a process of its own: this one may run kernels in the interpreter, which cannot compile them. What to compile is
# recorded from the launchers themselves, called with tensors that have no memory.
PROGRAM = """
import re, subprocess, sys, tempfile
from pathlib import Path
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kernels import row_kernels, scaling
from kernels.reference import Objective, Rows

backend, arch, warp_size = sys.argv[1], sys.argv[2], int(sys.argv[3])
target = GPUTarget(backend, int(arch) if arch.isdigit() else arch, warp_size)
launches = []


class Recorder:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *arguments, **options: launches.append((self.kernel, arguments, options))


def compiled(kernel, arguments, options):
    types = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int64: "*i64"}
    signature, constants, attributes = {}, {}, {}
    for i, (name, value) in enumerate(zip(kernel.arg_names, arguments)):
        if value is None or (type(value) is int and value == 1):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = types[value.dtype] if isinstance(value, torch.Tensor) else "i32"
            if isinstance(value, torch.Tensor) or value % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
    compiler_options = {name: options.pop(name) for name in ("num_warps", "maxnreg") if name in options}
    signature |= dict.fromkeys(options, "constexpr")
    source = ASTSource(kernel, signature, constants | options, attributes)
    return triton.compile(source, target=target, options=compiler_options)


def resources(binary):
    if backend == "hip":
        return {k: int(v) for k, v in re.findall(r"\\.(vgpr_count|vgpr_spill_count): +(\\d+)", binary.asm["amdgcn"])}
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True).stdout
    return {k: int(v) for k, v in re.findall(r"(REG|STACK):(\\d+)", text)}


def report(shape):
    for kernel, arguments, options in launches:
        flags = " ".join(name for name, value in options.items() if value is True)
        binary = compiled(kernel, arguments, options)
        used = resources(binary)
        spills = used["vgpr_spill_count" if backend == "hip" else "STACK"]
        print(f"{shape} {flags}: {binary.metadata.num_warps} warps, {used}, {spills} bytes spilled")
    launches.clear()


row_kernels._rows_kernel = Recorder(row_kernels._rows_kernel)
scaling._scale_kernel = Recorder(scaling._scale_kernel)
row_kernels.runs_triton = lambda tensor: True
row_kernels.WARP_SIZE = warp_size
row_kernels.compute_capability = lambda device: divmod(int(arch), 10) if backend == "cuda" else (9, 4)
plain, every = Objective(), Objective(label_smoothing=0.1, z_loss=1e-4, softcap=30.0)
for vocab, stride, dtype, objective in (
    (97, 128, torch.bfloat16, plain),
    (50257, 50304, torch.bfloat16, plain),
    (50257, 50257, torch.bfloat16, plain),
    (50304, 50304, torch.float16, plain),
    (50304, 50304, torch.float32, plain),
    (128256, 128256, torch.bfloat16, plain),
    (128256, 128256, torch.bfloat16, every),
):
    logits = torch.empty(8, stride, dtype=dtype, device="meta")[:, :vocab]
    labels, rows = torch.empty(8, dtype=torch.int64, device="meta"), Rows.empty(8, "meta")
    row_kernels.forward_rows(logits, labels, objective, rows)
    row_kernels.forward_backward_rows_(logits, labels, objective, rows)
    row_kernels.backward_rows(logits, labels, objective, rows.row_max, rows.log_sum, rows.losses, logits)
    report(f"[N, {vocab}] of {stride} {dtype}")

for dtype in (torch.float32, torch.bfloat16):
    scaling.scale(torch.empty(50304, 768, device="meta"), torch.empty([], device="meta"), dtype)
    report(f"fp32 to {dtype}")
"""


@pytest.mark.parametrize(
    ("backend", "arch", "warp_size"),
    [("cuda", "80", 32), ("cuda", "90", 32), ("cuda", "100", 32), ("hip", "gfx942", 64)],
    ids=["sm_80", "sm_90", "sm_100", "gfx942"],
)
def test_kernels_compile_without_spills_for(backend, arch, warp_size, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    arguments = [sys.executable, "-c", PROGRAM, backend, arch, str(warp_size)]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    lines = done.stdout.splitlines()
    assert len(lines) == 7 * 3 + 2
    assert [line for line in lines if not line.endswith(" 0 bytes spilled")] == []
