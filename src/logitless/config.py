"""What a composed configuration must satisfy before anything is built; every message names the key.

GPTConfig checks what several keys of the model must satisfy together.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from omegaconf import DictConfig, OmegaConf


class Rule(NamedTuple):
    """What a value must be, in words, and the test of it."""

    words: str
    holds: Callable[[object], bool]


def _integer(smallest: int) -> Rule:
    words = f"an integer >= {smallest}, written without point or exponent"
    return Rule(words, lambda value: type(value) is int and value >= smallest)


def _number(words: str, holds: Callable[[float], bool]) -> Rule:
    return Rule(f"a number {words}", lambda value: _is_number(value) and holds(value))


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _choice(*values: str) -> Rule:
    return Rule(f"one of {', '.join(values)}", lambda value: value in values)


def _or_null(rule: Rule) -> Rule:
    return Rule(f"{rule.words}, or null", lambda value: value is None or rule.holds(value))


def _is_pair_of_betas(value: object) -> bool:
    return isinstance(value, Sequence) and len(value) == 2 and all(_is_number(b) and 0 <= b < 1 for b in value)


TRAIN = {
    "seq_len": _integer(1),
    "batch_size": _integer(1),
    "accumulate": _integer(1),
    "max_steps": _integer(1),
    "precision": _choice("auto", "32-true", "bf16-mixed", "16-mixed", "bf16-true"),
    "chunk": _integer(1),
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
    "log_every": _integer(1),
    "val_every": _integer(1),
    "val_batches": _integer(1),
    "checkpoint_every": _integer(1),
    "seed": _integer(0),
    "model.n_layers": _integer(1),
    "model.n_heads": _integer(1),
    "model.width": _integer(1),
    "model.dropout": _number("in [0, 1]", lambda value: 0 <= value <= 1),
    "model.padded_vocab_size": _or_null(
        Rule("a positive multiple of 64", lambda value: type(value) is int and value > 0 and value % 64 == 0)
    ),
    "tokenizer.kind": _choice("bpe", "hub"),
    "trainer.accelerator": _choice("auto", "cpu", "gpu"),
    "logger.kind": _choice("wandb", "csv"),
}
GENERATE = {
    "samples": _integer(1),
    "max_new_tokens": _integer(1),
    "temperature": _number(">= 0", lambda value: value >= 0),
    "top_k": _or_null(_integer(1)),
    "seed": _integer(0),
}
COUNT = _integer(1)
HELD_OUT_OF_TEXT = Rule(
    "a number of documents >= 1, or the part of the text to hold out, in (0, 1)",
    lambda value: COUNT.holds(value) or (_is_number(value) and 0 < value < 1),
)
HELD_OUT_OF_HUB = Rule(
    "a number of documents >= 1, or the name of a split", lambda value: COUNT.holds(value) or isinstance(value, str)
)


def check_train_config(config: DictConfig) -> None:
    """Raises ValueError, naming the key and what would be right, for a value that no run can have."""
    _check(config, TRAIN | {"data.validation": HELD_OUT_OF_HUB if "repo" in config.data else HELD_OUT_OF_TEXT})


def check_generate_config(config: DictConfig) -> None:
    """The same for scripts/generate.py."""
    _check(config, GENERATE)


def _check(config: DictConfig, rules: dict[str, Rule]) -> None:
    if missing := OmegaConf.missing_keys(config):
        raise ValueError(f"{', '.join(sorted(missing))} must be given: add key=value to the command")
    for key, rule in rules.items():
        value = OmegaConf.select(config, key)
        if not rule.holds(value):
            raise ValueError(f"{key}={value} must be {rule.words}")
