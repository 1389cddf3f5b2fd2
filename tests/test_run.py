"""Whole runs: every backend trains the same model, a resumed run repeats the other, and every run leaves a record."""

import json
import math
import re
import sys
from dataclasses import asdict

import hydra
import pytest
import torch
from omegaconf import OmegaConf
from tiny import BACKENDS, ROOT, compose, read_curve, read_record, tiny, train
from torch import Tensor

from kernels import plan
from logitless import fit, ranks, run
from logitless.generation import load_checkpoint
from logitless.job import loss_plan, prepare
from logitless.loggers import Loggers
from logitless.model import GPT, GPTConfig
from logitless.module import LanguageModel

N_TOKENS = 16  # batch_size 2 of seq_len 8
CHUNKS = (7, N_TOKENS, 1024)  # a short last chunk, exactly one, more rows than there are
CURVES = {"train/loss", "val/loss", "val/perplexity", "lr", "grad_norm", "tokens_per_s", "memory/peak_live_tensor_gib"}
CURVES |= {"step", "tokens", "val/accuracy"}


def backends(chunks=CHUNKS, *overrides: str) -> dict[str, callable]:
    """Every file of conf/loss with every chunk, instantiated; once where the chunk is not used."""
    made = {}
    for name in BACKENDS:
        for chunk in chunks:
            loss = hydra.utils.instantiate(compose(f"loss={name}", f"chunk={chunk}", *overrides).loss)
            made[f"{name}-{chunk}" if "chunk" in loss.keywords else name] = loss
    return made


def weights(run_dir) -> dict[str, Tensor]:
    return torch.load(run_dir / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]


def same_weights(a, b) -> bool:
    a, b = weights(a), weights(b)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def largest_error(ours: list[Tensor], gold: list[Tensor]) -> float:
    """Of the loss and of each parameter's gradient, as relative norms.

    1% of the whole gradient's norm counts as scale too: a norm's weight can have a gradient 5000 times smaller than
    the whole, a cancelled sum that no two orders of fp32 additions agree on.
    """
    whole = torch.stack([gradient.norm() for gradient in gold[1:]]).norm()
    scales = [gold[0].abs(), *(gradient.norm() + 0.01 * whole for gradient in gold[1:])]
    return max(((a - b).norm() / scale).item() for a, b, scale in zip(ours, gold, scales, strict=True))


def errors_against_naive(config, others, monkeypatch, tmp_path) -> dict[str, list[float]]:
    """Trains with the naive backend; at each step the largest relative error of the others' loss and gradients."""
    errors = {name: [] for name in others}
    step = LanguageModel.training_step

    def compared_step(self, batch, batch_idx):
        def loss_and_gradients(loss):
            sums = self.gpt.head(self.gpt(batch.tokens), batch.labels, loss)
            # An upstream gradient other than 1, as the division by the window's tokens makes one.
            return [sums.loss.detach(), *torch.autograd.grad(sums.loss / 7, list(self.gpt.parameters()))]

        gold = loss_and_gradients(self.loss_backend)
        for name, loss in others.items():
            errors[name].append(largest_error(loss_and_gradients(loss), gold))
        return step(self, batch, batch_idx)

    monkeypatch.setattr(LanguageModel, "training_step", compared_step)
    train(config, tmp_path / "run")
    return errors


def test_backends_give_naives_loss_and_gradients_at_each_of_200_steps(tmp_path, monkeypatch):
    config = tiny(tmp_path, "loss=naive", "max_steps=200", "lr=1e-3", "log_every=200", "val_every=200")
    errors = errors_against_naive(config, backends(), monkeypatch, tmp_path)
    assert {name.split("-")[0] for name in errors} == set(BACKENDS)
    for name, worst in errors.items():
        assert len(worst) == 200, name
        assert max(worst) <= 1e-5, name


def test_a_chunk_of_one_row_gives_naives_loss_and_gradients(tmp_path, monkeypatch):
    errors = errors_against_naive(tiny(tmp_path, "loss=naive"), backends((1,)), monkeypatch, tmp_path)
    assert all(len(worst) == 4 and max(worst) <= 1e-5 for worst in errors.values())


