"""Peaks are as measured: on an H200 in docs/results, on a CPU phase by phase with the meter of live tensors."""

import importlib
from dataclasses import replace
from functools import partial

import pytest
import torch
from tiny import BACKENDS, ROOT

from kernels.devices import DEVICES
from logitless import footprint, losses
from logitless.footprint import fits, longest, n_parameters, peak_bytes, peak_parts, phases, usable_bytes
from logitless.footprint_parts import DTYPES, Step, head_plan
from logitless.memory import GIB, LiveTensorMeter
from logitless.model import GPT, GPTConfig
from logitless.records import read_record, read_records
from logitless.report.prediction import step_of

H200, CPU = DEVICES["NVIDIA H200"], DEVICES["cpu"]
SMALL = GPTConfig(12, 12, 768, 50304, "gelu", tied=True, head_bias=False, dropout=0.0)
ODD = GPTConfig(3, 4, 72, 1003, "swiglu", tied=True, head_bias=True, dropout=0.0)
MODELS = {
    "many-tokens": (GPTConfig(2, 2, 64, 512, "gelu", tied=True, head_bias=False, dropout=0.0), 256, 4),
    "large-vocabulary": (GPTConfig(2, 4, 64, 8192, "swiglu", tied=False, head_bias=False, dropout=0.0), 128, 4),
    "odd": (ODD, 199, 2),
    "bias": (GPTConfig(2, 2, 64, 4096, "gelu", tied=False, head_bias=True, dropout=0.0), 512, 1),
    "few-tokens": (GPTConfig(2, 2, 256, 512, "gelu", tied=False, head_bias=True, dropout=0.0), 64, 1),
    "one-block": (GPTConfig(1, 4, 128, 16384, "swiglu", tied=True, head_bias=False, dropout=0.0), 32, 1),
    "deep": (GPTConfig(6, 4, 128, 512, "gelu", tied=True, head_bias=False, dropout=0.0), 64, 8),
    "deep-gated": (GPTConfig(6, 2, 64, 512, "swiglu", tied=False, head_bias=False, dropout=0.0), 512, 2),
}


def recorded(folder: str, backend: str) -> tuple[dict, Step]:
    """The record of a run in docs/results, and its step."""
    record = read_record(ROOT / "docs" / "results" / folder / backend)
    device = H200 if record["device"] == H200.name else CPU
    shape = record["seq_len"], record["batch_size"], record["precision"]
    return record, Step(GPTConfig(**record["config"]["model"]), device, *shape, chunk=record["chunk"])


@pytest.mark.parametrize("backend", BACKENDS)
def test_on_an_h200_a_run_took_what_is_predicted_within_half_a_percent(backend):
    record, step = recorded("small_h200", backend)
    assert peak_bytes(step, backend) / GIB == pytest.approx(record["peak_allocated_gib"], rel=0.005)
    assert n_parameters(step.model) == record["n_parameters"]


def test_where_memory_is_short_the_allocator_wastes_less_than_the_share_that_is_left_to_it():
    records = read_records([ROOT / "docs" / "results" / "frontier_h200"])
    full = [r for r in records if r["status"] == "ok" and r["peak_allocated_gib"] > 0.9 * r["memory_limit_gib"]]
    assert len(full) == 8
    assert all(r["peak_allocated_gib"] > footprint.USABLE_SHARE * r["peak_reserved_gib"] for r in full)


@pytest.mark.parametrize("backend", BACKENDS)
def test_on_a_cpu_a_run_took_what_is_predicted_within_a_percent(backend):
    record, step = recorded("tiny_cpu", backend)
    assert peak_bytes(step, backend) / GIB == pytest.approx(record["peak_live_tensor_gib"], rel=0.01)


