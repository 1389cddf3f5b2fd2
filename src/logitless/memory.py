"""Peak memory of a device: the CUDA allocator's counters on a GPU; on a CPU the bytes of live tensors.

A meter is a context manager; inside it, `peaks()` are the largest values since the last `reset()`, in GiB = 2**30 bytes
and under the name of what was measured. Resident memory is no measure: it keeps what the allocator does not give back.
`peak_bytes` is for a few calls instead of a run: on a CPU PyTorch's profiler sees inside operators too, but is slow.
"""

import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._library.custom_ops import OPDEFS  # by qualified name
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

GIB = 2**30
CPU_KERNEL = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


class CudaMeter:
    """`peak_allocated_gib` (tensors, rounded to the allocator's blocks) and `peak_reserved_gib` (its segments)."""

    def __init__(self, device: torch.device):
        self.device = device

    def __enter__(self) -> "CudaMeter":
        return self

    def __exit__(self, *exception) -> None:
        pass

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def peaks(self) -> dict[str, float]:
        return {
            "peak_allocated_gib": torch.cuda.max_memory_allocated(self.device) / GIB,
            "peak_reserved_gib": torch.cuda.max_memory_reserved(self.device) / GIB,
        }


class LiveTensorMeter(TorchDispatchMode):
    """`peak_live_tensor_gib`: bytes of the storages that operators returned, and of a module's, while they are alive.

    What an operator allocates and frees inside itself is seen only if `torch.library.custom_op` made it. A sparse
    tensor, which has no storage, counts nothing.
    """

    def __init__(self, module: nn.Module):
        super().__init__()
        self.live: dict[int, int] = {}  # storage: its bytes
        self.bytes = self.peak = 0
        for tensor in (*module.parameters(), *module.buffers()):
            self._add(tensor)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function._schema.name in OPDEFS:
            with self:  # its CPU kernel is Python
                result = function.redispatch(CPU_KERNEL, *args, **kwargs)
        else:
            result = function(*args, **kwargs)
        for leaf in tree_iter(result):
            if isinstance(leaf, Tensor) and leaf.device.type == "cpu":
                self._add(leaf)
        return result

    def reset(self) -> None:
        self.peak = self.bytes

    def peaks(self) -> dict[str, float]:
        return {"peak_live_tensor_gib": self.peak / GIB}

    def _add(self, tensor: Tensor) -> None:
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        if not torch._C._has_storage(tensor):
            return
        storage = tensor.untyped_storage()
        address = storage._cdata  # of the storage object, not of its bytes: those may move in a resize
        if address not in self.live:
            weakref.finalize(storage, self._remove, address).atexit = False
        self.bytes += storage.nbytes() - self.live.get(address, 0)
        self.live[address] = storage.nbytes()
        self.peak = max(self.peak, self.bytes)

    def _remove(self, address: int) -> None:
        self.bytes -= self.live.pop(address)


class NoMeter(nullcontext):
    """Measures nothing."""

    def reset(self) -> None:
        pass

    def peaks(self) -> dict[str, float]:
        return {}


def meter(
    module: nn.Module, device: torch.device, *, is_compiled: bool = False
) -> CudaMeter | LiveTensorMeter | NoMeter:
    """The meter for `device`, for a run that trains `module`; compiled code on a CPU has none that sees into it."""
    if device.type == "cuda":
        return CudaMeter(device)
    return NoMeter() if is_compiled else LiveTensorMeter(module)


def peak_bytes(device: torch.device, steps: Sequence[Callable[[], None]]) -> int:
    """Bytes that the device's allocator has handed out while `steps` run, at most, above those out before.

    `LiveTensorMeter` would not see what PyTorch's own operators and compiled code allocate inside themselves.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        for step in steps:
            step()
        return torch.cuda.max_memory_allocated(device) - before
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with silent_stderr():
        profiler.start()
    try:
        for step in steps:
            step()
    finally:
        with silent_stderr():
            profiler.stop()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(accumulate((event.nbytes() for event in events), initial=0))


@contextmanager
def silent_stderr() -> Iterator[None]:
    """Without the two lines that the profiler writes whenever it starts and stops, past Python's own stderr."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def allocator(device: torch.device) -> dict[str, str | float]:
    """The allocator's settings, and the memory that the device has, and has free, in GiB."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF") if device.type == "cuda" else ()  # the newer name first
    settings = next((os.environ[name] for name in names if name in os.environ), "")
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
    else:
        lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
        kib = {name: int(value) for name, value, *_ in lines}
        free, total = 1024 * kib["MemAvailable:"], 1024 * kib["MemTotal:"]
    return {"settings": settings, "free_gib": free / GIB, "total_gib": total / GIB}


def is_out_of_memory(error: BaseException, device: torch.device | None = None) -> bool:
    """Whether the allocator of `device` (None: of the CPU or a GPU) itself refused.

    Any other error, whatever its text says of CUDA, is an error; so is one of the CPU's in a run on a GPU.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    inner = getattr(error, "inner_exception", None)  # of a compiler of torch.compile
    if type(error).__name__ == "InternalTorchDynamoError":
        inner = error.__context__
    if inner is not None:
        return is_out_of_memory(inner, device)
    if device is not None and device.type != "cpu":
        return False
    is_refusal = type(error) is RuntimeError and "DefaultCPUAllocator: can't allocate memory" in str(error)
    return is_refusal or isinstance(error, MemoryError)
