"""What a sweep knows: the folders of its jobs, `<folder>/<number>`, with their records; and how it tells of them.

There is no journal beside the records. A job is known by its overrides; it has ended if its record says ok or oom.
"""

import errno
import fcntl
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import dropwhile, islice
from pathlib import Path

from logitless.records import FILE_NAME, PEAKS, RESULTS, append_line, outcome, read_record

OUTPUT = "output.txt"  # what a job printed
LOCK = ".lock"
FINAL = (*RESULTS, "error", "stopped")
TAIL_BYTES = 4096
MOST_LINES = 5  # of an error
SIGNALS = {number.value: number.name for number in signal.Signals}
HYDRA_HINT = "Set the environment variable HYDRA_FULL_ERROR=1"

Overrides = tuple[str, ...]


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the folder for one sweep, and makes it; the lock ends with the process.

    Some file systems have no locks: a line says so.

    Raises:
        ValueError: another sweep holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / LOCK, "w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another sweep runs in {folder}: choose another hydra.sweep.dir") from None
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
                raise
            print(f"{folder} cannot be locked: run one sweep at a time there", file=sys.stderr)
        yield


def key_of(overrides: Sequence[str]) -> Overrides:
    """What tells jobs apart: their overrides, in any order."""
    return tuple(sorted(overrides))


def finished(folder: Path) -> dict[Overrides, dict]:
    """The records of the jobs that ended ok or out of memory, by `key_of`."""
    records = [record for run_dir in _job_dirs(folder) if (record := read_record(run_dir))]
    return {key_of(r["overrides"]): r for r in records if r.get("overrides") is not None and r.get("status") in RESULTS}


def remove_unfinished(folder: Path, is_planned: Callable[[Overrides], bool], *, may_run: bool) -> list[str]:
    """Removes the folders of planned jobs that failed or never ended, and of those that left no record.

    Folders in which no job was started stay, and with `may_run` those of jobs that have not ended.

    Returns:
        A line about each.
    """
    lines = []
    for run_dir in _job_dirs(folder):
        record = read_record(run_dir)
        status = record and record.get("status")
        if record is None:
            entries = {path.name for path in run_dir.iterdir() if path.suffix != ".log"}  # Hydra's, made first
            is_stale = not entries or bool(entries & {FILE_NAME, OUTPUT, ".hydra"})
        else:
            planned = record.get("overrides") is not None and is_planned(key_of(record["overrides"]))
            is_stale = planned and status not in RESULTS
        if is_stale and may_run and status != "error":
            lines.append(f"{run_dir} may still run: if it does not, delete it and repeat the command")
        elif is_stale:
            shutil.rmtree(run_dir)
            reason = {"error": "failed", "stopped": "was stopped"}.get(status, "did not end")
            lines.append(f"removed {run_dir}: its job {reason} and will be repeated")
    return lines


def next_number(folder: Path) -> int:
    """The number after the largest that a job has."""
    return max((int(run_dir.name) for run_dir in _job_dirs(folder)), default=-1) + 1


def _job_dirs(folder: Path) -> list[Path]:
    numbered = [path for path in folder.iterdir() if path.name.isdecimal() and path.is_dir()]
    return sorted(numbered, key=lambda path: int(path.name))


def close_record(run_dir: Path, overrides: Sequence[str], folder: Path, reason: str, exit_code: int | None) -> dict:
    """The record of a job whose process ended; if the job did not write how, an error with this reason is appended."""
    record = read_record(run_dir) or {}
    if record.get("status") not in FINAL:
        record |= {"status": "error", "error": reason, "overrides": list(overrides), "sweep": str(folder)}
        record |= {} if exit_code is None else {"exit_code": exit_code}
        append_line({key: value for key, value in record.items() if key != "run_dir"}, run_dir / FILE_NAME)
    return record | {"run_dir": str(run_dir)}


