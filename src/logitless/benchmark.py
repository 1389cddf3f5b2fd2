"""Rows of the benchmark: what `trials.py` measured, of which implementation, on what, with which versions.

A row is a dictionary, one line of JSON. An implementation that cannot be measured leaves a row too, with the reason.
"""

import gc
import importlib.metadata
import json
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from logitless import memory
from logitless.measurements import copy_gb_per_s
from logitless.peers import FAMILIES, Family, Loss, chosen
from logitless.problems import DTYPES, Shape, make_inputs, make_logits
from logitless.records import new_record
from logitless.trials import LOGITS_KERNELS, HeadTrial, LogitsTrial

INPUT_SETS = 2


class Case(NamedTuple):
    """What one row compares: a shape, a kind of inputs, dtypes by their short names, and where."""

    shape: Shape
    kind: str
    dtype: str
    weight_dtype: str
    device: torch.device

    def facts(self) -> dict:
        return {
            **dict(zip(("n_tokens", "vocab", "width"), self.shape, strict=True)),
            "inputs": self.kind,
            "dtype": self.dtype,
            "weight_dtype": self.weight_dtype,
        }


def bench(cases: list[Case], words: list[str] | None) -> Iterator[dict]:
    """Yields a row for every case and every implementation that `words` ask for (None: all), as it is measured.

    An implementation that is not installed gives a row with status "absent" and the reason, one that raises "oom" or
    "error" and the message; the others go on.

    Raises:
        ValueError: before anything is measured, for a word that asks for nothing.
    """
    names = (*LOGITS_KERNELS, *(family.name for family in FAMILIES))
    for word in words or ():
        if not chosen(names, [word]) and not any(family.may_have(word) for family in FAMILIES):
            raise ValueError(f"no implementation's name begins with {word!r}: there are {', '.join(names)}")
    torch.set_float32_matmul_precision("highest")  # no TF32 in an fp32 yardstick
    for case in cases:
        record = new_record({}, case.device)
        facts = {name: record[name] for name in ("time", "command", "commit", "device")} | case.facts()
        facts["versions"] = {name: record["versions"][name] for name in ("python", "torch", "triton")}
        facts["copy_gb_per_s"] = copy_gb_per_s(case.device)
        rows = _bench_head if case.shape.width else _bench_logits
        for row in rows(case, words):
            versions = facts["versions"] | row.pop("package", {})
            yield {"method": row["method"]} | facts | row | {"versions": versions}


def _bench_head(case: Case, words: list[str] | None) -> Iterator[dict]:
    families = [family for family in FAMILIES if words is None or any(map(family.may_have, words))]
    if not families:
        return
    dtypes = {"dtype": DTYPES[case.dtype], "weight_dtype": DTYPES[case.weight_dtype]}
    try:
        trial = HeadTrial(make_inputs(case.shape, case.kind, **dtypes, device=case.device, sets=INPUT_SETS))
    except Exception as error:
        yield {"method": "inputs and gold"} | _failure(error)
        return
    for family in families:
        package = {"package": {family.package: _version(family.package)}}
        losses, refusal = _load(family, case)
        if refusal:
            yield {"method": family.name} | refusal | package
        for name in losses if words is None else chosen(losses, words):
            yield {"method": name} | _guarded(partial(trial.measure, losses[name])) | package


def _bench_logits(case: Case, words: list[str] | None) -> Iterator[dict]:
    """Rows for our kernels on logits alone, in every form they have."""
    names = LOGITS_KERNELS if words is None else chosen(LOGITS_KERNELS, words)
    if not names:
        return
    try:
        generator = torch.Generator(case.device).manual_seed(0)
        sets = [make_logits(case.shape, case.kind, DTYPES[case.dtype], generator) for _ in range(INPUT_SETS)]
        trial = LogitsTrial(sets)
    except Exception as error:
        yield {"method": "inputs"} | _failure(error)
        return
    for name in names:
        yield {"method": name} | _guarded(partial(trial.measure, name))


def _load(family: Family, case: Case) -> tuple[dict[str, Loss], dict | None]:
    """The family's implementations, or the row that says why there are none."""
    try:
        losses = family.implementations(case.shape.n_tokens, case.dtype)
    except ImportError as error:
        return {}, {"status": "absent", "reason": f"{type(error).__name__}: {error}"}
    except Exception as error:  # a package that is installed, but not for this torch or this machine
        return {}, _failure(error)
    if family.needs_cuda and case.device.type != "cuda":
        return {}, {"status": "absent", "reason": "needs CUDA"}
    return losses, None


def _guarded(measure: Callable[[], dict]) -> dict:
    """What `measure` returns, with status "ok"; or the status and reason of its failure."""
    try:
        return {"status": "ok"} | measure()
    except Exception as error:
        failure = _failure(error)
    gc.collect()  # what the failure's frames held
    return failure


def _failure(error: Exception) -> dict:
    """The status and reason of a row that could not be measured."""
    reason = "".join(traceback.format_exception_only(error)).strip()[:1000]
    return {"status": "oom" if memory.is_out_of_memory(error) else "error", "reason": reason}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def append_row(row: dict, path: Path) -> None:
    """Writes the row as one line after any that are there; numbers that are not finite become null."""
    finite = json.loads(json.dumps(row), parse_constant=lambda name: None)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as stream:
        stream.write(json.dumps(finite) + "\n")
