"""What plans need to know of a device, and a table of common ones. Needs torch for the present one only."""

import functools
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Device:
    """What times and limits depend on: rates that large copies and GEMMs reach, not those of a data sheet."""

    name: str
    capability: tuple[int, int] | None  # of CUDA; None for a CPU or another maker's GPU
    memory_bytes: int
    bytes_per_s: float  # read plus written
    half_flops_per_s: float  # bf16 and fp16
    fp32_flops_per_s: float
    multiprocessors: int
    data_sheet_half_flops_per_s: float | None  # dense bf16 and fp16, which MFU is a share of


def _by_data_sheet(name, capability, gib, tb_per_s, half_tflops, fp32_tflops, multiprocessors) -> Device:
    """Other GPUs are taken to reach what the H200 does of its data sheet: 4.25 of 4.8 TB/s, 700 of 989 TFLOP/s."""
    rates = (tb_per_s * 1e12 * 4.25 / 4.8, half_tflops * 1e12 * 700 / 989, fp32_tflops * 1e12 * 0.75)
    return Device(name, capability, int(gib * 2**30), *rates, multiprocessors, half_tflops * 1e12)


DEVICES = {
    device.name: device
    for device in (
        Device("NVIDIA H200", (9, 0), int(139.8 * 2**30), 4.25e12, 700e12, 50e12, 132, 989e12),  # measured
        _by_data_sheet("NVIDIA B200", (10, 0), 178, 8.0, 2250, 75, 148),
        _by_data_sheet("NVIDIA H100 80GB HBM3", (9, 0), 79, 3.35, 989, 67, 132),
        _by_data_sheet("NVIDIA H100 PCIe", (9, 0), 79, 2.0, 756, 51, 114),
        _by_data_sheet("NVIDIA A100-SXM4-80GB", (8, 0), 79, 2.04, 312, 19.5, 108),
        _by_data_sheet("NVIDIA A100-SXM4-40GB", (8, 0), 39, 1.56, 312, 19.5, 108),
        _by_data_sheet("NVIDIA L40S", (8, 9), 44, 0.86, 362, 91, 142),
        _by_data_sheet("NVIDIA GeForce RTX 4090", (8, 9), 23.5, 1.01, 165, 82, 128),
        _by_data_sheet("NVIDIA GeForce RTX 3090", (8, 6), 23.6, 0.94, 71, 35, 82),
        _by_data_sheet("NVIDIA A10G", (8, 6), 22, 0.6, 70, 31, 80),
        _by_data_sheet("NVIDIA L4", (8, 9), 22, 0.3, 121, 30, 58),
        Device("cpu", None, 16 * 2**30, 2e10, 1e11, 1e11, 1, None),  # two cores
    )
}


@functools.cache
def present_device(name: str) -> Device:
    """The device that torch calls `name` ("cuda:0", "cpu"), with rates from DEVICES; with an A100's if it has none."""
    import torch  # only here: predictions need no torch

    if not name.startswith("cuda"):
        return replace(DEVICES["cpu"], memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    properties = torch.cuda.get_device_properties(name)
    known = DEVICES.get(properties.name)
    rates = known or replace(DEVICES["NVIDIA A100-SXM4-80GB"], name=f"{properties.name} (rates of an A100)")
    return replace(
        rates,
        capability=None if torch.version.hip else (properties.major, properties.minor),
        memory_bytes=properties.total_memory,
        data_sheet_half_flops_per_s=known and known.data_sheet_half_flops_per_s,
        multiprocessors=properties.multi_processor_count,
    )


def measured_device() -> Device:
    """The GPU, or CPU, that is here, with measured rates: of a large copy and of GEMMs of 8192^3 (a CPU: 1024^3)."""
    import torch

    name, size = ("cuda:0", 8192) if torch.cuda.is_available() else ("cpu", 1024)
    source = torch.ones(size, size * 8, device=name)
    target = torch.zeros_like(source)
    rates = {"bytes_per_s": 2 * source.nbytes / _seconds(name, lambda: target.copy_(source))}
    for field, dtype in (("half_flops_per_s", torch.bfloat16), ("fp32_flops_per_s", torch.float32)):
        matrix = torch.randn(size, size, device=name, dtype=dtype)
        rates[field] = 2 * size**3 / _seconds(name, functools.partial(torch.mm, matrix, matrix))
    return replace(present_device(name), **rates)


def _seconds(name: str, step: Callable[[], object]) -> float:
    """Of one step, the median of ten after two for warmth."""
    import torch

    times = []
    for _ in range(12):
        if name.startswith("cuda"):
            torch.cuda.synchronize(name)
        start = time.perf_counter()
        step()
        if name.startswith("cuda"):
            torch.cuda.synchronize(name)
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])
