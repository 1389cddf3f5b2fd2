"""Several processes that train one model: who is who, Lightning's strategy, and what happens when one of them fails.

Rank 0 alone writes the record, the curves and W&B's run; another rank that fails leaves its reason in a file of the
run's folder, which rank 0 reads. Rank 0 may then be waiting for the dead rank, in code that no signal interrupts
(NCCL), so that a thread of it looks for such files and for ranks that ended.
"""

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from subprocess import Popen

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from omegaconf import DictConfig

from logitless.checkpoints import Stopped
from logitless.memory import is_out_of_memory
from logitless.processes import PARENT, STOPS, is_stopped
from logitless.records import FILE_NAME, append_line, read_record

EXTERNAL = "RANK", "SLURM_PROCID"  # set by torchrun, and by srun
POLL_S = 0.5
CAUSE_S = 2.0  # that the cause of a lost connection may need to show
TIMED_OUT = re.compile(r"time[ds]? ?out", re.IGNORECASE)  # in what a rank says that waited for another in vain
GRACE_S = 10.0  # that rank 0 has to notice by itself, as it does with gloo, and to write more into its record


def rank(trainer: dict) -> int:
    """This process's rank among all, before Lightning knows; `trainer` is that of conf/trainer/*.yaml."""
    return _from_environment(trainer, *EXTERNAL, "LOCAL_RANK")


def local_rank(trainer: dict) -> int:
    """This process's rank on its machine, which is the index of its GPU."""
    return _from_environment(trainer, "LOCAL_RANK", "SLURM_LOCALID")


def cuts_vocabulary(trainer: dict) -> bool:
    """Whether the head is cut over the vocabulary, and never whole."""
    return trainer.get("strategy") == "tp_vocab"


def is_started_externally() -> bool:
    """Whether torchrun or srun started this rank, as all others; else Lightning starts all but the first."""
    return any(name in os.environ for name in EXTERNAL)


def check(trainer: DictConfig, hydra_overrides: Sequence[str]) -> None:
    """Raises ValueError for ranks that would not find each other: on several machines, or in folders of their own."""
    if "strategy" not in trainer:
        return
    if trainer.num_nodes > 1 and not is_started_externally():
        raise ValueError(f"trainer.num_nodes={trainer.num_nodes}: start it on each with torchrun, or with srun")
    if is_started_externally() and not any(override.startswith("hydra.run.dir=") for override in hydra_overrides):
        raise ValueError("give hydra.run.dir=FOLDER: all ranks of a run must have the same one")


def _from_environment(trainer: dict, *names: str) -> int:
    given = [os.environ[name] for name in names if name in os.environ]
    return int(given[0]) if given and "strategy" in trainer else 0


def trainer_options(trainer: dict, device: torch.device) -> dict:
    """Arguments of Lightning's Trainer for conf/trainer/*.yaml."""
    if "strategy" not in trainer:
        return {**trainer, "devices": 1}
    devices, num_nodes = trainer["devices"], trainer["num_nodes"]
    if devices == "auto":
        devices = torch.cuda.device_count() if device.type == "cuda" else 1
    strategy = _strategy(trainer["strategy"], devices * num_nodes, timedelta(seconds=trainer["timeout_s"]))
    return {"accelerator": trainer["accelerator"], "devices": devices, "num_nodes": num_nodes, "strategy": strategy}


def _strategy(name: str, world: int, timeout: timedelta) -> Strategy:
    if name == "ddp":
        # No second copy of the gradients; few large sums, since each takes multiprocessors from a product of matrices.
        return DDPStrategy(gradient_as_bucket_view=True, bucket_cap_mb=128, timeout=timeout)
    sizes = {"data_parallel_size": world, "tensor_parallel_size": 1}
    return ModelParallelStrategy(**sizes, save_distributed_checkpoint=False, timeout=timeout)


def report_failure(run_dir: Path, rank: int, facts: dict) -> None:
    """Says in `run_dir` why this rank ends; rank 0 adds `facts` to its record."""
    file = run_dir / f"failed-rank{rank}.json"
    unfinished = file.with_suffix(".part")
    with suppress(OSError):  # of a full disk, which may be the failure itself
        run_dir.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps({"failed_rank": rank, **facts}))
        os.replace(unfinished, file)


def reported_failures(run_dir: Path) -> list[dict]:
    """What ranks that failed have reported, the first first."""
    files = sorted(run_dir.glob("failed-rank*.json"), key=lambda file: file.stat().st_mtime)
    return [json.loads(file.read_text()) for file in files]


class RankError(RuntimeError):
    """Another rank failed; `facts` is what rank 0's record should say of it."""

    def __init__(self, facts: dict):
        super().__init__(f"rank {facts['failed_rank']}: {facts['error']}")
        self.facts = facts


class RankOutOfMemoryError(RankError, torch.OutOfMemoryError):
    """Another rank ran out of memory."""


