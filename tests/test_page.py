"""The report's page holds every run with its status, says what the figures leave out, and no text of a run is code."""

import json
import re

import pytest
import sweeps

from logitless import figures, page, run_table


def cells_of(table: str) -> list[dict[str, str]]:
    head = re.findall(r"<th>(.*?)</th>", table)
    rows = re.findall(r"<tr class=.*?</tr>", table)
    return [dict(zip(head, re.findall(r"<td>(.*?)</td>", row), strict=True)) for row in rows]


def test_the_table_has_what_runs_differ_in_and_says_the_rest_once():
    records = [sweeps.record_of("naive", 1024, peak_allocated_gib=2.5, config={"lr": 0.1, "memory_limit_gib": 24.0})]
    records += [sweeps.record_of("fused", 512, 64, peak_allocated_gib=1.25, config={"lr": 0.2})]
    for record in records:
        record["run_dir"] = "runs/x"
    table = run_table.table(records)
    fused, naive = cells_of(table)
    assert list(naive) == [
        *("backend", "chunk", "seq_len", "status", "peak allocated (GiB)", "tokens/s"),
        *("training loss (nats a token)", "validation loss (nats a token)", "lr", "folder"),
    ]
    assert list(fused.values())[:5] == ["fused", "64", "512", "ok after 3 steps", "1.25"]
    assert list(naive.values())[:5] == ["naive", "", "1,024", "ok after 3 steps", "2.50"]
    assert (fused["lr"], naive["lr"]) == ("0.2", "0.1")
    for words in ("memory_limit_gib = 24", "model.padded_vocab_size = 50,304", "device = NVIDIA H200"):
        assert table.count(f"<li>{words}</li>") == 1
    assert "resume" not in table
    assert "lr =" not in table
    bare = {"run_dir": "bare", "status": "started"}
    assert [list(row) for row in cells_of(run_table.table([*records, bare]))] == [list(naive)] * 3


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"status": "oom", "step": 2, "phase": "backward", "error": "CUDA"}, "OOM at step 2, backward"),
        ({"status": "oom"}, "OOM"),
        ({"status": "started"}, "started, not ended (running, or killed)"),
        ({"status": "error", "exit_code": -9, "error": "killed by SIGKILL"}, "error: killed by SIGKILL"),
        (
            {"status": "error", "step": 3, "phase": "validation", "error": "ValueError: <b>\nmore"},
            "error at step 3, validation: ValueError: &lt;b&gt;",
        ),
        ({"status": 3}, "3"),
        ({}, "no status"),
        ({"status": "unreadable", "error": "no whole line"}, "unreadable: no whole line"),
    ],
)
def test_a_run_that_is_not_ok_says_how_it_ended(facts, words):
    (row,) = cells_of(run_table.table([{"run_dir": "x"} | facts]))
    assert row["status"] == words


def test_a_partial_peak_is_called_one():
    record = {"run_dir": "x", "status": "oom", "peak_allocated_gib": 3.0, "device": "a GPU"}
    (row,) = cells_of(run_table.table([record]))
    assert row["peak allocated (GiB)"] == "3.00 so far"


def test_reasons_are_told_once_with_all_their_runs():
    some = figures.Drawing(None, {"runs/1": "oom", "runs/2": "oom", "runs/3": "killed"})
    drawings = {"a": some, "b": figures.Drawing(None, {"runs/3": "killed"}), "not drawn": figures.Drawing(None, {})}
    assert page.left_out_lines(drawings) == [
        "left out of a: 2 runs in runs (1, 2), oom",
        "left out: runs/3, killed",
    ]


def test_no_text_of_a_record_is_code():
    record = sweeps.record_of("naive", 8, run_dir="</script><script>alert(1)</script>")
    record |= {"backend": "<img src=x>", "status": "<b>", "error": "<i>"}
    drawing = figures.Drawing(None, {record["run_dir"]: "<u>"}, ["<s>"])
    text = page.page({"x": drawing}, [record])
    for tag in ("<img src=x", "<b>", "<i>x", "<u>", "<s>", "<script>alert"):
        assert tag not in text.replace("<i>V</i>", ""), tag
    code = page.script(f"const x = {json.dumps('</script><!--')};")
    assert code.count("</script") == 1
    assert "<!--" not in code
