"""The figures of the benchmark, from the rows of `bench/benchmark.py`.

The subtitle of each names the devices, the versions, the commits and the commands that made its numbers.
"""

import math
import statistics
import textwrap
from itertools import chain

import altair as alt

from logitless.report import palette
from logitless.report.charts import provenance
from logitless.report.head_rows import (
    AXES,
    Sweeps,
    case_in_words,
    case_of,
    find_sweeps,
    latest,
    panel_title,
    repeats,
    rows_of,
    shape_of,
    unswept,
)

LEAST_MIB = 1.0  # where a logarithmic axis begins
PANEL_WIDTH, PANEL_HEIGHT = 430, 330  # pixels, of time against memory
SWEEP_WIDTH, SWEEP_HEIGHT = 290, 230  # pixels, of a sweep
LETTER_WIDTH, LINE_HEIGHT = 6.2, 13  # pixels of a label
POINT, GAP = 5, 8  # pixels from a point's middle to its edge, and to its label
ROOM = 0.12  # of the values' range, free before and behind them: half a label's width, by eye
LEAST_ROOM = 1.05  # the same as a factor, where all values are alike
WIDE = 30  # the largest over the smallest value, beyond which ticks at 1 and 3 of each decade are enough


def head_time_memory(rows: list[dict]) -> alt.VConcatChart | None:
    """Time against transient memory, one point a method and one panel a case, of rows that are not part of a sweep.

    A budget whose plan is another row's has no point of its own: `left_out` names it.
    """
    rows = unswept(rows)
    again = [id(row) for row, _ in repeats(rows)]
    rows = [row for row in rows if id(row) not in again]
    if not any(row["status"] == "ok" for row in rows):
        return None
    panels = {}
    for row in rows:
        panels.setdefault((shape_of(row), case_of(row)), []).append(row)
    names_device = len({row["device"] for row in rows}) > 1
    charts = [_time_memory_panel(panel, names_device) for panel in panels.values()]
    grid = alt.vconcat(*(alt.hconcat(*charts[i : i + 2]) for i in range(0, len(charts), 2)))
    title = _provenance("Loss of a head, forward and backward", list(chain.from_iterable(panels.values())))
    return grid.properties(title=title)


def _time_memory_panel(rows: list[dict], names_device: bool) -> alt.LayerChart:
    points = [
        {"method": row["method"], "family": row["method"].partition(" ")[0], "ratio": row["ratio"]}
        | {"mib": max(row["transient_mib"], LEAST_MIB)}
        for row in rows
        if row["status"] == "ok"
    ]
    x_scale = _Log([point["mib"] for point in points] or [LEAST_MIB], PANEL_WIDTH)
    failures = [row["method"] for row in rows if row["status"] == "oom"]
    band = LINE_HEIGHT * len(failures)
    y_scale = _Log([1.0, *(point["ratio"] for point in points)], PANEL_HEIGHT, band)
    pixels = [(x_scale.pixel(point["mib"]), y_scale.pixel(point["ratio"])) for point in points]
    labels, limit = [point["method"] for point in points], y_scale.pixel(1.0)
    taken = [(0, limit - 2, PANEL_WIDTH, limit + 2), (0, PANEL_HEIGHT - band, PANEL_WIDTH, PANEL_HEIGHT)]
    for point, label, (x, _), (left, middle) in zip(
        points, labels, pixels, place_labels(pixels, labels, taken), strict=True
    ):
        near = left - 2 if left > x else left + LETTER_WIDTH * len(label)
        point |= {"label_mib": x_scale.value(left), "label_ratio": y_scale.value(middle), "near": x_scale.value(near)}
    y_title = "time / time of the three GEMMs"
    x = alt.X("mib:Q", title=f"transient memory (MiB, from {LEAST_MIB:g})", scale=x_scale.scale(), axis=x_scale.axis())
    y = alt.Y("ratio:Q", title=y_title, scale=y_scale.scale(), axis=y_scale.axis())
    families = list(dict.fromkeys(row["method"].partition(" ")[0] for row in rows))
    colors = alt.Scale(domain=families, range=[palette.color(family) for family in families])
    color = alt.Color("family:N", scale=colors, legend=None)
    base = alt.Chart(alt.Data(values=points)).encode(color=color)
    dots = base.mark_point(filled=True, size=70, opacity=1).encode(x=x, y=y)
    leaders = base.mark_rule(opacity=0.4).encode(x=x, y=y, x2="near:Q", y2="label_ratio:Q")
    text = base.mark_text(align="left", baseline="middle").encode(x="label_mib:Q", y="label_ratio:Q", text="method:N")
    steps = alt.Chart(alt.Data(values=front(points))).mark_line(interpolate="step-after", opacity=0.4)
    steps = steps.encode(x=x, y=y, color=color)
    gemms = alt.Chart(alt.Data(values=[{"ratio": 1.0}])).mark_rule(strokeDash=[5, 4]).encode(y=y)
    corner = [  # where those stand that have neither time nor memory
        {"family": method.partition(" ")[0], "label": f"{method}: out of memory"}
        | {"mib": x_scale.value(PANEL_WIDTH - GAP), "ratio": y_scale.value(PANEL_HEIGHT - LINE_HEIGHT * (i + 0.5))}
        for i, method in enumerate(failures)
    ]
    failed = alt.Chart(alt.Data(values=corner)).encode(x=x, y=y, color=color)
    crosses = failed.mark_point(**palette.CROSS) + failed.mark_text(align="right", dx=-GAP).encode(text="label:N")
    title = panel_title(rows[0], names_device)
    missing = [f"{row['method']}: {row['status']}" for row in rows if row["status"] not in ("ok", "oom")]
    subtitle = textwrap.wrap(", ".join(missing), 80)
    layers = alt.layer(gemms, steps, leaders, dots, text, crosses).properties(width=PANEL_WIDTH, height=PANEL_HEIGHT)
    return layers.properties(title=alt.TitleParams(title, subtitle=subtitle, anchor="start", fontSize=12))


