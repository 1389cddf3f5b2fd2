"""Runs and sweeps as processes of their own on a GPU: what they leave in its memory, and what its memory holds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from sweep_runs import job_dirs, rows, run, statuses
from tiny import ROOT, compose, overrides

from kernels.devices import DEVICES
from logitless.footprint import peak_bytes
from logitless.footprint_parts import Step
from logitless.memory import GIB
from logitless.model import GPTConfig
from logitless.records import read_record

pytestmark = pytest.mark.gpu

TRAIN = ROOT / "scripts" / "train.py"
SHORT = ("trainer=gpu", "batch_size=1", "max_steps=3", "val_every=3", "val_batches=1", "checkpoint_every=null")


def alone(folder: Path, name: str, *more: str) -> dict:
    """The record of a single run in `folder`/`name`, however it ends."""
    command = [sys.executable, str(TRAIN), *overrides(folder, *SHORT, *more), f"hydra.run.dir={folder / name}"]
    environment = os.environ | {"HOME": str(folder), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    record = read_record(folder / name)
    assert record is not None, result.stderr
    assert (result.returncode == 0) == (record["status"] == "ok"), result.stderr
    return record


def sweep(folder: Path, *arguments: str, script: Path = TRAIN) -> subprocess.CompletedProcess:
    """A sweep of short runs over a `seq_len` in `arguments`."""
    common = [word for word in overrides(folder, *SHORT) if not word.startswith("seq_len=")]
    return run(folder, *common, *arguments, script=script)


def test_the_peak_of_a_length_is_the_same_ascending_descending_and_alone(tmp_path):
    lengths = (1024, 4096, 16384)
    options = ("loss=naive", "model.padded_vocab_size=16384")
    peaks = {}
    for order in (lengths, lengths[::-1]):
        result = sweep(tmp_path, *options, f"seq_len={','.join(map(str, order))}", f"hydra.sweep.dir=from_{order[0]}")
        assert result.returncode == 0, result.stderr
        found = [read_record(tmp_path / f"from_{order[0]}" / str(number)) for number in range(3)]
        assert [record["seq_len"] for record in found] == list(order)
        peaks[order[0]] = {record["seq_len"]: record["peak_allocated_gib"] for record in found}
    ascending, descending = peaks[lengths[0]], peaks[lengths[-1]]
    for length in lengths:
        assert descending[length] == pytest.approx(ascending[length], rel=0.01)
    for length in (lengths[0], lengths[-1]):
        record = alone(tmp_path, f"alone_{length}", *options, f"seq_len={length}")
        assert record["peak_allocated_gib"] == pytest.approx(ascending[length], rel=0.01)
    assert ascending[1024] < ascending[4096] < ascending[16384]


def test_a_failed_assertion_on_the_device_is_an_error_and_spoils_no_other_job(tmp_path):
    """It makes every later call of CUDA in its process fail; none of them is taken for out of memory."""
    app = Path(__file__).parent / "gpu_assert_app.py"
    result = sweep(tmp_path, "seq_len=2048,1024", script=app)
    assert result.returncode == 1
    assert statuses(tmp_path) == ["error", "ok"]
    failed = read_record(job_dirs(tmp_path)[0])
    assert "device-side assert" in failed["error"]
    assert (failed["step"], failed["phase"], failed["steps"]) == (1, "forward", 0)
    first, second = rows(result)
    assert first[2].startswith("error at step 1, forward: ")
    assert second[2].endswith(" GiB")


def test_validation_needs_no_more_memory_than_training_when_training_nearly_fills_it(tmp_path):
    """All logits would take 8 GiB in bf16."""
    options = ("loss=fused", "chunk=1024", "seq_len=65536", "model.padded_vocab_size=65536")
    free = alone(tmp_path, "free", *options)
    limit_gib = free["peak_reserved_gib"] / 0.9
    assert limit_gib < 8
    record = alone(tmp_path, "limited", *options, f"memory_limit_gib={limit_gib}")
    assert (record["status"], record["steps"]) == ("ok", 3)
    assert record["peak_reserved_gib"] <= limit_gib
    assert 0 < record["validation_peak_allocated_gib"] <= record["peak_allocated_gib"]


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_name() != "NVIDIA H200",
    reason="predictions were compared with measurements on an H200 only",
)
def test_a_run_fits_a_little_above_its_predicted_peak_and_not_much_below(tmp_path):
    shape = ("model.n_layers=4", "model.n_heads=12", "model.width=768", "model.padded_vocab_size=50304")
    options = ("loss=fused", "chunk=1024", "seq_len=16384", *shape)
    config = compose(*overrides(tmp_path, *SHORT, *options))
    model = GPTConfig(**OmegaConf.to_container(config.model))
    step = Step(model, DEVICES["NVIDIA H200"], config.seq_len, config.batch_size, "bf16-mixed", config.chunk)
    predicted_gib = peak_bytes(step, "fused") / GIB
    fits = alone(tmp_path, "fits", *options, f"memory_limit_gib={1.06 * predicted_gib}")
    assert fits["status"] == "ok", fits["error"]
    assert fits["peak_allocated_gib"] == pytest.approx(predicted_gib, rel=0.02)
    fails = alone(tmp_path, "fails", *options, f"memory_limit_gib={0.8 * predicted_gib}")
    assert fails["status"] == "oom"
    assert fails["step"] in (1, 2)
