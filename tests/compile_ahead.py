"""Prints a line for every launch of every kernel, compiled for a GPU that need not be here: its warps and registers.

    PYTHONPATH=. python tests/compile_ahead.py cuda 90 32        # or: hip gfx942 64

Run by test_compile_ahead.py in a process of its own: tests may run kernels in the interpreter, which cannot compile
them. What to compile is recorded from the launchers themselves: those of the kernels over rows are called with tensors
that have no memory, the others by whole losses of small heads on a CPU.
"""

import itertools
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import mangle_type
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels import gemm, row_anchors, row_kernels, row_sums, scaling
from kernels.linear_cross_entropy import linear_cross_entropy, linear_evaluation
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
HEADS = (  # vocabulary, width, bias; two tokens but of the first, because a size of 1 is compiled in
    (1, 8, True),
    (128256, 64, False),
    (300, 2304, True),  # wide enough for a GEMM whose tiles do not overlap
)


class Recorder:
    """Stands for a kernel, and keeps what it is launched with."""

    def __init__(self, kernel):
        self.kernel = kernel
        self.launches = []

    def __getitem__(self, grid):
        return lambda *arguments, **options: self.launches.append((arguments, options))

    def report(self, target: GPUTarget, what: str) -> None:
        """Compiles and prints the launches since the last report, but none twice."""
        printed = set()
        for arguments, options in self.launches:
            source, compiler_options = specialised(self.kernel, arguments, options)
            if (key := source.hash() + str(compiler_options)) in printed:
                continue
            printed.add(key)
            flags = [str(value) for value in options.values() if isinstance(value, str)]
            flags += [name for name, value in options.items() if value is True]
            binary = triton.compile(source, target=target, options=compiler_options)
            used, spilled = resources(binary, target)
            size = f"{binary.metadata.num_warps} warps, {binary.metadata.shared} bytes shared, {used}"
            print(f"{' '.join((what, *flags))}: {size}, {spilled} spilled")
        self.launches.clear()


def specialised(kernel, arguments: tuple, options: dict) -> tuple[ASTSource, dict]:
    """What is compiled for this launch, specialised as Triton's own launcher would, and the options for it."""
    signature, constants, attributes = {}, {}, {}
    for i, (name, value) in enumerate(zip(kernel.arg_names, arguments, strict=False)):  # constexprs come by name
        if value is None or (type(value) is int and value == 1):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif isinstance(value, TensorDescriptor):
            signature[name] = mangle_type(value)
        else:
            signature[name] = POINTERS[value.dtype] if isinstance(value, torch.Tensor) else "i32"
            if isinstance(value, torch.Tensor) or value % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
    compiler_options = {name: options[name] for name in ("num_warps", "num_stages", "maxnreg") if name in options}
    constexprs = {name: value for name, value in options.items() if name not in compiler_options}
    signature |= dict.fromkeys(constexprs, "constexpr")
    return ASTSource(kernel, signature, constants | constexprs, attributes), compiler_options


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


def run_heads() -> None:
    """What a head with the epilogue launches: in both schedules, with losses per token, and in an evaluation."""
    objective = Objective(z_loss=1e-4)
    options = {"z_loss": 1e-4, "chunk": 1}
    for vocab, width, has_bias in HEADS:
        n_tokens = min(vocab, 2)
        hidden, weight = (torch.empty(size, width, dtype=torch.bfloat16).requires_grad_() for size in (n_tokens, vocab))
        bias = torch.empty(vocab, dtype=torch.bfloat16).requires_grad_() if has_bias else None
        labels = torch.zeros(n_tokens, dtype=torch.int64)
        for schedule, reduction in itertools.product(("tokens", "vocab"), ("mean", "none")):
            how = {"schedule": schedule, "reduction": reduction}
            linear_cross_entropy(hidden, weight, labels, linear_bias=bias, **options, **how).sum().backward()
        with torch.no_grad():
            linear_cross_entropy(hidden, weight, labels, linear_bias=bias, **options)
        linear_evaluation(hidden, weight, labels, objective, bias=bias, chunk=1)


def main(backend: str, arch: str, warp_size: int) -> None:
    target = GPUTarget(backend, int(arch) if backend == "cuda" else arch, warp_size)
    row_kernels.runs_triton = lambda tensor: True
    row_kernels.WARP_SIZE = warp_size
    capability = divmod(int(arch), 10) if backend == "cuda" else (9, 4)  # gfx942
    has_gemm = capability[0] in (9, 10) and backend == "cuda"
    row_kernels.compute_capability = lambda device: capability
    scaling.NUM_WARPS = scaling.BLOCK // (16 * warp_size)  # made of WARP_SIZE at import

    rows_kernel = row_kernels._rows_kernel = Recorder(row_kernels._rows_kernel)
    for vocab, stride, dtype, objective in CASES:
        logits = torch.empty(8, stride, dtype=dtype, device="meta")[:, :vocab]
        labels, rows = torch.empty(8, dtype=torch.int64, device="meta"), Rows.empty(8, "meta")
        row_kernels.forward_rows(logits, labels, objective, rows)
        row_kernels.forward_rows(logits, labels, objective, rows, entropies=rows.losses)
        row_kernels.forward_backward_rows_(logits, labels, objective, rows)
        vectors = {"row_max": rows.row_max, "log_sum": rows.log_sum, "dlosses": rows.losses}
        row_kernels.backward_rows(logits, labels, objective, **vectors, dlogits=logits)
        rows_kernel.report(target, f"[N, {vocab}] of {stride} {dtype}")
        slab = {"first_class": 40, "vocab": vocab + 41}
        row_kernels.backward_rows(logits, labels, objective, **vectors, dlogits=logits, **slab)
        rows_kernel.report(target, f"slab [N, {vocab}] of {stride} {dtype}")

    scale_kernel = scaling._scale_kernel = Recorder(scaling._scale_kernel)
    for dtype in (torch.float32, torch.bfloat16):
        scaling.scale(torch.empty(50304, 768, device="meta"), torch.empty([], device="meta"), dtype)
        scale_kernel.report(target, f"fp32 to {dtype}")

    recorders = {}
    for module in (gemm, row_anchors, row_sums):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            recorders[name] = Recorder(getattr(module, name))
            setattr(module, name, recorders[name])
    if not has_gemm:
        gemm.takes = lambda head: True  # the kernels around it compile everywhere
        recorders["_gemm_kernel"].report = lambda *_: None
    run_heads()
    for name, recorder in {**recorders, "_scale_kernel": scale_kernel}.items():
        recorder.report(target, name)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
