"""Peaks of the first step, of later steps and of validation are kept apart; speed counts training only."""

import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from tiny import ROOT, read_curve, tiny, train

from logitless import callbacks
from logitless.callbacks import PeakMemory, ProgressBar, Throughput
from logitless.profiling import StepProfile


class FakeMeter:
    """A peak counter whose memory use the test dictates."""

    def __init__(self):
        self.peak = 0.0

    def use(self, gib: float) -> None:
        self.peak = max(self.peak, gib)

    def reset(self) -> None:
        self.peak = 0.0

    def peaks(self) -> dict[str, float]:
        return {"peak_gib": self.peak}


class FakeModule:
    tokens_seen = 0
    device = SimpleNamespace(type="cpu")

    def __init__(self):
        self.plotted: list[tuple[str, float]] = []

    def is_logging_step(self, step: int) -> bool:
        return True

    def add_to_point(self, name, value):
        self.plotted.append((name, value))


class Training:
    """Walks callbacks through a run as Lightning does."""

    def __init__(self, *watchers, start: int = 0, accumulate: int = 1):
        self.watchers, self.accumulate = watchers, accumulate
        self.trainer, self.module = SimpleNamespace(global_step=start), FakeModule()
        self.call("on_train_start")

    def call(self, hook: str, *args) -> None:
        for watcher in self.watchers:
            getattr(watcher, hook)(self.trainer, self.module, *args)

    def step(self, happens=lambda: None, tokens: int = 10) -> None:
        for micro_batch in range(self.accumulate):
            self.call("on_train_batch_start", None, micro_batch)
            happens()
            if micro_batch == self.accumulate - 1:
                self.trainer.global_step += 1
                self.module.tokens_seen += tokens
            self.call("on_train_batch_end", None, None, micro_batch)

    def validate(self, happens) -> None:
        self.call("on_validation_start")
        happens()
        self.call("on_validation_end")

    def save_checkpoint(self, happens) -> None:
        self.call("on_save_checkpoint", {})
        happens()


def test_cold_warm_and_validation_peaks_are_kept_apart():
    meter = FakeMeter()
    meter.use(99)  # before training: building the model
    peaks = PeakMemory(meter)
    training = Training(peaks)
    training.step(lambda: meter.use(9))
    training.step(lambda: meter.use(5))
    training.validate(lambda: meter.use(20))
    training.step(lambda: meter.use(7))
    training.validate(lambda: meter.use(3))
    training.step(lambda: meter.use(6))
    assert peaks.summary() == {"peak_gib": 7, "cold_peak_gib": 9, "validation_peak_gib": 20}
    assert training.module.plotted == [("memory/peak_gib", value) for value in (9, 5, 7, 7)]


def test_a_run_of_one_step_has_only_a_cold_peak():
    meter = FakeMeter()
    peaks = PeakMemory(meter)
    Training(peaks).step(lambda: meter.use(9))
    assert peaks.summary() == {"cold_peak_gib": 9}


def test_a_resumed_run_has_a_cold_step_of_its_own():
    meter = FakeMeter()
    peaks = PeakMemory(meter)
    training = Training(peaks, start=50)
    training.step(lambda: meter.use(9))
    training.step(lambda: meter.use(5))
    assert peaks.summary() == {"peak_gib": 5, "cold_peak_gib": 9}


def test_all_micro_batches_of_the_first_step_are_cold():
    meter = FakeMeter()
    peaks = PeakMemory(meter)
    training = Training(peaks, accumulate=3)
    use = iter([1, 9, 2, 5, 6, 5])
    for _ in range(2):
        training.step(lambda: meter.use(next(use)))
    assert peaks.summary() == {"peak_gib": 6, "cold_peak_gib": 9}


@pytest.fixture
def sleep(monkeypatch):
    """Advances the only clock that Throughput reads."""
    now = [0.0]
    monkeypatch.setattr(callbacks.time, "perf_counter", lambda: now[0])

    def sleep(seconds: float) -> None:
        now[0] += seconds

    return sleep


