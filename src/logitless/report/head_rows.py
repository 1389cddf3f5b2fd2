"""The rows of `bench/benchmark.py`: which of them a figure has room for, in which one, and how they are called."""

from collections.abc import Iterable
from typing import NamedTuple

from logitless.records import lacks

AXES = {"n_tokens": "tokens N", "vocab": "vocabulary V", "width": "width D"}
CASE = ("inputs", "dtype", "weight_dtype", "device")
FACTS = dict.fromkeys(("method", "status", "command", *CASE), str) | {"versions": dict} | dict.fromkeys(AXES, int)
TIMES = dict.fromkeys(("total_ms", "gemm_ms", "ratio"), int | float)


class Sweeps(NamedTuple):
    """A base shape, and for each of N, V and D the sizes (the base's too) of the shapes that differ in it alone."""

    base: tuple[int, int, int]
    sizes: dict[str, list[int]]

    def shape(self, axis: str, size: int) -> tuple[int, int, int]:
        """The base with another `size` on one axis."""
        return tuple(size if name == axis else own for name, own in zip(AXES, self.base, strict=True))

    def shapes(self) -> set[tuple[int, int, int]]:
        return {self.shape(axis, size) for axis, sizes in self.sizes.items() for size in sizes}


def shape_of(row: dict) -> tuple[int, int, int]:
    return tuple(row[axis] for axis in AXES)


def case_of(row: dict) -> tuple[str, ...]:
    return tuple(row[key] for key in CASE)


def problem(row: dict) -> str | None:
    """Why a row of the benchmark cannot be drawn, or None."""
    if row.get("width", 0) is None:
        return f"{row['method']}: there is no figure of logits alone"
    missing = lacks(row, FACTS)
    if row.get("status") == "ok":
        missing += lacks(row, TIMES)
        missing += [] if isinstance(row.get("transient_mib"), int | float) else ["transient_mib"]  # may be zero
    return f"{row['method']}: no {', '.join(missing)}" if missing else None


def latest(rows: Iterable[dict]) -> list[dict]:
    """The rows about heads with gradients, without those that a later row about the same replaces."""
    rows = (row for row in rows if row["width"] and not row["method"].startswith("evaluation"))
    kept = {(row["method"], shape_of(row), case_of(row)): row for row in rows}
    return list(kept.values())


def find_sweeps(rows: Iterable[dict]) -> Sweeps | None:
    """The sweeps around the shape that most others differ from in one size; None unless an axis has three sizes."""
    shapes = sorted({shape_of(row) for row in rows})

    def around(base: tuple) -> Sweeps:
        near = [shape for shape in shapes if sum(map(int.__ne__, shape, base)) <= 1]
        sizes = {axis: sorted({shape[i] for shape in near}) for i, axis in enumerate(AXES)}
        return Sweeps(base, {axis: values for axis, values in sizes.items() if len(values) > 1})

    best = max(map(around, shapes), key=lambda sweeps: len(sweeps.shapes()), default=None)
    return best if best and max(map(len, best.sizes.values()), default=0) >= 3 else None


def rows_of(rows: list[dict], sweeps: Sweeps | None) -> list[dict]:
    """The rows of the sweeps' shapes, those of the case that has most, for one line a method; none if none is "ok"."""
    near = [row for row in rows if sweeps and shape_of(row) in sweeps.shapes()]
    cases = [case_of(row) for row in near]
    most = max(cases, key=cases.count, default=None)
    swept = [row for row, case in zip(near, cases, strict=True) if case == most]
    return swept if any(row["status"] == "ok" for row in swept) else []


def repeats(rows: Iterable[dict]) -> list[tuple[dict, dict]]:
    """Rows of budgets beside the row, of the same case, whose plan they repeat; of those that are "ok"."""
    planned = [row for row in rows if row["status"] == "ok" and isinstance(row.get("plan"), dict)]
    by_plan, found = {}, []
    for row in sorted(planned, key=is_budget):  # the others first
        own = by_plan.setdefault(
            (shape_of(row), case_of(row), row["plan"].get("schedule"), row["plan"].get("chunk")), row
        )
        if own is not row and is_budget(row):
            found.append((row, own))
    return found


def is_budget(row: dict) -> bool:
    return row["method"].startswith("ours within")


def left_out(rows: Iterable[dict]) -> list[str]:
    """What `head_time_memory` does not draw, a line for each case and one for rows without gradients."""
    rows = list(rows)
    evaluations = dict.fromkeys(row["method"] for row in rows if row["method"].startswith("evaluation"))
    lines = [f"left out of head_time_memory, without gradients: {', '.join(evaluations)}"] if evaluations else []
    cases = {}
    for row, own in repeats(unswept(rows)):
        words = f"{row['method']}, {row['total_ms']:.1f} ms ({own['method']}, {own['total_ms']:.1f} ms)"
        cases.setdefault(panel_title(row, names_device=True), []).append(words)
    lines += [
        f"left out of head_time_memory, same plans again: {'; '.join(own)}; {case}" for case, own in cases.items()
    ]
    return lines


def unswept(rows: Iterable[dict]) -> list[dict]:
    """The latest rows that are not part of a sweep; all if every one is."""
    rows = latest(rows)
    swept = rows_of(rows, find_sweeps(rows))
    return [row for row in rows if row not in swept] or rows


def panel_title(row: dict, names_device: bool) -> str:
    sizes = ", ".join(f"{letter} = {size}" for letter, size in zip("NVD", shape_of(row), strict=True))
    return f"{sizes}, {case_in_words(row, names_device)}"


def case_in_words(row: dict, names_device: bool) -> str:
    """The row's case; with its device if there are several."""
    words = f"{row['inputs']} inputs, {row['dtype']}, {row['weight_dtype']} weight"
    return words + (f", {row['device']}" if names_device else "")
