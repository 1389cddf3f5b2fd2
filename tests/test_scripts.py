"""The commands as a user types them: from any folder, with their exit status and last words."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tiny import ROOT, overrides, read_curve, read_record

from logitless.records import read_records

# Runs a script with a training step that is replaced by the code in argv[1].
SABOTAGE = """
import runpy, sys
sys.path[:0] = [{root!r}, {source!r}, {scripts!r}]
from logitless.module import LanguageModel
def step(self, batch, batch_idx):
    {code}
LanguageModel.training_step = step
sys.argv = [{script!r}, *sys.argv[1:]]
runpy.run_path({script!r}, run_name="__main__")
"""


def environment(tmp_path: Path) -> dict[str, str]:
    """Ours, with a package named `kernels` in front that must not be imported."""
    fake = tmp_path / "site" / "kernels"
    fake.mkdir(parents=True, exist_ok=True)
    (fake / "__init__.py").write_text("raise ImportError('the kernels of PyPI')\n")
    path = os.pathsep.join([str(fake.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)}


def python(tmp_path: Path, *arguments) -> subprocess.CompletedProcess:
    command = [sys.executable, *map(str, arguments)]
    options = {"cwd": tmp_path, "env": environment(tmp_path), "stdin": subprocess.DEVNULL}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)


def script(tmp_path: Path, name: str, *arguments) -> subprocess.CompletedProcess:
    return python(tmp_path, ROOT / "scripts" / f"{name}.py", *arguments)


def sabotaged(tmp_path: Path, code: str, *arguments) -> subprocess.CompletedProcess:
    paths = {"root": str(ROOT), "source": str(ROOT / "src"), "scripts": str(ROOT / "scripts")}
    program = SABOTAGE.format(code=code, script=str(ROOT / "scripts" / "train.py"), **paths)
    return python(tmp_path, "-c", program, *arguments)


def test_kernels_are_those_of_this_checkout_whatever_is_installed(tmp_path):
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'scripts')!r}); import _path, kernels; print(kernels.__file__)"
    )
    result = python(tmp_path, "-c", program)
    assert result.stdout.strip() == str(ROOT / "kernels" / "__init__.py"), result.stderr
    assert "of PyPI" in python(tmp_path, "-c", "import kernels").stderr  # the fake is really in the way


def test_train_works_from_another_folder_and_generate_continues_what_it_made(tmp_path):
    result = script(tmp_path, "train", *overrides(tmp_path))
    assert result.returncode == 0, result.stderr
    (run_dir,) = (tmp_path / "runs").iterdir()
    record = read_record(run_dir)
    assert record["status"] == "ok"
    assert f"accuracy    validation {record['val_accuracy']:.1%}\n" in result.stdout
    checkpoint = run_dir.relative_to(tmp_path) / "checkpoints" / "last.ckpt"
    for path in (checkpoint, run_dir.relative_to(tmp_path) / "record.jsonl", run_dir.relative_to(tmp_path) / "curves"):
        assert (tmp_path / path).exists()
        assert str(path) in result.stdout

    options = (f"checkpoint={checkpoint}", "prompt=[captain anne,the house]", "max_new_tokens=5")
    result = script(tmp_path, "generate", *options)
    assert result.returncode == 0, result.stderr
    texts = result.stdout.split("\n---\n")
    assert [text[:12] for text in texts] == ["captain anne", "the house" + texts[1][9:12]]


def test_generate_refuses_a_checkpoint_that_is_none_in_one_line(tmp_path):
    result = script(tmp_path, "generate", "checkpoint=nowhere.ckpt", "prompt=a")
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: checkpoint=nowhere.ckpt cannot be read")


@pytest.mark.parametrize("override", ["temperature=-1", "top_k=0", "samples=0", "max_new_tokens=1.5"])
def test_generate_refuses_a_wrong_value_in_one_line(tmp_path, override):
    result = script(tmp_path, "generate", "checkpoint=any.ckpt", "prompt=a", override)
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert f"{override} must be" in line


def test_help_shows_the_common_commands_and_the_configuration(tmp_path):
    result = script(tmp_path, "train", "--help")
    assert result.returncode == 0
    for shown in ("python scripts/train.py -m loss=naive,inplace,fused", "resume=", "loss: fused, inplace, naive"):
        assert shown in result.stdout
    for shown in ("chunk: 1024", "label_smoothing: 0.0", "padded_vocab_size: null", "seq_len: 128"):
        assert shown in result.stdout


@pytest.mark.parametrize("override", ["chunk=0", "resume=nowhere", "budget_mib=0.001"])
def test_a_refused_value_is_one_line_and_a_failure(override, tmp_path):
    result = script(tmp_path, "train", *overrides(tmp_path, override))
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert override in line


def test_a_sweep_over_backends_leaves_a_record_for_each_also_for_one_that_is_refused(tmp_path):
    words = overrides(tmp_path, "max_steps=1", "checkpoint_every=null", "budget_mib=0.001")
    result = script(tmp_path, "train", "-m", "loss=naive,inplace,fused", *words)
    assert result.returncode == 1
    records = [read_records([file.parent])[0] for file in sorted(tmp_path.glob("runs/*/*/record.jsonl"))]
    assert [record["status"] for record in records] == ["ok", "ok", "error"]
    assert [record["overrides"][0] for record in records] == ["loss=naive", "loss=inplace", "loss=fused"]
    assert records[2]["error"].startswith("budget_mib=0.001: ")
    assert f"error: {records[2]['error']}" in result.stdout.splitlines()[-1]


def test_a_resumed_run_keeps_the_overrides_of_the_first_also_when_it_is_resumed_itself(tmp_path):
    words = overrides(tmp_path, "max_steps=2", "hydra.run.dir=first")
    for name, more in (("second", ["resume=first", "max_steps=3"]), ("third", ["resume=second", "max_steps=4"])):
        result = script(tmp_path, "train", *words)
        assert result.returncode == 0, result.stderr
        words = [*more, f"hydra.run.dir={name}"]
    assert script(tmp_path, "train", *words).returncode == 0
    record = read_record(tmp_path / "third")
    assert (record["steps"], record["config"]["model"]["width"]) == (4, 16)


def test_what_a_resumed_run_cannot_change_is_refused(tmp_path):
    words = overrides(tmp_path, "max_steps=1", "hydra.run.dir=first")
    assert script(tmp_path, "train", *words).returncode == 0
    curves = (tmp_path / "first" / "curves" / "metrics.csv").read_text()
    refused = {
        "accumulate=2": "accumulate=2 must stay 1",
        "model.width=32": "model.width=32 must stay 16",
        "hydra.run.dir=first": "holds a run",
    }
    for override, message in refused.items():
        result = script(tmp_path, "train", "resume=first", override)
        assert result.returncode == 1
        (line,) = result.stderr.splitlines()
        assert line.startswith("error: ")
        assert message in line
    assert (tmp_path / "first" / "curves" / "metrics.csv").read_text() == curves


@pytest.mark.parametrize(
    ("code", "status", "says"),
    [
        ("sys.exit(0)", "error", ""),
        ("raise ValueError('of a bug')", "error", "Traceback"),
        ("import torch; torch.empty(2**60)", "oom", "out of memory: "),
    ],
    ids=["exit", "bug", "oom"],
)
def test_a_run_that_does_not_finish_is_a_failure(code, status, says, tmp_path):
    result = sabotaged(tmp_path, code, *overrides(tmp_path), "hydra.run.dir=run")
    assert result.returncode == 1
    assert says in result.stderr
    assert read_record(tmp_path / "run")["status"] == status


def test_a_terminated_run_leaves_a_record(tmp_path):
    arguments = overrides(tmp_path, "max_steps=100000", "val_every=100000", "checkpoint_every=100000")
    command = [sys.executable, ROOT / "scripts" / "train.py", *arguments, "hydra.run.dir=run"]
    curves = tmp_path / "run" / "curves" / "metrics.csv"
    options = {"cwd": tmp_path, "env": environment(tmp_path), "stdin": subprocess.DEVNULL}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, **options) as process:
        deadline = time.monotonic() + 60
        while not (curves.exists() and len(curves.read_text().splitlines()) > 3) and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=120)
    assert process.returncode == 143
    record = read_record(tmp_path / "run")
    assert (record["status"], record["checkpoint_step"]) == ("stopped", record["steps"])
    assert record["steps"] >= 2
    assert len(read_curve(tmp_path / "run", "train/loss")) >= 2


def test_ctrl_c_while_a_run_still_imports_ends_it_without_a_word(tmp_path):
    command = [sys.executable, ROOT / "scripts" / "train.py", *overrides(tmp_path), "hydra.run.dir=run"]
    options = {"cwd": tmp_path, "env": environment(tmp_path), "stdin": subprocess.DEVNULL}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options) as process:
        while not (tmp_path / "run" / ".hydra" / "overrides.yaml").exists() and process.poll() is None:
            time.sleep(0.01)  # Hydra writes this before it calls the script's function
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (130, "", "")


def test_a_killed_run_leaves_its_curves(tmp_path):
    arguments = overrides(tmp_path, "max_steps=50")
    result = sabotaged(
        tmp_path,
        "import os, signal; return sum(p.sum() for p in self.parameters()) if self.global_step < 20 "
        "else os.kill(os.getpid(), signal.SIGKILL)",
        *arguments,
        "hydra.run.dir=run",
    )
    assert result.returncode == -signal.SIGKILL
    assert len(read_curve(tmp_path / "run", "train/loss")) >= 19


def test_report_draws_finished_runs_and_names_the_others(tmp_path):
    for name in ("naive", "fused"):
        words = overrides(tmp_path, f"loss={name}", f"hydra.run.dir=runs/{name}")
        assert script(tmp_path, "train", *words).returncode == 0
    (tmp_path / "runs" / "broken").mkdir()
    (tmp_path / "runs" / "broken" / "record.jsonl").write_text('{"status": "oom"}\nnull\n{"half a li')
    result = script(tmp_path, "report", "runs", "--out", "figures")
    assert result.returncode == 0, result.stderr
    assert re.search("left out.*: runs/broken, OOM", result.stdout)
    assert "skipped 2 broken lines" in result.stderr
    drawing = (tmp_path / "figures" / "backends.svg").read_text()
    assert "naive" in drawing
    assert "fused, chunk=1024" in drawing
    assert (tmp_path / "figures" / "backends.png").stat().st_size > 1000


def write_run(folder: Path, backend: str = "fused", curve: str = "16,2.0\n32,0.0\n", **more) -> None:
    (folder / "curves").mkdir(parents=True)
    (folder / "curves" / "metrics.csv").write_text("tokens,train/loss\n" + curve)
    record = {"status": "ok", "backend": backend, "chunk": None, "curves": "curves/metrics.csv", "command": "seed=1"}
    record |= {"device": "a GPU", "versions": {"torch": "2"}, "commit": None, "peak_allocated_gib": 1.0}
    record |= {"config": {}, "seq_len": 8} | more
    (folder / "record.jsonl").write_text(json.dumps({key: value for key, value in record.items() if value != "none"}))


def test_report_draws_every_run_apart_whatever_its_backend_versions_and_unit(tmp_path):
    write_run(tmp_path / "runs" / "0", "naive")
    for name in ("1", "2"):
        write_run(tmp_path / "runs" / name, versions={"torch": name}, commit=f"c0ffee{name}", command=f"seed={name}")
    write_run(tmp_path / "runs" / "3", device="a CPU", peak_allocated_gib="none", peak_live_tensor_gib=2.0)
    result = script(tmp_path, "report", "runs", "runs/0", "--out", "figures")  # a run that is named twice is one
    assert result.returncode == 0, result.stderr
    drawing = (tmp_path / "figures" / "backends.svg").read_text()
    for text in ("naive", "fused, 1", "fused, 2", "fused", "peak allocated (GiB)", "peak of live tensors (GiB)"):
        assert drawing.count(f">{text}</text>") == 1, text
    for text in ("a GPU, torch 2 and 1, commit c0ffee1, commit c0ffee2", "a CPU, torch 2", "train.py seed=2"):
        assert f"{text}<" in drawing


def test_report_names_what_it_cannot_draw_and_draws_the_rest(tmp_path):
    unreadable = "curves/metrics.csv cannot be read: "
    runs = {
        "empty": ({"curve": ""}, "no training loss in curves/metrics.csv"),
        "cut": ({"curve": "16,2.0\n3"}, unreadable + "ValueError"),
        "words": ({"curve": "16,two\n"}, unreadable + "ValueError"),
        "missing": ({"curves": "nowhere.csv"}, "nowhere.csv cannot be read: FileNotFoundError"),
        "null": ({"peak_allocated_gib": None}, "no peak_allocated_gib"),
        "bare": ({"backend": None, "versions": "none"}, "no backend, versions"),
    }
    for name, (facts, _) in runs.items():
        write_run(tmp_path / "runs" / name, **facts)
    write_run(tmp_path / "runs" / "headless")
    (tmp_path / "runs" / "headless" / "curves" / "metrics.csv").write_text("tokens,trai\n16,2.0\n")
    write_run(tmp_path / "runs" / "naive", "naive", curve="16,0.0\n32,nan\n48,2.0\n")
    write_run(tmp_path / "runs" / "good")
    (tmp_path / "rows.jsonl").write_text('{}\n[]\n"text"\n{"method": "x"}\n{"method": null, "width": null}\n')
    row = dict.fromkeys(("method", "command", "inputs", "dtype", "weight_dtype", "device"), "x") | {"status": "absent"}
    row |= {"versions": {}, "n_tokens": 8, "vocab": 9, "width": 4}
    with open(tmp_path / "rows.jsonl", "a") as stream:
        stream.write(json.dumps(row))
    result = script(tmp_path, "report", "runs", "rows.jsonl", "--out", "figures")
    assert (result.returncode, result.stderr) == (0, "rows.jsonl: skipped 2 broken lines\n")
    for name, (_, reason) in (runs | {"headless": ({}, unreadable + "KeyError")}).items():
        assert re.search(f"left out.*: runs/{name}, {reason}", result.stdout), name
    assert "left out of training_loss: 3 runs in runs (good, naive, null), fewer than 10 points" in result.stdout
    for reason in ("no status", "x: no status, command", "None: there is no figure of logits alone"):
        assert re.search(f"left out.*: [.], {reason}", result.stdout)
    assert "left out: all rows of the benchmark, of which none is ok" in result.stdout
    drawing = (tmp_path / "figures" / "backends.svg").read_text()
    assert ">naive<" in drawing
    assert ">fused<" in drawing


def test_report_makes_a_page_of_runs_of_which_none_can_be_drawn(tmp_path):
    for name, text in (
        ("killed", '{"status": "started"}\n'),
        ("half", '{"status": "o'),
        ("strange", '{"status": 3}\n'),
    ):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "record.jsonl").write_text(text)
    result = script(tmp_path, "report", "runs", "--out", "report")
    assert result.returncode == 0, result.stderr
    assert sorted(path.name for path in (tmp_path / "report").iterdir()) == ["calculator.html", "index.html"]
    page = (tmp_path / "report" / "index.html").read_text()
    for words in ("not ended (running, or killed)", "no whole line in its record", "<td>3</td>", 'id="calculator"'):
        assert words in page
    assert "3 runs: 1 unreadable, 1 started, 1 without a status." in page


@pytest.mark.parametrize(
    ("leave", "reason"),
    [
        (lambda file: file.write_bytes(b'{"status": "ok", "command": "caf\xe9"}\n'), "its record is not UTF-8 text"),
        (lambda file: file.mkdir(), "its record: Is a directory"),
        (lambda file: file.symlink_to("nowhere"), "its record: No such file or directory"),
        (lambda file: file.symlink_to("/proc/self/mem"), "its record: Input/output error"),
        (lambda file: file.touch(0o000), "its record: Permission denied"),
        (lambda file: file.parent.chmod(0o000), "its record: Permission denied"),
        (lambda file: file.write_text("[" * 10**5), "no whole line in its record"),
    ],
    ids=["latin-1", "folder", "dangling", "disk", "forbidden", "closed", "nested"],
)
def test_report_names_a_record_that_cannot_be_read_and_draws_the_rest(tmp_path, leave, reason):
    if reason.endswith("denied") and os.geteuid() == 0:
        pytest.skip("root reads everything")
    for name in ("naive", "fused"):
        write_run(tmp_path / "runs" / name, name)
    (tmp_path / "runs" / "bad").mkdir()
    leave(tmp_path / "runs" / "bad" / "record.jsonl")
    result = script(tmp_path, "report", "runs", "--out", "report")
    assert result.returncode == 0, result.stderr
    assert re.search(f"left out.*: runs/bad, unreadable: {reason}\n", result.stdout)
    page = (tmp_path / "report" / "index.html").read_text()
    assert re.search(f"<li>left out.*: runs/bad, unreadable: {reason}</li>", page)
    assert "3 runs: 1 unreadable, 2 ok." in page
    assert ">naive<" in (tmp_path / "report" / "backends.svg").read_text()


WRONG = [{"config": None}, {"seq_len": True}, {"seq_len": []}, {"allocator": {}}, {"allocator": {"free_gib": 1.0}}]


@pytest.mark.parametrize("status", ["ok", "oom"])
@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_report_draws_the_rest_where_a_record_has_wrong_types(wrong, status, tmp_path):
    for name in ("naive", "fused"):
        for length in (8, 16):
            write_run(tmp_path / "runs" / f"{name}{length}", name, seq_len=length)
    write_run(tmp_path / "runs" / "bad", "naive", **{"status": status, "step": 1, "phase": "forward"} | wrong)
    result = script(tmp_path, "report", "runs", "--out", "report")
    assert result.returncode == 0, result.stderr
    assert ">naive<" in (tmp_path / "report" / "peak_memory.svg").read_text()


def test_report_draws_a_record_with_what_is_no_text(tmp_path):
    """As from a folder whose name is not UTF-8."""
    for name in ("naive", "fused"):
        write_run(tmp_path / "runs" / name, name)
        file = tmp_path / "runs" / name / "record.jsonl"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"command": "data.path=caf\udce9"}) + "\n")
    result = script(tmp_path, "report", "runs", "--out", "report")
    assert result.returncode == 0, result.stderr
    assert "2 runs: 2 ok." in (tmp_path / "report" / "index.html").read_text()


def test_report_names_a_file_that_it_was_given_and_cannot_read(tmp_path):
    write_run(tmp_path / "runs")
    (tmp_path / "rows.jsonl").write_bytes(b"\xff\n")
    result = script(tmp_path, "report", "runs", "rows.jsonl", "--out", "report")
    assert result.returncode == 0, result.stderr
    assert re.search("left out.*: rows.jsonl, unreadable: its record is not UTF-8 text\n", result.stdout)


def test_report_refuses_an_output_that_is_a_file_in_one_line(tmp_path):
    write_run(tmp_path / "runs")
    result = script(tmp_path, "report", "runs", "--out", "runs/record.jsonl")
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith("report.py: error: --out: ")


@pytest.mark.parametrize("device", ["NVIDIA H200", "rtx 4090"])
def test_plan_says_what_does_not_fit_and_the_longest_length_that_does(tmp_path, device):
    options = ("--model", "small", "--device", device, "--batch-size", "1", "--seq-len", "1024,1048576")
    result = script(tmp_path, "plan", *options)
    assert result.returncode == 0, result.stderr
    facts, columns, short, long, *backends = result.stdout.splitlines()
    assert device.lower() in facts.lower()
    assert columns.split()[:4] == ["seq_len", "naive", "inplace", "fused"]
    assert ("does not fit" in short, long.count("does not fit")) == (False, 3)
    assert "tokens, chunk 1024, " in short
    for name, line in zip(("naive", "inplace", "fused"), backends, strict=True):
        assert line.startswith(f"{name:8} first of these that does not fit: 1048576; longest that fits: ")
        assert 1024 < int(line.split()[-1]) < 1048576


def test_plan_names_a_budget_that_would_do(tmp_path):
    options = ("--model", "small", "--device", "H200", "--seq-len", "1024", "--budget-mib")
    refused = script(tmp_path, "plan", *options, "0.001")
    assert refused.returncode == 0, refused.stderr
    found = re.search(
        r"no plan fits into 0.001 MiB with chunk=1024; .* transient ([\d.]+) MiB$", refused.stdout, flags=re.M
    )
    assert "tokens, chunk 1024, " in script(tmp_path, "plan", *options, found[1]).stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--device", "H900", "--seq-len", "8"), "device 'H900' is none of NVIDIA H200, "),
        (("--device", "cpu", "--seq-len", "8,0"), "seq_len=0 must be an integer >= 1"),
        (("--device", "cpu", "--seq-len", "8", "--model", "huge"), "Could not find 'model/huge'"),
    ],
)
def test_plan_refuses_what_it_cannot_predict(tmp_path, options, message):
    result = script(tmp_path, "plan", *options)
    assert result.returncode == 2
    assert f"plan.py: error: {message}" in result.stderr.replace("In 'train': ", "")


def test_plan_measures_the_present_device(tmp_path):
    result = script(tmp_path, "plan", "--device", "present", "--seq-len", "64", "--batch-size", "1")
    assert result.returncode == 0, result.stderr
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if not torch.cuda.is_available():
        assert f"cpu, {0.95 * memory / 2**30:.1f} GiB usable" in result.stdout
