"""One training run: checks a composed configuration, trains, and writes the record."""

import logging
import math
import traceback
import warnings
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import hydra
import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from omegaconf import DictConfig, OmegaConf

from kernels import devices, plan
from logitless import losses, memory
from logitless.callbacks import PeakMemory, ProgressBar, Throughput
from logitless.config import check_train_config
from logitless.data import Corpus, TextData, load_corpus
from logitless.footprint import DTYPES
from logitless.generation import complete
from logitless.loggers import Loggers
from logitless.model import GPTConfig, padded_vocab_size
from logitless.module import LanguageModel
from logitless.records import FILE_NAME, append_line, new_record

LAST_CHECKPOINT = Path("checkpoints") / "last.ckpt"


class Job(NamedTuple):
    """A run that may start: its configuration as plain containers, its text and loss, where and how it computes.

    `plan` is that of the loss of a micro-batch in training, None for a backend that makes none.
    """

    config: dict
    corpus: Corpus
    loss: partial
    device: torch.device
    precision: str
    plan: plan.Plan | None


def prepare(config: DictConfig) -> Job:
    """Checks a composed configuration and loads its text; builds no model and writes nothing but the cache.

    Raises:
        ValueError: a value that no run can have, by its key.
        RuntimeError: a data set or tokenizer that is neither cached nor within reach.
    """
    check_train_config(config)
    if config.resume is not None and not (Path(config.resume) / LAST_CHECKPOINT).is_file():
        raise ValueError(
            f"resume={config.resume}: no {LAST_CHECKPOINT} there (a run writes its first after checkpoint_every steps)"
        )
    device = _device(config.trainer.accelerator)
    precision = resolve_precision(config.precision, device)
    plain = OmegaConf.to_container(config, resolve=True)
    corpus = load_corpus(hydra.utils.instantiate(config.data), plain["tokenizer"], config.cache_dir)
    vocab = padded_vocab_size(config.model.padded_vocab_size, corpus.tokenizer.get_vocab_size())
    plain["model"]["padded_vocab_size"] = vocab
    GPTConfig(**plain["model"])  # refuses a shape that cannot be built
    loss = hydra.utils.instantiate(config.loss)
    return Job(plain, corpus, loss, device, precision, loss_plan(plain, loss, device, precision))


def loss_plan(config: dict, loss: partial, device: torch.device, precision: str) -> plan.Plan | None:
    """The plan by which `fused` computes the loss and the gradients of a micro-batch; None for another backend.

    Raises:
        ValueError: nothing fits into budget_mib, in training or in validation.
    """
    if loss.func is not losses.fused:
        return None
    objective, chunk, budget_mib = (loss.keywords[name] for name in ("objective", "chunk", "budget_mib"))
    dtype, weight_dtype = DTYPES[precision]
    has_bias = config["model"]["head_bias"]
    head = plan.Head(
        n_tokens=config["batch_size"] * config["seq_len"],
        vocab=config["model"]["padded_vocab_size"],
        width=config["model"]["width"],
        dtype=dtype,
        weight_dtype=weight_dtype,
        # That of the final norm: under autocast the embedding is fp32, so is bf16 added to it, and so its RMSNorm.
        hidden_dtype=weight_dtype,
        grads=(True, True, has_bias),
        has_bias=has_bias,
        lacking=plan.lacking(objective.label_smoothing, objective.softcap),
    )
    validation = replace(head, grads=(False, False, False))
    limits = {"budget_mib": budget_mib, "chunk": chunk}
    present = devices.present_device(str(device))
    try:
        chosen = plan.plan(head, present, **limits)
        plan.plan(validation, present, **limits)
    except ValueError as error:
        raise ValueError(f"budget_mib={budget_mib} with chunk={chunk}: {error}") from error
    return chosen


def train(job: Job, run_dir: Path) -> dict:
    """Trains and returns the record; `run_dir`/record.jsonl gets it too, also when training fails.

    Raises:
        Exception: what made the run fail, after its record was written with status "oom" or "error" and, for the
            latter, its traceback in `run_dir`/traceback.txt.
    """
    config, loss = job.config, job.loss
    run_dir.mkdir(parents=True, exist_ok=True)
    _quieten_lightning()
    pl.seed_everything(config["seed"], verbose=False)
    record = new_record(config, job.device) | {"backend": loss.func.__name__, "chunk": loss.keywords.get("chunk")}
    record |= {"plan": None if job.plan is None else asdict(job.plan)}
    record |= {"precision": job.precision, **{name: config[name] for name in ("seq_len", "batch_size", "resume")}}
    loggers = Loggers(config["logger"], run_dir, run_name(record), record["backend"], config)
    record["curves"] = str(loggers.curves)
    try:
        _fit(job, loggers, run_dir, record)
        record["status"] = "ok"
    except BaseException as error:
        record["status"] = "oom" if memory.is_out_of_memory(error) else "error"
        record["error"] = _describe_error(error)
        if record["status"] == "error":
            (run_dir / "traceback.txt").write_text(traceback.format_exc())
        raise
    finally:
        append_line(record, run_dir / FILE_NAME)
        loggers.finish({key: value for key, value in record.items() if key not in ("config", "versions", "sample")})
    return record


