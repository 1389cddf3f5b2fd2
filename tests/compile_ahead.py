"""Prints a line for every launch of every kernel, compiled for a GPU that need not be here: its warps and registers.

    PYTHONPATH=. python tests/compile_ahead.py cuda 90 32        # or: hip gfx942 64

Run by test_compile_ahead.py in a process of its own: tests may run kernels in the interpreter, which cannot compile
them. What to compile is recorded from the launchers themselves, called with tensors that have no memory.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import row_kernels, scaling
from kernels.reference import Objective, Rows

POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int64: "*i64"}
PLAIN, EVERY = Objective(), Objective(label_smoothing=0.1, z_loss=1e-4, softcap=30.0)
CASES = (  # vocabulary, stride of a row, dtype, objective
    (97, 128, torch.bfloat16, PLAIN),
    (50257, 50304, torch.bfloat16, PLAIN),
    (50257, 50257, torch.bfloat16, PLAIN),
    (50304, 50304, torch.float16, PLAIN),
    (50304, 50304, torch.float32, PLAIN),
    (128256, 128256, torch.bfloat16, PLAIN),
    (128256, 128256, torch.bfloat16, EVERY),
)


class Recorder:
    """Stands for a kernel, and keeps what it is launched with."""

    def __init__(self, kernel):
        self.kernel = kernel
        self.launches = []

    def __getitem__(self, grid):
        return lambda *arguments, **options: self.launches.append((arguments, options))

    def report(self, target: GPUTarget, what: str) -> None:
        """Compiles and prints the launches since the last report."""
        for arguments, options in self.launches:
            flags = " ".join(name for name, value in options.items() if value is True)
            binary = compiled(self.kernel, arguments, options, target)
            used, spilled = resources(binary, target)
            print(f"{what} {flags}: {binary.metadata.num_warps} warps, {used}, {spilled} spilled")
        self.launches.clear()


def compiled(kernel, arguments: tuple, options: dict, target: GPUTarget):
    """The binary for this launch, specialised as Triton's own launcher would."""
    signature, constants, attributes = {}, {}, {}
    for i, (name, value) in enumerate(zip(kernel.arg_names, arguments, strict=False)):  # constexprs come by name
        if value is None or (type(value) is int and value == 1):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = POINTERS[value.dtype] if isinstance(value, torch.Tensor) else "i32"
            if isinstance(value, torch.Tensor) or value % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
    compiler_options = {name: options[name] for name in ("num_warps", "maxnreg") if name in options}
    constexprs = {name: value for name, value in options.items() if name not in compiler_options}
    signature |= dict.fromkeys(constexprs, "constexpr")
    source = ASTSource(kernel, signature, constants | constexprs, attributes)
    return triton.compile(source, target=target, options=compiler_options)


def resources(binary, target: GPUTarget) -> tuple[dict[str, int], int]:
    """Counts by their names, and the one that is 0 if nothing spills: registers on HIP, bytes of stack on CUDA."""
    if target.backend == "hip":
        found = re.findall(r"\.(vgpr_count|vgpr_spill_count): +(\d+)", binary.asm["amdgcn"])
        spilled = "vgpr_spill_count"
    else:
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(binary.asm["cubin"])
            file.flush()
            command = [tool, "--dump-resource-usage", file.name]
            found = re.findall(r"(REG|STACK):(\d+)", subprocess.run(command, capture_output=True, text=True).stdout)
        spilled = "STACK"
    used = {name: int(count) for name, count in found}
    return used, used[spilled]


def main(backend: str, arch: str, warp_size: int) -> None:
    target = GPUTarget(backend, int(arch) if backend == "cuda" else arch, warp_size)
    row_kernels.runs_triton = lambda tensor: True
    row_kernels.WARP_SIZE = warp_size
    capability = divmod(int(arch), 10) if backend == "cuda" else (9, 4)  # gfx942
    row_kernels.compute_capability = lambda device: capability
    scaling.NUM_WARPS = scaling.BLOCK // (16 * warp_size)  # made of WARP_SIZE at import

    rows_kernel = row_kernels._rows_kernel = Recorder(row_kernels._rows_kernel)
    for vocab, stride, dtype, objective in CASES:
        logits = torch.empty(8, stride, dtype=dtype, device="meta")[:, :vocab]
        labels, rows = torch.empty(8, dtype=torch.int64, device="meta"), Rows.empty(8, "meta")
        row_kernels.forward_rows(logits, labels, objective, rows)
        row_kernels.forward_backward_rows_(logits, labels, objective, rows)
        vectors = {"row_max": rows.row_max, "log_sum": rows.log_sum, "dlosses": rows.losses}
        row_kernels.backward_rows(logits, labels, objective, **vectors, dlogits=logits)
        rows_kernel.report(target, f"[N, {vocab}] of {stride} {dtype}")

    scale_kernel = scaling._scale_kernel = Recorder(scaling._scale_kernel)
    for dtype in (torch.float32, torch.bfloat16):
        scaling.scale(torch.empty(50304, 768, device="meta"), torch.empty([], device="meta"), dtype)
        scale_kernel.report(target, f"fp32 to {dtype}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
