"""Records: facts of a run as one line of JSON, appended to record.jsonl in the run's folder; and the reader of many."""

import json
import math
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import torch

FILE_NAME = "record.jsonl"
PACKAGES = ("triton", "lightning", "hydra-core", "wandb", "tokenizers")


def new_record(config: dict, device: torch.device) -> dict:
    """What is known before a run starts: its config, the versions and the device."""
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

    Numbers that are not finite become null.
    """
    finite = json.loads(json.dumps(record), parse_constant=lambda name: None)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as stream:
        stream.write(json.dumps(finite) + "\n")


def read_records(paths: Iterable[Path]) -> list[dict]:
    """All records in files or below folders, each with its folder as `run_dir`; stderr names broken lines.

    Raises:
        OSError: for a file that cannot be read.
    """
    records = []
    for path in paths:
        for file in sorted(path.rglob(FILE_NAME)) if path.is_dir() else [path]:
            for line in file.read_text(errors="replace").splitlines():
                try:
                    record = json.loads(line, parse_constant=lambda name: None)
                    records.append(record | {"run_dir": str(file.parent)})  # TypeError unless it is a dictionary
                except (TypeError, ValueError):
                    print(f"{file}: skipped a broken line", file=sys.stderr)
    return records


def lacks(record: dict, kinds: dict[str, type]) -> list[str]:
    """The keys of `kinds` under which the record has no such value; numbers must be positive and finite."""

    def is_right(value: object, kind: type) -> bool:
        return isinstance(value, kind) and (not isinstance(value, int | float) or 0 < value < math.inf)

    return [key for key, kind in kinds.items() if not is_right(record.get(key), kind)]


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
