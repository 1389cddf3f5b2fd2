"""The training and validation step: token-weighted means over micro-batches, ranks and validation batches."""

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import hydra
import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import Logger
from tiny import BACKENDS, compose
from torch import nn
from torch.utils.data import DataLoader

from kernels.reference import LossSums
from logitless import losses
from logitless.data import Batch, Batches, Blocks, Corpus, TextData
from logitless.module import LanguageModel, warmup_cosine

IGNORED = -100
MODEL = {"n_layers": 1, "n_heads": 2, "width": 8, "padded_vocab_size": 64}
MODEL |= {"mlp": "gelu", "tied": False, "head_bias": False, "dropout": 0.0}
OPTIMIZER = {"lr": 1e-3, "min_lr_ratio": 0.1, "warmup_steps": 0, "weight_decay": 0.0}
OPTIMIZER |= {"betas": [0.9, 0.95], "grad_clip": None}
# Four kept tokens of loss 2, then one of loss 10, for a backend whose losses are the labels: the mean of the five is
# 3.6, that of the two rows' means 6.
UNEQUAL = np.array([1, 2, 2, 2, 2, 10])


def label_losses(hidden, weight, labels, *, bias=None) -> LossSums:
    """A token's loss is its label times weight[0, 0], which starts at 1 and gets the whole gradient; 2 is right."""
    total = torch.where(labels == IGNORED, 0, labels).sum().float()
    return LossSums(total * weight[0, 0], total, (labels == 2).sum().float())


def unit_losses(hidden, weight, labels, *, bias=None) -> LossSums:
    total = (labels != IGNORED).sum().float()
    return LossSums(total * weight[0, 0], total)


class Points(Logger):
    """Keeps what is logged."""

    name = version = "points"

    def __init__(self):
        super().__init__()
        self.points: list[dict] = []

    def log_metrics(self, metrics, step=None):
        self.points.append({**metrics, "step": step})

    def log_hyperparams(self, *args, **kwargs):
        pass

    def values(self, name: str) -> list[float]:
        return [point[name] for point in self.points if name in point]