def test_every_option_at_once_gives_naives_loss_and_gradients_through_a_biased_untied_head(tmp_path, monkeypatch):
    options = ("label_smoothing=0.1", "z_loss=1e-2", "softcap=5.0")
    model = ("model.head_bias=true", "model.tied=false")
    errors = errors_against_naive(
        tiny(tmp_path, "loss=naive", *options, *model), backends(CHUNKS, *options), monkeypatch, tmp_path
    )
    assert all(len(worst) == 4 and max(worst) <= 1e-5 for worst in errors.values())


def test_curves_of_all_backends_agree_over_200_steps(tmp_path):
    curves = {}
    for name, chunk in [(name, chunk) for name in BACKENDS for chunk in CHUNKS if chunk == 7 or name == "fused"]:
        run_dir = tmp_path / f"{name}-{chunk}"
        options = ("max_steps=200", "lr=1e-3", "val_every=200", f"loss={name}", f"chunk={chunk}")
        train(tiny(tmp_path, *options), run_dir)
        curves[run_dir.name] = read_curve(run_dir, "train/loss") | {"val": read_curve(run_dir, "val/loss")[200]}
    gold = curves["naive-7"]
    assert len(gold) == 201
    assert gold[200] < gold[1] - 1  # it learns
    for name, curve in curves.items():
        assert curve == pytest.approx(gold, rel=1e-4), name


LABELS = [2, 5]
SMOOTHED, PLAIN = 0.447122, 0.104265
LSE = math.log(math.exp(4) + 6)
CAPPED = 2 * math.tanh(4 / 2)


@pytest.mark.parametrize(
    ("overrides", "labels", "mean"),
    [
        ([], LABELS, PLAIN),
        (["label_smoothing=0.1"], LABELS, SMOOTHED),
        (["ignore_index=-1"], [2, -1], PLAIN),
        (["ignore_index=-1", "label_smoothing=0.1"], [2, -1], SMOOTHED),
        (["z_loss=0.01"], LABELS, PLAIN + 0.01 * LSE**2),
        (["softcap=2.0"], LABELS, math.log(math.exp(CAPPED) + 6) - CAPPED),
    ],
)
@pytest.mark.parametrize("name", BACKENDS)
def test_an_option_set_by_override_reaches_every_backend(name, overrides, labels, mean):
    """2 x 7 logits, 4.0 at their own target and else 0."""
    loss = hydra.utils.instantiate(compose(f"loss={name}", "chunk=1", *overrides).loss)
    hidden = torch.zeros(2, 7)
    hidden[0, 2] = hidden[1, 5] = 4.0
    sums = loss(hidden, torch.eye(7), torch.tensor(labels))
    n_kept = sum(label >= 0 for label in labels)
    assert sums.loss.item() / n_kept == pytest.approx(mean, abs=2e-6)
    if "softcap=2.0" not in overrides:
        assert sums.cross_entropy.item() / n_kept == pytest.approx(PLAIN, abs=2e-6)


@pytest.mark.parametrize("name", BACKENDS)
def test_options_reach_the_loss_that_a_run_trains_with(name, tmp_path):
    """The training curve stays plain cross-entropy; the gradient is that of the whole objective."""
    norms = []
    for i, overrides in enumerate([[], ["label_smoothing=0.5"], ["z_loss=1.0"], ["softcap=0.1"]]):
        options = (f"loss={name}", "max_steps=1", "grad_clip=null", *overrides)
        train(tiny(tmp_path, *options), tmp_path / str(i))
        norms.append(read_curve(tmp_path / str(i), "grad_norm")[1])
    assert len({round(norm, 4) for norm in norms}) == 4
    losses = [read_curve(tmp_path / str(i), "train/loss")[1] for i in range(3)]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)


