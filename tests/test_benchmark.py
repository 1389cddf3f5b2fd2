"""The benchmark on tiny heads and a CPU: that its rows are right, whatever the numbers."""

import json
import math

import heads
import pytest
import torch
from test_scripts import script
from tiny import ROOT

from kernels.reference import Objective
from logitless import benchmark, head_figures, peers
from logitless.benchmark import Case, append_row, bench
from logitless.measurements import peak_bytes
from logitless.problems import IGNORE, KINDS, Shape, make_gold, make_inputs, make_logits
from logitless.records import read_records
from logitless.trials import LogitsTrial

CPU = torch.device("cpu")
FAST = ["ours", "inplace", "eager"]  # no torch.compile, which takes seconds


def case(shape: str = "70x33x8", kind: str = "uniform", dtype: str = "fp32", weight_dtype: str = "fp32") -> Case:
    return Case(Shape.parse(shape), kind, dtype, weight_dtype, CPU)


def inputs_of(kind: str, shape: str = "700x1000x64"):
    options = {"dtype": torch.float32, "weight_dtype": torch.float32, "device": CPU, "sets": 2}
    return make_inputs(Shape.parse(shape), kind, **options)


@pytest.fixture(scope="module")
def rows() -> dict[str, dict]:
    return {row["method"]: row for row in bench([case("4096x64x8")], FAST)}


def test_every_row_is_complete_and_finite(rows):
    chunks = [f"ours C={chunk}" for chunk in peers.CHUNKS if chunk < 4096]
    assert list(rows) == [*chunks, "ours whole", "inplace", "eager fp32"]
    for row in rows.values():
        assert (row["status"], row["inputs"], row["gold"]) == ("ok", "uniform", "fp64")
        assert (row["n_tokens"], row["vocab"], row["width"]) == (4096, 64, 8)
        assert (row["dtype"], row["weight_dtype"]) == ("fp32", "fp32")
        for name in ("forward_ms", "backward_ms", "total_ms", "gemm_ms", "copy_gb_per_s", "transient_mib"):
            assert 0 < row[name] < math.inf
        assert row["repetitions"] >= 3
        assert row["versions"]["torch"] == torch.__version__
        assert {"device", "commit", "command", "time"} <= row.keys()
        assert "package" not in row
    json.dumps(rows)


def test_ratio_is_to_the_gemms_and_total_is_no_less_than_its_parts(rows):
    for row in rows.values():
        assert row["ratio"] == pytest.approx(row["total_ms"] / row["gemm_ms"])
        assert row["total_ms"] >= 0.5 * (row["forward_ms"] + row["backward_ms"])  # medians do not add up


def test_chunks_need_less_memory_than_eager(rows):
    logits_mib = 4096 * 64 * 4 / 2**20
    assert rows["ours C=1024"]["transient_mib"] < 0.6 * logits_mib
    assert rows["inplace"]["transient_mib"] >= logits_mib
    assert rows["eager fp32"]["transient_mib"] >= 2 * logits_mib


def test_peak_memory_is_above_what_was_there_before_and_sees_inside_operators():
    old, held = torch.ones(1000), []

    @torch.library.custom_op("logitless_test::double_twice", mutates_args=())
    def double_twice(x: torch.Tensor) -> torch.Tensor:
        return (x + x) + (x + x)  # three tensors at once, two of them inside the operator

    peak = peak_bytes(CPU, [lambda: held.append(double_twice(old)), lambda: held.append(old[:10])])
    assert peak == 3 * old.nbytes
    assert peak_bytes(CPU, [held.clear, lambda: held.append(old + old)]) == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weight_dtype", ["bf16", "fp32"])
def test_our_errors_are_near_those_of_eager(kind, weight_dtype):
    rows = {row["method"]: row for row in bench([case("70x300x64", kind, "bf16", weight_dtype)], FAST)}
    assert {"ours whole", "inplace", "eager fp32", "eager bf16"} == set(rows)
    for method in ("ours whole", "inplace"):
        for name, error in rows[method]["errors"].items():
            assert error <= 2 * rows["eager fp32"]["errors"][name] + 2**-9, (method, name)
    assert all(1e-5 < row["errors"]["dweight"] < 2e-2 for row in rows.values())


def test_gold_is_the_gold_of_the_tests():
    inputs = inputs_of("peaked")[0]
    gold = make_gold(inputs)
    kept = int((inputs.labels != IGNORE).sum())
    right = heads.gold(inputs.hidden, inputs.weight, None, inputs.labels, Objective(), upstream=1 / kept)
    for value, name in ((gold.loss * kept, "loss"), (gold.dhidden, "dhidden"), (gold.dweight, "dweight")):
        assert heads.relative_error(value, right[name]) < 1e-13


