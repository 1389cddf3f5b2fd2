"""Where curves go: a CSV in every run, and Weights & Biases unless `logger=csv`."""

import os
from pathlib import Path

from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger

PEAKS = ("peak_allocated_gib", "peak_reserved_gib", "peak_live_tensor_gib")  # W&B takes no summary of a pattern
SUMMARIES = {"val/loss": "min", "val/accuracy": "max"} | {f"memory/{name}": "max" for name in PEAKS}
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
        # In a folder of its own: the logger removes what it finds.
        self._csv = CSVLogger(run_dir, name="curves", version="", flush_logs_every_n_steps=1)
        self._wandb = None
        if settings["kind"] == "wandb":
            self._wandb = _start_wandb(settings, run_dir, run_name, backend, config)
        self.curves = Path("curves") / "metrics.csv"

    def all(self) -> list[Logger]:
        if self._wandb is None:
            return [self._csv]
        return [self._csv, WandbLogger(experiment=self._wandb)]

    def finish(self, summary: dict) -> None:
        """Closes W&B's run with `summary`; its exit code is 1 where the status is "error"."""
        self._csv.save()
        if self._wandb is not None:
            self._wandb.summary.update(summary)
            self._wandb.finish(exit_code=1 if summary["status"] == "error" else 0)


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
    settings = wandb.Settings(silent=True, init_timeout=INIT_TIMEOUT_S)
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
