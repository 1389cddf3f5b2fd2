"""Sweeps of tests/sweep_app.py, which trains nothing: a record and a row for each job, however it or the sweep ends."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from sweep_commands import APP, alive, await_end, await_line, job_dirs, rows, run, start, statuses

from hydra_plugins.grid_sweeper import GridSweeper
from logitless import processes
from logitless.records import append_line, read_record
from logitless.sweeps import sweep

AFTER = "before it was done, after: hello from 2048"
WAYS = {  # how a job ends: its status, what its row says, the exit code that its record got from the sweep
    "limit=1024": ("oom", "OOM at step 2, backward", None),
    "act=exit0@2048": ("error", f"error: it ended with status 0 {AFTER}", 0),
    "act=exit1@2048": ("error", f"error: it ended with status 1 {AFTER}", 1),
    "act=abort@2048": ("error", f"error: it ended with status 0 {AFTER}", 0),
    "act=raise@2048": ("error", "error: RuntimeError: a bug at 2048", 1),
    "act=kill@2048": ("error", "error: killed by SIGKILL", -9),
    "act=refused@2048": ("error", "error: seq_len=0 must be more", 1),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_job_that_fails_costs_no_other_and_only_out_of_memory_is_a_result(way, tmp_path):
    status, says, exit_code = WAYS[way]
    result = run(tmp_path, "seq_len=2048,1024", way)
    assert statuses(tmp_path) == [status, "ok"]
    assert result.returncode == (0 if status == "oom" else 1), result.stderr
    assert rows(result) == [["0", "2048", says], ["1", "1024", "1.000 GiB", "10,000"]]
    record = read_record(tmp_path / "sweep" / "0")
    assert record["overrides"] == ["seq_len=2048", way]
    assert record["sweep"] == str(tmp_path / "sweep")
    assert record.get("exit_code") == exit_code
    assert (result.stderr == "") == (status == "oom")


def test_each_failure_is_named_when_it_happens_and_lies_in_its_own_folder(tmp_path):
    process = start(tmp_path, "seq_len=1,3", "act=raise@1,raise@3", "seconds=0.1")
    first = process.stderr.readline()
    assert process.poll() is None  # it was named before the sweep was over
    out, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "RuntimeError: a bug at 1, see" in first
    assert str(tmp_path / "sweep" / "0") in first
    (second,) = err.splitlines()
    assert f"RuntimeError: a bug at 3, see {tmp_path / 'sweep' / '3'}" in second
    for number, length in ((0, 1), (3, 3)):
        output = (tmp_path / "sweep" / str(number) / sweep.OUTPUT).read_text()
        assert f"hello from {length}" in output
        assert "Traceback" in output
        assert output.count("RuntimeError: a bug at") == 1
    assert [line for line in out.splitlines() if re.match(r"job \d", line)] == [
        "job 0 (1 of 4): seq_len=1 act=raise@1",
        "job 1 (2 of 4): seq_len=1 act=raise@3",
        "job 2 (3 of 4): seq_len=3 act=raise@1",
        "job 3 (4 of 4): seq_len=3 act=raise@3",
    ]
    assert [line.partition(":")[0] for line in (first, second)] == ["job 0 (1 of 4)", "job 3 (4 of 4)"]
    assert "left\n" in out


def test_nothing_passes_from_a_job_to_the_next(tmp_path):
    assert run(tmp_path, "seq_len=3,2,1", "log=log", "limit=2").returncode == 0
    facts = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert len({fact["pid"] for fact in facts}) == 3
    assert [fact["leak"] for fact in facts] == [[3], [2], [1]]
    assert [fact["environment"] for fact in facts] == [None] * 3


def test_a_job_gets_the_flags_and_the_overrides_of_hydra_but_not_those_of_the_sweep(tmp_path):
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "own.yaml").write_text(
        "defaults: [base, _self_, {override hydra/sweeper: grid}]\nseq_len: 7\n"
    )
    flags = ("--config-dir=more", "--config-name=own")
    arguments = ("hydra.output_subdir=facts", "seed=1,2", "hydra.sweep.dir='a folder, with {its} name'")
    result = run(tmp_path, *arguments, *flags)
    assert result.returncode == 0, result.stderr
    for number in "01":
        run_dir = tmp_path / "a folder, with {its} name" / number
        assert "hello from 7" in (run_dir / sweep.OUTPUT).read_text()
        assert not (run_dir / ".hydra").exists()
        assert (run_dir / "facts" / "overrides.yaml").read_text() == f"- seed={int(number) + 1}\n"
        assert read_record(run_dir)["sweep"] == str(run_dir.parent)


def test_a_process_that_a_job_leaves_behind_is_ended(tmp_path):
    assert run(tmp_path, "act=straggle", "hydra.sweeper.grace_s=0.2").returncode == 0
    assert alive(tmp_path) == []


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_sweep_says_what_it_knows_and_leaves_nothing_running(number, status, tmp_path):
    process = start(tmp_path, "seq_len=1,2,3", "act=hang@2", f"log={tmp_path / 'log'}", "hydra.sweeper.grace_s=0.5")
    await_line(tmp_path / "sweep" / "1" / "record.jsonl", "started")
    stopped = time.monotonic()
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert time.monotonic() - stopped < 5
    assert process.returncode == status, err
    assert out.splitlines()[-3].split() == ["0", "1", "0.001", "GiB", "10,000"]
    assert [line.split(maxsplit=2)[2] for line in out.splitlines()[-2:]] == ["did not end", "not run"]
    assert alive(tmp_path) == []
    assert read_record(tmp_path / "sweep" / "1")["error"].startswith("stopped with the sweep")


def test_a_killed_sweep_takes_its_job_and_the_jobs_children_along(tmp_path):
    process = start(tmp_path, "act=hang")
    await_line(tmp_path / "sweep" / "0" / "record.jsonl", "started")
    time.sleep(0.3)
    assert any("sleep" in command for command in alive(tmp_path))
    process.kill()
    process.communicate()
    await_end(tmp_path)


def test_a_job_dies_with_its_sweep_even_without_the_shell_that_guards_its_group(tmp_path):
    process = start(tmp_path, "seconds=1000")
    await_line(tmp_path / "sweep" / "0" / "record.jsonl", "started")
    assert len(alive(tmp_path)) == 3
    os.kill(child(process, b"read _"), signal.SIGKILL)
    process.kill()
    process.communicate()
    await_end(tmp_path)


def test_the_same_command_repeats_only_what_did_not_end(tmp_path):
    log = tmp_path / "log"
    arguments = ("seq_len=1,2,3,4", f"log={log}", "limit=3")
    assert run(tmp_path, "act=work", *arguments).returncode == 0
    for number, overrides_ in (("0", None), ("1", {"status": "error"}), ("2", {"status": "started"})):
        record = read_record(tmp_path / "sweep" / number)
        record.pop("run_dir")
        (tmp_path / "sweep" / number / "record.jsonl").unlink()
        if overrides_:
            append_line(record | overrides_, tmp_path / "sweep" / number / "record.jsonl")
    log.unlink()
    result = run(tmp_path, "act=work", *arguments)
    assert result.returncode == 0
    assert [json.loads(line)["overrides"][1] for line in log.read_text().splitlines()] == [
        f"seq_len={n}" for n in (1, 2, 3)
    ]
    assert "sweep/0: its job did not end" in result.stdout
    assert "sweep/1: its job failed" in result.stdout
    assert re.findall(r"^job (\d+) \((\d of \d)\): seq_len=(\d)$", result.stdout, flags=re.M) == [
        ("4", "2 of 4", "1"),
        ("5", "3 of 4", "2"),
        ("6", "4 of 4", "3"),
    ]
    assert [row[:2] for row in rows(result)] == [["4", "1"], ["5", "2"], ["6", "3"], ["3", "4"]]
    assert sorted(statuses(tmp_path)) == ["ok", "ok", "ok", "oom"]
    before = log.read_text()
    assert run(tmp_path, *reversed(arguments), "act=work").returncode == 0  # the order says nothing
    assert log.read_text() == before


def test_resuming_removes_no_folder_that_is_not_of_this_sweep(tmp_path):
    mine = tmp_path / "7"
    mine.mkdir()
    (mine / "thesis.txt").write_text("all of it")
    other = {"status": "error", "overrides": ["seq_len=9"], "error": "x"}
    append_line(other, tmp_path / "8" / "record.jsonl")
    append_line({"status": "error"}, tmp_path / "9" / "record.jsonl")
    assert sweep.remove_unfinished(tmp_path, lambda job: job == ("seq_len=1",), may_run=False) == []
    assert sweep.next_number(tmp_path) == 10
    (line,) = sweep.remove_unfinished(tmp_path, lambda job: job == ("seq_len=9",), may_run=False)
    assert str(tmp_path / "8") in line


@pytest.mark.parametrize("left", ["record.jsonl", "output.txt", "train.log", ".hydra", ""])
def test_resuming_removes_what_a_kill_left_of_a_folder_at_its_start_or_while_it_was_removed(left, tmp_path):
    (tmp_path / "0").mkdir()
    if left:
        (tmp_path / "0" / left).touch()
    (line,) = sweep.remove_unfinished(tmp_path, lambda job: False, may_run=False)
    assert line == f"removed {tmp_path / '0'}: its job did not end and will be repeated"
    assert list(tmp_path.iterdir()) == []


def test_resuming_removes_no_folder_of_a_job_that_may_run_elsewhere(tmp_path):
    for number, status in enumerate(("started", "error")):
        append_line({"status": status, "overrides": ["seq_len=1"]}, tmp_path / str(number) / "record.jsonl")
    (tmp_path / "2" / ".hydra").mkdir(parents=True)
    lines = sweep.remove_unfinished(tmp_path, lambda job: True, may_run=True)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["0", "2"]
    assert [line.split(":")[0] for line in lines] == [
        f"{tmp_path / '0'} may still run",
        f"removed {tmp_path / '1'}",
        f"{tmp_path / '2'} may still run",
    ]


def test_two_sweeps_in_one_folder_are_refused_in_one_line(tmp_path):
    with sweep.locked(tmp_path / "sweep"):
        result = run(tmp_path, "seq_len=1,2")
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: another sweep runs in")
    assert job_dirs(tmp_path) == []


def test_a_wrong_override_is_refused_before_a_job_starts(tmp_path):
    result = run(tmp_path, "seq_len=1,2", "sequence=3,4")
    assert result.returncode == 1
    assert "sequence" in result.stderr
    assert result.stdout == ""
    assert job_dirs(tmp_path) == []


def test_folders_that_are_not_numbered_are_refused(tmp_path):
    result = run(tmp_path, "seq_len=1,2", "hydra.sweep.subdir=x")
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: hydra.sweep.subdir=x")


def test_a_sweep_through_submitit_has_the_same_rows_records_and_status(tmp_path):
    pytest.importorskip("submitit")
    arguments = ("hydra/launcher=submitit_local", "seq_len=1,2,3", "act=kill@1", "limit=2")
    result = run(tmp_path, *arguments)
    assert result.returncode == 1
    assert statuses(tmp_path) == ["error", "ok", "oom"]
    assert [row[-1] for row in rows(result)] == ["error: killed by SIGKILL", "10,000", "OOM at step 2, backward"]
    assert f"killed by SIGKILL, see {tmp_path / 'sweep' / '0'}" in result.stderr
    assert read_record(tmp_path / "sweep" / "0")["sweep"] == str(tmp_path / "sweep")
    assert run(tmp_path, *arguments).returncode == 1
    assert [path.name for path in job_dirs(tmp_path)] == ["1", "2", "3"]


class GivesUp:
    """A launcher that raises when its second job's worker dies, as submitit does, while others may still run."""

    def __init__(self, folder: Path):
        self.folder = folder

    def launch(self, jobs: list[list[str]], initial_job_idx: int) -> None:
        for number, status in enumerate(("ok", "started"), initial_job_idx):
            append_line({"status": status, "overrides": jobs[0]}, self.folder / str(number) / "record.jsonl")
        raise RuntimeError("a worker died")