class Watched(LanguageModel):
    """Keeps weight[0, 0]'s gradient and the whole norm, before and after clipping, of every optimizer step."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        with torch.no_grad():
            self.gpt.head.weight[0, 0] = 1.0
        self.gradients: list[float] = []
        self.clipped: list[float] = []
        self.all_zero: list[bool] = []

    def configure_gradient_clipping(self, *args, **kwargs):
        self.gradients.append(self.gpt.head.weight.grad[0, 0].item())
        self.all_zero.append(all(p.grad is None or not p.grad.any() for p in self.gpt.parameters()))
        super().configure_gradient_clipping(*args, **kwargs)
        self.clipped.append(self.gpt.head.weight.grad[0, 0].item())


def watched(loss=label_losses, **optimizer) -> Watched:
    torch.manual_seed(0)
    return Watched(MODEL, loss, {**OPTIMIZER, **optimizer}, log_every=1, nonfinite_steps=5, seed=1)


def trainer(points: Points, **options) -> pl.Trainer:
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(
        accelerator="cpu", devices=1, logger=points, max_epochs=-1, log_every_n_steps=1, **quiet, **options
    )


def text_data(stream: np.ndarray, validation: np.ndarray | None = None, **options) -> TextData:
    tokenizer = SimpleNamespace(to_str=lambda: "{}")
    corpus = Corpus(tokenizer, stream, stream if validation is None else validation)
    options = {"seq_len": 4, "batch_size": 1, "accumulate": 1, "max_steps": 1, "val_batches": 100, "seed": 1} | options
    return TextData(corpus, vocab=64, ignore_index=IGNORED, **options)


def fit(module: LanguageModel, data: TextData, *, accumulate: int, max_steps: int) -> Points:
    points = Points()
    options = {"max_steps": max_steps, "accumulate_grad_batches": accumulate, "limit_val_batches": 0}
    trainer(points, **options).fit(module, datamodule=data)
    return points


def test_accumulated_micro_batches_of_unequal_length_weigh_by_tokens():
    module = watched()
    points = fit(module, text_data(UNEQUAL, accumulate=2), accumulate=2, max_steps=1)
    assert module.gradients == pytest.approx([3.6])
    assert points.values("train/loss") == pytest.approx([3.6])
    assert module.tokens_seen == 5


def test_accumulated_micro_batches_of_equal_length_weigh_the_same():
    module = watched()
    points = fit(module, text_data(np.array([1, 2, 2, 10, 10]), seq_len=2, accumulate=2), accumulate=2, max_steps=1)
    assert module.gradients == pytest.approx([6.0])
    assert points.values("train/loss") == pytest.approx([6.0])


def test_ranks_of_unequal_length_weigh_by_tokens():
    """Two ranks in one process; their gradients are averaged as DDP does, their logged sums added as reduce does."""
    modules = [watched(), watched()]
    sums = []
    for rank, module in enumerate(modules):
        strategy = SimpleNamespace(reduce=lambda _, reduce_op: {"sum": sum(sums)}[reduce_op])
        module.trainer = SimpleNamespace(
            accumulate_grad_batches=1, world_size=2, global_step=0, max_steps=1, strategy=strategy
        )
        batches = Batches(Blocks(UNEQUAL, 4, 64, IGNORED), 1, n_batches=1, rank=rank, world=2)
        module.training_step(batches[0], 0).backward()
        sums.append(module._window_sum)
    assert np.mean([module.gpt.head.weight.grad[0, 0].item() for module in modules]) == pytest.approx(3.6)
    for module in modules:
        module.on_before_optimizer_step(torch.optim.SGD(module.parameters(), lr=0.1))
        assert module._point["train/loss"].item() == pytest.approx(3.6)
        assert module.tokens_seen == 5


@pytest.mark.parametrize(("n_rows", "accumulate", "max_steps"), [(10, 4, 3), (3, 8, 2)])
def test_every_window_has_its_whole_gradient(n_rows, accumulate, max_steps):
    """Where the rows run out inside a window it takes those of the next epoch; the last row is a short one."""
    module = watched(unit_losses)
    stream = np.arange(4 * n_rows - 1) % 60
    fit(
        module,
        text_data(stream, accumulate=accumulate, max_steps=max_steps),
        accumulate=accumulate,
        max_steps=max_steps,
    )
    assert module.gradients == pytest.approx([1.0] * max_steps)


def test_the_training_curve_does_not_depend_on_accumulation():
    stream = np.random.default_rng(0).integers(0, 60, 150)
    curves = []
    for batch_size, accumulate in ((8, 1), (4, 2), (1, 8)):
        data = text_data(stream, batch_size=batch_size, accumulate=accumulate, max_steps=6)
        curves.append(fit(watched(losses.naive), data, accumulate=accumulate, max_steps=6).values("train/loss"))
    assert len(curves[0]) == 6
    assert curves[1] == pytest.approx(curves[0], rel=1e-5)
    assert curves[2] == pytest.approx(curves[0], rel=1e-5)


def validate(module: LanguageModel, stream: np.ndarray, seq_len: int, batch_size: int) -> Points:
    points = Points()
    blocks = Blocks(stream, seq_len, 64, IGNORED)
    batches = Batches(blocks, batch_size, n_batches=-(-len(blocks) // batch_size))
    trainer(points).validate(module, dataloaders=DataLoader(batches, batch_size=None), verbose=False)
    return points


@pytest.mark.parametrize("batch_size", [1, 3, 8])
@pytest.mark.parametrize("seq_len", [4, 8])
def test_validation_weighs_by_tokens_whatever_the_batches_and_the_padding(seq_len, batch_size):
    points = validate(watched(), UNEQUAL, seq_len, batch_size)
    assert points.values("val/loss") == pytest.approx([3.6])
    assert points.values("val/perplexity") == pytest.approx([math.exp(3.6)])
    assert points.values("val/accuracy") == pytest.approx([4 / 5])  # the mean of the rows' accuracies is 1/2


@pytest.mark.parametrize("backend", BACKENDS)
def test_validation_loss_of_a_real_model_does_not_depend_on_the_batch_size(backend):
    stream = np.random.default_rng(0).integers(0, 60, 78)
    module = watched(hydra.utils.instantiate(compose(f"loss={backend}", "chunk=7").loss))
    values = [validate(module, stream, 4, batch_size).values("val/loss")[0] for batch_size in (1, 3, 8)]
    assert values == pytest.approx([values[0]] * 3, rel=1e-5)


@pytest.mark.parametrize("batch_size", [1, 3, 8])
@pytest.mark.parametrize("backend", BACKENDS)
def test_validation_accuracy_is_the_share_of_all_labels_that_the_model_ranks_first(backend, batch_size):
    stream = np.random.default_rng(0).integers(0, 3, 78)
    module = watched(hydra.utils.instantiate(compose(f"loss={backend}", "chunk=7").loss))
    with torch.no_grad():
        module.gpt.head.weight[3:] = 0.0  # so that one of the three is mostly ranked first
    blocks = Blocks(stream, 4, 64, IGNORED)
    rows = [blocks.row(index) for index in range(len(blocks))]
    tokens, labels = (torch.from_numpy(np.stack(part)) for part in zip(*rows, strict=True))
    n_right = (module.gpt.head.logits(module.gpt(tokens)).argmax(-1) == labels).sum().item()
    assert 10 < n_right < 67
    assert validate(module, stream, 4, batch_size).values("val/accuracy") == pytest.approx([n_right / 77])


def test_a_loss_beyond_the_range_of_exp_has_an_infinite_perplexity():
    points = validate(watched(lambda *args, **_: LossSums(torch.tensor(0.0), torch.tensor(1e6), 0)), UNEQUAL, 4, 1)
    assert points.values("val/perplexity") == [math.inf]


def test_only_matrices_decay():
    module = watched(weight_decay=0.3)
    module.trainer = SimpleNamespace(max_steps=10, precision="32-true")
    optimizer = module.configure_optimizers()["optimizer"]
    decayed = {id(p) for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    names = {name for name, parameter in module.gpt.named_parameters() if id(parameter) in decayed}
    assert names == {name for name, parameter in module.gpt.named_parameters() if "norm" not in name}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(module.gpt.parameters()))
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.0, 0.3}


@pytest.mark.parametrize(("precision", "fused"), [("32-true", True), ("bf16-mixed", True), ("16-mixed", False)])
def test_adamw_is_fused_except_where_gradients_are_scaled(precision, fused):
    module = watched()
    module.trainer = SimpleNamespace(max_steps=10, precision=precision)
    assert module.configure_optimizers()["optimizer"].defaults["fused"] == fused


def test_a_tied_weight_is_optimized_once():
    module = LanguageModel(MODEL | {"tied": True}, losses.naive, OPTIMIZER, log_every=1, nonfinite_steps=5, seed=1)
    module.trainer = SimpleNamespace(max_steps=10, precision="32-true")
    groups = module.configure_optimizers()["optimizer"].param_groups
    assert sum(p is module.gpt.embedding.weight for group in groups for p in group["params"]) == 1


def test_learning_rate_warms_up_then_follows_half_a_cosine():
    factors = [warmup_cosine(step, warmup_steps=4, max_steps=12, min_ratio=0.1) for step in range(15)]
    assert factors[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert factors[6] == pytest.approx(0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2)
    assert factors[8] == pytest.approx(0.55)
    assert factors[12:] == pytest.approx([0.1] * 3)
    assert warmup_cosine(0, warmup_steps=0, max_steps=1, min_ratio=0.1) == 1.0


def test_the_learning_rate_of_the_curves_is_that_of_the_step():
    points = fit(watched(warmup_steps=2), text_data(UNEQUAL, max_steps=4), accumulate=1, max_steps=4)
    assert points.values("lr") == pytest.approx([5e-4, 1e-3, 1e-3, 0.55e-3])
    assert [point["step"] for point in points.points] == [1, 2, 3, 4]


def test_grad_norm_is_the_norm_before_clipping():
    module = watched(grad_clip=0.5)
    points = fit(module, text_data(UNEQUAL, accumulate=2), accumulate=2, max_steps=1)
    assert points.values("grad_norm") == pytest.approx([3.6])
    assert module.clipped == pytest.approx([0.5], rel=1e-5)


def test_no_grad_clip_leaves_gradients_alone():
    module = watched(grad_clip=None)
    fit(module, text_data(UNEQUAL, accumulate=2), accumulate=2, max_steps=1)
    assert module.clipped == module.gradients


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_window_without_kept_tokens_is_counted_and_changes_nothing(backend):
    module = watched(hydra.utils.instantiate(compose(f"loss={backend}", "chunk=3").loss))
    before = nn.utils.parameters_to_vector(module.gpt.parameters()).clone()
    empty = Batch(torch.ones(2, 4, dtype=torch.int64), torch.full((2, 4), IGNORED), 0)
    points = Points()
    trainer(points, max_steps=2, accumulate_grad_batches=2).fit(module, DataLoader([empty] * 4, batch_size=None))
    assert module.empty_windows == 2
    assert module.all_zero == [True, True]
    assert points.values("train/loss") == [0.0, 0.0]
    assert torch.equal(nn.utils.parameters_to_vector(module.gpt.parameters()), before)


def test_nothing_is_left_to_lightnings_logging_which_fetches_it_at_every_step(monkeypatch):
    monkeypatch.setattr(LanguageModel, "log", None)
    points = fit(watched(), text_data(UNEQUAL, max_steps=2), accumulate=1, max_steps=2)
    assert len(points.values("train/loss")) == 2


def test_log_every_spaces_the_points_and_keeps_the_first_and_last():
    module = watched()
    module.log_every = 3
    points = fit(module, text_data(UNEQUAL, max_steps=7), accumulate=1, max_steps=7)
    assert [point["step"] for point in points.points] == [1, 3, 6, 7]
    assert module.tokens_seen == points.points[-1]["tokens"]


def test_dropout_differs_between_micro_batches_steps_and_ranks():
    module = watched()
    module.gpt.config = replace(module.gpt.config, dropout=0.1)
    draws = set()
    for rank, step in itertools.product(range(2), range(3)):
        module.trainer = SimpleNamespace(accumulate_grad_batches=2, global_step=step, global_rank=rank)
        for batch_idx in (2 * step, 2 * step + 1):
            module.on_train_batch_start(None, batch_idx)
            draws.add(torch.rand(1).item())
    assert len(draws) == 12