def front(points: list[dict]) -> list[dict]:
    """Of our own points those that none of us beats in both time and memory, by rising memory."""
    kept = []
    for point in sorted((p for p in points if p["family"] == "ours"), key=lambda p: (p["mib"], p["ratio"])):
        if not kept or point["ratio"] < kept[-1]["ratio"]:
            kept.append(point)
    return kept


class _Log:
    """A logarithmic axis of known length in pixels, with room around its values, and a free `band` behind them."""

    def __init__(self, values: list[float], length: int, band: float = 0.0):
        margin = max((max(values) / min(values)) ** ROOM, LEAST_ROOM)
        self.low, self.length = min(values) / margin, length
        self.high = self.low * (max(values) * margin / self.low) ** (length / (length - band))

    def pixel(self, value: float) -> float:
        return self.length * math.log(value / self.low) / math.log(self.high / self.low)

    def value(self, pixel: float) -> float:
        return self.low * (self.high / self.low) ** (pixel / self.length)

    def scale(self) -> alt.Scale:
        return alt.Scale(type="log", domain=[self.low, self.high], nice=False)

    def axis(self) -> alt.Axis:
        """Ticks at round numbers, as many as fit."""
        steps = (1, 3) if self.high / self.low > WIDE else (1, 1.1, 1.2, 1.3, 1.5, 1.75, 2, 2.5, 3, 4, 5, 7)
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        ticks = [step * 10.0**power for power in powers for step in steps]
        return alt.Axis(values=[tick for tick in ticks if self.low <= tick <= self.high], format=",~g")


def place_labels(
    points: list[tuple[float, float]], labels: list[str], taken: list[tuple[float, float, float, float]]
) -> list[tuple[float, float]]:
    """Where labels begin (left end, middle of the text), in pixels; they cover no point, no other, and nothing `taken`.

    Beside its point if there is room, or as near above or below as there is; beside it anyhow if the panel is full.
    """
    taken = [*taken, *((x - POINT, y - POINT, x + POINT, y + POINT) for x, y in points)]
    places = []
    for (x, y), label in zip(points, labels, strict=True):
        length = LETTER_WIDTH * len(label)
        rises = sorted(range(-12, 13), key=abs)
        candidates = [(left, y + rise * LINE_HEIGHT / 2) for rise in rises for left in (x + GAP, x - GAP - length)]
        boxes = [(left, middle - 6, left + length, middle + 6) for left, middle in candidates]
        free = [
            candidate
            for candidate, box in zip(candidates, boxes, strict=True)
            if box[0] >= 0 and box[2] <= PANEL_WIDTH and box[1] >= 0 and box[3] <= PANEL_HEIGHT
            if not any(_overlap(box, other) for other in taken)
        ]
        left, middle = (free or candidates)[0]
        taken.append((left, middle - 6, left + length, middle + 6))
        places.append((left, middle))
    return places


