"""For each implementation of others in the benchmark the plan of ours that beats it, or by how much none does.

A plan beats a peer if it is no slower, needs no more transient memory and leaves no larger an error of dweight, on the
same inputs. Memory is compared in whole MiB and the error in tenths of a thousandth, as they are printed: a KiB more in
2 GiB is no more. `inplace` is ours too.
"""

from collections.abc import Iterable
from typing import NamedTuple

from logitless.report.head_rows import case_of, panel_title, shape_of

COLUMNS = ("peer", "ms", "MiB", "error", "ours", "ms", "MiB", "error", "our time / its")
HEAD = f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}"


class Comparison(NamedTuple):
    """A peer's row, beside the fastest of ours that is as small and as exact; or, if none is, our smallest.

    Where plans of the peer's own run beat it, the fastest of these.
    """

    peer: dict
    ours: dict
    is_small_enough: bool  # ours, and as exact

    @property
    def times(self) -> float:
        """Our time over the peer's."""
        return self.ours["total_ms"] / self.peer["total_ms"]

    @property
    def is_beaten(self) -> bool:
        return self.is_small_enough and self.times <= 1

    @property
    def is_one_run(self) -> bool:
        return self.peer["time"] == self.ours["time"]


def is_ours(row: dict) -> bool:
    return row["method"].startswith(("ours", "inplace"))


def mib(row: dict) -> int:
    return round(row["transient_mib"])


def error(row: dict) -> float:
    """Of dweight, relative, in thousandths."""
    return round(1000 * row["errors"]["dweight"], 1)


def compare(rows: Iterable[dict]) -> list[Comparison]:
    """All peers of one case, in the order of their rows; none where nothing of ours was measured."""
    rows = [row for row in rows if row["status"] == "ok" and not row["method"].startswith("evaluation")]
    ours = [row for row in rows if is_ours(row)]
    found = []
    for peer in (row for row in rows if ours and not is_ours(row)):
        as_good = [row for row in ours if mib(row) <= mib(peer) and error(row) <= error(peer)]
        beaters = [row for row in as_good if row["total_ms"] <= peer["total_ms"] and row["time"] == peer["time"]]
        best = min(beaters or as_good, key=lambda row: row["total_ms"], default=None)
        smallest = min(ours, key=lambda row: (mib(row), row["total_ms"]))
        found.append(Comparison(peer, best or smallest, bool(best)))
    return found


def cases(rows: Iterable[dict]) -> list[list[dict]]:
    """The rows of each shape and kind of inputs."""
    found = {}
    for row in rows:
        found.setdefault((shape_of(row), case_of(row)), []).append(row)
    return list(found.values())


def markdown(rows: Iterable[dict]) -> str:
    """A table for each case."""
    parts = []
    for case in cases(rows):
        failed = [f"{row['method']} is not here: {row['status']}, {row['reason']}" for row in case if "reason" in row]
        lines = [_line(comparison) for comparison in compare(case)]
        title = panel_title(case[0], names_device=True)
        parts.append("\n".join([f"## {title}", "", HEAD, *lines, *(f"\n`{words}`" for words in failed)]))
    return "\n\n".join(parts) + "\n"


def _line(comparison: Comparison) -> str:
    peer, ours, is_small_enough = comparison
    name = ours["method"] + ("" if comparison.is_one_run else " †")
    name = name if is_small_enough else f"none so small; the smallest is {name}"
    name = name if comparison.is_beaten else f"**{name}**"
    times = f"{comparison.times:.2f}" if comparison.is_beaten else f"**{comparison.times:.2f}**"
    return f"| {peer['method']} | {_numbers(peer)} | {name} | {_numbers(ours)} | {times} |"


def _numbers(row: dict) -> str:
    return f"{row['total_ms']:.1f} | {mib(row):,} | {error(row)}"
