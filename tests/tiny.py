"""Runs that take about a second: one narrow layer on a text of a few hundred lines."""

import csv
import json
import random
from collections.abc import Callable
from pathlib import Path

import hydra
import lightning.pytorch as pl
import torch
from omegaconf import DictConfig

from logitless import job, run

torch.set_num_threads(1)  # tensors this small gain nothing from threads, which on busy cores wait 40 times as long

ROOT = Path(__file__).resolve().parent.parent
BACKENDS = sorted(file.stem for file in (ROOT / "conf" / "loss").glob("*.yaml"))
WORDS = ["the", "of", "and", "to", "she", "had", "captain", "anne", "very", "house", "little", "good", "walk", "friend"]
SMALL = (
    "tokenizer.vocab_size=300",
    "model.n_layers=1",
    "model.n_heads=2",
    "model.width=16",
    "seq_len=8",
    "batch_size=2",
    "max_steps=4",
    "warmup_steps=2",
    "log_every=1",
    "val_every=2",
    "val_batches=2",
    "checkpoint_every=2",
    "trainer=cpu",
)


def overrides(tmp_path: Path, *more: str) -> list[str]:
    """Overrides of a tiny run on a text in `tmp_path`, which is written if need be; `more` wins."""
    text = tmp_path / "text.txt"
    if not text.exists():
        draw = random.Random(0)
        text.write_text("".join(" ".join(draw.choices(WORDS, k=10)) + "\n" for _ in range(300)))
    return ["data=text", f"data.path={text}", f"cache_dir={tmp_path / 'cache'}", *SMALL, "logger=csv", *more]


def compose(*overrides: str) -> DictConfig:
    with hydra.initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return hydra.compose("train", overrides=list(overrides))


def tiny(tmp_path: Path, *more: str) -> DictConfig:
    return compose(*overrides(tmp_path, *more))


def train(config: DictConfig, run_dir: Path) -> dict:
    return run.train(job.prepare(config), run_dir)


def with_callbacks(trainer_of: Callable, *callbacks: pl.Callback) -> Callable:
    """`fit._trainer`, whose trainer has `callbacks` too."""
    return lambda job, loggers, run_dir, own, files: trainer_of(job, loggers, run_dir, [*own, *callbacks], files)


class NoWaiting(pl.Callback):
    """Any wait for the GPU is an error from the beginning of a step without a point to that of the next step."""

    def __init__(self):
        self.n_batches = 0

    def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
        has_point = module.is_logging_step(trainer.global_step + 1)
        torch.cuda.set_sync_debug_mode("default" if has_point else "error")
        self.n_batches += not has_point

    def on_exception(self, trainer, module, exception) -> None:
        torch.cuda.set_sync_debug_mode("default")


def read_record(run_dir: Path) -> dict:
    """The record in `run_dir`, the last of its two lines."""
    started, line = (run_dir / "record.jsonl").read_text().splitlines()
    assert json.loads(started)["status"] == "started"
    return json.loads(line)


def read_curve(run_dir: Path, name: str) -> dict[int, float]:
    """Values of a column of the run's CSV by step."""
    with open(run_dir / "curves" / "metrics.csv") as stream:
        return {int(row["step"]): float(row[name]) for row in csv.DictReader(stream) if row[name]}
