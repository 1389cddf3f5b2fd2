"""Figures of runs against sequence length and tokens: what is in them, what is not, and that they say so."""

import json
from dataclasses import replace

import made_up_runs
import pytest
from tiny import ROOT

from kernels.devices import DEVICES
from logitless.footprint import peak_bytes
from logitless.footprint_parts import Step
from logitless.records import read_records
from logitless.report import (
    backends_figure,
    frontier_figure,
    head_figures,
    head_rows,
    length_figures,
    lengths,
    loss_figure,
    palette,
    settings,
)
from logitless.report.charts import labels_of, provenance_of_runs

GIB = 2**30


def run(backend: str, seq_len: int, chunk: int | None = None, **more) -> dict:
    name = f"{backend}-{seq_len}" + (f"-{chunk}" if chunk else "")
    return made_up_runs.record_of(backend, seq_len, chunk, **({"run_dir": name, "peak_allocated_gib": 2.0} | more))


def oom(backend: str, seq_len: int, chunk: int | None = None, **more) -> dict:
    facts = {"status": "oom", "step": 2, "phase": "backward", "steps": 1, "tokens_per_s": None}
    return run(backend, seq_len, chunk, **(facts | {"peak_allocated_gib": 0.7} | more))


def panels_of(chart) -> list[dict]:
    """The layered panels of a grid."""
    found = chart.to_dict()
    return [panel for row in found["vconcat"] for panel in row.get("hconcat", [row])]


def values_of(panel: dict, mark: str) -> list[list[dict]]:
    """The data of the layers that are drawn as `mark`."""
    return [layer["data"]["values"] for layer in panel["layer"] if layer["mark"]["type"] == mark]


def test_a_setting_that_is_missing_false_or_written_otherwise_is_the_same_setting():
    old, new = run("naive", 8), run("naive", 8)
    old["config"]["model"].pop("checkpoint", None)
    new["config"]["model"]["checkpoint"] = False
    new["memory_limit_gib"], new["config"]["budget_mib"] = 24.0, None
    assert settings.differing([settings.settings_of(old), settings.settings_of(new)]) == []
    new["config"]["model"]["checkpoint"] = True
    both = [settings.settings_of(old), settings.settings_of(new)]
    assert settings.differing(both) == ["model.checkpoint"]
    assert settings.in_words(both[1], ["model.checkpoint", "memory_limit_gib"]) == (
        "activation checkpointing, limit 24 GiB"
    )


def test_runs_of_several_ranks_are_no_runs_of_one():
    one = {"config": {"trainer": {"accelerator": "cpu", "strategy": "ddp"}}, "world_size": 1}
    two, cut = one | {"world_size": 2}, {"config": {"trainer": {"strategy": "fsdp"}}, "world_size": 2}
    assert settings.settings_of(one) == settings.settings_of({"config": {}})
    assert settings.differing([settings.settings_of(run) for run in (one, two)]) == ["trainer.strategy", "world_size"]
    assert settings.differing([settings.settings_of(two), settings.settings_of(cut)]) == ["trainer.strategy"]
    assert settings.in_words(settings.settings_of(two), ["trainer.strategy", "world_size"]) == "ddp, 2 ranks"


def test_peaks_are_lines_predictions_dashed_and_oom_a_cross_at_the_limit():
    records = [run("naive", 1024), run("naive", 2048, peak_allocated_gib=4.0), oom("naive", 4096)]
    records[0]["memory_limit"] = "of what is limited"
    drawing = length_figures.peak_memory(records)
    (panel,) = panels_of(drawing.chart)
    predicted, measured = values_of(panel, "line")
    assert [(point["seq_len"], point["value"]) for point in measured] == [(1024, 2.0), (2048, 4.0)]
    step = Step(made_up_runs.SMALL, DEVICES["NVIDIA H200"], 2048, 1, "bf16-mixed")
    by_length = {point["seq_len"]: point["value"] for point in predicted}
    assert by_length[2048] == peak_bytes(step, "naive") / GIB
    assert len(by_length) > 15
    assert (min(by_length), max(by_length)) == (1024, 4096)
    _, crosses = values_of(panel, "point")
    assert [(point["seq_len"], point["value"]) for point in crosses] == [(4096, 24)]  # not its partial peak
    (rule,) = values_of(panel, "rule")
    assert rule[0]["value"] == 24
    assert panel["layer"][0]["encoding"]["y"]["scale"]["domain"][0] == 0
    assert (drawing.left_out, drawing.notes) == ({}, ["limit of 24 GiB: of what is limited"])


