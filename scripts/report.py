"""Draws figures of runs, and of what scripts/bench.py measured.

    python scripts/report.py runs/2026-01-31_12-00-00 --out figures
    python scripts/report.py docs/results/bench_h200/head.jsonl docs/results/bench_h200/scaling.jsonl --out figures

Of runs (`backends`): training loss, its difference from the naive run's, and peak memory; a run that did not finish,
or had one step only, is named and left out, as is all that lacks something. Of the benchmark: time against transient
memory, one point a method, for what is not part of a sweep (`head_time_memory`); and both against N, V and D
(`head_scaling`), where three shapes or more differ in one size only, for the case that was measured most. Of two rows
about the same, and of two records in a folder, the later counts.
"""

import _path  # isort: skip  # noqa: F401

import argparse
from pathlib import Path

from logitless import figures, head_figures
from logitless.records import read_records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders with runs, or files of JSON lines")
    parser.add_argument("--out", type=Path, required=True, help="folder for the figures, as .svg and .png")
    arguments = parser.parse_args()
    if missing := [str(path) for path in arguments.runs if not path.exists()]:
        parser.error(f"there is no {', '.join(missing)}")
    try:
        records = read_records(arguments.runs)
    except OSError as error:
        parser.error(str(error))
    runs, rows = {}, []
    for record in records:
        problem = head_figures.problem(record) if "method" in record else figures.problem(record)
        if problem:
            print(f"left out: {record['run_dir']}, {problem}")
        elif "method" in record:
            rows.append(record)
        else:
            runs[Path(record["run_dir"]).resolve()] = record
    charts = {
        "backends": figures.backends(list(runs.values())) if runs else None,
        "head_time_memory": head_figures.head_time_memory(rows),
        "head_scaling": head_figures.head_scaling(rows),
    }
    if not any(charts.values()):
        parser.error(f"nothing to draw in {' '.join(map(str, arguments.runs))}")
    if rows and not any(row["status"] == "ok" for row in rows):
        print("left out: all rows of the benchmark, of which none is ok")
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)
        for name, chart in charts.items():
            for suffix in ("svg", "png") if chart else ():
                chart.save(arguments.out / f"{name}.{suffix}", ppi=96)
                print(arguments.out / f"{name}.{suffix}")
    except OSError as error:
        parser.error(f"--out: {error}")


if __name__ == "__main__":
    main()