def measure(step: Step, backend: str) -> tuple[int, int]:
    """Peaks of forward, and from there to the end of backward, in the second of two steps as the module takes them."""
    gpt = GPT(step.model).to(torch.bfloat16 if step.precision == "bf16-true" else torch.float32)
    adamw, loss = torch.optim.AdamW(gpt.parameters(), fused=True), getattr(losses, backend)
    if backend == "fused":
        loss = partial(loss, chunk=step.chunk, budget_mib=step.budget_mib)
    counted = LiveTensorMeter(gpt)
    with counted:
        for _ in range(2):
            tokens, labels = torch.randint(step.model.padded_vocab_size, (2, step.batch_size, step.seq_len)).unbind()
            counted.reset()
            with torch.autocast("cpu", torch.bfloat16, step.precision == "bf16-mixed", cache_enabled=False):
                total = gpt.head(gpt(tokens), labels, loss).loss
            forward = counted.peak
            adamw.zero_grad()
            counted.reset()
            total.backward()
            backward = counted.peak
            adamw.step()
            del total
    return forward, backward


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("checkpoint", [False, True])
def test_on_a_cpu_forward_and_backward_take_what_is_predicted(checkpoint, name, backend, precision):
    model, seq_len, batch_size = MODELS[name]
    step = Step(replace(model, checkpoint=checkpoint), CPU, seq_len, batch_size, precision, chunk=100)
    forward, backward = measure(step, backend)
    predicted = {phase: sum(parts) for phase, parts in phases(step, backend).items()}
    assert predicted["forward"] == pytest.approx(forward, rel=0.01)
    # On a CPU the backward of a norm in bf16 makes copies in fp32, which are not counted.
    assert peak_bytes(step, backend) == pytest.approx(
        max(forward, backward), rel=0.01 if precision == "32-true" else 0.02
    )
    if backend != "fused":  # of which "head backward" is a bound only
        in_backward = max(size for phase, size in predicted.items() if "backward" in phase)
        assert in_backward == pytest.approx(backward, rel=0.02)


@pytest.mark.parametrize(
    ("backend", "seq_len", "checkpoint", "largest"),
    [("naive", 8192, False, "head"), ("fused", 16384, False, "blocks"), ("fused", 128, True, "states")],
)
def test_the_parts_of_a_peak_say_what_fills_the_memory(backend, seq_len, checkpoint, largest):
    model = GPTConfig(12, 12, 768, 131072, "gelu", tied=True, head_bias=False, dropout=0.0, checkpoint=checkpoint)
    step = Step(model, DEVICES["NVIDIA H200"], seq_len, 1, "bf16-mixed", chunk=128)
    parts = peak_parts(step, backend)._asdict()
    assert sum(parts.values()) == peak_bytes(step, backend)
    assert max(parts, key=parts.get) == largest
    assert parts["states"] >= 4 * 3 * n_parameters(model)


@pytest.mark.parametrize(("budget_mib", "schedule"), [(None, "tokens"), (3.0, "vocab")])
def test_on_a_cpu_a_plan_that_is_chosen_takes_what_is_predicted(budget_mib, schedule):
    model, seq_len, batch_size = MODELS["large-vocabulary"]
    step = Step(model, CPU, seq_len, batch_size, "bf16-true", budget_mib=budget_mib)
    assert head_plan(step).schedule == schedule
    assert peak_bytes(step, "fused") == pytest.approx(max(measure(step, "fused")), rel=0.01)


@pytest.mark.parametrize("model", [SMALL, ODD, replace(ODD, tied=False), replace(SMALL, head_bias=True, mlp="swiglu")])
def test_the_parameters_are_those_of_the_model(model):
    with torch.device("meta"):
        assert n_parameters(model) == GPT(model).n_parameters()


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("device", [H200, DEVICES["NVIDIA GeForce RTX 4090"], CPU], ids=lambda device: device.name)
@pytest.mark.parametrize("backend", BACKENDS)
def test_more_tokens_never_take_less(backend, device, precision, checkpoint):
    model = replace(SMALL, checkpoint=checkpoint)
    lengths = [1, 2, 127, 128, 129, 1023, 1024, 1025, 4096, 10_000, 65_536, 10**6]
    peaks = [peak_bytes(Step(model, device, length, 1, precision, chunk=1024), backend) for length in lengths]
    assert peaks == sorted(peaks)
    assert len(set(peaks)) == len(peaks)


@pytest.mark.parametrize("device", [H200, DEVICES["NVIDIA L4"]], ids=lambda device: device.name)
def test_at_many_tokens_naive_takes_most_and_fused_least(device):
    step = Step(SMALL, device, 16_384, 1, "bf16-mixed", chunk=1024)
    peaks = {backend: peak_bytes(step, backend) for backend in BACKENDS}
    assert peaks["naive"] > peaks["inplace"] > peaks["fused"]
    assert longest(step, "naive") < longest(step, "inplace") < longest(step, "fused")