def _overlap(a: tuple, b: tuple) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def head_scaling(rows: list[dict]) -> alt.VConcatChart | None:
    """Time and transient memory against N, V and D around a base shape, one line a method; None without a sweep."""
    rows = latest(rows)
    sweeps = find_sweeps(rows)
    names_device = len({row["device"] for row in rows}) > 1
    rows = rows_of(rows, sweeps)
    if not rows:
        return None
    methods = list(dict.fromkeys(row["method"] for row in rows if row["status"] in ("ok", "oom")))
    lines = []
    for name, title in (("total_ms", "time (ms)"), ("transient_mib", f"transient memory (MiB, from {LEAST_MIB:g})")):
        panels = [_scaling_panel(rows, sweeps, axis, name, title, methods) for axis in sweeps.sizes]
        lines.append(alt.hconcat(*panels))
    base = ", ".join(f"{letter} = {size}" for letter, size in zip("NVD", sweeps.base, strict=True))
    title = f"Loss of a head around {base}; {case_in_words(rows[0], names_device)}"
    title += "; dashed: the three GEMMs alone"
    title += "; crosses: out of memory" if any(row["status"] == "oom" for row in rows) else ""
    return alt.vconcat(*lines).properties(title=_provenance(title, rows))


def _scaling_panel(
    rows: list[dict], sweeps: Sweeps, axis: str, name: str, title: str, methods: list[str]
) -> alt.LayerChart:
    least = LEAST_MIB if name == "transient_mib" else 0.0
    here = {sweeps.shape(axis, size): size for size in sweeps.sizes[axis]}
    near = [row for row in rows if shape_of(row) in here]
    points = [
        {"size": here[shape_of(row)], "value": max(row[name], least), "method": row["method"]}
        for row in near
        if row["status"] == "ok"
    ]
    sizes, values = sweeps.sizes[axis], [max(row[name], least) for row in rows if row["status"] == "ok"]
    band = LINE_HEIGHT if any(row["status"] == "oom" for row in rows) else 0
    x_scale, y_scale = _Log(sizes, SWEEP_WIDTH), _Log(values, SWEEP_HEIGHT, band)
    top = y_scale.value(SWEEP_HEIGHT - band / 2)
    failures = [
        {"size": here[shape_of(row)], "value": top, "method": row["method"]} for row in near if row["status"] == "oom"
    ]
    x_axis = alt.Axis(values=sizes, format="d", labelOverlap=True)
    x = alt.X("size:Q", title=AXES[axis], scale=x_scale.scale(), axis=x_axis)
    y = alt.Y("value:Q", title=title, scale=y_scale.scale(), axis=alt.Axis(format=",~g", tickCount=6))
    color = alt.Color(
        "method:N", title=None, scale=alt.Scale(domain=methods, range=palette.shades(methods)), sort=methods
    )
    lines = alt.Chart(alt.Data(values=points)).mark_line(point=True, strokeWidth=1.5).encode(x=x, y=y, color=color)
    crosses = alt.Chart(alt.Data(values=failures)).mark_point(**palette.CROSS)
    layers = [lines, crosses.encode(x=x, y=y, color=color)]
    if name == "total_ms":
        by_size = {
            size: [row["gemm_ms"] for row in near if here[shape_of(row)] == size and "gemm_ms" in row] for size in sizes
        }
        limit = [{"size": size, "value": statistics.median(times)} for size, times in by_size.items() if times]
        layers.append(alt.Chart(alt.Data(values=limit)).mark_line(color="black", strokeDash=[5, 4]).encode(x=x, y=y))
    return alt.layer(*layers).properties(width=SWEEP_WIDTH, height=SWEEP_HEIGHT)


def _provenance(text: str, rows: list[dict]) -> alt.TitleParams:
    return provenance(text, rows, [f"python scripts/bench.py {row['command']}" for row in rows])
