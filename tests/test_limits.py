"""A device made smaller: real allocation failures, where they happened, and nothing left of the limit afterwards."""

import gc
import resource
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from tiny import read_record, tiny, train
from torch._dynamo.exc import BackendCompilerFailed, InternalTorchDynamoError

from logitless import limits
from logitless.limits import CpuMemoryLimit, memory_limit
from logitless.memory import is_out_of_memory
from logitless.module import LanguageModel

WIDE = ("batch_size=1", "chunk=64", "model.padded_vocab_size=16384", "max_steps=3", "val_every=3", "val_batches=1")
LOGITS_GIB = 1024 * 16384 * 4 / 2**30  # 0.0625


def limited(tmp_path, *overrides: str) -> dict:
    """The record of a run with a wide head, however it ends."""
    try:
        return train(tiny(tmp_path, *WIDE, *overrides), tmp_path / "run")
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return read_record(tmp_path / "run")
    finally:
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        assert soft == hard, "the limit outlived its run"


MATRICES = ("model.width=64", "model.padded_vocab_size=65536", "model.tied=false")  # 2 of 16 MiB
PARAMETERS = ("loss=fused", "seq_len=8", "chunk=1", *MATRICES)
FAILURES = {
    "forward": ("loss=naive", "seq_len=4096", f"memory_limit_gib={4 * 1.6 * LOGITS_GIB}"),  # of two such tensors
    "backward": ("loss=naive", "seq_len=4096", f"memory_limit_gib={4 * 2.6 * LOGITS_GIB}"),  # of three
    "optimizer": (*PARAMETERS, f"memory_limit_gib={48 / 1024}"),  # gradients fit, AdamW's two states do not
}


@pytest.mark.parametrize("phase", FAILURES)
def test_a_real_failure_is_told_with_its_step_and_phase(phase, tmp_path):
    record = limited(tmp_path, *FAILURES[phase])
    assert (record["status"], record["step"], record["phase"], record["steps"]) == ("oom", 1, phase, 0)
    assert "can't allocate memory: you tried to allocate" in record["error"]


def test_a_failure_in_validation_is_not_taken_for_one_of_training(tmp_path, monkeypatch):
    step = LanguageModel.validation_step
    blocks = []

    def large(self, batch, batch_idx):
        blocks.append(torch.empty(2**28, dtype=torch.uint8))
        step(self, batch, batch_idx)

    monkeypatch.setattr(LanguageModel, "validation_step", large)
    record = limited(tmp_path, "loss=fused", "seq_len=64", "memory_limit_gib=0.2")
    assert (record["status"], record["phase"], record["step"], record["steps"]) == ("oom", "validation", 3, 3)
    assert record["peak_live_tensor_gib"] > 0, "the last good peak"


def test_with_enough_memory_naive_trains_and_fused_trains_longer_with_less(tmp_path):
    (tmp_path / "naive").mkdir()
    naive = limited(tmp_path / "naive", "loss=naive", "seq_len=1024", f"memory_limit_gib={4.5 * LOGITS_GIB}")
    fused = limited(tmp_path, "loss=fused", "seq_len=4096", f"memory_limit_gib={1.6 * LOGITS_GIB}")
    assert (naive["status"], fused["status"]) == ("ok", "ok")
    assert fused["memory_limit_gib"] == 1.6 * LOGITS_GIB
    assert "built and warmed-up model" in fused["memory_limit"]


def test_a_checkpoint_is_written_whole_under_a_limit_that_training_fills(tmp_path):
    """Its weights and states are 96 MiB, which the limit does not leave when it is written."""
    record = limited(tmp_path, *PARAMETERS, f"memory_limit_gib={128 / 1024}", "checkpoint_every=1")
    assert record["status"] == "ok"
    state = torch.load(tmp_path / "run" / record["checkpoint"], weights_only=True)["state_dict"]
    assert all(value.isfinite().all() for value in state.values())


def test_the_limit_holds_again_after_a_checkpoint(tmp_path, monkeypatch):
    step = LanguageModel.training_step

    def large(self, batch, batch_idx):
        if self.global_step == 2:
            torch.empty(2**28, dtype=torch.uint8)
        return step(self, batch, batch_idx)

    monkeypatch.setattr(LanguageModel, "training_step", large)
    record = limited(tmp_path, "loss=fused", "seq_len=64", "memory_limit_gib=0.2", "checkpoint_every=1")
    assert (record["status"], record["step"], record["phase"]) == ("oom", 3, "forward")


