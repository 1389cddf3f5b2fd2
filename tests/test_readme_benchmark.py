"""What the README and docs/results/README.md say of the benchmark in words is what its rows say."""

import re

import pytest
from tiny import ROOT

from kernels import devices, plan
from logitless.records import read_records
from logitless.report import peer_table
from logitless.report.head_rows import is_budget

README = (ROOT / "README.md").read_text()
SECTION = " ".join(README[README.index("## Against others") : README.index("## Which backend")].split())
RESULTS = (ROOT / "docs" / "results" / "README.md").read_text()
FIRST, SECOND, THIRD, LONG = (8192, 128256, 4096), (32768, 50304, 768), (8192, 256000, 2304), (65536, 128256, 4096)
GIB = 1024  # MiB


def bench_rows(name: str) -> list[dict]:
    return read_records([ROOT / "docs" / "results" / "bench_h200" / f"{name}.jsonl"])


HEAD, LONG_HEAD = bench_rows("head"), bench_rows("head_65536")


def shape_of(row: dict) -> tuple:
    return row["n_tokens"], row["vocab"], row["width"]


def row_of(shape: tuple, method: str, inputs: str = "uniform", rows: list[dict] = HEAD + LONG_HEAD) -> dict:
    (row,) = (row for row in rows if (shape_of(row), row["method"], row["inputs"]) == (shape, method, inputs))
    return row


def ms(*arguments) -> str:
    return f"{row_of(*arguments)['total_ms']:.1f}"


def mib(*arguments) -> str:
    return f"{row_of(*arguments)['transient_mib']:,.0f}"


def error(*arguments) -> str:
    return f"{1000 * row_of(*arguments)['errors']['dweight']:.1f}"


def dweight_ratio(one: dict, other: dict) -> float:
    return one["errors"]["dweight"] / other["errors"]["dweight"]


def slabs(shape: tuple) -> list[dict]:
    rows = (row for row in HEAD + LONG_HEAD if shape_of(row) == shape and row["inputs"] == "uniform")
    return [row for row in rows if row.get("plan", {}).get("schedule") == "vocab" and row["method"].startswith("ours")]


def span(values: list[float], digits: int, joint: str = " to ") -> str:
    return joint.join(f"{value:,.{digits}f}" for value in (min(values), max(values)))


def test_the_first_figures_are_the_frontier_and_then_time_against_memory():
    figures = re.findall(r"!\[.+\]\(docs/report/(\w+)\.svg\)", README)
    assert figures == ["frontier", "head_time_memory", "backends", "peak_memory", "head_scaling", "training_loss"]


def test_the_peers_that_no_plan_of_ours_beats_are_those_that_it_names():
    unbeaten = {
        (shape_of(found.peer), found.peer["inputs"], found.peer["method"])
        for case in peer_table.cases(HEAD + LONG_HEAD)
        for found in peer_table.compare(case)
        if not found.is_beaten
    }
    both = [(FIRST, "uniform"), (SECOND, "uniform"), (FIRST, "peaked"), (SECOND, "peaked")]
    named = {(*case, method) for case in [*both, (THIRD, "uniform")] for method in ("CCE", "CCE unfiltered")}
    named |= {(*case, "CCE torch_compile") for case in both[::2]}
    named |= {(*case, method) for case in both[1::2] for method in ("Liger", "quack")}
    named |= {(SECOND, "peaked", "Liger fp32"), (LONG, "uniform", "Liger"), (LONG, "uniform", "Liger fp32")}
    assert unbeaten == named


