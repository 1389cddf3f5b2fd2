"""Trials: one head or one tensor of logits, on which implementations are measured one after another.

The GEMMs of a head (logits, dhidden and dweight, by cuBLAS alone, into buffers that are there already) are timed right
before and right after each implementation, because clocks drift, and `ratio` is to the median of these. Repetitions
rotate among sets of inputs. Kernels that take logits and make no GEMM are timed against copies of as many bytes.
"""

import gc
import statistics
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor

from kernels import row_kernels
from kernels.reference import Objective, Rows
from logitless.measurements import EFFORTS, copy_gb_per_s, peak_bytes, time_steps
from logitless.peers import Loss
from logitless.problems import Inputs, make_gold, relative_error

MIB = 2**20
GEMM_REPETITIONS = 5  # on either side of an implementation
LOGITS_KERNELS = ("logits in place", "logits forward", "logits backward", "logits forward, backward")


class HeadTrial:
    """One head, on which implementations are measured one after another."""

    def __init__(self, sets: list[Inputs]):
        self.sets = sets
        self.device = sets[0].hidden.device
        self.effort = EFFORTS[self.device.type]
        self.gold = make_gold(sets[0])
        dtype, weight_dtype = (tensor.dtype for tensor in sets[0][:2])
        self.context = nullcontext() if dtype == weight_dtype else torch.autocast(self.device.type, dtype)
        self.gemms = _gemms(sets[0])
        time_steps(self.device, self.effort.warmups, self._prepare, self.gemms)

    def measure(self, loss: Loss) -> dict:
        """Times, transient memory and errors of `loss`."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # blocks that the last implementation cut up
        torch.compiler.reset()  # a function compiles for eight shapes, and without a word runs eagerly on the ninth
        steps = partial(self._forward, loss), self._backward
        try:
            warm = time_steps(self.device, self.effort.warmups, self._prepare, *steps)
            repetitions = self.effort.repetitions(sum(warm[-1]))
            gemms = time_steps(self.device, GEMM_REPETITIONS, self._prepare, self.gemms)
            laps = time_steps(self.device, repetitions, self._prepare, *steps)
            gemms += time_steps(self.device, GEMM_REPETITIONS, self._prepare, self.gemms)
            results = self._inspect(steps)
        finally:
            self._prepare(0)  # also frees what a failure left
        forward_ms, backward_ms = (statistics.median(column) for column in zip(*laps, strict=True))
        total_ms, gemm_ms = (statistics.median(map(sum, rows)) for rows in (laps, gemms))
        times = {"forward_ms": forward_ms, "backward_ms": backward_ms, "total_ms": total_ms, "gemm_ms": gemm_ms}
        return times | {"ratio": total_ms / gemm_ms, "repetitions": repetitions} | results

    def _prepare(self, repetition: int) -> None:
        self.inputs, self.loss = self.sets[repetition % len(self.sets)], None
        for inputs in self.sets:
            inputs.hidden.grad = inputs.weight.grad = None

    def _forward(self, loss: Loss) -> None:
        with self.context:
            self.loss = loss(*self.inputs)

    def _backward(self) -> None:
        self.loss.backward()

    def _inspect(self, steps: Sequence[Callable[[], None]]) -> dict:
        """Transient memory and errors, of one more call on the first set."""
        self._prepare(0)
        gc.collect()
        peak = peak_bytes(self.device, steps)
        hidden, weight, _ = self.inputs
        values = {"loss": self.loss, "dhidden": hidden.grad, "dweight": weight.grad}
        errors = {name: relative_error(value, getattr(self.gold, name)) for name, value in values.items()}
        transient = {"transient_mib": (peak - hidden.grad.nbytes - weight.grad.nbytes) / MIB}
        return transient | {"errors": errors, "gold": self.gold.dtype}


def _gemms(inputs: Inputs) -> Callable[[], None]:
    """A function that makes logits, dhidden and dweight by one GEMM each, in the dtype of the hidden states."""
    hidden, weight = inputs.hidden.detach(), inputs.weight.detach().to(inputs.hidden.dtype)
    logits, dhidden, dweight = hidden @ weight.t(), torch.empty_like(hidden), torch.empty_like(weight)

    def run() -> None:
        torch.mm(hidden, weight.t(), out=logits)
        torch.mm(logits, weight, out=dhidden)
        torch.mm(logits.t(), hidden, out=dweight)

    return run


class LogitsTrial:
    """Logits [N, V] on which our kernels are measured; each repetition gets fresh ones, which is not timed."""

    def __init__(self, sets: list[tuple[Tensor, Tensor]]):
        self.sets = sets
        self.logits, self.labels = torch.empty_like(sets[0][0]), sets[0][1]
        self.device = self.logits.device
        self.rows = Rows.empty(len(self.labels), self.device)
        self.dlosses = torch.ones_like(self.rows.losses)

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
        bandwidth = copy_gb_per_s(self.device)
        pass_ms = self.logits.nbytes / bandwidth / 1e6
        return {
            "total_ms": statistics.median(map(sum, laps)),
            "copy_gb_per_s": bandwidth,
            "one_read_one_write_ms": 2 * pass_ms,
            "two_reads_one_write_ms": 3 * pass_ms,
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
        statistics_ = self.rows.row_max, self.rows.log_sum
        row_kernels.backward_rows(self.logits, self.labels, Objective(), *statistics_, self.dlosses, self.logits)
