"""The backends side by side: training loss, its difference from the naive run's, and peak memory."""

import altair as alt

from logitless.records import outcome
from logitless.report import palette
from logitless.report.charts import (
    ENOUGH_POINTS,
    FACTS,
    TOO_SHORT,
    Drawing,
    curve,
    curve_problem,
    labels_of,
    losses,
    thinned,
    thinning_notes,
    title,
)
from logitless.report.panels import PEAK_PANELS, Panel

BAR = 25  # pixels


def problem(record: dict) -> str | None:
    """Why the record of a run cannot be drawn, or None."""
    units = [panel.y for panel in PEAK_PANELS if panel.y in record]
    needed = FACTS | dict.fromkeys(units, int | float) | {"seq_len": int}
    return curve_problem(record, needed) if units else outcome(record)


def backends(records: list[dict]) -> Drawing:
    """Curves and peaks of runs of one length, those of a GPU above those of a CPU, which counts other bytes.

    Among runs of several lengths those count that are long enough for a curve.
    """
    left_out = {record["run_dir"]: reason for record in records if (reason := problem(record))}
    records = [record for record in records if record["run_dir"] not in left_out]
    if len({record.get("seq_len") for record in records}) > 1:
        short = [record for record in records if len(losses(record)) < ENOUGH_POINTS]
        left_out |= {record["run_dir"]: TOO_SHORT for record in short}
        records = [record for record in records if record not in short]
    if not records or len({record.get("seq_len") for record in records}) > 1:
        return Drawing(None, left_out if not records else {})
    groups = {panel: [record for record in records if panel.y in record] for panel in PEAK_PANELS}
    rows = [_backends(group, panel) for panel, group in groups.items() if group]
    chart = rows[0] if len(rows) == 1 else alt.vconcat(*rows).resolve_scale(color="independent")
    return Drawing(chart, left_out, thinning_notes({record["run_dir"]: len(losses(record)) for record in records}))


def _backends(records: list[dict], panel: Panel) -> alt.HConcatChart:
    """Training loss, its difference from the first run's, and the peak memory of each record; naive comes first."""
    records = sorted(records, key=lambda record: palette.rank(record["backend"]))
    labels = labels_of(records)
    colors = palette.shades([record["backend"] for record in records])
    color = alt.Color("label:N", sort=labels, scale=alt.Scale(domain=labels, range=colors), legend=None)
    tokens = alt.X("tokens:Q", title="tokens", axis=alt.Axis(format="~s"))
    first = losses(records[0])
    points = [
        {"label": label} | point
        for label, record in zip(labels, records, strict=True)
        for point in thinned(curve(losses(record), first))
    ]
    dashes = alt.Scale(domain=labels, range=[palette.dash(record["backend"]) for record in records])
    dash = alt.StrokeDash("label:N", scale=dashes, legend=None)
    curves = alt.Chart(alt.Data(values=points)).mark_line(strokeWidth=1.2).encode(strokeDash=dash)
    loss = curves.encode(
        x=tokens, y=alt.Y("loss:Q", title="training loss (nats a token)", scale=alt.Scale(zero=False)), color=color
    )
    difference = curves.transform_filter("isValid(datum.difference)").encode(
        x=tokens, y=alt.Y("difference:Q", title=f"difference from {labels[0]} (%)"), color=color
    )
    values = [{"label": label, "peak": record[panel.y]} for label, record in zip(labels, records, strict=True)]
    largest = max(value["peak"] for value in values)
    peak = alt.X("peak:Q", title=panel.y_title(), scale=alt.Scale(domain=[0, 1.15 * largest]))
    bars = alt.Chart(alt.Data(values=values)).encode(x=peak, y=alt.Y("label:N", title=None, sort=labels))
    numbers = bars.mark_text(align="left", dx=4).encode(text=alt.Text("peak:Q", format=".2f"))
    memory = (bars.mark_bar().encode(color=color) + numbers).properties(width=280, height=BAR * len(records))
    right = alt.vconcat(memory, difference.properties(width=280, height=90))
    return alt.hconcat(loss.properties(width=330, height=240), right).properties(title=title(records))
