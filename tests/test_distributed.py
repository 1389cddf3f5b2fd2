"""Several processes compute what one does, and end together when one of them fails.

On the CPU, over gloo, and on two GPUs, over NCCL. The runs that succeed share process groups, of 2 and of 3 ranks.
"""

import errno
import functools
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import numpy as np
import pytest
import tiny
import torch
import torch.multiprocessing
from tiny import BACKENDS, ROOT, NoWaiting, with_callbacks
from torch.distributed.tensor import DTensor

from logitless import fit, processes, ranks
from logitless.callbacks import PeakMemory
from logitless.checkpoints import ResumeError
from logitless.data import Corpus, TextData
from logitless.generation import load_checkpoint
from logitless.model import Attention, Head
from logitless.module import DivergedError

STRATEGIES = ("ddp", "fsdp", "tp_vocab")
ONE = ("max_steps=5", "precision=32-true", "model.n_layers=2", "betas=[0.0,0.95]", "chunk=5", "grad_clip=0.5", "seed=2")
EACH = [
    (world, strategy, backend, accumulate)
    for world, counts in ((2, (1, 2)), (3, (2,)))
    for strategy in STRATEGIES
    for backend in BACKENDS
    for accumulate in counts
]
RESUMED = list(itertools.product(STRATEGIES, repeat=2))  # by which strategy, of which
MODELS = {2: ("model.tied=true",), 3: ("model.tied=false", "model.head_bias=true")}  # 320 classes: 107, 107, 106