def test_one_seed_repeats_a_run_bit_for_bit_and_another_differs(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        train(tiny(tmp_path, "model.dropout=0.1", f"seed={seed}"), tmp_path / name)
    assert same_weights(tmp_path / "a", tmp_path / "b")
    assert not same_weights(tmp_path / "a", tmp_path / "c")


def test_validation_leaves_training_alone(tmp_path):
    for name, val_every in (("often", 1), ("at_the_end", 4)):
        train(tiny(tmp_path, "model.dropout=0.1", f"val_every={val_every}"), tmp_path / name)
    assert same_weights(tmp_path / "often", tmp_path / "at_the_end")
    assert len(read_curve(tmp_path / "often", "val/loss")) == 4


@pytest.fixture
def failing_step(monkeypatch):
    """Makes a training step raise, at a given number of steps done."""

    def fail(error: BaseException, *, after: int) -> None:
        step = LanguageModel.training_step

        def failing(self, batch, batch_idx):
            if self.global_step == after:
                raise error
            return step(self, batch, batch_idx)

        monkeypatch.setattr(LanguageModel, "training_step", failing)

    return fail


RESUMED = ("model.dropout=0.1", "accumulate=2", "max_steps=6", "checkpoint_every=3", "val_every=2")


def test_a_run_that_died_and_was_resumed_ends_with_the_same_weights(tmp_path, failing_step, monkeypatch):
    train(tiny(tmp_path, *RESUMED), tmp_path / "whole")
    failing_step(RuntimeError("power cut"), after=4)
    with pytest.raises(RuntimeError, match="power cut"):
        train(tiny(tmp_path, *RESUMED), tmp_path / "first")
    monkeypatch.undo()
    train(tiny(tmp_path, *RESUMED, f"resume={tmp_path / 'first'}"), tmp_path / "second")

    whole, first, second = (read_record(tmp_path / name) for name in ("whole", "first", "second"))
    assert same_weights(tmp_path / "whole", tmp_path / "second")
    assert (first["status"], first["steps"]) == ("error", 4)
    assert (second["steps"], second["tokens"]) == (6, whole["tokens"])
    assert second["resume"] == str(tmp_path / "first")
    for name in ("train_loss", "val_loss", "best_train_loss", "best_val_loss", "val_accuracy"):
        assert second[name] == whole[name], name
    curves = [read_curve(tmp_path / name, "tokens") for name in ("whole", "second")]
    assert curves[1] == curves[0]


def test_a_finished_run_goes_on_with_more_steps(tmp_path):
    constant = ("model.dropout=0.1", "accumulate=2", "min_lr_ratio=1.0")
    train(tiny(tmp_path, *constant, "max_steps=6"), tmp_path / "whole")
    train(tiny(tmp_path, *constant, "max_steps=3"), tmp_path / "first")
    record = train(tiny(tmp_path, *constant, "max_steps=6", f"resume={tmp_path / 'first'}"), tmp_path / "second")
    assert record["steps"] == 6
    assert same_weights(tmp_path / "whole", tmp_path / "second")


def test_a_finished_run_resumed_without_more_steps_keeps_its_results(tmp_path):
    first = train(tiny(tmp_path), tmp_path / "first")
    again = train(tiny(tmp_path, f"resume={tmp_path / 'first'}"), tmp_path / "again")
    for name in ("status", "steps", "tokens", "train_loss", "val_loss", "sample"):
        assert again[name] == first[name], name
    assert same_weights(tmp_path / "first", tmp_path / "again")


@pytest.mark.parametrize("name", BACKENDS)
def test_a_run_leaves_its_facts_and_its_curves(name, tmp_path):
    config = tiny(tmp_path, f"loss={name}", "chunk=7", "max_steps=5", "val_every=2")
    returned = train(config, tmp_path / "run")
    record = read_record(tmp_path / "run")
    assert record == json.loads(json.dumps(returned))
    facts = {key: record[key] for key in ("status", "backend", "seq_len", "batch_size", "steps", "tokens")}
    assert facts == {"status": "ok", "backend": name, "seq_len": 8, "batch_size": 2, "steps": 5, "tokens": 80}
    assert record["config"]["loss"]["_target_"].endswith(f".{name}")
    assert record["config"]["model"]["padded_vocab_size"] == 320  # the value in force, not null
    assert record["versions"]["torch"] == torch.__version__
    assert record["device"].startswith("cpu")
    assert record["tokens_per_s"] > 0
    assert "|" in record["sample"]
    for fact in ("loss", "accuracy"):
        assert record[f"val_{fact}"] == read_curve(tmp_path / "run", f"val/{fact}")[5]
    peaks = {key: value for key, value in record.items() if "peak" in key}
    assert set(peaks) == {"peak_live_tensor_gib", "cold_peak_live_tensor_gib", "validation_peak_live_tensor_gib"}
    assert all(0 < value < 0.1 for value in peaks.values())
    assert (tmp_path / "run" / record["checkpoint"]).is_file()
    curves = tmp_path / "run" / record["curves"]
    assert set(curves.read_text().splitlines()[0].split(",")) == CURVES
    assert sorted(read_curve(tmp_path / "run", "train/loss")) == [1, 2, 3, 4, 5]
    assert sorted(read_curve(tmp_path / "run", "val/perplexity")) == [2, 4, 5]


def test_the_peak_of_a_step_is_the_same_at_step_3_and_at_step_10(tmp_path):
    train(tiny(tmp_path, "max_steps=10", "val_every=5"), tmp_path / "run")
    train(tiny(tmp_path, "max_steps=1"), tmp_path / "one")
    peaks = read_curve(tmp_path / "run", "memory/peak_live_tensor_gib")
    assert peaks[10] == pytest.approx(peaks[3], rel=0.01)
    assert read_record(tmp_path / "run")["peak_live_tensor_gib"] == peaks[10]
    one = read_record(tmp_path / "one")
    assert "peak_live_tensor_gib" not in one
    assert one["cold_peak_live_tensor_gib"] == pytest.approx(peaks[1], rel=0.01)


@pytest.mark.parametrize(("by_torchrun", "status"), [(True, "error"), (False, "stopped")])
def test_sigterm_after_a_lost_connection_is_the_cause_unless_torchrun_sent_it(
    by_torchrun, status, tmp_path, failing_step, monkeypatch
):
    monkeypatch.setattr(ranks, "is_started_externally", lambda: by_torchrun)
    terminated = SystemExit(143)
    terminated.__context__ = RuntimeError("Connection reset")
    failing_step(terminated, after=2)
    with pytest.raises(SystemExit):
        train(tiny(tmp_path), tmp_path / "run")
    record = read_record(tmp_path / "run")
    assert (record["status"], record["error"]) == (status, "RuntimeError: Connection reset")


FAILURES = [
    (ValueError("what went wrong"), "error", "what went wrong"),
    (RuntimeError("CUDA error: device-side assert triggered"), "error", "device-side assert"),
    (RuntimeError("CUDA out of memory, says a wrapper"), "error", "says a wrapper"),
    (SystemExit(0), "error", "SystemExit"),
    (SystemExit(3), "error", "SystemExit: 3"),
    (KeyboardInterrupt(), "error", "KeyboardInterrupt"),
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB"), "oom", "Tried to allocate 3 GiB"),
    (
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you"),
        "oom",
        "DefaultCPUAllocator",
    ),
    (MemoryError(), "oom", "MemoryError"),
]


@pytest.mark.parametrize(("error", "status", "text"), FAILURES, ids=lambda value: re.sub(r"\W+", "_", str(value))[:40])
def test_a_run_that_fails_leaves_a_record_of_how_far_it_came(error, status, text, tmp_path, failing_step):
    failing_step(error, after=2)
    expected = SystemExit if isinstance(error, KeyboardInterrupt) else type(error)
    with pytest.raises(expected):
        train(tiny(tmp_path), tmp_path / "run")
    record = read_record(tmp_path / "run")
    assert record["status"] == status
    assert text in record["error"]
    assert (record["steps"], record["tokens"]) == (2, 32)
    assert record["peak_live_tensor_gib"] > 0
    assert record["train_loss"] == read_curve(tmp_path / "run", "train/loss")[2]
    assert (tmp_path / "run" / "traceback.txt").exists() == (status == "error")


def test_a_diverged_loss_is_null_in_the_record(tmp_path, monkeypatch):
    monkeypatch.setattr(LanguageModel, "validation_step", lambda self, *_: self.__dict__.update(_val_sum=float("nan")))
    train(tiny(tmp_path), tmp_path / "run")
    assert read_record(tmp_path / "run")["val_loss"] is None


def test_a_resume_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"resume=.*last\.ckpt"):
        train(tiny(tmp_path, f"resume={tmp_path}"), tmp_path / "run")


