"""Writes, from what scripts/bench.py measured, which plan of ours beats each implementation of others.

python scripts/peers.py docs/results/bench_h200/head.jsonl docs/results/bench_h200/head_65536.jsonl --out docs/peers.md
"""

import _path  # isort: skip  # noqa: F401

import argparse
from pathlib import Path

from logitless.records import read_records
from logitless.report import peer_table

INTRODUCTION = """# Each peer, and the plan of ours that beats it

Made by `python scripts/peers.py` from the rows in {files}; see [results](results/README.md).

Beside each implementation of others stands the fastest of our plans that needs no more transient memory (whole MiB) and
has no larger an error of dweight (relative, in thousandths), on the same inputs. **Bold**: it is slower, or none is as
small. It is one of the peer's own run where one of that run is as fast; else † says that it was measured in another, on
a machine of the same kind. `inplace` is ours. Not all of our plans were measured on all inputs: another may do better.

"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="+", type=Path, help="files of JSON lines")
    parser.add_argument("--out", type=Path, required=True, help="file of Markdown")
    arguments = parser.parse_args()
    files = " and ".join(f"`{path.name}`" for path in arguments.rows)
    tables = peer_table.markdown(read_records(arguments.rows))
    arguments.out.write_text(INTRODUCTION.format(files=files) + tables, "utf-8")


if __name__ == "__main__":
    main()