def test_gold_beyond_its_limit_is_fp32_and_says_so(monkeypatch):
    monkeypatch.setattr("logitless.problems.FP64_LIMIT", 1000)
    (row,) = bench([case()], ["eager fp32"])
    assert row["gold"] == "fp32"


def label_probabilities(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    kept = labels != IGNORE
    return logits[kept].float().softmax(dim=1).gather(1, labels[kept, None])[:, 0]


def test_peaked_inputs_have_likely_labels_and_uniform_ones_do_not():
    p = {}
    for kind in KINDS:
        hidden, weight, labels = inputs_of(kind)[0]
        p[kind] = label_probabilities((hidden @ weight.t()).detach(), labels)
        alike = make_logits(Shape(700, 1000, None), kind, torch.float32, torch.Generator().manual_seed(0))
        assert label_probabilities(*alike).median() == pytest.approx(float(p[kind].median()), abs=0.3)
    assert p["uniform"].max() < 0.1
    assert p["peaked"].median() > 0.3
    assert p["peaked"].min() < 1e-2
    assert p["peaked"].max() > 0.999


def test_one_row_in_twenty_is_ignored_and_what_counts_is_no_power_of_two():
    for n_tokens in (40, 134, 2048, 8192):  # 134 less a twentieth is 128
        for kind in KINDS:
            _, _, labels = inputs_of(kind, f"{n_tokens}x50x8")[0]
            kept = int((labels != IGNORE).sum())
            assert 0.93 < kept / n_tokens < 0.96
            assert kept & (kept - 1)


def test_sets_share_the_weight_and_nothing_else():
    first, second = inputs_of("peaked")
    assert first.weight is second.weight
    assert not torch.equal(first.hidden, second.hidden)
    assert not torch.equal(first.labels, second.labels)


def families(monkeypatch, **implementations) -> None:
    table = [peers.Family(name, "no-such-package", False, make) for name, make in implementations.items()]
    monkeypatch.setattr(benchmark, "FAMILIES", (*table, *peers.FAMILIES))


def test_a_peer_that_is_not_installed_or_needs_cuda_is_named_absent(monkeypatch):
    def missing(n_tokens, dtype):
        from no_such_package import loss

        return {"missing": loss}

    peer = peers.Family("cuda", "no-such-package", True, lambda n_tokens, dtype: {"cuda loss": peers.eager_fp32})
    families(monkeypatch, missing=missing)
    monkeypatch.setattr(benchmark, "FAMILIES", (peer, *benchmark.FAMILIES))
    rows = {row["method"]: row for row in bench([case()], ["missing", "cuda", "eager"])}
    assert rows["missing"]["status"] == "absent"
    assert rows["missing"]["reason"] == "ModuleNotFoundError: No module named 'no_such_package'"
    assert (rows["cuda"]["status"], rows["cuda"]["reason"]) == ("absent", "needs CUDA")
    assert rows["missing"]["versions"]["no-such-package"] is None
    assert rows["eager fp32"]["status"] == "ok"


def test_a_method_that_raises_leaves_a_row_and_the_bench_goes_on(monkeypatch):
    def wrong(hidden, weight, labels):
        raise ValueError(f"no {hidden.dtype}")

    def huge(hidden, weight, labels):
        return torch.empty(2**60)

    def broken(n_tokens, dtype):
        raise AttributeError("of another version")

    family = {"bad": lambda n_tokens, dtype: {"bad wrong": wrong, "bad huge": huge}, "broken": broken}
    families(monkeypatch, **family)
    rows = {row["method"]: row for row in bench([case()], ["b", "eager"])}
    assert (rows["bad wrong"]["status"], rows["bad wrong"]["reason"]) == ("error", "ValueError: no torch.float32")
    assert rows["bad huge"]["status"] == "oom"
    assert (rows["broken"]["status"], rows["broken"]["reason"]) == ("error", "AttributeError: of another version")
    assert rows["eager fp32"]["status"] == "ok"


def test_inputs_that_do_not_fit_are_a_row_and_the_bench_goes_on():
    rows = list(bench([case("8x999999999999x8"), case()], ["eager"]))
    assert [row["status"] for row in rows] == ["oom", "ok"]
    assert rows[0]["method"] == "inputs and gold"


def test_a_word_asks_for_its_very_name_or_for_all_that_begin_with_it():
    names = ["Liger", "Liger fp32", "CCE", "eager fp32"]
    assert peers.chosen(names, ["liger"]) == ["Liger"]
    assert peers.chosen(names, ["lig", "eager"]) == ["Liger", "Liger fp32", "eager fp32"]
    with pytest.raises(ValueError, match="begins with 'xyz'"):
        next(bench([case()], ["ours", "xyz"]))


def test_compiled_functions_are_timed_and_measured_compiled(monkeypatch):
    traced = []

    def loss(hidden, weight, labels):
        traced.append(torch.compiler.is_compiling())
        return peers.eager_fp32(hidden, weight, labels)

    compiled = torch.compile(loss, backend=lambda graph, examples: graph.forward, dynamic=False)
    family = peers.Family("torch.compile", "torch", False, lambda n_tokens, dtype: {"torch.compile": compiled})
    monkeypatch.setattr(benchmark, "FAMILIES", [family])
    (row,) = bench([case()], None)
    assert row["status"] == "ok"
    assert set(traced) == {True}  # never run as it stands


def test_kernels_on_logits_are_timed_against_copies():
    rows = {row["method"]: row for row in bench([case("60x33", "peaked")], None)}
    assert list(rows) == list(benchmark.LOGITS_KERNELS)
    for row in rows.values():
        assert row["status"] == "ok"
        assert row["width"] is None
        copy_ms = 2 * 60 * 33 * 4 / row["copy_gb_per_s"] / 1e6
        assert row["one_read_one_write_ms"] == pytest.approx(copy_ms)
        assert row["two_reads_one_write_ms"] == pytest.approx(1.5 * copy_ms)
        assert row["total_ms"] > 0


def test_every_repetition_on_logits_finds_fresh_ones():
    generator = torch.Generator().manual_seed(0)
    sets = [make_logits(Shape(60, 33, None), "uniform", torch.float32, generator) for _ in range(2)]
    trial = LogitsTrial(sets)
    for repetition in (0, 1, 2):
        trial.measure("logits in place")
        trial._prepare(repetition)
        assert torch.equal(trial.logits, sets[repetition % 2][0])
        assert trial.labels is sets[repetition % 2][1]


@pytest.mark.parametrize("text", ["8x9x", "8", "0x1x2", "8x9x10x11", "axbxc", "-8x9x1"])
def test_a_shape_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match="a shape is"):
        Shape.parse(text)