@pytest.mark.parametrize(
    ("facts", "height"),
    [
        ({"allocator": {"total_gib": 139.8}}, 139.8),
        ({"allocator": None}, 0.7),
        ({"peak_allocated_gib": None, "cold_peak_allocated_gib": 0.6}, 0.6),
    ],
)
def test_without_a_limit_a_cross_stands_at_the_devices_memory_or_the_last_good_peak(facts, height):
    records = [run("naive", 1024), oom("naive", 2048, **facts)]
    for record in records:
        record["memory_limit_gib"] = record["config"]["memory_limit_gib"] = None
    (panel,) = panels_of(length_figures.peak_memory(records).chart)
    assert values_of(panel, "point")[1][0]["value"] == height
    assert values_of(panel, "rule") == []


def test_devices_limits_and_models_have_panels_of_their_own():
    cpu = {"device": "cpu (x86_64)", "precision": "32-true", "peak_live_tensor_gib": 1.0, "peak_allocated_gib": None}
    records = [run("naive", length, **facts) for length in (8, 16) for facts in ({}, cpu)]
    wide = {"model": vars(replace(made_up_runs.SMALL, padded_vocab_size=131072))}
    records += [run("naive", length, config=wide) for length in (8, 16)]
    for i, record in enumerate(records):
        record["run_dir"] = str(i)
    panels = panels_of(length_figures.peak_memory(records).chart)
    assert sorted(" ".join(panel["title"]["text"]) for panel in panels) == [
        "V = 131072, bf16-mixed, NVIDIA H200",
        "V = 50304, 32-true, cpu (x86_64)",
        "V = 50304, bf16-mixed, NVIDIA H200",
    ]
    titles = {" ".join(panel["title"]["text"]): panel["layer"][0]["encoding"]["y"]["title"] for panel in panels}
    assert titles["V = 50304, 32-true, cpu (x86_64)"] == "peak of live tensors (GiB)"
    assert titles["V = 50304, bf16-mixed, NVIDIA H200"] == "peak allocated (GiB)"


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"backend": "liger"}, "only naive, inplace, fused"),
        ({"device": "an H900"}, "device an H900 is not among"),
        ({"config": {"model": vars(replace(made_up_runs.SMALL, dropout=0.1))}}, "model.dropout=0.1"),
        ({"config": {"z_loss": 0.1}}, "z_loss=0.1 is not counted"),
        ({"config": {"model": {"width": 3}}}, "TypeError"),
    ],
)
def test_where_nothing_is_predicted_the_reason_is_said(facts, reason):
    facts = {"backend": "naive"} | facts
    records = [run(seq_len=length, **json.loads(json.dumps(facts))) for length in (8, 16)]
    drawing = length_figures.peak_memory(records)
    (panel,) = panels_of(drawing.chart)
    assert len(values_of(panel, "line")) == 1
    (note,) = drawing.notes
    assert note.startswith("no prediction of ")
    assert reason in note


def test_what_is_not_whole_is_left_out_with_its_reason():
    records = [run("naive", 8), run("naive", 16), run("naive", 32, peak_allocated_gib=None, run_dir="short", steps=1)]
    records += [run("naive", 16, status="started", run_dir="killed"), run("naive", 16, status="error", run_dir="error")]
    records += [
        run("naive", 16, run_dir="text") | {"seq_len": "16"},
        {"run_dir": "bare", "status": "ok"},
        {"run_dir": "none"},
    ]
    records += [run("naive", 64, run_dir="late"), run("naive", 64, run_dir="early", time="2026-01-01")]
    assert length_figures.peak_memory(records).left_out == {
        "short": "no peak of a step after the first (ok after 1 steps)",
        "killed": "started, not ended (running, or killed)",
        "error": "error",
        "text": "no seq_len",
        "bare": "no backend, command, device, versions, config, seq_len",
        "none": "no status",
        "early": "run again later with the same settings and length",
    }


def test_one_length_is_no_figure_of_lengths_and_beside_others_no_panel():
    records = [run("naive", 8), run("fused", 8, 4)]
    drawn = [length_figures.peak_memory, length_figures.speed, frontier_figure.frontier]
    assert [draw(records).chart for draw in drawn] == [None] * 3
    assert [draw(records).left_out for draw in drawn] == [{}] * 3
    records += [run("naive", length, batch_size=2, run_dir=str(length)) for length in (8, 16)]
    for draw in drawn:
        assert draw(records).left_out == dict.fromkeys(
            ("naive-8", "fused-8-4"), "no run of another length to compare with"
        )


