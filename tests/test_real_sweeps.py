"""Sweeps of real runs of which some are out of memory: their table, records, W&B runs, and frontier."""

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from sweep_commands import job_dirs, rows, run, statuses
from tiny import ROOT, overrides, read_curve, tiny, train

from logitless.records import read_record, read_records
from logitless.report import frontier_figure, lengths

# The logits of 1024 tokens are 64 MiB. Naive needs two tensors like them in forward, which the limit of 118 MiB
# forbids, and three in backward, which for 512 tokens it does not.
WIDE = ("batch_size=1", "chunk=64", "model.padded_vocab_size=16384", "max_steps=3", "val_every=3", "val_batches=1")
WIDE += ("checkpoint_every=null", "memory_limit_gib=0.115", "logger=wandb")
SAME_AS_ALONE = ("n_parameters", "tokens", "train_loss", "best_train_loss", "val_loss", "val_accuracy", "sample")
SAME_AS_ALONE += ("cold_peak_live_tensor_gib", "peak_live_tensor_gib", "validation_peak_live_tensor_gib")


class Sweeps(NamedTuple):
    """A grid, whose jobs are 0 and 1, and a frontier search that goes on in its folder with 2 and 3."""

    folder: Path
    grid: subprocess.CompletedProcess
    search: subprocess.CompletedProcess


@pytest.fixture(scope="module")
def sweeps(tmp_path_factory) -> Sweeps:
    folder = tmp_path_factory.mktemp("sweeps")
    common = ["loss=naive,fused", *overrides(folder, *WIDE)]
    common.remove("seq_len=8")
    script = ROOT / "scripts" / "train.py"
    grid = run(folder, *common, "seq_len=1024", script=script)
    options = ("start=1024", "resolution=1", "multiple=512", "longest=2048")
    sweeper = ("hydra/sweeper=frontier", *(f"hydra.sweeper.{option}" for option in options))
    return Sweeps(folder, grid, run(folder, *sweeper, *common, script=script))


def test_out_of_memory_is_a_row_and_a_record_but_no_failure(sweeps):
    assert (sweeps.grid.returncode, sweeps.grid.stderr) == (0, "")
    assert statuses(sweeps.folder)[:2] == ["oom", "ok"]
    naive, fused = rows(sweeps.grid)
    assert naive == ["0", "naive", "OOM at step 1, forward"]
    record = read_record(sweeps.folder / "sweep" / "1")
    assert fused == ["1", "fused", f"{record['peak_live_tensor_gib']:.3f} GiB", f"{record['tokens_per_s']:,.0f}"]


def test_a_job_after_one_that_was_out_of_memory_trains_as_if_it_were_alone(sweeps):
    """Bit for bit, and with the same bytes alive."""
    alone = train(tiny(sweeps.folder, *WIDE, "loss=fused", "seq_len=1024", "logger=csv"), sweeps.folder / "alone")
    job = sweeps.folder / "sweep" / "1"
    for name in ("train/loss", "grad_norm", "val/loss"):
        assert read_curve(job, name) == read_curve(sweeps.folder / "alone", name)
    record = read_record(job)
    assert {name: record[name] for name in SAME_AS_ALONE} == {name: alone[name] for name in SAME_AS_ALONE}


def wandb_records(run_dir: Path) -> dict[str, list[dict]]:
    """What W&B wrote of the only run below `run_dir`, by kind."""
    (file,) = run_dir.rglob("run-*.wandb")
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", file]
    found = {}
    for line in subprocess.run(command, capture_output=True, check=True, text=True).stdout.splitlines():
        entry = json.loads(line)
        found.setdefault(entry["type"], []).append(entry[entry["type"]])
    return found


def test_each_job_is_a_run_of_wandb_with_its_own_name_config_curves_and_end(sweeps):
    """A run that is out of memory is marked as such, not as failed."""
    assert len(list(sweeps.folder.rglob("run-*.wandb"))) == len(job_dirs(sweeps.folder)) == 4
    names, ids = [], set()
    for run_dir in job_dirs(sweeps.folder):
        record, written = read_record(run_dir), wandb_records(run_dir)
        (own,), (end,) = written["run"], written["exit"]
        names.append(own["display_name"])
        ids.add(own["run_id"])
        assert own["run_group"] == "sweep"
        config = {key: value for key, value in own["config"]["update"].items() if key != "_wandb"}
        assert config == json.loads(json.dumps(record["config"]))
        assert f"seq_len={config['seq_len']}" in record["overrides"]
        steps = [point["item"]["trainer/global_step"] for point in written.get("history", [])]
        assert steps == ([1, 2, 3, 3] if record["status"] == "ok" else []), "training, and the validation of step 3"
        assert end["exit_code"] == 0
        summary = {key: value for update in written["summary"] for key, value in update["update"].items()}
        for key in ("status", "seq_len", "step", "phase", "peak_live_tensor_gib"):
            assert summary.get(key) == record.get(key), key
    assert names == ["naive-T1024", "fused-c64-T1024", "naive-T512", "fused-c64-T2048"]
    assert len(ids) == 4


def test_fused_trains_longer_than_naive_and_the_report_finds_the_same_frontier_as_the_sweep(sweeps):
    assert (sweeps.search.returncode, sweeps.search.stderr) == (0, "")
    assert statuses(sweeps.folder) == ["oom", "ok", "ok", "ok"]  # the search repeated none of the grid's jobs
    naive, fused = rows(sweeps.search)
    assert naive[:4] == ["loss=naive", "512", "1024", "step 1, forward"]
    assert fused[:4] == ["loss=fused", "2048", "none so far", "-"]
    left_out, records = lengths.split(read_records([sweeps.folder / "sweep"]), frontier_figure.problem)
    assert left_out == {}
    (found,) = frontier_figure.bounds(records).values()
    assert [(bound.backend, bound.longest, bound.too_long) for bound in found] == [
        ("naive", 512, 1024),
        ("fused", 2048, None),
    ]
    assert "2,048 (4.0x naive); not bounded" in found[1].in_words(found[0].longest)
