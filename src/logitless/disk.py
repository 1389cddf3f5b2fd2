"""A disk or a pipe that takes nothing: one clear line when a run starts, and nothing that ends it later."""

import errno
import io
import sys
import tempfile
from pathlib import Path

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

REFUSALS = {errno.ENOSPC, errno.EDQUOT, errno.EPIPE}


class _Lenient(io.FileIO):
    """Loses what a full disk, or a pipe whose reader has ended, does not take."""

    def write(self, data) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in REFUSALS:
                raise
            return len(data)


def outlive_a_full_disk() -> None:
    """Makes what this process prints go missing while the disk, or pipe, that it goes to does not take it."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed when the process started
            continue
        stream.flush()
        raw = _Lenient(stream.fileno(), "wb", closefd=False)
        buffer = raw if stream.write_through else io.BufferedWriter(raw)
        options = {"encoding": stream.encoding, "errors": stream.errors, "line_buffering": stream.line_buffering}
        setattr(sys, name, io.TextIOWrapper(buffer, **options, write_through=stream.write_through))


class WritableFolder(Callback):
    """Hydra's callback before a run, which ends with one line if its folder takes no file."""

    def on_run_start(self, config: DictConfig, **_) -> None:
        folder = Path(config.hydra.run.dir)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder, buffering=0) as stream:
                stream.write(bytes(2**16))  # more than Hydra writes there
        except OSError as error:
            sys.exit(f"error: hydra.run.dir={folder}: {error.strerror}")