def test_one_length_that_one_backend_cannot_is_a_figure():
    records = [run("naive", 8), oom("fused", 8, 4)]
    for draw in (length_figures.peak_memory, length_figures.speed, frontier_figure.frontier):
        assert draw(records).chart is not None
        assert draw(records).left_out == {}


def test_speed_is_that_of_whole_runs_and_an_oom_a_cross_at_zero():
    records = [run("naive", 8, tokens_per_s=10.0), run("naive", 16, tokens_per_s=9.0), oom("naive", 32)]
    records += [run("naive", 24, tokens_per_s=None, run_dir="few")]
    drawing = length_figures.speed(records)
    (panel,) = panels_of(drawing.chart)
    assert [point["value"] for point in values_of(panel, "line")[0]] == [10.0, 9.0]
    assert [(point["seq_len"], point["value"]) for point in values_of(panel, "point")[1]] == [(32, 0.0)]
    assert "mean of 2 steps after the first" in drawing.chart.to_dict()["title"]["text"]
    assert drawing.left_out == {"few": "no tokens_per_s (ok after 3 steps)"}


@pytest.mark.parametrize(
    ("records", "longest", "too_long", "words"),
    [
        ([run("naive", 8), run("naive", 16), oom("naive", 32), oom("naive", 64)], 16, 32, "16; out of memory at 32"),
        ([run("naive", 8), run("naive", 1600)], 1600, None, "1,600; not bounded"),
        ([oom("naive", 16), oom("naive", 8)], None, 8, "none; out of memory at 8"),
        ([run("naive", 16), oom("naive", 8), oom("naive", 32)], 16, 32, "16; out of memory at 32"),
    ],
)
def test_the_frontier_is_the_longest_that_trained_below_the_shortest_that_did_not(records, longest, too_long, words):
    (found,) = frontier_figure.bounds(records)[""]
    assert (found.longest, found.too_long, found._replace(filled_by="").in_words()) == (longest, too_long, words)


def test_the_frontier_says_what_fills_the_memory():
    """On a GPU of 24 GiB, as measured: the logits of naive, the activations of fused."""
    records = read_records([ROOT / "docs" / "results" / "frontier_h200" / "131072"])
    naive, inplace, fused = sorted(frontier_figure.bounds(records)[""], key=lambda bound: bound.longest)
    assert naive.in_words() == "12,288; out of memory at 13,440; head 79% of the peak"
    assert inplace.in_words(naive.longest) == "44,032 (3.6x naive); out of memory at 48,384; head 48% of the peak"
    assert fused.in_words(naive.longest) == "92,160 (7.5x naive); out of memory at 101,376; blocks 83% of the peak"
    dropout = run("naive", 16, config={"model": dict(vars(made_up_runs.SMALL)) | {"dropout": 0.1}})
    assert frontier_figure.bound_of([dropout]).filled_by == "", "which nobody predicted"


def test_the_frontier_is_compared_with_that_of_naive_if_it_is_bounded():
    records = [run("naive", 8), oom("naive", 16), run("fused", 20, 4), oom("fused", 32, 4)]
    bars = frontier_figure.frontier(records).chart.to_dict()["data"]["values"]
    assert [bar["words"][: bar["words"].rindex(";")] for bar in bars] == [
        "8; out of memory at 16",
        "20 (2.5x naive); out of memory at 32",
    ]
    bars = frontier_figure.frontier([record for record in records if record["seq_len"] != 16]).chart.to_dict()["data"][
        "values"
    ]
    assert [bar["words"][: bar["words"].rindex(";")] for bar in bars] == ["8; not bounded", "20; out of memory at 32"]


def test_the_frontier_takes_three_steps_for_a_proof_and_names_contradictions():
    records = [run("naive", 16), run("naive", 32, steps=2, run_dir="short"), oom("naive", 8), oom("naive", 64)]
    drawing = frontier_figure.frontier(records)
    assert drawing.left_out == {"short": "ok after 2 steps, and 3 show that a length fits"}
    assert drawing.notes == ["naive: out of memory at 8 although 16 trained"]
    (bar,) = drawing.chart.to_dict()["data"]["values"]
    assert (bar["longest"], bar["too_long"], bar["color"]) == (16, 64, palette.COLORS["naive"])


