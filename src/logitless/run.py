"""One training run: trains, and writes the record."""

import json
import logging
import math
import sys
import traceback
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException

from logitless import memory
from logitless.callbacks import PeakMemory, Position, ProgressBar, Throughput
from logitless.checkpoints import TERMINATED, Checkpoints, WholeFiles
from logitless.data import Corpus, TextData
from logitless.generation import complete
from logitless.job import Job
from logitless.loggers import Loggers
from logitless.module import LanguageModel
from logitless.records import FILE_NAME, append_line, new_record


def train(job: Job, run_dir: Path, overrides: Sequence[str] = (), sweep_dir: str | None = None) -> dict:
    """Trains and returns the record; `run_dir`/record.jsonl gets it too, when it starts and when it ends or fails.

    Args:
        job: what to train.
        run_dir: the run's folder.
        overrides: what the configuration was composed with, for the record.
        sweep_dir: the folder of the sweep that the run belongs to, which W&B groups its runs by; None for a single run.

    Raises:
        Exception: what made the run fail, after its record was written with status "oom" or "error" and, for the
            latter, its traceback in `run_dir`/traceback.txt.
    """
    config, loss = job.config, job.loss
    run_dir.mkdir(parents=True, exist_ok=True)
    _quieten_lightning()
    pl.seed_everything(config["seed"], verbose=False)
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
        record["curves"] = str(loggers.curves)
        _fit(job, loggers, run_dir, record)
        record["status"] = "ok"
    except BaseException as error:
        record["status"] = _status(error, job.device)
        record["error"] = _describe_error(error)
        if record["status"] == "error":
            with suppress(OSError):  # of a full disk, which may be the error itself
                (run_dir / "traceback.txt").write_text(traceback.format_exc())
        raise
    finally:
        try:
            append_line(record, run_dir / FILE_NAME)
        except OSError:
            print(f"what should stand in {run_dir / FILE_NAME}: {json.dumps(record)}", file=sys.stderr)
            raise
        finally:
            if loggers is not None:
                summary = {key: value for key, value in record.items() if key not in ("config", "versions", "sample")}
                loggers.finish(summary)
    return record


def _status(error: BaseException, device: torch.device) -> str:
    if memory.is_out_of_memory(error, device):
        return "oom"
    is_terminated = isinstance(error, SIGTERMException) or (isinstance(error, SystemExit) and error.code == TERMINATED)
    return "stopped" if is_terminated else "error"


def _describe_error(error: BaseException) -> str:
    if isinstance(error, SystemExit) and error.__context__ is not None:
        error = error.__context__  # Lightning turns an interrupt into an exit
    return "".join(traceback.format_exception_only(error)).strip()


def _quieten_lightning() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # advertisements
    warnings.filterwarnings("ignore", message=".*LeafSpec")  # its own use of what torch deprecates
    warnings.filterwarnings("ignore", message=".*does not have many workers")  # slicing a memory map needs none
    warnings.filterwarnings("ignore", message=".*dataloader is not resumable")  # data.Batches knows its place


def run_name(record: dict) -> str:
    """`fused-c1024-T128`, `naive-T128`."""
    chunk = f"-c{record['chunk']}" if record["chunk"] else ""
    return f"{record['backend']}{chunk}-T{record['seq_len']}"


