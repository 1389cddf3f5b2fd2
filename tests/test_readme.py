"""The README's numbers are those of the records in docs/results, and its commands and files exist."""

import csv
import re
import statistics

import pytest
from tiny import BACKENDS, ROOT

from logitless.records import read_records

README = (ROOT / "README.md").read_text()


def records(folder: str) -> dict[str, dict]:
    return {record["backend"]: record for record in read_records([ROOT / "docs" / "results" / folder])}


def rows_of(backend: str) -> list[str]:
    """The rows of the README's two result tables."""
    return re.findall(rf"^\| `{backend}[^|]*\|.*$", README, flags=re.M)[:2]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_gpu_table_is_the_record(backend):
    record = records("small_h200")[backend]
    with open(ROOT / "docs" / "results" / "small_h200" / backend / record["curves"]) as stream:
        losses = [float(row["train/loss"]) for row in csv.DictReader(stream) if row["train/loss"]]
    assert len(losses) == 200
    mean = statistics.mean(losses[-50:])
    expected = f"| {record['peak_allocated_gib']:.2f} GiB | {record['tokens_per_s']:,.0f} | {mean:.4f} |"
    assert rows_of(backend)[0].endswith(expected)


def test_the_backends_agree_within_half_a_percent_and_memory_falls():
    by_backend = records("small_h200")
    peaks = [by_backend[name]["peak_allocated_gib"] for name in ("naive", "inplace", "fused")]
    assert peaks == sorted(peaks, reverse=True)
    losses = [float(rows_of(name)[0].split("|")[-2]) for name in BACKENDS]
    assert max(losses) / min(losses) < 1.005


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_cpu_table_is_the_record(backend):
    record = records("tiny_cpu")[backend]
    expected = (
        f"| {record['peak_live_tensor_gib']:.2f} GiB | {record['tokens_per_s']:,.0f} | {record['val_loss']:.4f} |"
    )
    assert rows_of(backend)[1].endswith(expected)


def test_every_target_and_file_it_names_exists():
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.M)
    assert set(re.findall(r"`?make ([a-z]+)", README)) <= set(targets)
    tree = README[README.index("## What is where") :]
    for path in re.findall(r"^    ([\w/.]+)  ", tree, flags=re.M):
        assert (ROOT / path).exists(), path
    for path in re.findall(r"\]\(([\w/.]+)\)", README):
        assert (ROOT / path).exists(), path
