"""What runs were set to, from their records: what they share, and what they differ in."""

import math
from collections.abc import Iterable

# Of a configuration: what says nothing about a run's memory or speed at a length.
INERT = ("seq_len", "max_steps", "lr", "min_lr_ratio", "warmup_steps", "weight_decay", "betas", "grad_clip", "seed")
INERT += ("log_every", "val_every", "val_batches", "checkpoint_every", "nonfinite_steps", "ignore_index", "data")
INERT += ("tokenizer", "profile")
# What is no setting of the run at all, or stands in the record as it was resolved.
HIDDEN = ("chunk", "budget_mib", "loss", "logger", "cache_dir", "resume", "trainer", "precision")
BACKEND = ("backend", "chunk", "budget_mib")  # what names a line of a figure; the rest names its panel
RESOLVED = ("backend", "chunk", "precision", "device", "seq_len", "batch_size", "memory_limit_gib")
WORDS = {
    "chunk": "chunk={}",
    "budget_mib": "budget {} MiB",
    "model.padded_vocab_size": "V = {}",
    "model.checkpoint": "activation checkpointing",
    "memory_limit_gib": "limit {} GiB",
    "batch_size": "batch size {}",
    "seq_len": "T = {}",
    "backend": "{}",
    "device": "{}",
    "trainer.strategy": "{}",
    "world_size": "{} ranks",
    "precision": "{}",
}

Settings = dict[str, str | int | float | bool]


def settings_of(record: dict) -> Settings:
    """Every setting of a run by its dotted key, and backend, chunk, precision and device as resolved.

    A setting that is null, false or missing is left out: older records lack newer keys.
    """
    config = record.get("config") if isinstance(record.get("config"), dict) else {}
    flat = {key: value for key, value in _flat(config) if not _is_below(key, HIDDEN)}
    loss = config.get("loss") if isinstance(config.get("loss"), dict) else {}
    flat |= {"budget_mib": _plain(loss.get("budget_mib"))}
    trainer, n_ranks = config.get("trainer"), record.get("world_size")
    if isinstance(trainer, dict) and isinstance(n_ranks, int) and n_ranks > 1:
        flat |= {"trainer.strategy": _plain(trainer.get("strategy")), "world_size": n_ranks}
    flat |= {key: _plain(record.get(key, flat.get(key))) for key in RESOLVED}
    return {key: value for key, value in flat.items() if value is not None and value is not False}


def without(settings: Settings, keys: Iterable[str]) -> Settings:
    """The settings that are none of `keys`, nor below one."""
    return {key: value for key, value in settings.items() if not _is_below(key, tuple(keys))}


def differing(many: list[Settings]) -> list[str]:
    """The keys whose values differ, one that is missing somewhere among them."""
    keys = dict.fromkeys(key for settings in many for key in settings)
    return [key for key in keys if len({repr(settings.get(key)) for settings in many}) > 1]


def in_words(settings: Settings, keys: Iterable[str]) -> str:
    """`V = 131072, limit 24 GiB`: the settings among `keys`."""
    return ", ".join(
        WORDS.get(key, f"{key}={{}}").format(settings[key]) for key in keys if settings.get(key) is not None
    )


def alike(records: list[dict], ignored: tuple[str, ...]) -> dict[str, list[dict]]:
    """The runs that differ in what is ignored only, by what they alone have in common, small numbers first.

    "" stands for all runs, "others" for those without any of the settings in which runs differ.
    """
    own = [without(settings_of(record), ignored) for record in records]
    keys, found = differing(own), {}
    for record, mine in sorted(zip(records, own, strict=True), key=lambda pair: _order(pair[1], keys)):
        found.setdefault(in_words(mine, keys) or ("others" if keys else ""), []).append(record)
    return found


def _order(own: Settings, keys: list[str]) -> list[tuple[bool, float, str]]:
    """Sorts settings by the numbers, then the words, under `keys`; what is not set comes first."""
    values = [own.get(key, -math.inf) for key in keys]
    return [(False, value, "") if isinstance(value, int | float) else (True, 0.0, str(value)) for value in values]


def key_of(settings: Settings) -> tuple:
    """Equal for equal settings, whatever their order."""
    return tuple(sorted((key, repr(value)) for key, value in settings.items()))


def _is_below(key: str, keys: tuple[str, ...]) -> bool:
    return any(key == own or key.startswith(own + ".") for own in keys)


def _flat(config: dict, prefix: str = "") -> Iterable[tuple[str, object]]:
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", _plain(value)


def _plain(value: object) -> str | int | float | bool | None:
    """`value` so that equal settings are equal: 24 and 24.0, lists as text."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if value is None or isinstance(value, str | int | float) else str(value)