def reason_of_end(exit_code: int, output: Path) -> str:
    """Why a process ended that left no word in its record: its signal, or the error that it printed last."""
    if exit_code < 0:
        return f"killed by {SIGNALS.get(-exit_code, f'signal {-exit_code}')}"
    with open(output, "rb") as stream:
        stream.seek(max(0, os.path.getsize(output) - TAIL_BYTES))
        lines = [line.rstrip() for line in stream.read().decode(errors="replace").splitlines()]
    lines = [line for line in lines if line and not line.startswith(HYDRA_HINT)]
    if exit_code and lines and lines[-1].startswith("error: "):  # by which our scripts refuse a value
        return lines[-1].removeprefix("error: ")
    if exit_code and (error := _error_of(lines)):
        return error
    return f"it ended with status {exit_code} before it was done{f', after: {lines[-1]}' if lines else ''}"


def _error_of(lines: list[str]) -> str:
    """What stands below the frames of the last traceback among `lines`, or nothing."""
    starts = [i for i, line in enumerate(lines) if line.startswith("Traceback ")]
    below = dropwhile(lambda line: line.startswith(" "), lines[starts[-1] + 1 :] if starts else [])
    return "\n".join(islice(below, MOST_LINES))


def result(record: dict | None) -> str:
    """What came of a job: `0.5 GiB, 1,000 tokens/s`, `OOM at step 2, backward`, or `error: ` and its first line."""
    if record is None:
        return "did not end"
    return f"{peak(record)}, {speed(record)} tokens/s" if record["status"] == "ok" else outcome(record)


def peak(record: dict) -> str:
    """The peak of memory in GiB; of the first step if there was no other."""
    names = [*PEAKS, *(f"cold_{name}" for name in PEAKS)]
    found = [record[name] for name in names if isinstance(record.get(name), int | float)]
    return f"{found[0]:.3f} GiB" if found else "-"


def speed(record: dict) -> str:
    """Tokens a second."""
    tokens_per_s = record.get("tokens_per_s")
    return "-" if tokens_per_s is None else f"{tokens_per_s:,.0f}"


class Progress:
    """Prints a line when a job starts and one when it ends; failures go to stderr as well.

    Args:
        total: how many jobs are planned; None if nobody can know.
        left: how many of them have to run.
    """

    def __init__(self, total: int | None = None, left: int = 0):
        self.total, self.left = total, left
        self.seconds: list[float] = []

    def start(self, number: int, label: str) -> None:
        """A job starts in the folder `number`."""
        place = f" ({self.total - self.left + 1} of {self.total})" if self.total else ""
        self.name = f"job {number}{place}: {label}".rstrip(": ")
        self.started = time.monotonic()
        print(self.name, flush=True)

    def end(self, record: dict | None) -> None:
        """The job that was started last has ended."""
        self.seconds.append(time.monotonic() - self.started)
        self.left -= 1
        text = f"  {result(record)}; {_duration(self.seconds[-1])}"
        if self.left > 0:
            text += f", about {_duration(self.left * sum(self.seconds) / len(self.seconds))} left"
        print(text, flush=True)
        tell_failure(self.name, record)


def tell_failure(name: str, record: dict | None) -> None:
    """Names a job that did not end ok or out of memory, with its folder, on stderr."""
    if record is None or record["status"] not in RESULTS:
        where = "" if record is None else f", see {record['run_dir']}"
        print(f"{name}: {result(record)}{where}", file=sys.stderr, flush=True)


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def varying(jobs: Sequence[Sequence[str]]) -> list[int]:
    """The positions at which the overrides of a sweep's jobs differ; all of them if there is one job."""
    return [i for i in range(len(jobs[0])) if len(jobs) == 1 or len({job[i] for job in jobs}) > 1]


def table(rows: Sequence[Sequence[str]]) -> str:
    """The rows in columns as wide as they need to be; the last column is not padded."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    lines = ("  ".join([*(cell.ljust(w) for cell, w in zip(row[:-1], widths, strict=True)), row[-1]]) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
