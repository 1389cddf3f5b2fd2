"""What a composed configuration must satisfy before anything is built; every message names the key.

GPTConfig checks what several keys of the model must satisfy together.
"""

import math
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from omegaconf import DictConfig, OmegaConf


class Rule(NamedTuple):
    """What a value must be, in words, and the test of it."""

    words: str
    holds: Callable[[object], bool]


def _integer(smallest: int, largest: int = 2**63 - 1) -> Rule:
    words = f"an integer in [{smallest}, {largest}]" if largest < 2**63 - 1 else f"an integer >= {smallest}"
    words += ", written without point or exponent"
    return Rule(words, lambda value: type(value) is int and smallest <= value <= largest)


def _number(words: str, holds: Callable[[float], bool]) -> Rule:
    return Rule(f"a number {words}", lambda value: _is_number(value) and holds(value))


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _choice(*values: str) -> Rule:
    return Rule(f"one of {', '.join(values)}", lambda value: value in values)


def _or_null(rule: Rule) -> Rule:
    return Rule(f"{rule.words}, or null", lambda value: value is None or rule.holds(value))


def _is_regular_expression(value: object) -> bool:
    try:
        re.compile(value)
    except (TypeError, re.error):
        return False
    return True


def _is_pair_of_betas(value: object) -> bool:
    return isinstance(value, Sequence) and len(value) == 2 and all(_is_number(b) and 0 <= b < 1 for b in value)


FLAG = Rule("true or false", lambda value: isinstance(value, bool))
COUNT = _integer(1)
TRAIN = {
    "seq_len": COUNT,
    "batch_size": COUNT,
    "accumulate": COUNT,
    "max_steps": COUNT,
    "precision": _choice("auto", "32-true", "bf16-mixed", "16-mixed", "bf16-true"),
    "chunk": Rule(f"{COUNT.words}, or auto", lambda value: value == "auto" or COUNT.holds(value)),
    "budget_mib": _or_null(_number("> 0", lambda value: value > 0)),
    "memory_limit_gib": _or_null(_number("> 0", lambda value: value > 0)),
    "ignore_index": Rule("an integer", lambda value: type(value) is int),
    "label_smoothing": _number("in [0, 1)", lambda value: 0 <= value < 1),
    "z_loss": _number(">= 0", lambda value: value >= 0),
    "softcap": _or_null(_number("> 0", lambda value: value > 0)),
    "lr": _number("> 0", lambda value: value > 0),
    "min_lr_ratio": _number("in [0, 1]", lambda value: 0 <= value <= 1),
    "warmup_steps": _integer(0),
    "weight_decay": _number(">= 0", lambda value: value >= 0),
    "betas": Rule("two numbers in [0, 1)", _is_pair_of_betas),
    "grad_clip": _or_null(_number("> 0", lambda value: value > 0)),
    "log_every": COUNT,
    "val_every": COUNT,
    "val_batches": COUNT,
    "checkpoint_every": _or_null(COUNT),
    "nonfinite_steps": COUNT,
    "seed": _integer(0, 2**32 - 1),
    "cache_dir": Rule("a folder", lambda value: isinstance(value, str)),
    "model.n_layers": COUNT,
    "model.n_heads": COUNT,
    "model.width": COUNT,
    "model.tied": FLAG,
    "model.head_bias": FLAG,
    "model.dropout": _number("in [0, 1]", lambda value: 0 <= value <= 1),
    "model.checkpoint": FLAG,
    "compile": FLAG,
    "profile": FLAG,
    "model.padded_vocab_size": _or_null(
        Rule("a positive multiple of 64", lambda value: type(value) is int and value > 0 and value % 64 == 0)
    ),
    "data.document_start": _or_null(Rule("a regular expression", _is_regular_expression)),
    "tokenizer.kind": _choice("bpe", "hub"),
    "trainer.accelerator": _choice("auto", "cpu", "gpu"),
    "logger.kind": _choice("wandb", "csv"),
}
DISTRIBUTED = {
    "trainer.devices": Rule(f"{COUNT.words}, or auto", lambda value: value == "auto" or COUNT.holds(value)),
    "trainer.num_nodes": COUNT,
    "trainer.strategy": _choice("ddp", "fsdp", "tp_vocab"),
    "trainer.timeout_s": _number("> 0", lambda value: value > 0),
}
GENERATE = {
    "samples": COUNT,
    "max_new_tokens": COUNT,
    "temperature": _number(">= 0", lambda value: value >= 0),
    "top_k": _or_null(COUNT),
    "seed": _integer(0, 2**32 - 1),
}
HELD_OUT_OF_TEXT = Rule(
    "a number of documents >= 1, or the part of the text to hold out, in (0, 1)",
    lambda value: COUNT.holds(value) or (_is_number(value) and 0 < value < 1),
)
HELD_OUT_OF_HUB = Rule(
    "a number of documents >= 1, or the name of a split", lambda value: COUNT.holds(value) or isinstance(value, str)
)


def check_train_config(config: DictConfig) -> None:
    """Raises ValueError, naming the key and what would be right, for a value that no run can have."""
    rules = TRAIN | {"data.validation": HELD_OUT_OF_HUB if "repo" in config.data else HELD_OUT_OF_TEXT}
    if config.tokenizer.kind == "bpe":
        rules["tokenizer.vocab_size"] = _integer(257, 2**24)  # END_OF_TEXT and all bytes
    _check(config, rules | (DISTRIBUTED if "strategy" in config.trainer else {}))


def check_resumed_config(config: DictConfig, before: DictConfig) -> None:
    """Raises ValueError where a resumed run would have other weights, or see other tokens, than the run before."""
    of_model = (f"model.{name}" for name in before.model if name != "checkpoint")  # which recomputes the same
    for key in (*of_model, "tokenizer", "data", "seq_len", "batch_size", "accumulate", "seed"):
        value, was = OmegaConf.select(config, key), OmegaConf.select(before, key)
        if value != was:
            raise ValueError(f"{key}={value} must stay {was} in a resumed run")


def check_generate_config(config: DictConfig) -> None:
    """The same for scripts/generate.py."""
    _check(config, GENERATE)


def resolved_precision(precision: str, *, on_gpu: bool) -> str:
    """`precision`, or for `auto` bf16 mixed precision on a GPU and fp32 on a CPU, where bf16 is slow.

    Raises:
        ValueError: 16-mixed on a CPU.
    """
    if precision == "16-mixed" and not on_gpu:
        raise ValueError("precision=16-mixed needs a GPU: use bf16-mixed or 32-true")
    if precision != "auto":
        return precision
    return "bf16-mixed" if on_gpu else "32-true"


def _check(config: DictConfig, rules: dict[str, Rule]) -> None:
    if missing := OmegaConf.missing_keys(config):
        raise ValueError(f"{', '.join(sorted(missing))} must be given: add key=value to the command")
    for key, rule in rules.items():
        value = OmegaConf.select(config, key)
        if not rule.holds(value):
            raise ValueError(f"{key}={value} must be {rule.words}")
