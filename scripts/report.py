"""Draws figures of runs, and of what scripts/bench.py measured, and a page with all of them.

    python scripts/report.py runs/2026-01-31_12-00-00-000000 --out report
    python scripts/report.py docs/results/bench_h200/head.jsonl docs/results/bench_h200/scaling.jsonl --out report

Needs the records only, and no network. `report/index.html` holds the figures, the table of all runs and the calculator;
the figures lie beside it as .svg and .png, and calculator.html is the calculator alone. A figure is drawn where there
is something to draw:

    training_loss     loss against tokens, for runs with 10 logged points or more
    backends          loss, its difference from the naive run's and peak memory, where all runs have one length
    peak_memory       peak of a training step against sequence length, measured and predicted
    speed             tokens/s against sequence length
    frontier          the longest length that trained, and the shortest that ran out of memory
    head_time_memory  of the benchmark: time against transient memory, for what is not part of a sweep
    head_scaling      of the benchmark: both against N, V and D, where three shapes or more differ in one size only

A run that has no place in a figure, or whose record cannot be read, is named with the reason. Of two records in a
folder, of two runs with the same settings and length, and of two rows about the same, the later counts.
"""

import _path  # isort: skip  # noqa: F401

import argparse
import os
from pathlib import Path

from logitless.records import read_records
from logitless.report import (
    backends_figure,
    frontier_figure,
    head_figures,
    head_rows,
    length_figures,
    loss_figure,
    page,
)
from logitless.report.charts import Drawing

FIGURES = {
    "training_loss": loss_figure.training_loss,
    "backends": backends_figure.backends,
    "peak_memory": length_figures.peak_memory,
    "speed": length_figures.speed,
    "frontier": frontier_figure.frontier,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders with runs, or files of JSON lines")
    parser.add_argument("--out", type=Path, required=True, help="folder for index.html and the figures")
    arguments = parser.parse_args()
    if missing := [str(path) for path in arguments.runs if not os.path.exists(path)]:
        parser.error(f"there is no {', '.join(missing)}")
    records = read_records(arguments.runs)
    rows = [record for record in records if "method" in record]
    runs = list({Path(own["run_dir"]).resolve(): own for own in records if "method" not in own}.values())
    if not runs and not rows:
        parser.error(f"nothing to draw in {' '.join(map(str, arguments.runs))}")
    drawings = {name: draw(runs) for name, draw in FIGURES.items()} if runs else {}
    drawings |= head_drawings(rows) if rows else {}
    for line in (*page.left_out_lines(drawings), *page.notes(drawings)):
        print(line)
    try:
        save(drawings, runs, arguments.out)
    except OSError as error:
        parser.error(f"--out: {error}")


def head_drawings(rows: list[dict]) -> dict[str, Drawing]:
    """The figures of the benchmark, and why rows are in none."""
    problems = {i: head_rows.problem(row) for i, row in enumerate(rows)}
    notes = [f"left out: {rows[i]['run_dir']}, {reason}" for i, reason in problems.items() if reason]
    rows = [row for i, row in enumerate(rows) if not problems[i]]
    if rows and not any(row["status"] == "ok" for row in rows):
        notes.append("left out: all rows of the benchmark, of which none is ok")
    notes += head_rows.left_out(rows)
    time_memory = Drawing(head_figures.head_time_memory(rows), {}, notes)
    return {"head_time_memory": time_memory, "head_scaling": Drawing(head_figures.head_scaling(rows), {})}


def save(drawings: dict[str, Drawing], runs: list[dict], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, drawing in drawings.items():
        for suffix in ("svg", "png") if drawing.chart else ():
            drawing.chart.save(folder / f"{name}.{suffix}", ppi=96)
            print(folder / f"{name}.{suffix}")
    for name, text in (("index.html", page.page(drawings, runs)), ("calculator.html", page.calculator_page())):
        (folder / name).write_text(text, "utf-8")
        print(folder / name)


if __name__ == "__main__":
    main()
