"""Weights & Biases without a prompt or network, one finished run of its own for every run of ours."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import wandb
from tiny import ROOT, overrides, read_curve, read_record, tiny, train

from logitless import run
from logitless.job import prepare
from logitless.loggers import Loggers
from logitless.module import LanguageModel


def offline_runs(run_dir: Path) -> list[dict]:
    """What W&B wrote below `run_dir`, one summary for each of its runs."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--summary", "--json"]
    files = sorted(run_dir.rglob("run-*.wandb"))
    return [json.loads(subprocess.run([*command, file], capture_output=True, check=True).stdout) for file in files]


def test_a_run_is_finished_with_its_config_its_facts_and_its_curves(tmp_path):
    record = train(tiny(tmp_path, "logger=wandb"), tmp_path / "run")
    (run,) = offline_runs(tmp_path / "run")
    assert (run["state"], run["exit_code"], run["name"]) == ("finished", 0, "fused-c1024-T8")
    assert run["config"] == json.loads(json.dumps(record["config"]))
    for name in ("status", "steps", "tokens", "val_loss", "peak_live_tensor_gib", "cold_peak_live_tensor_gib"):
        assert run["summary"][name] == record[name], name
    assert run["summary"]["train/loss"] == pytest.approx(read_curve(tmp_path / "run", "train/loss")[4])
    assert run["summary"]["trainer/global_step"] == 4


def test_the_summary_holds_the_best_losses_and_the_worst_peak(tmp_path):
    train(tiny(tmp_path, "logger=wandb", "lr=10", "warmup_steps=6", "max_steps=6"), tmp_path / "run")
    (summary,) = (run["summary"] for run in offline_runs(tmp_path / "run"))
    for name, extreme in (("val/loss", min), ("val/accuracy", max), ("memory/peak_live_tensor_gib", max)):
        values = read_curve(tmp_path / "run", name).values()
        assert summary[name] == {extreme.__name__: pytest.approx(extreme(values))}, name
    assert min(read_curve(tmp_path / "run", "val/loss").values()) < summary["val_loss"], "the last is not the best"


@pytest.mark.parametrize(("given", "group"), [([], "sweep"), (["logger.group=mine"], "mine")])
def test_the_runs_of_a_sweep_are_a_group_unless_another_is_given(given, group, tmp_path, monkeypatch):
    server = FakeServer(monkeypatch, is_reachable=True)
    job = prepare(tiny(tmp_path, "logger=wandb", "max_steps=1", *given))
    run.train(job, tmp_path / "run", ["loss=fused"], str(tmp_path / "sweep"))
    ((_, options),) = server.calls
    assert (options["group"], options["name"], options["tags"]) == (group, "fused-c1024-T8", ["fused"])
    record = read_record(tmp_path / "run")
    assert (record["overrides"], record["sweep"]) == (["loss=fused"], str(tmp_path / "sweep"))


@pytest.mark.parametrize(
    ("error", "status", "exit_code"),
    [
        (RuntimeError("broken"), "error", 1),
        (SystemExit(0), "error", 1),
        (torch.OutOfMemoryError("full"), "oom", 0),
    ],
    ids=["error", "exit", "oom"],
)
def test_a_failed_run_is_closed_with_its_status_and_the_next_one_is_its_own(
    error, status, exit_code, tmp_path, monkeypatch
):
    step = LanguageModel.training_step

    def failing(self, batch, batch_idx):
        if self.global_step == 2:
            raise error
        return step(self, batch, batch_idx)

    with monkeypatch.context() as patch:
        patch.setattr(LanguageModel, "training_step", failing)
        with pytest.raises(type(error)):
            train(tiny(tmp_path, "logger=wandb"), tmp_path / "failed")
    train(tiny(tmp_path, "logger=wandb", "seq_len=16", "max_steps=1"), tmp_path / "next")

    (failed,), (following,) = (offline_runs(tmp_path / name) for name in ("failed", "next"))
    assert (failed["exit_code"], failed["summary"]["status"], failed["summary"]["steps"]) == (exit_code, status, 2)
    assert str(error) in failed["summary"]["error"]
    assert failed["summary"]["peak_live_tensor_gib"] == read_record(tmp_path / "failed")["peak_live_tensor_gib"]
    assert failed["summary"]["trainer/global_step"] == 2
    assert (following["exit_code"], following["summary"]["status"]) == (0, "ok")
    assert failed["run_id"] != following["run_id"]
    assert [run["config"]["seq_len"] for run in (failed, following)] == [8, 16]
    assert following["summary"]["trainer/global_step"] == 1
    assert wandb.run is None


