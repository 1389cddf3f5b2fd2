"""One training run and its record, however it ends."""

import json
import logging
import signal
import sys
import traceback
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path

import lightning.pytorch as pl
import torch

from logitless import memory, ranks
from logitless.checkpoints import SIGNALLED, Stopped
from logitless.fit import fit
from logitless.job import Job
from logitless.loggers import CURVES, Loggers
from logitless.records import FILE_NAME, append_line, new_record


def train(job: Job, run_dir: Path, overrides: Sequence[str] = (), sweep_dir: str | None = None) -> dict:
    """Trains and returns the record; `run_dir`/record.jsonl gets it too, when it starts and when it ends or fails.

    Args:
        job: what to train.
        run_dir: the run's folder.
        overrides: what the configuration was composed with, for the record.
        sweep_dir: the folder of the sweep that the run belongs to, which W&B groups its runs by; None for a single run.

    Raises:
        BaseException: what ended the run, after its record was written with status "oom", "stopped" (by a signal) or
            "error" and, for the last, its traceback in `run_dir`/traceback.txt.
    """
    config, loss = job.config, job.loss
    run_dir.mkdir(parents=True, exist_ok=True)
    _quieten_lightning()
    pl.seed_everything(config["seed"], verbose=False)
    if ranks.rank(config["trainer"]) > 0:
        return _follow(job, run_dir)
    record = new_record(config, job.device) | {"overrides": list(overrides), "sweep": sweep_dir}
    record |= {"backend": loss.func.__name__, "chunk": loss.keywords.get("chunk")}
    record |= {"plan": None if job.plan is None else asdict(job.plan), "precision": job.precision}
    record |= {name: config[name] for name in ("seq_len", "batch_size", "memory_limit_gib", "resume")}
    record |= {"memory_limit": job.limit and job.limit.means, "allocator": memory.allocator(job.device)}
    append_line(record, run_dir / FILE_NAME)
    settings = config["logger"]
    if sweep_dir and settings.get("group", "") is None:
        settings = settings | {"group": Path(sweep_dir).name}
    loggers = None
    try:
        loggers = Loggers(settings, run_dir, run_name(record), record["backend"], config)
        record["curves"] = str(CURVES)
        fit(job, loggers, run_dir, record, partial(_close, loggers=loggers, run_dir=run_dir))
        record["status"] = "ok"
    except BaseException as error:
        record |= _outcome(error, job.device)
        if record["status"] == "error":
            with suppress(OSError):  # of a full disk, which may be the error itself
                (run_dir / "traceback.txt").write_text(traceback.format_exc())
        raise
    finally:
        _close(record, loggers, run_dir)
    return record


def _follow(job: Job, run_dir: Path) -> dict:
    """The part of a rank that is not the first: it computes, and writes nothing unless it fails."""
    record = {}
    try:
        fit(job, None, run_dir, record, partial(_close, loggers=None, run_dir=run_dir))
    except BaseException as error:
        facts = _outcome(error, job.device) | {name: record.get(name) for name in ("step", "phase")}
        if facts["status"] == "stopped" and not isinstance(error, Stopped):
            facts["error"] = signal.Signals(error.code - 128).name
        # Whoever else starts ranks also signals them all when one has failed: such a signal is no cause.
        if isinstance(error, Exception) or (ranks.is_child() and not isinstance(error, Stopped)):
            ranks.report_failure(run_dir, ranks.rank(job.config["trainer"]), facts)
        ranks.end_standing_parent(run_dir)
        raise
    return record


def _outcome(error: BaseException, device: torch.device) -> dict:
    if isinstance(error, ranks.RankError):
        return error.facts
    is_exit = isinstance(error, SystemExit) and not isinstance(error, Stopped)
    if is_exit and isinstance(error.__context__, RuntimeError) and ranks.is_started_externally():
        error = error.__context__  # torchrun ended this rank while it looked for the cause of a lost connection
    is_signal = isinstance(error, SystemExit) and error.code in SIGNALLED
    is_oom = memory.is_out_of_memory(error, device)
    return {"status": "oom" if is_oom else "stopped" if is_signal else "error", "error": _describe_error(error)}


def _close(record: dict, loggers: Loggers | None, run_dir: Path) -> None:
    try:
        append_line(record, run_dir / FILE_NAME)
    except OSError:
        print(f"what should stand in {run_dir / FILE_NAME}: {json.dumps(record)}", file=sys.stderr)
        raise
    finally:
        if loggers is not None:
            loggers.finish({key: value for key, value in record.items() if key not in ("config", "versions", "sample")})


def _describe_error(error: BaseException) -> str:
    if isinstance(error, SystemExit) and not isinstance(error, Stopped) and error.__context__ is not None:
        error = error.__context__  # Lightning turns an interrupt into an exit
    return "".join(traceback.format_exception_only(error)).strip()


def _quieten_lightning() -> None:
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)  # advertisements
    warnings.filterwarnings("ignore", message=".*LeafSpec")  # its own use of what torch deprecates
    warnings.filterwarnings("ignore", message=".*does not have many workers")  # slicing a memory map needs none
    warnings.filterwarnings("ignore", message=".*dataloader is not resumable")  # data.Batches knows its place
    warnings.filterwarnings("ignore", message="It is recommended to use .*sync_dist")  # LanguageModel reduces itself


def run_name(record: dict) -> str:
    """`fused-c1024-T128`, `naive-T128`."""
    chunk = f"-c{record['chunk']}" if record["chunk"] else ""
    return f"{record['backend']}{chunk}-T{record['seq_len']}"
