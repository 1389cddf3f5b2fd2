"""What a run does between the first and the last line of its record: trains, validates, and samples."""

import math
from collections.abc import Callable
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch.distributed.fsdp import FSDPModule

from kernels import devices
from logitless import memory, ranks
from logitless.callbacks import PeakMemory, Position, ProgressBar, Throughput
from logitless.checkpoints import Checkpoints, WholeFiles, restoring_signal_handlers, step_of
from logitless.data import Corpus, TextData
from logitless.generation import complete
from logitless.job import Job
from logitless.loggers import CURVES, Loggers
from logitless.model import GPT, fastest_attention
from logitless.module import LanguageModel
from logitless.profiling import StepProfile


def fit(job: Job, loggers: Loggers | None, run_dir: Path, record: dict, close: Callable[[dict], None]) -> None:
    """Builds, trains, validates and samples; `record` is filled in on the way, so that a failed run shows how far.

    Args:
        job: what to train.
        loggers: of the first rank, which alone samples; None on another.
        run_dir: the run's folder.
        record: gets what becomes known.
        close: writes a last record if this process must end in the middle of a step that will never end.
    """
    config, device, module, data = job.config, job.device, _module(job), _data(job)
    record |= {"n_parameters": module.gpt.n_parameters(), "head_share": module.gpt.head_share()}
    record["flops_per_token"] = module.gpt.flops_per_token(config["seq_len"])
    record["first_step"] = 0 if job.checkpoint is None else step_of(job.checkpoint, module.state_dict().keys())
    if config["compile"]:
        torch.compiler.reset()  # graphs of another run of this process would count against the limit of recompilations
        module.gpt.compile_parts(device)

    meter = memory.meter(module, device, is_compiled=config["compile"])
    profile = StepProfile(module.gpt.config, min(config["val_every"], config["max_steps"]))
    position, peaks, throughput = Position(), PeakMemory(meter), Throughput(profile if config["profile"] else None)
    former_curves = None if job.checkpoint is None else Path(config["resume"]) / CURVES
    files = WholeFiles()
    curve_file = loggers and loggers.curve_file
    checkpoints = Checkpoints(run_dir, config["checkpoint_every"], files, curve_file, former_curves)
    callbacks = [position, throughput, peaks, *([job.limit] if job.limit else []), checkpoints]
    callbacks += [profile] if config["profile"] else []
    trainer = _trainer(job, loggers, run_dir, callbacks, files)
    record["world_size"] = trainer.world_size
    if loggers is not None:
        print(first_lines(job, record, run_dir))

    def so_far() -> dict:
        counts = {"steps": trainer.global_step, "tokens": module.tokens_seen, "empty_windows": module.empty_windows}
        speed = throughput.tokens_per_s()
        mfu = _model_flops_utilization(speed, record["flops_per_token"], device, trainer.world_size)
        measured = {"start_up_s": throughput.start_up_s, "tokens_per_s": speed, "mfu": mfu}
        measured["step_ms"] = profile.milliseconds
        measured |= {**peaks.summary(), **module.losses}
        return counts | measured | checkpoints.facts()

    def place() -> dict:
        return {"step": position.step, "phase": position.phase}

    def give_up(failure: dict) -> None:
        close(record | so_far() | place() | failure)

    try:
        with restoring_signal_handlers(), meter, fastest_attention(device), ranks.Watch(trainer, run_dir, give_up):
            trainer.fit(module, datamodule=data, ckpt_path=job.checkpoint, weights_only=True)
            if module.validated_step != trainer.global_step:
                trainer.validate(module, datamodule=data, verbose=False)
            checkpoints.save_at_end(trainer, module)
            largest = {name: _largest(trainer, value) for name, value in peaks.summary().items()}
            gpt = _whole(trainer, module)
    except BaseException:
        record |= place()
        raise
    finally:
        record |= so_far()
    record |= largest
    is_finite = math.isfinite(module.losses["val_loss"])
    if loggers is not None:
        with torch.compiler.set_stance("force_eager"):  # every length of a text would be compiled
            record["sample"] = sample(gpt.to(device), job.corpus, config) if is_finite else None
    if files.error is not None:
        raise OSError(f"the trained model could not be written: {checkpoints.last()}")


def _module(job: Job) -> LanguageModel:
    config = job.config
    names = ("lr", "min_lr_ratio", "warmup_steps", "weight_decay", "betas", "grad_clip")
    optimizer = {name: config[name] for name in names}
    options = {name: config[name] for name in ("log_every", "nonfinite_steps", "seed")}
    options["cuts_vocabulary"] = ranks.cuts_vocabulary(config["trainer"])
    return LanguageModel(config["model"], job.loss, optimizer, **options)


