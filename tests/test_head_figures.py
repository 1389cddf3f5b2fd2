"""The figures of the benchmark show every row: as a point, a cross or a word."""

import json
import re

from tiny import ROOT

from logitless.bench.inputs import KINDS
from logitless.records import read_records
from logitless.report import head_figures, head_rows


def row_of(n_tokens, vocab, width, method="ours", **more) -> dict:
    numbers = {"ratio": 1.5, "total_ms": 3.0, "gemm_ms": 2.0, "transient_mib": 10.0}
    facts = {"device": "a GPU", "versions": {"torch": "2"}, "commit": "c0ffee", "command": "--shapes ..."}
    row = {"method": method, "status": "ok", "inputs": "uniform", "dtype": "bf16", "weight_dtype": "bf16"}
    return row | facts | numbers | {"n_tokens": n_tokens, "vocab": vocab, "width": width} | more


def test_sweeps_are_the_shapes_that_differ_from_the_base_in_one_size():
    shapes = [(8, 9, 4), (16, 9, 4), (32, 9, 4), (8, 20, 4), (8, 9, 5), (100, 200, 4), (16, 9, 5)]
    sweeps = head_rows.find_sweeps([row_of(*shape) for shape in shapes])
    assert sweeps.base == (8, 9, 4)
    assert sweeps.sizes == {"n_tokens": [8, 16, 32], "vocab": [9, 20], "width": [4, 5]}
    assert sweeps.shapes() == set(shapes) - {(100, 200, 4), (16, 9, 5)}
    assert head_rows.find_sweeps([row_of(8, 9, 4), row_of(16, 9, 4), row_of(8, 20, 4)]) is None
    assert head_rows.find_sweeps([]) is None


def test_a_later_row_replaces_an_earlier_one_and_logits_are_no_head():
    rows = [row_of(8, 9, 4, ratio=1.0), row_of(8, 9, 4, inputs="peaked"), row_of(8, 9, None), row_of(8, 9, 4)]
    assert [(row["inputs"], row["ratio"]) for row in head_rows.latest(rows)] == [("uniform", 1.5), ("peaked", 1.5)]


def test_time_memory_has_a_panel_for_each_case_outside_of_the_sweep():
    sweep = [row_of(n, 9, 4) for n in (8, 16, 32)]
    alone = [row_of(100, 200, 4, method, inputs=kind) for kind in KINDS for method in ("ours", "CCE")]
    failed = row_of(100, 200, 4, "Liger", status="error", transient_mib=None)
    drawing = json.dumps(head_figures.head_time_memory([*sweep, *alone, failed]).to_dict())
    assert drawing.count("N = 100, V = 200, D = 4, ") == 2
    assert "N = 8" not in drawing
    assert "Liger: error" in drawing
    assert drawing.count('"CCE"') >= 2
    for fact in ("a GPU", "torch 2", "c0ffee", "python scripts/bench.py --shapes"):
        assert fact in drawing
    assert head_figures.head_time_memory([row_of(8, 9, 4, status="absent", transient_mib=None)]) is None


def test_time_memory_has_a_cross_in_the_corner_for_each_that_ran_out_of_memory():
    methods = ("eager", "inplace", "Liger", "quack")
    failed = [row_of(8, 9, 4, method, status="oom", transient_mib=None, ratio=None) for method in methods]
    measured = [row_of(8, 9, 4), row_of(8, 9, 4, "CCE", ratio=3.0, transient_mib=20.0)]
    panel = head_figures.head_time_memory([*failed, *measured]).to_dict()["vconcat"][0]["hconcat"][0]
    cross, text = panel["layer"][-1]["layer"]
    assert cross["mark"]["shape"] == "cross"
    assert text["encoding"]["text"]["field"] == "label"
    points = panel["layer"][-1]["data"]["values"]
    assert [point["label"] for point in points] == [f"{method}: out of memory" for method in methods]
    for point in points:
        assert 3.0 < point["ratio"] < cross["encoding"]["y"]["scale"]["domain"][1]
        assert 20.0 < point["mib"] < cross["encoding"]["x"]["scale"]["domain"][1]
    assert panel["title"]["subtitle"] == []


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


def test_labels_cover_neither_points_nor_each_other_nor_what_is_taken():
    points = [(100 + 3 * (i % 3), 100 + 2 * i) for i in range(8)]
    labels = [f"a long method {i}" for i in range(8)]
    line = (0, 149, head_figures.PANEL_WIDTH, 151)
    places = head_figures.place_labels(points, labels, [line])
    boxes = [(x, y - 5, x + head_figures.LETTER_WIDTH * len(labels[0]), y + 5) for x, y in places]
    for i, box in enumerate(boxes):
        assert not any(box[0] < x < box[2] and box[1] < y < box[3] for x, y in points)
        for other in (line, *boxes[:i]):
            assert box[2] <= other[0] or other[2] <= box[0] or box[3] <= other[1] or other[3] <= box[1]