class Watch:
    """Rank 0's watch over the others, a context around all that they compute together; on other ranks it does nothing.

    An exception inside of it ends the children, and becomes RankError if another rank was the cause. Lightning's own
    observer would kill rank 0 too, maybe before it has written its record: it is left without children to observe.
    Ranks that torchrun or srun started are theirs to end; of these only what they report is seen.

    Args:
        trainer: of this rank.
        run_dir: the run's folder.
        give_up: called with the facts of another rank's failure if rank 0 does not end by itself; then it is ended.
    """

    def __init__(self, trainer: pl.Trainer, run_dir: Path, give_up: Callable[[dict], None]):
        self.launcher, self.run_dir, self.give_up = trainer.strategy.launcher, run_dir, give_up
        self.children: list[Popen] = []
        self._others = {*range(1, trainer.world_size)}
        self._is_needed = trainer.world_size > 1 and trainer.global_rank == 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Watch":
        if self._is_needed:
            os.environ[PARENT] = str(os.getpid())
            self._thread.start()
        return self

    def __exit__(self, kind, error, traceback) -> None:
        self._is_over.set()
        if self._is_needed:
            self._thread.join()
            del os.environ[PARENT]
        if kind is None:
            return
        self._adopt_children()
        failure = self._cause(error)
        self._kill_children()
        if failure is None:
            return
        if failure["status"] == "stopped":
            raise Stopped(signal.Signals[failure["error"]], f"to rank {failure['failed_rank']}") from error
        raise (RankOutOfMemoryError if failure["status"] == "oom" else RankError)(failure) from error

    def failure(self) -> dict | None:
        """The facts of another rank's failure: what it reported, or how it ended; None if all are well.

        Where several failed: one that ran out of memory, else one that a signal ended, else the first to report. The
        others have only lost their connection to it. Where all that report have waited in vain: one that does not.
        """
        reports = reported_failures(self.run_dir)
        told = {report["failed_rank"] for report in reports}
        silent = [
            (number, child.returncode)
            for number, child in enumerate(self.children, start=1)
            if child.poll() and number not in told
        ]
        for status in ("oom", "stopped"):
            for report in reports:
                if report["status"] == status:
                    return report
        for number, code in sorted(silent, key=lambda rank: rank[1] > 0):
            if code < 0 or code - 128 in STOPS or not reports:
                facts = {"failed_rank": number, "status": "error", "error": f"ended with status {code} without a word"}
                if (sent := -code if code < 0 else code - 128) in STOPS:
                    facts |= {"status": "stopped", "error": signal.Signals(sent).name}
                return facts
        if reports and (stopped := self._stopped()):
            return _standing_still(stopped, reports[0]["error"])
        if reports and all(TIMED_OUT.search(report["error"]) for report in reports):
            return _standing_still(self._others - told or {0}, reports[0]["error"])
        return reports[0] if reports else None

    def _stopped(self) -> set[int]:
        return {number for number, child in enumerate(self.children, start=1) if is_stopped(child.pid)}

    def _cause(self, error: BaseException) -> dict | None:
        # What a lost connection raises is a RuntimeError; other errors, and signals, all ranks have for themselves.
        if not isinstance(error, RuntimeError) or is_out_of_memory(error) or not self._is_needed:
            return None
        deadline = time.monotonic() + CAUSE_S  # a connection is lost a moment before the process that held it has ended
        # A report may be of one that lost its connection to the rank that is the cause.
        while ((failure := self.failure()) is None or failure["status"] == "error") and time.monotonic() < deadline:
            time.sleep(0.05)
        if failure is None and TIMED_OUT.search(str(error)):
            return _standing_still(self._stopped() or self._others, str(error))
        return failure

    def _kill_children(self) -> None:
        for child in self.children:
            child.kill()
            child.wait()

    def _watch(self) -> None:
        while not self._is_over.wait(POLL_S):
            self._adopt_children()
            if self.failure() is not None and not self._is_over.wait(GRACE_S):
                failure = self.failure()
                print(f"rank {failure['failed_rank']}: {failure['error']}", file=sys.stderr, flush=True)
                try:
                    self.give_up(failure)
                finally:
                    self._kill_children()
                    os._exit(128 + signal.Signals[failure["error"]] if failure["status"] == "stopped" else 1)

    def _adopt_children(self) -> None:
        while getattr(self.launcher, "procs", None):
            self.children.append(self.launcher.procs.pop(0))


def _standing_still(ranks: set[int], error: str) -> dict:
    names = " and ".join(map(str, sorted(ranks)))
    return {"failed_rank": min(ranks), "status": "error", "error": f"others waited for {names} in vain: {error}"}


def is_child() -> bool:
    """Whether the first rank has started this one, not torchrun or srun."""
    return PARENT in os.environ


def end_standing_parent(run_dir: Path) -> None:
    """Ends the first rank, which has started this one, if somebody has stopped it, so that it cannot end by itself."""
    if is_child() and is_stopped(parent := int(os.environ[PARENT])):
        record = read_record(run_dir) | {"status": "error", "failed_rank": 0, "error": "stands still (SIGSTOP)"}
        append_line({name: value for name, value in record.items() if name != "run_dir"}, run_dir / FILE_NAME)
        os.kill(parent, signal.SIGKILL)