def test_speed_leaves_out_validation_checkpoints_and_the_first_step(sleep):
    throughput = Throughput()
    training = Training(throughput)
    training.step(lambda: sleep(100), tokens=1000)
    training.step(lambda: sleep(1))
    training.step(lambda: sleep(1))
    training.validate(lambda: sleep(50))
    training.save_checkpoint(lambda: sleep(70))
    training.step(lambda: sleep(3))
    assert throughput.tokens_per_s() == pytest.approx(30 / 5)
    assert [value for _, value in training.module.plotted] == pytest.approx([10, 10, 10 / 3])


def test_speed_leaves_out_profiled_steps_and_what_profiling_them_takes(sleep):
    profile = StepProfile(None, last_step=8)
    profile.on_train_batch_start = lambda trainer, *_: sleep(40 if trainer.global_step == 3 else 0)
    throughput = Throughput(profile)
    training = Training(throughput, profile)
    training.step(lambda: sleep(100))
    for n_done in range(1, 10):
        training.step(lambda n_done=n_done: sleep(20 if 3 <= n_done < 8 else 2))
    assert throughput.tokens_per_s() == pytest.approx(5)


def test_speed_of_a_run_of_one_step_is_unknown(sleep):
    throughput = Throughput()
    training = Training(throughput)
    training.step(lambda: sleep(1))
    training.validate(lambda: sleep(1))
    assert throughput.tokens_per_s() is None
    assert training.module.plotted == []


@pytest.mark.parametrize("start", [0, 50])
def test_all_micro_batches_of_the_first_step_are_left_out_also_in_a_resumed_run(start, sleep):
    throughput = Throughput()
    training = Training(throughput, start=start, accumulate=4)
    training.step(lambda: sleep(100))
    training.step(lambda: sleep(0.5))
    assert throughput.tokens_per_s() == pytest.approx(5)


def test_start_up_ends_with_the_first_optimizer_step_of_the_run(monkeypatch):
    throughput = Throughput()
    training = Training(throughput, start=7, accumulate=2)
    monkeypatch.setattr(callbacks, "age_s", lambda: training.trainer.global_step)
    assert throughput.start_up_s is None
    for _ in range(3):
        training.step()
        assert throughput.start_up_s == 8


def test_a_process_is_as_old_as_its_parent_sees_it():
    code = "import time; time.sleep(0.3); from logitless import processes; print(processes.age_s())"
    begin = time.monotonic()
    command = [sys.executable, "-c", code]
    age = float(subprocess.run(command, cwd=ROOT / "src", capture_output=True, text=True, check=True).stdout)
    assert 0.3 < age < time.monotonic() - begin + 0.02  # a tick of the kernel's clock is 0.01 s


def test_the_bar_shows_the_last_values_of_the_curves():
    latest = {"train/loss": 2.5, "grad_norm": 1.0, "tokens_per_s": 12345.6}
    assert ProgressBar().get_metrics(None, SimpleNamespace(latest=latest)) == {
        "train/loss": "2.500",
        "tokens_per_s": "12,346",
    }


def test_the_bar_of_a_step_shows_its_own_point(tmp_path, monkeypatch):
    shown = {}
    update = ProgressBar.get_metrics

    def get_metrics(self, trainer, module):
        shown[trainer.global_step] = update(self, trainer, module)
        return shown[trainer.global_step]

    monkeypatch.setattr(ProgressBar, "get_metrics", get_metrics)
    train(tiny(tmp_path, "max_steps=3", "val_every=3", "checkpoint_every=null"), tmp_path / "run")
    curve = read_curve(tmp_path / "run", "train/loss")
    assert {step: float(values["train/loss"]) for step, values in shown.items()} == pytest.approx(curve, abs=1e-3)


def test_speed_counts_the_steps_between_two_points(sleep):
    throughput = Throughput()
    training = Training(throughput)
    training.module.is_logging_step = lambda step: step % 3 == 0
    for _ in range(7):
        training.step(lambda: sleep(2))
    assert [value for _, value in training.module.plotted] == pytest.approx([5, 5])
    assert throughput.tokens_per_s() == pytest.approx(5)
