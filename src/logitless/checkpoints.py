"""A run that ends early: what it leaves, and how another run continues it.

A checkpoint is the state between two optimizer steps, before the validation that may be due there, with the number of
points that the curves had. A run that continues it gets these points first, makes up for the validation, and trains on.
The last two are kept; neither name ever holds a file that is not whole, unless the disk damaged it.
"""

import os
import signal
import sys
import threading
import zipfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from logitless.loggers import CurveFile, read_rows
from logitless.processes import STOPS
from logitless.records import read_record

FOLDER = Path("checkpoints")
PARTS = {"state_dict", "global_step", "world_size"}  # of a checkpoint, among others
IS_FOLDER = 0x10  # in the attributes of an archive's entry, which PyTorch then does not read, and does not say so
LAST_CHECKPOINT = FOLDER / "last.ckpt"
PREVIOUS_CHECKPOINT = FOLDER / "previous.ckpt"
SIGNALLED = {128 + number for number in STOPS}  # exit statuses
AGAIN = b"\nSIGINT: the run ends after this step or validation, with a checkpoint; once more ends it at once\n"


class Stopped(SystemExit):
    """The end of a run that got SIGTERM or SIGINT; a process that does not catch it ends with 143 or 130."""

    def __init__(self, number: int, message: str):
        super().__init__(128 + number)
        self.message = f"{signal.Signals(number).name} {message}"

    def __str__(self) -> str:
        return self.message


class ResumeError(ValueError):
    """A checkpoint that this run cannot continue."""