def test_chunks_and_budgets_are_bars_of_their_own():
    records = [run("fused", length, chunk) for length in (8, 16) for chunk in (2, 4)]
    budget = {"loss": {"budget_mib": 100}}
    records += [run("fused", length, "auto", config=budget) for length in (8, 16)]
    labels = [bound.label for bound in frontier_figure.bounds(records)[""]]
    assert labels == ["fused, chunk=2", "fused, chunk=4", "fused, chunk=auto, budget 100 MiB"]
    other = run("fused", 8, "auto", config={"loss": {"budget_mib": 200}}, run_dir="other")
    assert labels_of([records[-1], other]) == [labels[-1], "fused, chunk=auto, budget 200 MiB"]


def test_curves_are_those_of_whole_runs_of_one_length(tmp_path):
    records = [run("naive", 8, tokens=80), run("fused", 8, 4, tokens=80), run("naive", 16), oom("fused", 16, 4)]
    for record, n_points in zip(records, (20, 20, 3, 20), strict=True):
        made_up_runs.write(tmp_path / record["run_dir"], record, n_points)
    records = read_records([tmp_path])
    drawing = loss_figure.training_loss(records)
    assert {run.rpartition("/")[2]: reason for run, reason in drawing.left_out.items()} == {
        "naive-16": "fewer than 10 points of training loss",
        "fused-16-4": "OOM at step 2, backward",
    }
    train, val = panels_of(drawing.chart)
    assert len(train["data"]["values"]) == 2 * 20
    assert len(val["data"]["values"]) == 2 * 4
    assert train["encoding"]["color"]["scale"]["domain"] == ["naive", "fused, chunk=4"]


def test_long_curves_are_thinned_and_say_so(tmp_path):
    record = run("naive", 8)
    made_up_runs.write(tmp_path / "long", record, 1500)
    records = read_records([tmp_path])
    drawing = loss_figure.training_loss(records)
    train, _ = panels_of(drawing.chart)
    assert len(train["data"]["values"]) == 375
    assert (
        drawing.notes == backends_figure.backends(records).notes == [f"one point of 4 is drawn of {tmp_path / 'long'}"]
    )
    assert len(json.dumps(backends_figure.backends(records).chart.to_dict())) < 60_000


def test_a_backend_has_one_colour_everywhere(tmp_path):
    for backend in ("naive", "fused"):
        for length in (8, 16):
            made_up_runs.write(tmp_path / f"{backend}{length}", run(backend, length, run_dir=None), 20)
    records = read_records([tmp_path])
    charts = [length_figures.peak_memory(records), length_figures.speed(records), frontier_figure.frontier(records)]
    charts += [loss_figure.training_loss(records), backends_figure.backends([r for r in records if r["seq_len"] == 8])]
    for drawing in charts:
        text = json.dumps(drawing.chart.to_dict())
        for backend in ("naive", "fused"):
            assert palette.COLORS[backend] in text
        assert not {palette.COLORS[other] for other in ("inplace", "liger", "compiled")} & set(text.split('"'))
    assert [palette.color(name) for name in ("ours C=4", "eager fp32", "inplace")] == [
        palette.COLORS[name] for name in ("fused", "naive", "inplace")
    ]
    rows = read_records([ROOT / "docs" / "results" / "bench_h200" / "head.jsonl"])
    rows = [row for row in rows if head_rows.problem(row) is None]
    assert palette.COLORS["fused"] in json.dumps(head_figures.head_time_memory(rows).to_dict())


def test_lines_of_one_backend_have_marks_of_their_own():
    marks = palette.shapes(["naive", "fused", "fused", "fused", "liger"])
    assert len(set(marks)) == 5
    shades = palette.shades(["fused", "naive", "fused"])
    assert shades[0] == palette.COLORS["fused"] != shades[2]


def test_many_commands_are_joined_into_one():
    records = [run("naive", length) for length in range(8, 16)]
    subtitle = provenance_of_runs("Title", records).subtitle
    assert subtitle[1:] == ["python scripts/train.py model=small loss=naive seq_len=8,...,15 memory_limit_gib=24"]
    assert len(provenance_of_runs("Title", records[:3]).subtitle) == 4


def test_backends_is_drawn_for_runs_of_one_length_only(tmp_path):
    for length in (8, 16):
        made_up_runs.write(tmp_path / str(length), run("naive", length), 20)
    records = read_records([tmp_path])
    assert backends_figure.backends(records).chart is None
    assert backends_figure.backends(records[:1]).chart is not None


def test_panels_are_those_of_settings_that_matter_for_memory():
    records = [run("naive", 8), run("naive", 16, config={"lr": 3, "max_steps": 7, "data": {"path": "x"}})]
    assert list(lengths.panels(records)) == [""]
