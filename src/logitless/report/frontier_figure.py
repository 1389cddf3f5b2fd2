"""The longest sequence that trains, for each combination of settings: from records, and as bars."""

from typing import NamedTuple

import altair as alt

from logitless.records import ENOUGH_STEPS, is_positive
from logitless.report import lengths, palette, prediction
from logitless.report.charts import Drawing, provenance_of_runs
from logitless.report.panels import AXES, FRONTIER
from logitless.report.settings import label_of

PARTS = {"states": "weights and optimizer", "blocks": "blocks", "head": "head"}  # of `footprint.Parts`
CONTEXT_GIB = 1.0  # of a GPU's memory that its own context and driver may hold when a run starts
BAR, WIDTH = 26, 680  # pixels
ROOM = 2.2  # of the axis over the longest length, for words behind its bar


class Bound(NamedTuple):
    """What the runs of one combination say of its longest sequence; None where no run says it.

    Args:
        longest: the longest length of a run that ended ok after ENOUGH_STEPS.
        too_long: the shortest length beyond it that ran out of memory.
        contradiction: the shortest length that ran out of memory although a longer one did not.
        filled_by: what takes most of the memory at the longest length, as predicted, in words; or "".
    """

    label: str
    backend: str
    longest: int | None
    too_long: int | None
    contradiction: int | None
    filled_by: str

    def in_words(self, naive: int | None = None) -> str:
        """`4,096 (2.0x naive); out of memory at 8,192; head 71% of the peak`, given naive's longest length."""
        if self.longest is None:
            return f"none; out of memory at {self.too_long:,}"
        compared = f" ({self.longest / naive:.1f}x naive)" if naive and self.backend != "naive" else ""
        bounded = "not bounded" if self.too_long is None else f"out of memory at {self.too_long:,}"
        return "; ".join(filter(None, [f"{self.longest:,}{compared}", bounded, self.filled_by]))


def bound_of(records: list[dict]) -> Bound:
    """That of the runs of one combination, each ok or oom."""
    fitting = {record["seq_len"]: record for record in records if record["status"] == "ok"}
    failing = [record["seq_len"] for record in records if record["status"] == "oom"]
    longest = max(fitting, default=None)
    beyond = [length for length in failing if longest is None or length > longest]
    contradiction = min(set(failing) - set(beyond), default=None)
    label, backend = label_of(records[0]), records[0]["backend"]
    largest = prediction.largest_part(fitting[longest]) if fitting else None
    filled_by = f"{PARTS[largest[0]]} {largest[1]:.0%} of the peak" if largest else ""
    return Bound(label, backend, longest, min(beyond, default=None), contradiction, filled_by)


def problem(record: dict) -> str | None:
    """Why a run says nothing of the longest sequence, or None."""
    reason, steps = lengths.problem(record), record.get("steps")
    if reason is None and record["status"] == "ok" and not (isinstance(steps, int) and steps >= ENOUGH_STEPS):
        return f"ok after {steps} steps, and {ENOUGH_STEPS} show that a length fits"
    return reason


def bounds(records: list[dict]) -> dict[str, list[Bound]]:
    """The bounds of each panel, by its words; of records without a `problem`."""
    found = {}
    for words, runs in lengths.panels(records).items():
        lines = {}
        for record in runs:
            lines.setdefault(label_of(record), []).append(record)
        found[words] = [bound_of(line) for line in lines.values()]
    return found


def frontier(records: list[dict]) -> Drawing:
    """A bar for each combination, and a cross where memory ran out."""
    left_out, records = lengths.split(records, problem)
    if not records:
        return Drawing(None, left_out)
    found = bounds(records)
    notes = [
        f"{', '.join(filter(None, [words, bound.label]))}: out of memory at {bound.contradiction:,} "
        f"although {bound.longest:,} trained"
        for words, panel in found.items()
        for bound in panel
        if bound.contradiction
    ]
    charts = [_panel(words, panel) for words, panel in found.items()]
    notes += [
        f"{record['run_dir']} ran out of memory with {record['allocator']['free_gib']:.1f} GiB free when it started"
        for record in records
        if record["status"] == "oom" and _began_without_room(record)
    ]
    text = f"{lengths.titled(FRONTIER.title, records)}; crosses: the shortest that ran out of memory"
    return Drawing(alt.vconcat(*charts).properties(title=provenance_of_runs(text, records)), left_out, notes)


def _began_without_room(record: dict) -> bool:
    """Whether others held so much of the device that the failure says nothing of the length."""
    allocator = record.get("allocator")
    if record["device"].startswith("cpu") or not isinstance(allocator, dict):
        return False
    free, total, limit = (allocator.get("free_gib"), allocator.get("total_gib"), record.get("memory_limit_gib"))
    if not (is_positive(free) and is_positive(total)):
        return False
    return free < min(limit if is_positive(limit) else total, total) - CONTEXT_GIB


def _panel(words: str, found: list[Bound]) -> alt.LayerChart:
    naive = next((bound.longest for bound in found if bound.backend == "naive" and bound.too_long), None)
    rows = [
        {"label": bound.label, "longest": bound.longest or 0, "too_long": bound.too_long}
        | {"words": bound.in_words(naive)}
        | {"end": bound.too_long or bound.longest, "color": palette.color(bound.backend)}
        for bound in found
    ]
    largest = max(row["end"] for row in rows)
    scale, axis = alt.Scale(domain=[0, ROOM * largest], nice=False), alt.Axis(format="~s", tickCount=6)
    y = alt.Y("label:N", title=None, sort=[bound.label for bound in found], axis=alt.Axis(labelLimit=260))
    tooltip = [alt.Tooltip("label:N", title="backend"), alt.Tooltip("words:N", title="longest")]
    base = alt.Chart(alt.Data(values=rows)).encode(y=y, tooltip=tooltip)
    bars = base.mark_bar().encode(
        x=alt.X("longest:Q", title=AXES["seq_len"], scale=scale, axis=axis), color=alt.Color("color:N", scale=None)
    )
    text = base.mark_text(align="left", dx=10).encode(x=alt.X("end:Q", scale=scale), text="words:N")
    crosses = base.transform_filter("isValid(datum.too_long)").mark_point(**palette.CROSS, filled=True, opacity=1)
    crosses = crosses.encode(x=alt.X("too_long:Q", scale=scale), color=alt.Color("color:N", scale=None))
    heading = alt.TitleParams(words, anchor="start", fontSize=12)
    return alt.layer(bars, crosses, text).properties(width=WIDTH, height=BAR * len(found), title=heading)
