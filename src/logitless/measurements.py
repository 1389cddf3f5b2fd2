"""How time, memory and bandwidth are measured: time by a GPU's own events or the clock, memory at the allocator.

On a GPU the device spins before each repetition, so that the launches of a short step are queued by the time it starts
and are not what is timed. A step that waits for the device in its own code loses that lead, as it would in training.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

SPIN_CYCLES = 2_000_000  # a millisecond


class Effort(NamedTuple):
    """How often a step is run: `warmups` untimed, then for about `seconds`, within bounds."""

    warmups: int
    seconds: float
    fewest: int
    most: int

    def repetitions(self, step_ms: float) -> int:
        return min(max(round(1000 * self.seconds / step_ms), self.fewest), self.most)


EFFORTS = {"cuda": Effort(3, 0.6, 10, 50), "cpu": Effort(1, 0.2, 3, 10)}


def time_steps(
    device: torch.device, repetitions: int, prepare: Callable[[int], None], *steps: Callable[[], None]
) -> list[list[float]]:
    """Milliseconds of each of `steps`, for each repetition; `prepare(repetition)` comes before and is not timed."""
    is_cuda = device.type == "cuda"

    def mark() -> torch.cuda.Event | float:
        if not is_cuda:
            return 1000 * time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    marks = []
    for repetition in range(repetitions):
        prepare(repetition)
        if is_cuda:
            torch.cuda._sleep(SPIN_CYCLES)
        marks.append([mark()])
        for step in steps:
            step()
            marks[-1].append(mark())
    if is_cuda:
        torch.cuda.synchronize(device)
    return [[a.elapsed_time(b) if is_cuda else b - a for a, b in pairwise(row)] for row in marks]


def peak_bytes(device: torch.device, steps: Sequence[Callable[[], None]]) -> int:
    """Bytes that the device's allocator has handed out while `steps` run, at most, above those out before.

    `memory.LiveTensorMeter` would not see what custom operators and compiled functions allocate inside themselves.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        for step in steps:
            step()
        return torch.cuda.max_memory_allocated(device) - before
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with _silent_stderr():
        profiler.start()
    try:
        for step in steps:
            step()
    finally:
        with _silent_stderr():
            profiler.stop()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(accumulate((event.nbytes() for event in events), initial=0))


@contextmanager
def _silent_stderr() -> Iterator[None]:
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


def copy_gb_per_s(device: torch.device) -> float:
    """Bytes read plus bytes written in a second by a copy within the device's memory, in 10**9 a second."""
    source = torch.ones(2**30 if device.type == "cuda" else 2**26, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)  # touched, so that no page is first made while the copy is timed
    laps = time_steps(device, 10, lambda repetition: None, lambda: target.copy_(source))
    return 2 * source.nbytes / statistics.median(map(sum, laps)) / 1e6