def _describe_error(error: BaseException) -> str:
    if isinstance(error, SystemExit) and error.__context__ is not None:
        error = error.__context__  # Lightning turns an interrupt into an exit
    return "".join(traceback.format_exception_only(error)).strip()


def _quieten_lightning() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # advertisements
    warnings.filterwarnings("ignore", message=".*LeafSpec")  # its own use of what torch deprecates
    warnings.filterwarnings("ignore", message=".*does not have many workers")  # slicing a memory map needs none
    warnings.filterwarnings("ignore", message="The dirpath has changed")  # a resumed run has a folder of its own
    warnings.filterwarnings("ignore", message=".*dataloader is not resumable")  # data.Batches knows its place


def run_name(record: dict) -> str:
    """`fused-c1024-T128`, `naive-T128`."""
    chunk = f"-c{record['chunk']}" if record["chunk"] else ""
    return f"{record['backend']}{chunk}-T{record['seq_len']}"


def _fit(job: Job, loggers: Loggers, run_dir: Path, record: dict) -> None:
    """Builds, trains, validates and samples; `record` is filled in on the way, so that a failed run shows how far."""
    config, corpus, loss, device, precision, _ = job
    names = ("lr", "min_lr_ratio", "warmup_steps", "weight_decay", "betas", "grad_clip")
    optimizer = {name: config[name] for name in names}
    module = LanguageModel(config["model"], loss, optimizer, log_every=config["log_every"], seed=config["seed"])
    names = ("seq_len", "batch_size", "accumulate", "max_steps", "val_batches", "ignore_index", "seed")
    data = TextData(corpus, vocab=config["model"]["padded_vocab_size"], **{name: config[name] for name in names})
    record |= {"n_parameters": module.gpt.n_parameters(), "head_share": module.gpt.head_share()}
    print(first_lines(job, record, run_dir))

    meter = memory.meter(module, device)
    peaks, throughput = PeakMemory(meter), Throughput()
    trainer = _trainer(config, precision, loggers, run_dir, callbacks=[throughput, peaks])
    resume = None if config["resume"] is None else Path(config["resume"]) / LAST_CHECKPOINT
    try:
        with meter:
            trainer.fit(module, datamodule=data, ckpt_path=resume, weights_only=True)
            if module.validated_step != trainer.global_step:
                trainer.validate(module, datamodule=data, verbose=False)
    finally:
        record |= {"steps": trainer.global_step, "tokens": module.tokens_seen, "empty_windows": module.empty_windows}
        record |= {"tokens_per_s": throughput.tokens_per_s(), **peaks.summary(), **module.losses}
    trainer.save_checkpoint(run_dir / LAST_CHECKPOINT)
    record["checkpoint"] = str(LAST_CHECKPOINT)
    is_finite = math.isfinite(module.losses["val_loss"])
    record["sample"] = sample(module.to(device), corpus, config) if is_finite else None


def _trainer(config: dict, precision: str, loggers: Loggers, run_dir: Path, callbacks: list) -> pl.Trainer:
    checkpoint = ModelCheckpoint(
        run_dir / LAST_CHECKPOINT.parent,
        every_n_train_steps=config["checkpoint_every"],
        save_top_k=0,
        save_last=True,
        enable_version_counter=False,
    )
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
        callbacks=[*callbacks, ProgressBar(refresh_rate=config["log_every"]), checkpoint],
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


def resolve_precision(precision: str, device: torch.device) -> str:
    """`auto` is bf16 mixed precision on a GPU and fp32 on a CPU, where bf16 is slow."""
    if precision == "16-mixed" and device.type == "cpu":
        raise ValueError("precision=16-mixed needs a GPU: use bf16-mixed or 32-true")
    if precision != "auto":
        return precision
    return "bf16-mixed" if device.type == "cuda" else "32-true"


def _device(accelerator: str) -> torch.device:
    if accelerator == "gpu" and not torch.cuda.is_available():
        raise ValueError("trainer.accelerator=gpu, but torch sees no GPU here: use trainer=auto or trainer=cpu")
    uses_gpu = accelerator != "cpu" and torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if uses_gpu else torch.device("cpu")
