"""Where curves go: a CSV in every run, and Weights & Biases unless `logger=csv`. A broken logger ends no run."""

import csv
import io
import os
import sys
from pathlib import Path

from lightning.pytorch.loggers import Logger, WandbLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from logitless.records import PEAKS, RESULTS

CURVES = Path("curves") / "metrics.csv"  # in the run's folder
SUMMARIES = {"val/loss": "min", "val/accuracy": "max"}
SUMMARIES |= {f"memory/{name}": "max" for name in (*PEAKS, "peak_reserved_gib")}  # W&B takes no summary of a pattern
FINISH_TIMEOUT_S = 60  # for a server that was lost; what is not uploaded by then is on disk, for `wandb sync`
INIT_TIMEOUT_S = 20  # an unreachable server costs a few times this before the run goes offline


class Loggers:
    """The loggers of one run.

    Args:
        settings: conf/logger/*.yaml.
        run_dir: the run's folder, which gets curves/metrics.csv and W&B's files.
        run_name: what W&B calls the run.
        backend: W&B's tag of the run.
        config: the whole config, for W&B.
    """

    def __init__(self, settings: dict, run_dir: Path, run_name: str, backend: str, config: dict):
        self.curve_file = CurveFile(run_dir / CURVES)
        self._wandb = None
        if settings["kind"] == "wandb":
            self._wandb = _start_wandb(settings, run_dir, run_name, backend, config)

    def all(self) -> list[Logger]:
        if self._wandb is None:
            return [self.curve_file]
        return [self.curve_file, ToWandb(experiment=self._wandb)]

    def finish(self, summary: dict) -> None:
        """Closes W&B's run with `summary`; its exit code is 1 where the run did not end by itself."""
        self.curve_file.close()
        if self._wandb is not None:
            try:
                self._wandb.summary.update(summary)
                self._wandb.finish(exit_code=0 if summary["status"] in RESULTS else 1)
            except Exception as error:
                _tell(f"wandb: {error!r}; the record and the curves are whole without it")


class ToWandb(WandbLogger):
    """W&B until it fails."""

    _is_broken = False

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if self._is_broken:
            return
        try:
            super().log_metrics(metrics, step)
        except Exception as error:  # its own process may have died
            self._is_broken = True
            _tell(f"wandb: {error!r}; training goes on without it")


class CurveFile(Logger):
    """The points of a run's curves as rows of a CSV file, each of them there when `log_metrics` returns.

    A kill leaves all rows but perhaps the one that was being written. Rows that the disk does not take are tried again
    with the next ones.

    Args:
        path: the file, which must not exist; its folder is made.
    """

    def __init__(self, path: Path):
        super().__init__()
        self.path = path
        self.n_rows = 0
        self._columns: list[str] = []
        self._size = 0  # of the whole rows in the file
        self._waiting: list[dict[str, float]] = []
        self._is_broken = False

    @property
    def name(self) -> str:
        return self.path.parent.name

    @property
    def version(self) -> str:
        return ""

    def log_hyperparams(self, *_) -> None:
        pass

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self._waiting.append({"step": step, **metrics})
        self.n_rows += 1
        self.save()

    @rank_zero_only
    def save(self) -> None:
        if not self._waiting:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            new = {name for row in self._waiting for name in row} - set(self._columns)
            if new:
                self._widen(sorted([*self._columns, *new]))
            text = io.StringIO(newline="")
            csv.DictWriter(text, self._columns).writerows(self._waiting)
            with open(self.path, "r+b") as stream:
                stream.seek(self._size)
                stream.write(text.getvalue().encode())
                stream.truncate()
            self._size += len(text.getvalue())
            self._waiting = []
        except OSError as error:
            if not self._is_broken:
                _tell(f"{self.path} cannot be written ({error.strerror}): its points wait in memory")
        self._is_broken = bool(self._waiting)

    def close(self) -> None:
        """Tries once more; says what was lost."""
        self.save()
        if self._waiting:
            _tell(f"{self.path}: the last {len(self._waiting)} points are lost")

    def _widen(self, columns: list[str]) -> None:
        """Writes the file anew with more columns, beside the old one, which it replaces."""
        rows = [{"step": step, **values} for step, values in read_rows(self.path)] if self._columns else []
        part = self.path.with_name(self.path.name + ".part")
        with open(part, "w", newline="") as stream:
            writer = csv.DictWriter(stream, columns)
            writer.writeheader()
            writer.writerows(rows)
        os.replace(part, self.path)
        self._columns, self._size = columns, self.path.stat().st_size


def read_rows(path: Path) -> list[tuple[int, dict[str, float]]]:
    """The step and the values of each whole row of a run's curves."""
    if not path.exists():
        return []
    with open(path, newline="") as stream:
        rows = [row for row in csv.DictReader(stream) if None not in row.values()]
    return [(int(row.pop("step")), {name: _number(text) for name, text in row.items() if text}) for row in rows]


def _number(text: str) -> float:
    return int(text) if text.isdigit() else float(text)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _start_wandb(settings: dict, run_dir: Path, run_name: str, backend: str, config: dict):
    import wandb

    # Asked without a prompt and without the network. WANDB_MODE, where set, is the user's own answer.
    mode = os.environ.get("WANDB_MODE")
    if mode is None:
        mode = "online" if _is_logged_in() else "offline"
    arguments = {
        "project": settings["project"],
        "entity": settings["entity"],
        "group": settings["group"],
        "name": run_name,
        "tags": [backend],
        "dir": run_dir,
        "config": config,
    }
    settings = wandb.Settings(silent=True, init_timeout=INIT_TIMEOUT_S, finish_timeout=FINISH_TIMEOUT_S)
    try:
        run = wandb.init(**arguments, mode=mode, settings=settings)
    except wandb.Error as error:
        print(f"wandb: online logging failed ({error}); logging offline")
        run = wandb.init(**arguments, mode="offline", settings=settings)
    run.define_metric("tokens")
    run.define_metric("*", step_metric="trainer/global_step")
    for name, best_or_worst in SUMMARIES.items():
        run.define_metric(name, summary=best_or_worst, step_metric="trainer/global_step")
    return run


def _is_logged_in() -> bool:
    import wandb

    try:
        return wandb.login(prompt=False, verify=False)
    except wandb.Error as error:  # a key that cannot be one
        print(f"wandb: {error}; logging offline")
        return False
