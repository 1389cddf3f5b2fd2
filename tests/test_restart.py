"""Runs that are killed, terminated, out of disk or of numbers: what is left of them, and that another continues it."""

import csv
import json
import os
import resource
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import wandb
from tiny import ROOT, compose, overrides, read_curve, read_record, tiny, train

from logitless import checkpoints
from logitless.checkpoints import LAST_CHECKPOINT, PREVIOUS_CHECKPOINT, ResumeError, Stopped, newest_checkpoint
from logitless.config import check_resumed_config
from logitless.loggers import CURVES, CurveFile, read_rows
from logitless.module import DivergedError, LanguageModel, warmup_cosine
from logitless.processes import STOPS
from logitless.records import append_line

OPTIONS = ("model.dropout=0.3", "accumulate=2", "max_steps=8", "checkpoint_every=2", "val_every=4", "lr=1e-2")
TIMED = ("tokens_per_s", "memory/peak_live_tensor_gib")  # two runs never have the same

# Forks a run for each line of stdin and, before its n-th opening, renaming or removing of a file of its own, kills it.
KILLER = """
import json, os, signal, sys
from pathlib import Path
sys.path[:0] = [{root!r}, {tests!r}, {source!r}]
from tiny import compose, train

def kill_at(moment, run_dir):
    seen = 0
    def count(event, arguments):
        nonlocal seen
        if event in ("open", "os.rename", "os.remove") and str(arguments[0]).startswith(run_dir):
            seen += 1
            if seen == moment:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(count)
    return lambda: seen

for line in sys.stdin:
    words, run_dir, moment = json.loads(line)
    child = os.fork()
    if child == 0:
        seen = kill_at(moment, run_dir)
        train(compose(*words), Path(run_dir))
        Path(run_dir).with_suffix(".events").write_text(str(seen()))
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    Path(run_dir).with_suffix(".status").write_text(str(status))
"""


def run_and_kill(jobs: list[tuple[list[str], Path, int]]) -> list[int]:
    """Runs and kills each job before its n-th file operation; the exit statuses."""
    paths = {"root": str(ROOT), "tests": str(ROOT / "tests"), "source": str(ROOT / "src")}
    lines = "\n".join(json.dumps([words, str(run_dir), moment]) for words, run_dir, moment in jobs)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", KILLER.format(**paths)]
    subprocess.run(command, input=lines, text=True, check=True, timeout=120, env=environment, capture_output=True)
    return [int(run_dir.with_suffix(".status").read_text()) for _, run_dir, _ in jobs]


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return torch.load(run_dir / LAST_CHECKPOINT, weights_only=True)["state_dict"]


def points(run_dir: Path) -> list[dict[str, str]]:
    """All rows of the run's curves, without what is measured by a clock or depends on where a run started."""
    with open(run_dir / "curves" / "metrics.csv", newline="") as stream:
        return [{name: text for name, text in row.items() if name not in TIMED} for row in csv.DictReader(stream)]


def assert_same_run(run_dir: Path, whole: Path) -> None:
    """Weights and optimizer bit for bit, curves row for row, results of the record."""
    ours, gold = (torch.load(folder / LAST_CHECKPOINT, weights_only=True) for folder in (run_dir, whole))
    assert all(torch.equal(ours["state_dict"][name], gold["state_dict"][name]) for name in gold["state_dict"])
    states, gold_states = (content["optimizer_states"][0]["state"] for content in (ours, gold))
    assert all(torch.equal(states[i][name], gold_states[i][name]) for i in gold_states for name in gold_states[i])
    assert ours["lr_schedulers"] == gold["lr_schedulers"]
    assert points(run_dir) == points(whole)
    ours, gold = (json.loads((folder / "record.jsonl").read_text().splitlines()[-1]) for folder in (run_dir, whole))
    for name in ("status", "steps", "tokens", "train_loss", "val_loss", "best_val_loss", "val_accuracy", "sample"):
        assert ours[name] == gold[name], name


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("restart")


@pytest.fixture(scope="module")
def whole(folder) -> Path:
    """A run that nothing happened to."""
    assert run_and_kill([(overrides(folder, *OPTIONS), folder / "whole", 10**9)]) == [0]
    return folder / "whole"