def test_what_it_says_of_cce():
    cce = [row for row in HEAD if row["method"] in ("CCE", "CCE unfiltered")]
    smallest = [min(row["transient_mib"] for row in slabs(shape)) for shape in (FIRST, SECOND, THIRD)]
    words = (
        f"takes {span([row['transient_mib'] for row in cce], 0)} MiB on the first three shapes, the smallest of our "
    )
    assert words + f"plans {span(smallest, 0)}" in SECTION
    slower = {(shape_of(row), row["method"]) for row in cce if row["inputs"] == "uniform"} - {(THIRD, "CCE")}
    for shape, method in slower:
        assert row_of(shape, method)["total_ms"] > min(slabs(shape), key=lambda row: row["transient_mib"])["total_ms"]
    times, sizes = ([row[name] for row in slabs(THIRD)] for name in ("total_ms", "transient_mib"))
    words = f"256000 x 2304 it takes {ms(THIRD, 'CCE')} ms in {mib(THIRD, 'CCE')} MiB, and our vocabulary slabs "
    assert words + f"{span(times, 1)} ms in {span(sizes, 0)} MiB, with half its error" in SECTION
    assert all(0.45 < dweight_ratio(row, row_of(THIRD, "CCE")) < 0.55 for row in slabs(THIRD))
    compiled, eager = row_of(FIRST, "CCE torch_compile"), row_of(FIRST, "eager fp32")
    assert abs(dweight_ratio(compiled, eager) - 1) < 0.001
    ours = [row for row in HEAD if peer_table.is_ours(row) and (shape_of(row), row["inputs"]) == (FIRST, "uniform")]
    fastest = min(row["total_ms"] for row in ours if row["transient_mib"] < 2004)
    words = (
        f"{ms(FIRST, 'CCE torch_compile')} ms in {mib(FIRST, 'CCE torch_compile')} MiB on the first shape, with eager's"
    )
    assert f"{words} error; of ours in less than 2,004 MiB the fastest takes {fastest:.1f} ms" in SECTION
    compiled = row_of(FIRST, "torch.compile")
    before = [row["method"] for row in ours if row["total_ms"] <= compiled["total_ms"] and peer_table.mib(row) <= 2004]
    assert (peer_table.mib(compiled), before) == (2004, ["inplace"])
    words = f"Of ours in as much as `torch.compile` takes there, only `inplace` ({ms(FIRST, 'inplace')} ms) is as fast"
    assert f"{words} ({compiled['total_ms']:.1f} ms)" in SECTION


def test_what_it_says_of_liger_and_quack():
    liger, ours = (SECOND, "Liger"), (SECOND, "ours vocab C=640")
    assert mib(*liger) == mib(*ours)
    words = (
        f"takes {ms(*liger)} ms in {mib(*liger)} MiB on the second shape, with an error of {error(*liger)}; ours in as"
    )
    assert f"{words} much, with {error(*ours)}, took {ms(*ours)} ms at best" in SECTION
    quack, ours = row_of(SECOND, "quack"), row_of(SECOND, "ours C=4096")
    words = f"takes {quack['total_ms']:.1f} ms on the second shape, `ours C=4096` at about its memory"
    assert f"{words} {ours['total_ms']:.1f}; its error is two fifths larger" in SECTION
    assert 1.35 < dweight_ratio(quack, ours) < 1.45
    assert quack["time"] < ours["time"]
    failed = row_of(FIRST, "quack C=4096")
    assert "m == n makes row/col inference ambiguous" in failed["reason"]
    assert "`m == n makes row/col inference ambiguous`" in SECTION
    liger, ours = (SECOND, "Liger fp32", "peaked"), (SECOND, "ours within 64 MiB", "peaked")
    words = f"takes {ms(*liger)} ms in {mib(*liger)} MiB on the second shape with peaked inputs, ours in as much"
    assert f"{words} {ms(*ours)} ms; `ours vocab C=1024`, which is faster than it with uniform" in SECTION
    uniform = row_of(SECOND, "ours vocab C=1024")
    assert uniform["total_ms"] < row_of(SECOND, "Liger fp32")["total_ms"]
    assert (SECOND, "ours vocab C=1024", "peaked") not in {(shape_of(r), r["method"], r["inputs"]) for r in HEAD}
    liger, ours = (LONG, "Liger fp32"), (LONG, "ours within 4096 MiB")
    words = f"`Liger fp32` takes {row_of(*liger)['total_ms']:.0f} ms in {mib(*liger)} MiB; our next larger plan"
    assert f"{words} {row_of(*ours)['total_ms']:.0f} ms in {mib(*ours)}." in SECTION
    assert {row["gold"] for row in LONG_HEAD} == {"fp32"}
    assert {row["gold"] for row in HEAD if "gold" in row} == {"fp64"}


