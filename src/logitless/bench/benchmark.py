"""Rows of the benchmark: what `measurements.py` measured, of which implementation, on what, with which versions.

A row is a dictionary, one line of JSON. An implementation that cannot be measured leaves a row too, with the reason.
"""

import gc
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import partial
from typing import NamedTuple

import torch

from kernels import devices, plan
from kernels.linear_cross_entropy import linear_cross_entropy
from logitless import memory
from logitless.bench.inputs import DTYPES, Shape, make_inputs, make_logits
from logitless.bench.measurements import LOGITS_KERNELS, MeasuredHead, MeasuredLogits, copy_gb_per_s
from logitless.bench.peers import FAMILIES, Family, Loss, chosen, evaluation
from logitless.records import new_record, package_version

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
    """Yields a row for every case and every implementation that `words` ask for (none: all), as it is measured.

    A word asks for all whose names begin with it, in any case. An implementation that is not installed gives a row with
    status "absent" and the reason, and so does a word that asks for nothing in this case; an implementation that raises
    gives one with "oom" or "error" and the message. The others go on.

    Raises:
        ValueError: at once, before the first row is asked for, for a word that asks for nothing in any case, and for
            a weight narrower than the compute dtype, which autocast would have to widen.
    """
    for case in cases:
        if DTYPES[case.weight_dtype].itemsize < DTYPES[case.dtype].itemsize:
            raise ValueError(f"a {case.weight_dtype} weight is narrower than the {case.dtype} it is computed in")
    words = words or [""]  # with which every name begins
    for word in words:
        if not chosen(LOGITS_KERNELS, [word]) and not any(family.may_have(word) for family in FAMILIES):
            names = (*LOGITS_KERNELS, *(family.name for family in FAMILIES))
            raise ValueError(f"no implementation's name begins with {word!r}: they begin with {', '.join(names)}")
    return _bench(cases, words)


def _bench(cases: list[Case], words: list[str]) -> Iterator[dict]:
    torch.set_float32_matmul_precision("highest")  # no TF32 in an fp32 yardstick
    for case in cases:
        record = new_record({}, case.device)
        facts = {name: record[name] for name in ("time", "command", "commit", "device")} | case.facts()
        facts["versions"] = {name: record["versions"][name] for name in ("python", "torch", "triton")}
        facts["copy_gb_per_s"] = copy_gb_per_s(case.device)
        is_head = case.shape.width is not None
        rows = _bench_head(case, words) if is_head else _bench_logits(case, words, facts["copy_gb_per_s"])
        for row in rows:
            versions = row.pop("package", {}) | facts["versions"]
            yield {"method": row["method"]} | facts | row | {"versions": versions}


def _bench_head(case: Case, words: list[str]) -> Iterator[dict]:
    """Rows for the families' implementations; the inputs are made only if a word asks for one of them."""
    asked = {family: [word for word in words if family.may_have(word)] for family in FAMILIES}
    strangers = [word for word in words if not any(word in own for own in asked.values())]
    yield from _unanswered(strangers, [family.name for family in FAMILIES], "a head")
    if not any(asked.values()):
        return
    dtypes = {"dtype": DTYPES[case.dtype], "weight_dtype": DTYPES[case.weight_dtype]}
    try:
        head = MeasuredHead(make_inputs(case.shape, case.kind, **dtypes, device=case.device, sets=INPUT_SETS))
    except Exception as error:
        yield {"method": "inputs and gold"} | _failure(error)
        return
    for family in (family for family in FAMILIES if asked[family]):
        package = {"package": {family.package: package_version(family.package)}}
        losses, refusal = _load(family, case)
        if refusal:
            yield {"method": family.name} | refusal | package
            continue
        for row in _unanswered(asked[family], losses, f"N = {case.shape.n_tokens} and {case.dtype}"):
            yield row | package
        for name in chosen(losses, asked[family]):
            measure = partial(head.measure, losses[name], is_evaluation=family.is_evaluation)
            yield {"method": name} | _guarded(measure) | _predicted(losses[name], case) | package


def _bench_logits(case: Case, words: list[str], bandwidth: float) -> Iterator[dict]:
    """Rows for our kernels on logits alone, in every form they have."""
    yield from _unanswered(words, LOGITS_KERNELS, "logits without a head")
    names = chosen(LOGITS_KERNELS, words)
    if not names:
        return
    try:
        generator = torch.Generator(case.device).manual_seed(0)
        sets = [make_logits(case.shape, case.kind, DTYPES[case.dtype], generator) for _ in range(INPUT_SETS)]
        logits = MeasuredLogits(sets, bandwidth)
    except Exception as error:
        yield {"method": "inputs"} | _failure(error)
        return
    for name in names:
        yield {"method": name} | _guarded(partial(logits.measure, name))


def _unanswered(words: Iterable[str], names: Iterable[str], case: str) -> Iterator[dict]:
    """A row for each word that none of the `names` which `case` has begins with."""
    for word in words:
        if not chosen(names, [word]):
            yield {"method": word, "status": "absent", "reason": f"for {case} there are {', '.join(names)}"}


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


def _predicted(loss: Loss, case: Case) -> dict:
    """The plan of one of our own, for the row to hold predictions beside measurements."""
    if not isinstance(loss, partial) or loss.func not in (linear_cross_entropy, evaluation):
        return {}
    grads = (False,) * 3 if loss.func is evaluation else (True, True, False)
    head = plan.Head(*case.shape, case.dtype, case.weight_dtype, grads=grads)
    try:
        return {"plan": asdict(plan.plan(head, devices.present_device(str(case.device)), **loss.keywords))}
    except ValueError:  # nothing fits, and the row has the reason
        return {}


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