def test_a_run_killed_before_any_file_operation_is_continued_bit_for_bit(folder, whole):
    n_operations = int(whole.with_suffix(".events").read_text())
    words = overrides(folder, *OPTIONS)
    jobs = [(words, folder / f"killed{moment}", moment) for moment in range(1, n_operations + 1)]
    assert run_and_kill(jobs) == [-signal.SIGKILL] * n_operations
    starts = set()
    for _, killed, moment in jobs:
        try:
            newest = newest_checkpoint(killed)
        except ValueError:
            assert not (killed / LAST_CHECKPOINT).exists()
            starts.add(0)
            continue
        step = torch.load(newest, weights_only=True)["global_step"]
        if (step, newest.name) in starts and moment % 4:
            continue  # one of four that start alike
        starts.add((step, newest.name))
        resumed = folder / f"resumed{moment}"
        train(compose(*words, f"resume={killed}"), resumed)
        assert_same_run(resumed, whole)
    assert starts >= {0, (2, "last.ckpt"), (4, "last.ckpt"), (6, "last.ckpt"), (2, "previous.ckpt")}, starts


def test_a_resumed_run_that_is_killed_is_continued_too(folder, whole):
    words = overrides(folder, *OPTIONS)
    first, second, third = (folder / name for name in ("first", "second", "third"))
    n_operations = int(whole.with_suffix(".events").read_text())
    jobs = [(words, first, n_operations // 3), ([*words, f"resume={first}"], second, n_operations // 2)]
    assert run_and_kill(jobs) == [-signal.SIGKILL] * 2
    assert torch.load(newest_checkpoint(second), weights_only=True)["global_step"] > 2
    train(compose(*words, f"resume={second}"), third)
    assert_same_run(third, whole)


@pytest.fixture
def at(monkeypatch):
    """Calls a function in the first micro-batch of optimizer step n + 1, or of the validation after step n."""

    def patch(n: int, action, method: str = "training_step") -> None:
        step = getattr(LanguageModel, method)

        def acting(self, batch, batch_idx):
            if self.global_step == n and batch_idx % 2 == 0:
                action()
            return step(self, batch, batch_idx)

        monkeypatch.setattr(LanguageModel, method, acting)

    return patch


@pytest.fixture
def no_handler():
    """Handlers that fail: who gets a signal must wait for the step with ones of his own, and give these back."""

    def fail(*_):
        pytest.fail("nobody waits for the step")

    former = {number: signal.signal(number, fail) for number in STOPS}
    yield
    handlers = {signal.signal(number, handler) for number, handler in former.items()}
    assert handlers == {fail}


@pytest.mark.usefixtures("no_handler")
@pytest.mark.parametrize(
    ("number", "method", "sent", "stopped"),
    [
        (signal.SIGTERM, "training_step", 2, 3),
        (signal.SIGINT, "training_step", 3, 4),
        (signal.SIGTERM, "validation_step", 4, 5),
        (signal.SIGINT, "validation_step", 8, 8),
    ],
)
def test_a_signal_ends_a_run_with_a_checkpoint_after_the_step_and_it_is_continued(
    number, method, sent, stopped, folder, whole, tmp_path, at, monkeypatch, capsys
):
    at(sent, lambda: os.kill(os.getpid(), number), method)
    with pytest.raises(Stopped) as end:
        train(tiny(folder, *OPTIONS, "checkpoint_every=100"), tmp_path / "stopped")
    monkeypatch.undo()
    assert end.value.code == 128 + number
    record = read_record(tmp_path / "stopped")
    assert (record["status"], record["steps"], record["checkpoint_step"]) == ("stopped", stopped, stopped)
    assert f"{number.name} after step {stopped}" in record["error"]
    capsys.readouterr()
    train(tiny(folder, *OPTIONS, f"resume={tmp_path / 'stopped'}"), tmp_path / "resumed")
    assert stopped == 8 or "| 16/16 " in capsys.readouterr().out, "the progress bar's micro-batches"
    assert_same_run(tmp_path / "resumed", whole)


@pytest.mark.usefixtures("no_handler")
def test_a_second_ctrl_c_ends_a_run_at_once(folder, tmp_path, at, capfd):
    def interrupt_twice():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    at(3, interrupt_twice)
    with pytest.raises(SystemExit) as end:
        train(tiny(folder, *OPTIONS), tmp_path / "run")
    assert end.value.code == 130
    record = read_record(tmp_path / "run")
    assert (record["status"], record["steps"], record["checkpoint_step"]) == ("stopped", 3, 2)
    assert "once more ends it at once" in capfd.readouterr().err


def test_a_resumed_run_says_where_it_starts_and_that_no_step_is_left(folder, whole, tmp_path, capsys):
    words = overrides(folder, *OPTIONS, f"resume={whole}")
    for max_steps, says in ((10, ""), (8, ", none is left")):
        record = train(compose(*words, f"max_steps={max_steps}"), tmp_path / str(max_steps))
        assert (record["first_step"], record["steps"]) == (8, max_steps)
        steps = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("steps"))
        assert steps.endswith(f", the first 8 by {whole / LAST_CHECKPOINT}{says}")


@pytest.mark.usefixtures("no_handler")
def test_sigterm_after_the_last_step_ends_the_run_with_its_checkpoint(folder, tmp_path, at):
    """In a validation that no step asked for, which comes after Lightning has given its signal handlers back."""
    at(5, lambda: os.kill(os.getpid(), signal.SIGTERM), "validation_step")
    with pytest.raises(Stopped):
        train(tiny(folder, *OPTIONS, "max_steps=5", "checkpoint_every=100"), tmp_path / "run")
    record = read_record(tmp_path / "run")
    assert (record["status"], record["steps"], record["checkpoint_step"]) == ("stopped", 5, 5)
    assert record["val_loss"] == read_curve(tmp_path / "run", "val/loss")[5]


def test_a_run_with_other_weights_is_not_resumed(folder, tmp_path):
    """As one from before a change of the model."""
    words = overrides(folder, *OPTIONS, "max_steps=2", "checkpoint_every=1")
    train(compose(*words), tmp_path / "old")
    checkpoint = torch.load(tmp_path / "old" / LAST_CHECKPOINT, weights_only=True)
    checkpoint["state_dict"]["gpt.of_old"] = checkpoint["state_dict"].pop("gpt.norm.weight")
    torch.save(checkpoint, tmp_path / "old" / LAST_CHECKPOINT)
    with pytest.raises(ResumeError, match=r"older version: gpt\.norm\.weight, gpt\.of_old"):
        train(compose(*words, "max_steps=4", f"resume={tmp_path / 'old'}"), tmp_path / "new")


def flip(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


def damage_middle(file: Path) -> None:
    flip(file, file.stat().st_size // 2)


def damage_flags(file: Path) -> None:
    """Of the first file in the archive's table, which then looks encrypted."""
    flip(file, file.read_bytes().index(b"PK\x01\x02") + 8)


def damage_compressed_size(file: Path) -> None:
    """In the same place, which only PyTorch reads."""
    flip(file, file.read_bytes().index(b"PK\x01\x02") + 20)


def mark_as_folder(file: Path) -> None:
    """The first weights, in the archive's table: PyTorch would leave them as the memory was that they get."""
    content = bytearray(file.read_bytes())
    name = content.index(b"/data/0", content.index(b"PK\x01\x02"))
    content[content.rindex(b"PK\x01\x02", 0, name) + 38] ^= checkpoints.IS_FOLDER
    file.write_bytes(content)


def something_else(file: Path) -> None:
    torch.save({"state_dict": {}}, file)


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def empty(file: Path) -> None:
    os.truncate(file, 0)


@pytest.mark.parametrize(
    "damage", [damage_middle, damage_flags, damage_compressed_size, mark_as_folder, something_else, cut, empty]
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_continued(damage, folder, whole, tmp_path, at, capsys):
    at(7, lambda: (_ for _ in ()).throw(RuntimeError("power cut")))
    with pytest.raises(RuntimeError, match="power cut"):
        train(tiny(folder, *OPTIONS), tmp_path / "cut")
    damage(tmp_path / "cut" / LAST_CHECKPOINT)
    capsys.readouterr()
    assert newest_checkpoint(tmp_path / "cut") == tmp_path / "cut" / PREVIOUS_CHECKPOINT
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{tmp_path / 'cut' / LAST_CHECKPOINT} is damaged (")
    assert torch.load(tmp_path / "cut" / PREVIOUS_CHECKPOINT, weights_only=True)["global_step"] == 4
    damage(tmp_path / "cut" / PREVIOUS_CHECKPOINT)
    with pytest.raises(ValueError, match=r"no whole [^;]*$"):
        newest_checkpoint(tmp_path / "cut")
    append_line({"resume": "runs/first"}, tmp_path / "cut" / "record.jsonl")
    with pytest.raises(ValueError, match=r"no whole .*; it continued runs/first, which you can continue again"):
        newest_checkpoint(tmp_path / "cut")


def test_a_run_goes_on_from_the_previous_checkpoint_where_the_last_is_damaged(folder, whole, tmp_path, at, monkeypatch):
    at(7, lambda: (_ for _ in ()).throw(RuntimeError("power cut")))
    with pytest.raises(RuntimeError, match="power cut"):
        train(tiny(folder, *OPTIONS), tmp_path / "cut")
    monkeypatch.undo()
    damage_middle(tmp_path / "cut" / LAST_CHECKPOINT)
    train(tiny(folder, *OPTIONS, f"resume={tmp_path / 'cut'}"), tmp_path / "resumed")
    assert_same_run(tmp_path / "resumed", whole)


def limit_file_size(n_bytes: int) -> None:
    """A disk that takes no file beyond this size; -1: any."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@pytest.fixture
def limited_files():
    yield
    limit_file_size(-1)


@pytest.mark.usefixtures("limited_files")
def test_a_disk_that_is_full_for_a_while_costs_checkpoints_but_no_point_and_no_record(
    folder, whole, tmp_path, at, capsys
):
    at(3, lambda: limit_file_size(200))
    at(7, lambda: limit_file_size(-1))
    seen = []
    at(6, lambda: seen.append(torch.load(tmp_path / "run" / LAST_CHECKPOINT, weights_only=True)["global_step"]))
    record = train(tiny(folder, *OPTIONS), tmp_path / "run")
    assert seen == [2]
    assert_same_run(tmp_path / "run", whole)
    assert record["checkpoint_step"] == 8
    lines = [line for line in capsys.readouterr().err.splitlines() if "cannot be written" in line]
    assert [line.split(":")[0][-20:] for line in lines if "no checkpoint" in line] == [
        "no checkpoint at step 4"[-20:],
        "no checkpoint at step 6"[-20:],
    ]
    assert "the last checkpoint is that of step 2" in lines[-1]
    assert sum("metrics.csv cannot be written" in line for line in lines) == 1
    assert not list((tmp_path / "run").rglob("*.part"))


@pytest.mark.usefixtures("limited_files")
def test_a_trained_model_that_the_disk_does_not_take_is_an_error(folder, tmp_path, at):
    at(3, lambda: limit_file_size(20_000))
    with pytest.raises(OSError, match="trained model could not be written: the last checkpoint is that of step 2, "):
        train(tiny(folder, *OPTIONS), tmp_path / "run")
    record = read_record(tmp_path / "run")
    assert (record["status"], record["steps"], record["checkpoint_step"]) == ("error", 8, 2)


@pytest.mark.usefixtures("limited_files")
def test_a_record_that_the_disk_does_not_take_is_printed_and_lost_points_are_counted(
    folder, whole, tmp_path, at, capsys
):
    at(3, lambda: limit_file_size(200))
    with pytest.raises(OSError, match="File too large"):
        train(tiny(folder, *OPTIONS), tmp_path / "run")
    limit_file_size(-1)
    lines = capsys.readouterr().err.splitlines()
    n_lost = len(points(whole)) - len(points(tmp_path / "run"))
    assert f"{tmp_path / 'run' / CURVES}: the last {n_lost} points are lost" in lines
    (line,) = [line for line in lines if line.startswith("what should stand in")]
    assert json.loads(line.partition(": ")[2])["steps"] == 8


def test_a_lost_wandb_costs_nothing_but_itself(folder, whole, tmp_path, monkeypatch, capsys):
    def lost(*_, **__):
        raise wandb.Error("the service is gone")

    init = wandb.init

    def init_and_lose(*, mode, **options):
        assert 0 < options["settings"].finish_timeout <= 60, "else it waits for a lost server for ever"
        run = init(mode="disabled", **options)
        monkeypatch.setattr(run, "log", lost)
        monkeypatch.setattr(run, "finish", lost)
        return run

    monkeypatch.setattr(wandb, "init", init_and_lose)
    assert train(tiny(folder, *OPTIONS, "logger=wandb"), tmp_path / "run")["status"] == "ok"
    assert_same_run(tmp_path / "run", whole)
    assert sum("the service is gone" in line for line in capsys.readouterr().err.splitlines()) == 2


NAN = "the loss"
INF = "its gradient"


def poison(monkeypatch, what: str, first: int) -> None:
    """From step `first` on the loss is NaN, or the gradient infinite."""
    step, before = LanguageModel.training_step, LanguageModel.on_before_optimizer_step

    def bad_loss(self, batch, batch_idx):
        loss = step(self, batch, batch_idx)
        return loss * float("nan") if self.global_step + 1 >= first else loss

    def bad_gradient(self, optimizer):
        before(self, optimizer)
        if self.global_step + 1 >= first:
            next(self.gpt.parameters()).grad.fill_(float("inf"))

    if what == NAN:
        monkeypatch.setattr(LanguageModel, "training_step", bad_loss)
    else:
        monkeypatch.setattr(LanguageModel, "on_before_optimizer_step", bad_gradient)


@pytest.mark.parametrize("what", [NAN, INF])
def test_a_run_without_a_finite_loss_stops_names_the_step_and_keeps_the_last_good_checkpoint(
    what, folder, tmp_path, monkeypatch, capsys
):
    poison(monkeypatch, what, first=4)
    options = (*OPTIONS, "max_steps=20", "checkpoint_every=1", "nonfinite_steps=3", "log_every=3")
    with pytest.raises(DivergedError, match="since step 4, 3 steps in a row"):
        train(tiny(folder, *options), tmp_path / "run")
    record = read_record(tmp_path / "run")
    assert (record["status"], record["steps"], record["checkpoint_step"]) == ("error", 6, 3)
    assert "since step 4" in record["error"]
    for name in (LAST_CHECKPOINT, PREVIOUS_CHECKPOINT):
        state = torch.load(tmp_path / "run" / name, weights_only=True)["state_dict"]
        assert all(value.isfinite().all() for value in state.values())
    assert "no checkpoint at step 4: weights, loss or gradient not finite" in capsys.readouterr().err


def test_fewer_steps_in_a_row_than_the_knob_says_stop_no_run(folder, tmp_path, monkeypatch):
    poison(monkeypatch, NAN, first=7)
    options = (*OPTIONS, "nonfinite_steps=3", "log_every=1", "checkpoint_every=1")
    record = train(tiny(folder, *options), tmp_path / "run")
    assert (record["status"], record["steps"], record["checkpoint_step"]) == ("ok", 8, 6)


@pytest.mark.parametrize(("steps", "stops"), [({2, 4, 5, 7}, False), ({2, 4, 5, 6}, True)])
def test_an_infinite_loss_counts_also_where_the_gradient_is_finite_but_only_in_a_row(
    steps, stops, folder, tmp_path, monkeypatch
):
    step = LanguageModel.training_step

    def infinite(self, batch, batch_idx):
        loss = step(self, batch, batch_idx)
        if self.global_step + 1 in steps:
            self._window_sum = self._window_sum + float("inf")
        return loss

    monkeypatch.setattr(LanguageModel, "training_step", infinite)
    options = (*OPTIONS, "nonfinite_steps=3", "log_every=1", "checkpoint_every=1")
    with pytest.raises(DivergedError, match="since step 4, 3 steps") if stops else nullcontext():
        train(tiny(folder, *options), tmp_path / "run")
    assert read_record(tmp_path / "run")["checkpoint_step"] == (3 if stops else 8)


REFUSED = ("seq_len=16", "batch_size=4", "accumulate=4", "seed=2", "model.width=32", "data.validation=3")
REFUSED += ("tokenizer.vocab_size=301",)


@pytest.mark.parametrize("change", REFUSED)
def test_what_would_change_the_weights_or_the_tokens_is_refused(change, tmp_path):
    with pytest.raises(ValueError, match=f"^{change.partition('=')[0].partition('.')[0]}.* must stay"):
        check_resumed_config(tiny(tmp_path, *OPTIONS, change), tiny(tmp_path, *OPTIONS))


def test_a_resumed_run_has_its_own_schedule_and_optimizer(folder, whole, tmp_path):
    own = ("max_steps=12", "lr=3e-3", "warmup_steps=1", "min_lr_ratio=0.5", "weight_decay=0.3", "betas=[0.8,0.9]")
    check_resumed_config(tiny(folder, *OPTIONS, *own), tiny(folder, *OPTIONS))
    train(tiny(folder, *OPTIONS, *own, f"resume={whole}"), tmp_path / "run")
    rates, before = read_curve(tmp_path / "run", "lr"), read_curve(whole, "lr")
    expected = {
        step + 1: 3e-3 * warmup_cosine(step, warmup_steps=1, max_steps=12, min_ratio=0.5) for step in range(8, 12)
    }
    assert rates == pytest.approx(before | expected)
    state = torch.load(tmp_path / "run" / LAST_CHECKPOINT, weights_only=True)["optimizer_states"][0]
    assert [(group["weight_decay"], group["betas"]) for group in state["param_groups"]] == [
        (0.3, (0.8, 0.9)),
        (0.0, (0.8, 0.9)),
    ]


def test_a_run_killed_in_its_last_validation_goes_on_with_more_steps(folder, tmp_path, at, monkeypatch):
    constant = (*OPTIONS, "min_lr_ratio=1.0")
    train(tiny(folder, *constant, "max_steps=12"), tmp_path / "whole")
    at(8, lambda: (_ for _ in ()).throw(RuntimeError("killed")), "validation_step")
    with pytest.raises(RuntimeError, match="killed"):
        train(tiny(folder, *constant), tmp_path / "first")
    monkeypatch.undo()
    train(tiny(folder, *constant, "max_steps=12", f"resume={tmp_path / 'first'}"), tmp_path / "run")
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_a_point_that_was_cut_is_no_point(tmp_path):
    curves = CurveFile(tmp_path / "curves" / "metrics.csv")
    for step in (1, 2):
        curves.log_metrics({"tokens": 16 * step, "x": 0.1 * step}, step)
    curves.log_metrics({"tokens": 48, "a": 1e-300}, 3)
    rows = [(1, {"tokens": 16, "x": 0.1}), (2, {"tokens": 32, "x": 0.2}), (3, {"tokens": 48, "a": 1e-300})]
    assert read_rows(curves.path) == rows
    os.truncate(curves.path, curves.path.stat().st_size - 8)
    assert read_rows(curves.path) == rows[:2]


def test_a_write_that_fails_leaves_both_older_checkpoints(tmp_path, monkeypatch):
    files = checkpoints.WholeFiles()
    for step in (1, 2):
        files.save_checkpoint({"step": step}, tmp_path / "last.ckpt")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    files.save_checkpoint({"step": 3}, tmp_path / "last.ckpt")
    assert "last.ckpt cannot be written: No space left" in str(files.error)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.usefixtures("limited_files")
@pytest.mark.parametrize("column", ["x", "new"], ids=["in_a_row", "in_the_header"])
def test_a_disk_that_is_full_in_the_middle_of_a_write_costs_no_point(column, tmp_path, capsys):
    curves = CurveFile(tmp_path / "curves" / "metrics.csv")
    curves.log_metrics({"x": 0.5}, 1)
    before = curves.path.read_bytes()
    limit_file_size(len(before) + 3)
    curves.log_metrics({column: 0.25}, 2)
    assert curves.path.read_bytes()[: len(before)] == before
    limit_file_size(-1)
    curves.log_metrics({"x": 0.125}, 3)
    assert read_rows(curves.path) == [(1, {"x": 0.5}), (2, {column: 0.25}), (3, {"x": 0.125})]
    assert capsys.readouterr().err.count("cannot be written (File too large)") == 1