def _fit(job: Job, loggers: Loggers, run_dir: Path, record: dict) -> None:
    """Builds, trains, validates and samples; `record` is filled in on the way, so that a failed run shows how far."""
    config, corpus, loss, device, precision, _, limit, resumed = job
    names = ("lr", "min_lr_ratio", "warmup_steps", "weight_decay", "betas", "grad_clip")
    optimizer = {name: config[name] for name in names}
    names = ("log_every", "nonfinite_steps", "seed")
    module = LanguageModel(config["model"], loss, optimizer, **{name: config[name] for name in names})
    names = ("seq_len", "batch_size", "accumulate", "max_steps", "val_batches", "ignore_index", "seed")
    data = TextData(corpus, vocab=config["model"]["padded_vocab_size"], **{name: config[name] for name in names})
    record |= {"n_parameters": module.gpt.n_parameters(), "head_share": module.gpt.head_share()}
    print(first_lines(job, record, run_dir))

    meter = memory.meter(module, device)
    position, peaks, throughput = Position(), PeakMemory(meter), Throughput()
    former_curves = None if resumed is None else Path(config["resume"]) / loggers.curves
    checkpoints = Checkpoints(run_dir, config["checkpoint_every"], loggers.curve_file, former_curves)
    callbacks = [position, throughput, peaks, *([limit] if limit else []), checkpoints]
    trainer = _trainer(config, precision, loggers, run_dir, callbacks)
    try:
        with meter:
            trainer.fit(module, datamodule=data, ckpt_path=resumed, weights_only=True)
            if module.validated_step != trainer.global_step:
                trainer.validate(module, datamodule=data, verbose=False)
    except BaseException:
        record |= {"step": position.step, "phase": position.phase}
        raise
    finally:
        record |= {"steps": trainer.global_step, "tokens": module.tokens_seen, "empty_windows": module.empty_windows}
        record |= {"tokens_per_s": throughput.tokens_per_s(), **peaks.summary(), **module.losses}
        record |= checkpoints.facts()
    if config["checkpoint_every"] is not None:
        checkpoints.save(trainer, module)
        record |= checkpoints.facts()
        if checkpoints.saved_step != trainer.global_step and module.is_finite():
            raise OSError(f"the trained model could not be written: {checkpoints.last()}")
    is_finite = math.isfinite(module.losses["val_loss"])
    record["sample"] = sample(module.to(device), corpus, config) if is_finite else None


def _trainer(config: dict, precision: str, loggers: Loggers, run_dir: Path, callbacks: list) -> pl.Trainer:
    return pl.Trainer(
        **config["trainer"],
        devices=1,
        precision=precision,
        max_steps=config["max_steps"],
        max_epochs=-1,  # the data is one endless epoch
        accumulate_grad_batches=config["accumulate"],
        val_check_interval=config["val_every"] * config["accumulate"],
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        log_every_n_steps=1,  # LanguageModel.is_logging_step decides
        logger=loggers.all(),
        callbacks=[*callbacks, ProgressBar(refresh_rate=config["log_every"])],
        plugins=[WholeFiles()],
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=run_dir,
    )


def sample(module: LanguageModel, corpus: Corpus, config: dict) -> str:
    """The 12 tokens in the middle of the validation text, `|`, and what the model adds."""
    middle = len(corpus.validation) // 2
    prompt = corpus.tokenizer.decode(corpus.validation[middle : middle + 12].tolist())
    options = {"max_new_tokens": 60, "temperature": 0.8, "top_k": 50, "seed": config["seed"]}
    (text,) = complete(module.gpt.eval(), corpus.tokenizer, [prompt], **options)
    return f"{prompt}|{text.removeprefix(prompt)}"


def first_lines(job: Job, record: dict, run_dir: Path) -> str:
    """What the run will do, in a few lines."""
    config = job.config
    tokens, vocab = config["batch_size"] * config["seq_len"], config["model"]["padded_vocab_size"]
    logits = job.plan or f"all {tokens} x {vocab} logits at once; it uses neither chunk nor budget_mib"
    return (
        f"model  {record['n_parameters'] / 1e6:.1f}M parameters, {100 * record['head_share']:.0f}% in the head "
        f"[V={vocab}, D={config['model']['width']}]\n"
        f"loss   {record['backend']}: {logits}\n"
        f"steps  {config['max_steps']} x {config['accumulate']} micro-batches of {tokens} tokens\n"
        f"run    {record['device']}, {record['precision']}, in {run_dir}"
    )
