"""What a composed configuration must satisfy before anything is built; every message names the key."""

import math

from omegaconf import DictConfig, ListConfig, OmegaConf

from kernels.reference import Objective, check_objective

PRECISIONS = ("auto", "32-true", "bf16-mixed", "16-mixed", "bf16-true")

# key: smallest value
INTEGERS = {
    "seq_len": 1,
    "batch_size": 1,
    "accumulate": 1,
    "max_steps": 1,
    "chunk": 1,
    "warmup_steps": 0,
    "val_every": 1,
    "val_batches": 1,
    "log_every": 1,
    "checkpoint_every": 1,
    "seed": 0,
    "model.n_layers": 1,
    "model.n_heads": 1,
    "model.width": 1,
}
# key: (smallest value, whether it is allowed, largest value)
NUMBERS = {
    "lr": (0.0, False, None),
    "weight_decay": (0.0, True, None),
    "grad_clip": (0.0, False, None),
    "min_lr_ratio": (0.0, True, 1.0),
    "model.dropout": (0.0, True, 1.0),
    "label_smoothing": (0.0, True, 1.0),
    "z_loss": (0.0, True, None),
    "softcap": (0.0, False, None),
}
OPTIONAL = ("grad_clip", "softcap")


def check_config(config: DictConfig) -> None:
    """Raises ValueError, naming the key and what would be right, for a value that no run can have."""
    if missing := OmegaConf.missing_keys(config):
        raise ValueError(f"{', '.join(sorted(missing))} must be given: add key=value to the command")
    for key, smallest in INTEGERS.items():
        value = OmegaConf.select(config, key)
        if type(value) is not int or value < smallest:
            raise ValueError(f"{key}={value} must be an integer >= {smallest}, written without point or exponent")
    if type(config.ignore_index) is not int:
        raise ValueError(f"ignore_index={config.ignore_index} must be an integer")
    for key, (smallest, inclusive, largest) in NUMBERS.items():
        value = OmegaConf.select(config, key)
        if value is None and key in OPTIONAL:
            continue
        if (
            not _is_number(value)
            or value < smallest
            or (value == smallest and not inclusive)
            or value > (largest or value)
        ):
            bounds = f"{'>=' if inclusive else '>'} {smallest}" + (f" and <= {largest}" if largest else "")
            raise ValueError(f"{key}={value} must be a number {bounds}")
    betas = config.betas
    if not isinstance(betas, ListConfig) or len(betas) != 2 or not all(_is_number(b) and 0 <= b < 1 for b in betas):
        raise ValueError(f"betas={betas} must be two numbers in [0, 1)")
    if config.precision not in PRECISIONS:
        raise ValueError(f"precision={config.precision} must be one of {', '.join(PRECISIONS)}")
    vocab = config.model.padded_vocab_size
    if vocab is not None and (not isinstance(vocab, int) or vocab < 1 or vocab % 64):
        raise ValueError(f"model.padded_vocab_size={vocab} must be a multiple of 64, or null")
    check_objective(Objective(config.ignore_index, config.label_smoothing, config.z_loss, config.softcap))


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def padded_vocab_size(asked: int | None, tokenizer_size: int) -> int:
    """V of the model: `asked`, or the next multiple of 64 that holds the tokenizer's ids.

    Raises:
        ValueError: `asked` is smaller than the tokenizer's vocabulary.
    """
    needed = -(-tokenizer_size // 64) * 64
    if asked is None:
        return needed
    if asked < tokenizer_size:
        raise ValueError(
            f"model.padded_vocab_size={asked} is smaller than the tokenizer's vocabulary of {tokenizer_size}: "
            f"use {needed} or more, or null"
        )
    return asked
