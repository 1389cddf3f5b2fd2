"""The figures of runs, from their records: what `scripts/report.py` draws of training.

The subtitle names the device, the versions, the command and the commit that made the numbers.
"""

import csv
from pathlib import Path

import altair as alt

PEAKS = {"peak_allocated_gib": "peak allocated (GiB)", "peak_live_tensor_gib": "peak of live tensors (GiB)"}


def backends(records: list[dict]) -> alt.HConcatChart:
    """Training loss, its difference from the first run's, and the peak memory of each record; naive comes first."""
    records = sorted(records, key=lambda record: record["backend"] != "naive")
    labels = [label(record) for record in records]
    color = alt.Color("label:N", sort=labels, scale=alt.Scale(domain=labels), legend=None)
    tokens = alt.X("tokens:Q", title="tokens", axis=alt.Axis(format="~s"))
    curves = alt.Chart(alt.Data(values=[point for record in records for point in curve(record, records[0])]))
    loss = curves.mark_line(strokeWidth=1.2).encode(
        x=tokens, y=alt.Y("loss:Q", title="training loss (nats a token)", scale=alt.Scale(zero=False)), color=color
    )
    difference = curves.mark_line(strokeWidth=1.2).encode(
        x=tokens, y=alt.Y("difference:Q", title=f"difference from {labels[0]} (%)"), color=color
    )
    unit = next(name for name in PEAKS if name in records[0])
    values = [{"label": label(record), "peak": record[unit]} for record in records]
    largest = max(value["peak"] for value in values)
    peak = alt.X("peak:Q", title=PEAKS[unit], scale=alt.Scale(domain=[0, 1.15 * largest]))
    bars = alt.Chart(alt.Data(values=values)).encode(x=peak, y=alt.Y("label:N", title=None, sort=labels))
    numbers = bars.mark_text(align="left", dx=4).encode(text=alt.Text("peak:Q", format=".2f"))
    memory = (bars.mark_bar().encode(color=color) + numbers).properties(width=280, height=75)
    right = alt.vconcat(memory, difference.properties(width=280, height=90))
    return alt.hconcat(loss.properties(width=330, height=240), right).properties(title=title(records[0]))


def label(record: dict) -> str:
    return record["backend"] + (f", chunk={record['chunk']}" if record["chunk"] else "")


def title(record: dict) -> alt.TitleParams:
    """Device, versions, and the overrides that the runs share."""
    versions = ", ".join(f"{name} {record['versions'][name]}" for name in ("torch", "triton", "lightning"))
    private = ("loss=", "hydra.", "logger=")
    shared = " ".join(word for word in record["command"].split() if not word.startswith(private))
    commit = f", commit {record['commit']}" if record["commit"] else ""
    subtitle = [f"{record['device']}, {versions}{commit}", f"python scripts/train.py {shared}"]
    return alt.TitleParams("One run with each loss backend", subtitle=subtitle, anchor="start")


def curve(record: dict, first: dict) -> list[dict]:
    """The points of a record's training curve at the steps that the first record has too."""
    right = losses(first)
    return [
        {"label": label(record), "tokens": tokens, "loss": loss, "difference": 100 * (loss / right[tokens] - 1)}
        for tokens, loss in losses(record).items()
        if tokens in right
    ]


def losses(record: dict) -> dict[int, float]:
    """Training loss by tokens seen."""
    with open(Path(record["run_dir"]) / record["curves"]) as stream:
        return {int(row["tokens"]): float(row["train/loss"]) for row in csv.DictReader(stream) if row["train/loss"]}