PYTHON = (sys.executable,)
TORCHRUN = (str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node=2")


def name(strategy: str, backend: str, accumulate: int) -> str:
    return f"{strategy}-{backend}-{accumulate}"


def options(world: int, backend: str, accumulate: int, ignored: int) -> list[str]:
    """All windows hold another number of tokens, since the commonest one does not count; nothing divides anything."""
    shared = [*ONE, *MODELS[world], f"ignore_index={ignored}", "val_batches=1000"]
    return [*shared, f"loss={backend}", f"accumulate={accumulate}"]


class Observer(pl.Callback):
    """Notes what a rank has of the model, and how often it calls others itself.

    Not the sums of DDP and FSDP, nor what the norm of sharded gradients and a cut vocabulary take.
    """

    def __init__(self):
        self.n_calls = 0
        self.seen = {"classes": [], "dtypes": [], "calls": []}
        for module, method in ((Head, self._note_classes), (Attention, self._note_dtype)):
            module.forward = self._first(method, module.forward)
        for name in ("all_reduce", "barrier", "broadcast"):
            setattr(torch.distributed, name, self._first(self._count, getattr(torch.distributed, name)))

    @staticmethod
    def _first(note, function):
        def call(*arguments, **options):
            if not torch.compiler.is_compiling():
                note(*arguments)
            return function(*arguments, **options)

        return call

    def _note_classes(self, head: Head, *_) -> None:
        weight = head.weight
        self.seen["classes"].append(len(weight.to_local() if isinstance(weight, DTensor) else weight))

    def _note_dtype(self, attention: Attention, *_) -> None:
        if attention.training:
            self.seen["dtypes"].append(str(attention.value.weight.dtype))

    def _count(self, *_) -> None:
        self.n_calls += 1

    def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
        self.seen["calls"].append(self.n_calls)

    def write(self, file: Path, n_not_waited: int) -> None:
        """What was seen since it last wrote, and in how many batches nothing waited for the GPU."""
        file.write_text(json.dumps(self.seen | {"n_not_waited": n_not_waited}))
        for values in self.seen.values():
            values.clear()


def start_rank(rank: int, world: int, port: int, folder: Path, runs: list[tuple[str, list[str]]]) -> None:
    """Is one rank of all the runs."""
    os.environ |= {"LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": str(port), "HF_HUB_OFFLINE": "1"}
    PeakMemory.summary = lambda self: {"peak_live_tensor_gib": float(rank)}
    observer, trainer_of, compiler = Observer(), fit._trainer, torch.compile
    for run, overrides in runs:
        if run == "full-disk" and rank == 0:
            os.fsync = no_space
        torch.compile = functools.partial(compiler, backend="eager")  # generating code takes seconds
        watched = [NoWaiting()] if run.startswith("quiet") and "trainer.accelerator=gpu" in overrides else []
        fit._trainer = with_callbacks(trainer_of, observer, *watched)
        waiting = [RuntimeError] if watched else []
        with suppress(OSError, DivergedError, *waiting):
            tiny.train(tiny.tiny(folder, *overrides), folder / run)
        observer.write(folder / f"seen-{run}-{rank}.json", sum(each.n_batches for each in watched))


def no_space(descriptor: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


class Runs:
    """What the runs of one process group left, and the same of one process with as many sequences a batch."""

    def __init__(self, world: int, folder: Path, accelerator: str = "cpu"):
        self.world, self.folder, self.accelerator = world, folder, accelerator
        self.ignored = commonest_token(folder)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        torch.multiprocessing.spawn(start_rank, (world, port, folder, self.runs()), nprocs=world)

    def runs(self) -> list[tuple[str, list[str]]]:
        runs = {name(*each): (each[0], options(w, *each[1:], self.ignored)) for w, *each in EACH if w == self.world}
        if self.world == 2:
            quiet = ["max_steps=8", "log_every=2", "val_every=8", "checkpoint_every=null", "accumulate=2"]
            runs |= {f"quiet-{strategy}": (strategy, quiet) for strategy in STRATEGIES}
        if self.accelerator == "gpu":
            return self._on_ranks(runs)
        for strategy in STRATEGIES:
            runs[f"uneven-{strategy}"] = strategy, ["val_batches=4", "max_steps=1"]
        for strategy, first in RESUMED if self.world == 2 else []:
            resume = f"resume={self.folder / name(first, 'fused', 2)}"
            runs[f"{strategy}-from-{first}"] = strategy, [*ONE, "accumulate=2", "max_steps=7", resume]
        if self.world == 2:
            for strategy in STRATEGIES:
                runs[f"mixed-{strategy}"] = strategy, [*ONE, "accumulate=2", "precision=bf16-mixed"]
                runs[f"compiled-{strategy}"] = strategy, [*options(2, "fused", 2, self.ignored), "compile=true"]
                runs[f"profiled-{strategy}"] = strategy, ["max_steps=3", "val_every=2", "profile=true"]
                runs[f"diverged-{strategy}"] = (
                    strategy,
                    ["lr=1e30", "nonfinite_steps=2", "grad_clip=null"],
                )
        runs["full-disk"] = "ddp", ["max_steps=3", "checkpoint_every=1"]
        return self._on_ranks(runs)

    def _on_ranks(self, runs: dict[str, tuple[str, list[str]]]) -> list[tuple[str, list[str]]]:
        where = [f"trainer.accelerator={self.accelerator}", f"trainer.devices={self.world}"]
        return [(run, [*overrides, f"trainer={strategy}", *where]) for run, (strategy, overrides) in runs.items()]

    def seen(self, run: str, rank: int) -> dict[str, list]:
        """What `Observer` saw."""
        return json.loads((self.folder / f"seen-{run}-{rank}.json").read_text())

    @functools.cache  # noqa: B019
    def alone(self, backend: str, accumulate: int) -> Path:
        run = self.folder / f"alone-{backend}-{accumulate}"
        overrides = [*options(self.world, backend, accumulate, self.ignored), f"batch_size={2 * self.world}"]
        overrides.append(f"trainer={self.accelerator}")
        tiny.train(tiny.tiny(self.folder, *overrides), run)
        return run


def commonest_token(folder: Path) -> int:
    stream = tiny.job.prepare(tiny.tiny(folder)).corpus.train
    return int(np.bincount(stream).argmax())


@pytest.fixture(scope="module")
def runs_of_2(tmp_path_factory):
    return Runs(2, tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def runs_of_3(tmp_path_factory):
    return Runs(3, tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def runs_of_2_gpus(tmp_path_factory):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    return Runs(2, tmp_path_factory.mktemp("runs"), "gpu")


@pytest.fixture
def runs_of(request):
    return lambda world: request.getfixturevalue(f"runs_of_{world}")


def gradients(run: Path) -> dict[int, torch.Tensor]:
    """The last step's gradients, clipped: AdamW's mean of gradients of which only the last counts."""
    state = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["optimizer_states"][0]["state"]
    return {number: values["exp_avg"] for number, values in state.items()}


@pytest.mark.parametrize(("world", "strategy", "backend", "accumulate"), EACH)
def test_loss_and_gradients_are_those_of_one_process(world, strategy, backend, accumulate, runs_of):
    assert_equal(runs_of(world), strategy, backend, accumulate)


@pytest.mark.gpu
@pytest.mark.parametrize(("strategy", "backend", "accumulate"), [each[1:] for each in EACH if each[0] == 2])
def test_loss_and_gradients_of_two_gpus_are_those_of_one(strategy, backend, accumulate, runs_of_2_gpus):
    assert_equal(runs_of_2_gpus, strategy, backend, accumulate)


def assert_equal(runs: Runs, strategy: str, backend: str, accumulate: int) -> None:
    """What `runs` computed on all ranks is what one computes."""
    together, alone = runs.folder / name(strategy, backend, accumulate), runs.alone(backend, accumulate)
    for curve in ("train/loss", "grad_norm", "val/loss", "val/accuracy", "lr", "tokens"):
        expected = tiny.read_curve(alone, curve)
        assert len(expected) >= 3
        assert tiny.read_curve(together, curve) == pytest.approx(expected, rel=1e-5), curve
    expected, found = gradients(alone), gradients(together)
    assert expected.keys() == found.keys()
    for number, gradient in expected.items():
        assert (found[number] - gradient).norm() <= 1e-5 * gradient.norm(), number


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world", [2, 3])
def test_rank_0_alone_writes_and_the_record_is_of_all_ranks(world, strategy, runs_of):
    runs = runs_of(world)
    run = runs.folder / name(strategy, "fused", 2)
    record = tiny.read_record(run)
    assert (record["status"], record["world_size"]) == ("ok", runs.world)
    assert record["tokens"] == tiny.read_record(runs.alone("fused", 2))["tokens"]
    assert record["peak_live_tensor_gib"] == world - 1, "not the largest"
    assert {file.name for file in run.iterdir()} == {"record.jsonl", "curves", "checkpoints"}
    assert {file.name for file in (run / "checkpoints").iterdir()} == {"last.ckpt", "previous.ckpt"}
    gpt, _ = load_checkpoint(run / "checkpoints" / "last.ckpt", torch.device("cpu"))
    corpus = tiny.job.prepare(tiny.tiny(runs.folder)).corpus
    assert record["sample"] == fit.sample(gpt, corpus, {"seed": 2})


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world", [2, 3])
def test_a_cut_vocabulary_is_never_whole(world, strategy, runs_of):
    """All heads that a rank had weights of, in training and validation."""
    run, cut = name(strategy, "fused", 2), {2: [160, 160], 3: [107, 107, 106]}[world]
    for rank in range(world):
        assert {*runs_of(world).seen(run, rank)["classes"]} == {cut[rank] if strategy == "tp_vocab" else 320}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_compiled_parts_train_as_eager_ones(strategy, runs_of):
    runs = runs_of(2)
    for curve in ("train/loss", "grad_norm", "val/loss"):
        expected = tiny.read_curve(runs.folder / name(strategy, "fused", 2), curve)
        assert tiny.read_curve(runs.folder / f"compiled-{strategy}", curve) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("strategy", ["fsdp", "tp_vocab"])
def test_in_mixed_precision_ranks_exchange_weights_in_bf16_and_gradients_in_fp32(strategy, runs_of):
    """As `ddp` computes, which copies each weight to bf16 and sums gradients in fp32."""
    runs = runs_of(2)
    assert {dtype for rank in range(2) for dtype in runs.seen(f"mixed-{strategy}", rank)["dtypes"]} == {
        "torch.bfloat16"
    }
    sharded, whole = (gradients(runs.folder / f"mixed-{each}") for each in (strategy, "ddp"))
    for number, gradient in whole.items():
        assert (sharded[number] - gradient).norm() <= 1e-5 * gradient.norm(), number


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_between_points_ranks_do_not_call_each_other(strategy, runs_of):
    """Points are at steps 1, 2, 4, 6, 8, of two micro-batches each. No batch follows step 8: its calls are not seen."""
    for rank in range(2):
        n_calls = runs_of(2).seen(f"quiet-{strategy}", rank)["calls"]
        assert len(n_calls) == 16
        speaking = [batch for batch, (before, after) in enumerate(itertools.pairwise(n_calls)) if before != after]
        assert {batch // 2 + 1 for batch in speaking} == {1, 2, 4, 6}


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_between_points_no_rank_waits_for_its_gpu(strategy, runs_of_2_gpus):
    """In all batches of steps without a point: 3, 5, 7. In step 2 DDP orders its buckets anew, for which it waits."""
    assert tiny.read_record(runs_of_2_gpus.folder / f"quiet-{strategy}")["status"] == "ok"
    assert [runs_of_2_gpus.seen(f"quiet-{strategy}", rank)["n_not_waited"] for rank in range(2)] == [6, 6]


def test_a_disk_that_takes_no_checkpoint_leaves_the_ranks_in_step(runs_of):
    record = tiny.read_record(runs_of(2).folder / "full-disk")
    assert (record["status"], record["steps"]) == ("error", 3)
    assert "could not be written: there is no checkpoint" in record["error"]
    assert record["val_loss"] > 0


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_all_ranks_have_is_blamed_on_none(strategy, runs_of):
    record = tiny.read_record(runs_of(2).folder / f"diverged-{strategy}")
    assert record["status"] == "error"
    assert record["error"].startswith("logitless.module.DivergedError: loss or gradient norm not finite since step")
    assert "failed_rank" not in record


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_profiled_run_validates_after_its_last_step(strategy, runs_of):
    """For which Lightning moves the model, and FSDP's parameters may have no weak references then."""
    record = tiny.read_record(runs_of(2).folder / f"profiled-{strategy}")
    assert (record["status"], record["steps"]) == ("ok", 3)
    assert record["step_ms"]["head, loss"] > 0
    assert tiny.read_curve(runs_of(2).folder / f"profiled-{strategy}", "val/loss").keys() == {2, 3}


OOM = {"failed_rank": 1, "status": "oom", "error": "no memory"}
LOST = {"failed_rank": 1, "status": "error", "error": "connection closed"}
TOLD = {"failed_rank": 2, "status": "stopped", "error": "SIGTERM"}
WAITED = [{"failed_rank": rank, "status": "error", "error": "Timed out waiting 45000ms"} for rank in (1, 2)]


@pytest.mark.parametrize(
    ("reports", "codes", "expected"),
    [
        ([], [None, None], None),
        ([LOST], [1, -9], (2, "error")),
        ([OOM], [1, -9], (1, "oom")),
        ([LOST], [1, 1], (1, "error")),
        ([LOST], [1, 143], (2, "stopped")),
        ([LOST], [1, -15], (2, "stopped")),
        ([], [3, -9], (2, "error")),
        ([], [143, None], (1, "stopped")),
        ([], [-15, None], (1, "stopped")),
        ([], [-2, None], (1, "stopped")),
        ([], [130, None], (1, "stopped")),
        ([LOST, TOLD], [1, None], (2, "stopped")),
        (WAITED[1:], [None, None], (1, "error")),
        (WAITED, [1, 1], (0, "error")),
    ],
)
def test_of_ranks_that_failed_the_cause_is_named(reports, codes, expected, tmp_path):
    for report in reports:
        ranks.report_failure(tmp_path, report["failed_rank"], report)
    trainer = SimpleNamespace(strategy=SimpleNamespace(launcher=None), world_size=3, global_rank=0)
    watch = ranks.Watch(trainer, tmp_path, give_up=None)
    watch.children = [SimpleNamespace(poll=lambda code=code: code, returncode=code, pid=0) for code in codes]
    failure = watch.failure()
    assert (failure and (failure["failed_rank"], failure["status"])) == expected


def test_of_ranks_that_failed_one_that_somebody_stopped_is_the_cause(tmp_path):
    ranks.report_failure(tmp_path, 1, LOST)
    trainer = SimpleNamespace(strategy=SimpleNamespace(launcher=None), world_size=3, global_rank=0)
    watch = ranks.Watch(trainer, tmp_path, give_up=None)
    watch.children = [subprocess.Popen(["sleep", "100"]) for _ in range(2)]
    assert watch.failure() == LOST
    os.kill(watch.children[1].pid, signal.SIGSTOP)
    os.waitid(os.P_PID, watch.children[1].pid, os.WSTOPPED)
    failure = watch.failure()
    watch._kill_children()
    assert (failure["failed_rank"], failure["status"]) == (2, "error")


def test_a_run_of_another_number_of_ranks_is_not_resumed(runs_of, tmp_path):
    runs = runs_of(2)
    config = tiny.tiny(
        runs.folder, *ONE, "accumulate=2", "max_steps=7", f"resume={runs.folder / name('ddp', 'fused', 2)}"
    )
    with pytest.raises(ResumeError, match="of 2 ranks, this one is of 1"):
        tiny.train(config, tmp_path / "run")


@pytest.mark.parametrize(("strategy", "first"), RESUMED)
def test_a_run_goes_on_under_any_strategy(strategy, first, runs_of):
    """Against a run of one process that goes on from the checkpoint of one process."""
    runs = runs_of(2)
    alone = runs.folder / "alone-resumed"
    if not alone.exists():
        overrides = [*ONE, "accumulate=2", "max_steps=7", f"batch_size={2 * runs.world}"]
        overrides.append(f"resume={runs.alone('fused', 2)}")
        tiny.train(tiny.tiny(runs.folder, *overrides), alone)
    resumed = runs.folder / f"{strategy}-from-{first}"
    for curve in ("train/loss", "grad_norm"):
        expected = tiny.read_curve(alone, curve)
        assert expected.keys() == set(range(1, 8))
        assert tiny.read_curve(resumed, curve) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world", [2, 3])
def test_a_validation_that_ranks_do_not_divide_counts_every_batch_once(world, strategy, runs_of):
    runs = runs_of(world)
    run = runs.folder / f"uneven-{strategy}"
    config = tiny.tiny(runs.folder, "val_batches=4", "max_steps=1")
    gpt, _ = load_checkpoint(run / "checkpoints" / "last.ckpt", torch.device("cpu"))
    job = tiny.job.prepare(config)
    stream = torch.from_numpy(job.corpus.validation[: 4 * 2 * 8 + 1].astype(np.int64))
    with torch.no_grad():
        logits = gpt.head.logits(gpt(stream[:-1].view(-1, 8))).flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, stream[1:]).item()
    assert tiny.read_record(run)["val_loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_ranks_validate_as_often_and_share_the_rows(world):
    stream = np.arange(1, 42)  # 10 rows of 4 tokens: 5 batches, or 4
    for val_batches, n_rows in ((100, 10), (4, 8)):
        loaders = []
        for rank in range(world):
            data = text_data(stream, val_batches)
            data.trainer = SimpleNamespace(global_rank=rank, world_size=world)
            loaders.append(list(data.val_dataloader()))
        assert len({len(loader) for loader in loaders}) == 1
        assert len({batch.tokens.shape for loader in loaders for batch in loader}) == 1
        labels = torch.cat([batch.labels.flatten() for loader in loaders for batch in loader])
        assert sorted(labels[labels != -100].tolist()) == list(range(2, 4 * n_rows + 2))
        assert [sum(batch.window_tokens for batch in loader) for loader in loaders] == [4 * n_rows] * world


def text_data(stream: np.ndarray, val_batches: int) -> TextData:
    corpus = Corpus(SimpleNamespace(to_str=lambda: "{}"), stream, stream)
    options = {"seq_len": 4, "batch_size": 2, "accumulate": 1, "max_steps": 1, "ignore_index": -100, "seed": 1}
    return TextData(corpus, vocab=64, val_batches=val_batches, **options)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_part_of_a_weight_is_refused(backend):
    """As FSDP leaves a weight that is read from outside of its module: flattened away, or a DTensor."""
    loss = tiny.hydra.utils.instantiate(tiny.compose(f"loss={backend}", "chunk=2").loss)
    sharded = torch.zeros(8, 16)
    sharded.device_mesh = None
    for weight in (torch.zeros(0, 16), sharded):
        with pytest.raises(ValueError, match="weight not materialised"):
            loss(torch.zeros(3, 16), weight, torch.zeros(3, dtype=torch.int64))


def test_ranks_must_find_each_other(tmp_path, monkeypatch):
    trainer = tiny.tiny(tmp_path, "trainer=ddp", "trainer.num_nodes=2").trainer
    with pytest.raises(ValueError, match=r"trainer\.num_nodes=2.*torchrun.*srun"):
        ranks.check(trainer, ["hydra.run.dir=run"])
    monkeypatch.setenv("SLURM_PROCID", "0")
    with pytest.raises(ValueError, match=r"hydra\.run\.dir=FOLDER"):
        ranks.check(trainer, [])
    ranks.check(trainer, ["hydra.run.dir=run"])


def run_app(
    tmp_path: Path, fail: str, *more: str, flags: tuple = (), starter: tuple = PYTHON, accelerator: str = "cpu"
) -> tuple[subprocess.CompletedProcess, float]:
    """What a script printed and returned, and the seconds it took; nothing of what it started may be left."""
    options = tiny.overrides(tmp_path, "trainer.devices=2", f"trainer.accelerator={accelerator}", *more)
    command = [*starter, str(ROOT / "tests" / "rank_app.py"), *flags, *options]
    started = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=os.environ | {"FAIL": fail},
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    out, err = process.communicate(timeout=240)
    seconds = time.monotonic() - started
    assert processes.group_members(process.pid) == []
    return subprocess.CompletedProcess(command, process.returncode, out, err), seconds


ENDS = {
    "1,killed,backward": ("error", "ended with status -9"),
    "1,hangs,forward": ("oom", "OutOfMemoryError: in a test"),  # rank 1 is out of memory, rank 0 waits without end
}


@pytest.mark.parametrize(
    ("fail", "starter"),
    [("1,killed,backward", PYTHON), ("1,hangs,forward", PYTHON), ("1,hangs,forward", TORCHRUN)],
    ids=["killed", "oom", "oom-torchrun"],
)
@pytest.mark.parametrize("accelerator", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_all_ranks_end_when_one_fails(fail, starter, accelerator, tmp_path):
    """Also where the others wait for it in NCCL, in which no signal reaches Python."""
    if accelerator == "gpu" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    status, error = ENDS[fail]
    options = {"starter": starter, "accelerator": accelerator}
    result, seconds = run_app(tmp_path, fail, "trainer=ddp", "hydra.run.dir=run", **options)
    assert result.returncode == 1
    assert seconds < 60
    record = tiny.read_record(tmp_path / "run")
    assert (record["status"], record["failed_rank"], record["step"]) == (status, 1, 2)
    phase = fail.split(",")[2]
    # Rank 1 was killed without a word: that is where rank 0 waits for it, which is ahead of its GPU.
    assert record["phase"] in ((phase, "optimizer") if accelerator == "gpu" and status == "error" else (phase,))
    assert error in record["error"]


def test_all_ranks_end_with_a_checkpoint_when_one_is_terminated(tmp_path):
    """As by a scheduler; the others hear of it at the next point of the curves."""
    result, _ = run_app(tmp_path, "1,terminated,forward", "trainer=fsdp", "hydra.run.dir=run", "log_every=3")
    assert result.returncode == 143
    record = tiny.read_record(tmp_path / "run")
    assert (record["status"], record["steps"], record["checkpoint_step"]) == ("stopped", 3, 3)
    assert "failed_rank" not in record
    # With the first run's ranks, which this command does not name.
    script = [sys.executable, str(ROOT / "scripts" / "train.py"), "resume=run", "hydra.run.dir=again", "max_steps=4"]
    result = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    record = tiny.read_record(tmp_path / "again")
    assert (record["world_size"], record["first_step"], record["steps"]) == (2, 3, 4)


def test_without_checkpoints_sigterm_to_any_rank_ends_all_at_once(tmp_path):
    options = ("trainer=ddp", "hydra.run.dir=run", "checkpoint_every=null")
    result, seconds = run_app(tmp_path, "1,terminated,forward", *options)
    assert result.returncode == 143
    assert seconds < 60
    record = tiny.read_record(tmp_path / "run")
    assert (record["status"], record["steps"]) == ("stopped", 1)
    assert record["error"].endswith("SIGTERM to rank 1")


@pytest.mark.parametrize("rank", [0, 1])
def test_sigterm_to_a_rank_that_starts_ends_all_at_once(rank, tmp_path):
    result, seconds = run_app(tmp_path, f"{rank},terminated,loading", "trainer=ddp", "hydra.run.dir=run")
    assert result.returncode == 143
    assert seconds < 40  # less than the ranks would wait for each other
    record = tiny.read_record(tmp_path / "run")
    assert (record["status"], record["steps"]) == ("stopped", 0)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_stands_still_is_named_and_ended(rank, tmp_path):
    options = ("trainer=ddp", "trainer.timeout_s=15", "hydra.run.dir=run")
    result, seconds = run_app(tmp_path, f"{rank},stands,forward", *options)
    assert result.returncode == {0: -signal.SIGKILL, 1: 1}[rank]
    assert seconds < 60
    record = tiny.read_record(tmp_path / "run")
    assert (record["status"], record["failed_rank"]) == ("error", rank)
    assert {0: "stands still", 1: "others waited for 1 in vain"}[rank] in record["error"]


def test_a_rank_that_was_started_a_moment_ago_ends_with_the_first(tmp_path):
    """Before the watch has seen it, or it has asked to end with its parent."""
    child = subprocess.Popen(["sleep", "100"])
    strategy = SimpleNamespace(launcher=SimpleNamespace(procs=[child]))
    trainer = SimpleNamespace(strategy=strategy, world_size=2, global_rank=0)
    with pytest.raises(SystemExit), ranks.Watch(trainer, tmp_path, give_up=None):
        raise SystemExit(143)
    assert child.returncode == -signal.SIGKILL
    code = "from logitless import processes; processes.die_with_parent(); print('lives')"
    for parent, lives in ((os.getpid(), "lives\n"), (2**30, "")):
        environment = os.environ | {processes.PARENT: str(parent), "PYTHONPATH": str(ROOT / "src")}
        result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        assert result.stdout == lives


def test_a_sweep_goes_on_after_a_rank_that_is_out_of_memory(tmp_path):
    sweep = ("trainer=fsdp", "seed=1,2", "hydra.sweep.dir=sweep")
    result, _ = run_app(tmp_path, "1,oom,backward", *sweep, flags=("-m",))
    assert result.returncode == 0, result.stderr
    for job in "01":
        record = tiny.read_record(tmp_path / "sweep" / job)
        outcome = [record[key] for key in ("status", "world_size", "failed_rank", "step", "phase", "steps")]
        assert outcome == ["oom", 2, 1, 2, "backward", 1]


SRUN = """#!/bin/bash
shift
for task in 0 1; do
    SLURM_PROCID=$task SLURM_LOCALID=0 SLURM_NODEID=$task "$@" &
done
wait -n && wait -n
"""


@pytest.mark.parametrize("restart", [0, 1, 3])
def test_the_script_for_slurm_trains_on_two_nodes_and_goes_on_when_it_is_requeued(restart, tmp_path):
    """With a srun that starts both tasks here, and one that only says what it was asked for.

    Only run 0 of the last job got as far as a checkpoint; the one before has none at all.
    """
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text('#!/bin/bash\necho "$@"\n' if restart else SRUN)
    srun.chmod(0o755)
    for folder in ("scripts", "conf"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    job = {"JOB_ID": "77", "JOB_NAME": "x", "JOB_NUM_NODES": "2", "NTASKS_PER_NODE": "1", "NTASKS": "2"}
    job |= {"NODELIST": "localhost", "RESTART_COUNT": str(restart)}
    environment = {f"SLURM_{name}": value for name, value in job.items()}
    environment |= {"PATH": f"{srun.parent}:{os.environ['PATH']}", "PYTHON": sys.executable}
    if restart == 3:
        (tmp_path / "runs/77/0/checkpoints").mkdir(parents=True)
        (tmp_path / "runs/77/0/checkpoints/previous.ckpt").touch()
        (tmp_path / "runs/77/1/checkpoints").mkdir(parents=True)
    command = ["bash", "scripts/train.sbatch", *tiny.overrides(tmp_path, "trainer=fsdp", "trainer.accelerator=cpu")]
    result = subprocess.run(
        command, cwd=tmp_path, env=os.environ | environment, capture_output=True, text=True, timeout=100
    )
    assert result.returncode == 0, result.stderr
    if restart:
        resumed = ["resume=runs/77/0"] if restart == 3 else []
        assert result.stdout.split()[-1 - len(resumed) :] == [f"hydra.run.dir=runs/77/{restart}", *resumed]
    else:
        record = tiny.read_record(tmp_path / "runs" / "77" / "0")
        assert (record["status"], record["world_size"], record["steps"]) == ("ok", 2, 4)
