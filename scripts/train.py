"""Trains a small GPT with the loss backend of your choice: python scripts/train.py --help."""

import _path  # isort: skip  # noqa: F401

import os
import signal
import sys
from pathlib import Path

# Without it a run that needs 19 GiB can fail at 24: its long tensors find no gap that is long enough.
if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # its older name
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from logitless import processes
from logitless.config import check_resumed_config
from logitless.disk import outlive_a_full_disk
from logitless.records import FILE_NAME
from logitless.sweeps.sweeper import identity

OVERRIDES = "overrides.yaml"


@hydra.main(config_path="../conf", config_name="train", version_base="1.3")
def main(config: DictConfig) -> None:
    for number in processes.STOPS:  # at once: an exception in the middle of an import may abort the process
        signal.signal(number, lambda number, _: os._exit(128 + number))
    if os.environ.get("LOCAL_RANK", "0") != "0":  # before anything else, which takes seconds
        processes.die_with_parent()
    # Here, so that a sweep's own process, whose jobs are others, starts without torch and Lightning.
    from logitless import ranks
    from logitless.checkpoints import ResumeError, Stopped
    from logitless.job import prepare
    from logitless.memory import is_out_of_memory
    from logitless.module import DivergedError
    from logitless.run import train

    for number in processes.STOPS:  # an exception: the record and W&B get closed
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    run_dir = Path(HydraConfig.get().runtime.output_dir)
    overrides, sweep_dir = identity(HydraConfig.get())
    try:
        config, task = resumed(config)
        rank = ranks.rank(config.trainer)
        ranks.check(config.trainer, HydraConfig.get().overrides.hydra)
        if rank == 0:
            claim(run_dir, task)
        job = prepare(config)
    except (ValueError, RuntimeError, OSError, HydraException) as error:
        sys.exit(f"error: {error}")
    try:
        record = train(job, run_dir, overrides, sweep_dir)
        if rank == 0:
            print(last_lines(record, run_dir))
    except SystemExit as error:
        reason = f" ({error})" if isinstance(error, Stopped) else ""
        if rank == 0:
            print(f"stopped{reason}; what there is of the run lies in {run_dir}", file=sys.stderr)
        sys.exit(error.code or 1)  # a library that exits with 0 inside a run did not finish it
    except (DivergedError, ResumeError, ranks.RankError, OSError) as error:  # no bug, and a traceback tells no more
        sys.exit(f"error: {error}" if rank == 0 else 1)
    except Exception as error:
        if not is_out_of_memory(error, job.device):
            raise
        print(f"out of memory: {error}", file=sys.stderr)
        sys.exit(1)


def resumed(config: DictConfig) -> tuple[DictConfig, list[str]]:
    """The configuration of this run and its overrides: the command's, or a resumed run's changed by the command's."""
    overrides = list(HydraConfig.get().overrides.task)
    if config.resume is None:
        return config, overrides
    first = Path(config.resume) / OVERRIDES
    if not first.exists():
        raise ValueError(f"resume={config.resume}: no run there ({first} is missing)")
    before = hydra.compose("train", overrides=list(OmegaConf.load(first)))
    overrides = [*OmegaConf.load(first), *overrides]
    config = hydra.compose("train", overrides=overrides)
    check_resumed_config(config, before)
    return config, overrides


def claim(run_dir: Path, overrides: list[str]) -> None:
    """Leaves the overrides in the run's folder, in a file that Hydra does not overwrite when a later run starts there.

    Raises:
        ValueError: a run is there already.
    """
    if (run_dir / FILE_NAME).exists():
        raise ValueError(f"{run_dir} holds a run already: choose another hydra.run.dir")
    OmegaConf.save(overrides, run_dir / OVERRIDES)


def last_lines(record: dict, run_dir: Path) -> str:
    """The last lines of a run."""
    peaks = ", ".join(f"{k} {v:.3f}" for k, v in record.items() if "peak" in k and "reserved" not in k)
    speed = f"{record['tokens_per_s']:,.0f} tokens/s" if record["tokens_per_s"] else "not measured"
    checkpoint = run_dir / record["checkpoint"] if "checkpoint" in record else "none"
    mfu = f", {record['mfu']:.1%} of the GPUs' bf16 rate (MFU)" if record["mfu"] else ""
    first = f", first step done after {record['start_up_s']:.1f} s" if record["start_up_s"] else ""
    parts = ", ".join(f"{part} {ms:.1f}" for part, ms in record["step_ms"].items())
    step = f"step        {sum(record['step_ms'].values()):.1f} ms: {parts}\n" if parts else ""
    return (
        f"\nloss        train {record['train_loss']:.4f}, validation {record['val_loss']:.4f} nats a token\n"
        f"accuracy    validation {record['val_accuracy']:.1%}\n"
        f"memory      {peaks or 'not measured'}\n"
        f"speed       {speed}{mfu}{first}\n{step}"
        f"sample      {record['sample']!r}\n"
        f"record      {run_dir}/record.jsonl\n"
        f"curves      {run_dir / record['curves']}\n"
        f"checkpoint  {checkpoint}"
    )


if __name__ == "__main__":
    outlive_a_full_disk()
    main()
