"""Records: facts of a run as lines of JSON in record.jsonl of the run's folder; and the reader of many.

A run appends a line with status "started" when it starts and one with "ok", "oom", "stopped" (by a signal) or "error"
when it ends. The last line is its record: a run that was killed leaves "started", until the sweep that it belonged to
says how it ended.
"""

import json
import math
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch  # 2 s that a sweep's own process does without

FILE_NAME = "record.jsonl"
PACKAGES = ("triton", "lightning", "hydra-core", "wandb", "tokenizers")
# Of training steps from the second on, in GiB: a GPU's, and a CPU's; with "cold_" before it that of the first.
PEAKS = {"peak_allocated_gib": "Peak allocated", "peak_live_tensor_gib": "Peak of live tensors"}
RESULTS = ("ok", "oom")  # the statuses of runs that tell what their configuration does
ENOUGH_STEPS = 3  # for a length to fit: AdamW's states come at the end of step 1, and many an out-of-memory in step 2


def new_record(config: dict, device: "torch.device") -> dict:
    """What is known before a run starts: its config, the versions and the device."""
    import torch

    packages = {name: package_version(name) for name in PACKAGES}
    return {
        "status": "started",
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv[1:]),
        "commit": _commit(),
        "config": config,
        "versions": {"python": platform.python_version(), "torch": torch.__version__, **packages},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({platform.machine()})",
    }


def append_line(record: dict, path: Path) -> None:
    """Writes the record to a file of JSON lines in one write, after any that are there, and makes its folder.

    Numbers that are not finite become null. A line that somebody left unfinished keeps its place.
    """
    finite = json.loads(json.dumps(record), parse_constant=lambda name: None)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab+") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(size - 1, 0))
        is_cut = stream.read() not in (b"", b"\n")
        stream.write(b"\n" * is_cut + json.dumps(finite).encode() + b"\n")


def read_records(paths: Iterable[Path]) -> list[dict]:
    """The records of runs, and rows of the benchmark, in files or below folders; stderr names broken lines.

    Each has its folder as `run_dir`. Of a run's lines the last whole one counts, of a benchmark's each. A file without
    a whole line, or that cannot be read, is a record of the status "unreadable" with the reason as its `error`.
    """
    files = (file for path in paths for file in (_record_files(path) if path.is_dir() else [path]))
    return [record for file in dict.fromkeys(files) for record in _records_or_reason(file)]


def read_record(run_dir: Path) -> dict | None:
    """The record of the run in `run_dir`, or None if it has not got so far; stderr names broken lines."""
    file = run_dir / FILE_NAME
    records = _records(file) if file.is_file() else []
    return records[-1] if records else None


def _record_files(folder: Path) -> list[Path]:
    """What is called a record in and below the folder, whatever it is, and one in each folder that cannot be listed."""
    closed = []
    tree = os.walk(folder, onerror=lambda error: closed.append(error.filename))
    found = [own for own, folders, files in tree if FILE_NAME in (*folders, *files)]
    return sorted(Path(own) / FILE_NAME for own in found + closed)


def _records_or_reason(file: Path) -> list[dict]:
    try:
        if records := _records(file):
            return records
        file.read_bytes().decode()
        reason = "no whole line in its record"
    except UnicodeDecodeError:
        reason = "its record is not UTF-8 text"
    except OSError as error:
        reason = f"its record: {error.strerror}"
    run_dir = file.parent if file.name == FILE_NAME else file
    return [{"run_dir": str(run_dir), "status": "unreadable", "error": reason}]


def _records(file: Path) -> list[dict]:
    """The rows of a benchmark in the order of the file, then the run's record if it holds one."""
    rows, run, n_broken = [], [], 0
    for line in file.read_bytes().splitlines():
        try:
            record = json.loads(line.decode(), parse_constant=lambda name: None)
            # Half of a surrogate pair, which JSON can hold, is no text that a page could.
            record = json.loads(json.dumps(record, ensure_ascii=False).encode(errors="replace"))
            record |= {"run_dir": str(file.parent)}  # TypeError unless it is a dictionary
        except (TypeError, ValueError, RecursionError):
            n_broken += 1
            continue
        if "method" in record:
            rows.append(record)
        else:
            run = [record]
    if n_broken:
        print(f"{file}: skipped {n_broken} broken line{'s' if n_broken > 1 else ''}", file=sys.stderr)
    return rows + run


def outcome(record: dict) -> str:
    """How a run ended: `ok after 200 steps`, `OOM at step 2, backward`, `error at step 3, forward: ValueError: ...`."""
    status = record.get("status", "no status")
    if status == "started":
        return "started, not ended (running, or killed)"
    if status == "ok":
        return f"ok after {record.get('steps', 0)} steps"
    if status == "oom":
        return "OOM" + _at_place(record)
    error = str(record.get("error") or "").strip().partition("\n")[0]
    return f"{status}{_at_place(record)}{f': {error}' if error else ''}"


def place(record: dict) -> str:
    """`step 2, backward`, or nothing if training had not begun."""
    step, phase = record.get("step"), record.get("phase")
    return f"step {step}, {phase}" if step is not None and phase else ""


def _at_place(record: dict) -> str:
    return f" at {found}" if (found := place(record)) else ""


def lacks(record: dict, kinds: dict[str, type]) -> list[str]:
    """The keys of `kinds` under which the record has no such value; numbers must be positive and finite."""

    def is_right(value: object, kind: type) -> bool:
        return isinstance(value, kind) and (is_positive(value) if isinstance(value, int | float) else True)

    return [key for key, kind in kinds.items() if not is_right(record.get(key), kind)]


def is_positive(value: object) -> bool:
    """Whether it is a number, positive and finite."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def package_version(package: str) -> str | None:
    """The version of an installed distribution, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The checkout's commit, with -dirty if files differ from it; None where there is no git."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