def row_of(n_tokens, vocab, width, method="ours", **more) -> dict:
    numbers = {"ratio": 1.5, "total_ms": 3.0, "gemm_ms": 2.0, "transient_mib": 10.0}
    facts = {"device": "a GPU", "versions": {"torch": "2"}, "commit": "c0ffee", "command": "--shapes ..."}
    row = {"method": method, "status": "ok", "inputs": "uniform", "dtype": "bf16", "weight_dtype": "bf16"}
    return row | facts | numbers | {"n_tokens": n_tokens, "vocab": vocab, "width": width} | more


def test_sweeps_are_the_shapes_that_differ_from_the_base_in_one_size():
    shapes = [(8, 9, 4), (16, 9, 4), (32, 9, 4), (8, 20, 4), (8, 9, 5), (100, 200, 4), (16, 9, 5)]
    sweeps = head_figures.find_sweeps([row_of(*shape) for shape in shapes])
    assert sweeps.base == (8, 9, 4)
    assert sweeps.sizes == {"n_tokens": [8, 16, 32], "vocab": [9, 20], "width": [4, 5]}
    assert sweeps.shapes() == set(shapes) - {(100, 200, 4), (16, 9, 5)}
    assert head_figures.find_sweeps([row_of(8, 9, 4), row_of(16, 9, 4), row_of(8, 20, 4)]) is None
    assert head_figures.find_sweeps([]) is None


def test_a_later_row_replaces_an_earlier_one_and_logits_are_no_head():
    rows = [row_of(8, 9, 4, ratio=1.0), row_of(8, 9, 4, inputs="peaked"), row_of(8, 9, None), row_of(8, 9, 4)]
    assert [(row["inputs"], row["ratio"]) for row in head_figures.latest(rows)] == [("uniform", 1.5), ("peaked", 1.5)]


