"""Times and measures implementations of a loss over a head, one after another, and prints and appends a row for each.

    python scripts/bench.py --shapes 8192x128256x4096,32768x50304x768 --out docs/results/bench_h200/head.jsonl
    python scripts/bench.py --shapes 8192x50304x768 --methods ours,Liger,CCE --inputs peaked --weight-dtype fp32
    python scripts/bench.py --shapes 8192x128256                              # our kernels on logits alone

Uses a GPU if there is one. A word in --methods asks for all whose names begin with it. With a weight of another dtype
than --dtype everything runs inside autocast. scripts/report.py draws what --out gets. Exit status 1 if nothing could
be measured.
"""

import _path  # isort: skip  # noqa: F401

import argparse
import itertools
import sys
from pathlib import Path

import torch

from logitless.bench.benchmark import Case, bench
from logitless.bench.inputs import DTYPES, KINDS, Shape
from logitless.records import append_line

COLUMNS = ("forward ms", "backward ms", "total ms", "x GEMMs", "transient MiB", "loss", "dhidden", "dweight")


def words(text: str) -> list[str]:
    found = [word.strip() for word in text.split(",") if word.strip()]
    if not found:
        raise argparse.ArgumentTypeError("a list without a word")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", required=True, type=words, help="tokens x vocabulary x width, or without width")
    parser.add_argument("--methods", type=words, help="names or their beginnings, in any case (default: all)")
    parser.add_argument("--inputs", type=words, default=list(KINDS), help="uniform, peaked or both (default)")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of hidden states and logits (bf16)")
    parser.add_argument("--weight-dtype", choices=DTYPES, help="of the weight (default: like --dtype)")
    parser.add_argument("--out", type=Path, help="file of JSON lines to append to")
    arguments = parser.parse_args()
    if unknown := set(arguments.inputs) - set(KINDS):
        parser.error(f"--inputs {','.join(sorted(unknown))}: there are {', '.join(KINDS)}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtypes = {"dtype": arguments.dtype, "weight_dtype": arguments.weight_dtype or arguments.dtype}
    try:
        shapes = [Shape.parse(text) for text in arguments.shapes]
        cases = [Case(shape, kind, **dtypes, device=device) for shape in shapes for kind in arguments.inputs]
        measured = bench(cases, arguments.methods)
        if arguments.out:
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.open("a").close()  # fails here, not after the first measurement
    except (OSError, ValueError) as error:
        parser.error(str(error))
    statuses = set()
    for text, rows in itertools.groupby(measured, key=heading):
        print(text)
        for row in rows:
            print(line(row), flush=True)
            if arguments.out:
                append_line(row, arguments.out)
            statuses.add(row["status"])
    sys.exit("ok" not in statuses)


def heading(row: dict) -> str:
    """What the rows of a case share, above the names of their columns."""
    shape = Shape(row["n_tokens"], row["vocab"], row["width"])
    weight = f"{row['weight_dtype']} weight, " if row["width"] else ""
    facts = f"{row['inputs']}, {row['dtype']}, {weight}{row['device']}"
    columns = f"{'method':32}" + "".join(f"{column:>14}" for column in COLUMNS)
    return f"\n{shape} {facts}, copies {row['copy_gb_per_s']:,.0f} GB/s\n{columns}"


def line(row: dict) -> str:
    """The row's cells below their columns, or why there are none."""
    if row["status"] != "ok":
        return f"{row['method']:32}  {row['status']}: {row['reason'].splitlines()[0][:120]}"
    numbers = [row.get(name) for name in ("forward_ms", "backward_ms", "total_ms", "ratio", "transient_mib")]
    cells = ["" if number is None else f"{number:,.3f}" for number in numbers]
    cells += [f"{error:.1e}" for error in row.get("errors", {}).values()]
    if "one_read_one_write_ms" in row:
        cells.append(f"   copies: {row['one_read_one_write_ms']:.3f}, {row['two_reads_one_write_ms']:.3f} ms")
    return f"{row['method']:32}" + "".join(f"{cell:>14}" for cell in cells)


if __name__ == "__main__":
    main()
