"""The README's numbers are those of the records in docs/results, and its commands and files exist."""

import json
import re
import statistics

import pytest
from bench_records import FILES, own_rows, plan_of
from tiny import BACKENDS, ROOT, read_curve

from kernels.plan import MIB
from logitless.records import read_records
from logitless.report import frontier_figure, lengths, prediction

README = (ROOT / "README.md").read_text()


def records(folder: str) -> dict[str, dict]:
    return {record["backend"]: record for record in read_records([ROOT / "docs" / "results" / folder])}


def rows_of(backend: str) -> list[str]:
    """The rows of the README's two result tables."""
    return re.findall(rf"^\| `{backend}[^|]*\|.*$", README, flags=re.M)[:2]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_gpu_table_is_the_record(backend):
    record = records("small_h200")[backend]
    losses = list(curve("small_h200", backend).values())
    assert len(losses) == 200
    mean = statistics.mean(losses[-50:])
    expected = f"| {record['peak_allocated_gib']:.2f} GiB | {record['tokens_per_s']:,.0f} | {mean:.4f} |"
    assert rows_of(backend)[0].endswith(expected)


def test_its_column_of_speed_drifts_as_it_says():
    drifts = []
    for backend in BACKENDS:
        speeds = list(read_curve(ROOT / "docs" / "results" / "small_h200" / backend, "tokens_per_s").values())
        means = [statistics.mean(speeds[first : first + 50]) for first in range(0, len(speeds), 50)]
        drifts.append(max(means) / min(means) - 1)
    words = f"means over 50 steps of a run differ by up to {max(drifts):.0%}, more than those of `inplace` and `fused`"
    assert words in README.replace("\n", " ")
    inplace, fused = (records("small_h200")[name]["tokens_per_s"] for name in ("inplace", "fused"))
    assert inplace / fused - 1 < max(drifts)


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


def curve(folder: str, backend: str) -> dict[int, float]:
    """The training loss by step."""
    return read_curve(ROOT / "docs" / "results" / folder / backend, "train/loss")


def test_the_curves_of_the_backends_differ_as_little_as_it_says():
    points, means = [], []
    for folder in ("small_h200", "austen_small_h200"):
        naive = curve(folder, "naive")
        for backend in ("inplace", "fused"):
            ours = curve(folder, backend)
            assert ours.keys() == naive.keys()
            differences = [ours[step] / naive[step] - 1 for step in naive]
            points.append(max(map(abs, differences)))
            means.append(abs(statistics.mean(differences)))
    words = f"points of their curves differ by up to {100 * max(points):.1f}%, whole curves by {100 * max(means):.1f}%"
    assert words in README.replace("\n", " ")


def training_rows() -> list[tuple[dict, dict]]:
    """nanoGPT's row and ours of each shape."""
    rows = [json.loads(line) for line in (ROOT / "docs" / "results" / "training_h200.jsonl").read_text().splitlines()]
    assert [row["method"] == "nanoGPT" for row in rows] == [True, False] * 3
    return list(zip(rows[::2], rows[1::2], strict=True))


def test_the_tables_of_training_are_the_rows():
    section = README[README.index("## Train for real") : README.index("## When it stops")]
    names, ratios = [], []
    for theirs, ours in training_rows():
        assert theirs["shape"] == ours["shape"]
        batch, tokens, vocab = theirs["shape"].split("x")
        names.append(f"{batch} x {tokens}, V = {int(vocab):,}")
        speed, peak = (ours[key] / theirs[key] for key in ("tokens_per_s", "peak_allocated_gib"))
        gib = [row["peak_allocated_gib"] for row in (theirs, ours)]
        ratios.append(speed)
        line = f"| {names[-1]} | {theirs['tokens_per_s']:,.0f} | {ours['tokens_per_s']:,.0f} | {speed:.2f} "
        assert f"{line}| {ours['mfu']:.1%} | {gib[0]:.2f} GiB | {gib[1]:.2f} GiB | {peak:.2f} |" in section
    assert all(ratio >= target for ratio, target in zip(ratios, (1.10, 1.08, 1.18), strict=True))
    results = (ROOT / "docs" / "results" / "README.md").read_text()
    found = re.findall(r"^\| \d+ x \d+ tokens, .* \| ([\d.]+), within [\d.]+ \| met \|$", results, flags=re.M)
    assert [f"{ratio:.2f}" for ratio in ratios] == found
    assert f"| ms of a step | {' | '.join(names)} |" in section
    parts = training_rows()[0][1]["step_ms"]
    for part in parts:
        milliseconds = [f"{ours['step_ms'][part]:.1f}" for _, ours in training_rows()]
        assert f"| {part} | {' | '.join(milliseconds)} |" in section
    gains = []
    for _, ours in training_rows():
        batch, tokens, _ = map(int, ours["shape"].split("x"))
        gains.append(1 - sum(ours["step_ms"].values()) / (1e3 * batch * tokens / ours["tokens_per_s"]))
    assert f"took {100 * min(gains):.0f} to {max(gains):.0%} less than the mean" in section.replace("\n", " ")


