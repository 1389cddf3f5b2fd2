"""The benchmark on tiny heads and a CPU: that its rows are right, whatever the numbers."""

import json
import math

import heads
import pytest
import torch
from test_scripts import script
from tiny import ROOT

from kernels.reference import Objective
from logitless.bench import benchmark, peers
from logitless.bench.benchmark import Case, bench
from logitless.bench.inputs import IGNORE, KINDS, Shape, make_gold, make_inputs, make_logits
from logitless.bench.measurements import MeasuredLogits
from logitless.memory import peak_bytes
from logitless.records import append_line, read_records

CPU = torch.device("cpu")
FAST = ["ours", "inplace", "eager"]  # no torch.compile, which takes seconds


def case(shape: str = "70x33x8", kind: str = "uniform", dtype: str = "fp32", weight_dtype: str = "fp32") -> Case:
    return Case(Shape.parse(shape), kind, dtype, weight_dtype, CPU)


def inputs_of(kind: str, shape: str = "700x1000x64"):
    options = {"dtype": torch.float32, "weight_dtype": torch.float32, "device": CPU, "sets": 2}
    return make_inputs(Shape.parse(shape), kind, **options)


WITHIN = [f"ours within {budget} MiB" for budget in peers.BUDGETS_MIB]


@pytest.fixture(scope="module")
def rows() -> dict[str, dict]:
    return {row["method"]: row for row in bench([case("4096x64x8")], FAST)}


def test_every_row_is_complete_and_finite(rows):
    chunks = [f"ours C={chunk}" for chunk in peers.CHUNKS if chunk < 4096]
    slabs = [f"ours vocab C={chunk}" for chunk in peers.SLABS]
    assert list(rows) == [*chunks, "ours whole", *slabs, *WITHIN, "inplace", "eager fp32"]
    for row in rows.values():
        assert (row["status"], row["inputs"], row["gold"]) == ("ok", "uniform", "fp64")
        assert (row["n_tokens"], row["vocab"], row["width"]) == (4096, 64, 8)
        assert (row["dtype"], row["weight_dtype"]) == ("fp32", "fp32")
        for name in ("forward_ms", "backward_ms", "total_ms", "gemm_ms", "ratio", "copy_gb_per_s", "transient_mib"):
            assert 0 < row[name] < math.inf
        assert row["repetitions"] >= 3
        assert row["versions"]["torch"] == torch.__version__
        assert {"device", "commit", "command", "time"} <= row.keys()
        assert "package" not in row
    json.dumps(rows)


def test_our_rows_hold_their_plans(rows):
    for method, row in rows.items():
        assert ("plan" in row) == method.startswith("ours")
    assert rows["ours C=1024"]["plan"]["chunk"] == 1024
    assert rows["ours vocab C=640"]["plan"]["schedule"] == "vocab"
    for method in ("ours whole", "ours C=2048", "ours vocab C=640"):
        transient = rows[method]["plan"]["transient_bytes"] / 2**20
        assert rows[method]["transient_mib"] == pytest.approx(transient, rel=0.02, abs=0.06)  # masks of labels


def test_an_evaluation_has_no_gradient_and_the_first_gemm_as_its_yardstick():
    ours, eager = bench([case("4096x300x64")], ["evaluation"])
    for row in (ours, eager):
        assert row["status"] == "ok"
        assert "backward_ms" not in row
        assert row["errors"].keys() == {"loss"}
        assert row["errors"]["loss"] < 1e-6
    assert ours["transient_mib"] < eager["transient_mib"] / 2
    (head,) = bench([case("4096x300x64")], ["inplace"])
    assert ours["gemm_ms"] < 0.7 * head["gemm_ms"]


def test_the_total_is_no_less_than_the_longer_of_its_parts(rows):
    for row in rows.values():
        assert row["total_ms"] >= max(row["forward_ms"], row["backward_ms"])  # medians do not add up


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
    assert {"ours whole", *WITHIN, "inplace", "eager fp32", "eager bf16"} == set(rows)
    for method in ("ours whole", WITHIN[0], "inplace"):
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
    monkeypatch.setattr("logitless.bench.inputs.FP64_LIMIT", 1000)
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


def add_families(monkeypatch, **implementations) -> None:
    table = [peers.Family(name, "no-such-package", False, make) for name, make in implementations.items()]
    monkeypatch.setattr(benchmark, "FAMILIES", (*table, *peers.FAMILIES))


def test_a_peer_that_is_not_installed_or_needs_cuda_is_named_absent(monkeypatch):
    def missing(n_tokens, dtype):
        from no_such_package import loss

        return {"missing": loss}

    peer = peers.Family("cuda", "no-such-package", True, lambda n_tokens, dtype: {"cuda loss": peers.eager_fp32})
    add_families(monkeypatch, missing=missing)
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
    add_families(monkeypatch, **family)
    rows = {row["method"]: row for row in bench([case()], ["b", "eager"])}
    assert (rows["bad wrong"]["status"], rows["bad wrong"]["reason"]) == ("error", "ValueError: no torch.float32")
    assert rows["bad huge"]["status"] == "oom"
    assert (rows["broken"]["status"], rows["broken"]["reason"]) == ("error", "AttributeError: of another version")
    assert rows["eager fp32"]["status"] == "ok"


def test_inputs_that_do_not_fit_are_a_row_and_the_bench_goes_on():
    rows = list(bench([case("8x999999999999x8"), case()], ["eager"]))
    assert [row["status"] for row in rows] == ["oom", "ok"]
    assert rows[0]["method"] == "inputs and gold"