def test_a_launcher_that_gives_up_loses_no_record_and_closes_none(tmp_path, capsys):
    sweeper = GridSweeper(grace_s=1)
    sweeper.folder, sweeper.launcher = tmp_path, GivesUp(tmp_path)
    records = sweeper.launch([("seq_len=1",), ("seq_len=2",), ("seq_len=3",)])
    assert [record and record["status"] for record in records] == ["ok", None, None]
    assert [read_record(tmp_path / number)["status"] for number in "01"] == ["ok", "started"]
    assert "the launcher gave up: a worker died" in capsys.readouterr().err


def test_slurm_is_configured_without_its_package(tmp_path):
    command = [sys.executable, str(APP), "hydra/launcher=submitit_slurm", "--cfg", "hydra", "-p", "hydra.launcher"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert "gpus_per_node: 1" in result.stdout, result.stderr


def test_jobs_and_sweeps_killed_at_random_lose_and_double_no_record(tmp_path):
    """20 SIGKILLs, every second one at a job; after each the sweep is killed too, and started again."""
    draw = random.Random(0)
    arguments = ["seconds=0.1", "limit=3", "act=hang@8"]  # a sweep that comes so far waits there for its end
    for number in range(20):
        process = start(tmp_path, *arguments, "seq_len=range(1,9)")
        time.sleep(draw.uniform(0.2, 0.8))
        if number % 2:
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(child(process, b"hydra.mode=RUN"), signal.SIGKILL)
            time.sleep(draw.uniform(0.0, 0.3))
        process.kill()
        process.communicate()
    await_end(tmp_path)
    result = run(tmp_path, *arguments, "seq_len=range(1,8)")
    assert result.returncode == 0, result.stderr
    assert len(rows(result)) == 7
    lines = [json.loads(line) for d in job_dirs(tmp_path) for line in (d / "record.jsonl").read_text().splitlines()]
    lengths = [line["seq_len"] for line in lines if line["status"] in sweep.FINAL and line["seq_len"] < 8]
    assert sorted(lengths) == list(range(1, 8))
    assert statuses(tmp_path).count("oom") == 4


def child(parent: subprocess.Popen, words: bytes) -> int:
    """A process that `parent` started with these words in its command line, as soon as there is one."""
    while parent.poll() is None:
        for file in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                own_parent = int((file / "stat").read_text().rpartition(")")[2].split()[1])
                if own_parent == parent.pid and words in (file / "cmdline").read_bytes():
                    return int(file.name)
    raise AssertionError("the sweep ended before it was killed")


def test_a_process_that_cannot_start_leaves_nothing_blocked(tmp_path):
    with pytest.raises(FileNotFoundError):
        processes.run([str(tmp_path / "nowhere")], tmp_path / "output.txt", grace_s=0.1)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()
