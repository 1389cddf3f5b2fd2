"""A device that behaves as if it had less memory: `memory_limit_gib` of a run, with real allocation failures.

Both limits are callbacks of the trainer, hold from before the first step until the run ends or fails, and say in
`means` what they limit.
"""

import ctypes
import gc
import resource
from pathlib import Path

import lightning.pytorch as pl
import torch

from logitless.memory import GIB

M_MMAP_THRESHOLD = -3  # of malloc.h


class CudaMemoryLimit(pl.Callback):
    means = "bytes that the CUDA allocator may take from the device (the peak of reserved memory), without the context"

    def __init__(self, gib: float, device: torch.device):
        self.device = device
        self.share = gib * GIB / torch.cuda.get_device_properties(device).total_memory

    def setup(self, trainer, module, stage: str) -> None:
        torch.cuda.set_per_process_memory_fraction(self.share, self.device)

    def teardown(self, trainer, module, stage: str) -> None:
        torch.cuda.set_per_process_memory_fraction(1.0, self.device)

    def on_exception(self, trainer, module, exception: BaseException) -> None:
        self.teardown(trainer, module, "")


class CpuMemoryLimit(pl.Callback):
    """A limit of the process's data (RLIMIT_DATA of Linux), lifted while a checkpoint is written.

    Writing under it would damage the file: only what trains and validates has to fit.
    """

    means = "bytes of the process's data above those of the built and warmed-up model, before gradients and optimizer"

    def __init__(self, gib: float):
        self.bytes = round(gib * GIB)
        self.limit: int | None = None
        # From now on a freed tensor goes back to the system at once: without this glibc soon keeps all but the largest.
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**17)

    def on_train_start(self, trainer, module) -> None:
        square = torch.ones(256, 256)
        (square @ square).exp_()  # starts the thread pools, whose stacks count as data
        gc.collect()  # what is freed later would make room beyond the limit
        ctypes.CDLL(None).malloc_trim(0)
        self.limit = _data_bytes() + self.bytes

    def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
        _limit_data(self.limit)

    def on_validation_start(self, trainer, module) -> None:
        _limit_data(self.limit)

    def on_save_checkpoint(self, trainer, module, checkpoint: dict) -> None:
        _limit_data(None)

    def teardown(self, trainer, module, stage: str) -> None:
        _limit_data(None)

    def on_exception(self, trainer, module, exception: BaseException) -> None:
        _limit_data(None)


def memory_limit(
    gib: float | None, device: torch.device, *, is_compiled: bool = False
) -> CudaMemoryLimit | CpuMemoryLimit | None:
    """The limit for a run on `device`; None for no limit.

    Raises:
        ValueError: more than the GPU has, or for a compiled run on a CPU.
    """
    if gib is None:
        return None
    if device.type == "cpu":
        if is_compiled:
            raise ValueError("memory_limit_gib on a CPU would hold for the compiler too: use compile=false")
        return CpuMemoryLimit(gib)
    limit = CudaMemoryLimit(gib, device)
    if limit.share > 1:
        raise ValueError(f"memory_limit_gib={gib} is more than the {gib / limit.share:.1f} GiB of this GPU")
    return limit


def _data_bytes() -> int:
    """VmData of the process: its private writable memory, used or not."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no line VmData")


def _limit_data(limit: int | None) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    is_less = limit is not None and (hard == resource.RLIM_INFINITY or limit < hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit if is_less else hard, hard))
