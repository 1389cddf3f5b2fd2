"""scripts/bench_training.py: which steps of a run of ours count."""

import csv
import importlib
import subprocess
from pathlib import Path

import pytest
from tiny import ROOT

from logitless.records import FILE_NAME, append_line

FACTS = {"peak_allocated_gib": 1.5, "step_ms": {}, "start_up_s": 9.0, "flops_per_token": 7}
FACTS |= {"device": "a GPU", "versions": {}, "commit": "abc"}


def test_our_row_is_of_20_steps_after_10_and_before_those_that_are_profiled(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    script = importlib.import_module("bench_training")
    commands = []

    def run(command, **options):
        folder = Path(command[-1].removeprefix("hydra.run.dir="))
        commands.append(command[2:-1])
        append_line({"curves": "points.csv", "mfu": 0.5, "tokens_per_s": 10.0, **FACTS}, folder / FILE_NAME)
        with open(folder / "points.csv", "w") as stream:
            rows = csv.writer(stream)
            rows.writerows([("step", "tokens_per_s"), (1, ""), (10, 2.0), (20, 10.0), (30, 15.0), (35, "")])

    monkeypatch.setattr(subprocess, "run", run)
    row = script.our_row("loss=fused chunk=4096", script.Shape(64, 1024, 50304))
    assert row == {"method": "loss=fused chunk=4096", "tokens_per_s": pytest.approx(12.0), "mfu": 0.6, **FACTS}
    (command,) = commands
    assert {"batch_size=64", "seq_len=1024", "model.padded_vocab_size=50304"} < set(command)
    assert {"max_steps=35", "val_every=35", "log_every=10", "profile=true", "loss=fused", "chunk=4096"} < set(command)
