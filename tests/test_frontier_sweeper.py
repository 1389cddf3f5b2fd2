"""The search for the longest sequence, on tests/sweep_app.py, which is out of memory beyond its `limit`."""

import json
import math
import subprocess
import time
from pathlib import Path

import pytest
from sweep_commands import alive, await_line, job_dirs, rows, run, start, statuses

from hydra_plugins.frontier_sweeper import FrontierSweeper, Search
from logitless.sweeps import sweep


def search(limit: int, start: int = 1024, resolution: float = 0.1, multiple: int = 128, longest: int = 2**20):
    """A search on a device on which `limit` is the longest that trains, and the lengths that it asked for."""
    sweeper = FrontierSweeper(1, start, resolution, multiple, longest)
    found, asked = Search((), "", sweeper._round(start)), []
    while length := sweeper._next_length(found):
        assert length % multiple == 0
        assert multiple <= length <= longest
        assert length not in asked
        asked.append(length)
        assert len(asked) < 100
        found.add(length, {"status": "ok" if length <= limit else "oom"})
    return found, asked


@pytest.mark.parametrize("multiple", [1, 128])
@pytest.mark.parametrize("resolution", [0.01, 0.1, 0.5])
@pytest.mark.parametrize("start", [1, 128, 1000, 5000])
@pytest.mark.parametrize("limit", [128, 129, 1000, 1024, 4097, 65536, 300_001])
def test_the_frontier_is_found_to_the_resolution_in_few_runs(limit, start, resolution, multiple):
    found, asked = search(limit, start, resolution, multiple)
    good, bad = found.lengths["ok"], found.lengths["oom"]
    assert good <= limit < bad
    assert bad - good <= max(multiple, resolution * good)
    doublings = abs(math.log2(limit / max(start, multiple))) + 2
    bisections = math.log2(math.log(2) / math.log(1 + resolution)) + 3
    assert len(asked) <= doublings + bisections


def test_a_frontier_beyond_the_ends_is_reported_as_such():
    everything, _ = search(10**9, longest=5000)
    assert (everything.lengths, everything.known()) == ({"ok": 4992}, "trains at 4992")
    nothing, _ = search(100)
    assert (nothing.lengths, nothing.known()) == ({"oom": 128}, "does not train at 128")
    assert search(10**9, start=10**7, longest=5000)[1] == [4992]


def run_frontier(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    return run(folder, "hydra/sweeper=frontier", *arguments)


def test_each_combination_gets_its_frontier_and_a_failure_ends_only_its_own(tmp_path):
    result = run_frontier(tmp_path, "limit=1500,100,9000", "act=raise@4096", "hydra.sweeper.multiple=512")
    assert result.returncode == 1
    assert rows(result) == [
        ["limit=1500", "1024", "1536", "step 2, backward", "1.000 GiB"],
        ["limit=100", "0", "512", "step 2, backward", "-"],
        ["limit=9000", "2048", "-", "-", "2.000 GiB; at 4096 error: RuntimeError: a bug at 4096"],
    ]
    assert "limit=1500: trains at 1024, not at 2048\n" in result.stdout
    (line,) = result.stderr.splitlines()
    assert "limit=9000 seq_len=4096: error: RuntimeError: a bug at 4096, see" in line


def test_a_run_is_short_unless_the_command_says_more(tmp_path):
    arguments = ("hydra.sweeper.start=128", "hydra.sweeper.longest=128", "val_batches=2")
    assert run_frontier(tmp_path, *arguments).returncode == 0
    (run_dir,) = job_dirs(tmp_path)
    config = json.loads((run_dir / "record.jsonl").read_text().splitlines()[-1])["config"]
    keys = ("seq_len", "max_steps", "val_every", "val_batches", "log_every", "checkpoint_every")
    assert [config[key] for key in keys] == [128, 3, 3, 2, 1, None]


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("seq_len=1024,2048", "hydra.sweeper.start"),
        ("max_steps=2,5", "max_steps=2 must be at least 3"),
        ("hydra.sweeper.resolution=0", "resolution must be a number > 0"),
        ("hydra.sweeper.multiple=0", "hydra.sweeper.multiple=0 must be an integer >= 1"),
        ("hydra.sweeper.start=0", "hydra.sweeper.start=0 must be an integer >= 1"),
        ("hydra.sweeper.longest=64", "multiple at most longest"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(override, says, tmp_path):
    result = run_frontier(tmp_path, override)
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert says in line
    assert job_dirs(tmp_path) == []


def test_an_interrupted_search_goes_on_where_it_was(tmp_path):
    log = tmp_path / "log"
    arguments = ("hydra/sweeper=frontier", "limit=5000", "act=hold@4096", f"log={log}")
    arguments += ("hydra.sweeper.grace_s=0.2", "hydra.sweeper.resolution=0.5")
    (tmp_path / "hold").touch()
    process = start(tmp_path, *arguments)
    await_line(tmp_path / "sweep" / "2" / "record.jsonl", "started")
    stopped = time.monotonic()
    process.send_signal(2)
    out, _ = process.communicate(timeout=120)
    assert time.monotonic() - stopped < 5
    assert process.returncode == 130
    assert out.splitlines()[-1].split("  ")[-1].endswith("not finished")
    assert alive(tmp_path) == []
    (tmp_path / "hold").unlink()
    result = run(tmp_path, *arguments)
    assert rows(result)[0][1:] == ["4096", "5760", "step 2, backward", "4.000 GiB"]
    lengths = [json.loads(line)["overrides"][-1] for line in log.read_text().splitlines()]
    assert lengths.count("seq_len=4096") == 2  # the one that was interrupted
    assert len(lengths) == len(set(lengths)) + 1
    assert "error" not in statuses(tmp_path)
    assert run(tmp_path, *arguments).stdout.splitlines()[-1] == result.stdout.splitlines()[-1]
    assert len(log.read_text().splitlines()) == len(lengths)
    assert len(sweep.finished(tmp_path / "sweep")) == len(set(lengths))