def test_each_device_has_its_panels_and_no_row_replaces_anothers():
    rows = [row_of(8, 9, 4, ratio=1.0), row_of(8, 9, 4, device="a CPU", versions={"torch": "3"})]
    drawing = json.dumps(head_figures.head_time_memory(rows).to_dict())
    for text in ("bf16 weight, a GPU", "bf16 weight, a CPU", "a GPU, a CPU, torch 2 and 3, commit c0ffee"):
        assert text in drawing
    assert "weight, a GPU" not in json.dumps(head_figures.head_time_memory(rows[:1]).to_dict())


def test_what_a_sweep_cannot_show_has_a_panel():
    sweep = [row_of(n, 9, 4) for n in (8, 16, 32)]
    rows = [*sweep, row_of(8, 9, 4, "eager", device="a CPU")]
    assert '"eager"' not in json.dumps(head_figures.head_scaling(rows).to_dict())
    (panel,) = head_figures.head_time_memory(rows).to_dict()["vconcat"][0]["hconcat"]
    assert panel["title"]["text"].endswith("weight")
    assert "eager" in json.dumps(panel)


def test_where_nothing_was_measured_there_is_no_figure_and_beside_others_a_panel_of_words():
    for status in ("absent", "oom"):
        nothing = [row_of(n, 9, 4, status=status) for n in (8, 16, 32)]
        for row in nothing:
            del row["total_ms"], row["transient_mib"], row["ratio"]
        assert head_figures.head_scaling(nothing) is None
        assert head_figures.head_time_memory(nothing) is None
        panels = head_figures.head_time_memory([nothing[0], row_of(9, 9, 4)]).to_dict()["vconcat"][0]["hconcat"]
        assert len(head_figures.head_time_memory([*nothing, row_of(9, 90, 4)]).to_dict()["vconcat"]) == 2  # 4 panels
        assert ("ours: absent" if status == "absent" else "ours: out of memory") in json.dumps(panels[0])


def test_a_row_without_what_a_figure_needs_is_told():
    assert head_rows.problem(row_of(8, 9, 4)) is None
    assert head_rows.problem(row_of(8, 9, 4, status="oom", total_ms=None)) is None
    assert head_rows.problem(row_of(8, 9, 4, ratio=None, total_ms=0.0)) == "ours: no total_ms, ratio"
    assert head_rows.problem(row_of(8, 9, None)) == "ours: there is no figure of logits alone"
    assert head_rows.problem({"method": "x"}).startswith("x: no status, command, inputs")


def test_a_budget_with_a_plan_of_its_own_is_drawn_and_one_with_anothers_is_told():
    def planned(method, chunk, **more) -> dict:
        return row_of(8, 9, 4, method, plan={"schedule": "tokens", "chunk": chunk}, **more)

    rows = [planned("ours within 1 MiB", 2), planned("ours within 2 MiB", 4, total_ms=5.0), planned("ours C=4", 4)]
    rows += [
        planned("ours within 3 MiB", 2),
        row_of(8, 9, 4, "evaluation"),
        planned("ours within 4 MiB", 4, inputs="x"),
    ]
    rows += [planned("ours within 9 MiB", 4, status="oom", total_ms=None)]
    case = "N = 8, V = 9, D = 4, uniform inputs, bf16, bf16 weight, a GPU"
    assert head_rows.left_out(rows) == [
        "left out of head_time_memory, without gradients: evaluation",
        "left out of head_time_memory, same plans again: ours within 2 MiB, 5.0 ms (ours C=4, 3.0 ms); "
        f"ours within 3 MiB, 3.0 ms (ours within 1 MiB, 3.0 ms); {case}",
    ]
    drawing = json.dumps(head_figures.head_time_memory(rows).to_dict())
    for method in ("ours within 1 MiB", "ours C=4", "ours within 4 MiB", "ours within 9 MiB: out of memory"):
        assert f'"{method}"' in drawing
    for method in ("ours within 2 MiB", "ours within 3 MiB", "evaluation"):
        assert f'"{method}"' not in drawing


def test_every_row_of_the_committed_benchmark_is_drawn_or_named():
    rows = read_records([ROOT / "docs" / "results" / "bench_h200" / "head.jsonl"])
    lines = head_rows.left_out(rows)
    page = (ROOT / "docs" / "report" / "index.html").read_text()
    assert [line for line in lines if f"<li>{line}</li>" not in page] == []
    chart = head_figures.head_time_memory(rows).to_dict()
    panels = {panel["title"]["text"]: json.dumps(panel) for line in chart["vconcat"] for panel in line["hconcat"]}
    assert len(panels) == 5
    for row in rows:
        title = head_rows.panel_title(row, names_device=False)
        is_drawn = f'"{row["method"]}"' in panels[title] or f"{row['method']}: {row['status']}" in panels[title]
        told = [line for line in lines if "gradients" in line or title in line]
        named = [line for line in told if re.search(rf"[:;,] {row['method']}[,;]|[:,] {row['method']}$", line)]
        assert is_drawn != bool(named), (row["method"], title)