def test_what_it_says_of_the_evaluation():
    own, other = row_of(FIRST, "evaluation"), row_of(FIRST, "evaluation eager")
    assert own["time"] == other["time"]
    ratios = [own["ratio"], own["total_ms"] / other["gemm_ms"]]
    words = (
        f"This took {own['gemm_ms']:.1f} ms beside it, but {other['gemm_ms']:.1f} ms beside the next row, which makes"
    )
    words += f" {ratios[0]:.2f} or {ratios[1]:.2f}; on the second and third shape it is"
    words += f" {row_of(SECOND, 'evaluation')['ratio']:.2f} and {row_of(THIRD, 'evaluation')['ratio']:.2f}."
    assert words in SECTION
    assert f"in the same run, it is {ratios[1]:.2f}" in RESULTS


def arithmetic(shape: tuple, method: str) -> float:
    """As README has it: exponentials while no product runs, dweight's sum read and written again, a fourth product."""
    n, v, d = shape
    row = row_of(shape, method)
    epilogue = 128 / (3 * d)
    if row["plan"]["schedule"] == "vocab":
        return 4 / 3 + 2 * epilogue
    return 1 + epilogue + 8 * v * d * (-(-n // row["plan"]["chunk"]) - 1) / 4.25e9 / row["gemm_ms"]


def targets() -> list[list[str]]:
    """Shape, plan, target, GiB, measured, GiB and verdict."""
    lines = RESULTS[RESULTS.index("## Targets") :].splitlines()
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in lines if re.match(r"\| \d+ x \d+ x ", line)]


def test_the_targets_are_met_and_missed_as_it_says():
    set_beforehand = [line[2:4] for line in targets()]
    assert set_beforehand == [
        *(["1.03", "2.1"], ["1.20", "0.27"], ["1.43", "0.17"], ["1.38", "0.17"], ["1.50", "0.062"]),
        *(["1.12", "0.47"], ["1.20", "0.35"], ["1.08", "3.2"], ["1.02", "4.05"], ["1.10", "3.2"], ["1.08", "0.1"]),
        *(["report", "1"], ["report", "4"]),
    ]
    weights = bench_rows("head_fp32_weight")
    for case, method, target, within, *found, verdict in targets():
        name, _, kind = case.partition(", ")
        shape = tuple(map(int, name.split(" x ")))
        is_fp32 = kind == "fp32 weight"
        row = row_of(shape, method, "uniform", weights) if is_fp32 else row_of(shape, method)
        copy = is_fp32 * 2 * row["vocab"] * row["width"] / 2**20
        assert not is_fp32 or f"the bf16 copy that autocast makes ({copy:,.0f})" in SECTION
        size = (row["transient_mib"] - copy) / GIB
        assert found == [f"{row['ratio']:.2f}", f"{size:.3f}"], case
        assert size <= float(within)
        right = "" if target == "report" else "met" if row["ratio"] <= float(target) else "missed"
        assert verdict == right, (case, method)


def test_every_missed_target_is_in_the_readme_with_what_arithmetic_says():
    missed = [line for line in targets() if line[-1] == "missed"]
    found = re.findall(r"^\| (\d+ x [^,|]+), (ours [^|]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", README, flags=re.M)
    right = []
    for case, method, target, _, measured, *_ in missed:
        name = case.partition(",")[0]
        by_arithmetic = f"{arithmetic(tuple(map(int, name.split(' x '))), method):.2f}"
        right.append((name, method, target, measured, by_arithmetic))
    assert sorted(found) == sorted(right)


def test_the_arithmetic_beside_the_missed_targets():
    assert 128 * 256 * 64 / 2048 == 1024
    words = (
        "a tile of 128 x 256 logits is $D/64$ steps of 1,024 cycles (2,048 multiply-adds a cycle and multiprocessor)"
    )
    assert words in SECTION
    assert 128 * 256 / 16 == 32768 / 16 == 2048
    assert "32,768 exponentials at 16 a cycle, 2,048 cycles in which no matrix product runs" in SECTION
    assert "At $D = 768$ these are a seventh of a tile's 14,336 cycles, and $128/3D$ of all three products" in SECTION
    assert "there are $8VD$ bytes for each further chunk at 4.25 TB/s" in SECTION
    assert 768 // 64 * 1024 + 2048 == 14336 == 7 * 2048
    words = ", ".join(f"{128 / (3 * d):.2f}" for d in (768, 2304)) + f" and {128 / (3 * 4096):.2f} at the three widths"
    assert words in SECTION
    budget, chunk = row_of(SECOND, "ours within 480 MiB"), row_of(SECOND, "ours C=2048")
    assert budget["plan"]["chunk"] == 3712
    sums = [arithmetic(SECOND, row["method"]) - 1 - 128 / (3 * 768) for row in (budget, chunk)]
    assert f"another {sums[0]:.2f} at C=3712 and {sums[1]:.2f} at C=2048" in SECTION
    tiles = [c // 128 * (768 // 256) for c in (3712, 2048, 4096)]
    assert f"dhidden has {tiles[0]} tiles at C=3712 and {tiles[1]} at C=2048 for 132 multiprocessors" in SECTION
    larger = row_of(SECOND, "ours C=4096")
    assert round(larger["transient_mib"] - 0.47 * GIB) == 4
    words = (
        f"`ours C=4096`, with {tiles[2]}, takes {larger['ratio']:.2f} in {mib(SECOND, 'ours C=4096')} MiB, 4 more than"
    )
    assert words in SECTION
    gemms = [row["gemm_ms"] for row in HEAD if shape_of(row) == SECOND and "backward_ms" in row]
    assert max(gemms) / min(gemms) > row_of(SECOND, "ours whole")["ratio"] / 1.08


def test_what_peaked_inputs_change():
    pairs = {
        (shape_of(row), row["method"]): (row_of(shape_of(row), row["method"]), row)
        for row in HEAD
        if row["inputs"] == "peaked" and row["status"] == "ok"
    }
    assert {shape for shape, _ in pairs} == {FIRST, SECOND}
    changed = {key for key, (u, p) in pairs.items() if abs(p["total_ms"] / u["total_ms"] - 1) >= 0.02}
    own = ("ours C=1024", "ours vocab C=640", "ours within 64 MiB")
    assert "change the times of all rows by less than 2%, but for these" in SECTION
    assert "`ours vocab C=640`, which is also that of `ours within 64 MiB`" in SECTION
    assert changed == {(FIRST, "CCE"), *((SECOND, method) for method in own)}
    both = {key: [f"{row['total_ms']:.1f}" for row in pair] for key, pair in pairs.items()}
    uniform, peaked = both[FIRST, "CCE"]
    words = f"takes {peaked} ms instead of {uniform} on the first shape, though no less on the second"
    uniform, peaked = both[SECOND, "CCE"]
    assert f"{words} ({peaked} and {uniform})" in SECTION
    uniform, peaked = both[SECOND, "ours C=1024"]
    assert f"On the second `ours C=1024` takes {peaked} ms instead of {uniform}." in SECTION
    slabs, budget = both[SECOND, "ours vocab C=640"], both[SECOND, "ours within 64 MiB"]
    words = f"took {slabs[0]} and {budget[0]} ms with uniform and {slabs[1]} and {budget[1]} ms with peaked inputs"
    assert words in SECTION
    for i in (0, 1):
        plans = [pairs[SECOND, method][i]["plan"] for method in own[1:]]
        assert plans[0] == plans[1]

    def growth(method: str) -> float:
        uniform, peaked = pairs[FIRST, method]
        return peaked["errors"]["loss"] / uniform["errors"]["loss"]

    words = (
        f"{growth('eager fp32'):.0f}-fold for eager, {growth('CCE'):.0f}-fold for CCE and {growth('ours whole'):.1f}"
    )
    assert f"{words}-fold for ours" in SECTION
    eager, liger, ours = (
        " to ".join(f"{1000 * row['errors']['dweight']:.1f}" for row in pairs[FIRST, method])
        for method in ("eager fp32", "Liger", "ours whole")
    )
    assert f"from {eager} for eager and from {liger} for Liger, but from {ours} for `ours whole`" in SECTION


def test_the_sizes_of_slabs_and_the_first_calls():
    sizes = [row["transient_mib"] for shape in (FIRST, SECOND, THIRD) for row in slabs(shape)]
    (large,) = slabs(LONG)
    words = f"{span(sizes, 0)} MiB in the rows below, {large['transient_mib']:.0f} MiB for 65,536 tokens"
    assert words in " ".join(README.split())
    rows = HEAD + LONG_HEAD + bench_rows("head_fp32_weight") + bench_rows("scaling")
    own = [row for row in rows if peer_table.is_ours(row) or row["method"] == "evaluation"]
    calls = [row["first_call_s"] for row in own if "first_call_s" in row]
    assert f"took {min(calls):.3f} to {max(calls):.1f} s" in SECTION
    assert f"at most {max(calls):.1f} s" in RESULTS
    assert {row["versions"]["torch"].partition("+")[0] for row in rows} == {"2.11.0"}
    assert "`F.linear_cross_entropy` is not in torch 2.11." in SECTION


def minute(time: str) -> int:
    """Minutes since noon."""
    hours, minutes = map(int, time.split(":"))
    return (hours - 12) % 24 * 60 + minutes


def test_each_row_is_in_the_table_of_times_beside_the_newest_commit_by_then():
    lines = re.findall(
        r"^\| (\d\d:\d\d) \| (\d+) \| (\w+) \((\d\d:\d\d)\) \| `(\w+)\.jsonl` \| (.+) \|$", RESULTS, flags=re.M
    )
    commits = {(commit, time) for _, _, commit, time, _, _ in lines}
    assert len(commits) == 4
    names = ("head", "head_fp32_weight", "head_65536", "scaling", "logits")
    rows = [(name, row) for name in names for row in bench_rows(name)]
    ordinals = {FIRST: "first", SECOND: "second", THIRD: "third"}
    for time, count, commit, _, name, which in lines:
        newest = max((c for c in commits if minute(c[1]) <= minute(time)), key=lambda c: minute(c[1]))
        assert commit == newest[0], time
        here = [row for file, row in rows if (file, row["time"][11:16]) == (name, time)]
        if shape := re.match(r"(\w+) shape", which):
            here = [row for row in here if ordinals[shape_of(row)] == shape[1]]
        if kind := re.search(r", (uniform|peaked):", which):
            here = [row for row in here if row["inputs"] == kind[1]]
        assert len(here) == int(count), (time, name, which)
    assert sum(int(line[1]) for line in lines) == len(rows)
    assert {row["time"][:10] for _, row in rows} == {"2026-11-29", "2026-11-30"}
    assert all((row["time"][:10] == "2026-11-29") == (minute(row["time"][11:16]) < 12 * 60) for _, row in rows)


@pytest.mark.parametrize("name", ["head", "head_fp32_weight", "head_65536", "scaling"])
def test_rows_older_than_the_shared_buffers_needed_up_to_16_mib_more(name):
    device = devices.DEVICES["NVIDIA H200"]
    for row in bench_rows(name):
        if row.get("plan", {}).get("schedule") != "tokens" or not peer_table.is_ours(row):
            continue
        head = plan.Head(*shape_of(row), row["dtype"], row["weight_dtype"], grads=(True, True, False))
        today = plan.predict(head, device, schedule="tokens", chunk=row["plan"]["chunk"]).transient_bytes
        more = (row["plan"]["transient_bytes"] - today) / 2**20
        assert (0 <= more <= 16) if row["time"] < "2026-11-30T01:42:26" else more == 0, (row["method"], is_budget(row))
