"""Trains a small GPT with the loss backend of your choice: python scripts/train.py --help."""

import _path  # isort: skip  # noqa: F401

import signal
import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from logitless.memory import is_out_of_memory
from logitless.run import prepare, train


@hydra.main(config_path="../conf", config_name="train", version_base="1.3")
def main(config: DictConfig) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, so that the record and W&B get closed
    run_dir = Path(HydraConfig.get().runtime.output_dir)
    try:
        job = prepare(config if config.resume is None else resumed(Path(config.resume), run_dir))
    except (ValueError, RuntimeError) as error:
        sys.exit(f"error: {error}")
    try:
        print(last_lines(train(job, run_dir), run_dir))
    except SystemExit as error:
        sys.exit(error.code or 1)  # a library that exits with 0 inside a run did not finish it
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        print(f"out of memory: {error}", file=sys.stderr)
        if HydraConfig.get().mode == RunMode.RUN:
            sys.exit(1)  # in a sweep it is a result, and the next job goes on


def resumed(first: Path, run_dir: Path) -> DictConfig:
    """The configuration of the run in `first`, changed by this command's overrides, which `run_dir` then holds."""
    file = Path(".hydra") / "overrides.yaml"
    if not (first / file).exists():
        raise ValueError(f"resume={first}: no run there ({first / file} is missing)")
    overrides = [*OmegaConf.load(first / file), *HydraConfig.get().overrides.task]
    OmegaConf.save(overrides, run_dir / file)
    return hydra.compose("train", overrides=overrides)


def last_lines(record: dict, run_dir: Path) -> str:
    """The last lines of a run."""
    peaks = ", ".join(f"{k} {v:.3f}" for k, v in record.items() if "peak" in k and "reserved" not in k)
    return (
        f"\nloss        train {record['train_loss']:.4f}, validation {record['val_loss']:.4f} nats a token\n"
        f"memory      {peaks}\n"
        f"speed       {record['tokens_per_s'] or float('nan'):,.0f} tokens/s\n"
        f"sample      {record['sample']!r}\n"
        f"record      {run_dir}/record.jsonl\n"
        f"curves      {run_dir / record['curves']}\n"
        f"checkpoint  {run_dir / record['checkpoint']}"
    )


if __name__ == "__main__":
    main()
