"""Draws the runs in some folders side by side: loss against tokens, and peak memory.

python scripts/report.py runs/2026-01-31_12-00-00 --out figures
"""

import _path  # isort: skip  # noqa: F401

import argparse
import csv
from pathlib import Path

import altair as alt

from logitless.records import read_records

ORDER = ["naive", "inplace", "fused"]
PEAKS = {"peak_allocated_gib": "peak allocated (GiB)", "peak_live_tensor_gib": "peak of live tensors (GiB)"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders with runs, or record.jsonl files")
    parser.add_argument("--out", type=Path, required=True, help="folder for backends.svg and backends.png")
    arguments = parser.parse_args()
    records = [record for record in read_records(arguments.runs) if record["status"] == "ok"]
    if not records:
        parser.error(f"no finished run in {' '.join(map(str, arguments.runs))}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    for suffix in ("svg", "png"):
        figure(records).save(arguments.out / f"backends.{suffix}", ppi=144)
        print(arguments.out / f"backends.{suffix}")


def figure(records: list[dict]) -> alt.HConcatChart:
    """Training loss against tokens, and the peak memory, of each record."""
    for record in records:
        record["label"] = record["backend"] + (f", chunk={record['chunk']}" if record["chunk"] else "")
    labels = [record["label"] for record in sorted(records, key=lambda record: ORDER.index(record["backend"]))]
    scale = {"title": None, "sort": labels, "legend": None}
    color = alt.Color("label:N", scale=alt.Scale(domain=labels), **scale)
    # The first line is the widest: where curves coincide, all of them stay visible.
    widths = alt.Scale(domain=labels, range=[6, 3.5, 1.2][: len(labels)])
    curve = alt.Chart(alt.Data(values=[point for record in records for point in curve_of(record)]))
    loss = curve.mark_line().encode(
        x=alt.X("tokens:Q", title="tokens", axis=alt.Axis(format="~s")),
        y=alt.Y("loss:Q", title="training loss (nats a token)", scale=alt.Scale(zero=False)),
        color=color,
        strokeWidth=alt.StrokeWidth("label:N", scale=widths, **scale),
    )
    name = next(name for name in PEAKS if name in records[0])
    peak = alt.X("peak:Q", title=PEAKS[name], scale=alt.Scale(domain=[0, 1.15 * max(r[name] for r in records)]))
    bars = alt.Chart(alt.Data(values=[{"label": r["label"], "peak": r[name]} for r in records])).encode(
        x=peak, y=alt.Y("label:N", title=None, sort=labels)
    )
    numbers = bars.mark_text(align="left", dx=4).encode(text=alt.Text("peak:Q", format=".2f"))
    memory = bars.mark_bar().encode(color=color) + numbers
    first = records[0]
    versions = ", ".join(f"{name} {first['versions'][name]}" for name in ("torch", "triton"))
    subtitle = [f"{first['device']}, {versions}", f"train.py {without_backend(first['command'])}"]
    title = alt.TitleParams("One run with each loss backend", subtitle=subtitle, anchor="start")
    panels = loss.properties(width=330, height=220) | memory.properties(width=260, height=110)
    return panels.properties(title=title)


def curve_of(record: dict) -> list[dict]:
    """The points of a record's training curve, thinned to a few hundred."""
    with open(Path(record["run_dir"]) / record["curves"]) as stream:
        rows = [row for row in csv.DictReader(stream) if row["train/loss"]]
    step = -(-len(rows) // 300)
    return [
        {"label": record["label"], "tokens": float(row["tokens"]), "loss": float(row["train/loss"])}
        for row in rows[::step]
    ]


def without_backend(command: str) -> str:
    """The overrides that all runs share, as far as the reader is concerned."""
    return " ".join(word for word in command.split() if not word.startswith(("loss=", "hydra.", "logger=")))


if __name__ == "__main__":
    main()