class WholeFiles(TorchCheckpointIO):
    """Writes a checkpoint beside the last one, which then becomes the previous one: a kill leaves whole files only.

    Where the folder takes no more, both older files stay as they were, and `error` says why: an exception would leave
    the other ranks waiting for this one.
    """

    error: OSError | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        path = Path(path)
        self.error = None
        part = path.with_name(path.name + ".part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(part, "wb") as stream:
                torch.save(checkpoint, stream)
                stream.flush()
                os.fsync(stream.fileno())
            if path.exists():
                os.replace(path, path.with_name(PREVIOUS_CHECKPOINT.name))
            os.replace(part, path)
            _sync_folder(path.parent)
        except (OSError, RuntimeError) as error:
            _remove(part)
            cause = error if isinstance(error, OSError) else error.__context__
            if not isinstance(cause, OSError):  # else torch's complaint about a file that it could not end
                raise
            self.error = OSError(cause.errno, f"{path} cannot be written: {cause.strerror}")


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(file: Path) -> None:
    with suppress(OSError):  # what made it impossible to write may make this impossible too
        file.unlink()


def newest_checkpoint(run_dir: Path) -> Path:
    """The newest whole checkpoint of a run; stderr names a damaged one that is skipped.

    Raises:
        ValueError: there is none.
    """
    for path in (run_dir / LAST_CHECKPOINT, run_dir / PREVIOUS_CHECKPOINT):
        if path.is_file():
            damage = _damage(path)
            if damage is None:
                return path
            print(f"{path} is damaged ({damage}): skipped", file=sys.stderr)
    former = (read_record(run_dir) or {}).get("resume")
    instead = f"; it continued {former}, which you can continue again" if former else ""
    raise ValueError(
        f"resume={run_dir}: no whole {LAST_CHECKPOINT} there "
        f"(a run writes its first after checkpoint_every steps){instead}"
    )


def _damage(path: Path) -> str | None:
    """What is wrong with a checkpoint, by the checksums that it holds and as it loads; None if nothing is."""
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
            folders = [entry.filename for entry in archive.infolist() if entry.external_attr & IS_FOLDER]
        if broken or folders:
            return f"checksum of {broken}" if broken else f"{folders[0]} is marked as a folder"
        missing = PARTS - {*torch.load(path, map_location="cpu", mmap=True, weights_only=True)}
    except Exception as error:  # of zipfile, zlib, pickle and torch: damage can look like anything
        return (str(error) or type(error).__name__).splitlines()[0]
    return f"without {', '.join(sorted(missing))}" if missing else None


def step_of(checkpoint: Path, weights: Collection[str]) -> int:
    """The optimizer steps that a checkpoint has behind it; ResumeError if it has not the weights of these names."""
    content = torch.load(checkpoint, map_location="cpu", mmap=True, weights_only=True)
    if others := content["state_dict"].keys() ^ weights:
        raise ResumeError(f"{checkpoint} is of another model or an older version: {', '.join(sorted(others)[:4])}")
    return content["global_step"]


@contextmanager
def restoring_signal_handlers() -> Iterator[None]:
    """Gives the handlers of SIGTERM and SIGINT back at the end."""
    former = {number: signal.getsignal(number) for number in STOPS}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in former.items():
                signal.signal(number, handler)


class Checkpoints(Checkpoint):
    """Writes checkpoints, at SIGTERM and SIGINT too, and joins what a resumed run continues.

    After one of these the run ends with a checkpoint as soon as the optimizer step is done that it is in, or the first
    one after a validation; with several processes at the next logged step, where they agree on it. A second SIGINT ends
    it at once. A checkpoint that cannot be written is named on stderr, and training goes on. One whose weights, or last
    step, are not finite is not written.

    Args:
        run_dir: the run's folder.
        every: optimizer steps from one checkpoint to the next; None: none, and a signal ends the run at once.
        files: the trainer's, which the first rank writes with.
        curves: the points so far are counted there; None on the other ranks.
        resumed_curves: those of the run that is continued.
    """

    def __init__(
        self,
        run_dir: Path,
        every: int | None,
        files: WholeFiles,
        curves: CurveFile | None,
        resumed_curves: Path | None,
    ):
        self.path, self.every, self.files = run_dir / LAST_CHECKPOINT, every, files
        self.curves, self.resumed_curves = curves, resumed_curves
        self.saved_step: int | None = None
        self._step = 0
        self._signal: int | None = None

    def on_load_checkpoint(self, trainer, module, checkpoint: dict) -> None:
        if checkpoint["world_size"] != trainer.world_size:
            raise ResumeError(
                f"the run was of {checkpoint['world_size']} ranks, this one is of {trainer.world_size}: "
                "a run goes on with as many as before (trainer.devices x trainer.num_nodes)"
            )
        # The last batch of a run is not the last of one with more steps.
        checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["is_last_batch"] = False
        rows = read_rows(self.resumed_curves)[: checkpoint["curve_rows"]]
        if len(rows) < checkpoint["curve_rows"]:
            _tell(
                f"{self.resumed_curves} has {len(rows)} of the {checkpoint['curve_rows']} points before the checkpoint"
            )
        for step, values in rows:
            for logger in trainer.loggers:
                logger.log_metrics(values, step=step)

    def on_save_checkpoint(self, trainer, module, checkpoint: dict) -> None:
        checkpoint["world_size"] = trainer.world_size
        if self.curves is not None:
            checkpoint["curve_rows"] = self.curves.n_rows

    def on_train_start(self, trainer, module) -> None:
        self._step = trainer.global_step
        self._heed_signals()
        n_batches = self._step * trainer.accumulate_grad_batches
        # The validation that is due at this step ended with the former run, and Lightning would not repeat it.
        if self._step and module.validated_step != self._step and n_batches % trainer.val_check_batch == 0:
            validation = trainer.fit_loop.epoch_loop.val_loop
            validation.restarting, trainer.validating = False, True
            validation.run()
            trainer.training = True

    def _heed_signals(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in STOPS:
                signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: object) -> None:
        if self.every is None or number == self._signal == signal.SIGINT:
            sys.exit(128 + number)
        self._signal = number
        if number == signal.SIGINT and self.curves is not None:  # the first rank
            os.write(2, AGAIN)  # not print, whose buffer the signal may have interrupted

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        if self.every is None or trainer.global_step == self._step:
            return  # inside an accumulation window
        self._step = trainer.global_step
        if self._must_stop(trainer, module):
            self._stop(trainer, module)
        if self._step % self.every == 0:
            self.save(trainer, module)

    def _must_stop(self, trainer, module) -> bool:
        may_agree = trainer.world_size == 1 or module.is_logging_step(self._step)
        return may_agree and self._has_signal_anywhere(trainer)

    def _has_signal_anywhere(self, trainer) -> bool:
        return trainer.strategy.reduce_boolean_decision(self._signal is not None, all=False)

    def _stop(self, trainer, module) -> None:
        self.save(trainer, module)
        raise self._stopped(f"after step {self._step}")

    def save_at_end(self, trainer, module) -> None:
        """Writes the last checkpoint of a run whose steps are done; raises Stopped if a signal came meanwhile."""
        if self.every is None:
            return
        self.save(trainer, module)
        if self._has_signal_anywhere(trainer):
            raise self._stopped(f"after step {trainer.global_step}, the last")

    def _stopped(self, when: str) -> Stopped:
        return Stopped(self._signal or signal.SIGTERM, f"{when}; {self.last()}")  # None: only another rank got one

    def save(self, trainer, module) -> None:
        """Writes a checkpoint, or says on stderr why it does not."""
        module.write_point()  # that of this step is part of what the checkpoint counts
        step, self.files.error = trainer.global_step, None
        if not module.is_finite():
            _tell(f"no checkpoint at step {step}: weights, loss or gradient not finite; {self.last()}")
            return
        trainer.save_checkpoint(self.path)
        if self.files.error is None:
            self.saved_step = step
        else:
            _tell(f"no checkpoint at step {step}: {self.files.error.strerror}; {self.last()}")

    def facts(self) -> dict:
        """The last checkpoint for the run's record; nothing if there is none."""
        if self.saved_step is None:
            return {}
        return {"checkpoint": str(LAST_CHECKPOINT), "checkpoint_step": self.saved_step}

    def last(self) -> str:
        """Where the last checkpoint of the run is, in words."""
        if self.saved_step is None:
            return "there is no checkpoint of this run"
        return f"the last checkpoint is that of step {self.saved_step}, {self.path}"


@rank_zero_only
def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
