"""What is observed while a run trains: where it is, peak memory and speed, and the bar that shows them."""

import time
from contextlib import suppress

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import TQDMProgressBar

from logitless.memory import CudaMeter, LiveTensorMeter
from logitless.processes import age_s
from logitless.profiling import StepProfile


class Position(pl.Callback):
    """Where the run is, for the record of one that fails: optimizer step 1, 2, ... and what it is doing there."""

    def __init__(self):
        self.step, self.phase = 0, "setup"

    def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
        self.step, self.phase = trainer.global_step + 1, "forward"

    def on_before_backward(self, trainer, module, loss) -> None:
        self.phase = "backward"

    def on_before_optimizer_step(self, trainer, module, optimizer) -> None:
        self.phase = "optimizer"

    def on_validation_start(self, trainer, module) -> None:
        self.phase = "validation"


class PeakMemory(pl.Callback):
    """Peaks in GiB, under the meter's names.

    `cold` is the peak of the first step, which also makes the optimizer's state and compiles kernels; `warm` is the
    largest peak of the later steps, empty after a run of one step; `validation` is that of the validation passes.
    """

    def __init__(self, meter: CudaMeter | LiveTensorMeter):
        self.meter = meter
        self.cold: dict[str, float] = {}
        self.warm: dict[str, float] = {}
        self.validation: dict[str, float] = {}
        self._step = 0

    def on_train_start(self, trainer, module) -> None:
        self._step = trainer.global_step
        self.meter.reset()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        if trainer.global_step == self._step:
            return  # inside an accumulation window
        self._step = trainer.global_step
        if not self.cold:
            self.cold = self.meter.peaks()
            self.meter.reset()
        else:
            self.warm = _larger(self.warm, self.meter.peaks())
        if module.is_logging_step(self._step):
            for name, value in (self.warm or self.cold).items():
                module.add_to_point(f"memory/{name}", value)

    def on_validation_start(self, trainer, module) -> None:
        self.meter.reset()

    def on_validation_end(self, trainer, module) -> None:
        self.validation = _larger(self.validation, self.meter.peaks())
        self.meter.reset()

    def summary(self) -> dict[str, float]:
        """The peaks of the run as flat names: the warm ones as they are, the others with a prefix."""
        named = {"": self.warm, "cold_": self.cold, "validation_": self.validation}
        return {prefix + name: value for prefix, peaks in named.items() for name, value in peaks.items()}


def _larger(a: dict[str, float], b: dict[str, float]) -> dict[str, float]:
    return {name: max(value, a.get(name, value)) for name, value in b.items()}


class Throughput(pl.Callback):
    """Training tokens a second.

    Without validation, checkpoints, the first step (compilation, optimizer state), and the steps of `profile`.
    """

    def __init__(self, profile: StepProfile | None = None):
        self.profile = profile
        self._seconds = 0.0
        self._tokens = 0
        self._last: tuple[float, int] | None = None
        self._start = 0
        self.start_up_s: float | None = None  # from the start of the process to the end of the run's first step

    def on_train_start(self, trainer, module) -> None:
        self._start = trainer.global_step  # > 0 in a resumed run

    def tokens_per_s(self) -> float | None:
        """Mean over the run so far; None until the second logged step, or the first pause after step 1."""
        return self._tokens / self._seconds if self._seconds else None

    def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
        if self.profile and self.profile.covers(trainer.global_step):
            self._pause(module)
        elif self._last is None and trainer.global_step > self._start:
            self._restart(module)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        if self.start_up_s is None and trainer.global_step > self._start:
            self._wait(module)
            self.start_up_s = age_s()
        if self._last and module.tokens_seen > self._last[1] and module.is_logging_step(trainer.global_step):
            seconds, tokens = self._lap(module)
            module.add_to_point("tokens_per_s", tokens / seconds)

    def on_validation_start(self, trainer, module) -> None:
        self._pause(module)

    def on_save_checkpoint(self, trainer, module, checkpoint) -> None:
        self._pause(module)

    def _pause(self, module) -> None:
        if self._last is not None:
            self._lap(module)
            self._last = None

    def _restart(self, module) -> None:
        self._wait(module)
        self._last = time.perf_counter(), module.tokens_seen

    def _lap(self, module) -> tuple[float, int]:
        """Seconds and tokens since the last lap or restart, added to the totals."""
        then, tokens_then = self._last
        self._restart(module)
        seconds, tokens = self._last[0] - then, self._last[1] - tokens_then
        self._seconds += seconds
        self._tokens += tokens
        return seconds, tokens

    @staticmethod
    def _wait(module) -> None:
        if module.device.type == "cuda":
            torch.cuda.synchronize(module.device)


SHOWN_IN_BAR = "train/loss", "val/loss", "memory/peak_allocated_gib", "memory/peak_live_tensor_gib", "tokens_per_s"


class ProgressBar(TQDMProgressBar):
    """Counts the run's micro-batches; Lightning's own total takes optimizer steps for batches."""

    @property
    def total_train_batches(self) -> int:
        return self.trainer.num_training_batches

    def on_train_start(self, trainer, module) -> None:
        super().on_train_start(trainer, module)
        self.train_progress_bar.total = self.total_train_batches  # a resumed run never starts its epoch

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        module.write_point()  # else the bar would be a point late: the module's own hook comes after the callbacks'
        super().on_train_batch_end(trainer, module, outputs, batch, batch_idx)

    def on_exception(self, trainer, module, exception) -> None:
        """Ends the bars' lines, so that what is printed next begins one."""
        with suppress(TypeError):  # there are none yet
            self.train_progress_bar.close()
            self.val_progress_bar.close()

    def get_metrics(self, trainer, module) -> dict:
        values = {name: module.latest[name] for name in SHOWN_IN_BAR if name in module.latest}
        return {name: f"{value:,.0f}" if name == "tokens_per_s" else f"{value:.3f}" for name, value in values.items()}
