"""Peak memory and speed against sequence length, a line for each backend and a cross where memory ran out."""

import math
import textwrap

import altair as alt

from logitless.footprint import GIB
from logitless.records import is_positive, outcome
from logitless.report import palette
from logitless.report.charts import Drawing, provenance_of_runs
from logitless.report.lengths import panels, problem, split, titled
from logitless.report.panels import AXES, PEAK_ALLOCATED, PEAK_LIVE_TENSORS, SPEED, Panel
from logitless.report.prediction import predicted_peaks
from logitless.report.settings import label_of

WIDTH, HEIGHT, COLUMNS = 380, 280, 2  # pixels of a panel, panels in a row
ROOM = 1.15  # before the first and behind the last length, as a factor
MOST_TICKS = 5
LETTERS = 60  # of a line above a panel


def peak_memory(records: list[dict]) -> Drawing:
    """Measured and predicted peaks of training steps; a run that is out of memory stands at the limit, as a cross."""

    def without_peak(record: dict) -> str | None:
        reason = problem(record)
        if reason is None and record["status"] == "ok" and not is_positive(record.get(_peak_of(record).y)):
            return f"no peak of a step after the first ({outcome(record)})"
        return reason

    left_out, records = split(records, without_peak)
    charts, notes, n_dashed = [], [], 0
    for words, runs in panels(records).items():
        panel = _peak_of(runs[0])
        limit = next((limit for run in runs if (limit := _limit(run)) is not None), None)
        dashed, reasons = predicted_peaks(runs)
        n_dashed += len(dashed)
        if limit and isinstance(meaning := runs[0].get("memory_limit"), str):
            notes.append(f"limit of {runs[0]['memory_limit_gib']:g} GiB: {meaning}")
        for label, reason in reasons.items():
            notes.append(f"no prediction of {', '.join(filter(None, [words, label]))}: {reason}")
        points = [_point(run, run[panel.y] if run["status"] == "ok" else _height(run, panel.y)) for run in runs]
        charts.append(_panel(panel, words, _encodings(records), points, dashed, limit))
    title = f"Peak memory of a training step{'; dashed: predicted' * bool(n_dashed)}"
    return Drawing(_grid(charts, title, records), left_out, notes)


def speed(records: list[dict]) -> Drawing:
    """Tokens a second; a run that is out of memory stands at zero, as a cross."""

    def without_speed(record: dict) -> str | None:
        reason = problem(record)
        if reason is None and record["status"] == "ok" and not is_positive(record.get(SPEED.y)):
            return f"no {SPEED.y} ({outcome(record)})"
        return reason

    left_out, records = split(records, without_speed)
    charts = []
    for words, runs in panels(records).items():
        points = [_point(run, run[SPEED.y] if run["status"] == "ok" else 0.0) for run in runs]
        charts.append(_panel(SPEED, words, _encodings(records), points, [], None))
    steps = sorted(run["steps"] - 1 for run in records if run["status"] == "ok" and isinstance(run.get("steps"), int))
    counts = " to ".join(map(str, dict.fromkeys([steps[0], steps[-1]]))) if steps else ""
    title = f"Speed of training, mean of {counts} steps after the first" if steps else "Speed"
    return Drawing(_grid(charts, title, records), left_out)


def _limit(run: dict) -> float | None:
    """A run's limit on the axis of its peaks, in GiB; on a CPU the parameters, which it does not count, come on top."""
    limit, n_parameters = run.get("memory_limit_gib"), run.get("n_parameters")
    if not is_positive(limit):
        return None
    beside = 4 * n_parameters / GIB if _peak_of(run) is PEAK_LIVE_TENSORS and is_positive(n_parameters) else 0
    return limit + beside


def _peak_of(run: dict) -> Panel:
    """That of the bytes which the run's device counts."""
    is_cpu = run["device"].startswith("cpu") or PEAK_LIVE_TENSORS.y in run
    return PEAK_LIVE_TENSORS if is_cpu else PEAK_ALLOCATED


def _height(run: dict, unit: str) -> float | None:
    """Where the cross of a run stands: at its limit, else at the device's memory, else at its last good peak."""
    allocator = run.get("allocator") if isinstance(run.get("allocator"), dict) else {}
    candidates = (_limit(run), allocator.get("total_gib"), run.get(unit), run.get(f"cold_{unit}"))
    return next((value for value in candidates if is_positive(value)), None)


