"""What the tests of sweeps share: commands in a folder, whose sweep lies in its `sweep`, and what they leave."""

import os
import subprocess
import sys
import time
from pathlib import Path

from logitless.records import read_record

ROOT = Path(__file__).resolve().parent.parent
APP = ROOT / "tests" / "sweep_app.py"


def start(folder: Path, *arguments: str, script: Path = APP, **options) -> subprocess.Popen:
    command = [sys.executable, str(script), "-m", "hydra.sweep.dir=sweep", *arguments]
    environment = os.environ | {"HOME": str(folder), "OMP_NUM_THREADS": "1"}  # one thread, as in tests/tiny.py
    options |= {"cwd": folder, "stdin": subprocess.DEVNULL, "env": environment}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def run(folder: Path, *arguments: str, script: Path = APP) -> subprocess.CompletedProcess:
    with start(folder, *arguments, script=script) as process:
        try:
            out, err = process.communicate(timeout=300)
        finally:
            process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def job_dirs(folder: Path) -> list[Path]:
    return sorted((folder / "sweep").glob("[0-9]*"), key=lambda path: int(path.name))


def statuses(folder: Path) -> list[str]:
    return [read_record(run_dir)["status"] for run_dir in job_dirs(folder)]


def rows(result: subprocess.CompletedProcess) -> list[list[str]]:
    """The rows of the table, without its head, split at two spaces or more."""
    table = result.stdout.rpartition("\n\n")[2].splitlines()[1:]
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in table]


def alive(folder: Path) -> list[str]:
    """The command lines of running processes that `start` in this folder began: it is in their environment."""
    found = []
    for file in Path("/proc").glob("[0-9]*"):
        try:
            words = (file / "cmdline").read_bytes() + b"\0" + (file / "environ").read_bytes()
        except OSError:
            continue
        if str(folder).encode() in words:
            found.append(words.split(b"\0\0")[0].decode()[:200])
    return found


def await_line(path: Path, text: str) -> None:
    deadline = time.monotonic() + 30
    while not (path.exists() and text in path.read_text()):
        assert time.monotonic() < deadline, f"{path} has no {text}"
        time.sleep(0.02)


def await_end(folder: Path) -> None:
    """Until nothing that was started in this folder runs; a killed process may need a moment."""
    deadline = time.monotonic() + 5
    while found := alive(folder):
        assert time.monotonic() < deadline, found
        time.sleep(0.02)
