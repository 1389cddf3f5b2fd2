"""A disk that takes nothing, when a run starts and while it prints."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import ROOT, overrides, read_record


def train_app(folder: Path, *more: str, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, ROOT / "scripts" / "train.py", *overrides(folder, "max_steps=2", *more)]
    return subprocess.run(command, cwd=folder, text=True, timeout=120, **options)


def test_a_run_outlives_a_full_disk_that_its_output_goes_to(tmp_path):
    with open("/dev/full", "w") as full:
        done = train_app(tmp_path, "hydra.run.dir=run", stdout=full, stderr=full)
    assert done.returncode == 0
    assert read_record(tmp_path / "run")["status"] == "ok"


@pytest.mark.parametrize("closed", [1, 2])
def test_a_run_needs_no_open_output(closed, tmp_path):
    done = train_app(tmp_path, "hydra.run.dir=run", preexec_fn=lambda: os.close(closed))
    assert done.returncode == 0


def test_a_run_outlives_the_reader_of_its_output(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    done = train_app(tmp_path, "hydra.run.dir=run", stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)
    assert read_record(tmp_path / "run")["status"] == "ok"


def test_unbuffered_output_stays_so(tmp_path):
    code = "from logitless import disk; disk.outlive_a_full_disk(); print(1, end=''); import os; os._exit(0)"
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout == "1"


def no_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


@pytest.mark.parametrize(
    ("run_dir", "limit", "reason"), [("taken/run", None, "Not a directory"), ("run", no_files, "File too large")]
)
def test_a_folder_that_takes_no_file_is_one_line(run_dir, limit, reason, tmp_path):
    (tmp_path / "taken").touch()
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": environment, "preexec_fn": limit}
    done = train_app(tmp_path, f"hydra.run.dir={run_dir}", **options)
    assert (done.returncode, done.stderr) == (1, f"error: hydra.run.dir={run_dir}: {reason}\n")
