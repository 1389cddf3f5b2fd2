"""The figures of runs, from their records: what `scripts/report.py` draws of training.

The subtitle names the devices, the versions, the commits and the commands that made the numbers.
"""

import csv
import os
import textwrap
from collections.abc import Iterable
from pathlib import Path

import altair as alt

from logitless.records import lacks

PEAKS = {"peak_allocated_gib": "peak allocated (GiB)", "peak_live_tensor_gib": "peak of live tensors (GiB)"}
FACTS = dict.fromkeys(("backend", "curves", "command", "device"), str) | {"versions": dict}
BAR = 25  # pixels
VERSIONS = ("torch", "triton", "lightning")  # that the subtitle names


def problem(record: dict) -> str | None:
    """Why the record of a run cannot be drawn, or None."""
    units = [unit for unit in PEAKS if unit in record]
    if record.get("status") != "ok" or not units:
        return f"{record.get('status', 'no status')} after {record.get('steps', 0)} steps"
    if missing := lacks(record, FACTS | dict.fromkeys(units, int | float)):
        return f"no {', '.join(missing)}"
    try:
        return None if losses(record) else f"no training loss in {record['curves']}"
    except (OSError, KeyError, ValueError, csv.Error) as error:
        return f"{record['curves']} cannot be read: {type(error).__name__}: {error}"


def backends(records: list[dict]) -> alt.HConcatChart | alt.VConcatChart:
    """Curves and peaks of the records, those of a GPU above those of a CPU, which counts other bytes."""
    groups = {unit: [record for record in records if unit in record] for unit in PEAKS}
    rows = [_backends(group, unit) for unit, group in groups.items() if group]
    return rows[0] if len(rows) == 1 else alt.vconcat(*rows).resolve_scale(color="independent")


def _backends(records: list[dict], unit: str) -> alt.HConcatChart:
    """Training loss, its difference from the first run's, and the peak memory of each record; naive comes first."""
    records = sorted(records, key=lambda record: record["backend"] != "naive")
    labels = labels_of(records)
    color = alt.Color("label:N", sort=labels, scale=alt.Scale(domain=labels), legend=None)
    tokens = alt.X("tokens:Q", title="tokens", axis=alt.Axis(format="~s"))
    first = losses(records[0])
    points = [
        {"label": label} | point
        for label, record in zip(labels, records, strict=True)
        for point in curve(losses(record), first)
    ]
    curves = alt.Chart(alt.Data(values=points)).mark_line(strokeWidth=1.2)
    loss = curves.encode(
        x=tokens, y=alt.Y("loss:Q", title="training loss (nats a token)", scale=alt.Scale(zero=False)), color=color
    )
    difference = curves.transform_filter("isValid(datum.difference)").encode(
        x=tokens, y=alt.Y("difference:Q", title=f"difference from {labels[0]} (%)"), color=color
    )
    values = [{"label": label, "peak": record[unit]} for label, record in zip(labels, records, strict=True)]
    largest = max(value["peak"] for value in values)
    peak = alt.X("peak:Q", title=PEAKS[unit], scale=alt.Scale(domain=[0, 1.15 * largest]))
    bars = alt.Chart(alt.Data(values=values)).encode(x=peak, y=alt.Y("label:N", title=None, sort=labels))
    numbers = bars.mark_text(align="left", dx=4).encode(text=alt.Text("peak:Q", format=".2f"))
    memory = (bars.mark_bar().encode(color=color) + numbers).properties(width=280, height=BAR * len(records))
    right = alt.vconcat(memory, difference.properties(width=280, height=90))
    return alt.hconcat(loss.properties(width=330, height=240), right).properties(title=title(records))


def labels_of(records: list[dict]) -> list[str]:
    """A name for each record: backend and chunk, and where several have the same, from where their folders part."""
    labels = [record["backend"] + (f", chunk={record['chunk']}" if record.get("chunk") else "") for record in records]
    folders = [Path(record["run_dir"]).resolve() for record in records]
    twins = {label: [own for own, other in zip(folders, labels, strict=True) if other == label] for label in labels}
    return [
        label if len(twins[label]) == 1 else f"{label}, {os.path.relpath(folder, os.path.commonpath(twins[label]))}"
        for label, folder in zip(labels, folders, strict=True)
    ]


def title(records: list[dict]) -> alt.TitleParams:
    """Devices, versions, and the overrides of the runs without those that name a backend or a folder."""
    private = ("loss=", "hydra.", "logger=")
    words = [[word for word in record["command"].split() if not word.startswith(private)] for record in records]
    shown = [record | {"versions": {name: record["versions"].get(name) for name in VERSIONS}} for record in records]
    is_one_each = len({record["backend"] for record in records}) == len(records)
    text = "One run with each loss backend" if is_one_each else "Runs"
    return provenance(text, shown, [" ".join(["python scripts/train.py", *own]) for own in words])


def provenance(text: str, records: list[dict], commands: Iterable[str]) -> alt.TitleParams:
    """A title with the devices, versions and commits of `records`, all that there are, and the commands below it."""
    versions = {}
    for name, version in (item for record in records for item in record["versions"].items() if item[1]):
        versions.setdefault(name, {})[str(version)] = None
    facts = dict.fromkeys(record["device"] for record in records)
    facts |= dict.fromkeys(f"{name} {' and '.join(found)}" for name, found in versions.items())
    facts |= dict.fromkeys(f"commit {record['commit']}" for record in records if record.get("commit"))
    subtitle = [line for entry in (", ".join(facts), *dict.fromkeys(commands)) for line in textwrap.wrap(entry, 150)]
    return alt.TitleParams(text, subtitle=subtitle, anchor="start")


def curve(losses: dict[int, float], right: dict[int, float]) -> list[dict]:
    """The points of a training curve, with the difference from another where that has the same step, and a loss."""
    return [
        {"tokens": tokens, "loss": loss, "difference": 100 * (loss / right[tokens] - 1) if right.get(tokens) else None}
        for tokens, loss in losses.items()
    ]


def losses(record: dict) -> dict[int, float]:
    """Training loss by tokens seen; OSError, KeyError, ValueError or csv.Error for a file that is no curve, or cut."""
    with open(Path(record["run_dir"]) / record["curves"]) as stream:
        rows = list(csv.DictReader(stream))
    if any(None in row or None in row.values() for row in rows):
        raise ValueError("a line has other columns than the first")
    return {int(row["tokens"]): float(row["train/loss"]) for row in rows if row["train/loss"]}