def test_time_memory_has_a_panel_for_each_case_outside_of_the_sweep():
    sweep = [row_of(n, 9, 4) for n in (8, 16, 32)]
    alone = [row_of(100, 200, 4, method, inputs=kind) for kind in KINDS for method in ("ours", "CCE")]
    failed = row_of(100, 200, 4, "Liger", status="oom", transient_mib=None)
    drawing = json.dumps(head_figures.head_time_memory([*sweep, *alone, failed]).to_dict())
    assert drawing.count("N = 100, V = 200, D = 4, ") == 2
    assert "N = 8" not in drawing
    assert "Liger: oom" in drawing
    assert drawing.count('"CCE"') >= 2
    for fact in ("a GPU", "torch 2", "c0ffee", "python scripts/bench.py --shapes"):
        assert fact in drawing
    assert head_figures.head_time_memory([row_of(8, 9, 4, status="absent", transient_mib=None)]) is None


def test_scaling_has_a_line_a_method_the_limit_and_a_cross_where_memory_ran_out():
    rows = [row_of(n, 9, 4, method) for n in (8, 16, 32) for method in ("ours", "CCE")]
    rows += [row_of(8, 9, 4, inputs="peaked"), row_of(100, 200, 4, "stranger")]
    oom = row_of(64, 9, 4, "eager") | dict.fromkeys(("total_ms", "transient_mib")) | {"status": "oom"}
    del oom["gemm_ms"]
    chart = head_figures.head_scaling([*rows, oom]).to_dict()
    assert [len(line["hconcat"]) for line in chart["vconcat"]] == [1, 1]
    time, memory = (line["hconcat"][0]["layer"] for line in chart["vconcat"])
    assert sorted({(point["size"], point["method"]) for point in time[0]["data"]["values"]}) == [
        (n, method) for n in (8, 16, 32) for method in ("CCE", "ours")
    ]
    assert [(point["size"], point["method"]) for point in memory[1]["data"]["values"]] == [(64, "eager")]
    assert time[2]["data"]["values"] == [{"size": n, "value": 2.0} for n in (8, 16, 32)]
    assert len(memory) == 2
    assert head_figures.head_scaling([row_of(8, 9, 4)]) is None


def test_labels_cover_neither_points_nor_each_other():
    points = [(100 + 3 * (i % 3), 100 + 2 * i) for i in range(8)]
    labels = [f"a long method {i}" for i in range(8)]
    places = head_figures.place_labels(points, labels, 150)
    boxes = [(x, y - 5, x + head_figures.LETTER_WIDTH * len(labels[0]), y + 5) for x, y in places]
    for i, box in enumerate(boxes):
        assert not any(box[0] < x < box[2] and box[1] < y < box[3] for x, y in points)
        for other in boxes[:i]:
            assert box[2] <= other[0] or other[2] <= box[0] or box[3] <= other[1] or other[3] <= box[1]


def test_the_scripts_bench_and_then_draw(tmp_path):
    shapes = "40x50x8,80x50x8,160x50x8,90x30x16"
    options = ("--shapes", shapes, "--methods", "ours,eager,quack", "--dtype", "fp32", "--inputs", "peaked")
    options += ("--out", "bench/head.jsonl")
    result = script(tmp_path, "bench", *options)
    assert result.returncode == 0, result.stderr
    assert "80x50x8 peaked, fp32, fp32 weight, cpu" in result.stdout
    assert "absent: " in result.stdout
    rows = read_records([tmp_path / "bench" / "head.jsonl"])
    assert len(rows) == 4 * 3
    assert {row["command"] for row in rows} == {" ".join(options)}
    result = script(tmp_path, "report", "bench/head.jsonl", "--out", "figures")
    assert result.returncode == 0, result.stderr
    for name in ("head_time_memory", "head_scaling"):
        assert "eager fp32" in (tmp_path / "figures" / f"{name}.svg").read_text()
        assert (tmp_path / "figures" / f"{name}.png").stat().st_size > 1000
    assert not (tmp_path / "figures" / "backends.svg").exists()


def test_the_script_refuses_what_it_does_not_know_in_one_line(tmp_path):
    result = script(tmp_path, "bench", "--shapes", "8x9x4", "--methods", "no such")
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith("bench.py: error: no implementation's name begins with 'no such'")


def test_a_number_that_is_not_finite_is_written_as_null(tmp_path):
    append_row({"method": "ours", "ratio": math.nan}, tmp_path / "new" / "rows.jsonl")
    append_row({"method": "CCE"}, tmp_path / "new" / "rows.jsonl")
    lines = (tmp_path / "new" / "rows.jsonl").read_text().splitlines()
    assert list(map(json.loads, lines)) == [{"method": "ours", "ratio": None}, {"method": "CCE"}]


def test_the_peers_are_pinned_where_they_are_compared():
    text = (ROOT / "pyproject.toml").read_text()
    for family in peers.FAMILIES:
        if family.needs_cuda:
            assert f'"{family.package}==' in text