def test_the_first_step_is_done_as_soon_as_it_says():
    def seconds(folder: str) -> list[float]:
        return [run["start_up_s"] for run in read_records([ROOT / "docs" / "results" / folder])]

    *eager, first = sorted(seconds("small_h200"))
    compiled = [ours["start_up_s"] for _, ours in training_rows()] + seconds("austen_small_h200")
    *two, first_compiled = sorted(seconds("medium_scaling_h200"))
    words = (
        f"on an H200 {min(eager):.0f} to {max(eager):.0f} s, compiled {min(compiled):.0f} to {max(compiled):.0f} s, "
    )
    words += f"on two {min(two):.0f} to {max(two):.0f} s."
    text = " ".join(README.split())
    assert words in text
    assert f"byte-compiles its libraries: {first:.0f} s, compiled {first_compiled:.0f} s." in text


def test_two_gpus_are_as_fast_as_it_says():
    folder = ROOT / "docs" / "results" / "medium_scaling_h200"
    runs = {name: read_records([folder / name])[0] for name in ("gpu", "ddp", "fsdp", "tp_vocab")}
    assert [run["world_size"] for run in runs.values()] == [1, 2, 2, 2]
    section = README[README.index("`experiment=medium_scaling` on one") : README.index("`trainer=fsdp` gathers")]
    for name, run in runs.items():
        tokens, speed = run["batch_size"] * run["seq_len"], run["tokens_per_s"]
        ratio = speed / runs["gpu"]["tokens_per_s"]
        assert f"{run['head_share']:.0%} in the head; {run['batch_size']} x {run['seq_len']} tokens a rank)" in section
        line = f"| `{name}` | {run['world_size']} | {speed:,.0f} | {ratio:.3f} | {run['step_ms']['head, loss']:.1f} "
        line += f"| {1e3 * run['world_size'] * tokens / speed:.0f} ms | {run['peak_allocated_gib']:.1f} GiB |"
        assert line in section
        assert ratio >= 1.9 or name not in ("ddp", "fsdp")


def frontier_runs() -> list[dict]:
    return read_records([ROOT / "docs" / "results" / "frontier_h200"])


def test_the_table_of_longest_sequences_is_the_records():
    section = README[README.index("## Where out-of-memory starts") : README.index("## The lesson")]
    panels = frontier_figure.bounds(lengths.split(frontier_runs(), frontier_figure.problem)[1])
    lines = re.findall(r"^\| (V = [^|]+) \| ([\d,]+) \| (.+) \| (.+) \|$", section, flags=re.M)
    words = {"V = 50,304": "V = 50304", "V = 131,072": "V = 131072"}
    words["V = 131,072, `model.checkpoint=true`"] = "V = 131072, activation checkpointing"
    assert {words[line[0]] for line in lines} == set(panels)
    for name, *cells in lines:
        naive, *others = panels[words[name]]
        ratios = [bound.longest / naive.longest for bound in others]
        if "131" in name:
            assert ratios[-1] >= (8 if "checkpoint" in name else 3)
        right = [f"{naive.longest:,}"]
        for bound, ratio in zip(others, ratios, strict=True):
            assert bound.too_long is None or bound.too_long <= 1.1 * bound.longest
            right.append(f"{bound.longest:,}{'' if bound.too_long else ' or more'} ({ratio:.1f}x)")
        assert cells == right
    naive, _, fused = zip(panels["V = 131072"], panels["V = 131072, activation checkpointing"], strict=True)
    for backend, share in (
        (naive, r"\((\d+)% of the peak in the second line, (\d+)%\s"),
        (fused, r"\((\d+)% and (\d+)%"),
    ):
        (found,) = re.findall(share, section)
        assert [f"{percent}% of the peak" for percent in found] == [" ".join(b.filled_by.split()[1:]) for b in backend]
    assert [bound.filled_by.split()[0] for bound in (*naive, *fused)] == ["head", "head", "blocks", "blocks"]


