"""What a run needs before it starts: a checked configuration, its text, its loss, and where it computes."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import hydra
import torch
from omegaconf import DictConfig, OmegaConf

from kernels import devices, plan
from logitless import losses, ranks
from logitless.checkpoints import newest_checkpoint
from logitless.config import check_train_config, resolved_precision
from logitless.data import Corpus, load_corpus
from logitless.footprint_parts import head_of
from logitless.limits import CpuMemoryLimit, CudaMemoryLimit, memory_limit
from logitless.model import GPTConfig, padded_vocab_size


class Job(NamedTuple):
    """A run that may start: its configuration as plain containers, its text and loss, where and how it computes.

    `plan` is that of the loss of a micro-batch in training, None for a backend that makes none; `limit` makes the
    device smaller than it is, if that was asked for; `checkpoint` is what a resumed run starts from.
    """

    config: dict
    corpus: Corpus
    loss: partial
    device: torch.device
    precision: str
    plan: plan.Plan | None
    limit: CudaMemoryLimit | CpuMemoryLimit | None
    checkpoint: Path | None


def prepare(config: DictConfig) -> Job:
    """Checks a composed configuration and loads its text; builds no model and writes nothing but the cache.

    Raises:
        ValueError: a value that no run can have, by its key.
        RuntimeError: a data set or tokenizer that is neither cached nor within reach.
    """
    check_train_config(config)
    checkpoint = None if config.resume is None else newest_checkpoint(Path(config.resume))
    device = _device(config.trainer)
    limit = memory_limit(config.memory_limit_gib, device, is_compiled=config.compile)
    precision = resolved_precision(config.precision, on_gpu=device.type == "cuda")
    plain = OmegaConf.to_container(config, resolve=True)
    corpus = load_corpus(hydra.utils.instantiate(config.data), plain["tokenizer"], config.cache_dir)
    vocab = padded_vocab_size(config.model.padded_vocab_size, corpus.tokenizer.get_vocab_size())
    plain["model"]["padded_vocab_size"] = vocab
    GPTConfig(**plain["model"])  # refuses a shape that cannot be built
    loss = hydra.utils.instantiate(config.loss)
    chosen = loss_plan(plain, loss, device, precision)
    return Job(plain, corpus, loss, device, precision, chosen, limit, checkpoint)


def loss_plan(config: dict, loss: partial, device: torch.device, precision: str) -> plan.Plan | None:
    """The plan by which `fused` computes the loss and the gradients of a micro-batch.

    None for another backend, and where the vocabulary is cut over ranks.

    Raises:
        ValueError: nothing fits into budget_mib, in training or in validation, or there is no plan that could.
    """
    if loss.func is not losses.fused:
        return None
    objective, chunk, budget_mib = (loss.keywords[name] for name in ("objective", "chunk", "budget_mib"))
    if ranks.cuts_vocabulary(config["trainer"]):
        if chunk == "auto" or budget_mib is not None:
            raise ValueError(
                f"chunk={chunk} with budget_mib={budget_mib}: trainer=tp_vocab makes no plan; give it a chunk of "
                "rows, such as chunk=1024, and budget_mib=null"
            )
        return None
    n_tokens = config["batch_size"] * config["seq_len"]
    lacking = plan.lacking(objective.label_smoothing, objective.softcap)
    head = head_of(GPTConfig(**config["model"]), n_tokens, precision, lacking=lacking)
    validation = replace(head, grads=(False, False, False))
    limits = {"budget_mib": budget_mib, "chunk": chunk}
    present = devices.present_device(str(device))
    try:
        chosen = plan.plan(head, present, **limits)
        plan.plan(validation, present, **limits)
    except ValueError as error:
        raise ValueError(f"budget_mib={budget_mib}: {error}") from error
    return chosen


def _device(trainer: DictConfig) -> torch.device:
    if trainer.accelerator == "gpu" and not torch.cuda.is_available():
        raise ValueError("trainer.accelerator=gpu, but torch sees no GPU here: use trainer=auto or trainer=cpu")
    uses_gpu = trainer.accelerator != "cpu" and torch.cuda.is_available()
    if not uses_gpu:
        return torch.device("cpu")
    return torch.device("cuda", ranks.local_rank(trainer) if "strategy" in trainer else torch.cuda.current_device())
