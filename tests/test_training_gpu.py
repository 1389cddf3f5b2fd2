"""Training on a GPU: compiled as eager, no waiting for the device between points, batches that nothing waits for."""

import gc

import pytest
import torch
from tiny import NoWaiting, read_curve, tiny, train, with_callbacks

from logitless import callbacks, fit
from logitless.model import fastest_attention

pytestmark = pytest.mark.gpu

WIDE = ("trainer=gpu", "model.width=128", "model.n_layers=4", "seq_len=256", "batch_size=4", "chunk=512")


@pytest.mark.parametrize("backend", ["naive", "inplace", "fused"])
@pytest.mark.parametrize("checkpoint", [False, True], ids=["kept", "recomputed"])
def test_a_compiled_run_is_the_eager_one_in_no_more_memory(checkpoint, backend, tmp_path):
    options = (
        *WIDE,
        f"loss={backend}",
        f"model.checkpoint={checkpoint}",
        "max_steps=6",
        "model.padded_vocab_size=8192",
    )
    records = {}
    for flag in (True, False):
        gc.collect()  # what earlier runs of this process left would count as this one's
        records[flag] = train(tiny(tmp_path, *options, f"compile={flag}"), tmp_path / str(flag))
    compiled, eager = (read_curve(tmp_path / str(flag), "train/loss") for flag in (True, False))
    assert compiled == pytest.approx(eager, rel=2e-3)  # bf16: fused operators round less often
    assert records[True]["peak_allocated_gib"] <= 1.02 * records[False]["peak_allocated_gib"]


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("backend", ["naive", "inplace", "fused"])
def test_no_step_waits_for_the_device_but_one_with_a_point(backend, is_compiled, tmp_path, monkeypatch):
    no_waiting = NoWaiting()
    monkeypatch.setattr(fit, "_trainer", with_callbacks(fit._trainer, no_waiting))
    options = (*WIDE, f"loss={backend}", f"compile={is_compiled}", "max_steps=12", "log_every=6", "val_every=6")
    options += ("checkpoint_every=null",)
    record = train(tiny(tmp_path, *options), tmp_path / "run")
    assert record["status"] == "ok"
    assert no_waiting.n_batches == 9  # neither the first, nor steps 6 and 12


def test_batches_wait_in_pinned_memory(tmp_path, monkeypatch):
    pinned = []

    def look(self, trainer, module, batch, batch_idx):
        pinned.extend(tensor.is_pinned() for tensor in trainer.train_dataloader.dataset[0][:2])
        loader = iter(trainer.train_dataloader)
        pinned.extend(tensor.is_pinned() for tensor in next(loader)[:2])

    monkeypatch.setattr(callbacks.Position, "on_train_batch_start", look)
    train(tiny(tmp_path, *WIDE, "max_steps=1"), tmp_path / "run")
    assert pinned == [False, False, True, True]


def test_attention_is_cudnns_from_hopper_on():
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("an older GPU, where PyTorch's own order is kept")
    query = torch.randn(2, 4, 256, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with fastest_attention(query.device), torch.profiler.profile() as profile:
        torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
    assert any("_cudnn_attention" in event.key for event in profile.key_averages())


def test_a_length_after_nine_others_is_as_in_a_process_of_its_own(tmp_path):
    """The peaks, to 5%; that it gets a graph of its own is tested without a GPU."""
    lengths = [128 * length for length in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10)]
    options = (*WIDE, "compile=true", "max_steps=4")
    last = [train(tiny(tmp_path, *options, f"seq_len={n}"), tmp_path / str(n)) for n in lengths][-1]
    torch.compiler.reset()
    alone = train(tiny(tmp_path, *options, f"seq_len={lengths[-1]}"), tmp_path / "alone")
    assert last["peak_allocated_gib"] == pytest.approx(alone["peak_allocated_gib"], rel=0.05)
