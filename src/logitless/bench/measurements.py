"""Measurements of implementations, one after another, on one head or on one tensor of logits.

Time is a GPU's own events or the clock. On a GPU the device spins before each repetition, so that the launches of a
short step are queued by the time it starts and are not what is timed. A step that waits for the device in its own code
loses that lead, as it would in training.

The GEMMs of a head (logits, dhidden and dweight, by cuBLAS alone, into buffers that are there already) are timed right
before and right after each implementation, because clocks drift, and `ratio` is to the median of these. Repetitions
rotate among sets of inputs. Kernels that take logits and make no GEMM are compared with copies of as many bytes.
"""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from kernels import row_kernels
from kernels.reference import Objective, Rows
from logitless.bench.inputs import Inputs, make_gold, relative_error
from logitless.bench.peers import Loss
from logitless.memory import peak_bytes

MIB = 2**20
SPIN_CYCLES = 2_000_000  # a millisecond
GEMM_REPETITIONS = 5  # on either side of an implementation
LOGITS_KERNELS = ("logits in place", "logits forward", "logits backward", "logits forward, backward")


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


def copy_gb_per_s(device: torch.device) -> float:
    """Bytes read plus bytes written in a second by a copy within the device's memory, in 10**9 a second."""
    source = torch.ones(2**30 if device.type == "cuda" else 2**26, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)  # touched, so that no page is first made while the copy is timed
    laps = time_steps(device, 10, lambda repetition: None, lambda: target.copy_(source))
    return 2 * source.nbytes / statistics.median(map(sum, laps)) / 1e6