def test_the_peaks_at_the_frontier_were_foreseen():
    runs = [run for run in frontier_runs() if run["status"] == "ok"]
    errors = [prediction.predicted_gib(run, run["seq_len"]) / run["peak_allocated_gib"] - 1 for run in runs]
    assert f"all {len(runs)} measured peaks are within 0.01% of them" in README.replace("\n", " ")
    assert max(map(abs, errors)) <= 1e-4
    assert all(run["validation_peak_allocated_gib"] < run["peak_allocated_gib"] for run in runs)


def bench_rows(name: str) -> list[dict]:
    lines = (ROOT / "docs" / "results" / "bench_h200" / f"{name}.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["inputs"] == "uniform"]


def bench_row(name: str, method: str, vocab: int) -> dict:
    (row,) = (row for row in bench_rows(name) if (row["method"], row["vocab"]) == (method, vocab))
    return row


def cells(row: dict) -> list[str]:
    if row["status"] != "ok":
        return [row["status"], "", "", ""]
    error = 1000 * row["errors"]["dweight"]
    return [f"{row['total_ms']:.1f} ms", f"{row['ratio']:.2f}", f"{row['transient_mib']:,.0f}", f"{error:.1f}"]


def test_the_table_of_implementations_is_the_benchmarks():
    section = README[README.index("## Against others") : README.index("| our plans")]
    lines = [[cell.strip() for cell in line[1:-1].split("|")] for line in section.splitlines() if line.startswith("| ")]
    assert len(lines) > 10
    rows = [row for row in bench_rows("head") if not row["method"].startswith("evaluation")]
    measured = {(row["method"], row["vocab"]): cells(row) for row in rows}
    for method, *found in lines[1:]:
        right = [measured.get((method, vocab), [""] * 4) for vocab in (128256, 50304)]
        assert any(map(any, right)), method
        assert found == right[0] + right[1], method
    gemms = [
        row["gemm_ms"]
        for row in bench_rows("head")
        if row["vocab"] == 50304 and row["status"] == "ok" and "backward_ms" in row
    ]
    assert f"took {min(gemms):.1f} to {max(gemms):.1f} ms" in section


def test_the_table_of_plans_is_the_benchmarks():
    found = re.findall(r"^\| (\d+ x \d+ x \d+)? ?\| (.+?), ([\d.]+) ms \| ([\d.]+) \| ([\d,]+) \|$", README, flags=re.M)
    assert len(found) == 13
    for i, (shape, method, *numbers) in enumerate(found):
        sizes = shape or sizes  # noqa: F821 - the first line has one
        name = "head_65536" if sizes.startswith("65536") else "head_fp32_weight" if i == 1 else "head"
        (row,) = (
            row
            for row in bench_rows(name)
            if f"{row['n_tokens']} x {row['vocab']} x {row['width']}" == sizes and row["method"] == method
        )
        assert numbers == [f"{row['total_ms']:.1f}", f"{row['ratio']:.2f}", f"{row['transient_mib']:,.0f}"], method
    assert f"({bench_row('head_fp32_weight', 'ours C=1024', 128256)['cast_ms']:.2f} ms)" in README
    liger, ours = (next(r for r in bench_rows("head_65536") if r["method"] == m) for m in ("Liger", found[-1][1]))
    words = f"Liger takes {liger['total_ms']:.0f} ms in {liger['transient_mib']:.0f} MiB, less than our"
    assert f"{words} {ours['total_ms']:.0f} ms there, with twice the error of dweight" in README.replace("\n", " ")
    assert 1.8 < liger["errors"]["dweight"] / ours["errors"]["dweight"] < 2.2


@pytest.mark.parametrize("name", FILES)
def test_the_plans_of_the_benchmark_are_todays_and_foresee_its_memory(name):
    planned = own_rows(name)
    assert len(planned) > 1
    for row in planned:
        today = plan_of(row)
        assert (today.schedule, today.chunk) == (row["plan"]["schedule"], row["plan"]["chunk"]), row["method"]
        assert today.transient_bytes / MIB == pytest.approx(row["transient_mib"], rel=0.02), row["method"]


def lesson() -> dict[str, tuple[float, float]]:
    """Predicted and measured by the letters before it, of the lesson's first table; GB and ms."""
    section = README[README.index("## The lesson") : README.index("The traps on the way")]
    found = re.findall(r"^\| (.+) \| ([\d.]+) (?:GB|ms) \| ([\d.]+) (?:GB|ms) \|$", section, flags=re.M)
    return {what: (float(predicted), float(measured)) for what, predicted, measured in found}


def test_the_lesson_predicts_and_measures_what_it_says():
    n, v, d = 8192, 128256, 4096
    mib = 2**20 / 1e9
    returned = 2 * (v * d + n * d) / 1e9  # gradients, which transient_mib leaves out

    def transient(method, name="head"):
        return bench_row(name, method, v)["transient_mib"] * mib

    def time(method, name="head"):
        (row,) = (r for r in bench_rows(name) if (r["method"], r["n_tokens"], r["vocab"]) == (method, n, v))
        return row["total_ms"]

    copy = statistics.median(row["copy_gb_per_s"] for row in bench_rows("logits")) * 1e6  # bytes a ms
    again = {chunk: 8 * v * d * (n // chunk - 1) / copy for chunk in (1024, 2048, 4096)}
    right = [
        (6 * n * v / 1e9, transient("eager bf16") + returned),
        (12 * n * v / 1e9, transient("eager fp32") + returned),
        (2 * n * v / 1e9, transient("inplace")),
        (1024 * (2 * v + 6 * d) / 1e9, transient("ours C=1024", "head_fp32_weight") - 2 * v * d / 1e9),
        (4 * v * d / 1e9, transient("ours C=1024")),
        (6 * n * v / copy, time("logits in place", "logits")),
        (6 * n * v / copy, time("logits forward, backward", "logits")),
        *((again[chunk], time(f"ours C={chunk}") - time("ours whole")) for chunk in (4096, 2048, 1024)),
    ]
    assert list(lesson().values()) == [tuple(round(value, 2) for value in pair) for pair in right]
    assert "copies at 4.25 TB/s" in README
    assert round(copy / 1e9, 2) == 4.25
    assert round(right[0][0] / right[3][0]) == 22
    assert f"would take {4 * n * v / copy:.2f} ms" in README.replace("\n", " ")
    assert f"would take {6 * n * v / 3.35e9:.2f} ms there" in README.replace("\n", " ")


def test_every_trap_names_a_test():
    named = re.findall(r"^\| .+ \| `(test_\w+)` \|$", README, flags=re.M)
    assert len(named) == 22
    defined = "".join(path.read_text() for path in (ROOT / "tests").glob("test_*.py"))
    assert [name for name in named if f"def {name}(" not in defined] == []


def test_every_target_and_file_it_names_exists():
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.M)
    assert set(re.findall(r"`?make ([a-z]+)", README)) <= set(targets)
    tree = README[README.index("## What is where") :]
    for path in re.findall(r"^    ([\w/.]+)  ", tree, flags=re.M):
        assert (ROOT / path).exists(), path
    for path in re.findall(r"\]\(([\w/.]+)\)", README):
        assert (ROOT / path).exists(), path


def test_its_tree_names_every_module():
    tree = README[README.index("## What is where") :]
    modules = [*(ROOT / "kernels").glob("*.py"), *(ROOT / "src").rglob("*.py")]
    names = [str(path.relative_to(ROOT)) for path in modules if path.name != "__init__.py"]
    assert [name for name in names if f"    {name} " not in tree] == []