def _data(job: Job) -> TextData:
    config = job.config
    names = ("seq_len", "batch_size", "accumulate", "max_steps", "val_batches", "ignore_index", "seed")
    options = {name: config[name] for name in names} | {"pin_memory": job.device.type == "cuda"}
    return TextData(job.corpus, vocab=config["model"]["padded_vocab_size"], **options)


def _model_flops_utilization(
    tokens_per_s: float | None, flops_per_token: int, device: torch.device, world_size: int
) -> float | None:
    """The model's operations a second as a part of all GPUs' dense bf16 rate, by data sheet; None if unknown."""
    peak = devices.present_device(str(device)).data_sheet_half_flops_per_s
    return tokens_per_s and peak and tokens_per_s * flops_per_token / (world_size * peak)


def _largest(trainer: pl.Trainer, value: float) -> float:
    """The largest of all ranks' values."""
    on_device = torch.tensor(value, dtype=torch.float64, device=trainer.strategy.root_device)
    return trainer.strategy.reduce(on_device, reduce_op="max").item()


def _whole(trainer: pl.Trainer, module: LanguageModel) -> GPT:
    """The model, on rank 0 with all of its weights where they are cut over ranks; all ranks must call it."""
    if not isinstance(module.gpt, FSDPModule):
        return module.gpt
    state = trainer.strategy.lightning_module_state_dict()
    gpt = GPT(module.gpt.config)
    if state:
        gpt.load_state_dict({name.removeprefix("gpt."): value for name, value in state.items()})
    return gpt


def _trainer(job: Job, loggers: Loggers | None, run_dir: Path, callbacks: list, files: WholeFiles) -> pl.Trainer:
    config = job.config
    trainer = pl.Trainer(
        **ranks.trainer_options(config["trainer"], job.device),
        precision=job.precision,
        max_steps=config["max_steps"],
        max_epochs=-1,  # the data is one endless epoch
        accumulate_grad_batches=config["accumulate"],
        val_check_interval=config["val_every"] * config["accumulate"],
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        log_every_n_steps=1,  # LanguageModel.is_logging_step decides
        logger=loggers.all() if loggers else False,
        callbacks=[*callbacks, ProgressBar(refresh_rate=config["log_every"])],
        plugins=[files],
        enable_model_summary=False,
        inference_mode=False,  # as validations between steps are: else the last one would be compiled anew
        use_distributed_sampler=False,
        default_root_dir=run_dir,
    )
    # `Checkpoints` hears of signals, and ranks agree on them at points. Lightning would talk to other ranks inside of a
    # signal, and ask the first for one at each batch, for which it waits for the device.
    trainer._signal_connector.register_signal_handlers = lambda: None
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None
    return trainer


def sample(gpt: GPT, corpus: Corpus, config: dict) -> str:
    """The 12 tokens in the middle of the validation text, `|`, and what the model adds."""
    middle = len(corpus.validation) // 2
    prompt = corpus.tokenizer.decode(corpus.validation[middle : middle + 12].tolist())
    options = {"max_new_tokens": 60, "temperature": 0.8, "top_k": 50, "seed": config["seed"]}
    (text,) = complete(gpt.eval(), corpus.tokenizer, [prompt], **options)
    return f"{prompt}|{text.removeprefix(prompt)}"


def first_lines(job: Job, record: dict, run_dir: Path) -> str:
    """What the run will do, in a few lines."""
    config = job.config
    tokens, vocab = config["batch_size"] * config["seq_len"], config["model"]["padded_vocab_size"]
    world = record["world_size"]
    of_ranks = f" on each of {world} ranks" if world > 1 else ""
    logits = job.plan or f"all {tokens} x {vocab} logits at once; it uses neither chunk nor budget_mib"
    if ranks.cuts_vocabulary(config["trainer"]):
        rows = min(max((record["chunk"] or world * tokens) // world, 1), tokens) * world
        logits = f"{rows} x {-(-vocab // world)} of all ranks' {world * tokens} x {vocab} logits at once on a rank"
    first = ""
    if job.checkpoint is not None:
        nothing_left = ", none is left" if record["first_step"] >= config["max_steps"] else ""
        first = f", the first {record['first_step']} by {job.checkpoint}{nothing_left}"
    return (
        f"model  {record['n_parameters'] / 1e6:.1f}M parameters, {100 * record['head_share']:.0f}% in the head "
        f"[V={vocab}, D={config['model']['width']}]\n"
        f"loss   {record['backend']}: {logits}\n"
        f"steps  {config['max_steps']} x {config['accumulate']} micro-batches of {tokens} tokens{of_ranks}{first}\n"
        f"run    {record['device']}, {record['precision']}, in {run_dir}"
    )