class MeasuredHead:
    """One head, on which implementations are measured one after another."""

    def __init__(self, sets: list[Inputs]):
        self.sets = sets
        self.device = sets[0].hidden.device
        self.effort = EFFORTS[self.device.type]
        self.gold = make_gold(sets[0])
        dtype, weight_dtype = (tensor.dtype for tensor in sets[0][:2])
        self.context = nullcontext() if dtype == weight_dtype else torch.autocast(self.device.type, dtype)
        self.gemms = _gemms(sets[0])
        time_steps(self.device, self.effort.warmups, self._prepare, *self.gemms)
        casts = time_steps(self.device, 10, self._prepare, lambda: sets[0].weight.detach().to(dtype))
        # What autocast does to the weight once a step, and is part of `total_ms`.
        self.cast = {} if dtype == weight_dtype else {"cast_ms": statistics.median(map(sum, casts))}

    def measure(self, loss: Loss, *, is_evaluation: bool = False) -> dict:
        """Times, transient memory and errors of `loss`; for an evaluation, of its forward beside the first GEMM."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # blocks that the last implementation cut up
        torch.compiler.reset()  # a function compiles for eight shapes, and without a word runs eagerly on the ninth
        steps = [partial(self._evaluate, loss)] if is_evaluation else [partial(self._forward, loss), self._backward]
        own_gemms = self.gemms[: 1 if is_evaluation else 3]
        try:
            start = time.perf_counter()
            warm = time_steps(self.device, 1, self._prepare, *steps)
            first_call_s = time.perf_counter() - start
            warm += time_steps(self.device, self.effort.warmups - 1, self._prepare, *steps)
            repetitions = self.effort.repetitions(sum(warm[-1]))
            gemms = time_steps(self.device, GEMM_REPETITIONS, self._prepare, *own_gemms)
            laps = time_steps(self.device, repetitions, self._prepare, *steps)
            gemms += time_steps(self.device, GEMM_REPETITIONS, self._prepare, *own_gemms)
            results = self._inspect(steps)
        finally:
            self._prepare(0)  # also frees what a failure left
        names = ("forward_ms", "backward_ms")[: len(steps)]
        times = {name: statistics.median(lap) for name, lap in zip(names, zip(*laps, strict=True), strict=True)}
        total_ms, gemm_ms = (statistics.median(map(sum, rows)) for rows in (laps, gemms))
        times |= {"total_ms": total_ms, "gemm_ms": gemm_ms, "ratio": total_ms / gemm_ms, "first_call_s": first_call_s}
        return times | {"repetitions": repetitions} | self.cast | results

    def _prepare(self, repetition: int) -> None:
        self.inputs, self.loss = self.sets[repetition % len(self.sets)], None
        for inputs in self.sets:
            inputs.hidden.grad = inputs.weight.grad = None

    def _forward(self, loss: Loss) -> None:
        with self.context:
            self.loss = loss(*self.inputs)

    def _backward(self) -> None:
        self.loss.backward()

    def _evaluate(self, loss: Loss) -> None:
        with torch.no_grad():
            self._forward(loss)

    def _inspect(self, steps: Sequence[Callable[[], None]]) -> dict:
        """Transient memory and errors, of one more call on the first set."""
        self._prepare(0)
        gc.collect()
        peak = peak_bytes(self.device, steps)
        hidden, weight, _ = self.inputs
        values = {"loss": self.loss, "dhidden": hidden.grad, "dweight": weight.grad}
        errors = {
            name: relative_error(value, getattr(self.gold, name)) for name, value in values.items() if value is not None
        }
        returned = sum(gradient.nbytes for gradient in (hidden.grad, weight.grad) if gradient is not None)
        return {"transient_mib": (peak - returned) / MIB, "errors": errors, "gold": self.gold.dtype}


def _gemms(inputs: Inputs) -> list[Callable[[], None]]:
    """Functions that make logits, dhidden and dweight by one GEMM each, in the dtype of the hidden states."""
    hidden, weight = inputs.hidden.detach(), inputs.weight.detach().to(inputs.hidden.dtype)
    logits, dhidden, dweight = hidden @ weight.t(), torch.empty_like(hidden), torch.empty_like(weight)
    return [
        lambda: torch.mm(hidden, weight.t(), out=logits),
        lambda: torch.mm(logits, weight, out=dhidden),
        lambda: torch.mm(logits.t(), hidden, out=dweight),
    ]


class MeasuredLogits:
    """Logits [N, V] on which our kernels are measured; each repetition gets fresh ones, which is not timed.

    Args:
        sets: logits [N, V] and labels [N] of each.
        copy_gb_per_s: what the device's memory copies, as `copy_gb_per_s` measures it.
    """

    def __init__(self, sets: list[tuple[Tensor, Tensor]], copy_gb_per_s: float):
        self.sets = sets
        self.logits, self.labels = torch.empty_like(sets[0][0]), sets[0][1]
        self.device = self.logits.device
        self.rows = Rows.empty(len(self.labels), self.device)
        self.dlosses = torch.ones_like(self.rows.losses)
        self.pass_ms = self.logits.nbytes / copy_gb_per_s / 1e6

    def measure(self, name: str) -> dict:
        """Time of the kernels called `name`, and of copies that move as many bytes."""
        steps = {
            "logits in place": [self._in_place],
            "logits forward": [self._forward],
            "logits backward": [self._backward],
            "logits forward, backward": [self._forward, self._backward],
        }[name]
        effort = EFFORTS[self.device.type]
        warm = time_steps(self.device, effort.warmups, self._prepare, *steps)
        repetitions = effort.repetitions(sum(warm[-1]))
        laps = time_steps(self.device, repetitions, self._prepare, *steps)
        return {
            "total_ms": statistics.median(map(sum, laps)),
            "one_read_one_write_ms": 2 * self.pass_ms,
            "two_reads_one_write_ms": 3 * self.pass_ms,
            "repetitions": repetitions,
        }

    def _prepare(self, repetition: int) -> None:
        source, self.labels = self.sets[repetition % len(self.sets)]
        self.logits.copy_(source)
        # what the backward kernel reads, and the forward kernel will write again
        row_kernels.forward_rows(self.logits, self.labels, Objective(), self.rows)

    def _in_place(self) -> None:
        row_kernels.forward_backward_rows_(self.logits, self.labels, Objective(), self.rows)

    def _forward(self) -> None:
        row_kernels.forward_rows(self.logits, self.labels, Objective(), self.rows)

    def _backward(self) -> None:
        row_kernels.backward_rows(
            self.logits,
            self.labels,
            Objective(),
            row_max=self.rows.row_max,
            log_sum=self.rows.log_sum,
            dlosses=self.dlosses,
            dlogits=self.logits,
        )