def test_a_word_asks_for_all_names_that_begin_with_it_in_any_case():
    names = ["Liger", "Liger fp32", "CCE", "eager fp32"]
    assert peers.chosen(names, ["liger"]) == ["Liger", "Liger fp32"]
    assert peers.chosen(names, ["LIGER F", "eager"]) == ["Liger fp32", "eager fp32"]
    assert peers.chosen(names, ["iger", "CCE x"]) == []


@pytest.mark.parametrize("word", ["xyz", "ours xyz", "ours C=1000", "eager fp64", "inplace 2", "logits sideways"])
def test_a_word_that_asks_for_nothing_in_any_case_is_refused_before_anything_is_measured(word):
    with pytest.raises(ValueError, match=f"no implementation's name begins with '{word}'"):
        bench([case(), case("60x33")], ["ours", word])  # without `next`


def test_a_word_that_asks_for_nothing_in_this_case_leaves_a_row(monkeypatch):
    def missing(n_tokens, dtype):
        raise ImportError("nowhere")

    add_families(monkeypatch, missing=missing)
    words = ["OURS c=4096", "eager bf16", "logits in", "missing fp32"]
    head, logits = ({row["method"]: row for row in bench([case(shape)], words)} for shape in ("70x33x8", "60x33"))
    assert {row["status"] for row in head.values()} == {"absent"}
    assert head["OURS c=4096"]["reason"] == ", ".join(["for N = 70 and fp32 there are ours whole", *WITHIN])
    assert head["eager bf16"]["reason"] == "for N = 70 and fp32 there are eager fp32"
    assert head["logits in"]["reason"].startswith("for a head there are missing, ours, evaluation, inplace, ")
    assert head["missing"]["reason"] == "ImportError: nowhere"
    assert len(head) == len(words)
    assert logits.pop("logits in place")["status"] == "ok"
    assert [row["status"] for row in logits.values()] == ["absent"] * 3
    assert logits["missing fp32"]["reason"].startswith("for logits without a head there are logits in place, ")


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
    measured = MeasuredLogits(sets, 1.0)
    for repetition in (0, 1, 2):
        measured.measure("logits in place")
        measured._prepare(repetition)
        assert torch.equal(measured.logits, sets[repetition % 2][0])
        assert measured.labels is sets[repetition % 2][1]


@pytest.mark.parametrize("text", ["8x9x", "8", "0x1x2", "8x9x10x11", "axbxc", "-8x9x1"])
def test_a_shape_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match="a shape is"):
        Shape.parse(text)


def test_the_scripts_bench_and_then_draw(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # the script takes a GPU if there is one
    shapes = "40x50x8,80x50x8,160x50x8,90x30x16"
    options = (
        "--shapes",
        shapes,
        "--methods",
        "inplace,evaluation,eager,quack",
        "--dtype",
        "fp32",
        "--inputs",
        "peaked",
    )
    options += ("--out", "bench/head.jsonl")
    result = script(tmp_path, "bench", *options)
    assert result.returncode == 0, result.stderr
    assert "80x50x8 peaked, fp32, fp32 weight, cpu" in result.stdout
    assert "absent: " in result.stdout
    rows = read_records([tmp_path / "bench" / "head.jsonl"])
    assert len(rows) == 4 * 5
    assert {row["command"] for row in rows} == {" ".join(options)}
    result = script(tmp_path, "report", "bench/head.jsonl", "--out", "figures")
    assert result.returncode == 0, result.stderr
    for name in ("head_time_memory", "head_scaling"):
        assert "eager fp32" in (tmp_path / "figures" / f"{name}.svg").read_text()
        assert (tmp_path / "figures" / f"{name}.png").stat().st_size > 1000
    assert not (tmp_path / "figures" / "backends.svg").exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--methods", "no such"), "no implementation's name begins with 'no such'"),
        (("--methods", ""), "argument --methods: a list without a word"),
        (("--inputs", " ,"), "argument --inputs: a list without a word"),
        (("--shapes", ""), "argument --shapes: a list without a word"),
        (("--dtype", "fp32", "--weight-dtype", "bf16"), "a bf16 weight is narrower than the fp32"),
        (("--out", "."), "[Errno 21] Is a directory"),
        (("--out", "site/kernels/__init__.py/rows.jsonl"), "[Errno 17] File exists"),
    ],
)
def test_the_script_refuses_what_it_cannot_do_in_one_line_and_at_once(options, says, tmp_path):
    result = script(tmp_path, "bench", "--shapes", "8x9x4", *options)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.splitlines()[-1].startswith(f"bench.py: error: {says}")


def test_the_script_fails_where_nothing_could_be_measured_and_logits_alone_have_no_weight(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for word, status in (("ours", 1), ("ours,logits in", 0)):
        result = script(tmp_path, "bench", "--shapes", "8x9", "--methods", word, "--inputs", "uniform")
        assert result.returncode == status, result.stderr
        assert "8x9 uniform, bf16, cpu" in result.stdout


def test_a_number_that_is_not_finite_is_written_as_null(tmp_path):
    append_line({"method": "ours", "ratio": math.nan}, tmp_path / "new" / "rows.jsonl")
    append_line({"method": "CCE"}, tmp_path / "new" / "rows.jsonl")
    lines = (tmp_path / "new" / "rows.jsonl").read_text().splitlines()
    assert list(map(json.loads, lines)) == [{"method": "ours", "ratio": None}, {"method": "CCE"}]


def test_the_peers_are_pinned_where_they_are_compared():
    text = (ROOT / "pyproject.toml").read_text()
    for family in peers.FAMILIES:
        if family.needs_cuda:
            assert f'"{family.package}==' in text
