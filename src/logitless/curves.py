"""Training and validation loss against tokens, a line for each run."""

import math
import textwrap

import altair as alt

from logitless import palette, settings
from logitless.figures import (
    ENOUGH_POINTS,
    FACTS,
    TOO_SHORT,
    Drawing,
    column,
    curve_problem,
    labels_of,
    losses,
    provenance_of_runs,
    thinned,
    thinning_notes,
)
from logitless.panels import AXES, TRAINING_LOSS, VALIDATION_LOSS, Panel

MOST_PANELS = 4
WIDTH, HEIGHT = 380, 240  # pixels of a panel
LETTERS = 60  # of a line above it


def problem(record: dict) -> str | None:
    """Why a run has no curve to draw, or None."""
    reason = curve_problem(record, FACTS)
    return TOO_SHORT if reason is None and len(losses(record)) < ENOUGH_POINTS else reason


def training_loss(records: list[dict]) -> Drawing:
    """A panel for runs that differ in their backend and chunk alone: the longest runs, if there are too many."""
    left_out = {record["run_dir"]: reason for record in records if (reason := problem(record))}
    records = [record for record in records if record["run_dir"] not in left_out]
    panels = settings.alike(records, settings.BACKEND)
    ranked = sorted(panels, key=lambda words: -max(record.get("tokens") or 0 for record in panels[words]))
    for words in ranked[MOST_PANELS:]:
        left_out |= {record["run_dir"]: f"{MOST_PANELS} panels have more tokens" for record in panels.pop(words)}
    if not panels:
        return Drawing(None, left_out)
    charts = [_row(words, runs) for words, runs in panels.items()]
    title = provenance_of_runs("Loss against tokens", [record for runs in panels.values() for record in runs])
    chart = alt.vconcat(*charts).resolve_scale(color="independent", strokeDash="independent")
    notes = thinning_notes({run["run_dir"]: len(losses(run)) for runs in panels.values() for run in runs})
    return Drawing(chart.properties(title=title), left_out, notes)


def _row(words: str, runs: list[dict]) -> alt.HConcatChart:
    runs = sorted(runs, key=lambda run: palette.rank(run["backend"]))
    charts = []
    for panel in (TRAINING_LOSS, VALIDATION_LOSS):
        curves = {label: _points(run, panel) for label, run in zip(labels_of(runs), runs, strict=True)}
        if any(len(points) > 1 for points in curves.values()):
            charts.append(_panel(panel, curves, [run["backend"] for run in runs], words))
    return alt.hconcat(*charts)


def _points(run: dict, panel: Panel) -> list[dict[str, float]]:
    try:
        values = column(run, panel.y)
    except KeyError:
        return []  # a run without validation has no such column
    return [{panel.x: tokens, "loss": value} for tokens, value in values.items() if math.isfinite(value)]


def _panel(panel: Panel, curves: dict[str, list[dict]], backends: list[str], words: str) -> alt.Chart:
    values = [point | {"label": label} for label, points in curves.items() for point in thinned(points)]
    labels = list(curves)
    color = alt.Scale(domain=labels, range=palette.shades(backends))
    dash = alt.Scale(domain=labels, range=[palette.dash(backend) for backend in backends])
    title = alt.TitleParams(textwrap.wrap(words or panel.title, LETTERS), anchor="start", fontSize=12)
    return (
        alt.Chart(alt.Data(values=values))
        .mark_line(strokeWidth=1.5)
        .encode(
            x=alt.X(f"{panel.x}:Q", title=AXES[panel.x], axis=alt.Axis(format="~s")),
            y=alt.Y("loss:Q", title=panel.y_title(), scale=alt.Scale(zero=False)),
            color=alt.Color("label:N", title=panel.group, scale=color),
            strokeDash=alt.StrokeDash("label:N", title=panel.group, scale=dash),
            tooltip=[alt.Tooltip("label:N", title=panel.group), alt.Tooltip(f"{panel.x}:Q", format=",d"), "loss:Q"],
        )
        .properties(width=WIDTH, height=HEIGHT, title=title)
    )