def test_csv_makes_no_wandb_files_and_both_loggers_write_the_same_columns(tmp_path):
    columns = {}
    for logger in ("csv", "wandb"):
        train(tiny(tmp_path, f"logger={logger}"), tmp_path / logger)
        columns[logger] = (tmp_path / logger / "curves" / "metrics.csv").read_text().splitlines()[0]
    assert columns["csv"] == columns["wandb"]
    assert not list((tmp_path / "csv").rglob("*wandb*"))
    assert list((tmp_path / "wandb").rglob("*.wandb"))


def test_not_logged_in_a_run_is_offline_and_asks_nothing(tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    environment |= {"HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, ROOT / "scripts" / "train.py", *overrides(tmp_path, "logger=wandb", "max_steps=1")]
    command.append(f"hydra.run.dir={tmp_path / 'run'}")
    result = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    (run,) = offline_runs(tmp_path / "run")
    assert run["summary"]["status"] == "ok"


SETTINGS = {"kind": "wandb", "project": "p", "entity": None, "group": "g"}


class FakeServer:
    """wandb.init as far as it reaches the server; offline it goes to the real one."""

    def __init__(self, monkeypatch, *, is_reachable: bool):
        self.is_reachable, self.calls, self.init = is_reachable, [], wandb.init
        monkeypatch.delenv("WANDB_MODE", raising=False)
        monkeypatch.setattr(wandb, "login", lambda prompt, verify: not prompt and not verify)
        monkeypatch.setattr(wandb, "init", self)

    def __call__(self, *, mode, **options):
        self.calls.append((mode, options))
        if mode == "online" and not self.is_reachable:
            raise wandb.errors.CommError("no route to host")
        return self.init(mode="disabled", **options)


def test_logged_in_a_run_is_online(tmp_path, monkeypatch):
    server = FakeServer(monkeypatch, is_reachable=True)
    Loggers(SETTINGS, tmp_path, "naive-T8", "naive", {}).finish({"status": "ok"})
    ((mode, options),) = server.calls
    assert mode == "online"
    assert (options["project"], options["group"], options["name"], options["tags"]) == ("p", "g", "naive-T8", ["naive"])


def test_an_unreachable_server_makes_the_run_offline(tmp_path, monkeypatch, capsys):
    server = FakeServer(monkeypatch, is_reachable=False)
    Loggers(SETTINGS, tmp_path, "naive-T8", "naive", {}).finish({"status": "ok"})
    assert [mode for mode, _ in server.calls] == ["online", "offline"]
    assert "no route to host" in capsys.readouterr().out


def test_a_malformed_key_makes_the_run_offline(tmp_path, monkeypatch, capsys):
    def refuse(prompt, verify):
        raise wandb.errors.AuthenticationError("API key must have 40+ characters, has 5.")

    server = FakeServer(monkeypatch, is_reachable=True)
    monkeypatch.setattr(wandb, "login", refuse)
    Loggers(SETTINGS, tmp_path, "naive-T8", "naive", {}).finish({"status": "ok"})
    assert [mode for mode, _ in server.calls] == ["offline"]
    assert "has 5" in capsys.readouterr().out


def test_the_users_own_mode_is_obeyed(tmp_path, monkeypatch):
    server = FakeServer(monkeypatch, is_reachable=True)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    record = train(tiny(tmp_path, "logger=wandb", "max_steps=1"), tmp_path / "run")
    assert [mode for mode, _ in server.calls] == ["disabled"]
    assert record["status"] == "ok"