def _point(run: dict, value: float | None) -> dict:
    facts = {"label": label_of(run), "seq_len": run["seq_len"], "value": value, "run": run["run_dir"]}
    return facts | {"status": outcome(run), "is_oom": run["status"] == "oom"}


def _encodings(runs: list[dict]) -> dict[str, alt.Color | alt.Shape]:
    """Colour and mark of each label, with one legend."""
    backends = {label_of(run): run["backend"] for run in runs}
    labels = list(backends)
    colors = alt.Scale(domain=labels, range=[palette.color(backend) for backend in backends.values()])
    shapes = alt.Scale(domain=labels, range=palette.shapes(list(backends.values())))
    return {
        "color": alt.Color("label:N", title="backend", scale=colors),
        "shape": alt.Shape("label:N", title="backend", scale=shapes),
    }


def _axes(panel: Panel, sizes: list[int], top: float) -> dict[str, alt.X | alt.Y]:
    low, high = sizes[0] / ROOM, sizes[-1] * ROOM
    powers = [2**power for power in range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)]
    axis = alt.Axis(values=sizes if len(sizes) <= MOST_TICKS else powers, format=",d", labelAngle=0, labelOverlap=True)
    scale = alt.Scale(type="log", base=2, domain=[low, high], nice=False)
    y_axis = alt.Axis(format=",.0f" if top > 10 else "~g")
    return {
        "x": alt.X("seq_len:Q", title=AXES[panel.x], scale=scale, axis=axis),
        "y": alt.Y("value:Q", title=panel.y_title(), scale=alt.Scale(domain=[0, top], nice=False), axis=y_axis),
    }


def _panel(
    panel: Panel, words: str, encodings: dict, points: list[dict], dashed: list[dict], limit: float | None
) -> alt.LayerChart:
    """Lines through the points that are not out of memory, crosses for those that are, and a rule at the limit."""
    heights = [point["value"] for point in points if point["value"] is not None] + [limit or 0.0]
    top = 1.08 * max(heights) or max((point["value"] for point in dashed), default=1.0)
    points = [point | {"value": top / 1.04 if point["value"] is None else point["value"]} for point in points]
    sizes = sorted({point["seq_len"] for point in points})
    axes, color = _axes(panel, sizes, top), {"color": encodings["color"]}
    tooltip = [alt.Tooltip("label:N", title="backend"), alt.Tooltip("seq_len:Q", title="length", format=",d")]
    tooltip += [alt.Tooltip("value:Q", title=panel.unit, format=",.4~g"), "status:N", "run:N"]
    measured, failed = ([point for point in points if point["is_oom"] is is_oom] for is_oom in (False, True))
    layers = []
    if dashed:
        predicted = alt.Chart(alt.Data(values=dashed)).mark_line(strokeDash=[4, 3], strokeWidth=1.3, clip=True)
        layers.append(predicted.encode(**axes, **color))
    if measured:
        base = alt.Chart(alt.Data(values=measured)).encode(**axes, tooltip=tooltip)
        layers.append(base.mark_line(strokeWidth=1.6).encode(**color))
        layers.append(base.mark_point(filled=True, size=60, opacity=1).encode(**encodings))
    if failed:
        crosses = alt.Chart(alt.Data(values=failed)).mark_point(**palette.CROSS, filled=True, opacity=1)
        layers.append(crosses.encode(**axes, **color, tooltip=tooltip))
    if limit:
        text = {"value": limit, "seq_len": sizes[0], "words": f"limit {limit:.3g} GiB"}
        rule = alt.Chart(alt.Data(values=[text]))
        layers.append(rule.mark_rule(color="black").encode(y=axes["y"]))
        layers.append(rule.mark_text(align="left", baseline="top", dy=4, dx=-8).encode(**axes, text="words:N"))
    heading = alt.TitleParams(textwrap.wrap(words, LETTERS), anchor="start", fontSize=12)
    return alt.layer(*layers).properties(width=WIDTH, height=HEIGHT, title=heading)


def _grid(charts: list[alt.LayerChart], title: str, runs: list[dict]) -> alt.VConcatChart | None:
    if not any(run["status"] == "ok" for run in runs):
        return None
    title = titled(title, runs)
    title += "; crosses: out of memory" if any(run["status"] == "oom" for run in runs) else ""
    rows = [alt.hconcat(*charts[i : i + COLUMNS]) for i in range(0, len(charts), COLUMNS)]
    return alt.vconcat(*rows).properties(title=provenance_of_runs(title, runs))