@pytest.mark.parametrize("chunk", [1024, "auto"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_longest_length_fits_and_the_next_does_not(backend, chunk):
    step = Step(SMALL, DEVICES["NVIDIA L40S"], 1, 2, "bf16-mixed", chunk=chunk)
    found = longest(step, backend)
    assert found > 0
    assert found % footprint.LENGTH_STEP == 0
    assert fits(replace(step, seq_len=found), backend)
    assert not fits(replace(step, seq_len=found + footprint.LENGTH_STEP), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_many_layers_more_keep_little_more_than_their_inputs_where_blocks_are_recomputed(backend):
    step = Step(replace(SMALL, checkpoint=True), H200, 65_536, 1, "bf16-mixed", chunk=1024)
    deeper = replace(step, model=replace(step.model, n_layers=24))
    weights = n_parameters(deeper.model) - n_parameters(step.model)
    inputs = 2 * 12 * 65_536 * 768
    assert 0 <= peak_bytes(deeper, backend) - peak_bytes(step, backend) - inputs <= 16 * weights


def test_a_limit_is_one_of_the_allocators_segments_on_a_gpu_and_of_all_but_the_weights_on_a_cpu():
    step = Step(SMALL, H200, 4096, 1, "bf16-mixed", chunk=1024)
    assert usable_bytes(replace(step, memory_limit_gib=24)) == pytest.approx(0.985 * 24 * GIB)
    assert usable_bytes(replace(step, memory_limit_gib=1000)) == usable_bytes(step)
    on_cpu = replace(step, device=CPU, precision="32-true", memory_limit_gib=1)
    assert usable_bytes(on_cpu) - 4 * n_parameters(SMALL) == pytest.approx(0.985 * GIB)


@pytest.mark.parametrize("backend", BACKENDS)
def test_under_a_limit_the_longest_length_fits_and_is_that_of_a_device_with_as_much(backend):
    step = Step(SMALL, H200, 1, 1, "bf16-mixed", chunk=1024, memory_limit_gib=24)
    found = longest(step, backend)
    assert fits(replace(step, seq_len=found), backend)
    assert not fits(replace(step, seq_len=found + footprint.LENGTH_STEP), backend)
    smaller = replace(H200, memory_bytes=usable_bytes(step) / footprint.USABLE_SHARE + 1)
    assert found == longest(replace(step, device=smaller, memory_limit_gib=None), backend)


def test_plan_obeys_the_limit_and_counts_recomputed_blocks(monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    options = "--model small --device h200 --seq-len 8192,131072 --batch-size 1 --memory-limit-gib 24 --checkpoint"
    monkeypatch.setattr("sys.argv", ["plan.py", *options.split()])
    importlib.import_module("plan").main()
    facts, _, *lines = capsys.readouterr().out.splitlines()
    assert "23.6 GiB usable" in facts
    assert "V = 50304, activation checkpointing; " in facts
    step = Step(replace(SMALL, checkpoint=True), H200, 8192, 1, "bf16-mixed", chunk=1024, memory_limit_gib=24)
    for line, backend in zip(lines[2:], footprint.BACKENDS, strict=True):
        assert line.endswith(f"longest that fits: {longest(step, backend)}")


def test_a_device_too_small_for_the_weights_fits_nothing():
    step = Step(SMALL, replace(H200, memory_bytes=GIB), 1, 1, "bf16-mixed", chunk=1024)
    assert [longest(step, backend) for backend in BACKENDS] == [0, 0, 0]


def test_a_budget_that_no_plan_fits_into_fits_nothing_and_is_named():
    step = Step(SMALL, H200, 4096, 1, "bf16-mixed", budget_mib=1.0)
    assert (fits(step, "fused"), longest(step, "fused")) == (False, 0)
    assert fits(step, "inplace")
    with pytest.raises(ValueError, match="no plan fits into 1 MiB"):
        peak_bytes(step, "fused")


def test_a_device_is_found_by_its_name_or_by_a_part_of_it_in_any_case():
    assert footprint.find_device("nvidia l4").name == "NVIDIA L4"  # also the beginning of another one's
    assert footprint.find_device("h200") is H200
    with pytest.raises(ValueError, match=r"'l4' may be any of NVIDIA L40S, NVIDIA L4$"):
        footprint.find_device("l4")
    with pytest.raises(ValueError, match=r"'H900' is none of NVIDIA H200, .*, cpu$"):
        footprint.find_device("H900")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": replace(SMALL, dropout=0.1)}, "dropout=0.1"),
        ({"precision": "64-true"}, "precision=64-true must be one of 32-true"),
        ({"seq_len": 0}, "seq_len=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"memory_limit_gib": 0}, "memory_limit_gib=0 must be > 0"),
    ],
)
def test_a_step_that_cannot_be_counted_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(Step(SMALL, H200, 128, 1, "bf16-mixed"), **change)


def test_a_backend_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="backend 'fast' must be one of naive, inplace, fused"):
        fits(Step(SMALL, H200, 128, 1, "bf16-mixed"), "fast")


def test_what_trained_under_a_limit_fits_and_what_ran_out_of_memory_does_not():
    records = read_records([ROOT / "docs" / "results" / "frontier_h200"])
    assert len(records) == 32
    for record in records:
        step = step_of(record, record["seq_len"])
        assert step.memory_limit_gib == 24
        assert fits(step, record["backend"]) == (record["status"] == "ok"), record["run_dir"]