def test_without_a_limit_there_is_none(tmp_path):
    assert memory_limit(None, torch.device("cpu")) is None
    assert isinstance(memory_limit(1, torch.device("cpu")), CpuMemoryLimit)
    record = limited(tmp_path, "seq_len=8")
    assert (record["memory_limit_gib"], record["memory_limit"]) == (None, None)


def test_checkpoint_every_null_leaves_no_checkpoint(tmp_path):
    record = limited(tmp_path, "seq_len=8", "checkpoint_every=null")
    assert record["status"] == "ok"
    assert "checkpoint" not in record
    assert not list(tmp_path.rglob("*.ckpt"))


def test_a_run_that_has_started_says_so_and_what_was_asked_of_it(tmp_path, monkeypatch):
    """What a killed process leaves."""
    seen = {}
    step = LanguageModel.training_step

    def look(self, batch, batch_idx):
        (line,) = (tmp_path / "run" / "record.jsonl").read_text().splitlines()
        seen["line"] = line
        return step(self, batch, batch_idx)

    monkeypatch.setattr(LanguageModel, "training_step", look)
    limited(tmp_path, "seq_len=8")
    assert '"status": "started"' in seen["line"]
    assert '"seq_len": 8' in seen["line"]


def ones(device: str, requires_grad: bool) -> torch.Tensor:
    """A matrix of 64 MiB, on a GPU of 1 GiB, for which no cache has room."""
    if device == "cuda":
        gc.collect()
        torch.cuda.empty_cache()  # else it may be a part of a larger segment, whose rest nothing gives back
    size = 2**12 if device == "cpu" else 2**14
    return torch.ones(size, size, device=device, requires_grad=requires_grad)


@contextmanager
def nearly_full(device: str):
    """Leaves room for 16 MiB."""
    gc.collect()  # what exceptions of other tests hold would be room as well, once it goes
    if device == "cpu":
        limits._limit_data(limits._data_bytes() + 2**24)
    else:
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**24) / total)
    try:
        yield
    finally:
        limits._limit_data(None)
        if device == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0)


def test_a_compiler_that_runs_out_of_memory_is_out_of_memory():
    for inner, is_oom in ((MemoryError("std::bad_alloc"), True), (ValueError("a bug"), False)):
        assert is_out_of_memory(BackendCompilerFailed(lambda: None, inner, None)) == is_oom
        while_tracing = InternalTorchDynamoError("of that which Dynamo ran")
        while_tracing.__context__ = inner
        assert is_out_of_memory(while_tracing) == is_oom


def test_a_limit_of_a_cpu_is_none_for_a_compiler():
    with pytest.raises(ValueError, match="compile=false"):
        memory_limit(0.1, torch.device("cpu"), is_compiled=True)


DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@DEVICES
@pytest.mark.parametrize("needs_gradient", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_out_of_memory_is_recognised_in_forward_and_backward(is_compiled, needs_gradient, device, inductor):
    large = ones(device, needs_gradient)
    step = torch.compile(torch.square) if is_compiled else torch.square
    loss = step(large).sum()  # compiles, with all the memory that this takes
    failing = loss.backward if needs_gradient else partial(step, large)
    with nearly_full(device), pytest.raises(RuntimeError) as caught:
        failing()
    assert is_out_of_memory(caught.value), caught.value


@DEVICES
def test_out_of_memory_is_recognised_in_the_first_optimizer_step(device):
    weight = ones(device, requires_grad=True)
    weight.grad = torch.ones_like(weight)
    adamw = torch.optim.AdamW([weight], fused=True)
    with nearly_full(device), pytest.raises(RuntimeError) as caught:
        adamw.step()
    assert is_out_of_memory(caught.value), caught.value


@pytest.mark.gpu
def test_a_gpu_obeys_the_limit_and_forgets_it(tmp_path):
    device = torch.device("cuda", torch.cuda.current_device())
    (tmp_path / "fits").mkdir()
    big = ("loss=naive", "seq_len=8192", "model.padded_vocab_size=65536", "trainer=gpu")  # 1 GiB of bf16 logits
    record = limited(tmp_path, *big, "memory_limit_gib=2")
    assert (record["status"], record["step"], record["steps"]) == ("oom", 1, 0)
    assert record["phase"] in ("forward", "backward")
    fits = limited(tmp_path / "fits", *big, "memory_limit_gib=12")
    assert fits["status"] == "ok"
    assert fits["peak_reserved_gib"] <= 12
    assert fits["allocator"]["total_gib"] > 12
    torch.empty(13 * 2**30, dtype=torch.uint8, device=device)  # more than the limit was: it is forgotten
    with pytest.raises(ValueError, match="memory_limit_gib=100000"):
        memory_limit(100000, device)
