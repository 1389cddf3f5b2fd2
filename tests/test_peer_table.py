"""The table of peers says which of them a plan of ours beats, as the rows of the benchmark do."""

import re
import subprocess
import sys

import pytest
from tiny import ROOT

from logitless.records import read_records
from logitless.report import peer_table

FILES = ("head.jsonl", "head_65536.jsonl")


def committed_rows() -> list[dict]:
    return read_records([ROOT / "docs" / "results" / "bench_h200" / name for name in FILES])


def row_of(method, total_ms, transient_mib, dweight=0.002, time="10:00") -> dict:
    facts = dict.fromkeys(("inputs", "dtype", "weight_dtype", "device"), "x") | {"n_tokens": 8, "vocab": 9, "width": 4}
    row = {"method": method, "status": "ok", "time": time, "total_ms": total_ms, "transient_mib": transient_mib}
    return row | facts | {"errors": {"dweight": dweight}}


OURS = [
    row_of("ours whole", 10.0, 100.0),
    row_of("inplace", 11.0, 90.0, time="11:00"),
    row_of("ours C=4", 12.0, 50.0),
    row_of("ours vocab C=4", 15.0, 10.0, 0.003),
]


@pytest.mark.parametrize(
    ("peer", "ours", "is_small_enough", "is_beaten"),
    [
        (row_of("a", 20.0, 200.0), "ours whole", True, True),
        (row_of("a", 20.0, 99.6), "ours whole", True, True),  # 100 MiB, as printed
        (row_of("a", 20.0, 99.4), "ours C=4", True, True),  # of its own run, though inplace is faster
        (row_of("a", 11.5, 99.4), "inplace", True, True),
        (row_of("a", 10.9, 99.4), "inplace", True, False),
        (row_of("a", 20.0, 20.0, 0.00304), "ours vocab C=4", True, True),
        (row_of("a", 20.0, 20.0, 0.00294), "ours vocab C=4", False, False),  # 2.9, less than our 3.0
        (row_of("a", 20.0, 9.0, 0.01), "ours vocab C=4", False, False),
    ],
)
def test_a_peer_is_beaten_by_what_is_no_slower_no_larger_and_no_less_exact(peer, ours, is_small_enough, is_beaten):
    others = [row_of("evaluation", 1.0, 1.0), {"method": "b", "status": "error"}]
    (found,) = peer_table.compare([*others, peer, *OURS])
    assert (found.ours["method"], found.is_small_enough, found.is_beaten) == (ours, is_small_enough, is_beaten)
    assert found.times == found.ours["total_ms"] / peer["total_ms"]
    assert peer_table.compare([*others, peer]) == []


def test_the_committed_table_is_what_the_script_makes_of_the_committed_rows(tmp_path):
    rows = [ROOT / "docs" / "results" / "bench_h200" / name for name in FILES]
    script = [sys.executable, ROOT / "scripts" / "peers.py", *rows, "--out", tmp_path / "peers.md"]
    subprocess.run(script, check=True, cwd=tmp_path)
    assert (tmp_path / "peers.md").read_text() == (ROOT / "docs" / "peers.md").read_text()


def test_every_peers_row_of_the_benchmark_is_in_it():
    lines = (ROOT / "docs" / "peers.md").read_text().splitlines()
    rows = [row for row in committed_rows() if not row["method"].startswith(("ours", "inplace", "evaluation"))]
    assert len(rows) == sum(bool(re.match(r"\| (?!peer|-)|`.+ is not here", line)) for line in lines)