def test_the_allocators_own_refusal_is_out_of_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(LanguageModel, "training_step", lambda *_: torch.empty(2**60))
    with pytest.raises(RuntimeError):
        train(tiny(tmp_path), tmp_path / "run")
    assert read_record(tmp_path / "run")["status"] == "oom"


def test_a_failure_in_validation_leaves_a_record(tmp_path, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("in validation")

    monkeypatch.setattr(LanguageModel, "validation_step", full)
    with pytest.raises(torch.OutOfMemoryError):
        train(tiny(tmp_path), tmp_path / "run")
    assert read_record(tmp_path / "run")["status"] == "oom"


def plain(value) -> bool:
    if isinstance(value, dict):
        return type(value).__module__ in ("builtins", "collections") and all(map(plain, value.values()))
    if isinstance(value, list | tuple):
        return type(value) in (list, tuple) and all(map(plain, value))
    return value is None or type(value) in (bool, int, float, str, Tensor)


@pytest.fixture
def checkpoint(tmp_path):
    train(tiny(tmp_path, "max_steps=1"), tmp_path / "run")
    return tmp_path / "run" / "checkpoints" / "last.ckpt"


def test_checkpoints_hold_plain_containers_and_tensors_only(checkpoint):
    content = torch.load(checkpoint, weights_only=True)
    assert plain(content)
    assert set(content["hyper_parameters"]) == {"model"}
    load_checkpoint(checkpoint, torch.device("cpu"))


called = []


def foreign(cls, kwargs):
    called.append(cls)


def test_a_checkpoint_cannot_name_a_function_to_call(checkpoint):
    content = torch.load(checkpoint, weights_only=True)
    content["hyper_parameters"]["_instantiator"] = f"{__name__}.foreign"
    torch.save(content, checkpoint)
    assert __name__ in sys.modules
    with pytest.raises(ValueError, match="instantiator"):
        LanguageModel.load_from_checkpoint(checkpoint)
    with pytest.raises(ValueError, match="hyper-parameters"):
        load_checkpoint(checkpoint, torch.device("cpu"))
    assert called == []


def test_no_code_of_ours_unpickles_more_than_weights():
    files = [file for folder in ("src", "scripts", "kernels") for file in (ROOT / folder).rglob("*.py")]
    assert files
    assert not [file for file in files if re.search(r"weights_only\s*=\s*False", file.read_text())]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("bias", [False, True])
def test_the_backends_agree_in_every_precision_in_training_and_validation(precision, bias, tmp_path):
    options = (f"precision={precision}", f"model.head_bias={bias}", "chunk=3")
    records = {
        name: train(tiny(tmp_path, f"loss={name}", *options), tmp_path / name) for name in ("naive", "inplace", "fused")
    }
    for name in ("inplace", "fused"):
        for loss in ("train_loss", "val_loss"):
            difference = abs(records[name][loss] / records["naive"][loss] - 1)
            assert difference < (1e-5 if precision == "32-true" else 1e-3), (name, loss)


HEADS = {
    "budget": ("chunk=auto", "budget_mib=1"),
    "chunk": ("chunk=7", "budget_mib=1", "model.head_bias=true", "model.tied=false"),
    "smoothing": ("chunk=auto", "budget_mib=0.1", "label_smoothing=0.1"),
    "softcap": ("chunk=auto", "budget_mib=0.05", "softcap=5.0"),
}


@pytest.fixture
def plans_made(monkeypatch):
    """What `plan.plan` is asked and what it answers, as a set that a test may clear."""
    make, asked = plan.plan, set()

    def watched(head, device, **limits):
        made = make(head, device, **limits)
        asked.add((head, device, limits["budget_mib"], limits["chunk"], made))
        return made

    monkeypatch.setattr(plan, "plan", watched)
    return asked


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("overrides", HEADS.values(), ids=HEADS)
def test_the_plan_of_a_run_is_that_of_the_calls_it_makes_and_is_printed_and_recorded(
    overrides, precision, tmp_path, plans_made, capsys, monkeypatch
):
    job = prepare(tiny(tmp_path, *overrides, f"precision={precision}"))
    foreseen = set(plans_made)
    plans_made.clear()
    logged = []
    monkeypatch.setattr(Loggers, "finish", lambda self, summary: logged.append(summary["plan"]))
    run.train(job, tmp_path / "run")
    assert plans_made == foreseen
    assert f"fused: {job.plan}\n" in capsys.readouterr().out
    assert logged == [asdict(job.plan)] == [read_record(tmp_path / "run")["plan"]]


def test_mixed_fp16_computes_in_fp16_from_hidden_states_and_weights_in_fp32(tmp_path, plans_made):
    """On a CPU, where Lightning has no such precision, inside autocast alone."""
    config = OmegaConf.to_container(tiny(tmp_path, "chunk=auto", "budget_mib=1"), resolve=True)
    config["model"]["padded_vocab_size"] = 320
    loss = hydra.utils.instantiate(config["loss"])
    loss_plan(config, loss, torch.device("cpu"), "16-mixed")
    foreseen = set(plans_made)
    plans_made.clear()
    gpt, tokens = GPT(GPTConfig(**config["model"])), torch.zeros(2, 8, dtype=torch.int64)
    for is_training in (True, False):
        with torch.autocast("cpu", torch.float16), torch.set_grad_enabled(is_training):
            gpt.head(gpt(tokens), tokens, loss)
    assert plans_made == foreseen


@pytest.mark.parametrize("name", sorted(set(BACKENDS) - {"fused"}))
def test_a_backend_without_a_plan_says_what_it_does_not_use(name, tmp_path, capsys):
    record = train(tiny(tmp_path, f"loss={name}", "budget_mib=1e-3", "max_steps=1"), tmp_path / "run")
    assert f"{name}: all 16 x 320 logits at once; it uses neither chunk nor budget_mib\n" in capsys.readouterr().out
    assert record["plan"] is None


@pytest.mark.parametrize(("loss", "rows"), [("inplace", 48), ("fused", 9)])
def test_a_run_of_a_cut_vocabulary_says_what_a_rank_holds(loss, rows, tmp_path):
    made = prepare(tiny(tmp_path, "trainer=tp_vocab", "trainer.accelerator=cpu", f"loss={loss}", "chunk=10"))
    record = {"n_parameters": 1, "head_share": 0.5, "backend": loss, "chunk": made.loss.keywords.get("chunk")}
    record |= {"device": "cpu", "precision": "32-true", "world_size": 3}
    lines = fit.first_lines(made, record, tmp_path)
    assert f"{loss}: {rows} x 107 of all ranks' 48 x 320 logits at once on a rank\n" in lines


def test_a_run_killed_in_its_last_validation_validates_when_resumed(tmp_path, monkeypatch):
    options = ("max_steps=4", "val_every=4", "checkpoint_every=4")
    with monkeypatch.context() as patch:
        patch.setattr(LanguageModel, "validation_step", lambda *_: (_ for _ in ()).throw(RuntimeError("killed")))
        with pytest.raises(RuntimeError, match="killed"):
            train(tiny(tmp_path, *options), tmp_path / "first")
    record = train(tiny(tmp_path, *options, f"resume={tmp_path / 'first'}"), tmp_path / "second")
    assert record["val_loss"] > 0


def test_an_integer_beta_is_a_number(tmp_path):
    assert train(tiny(tmp_path, "betas=[0,0.95]", "max_steps=1"), tmp_path / "run")["status"] == "ok"
