"""Token chunks and vocabulary slabs: the same numbers by both, on both paths; what each of them keeps and allocates."""

import pytest
import torch
from conftest import HAS_GPU
from heads import assert_equal, exact_rows, make_head, relative_error, sums_and_gradients
from torch import nn

from kernels import gemm, reference, row_kernels
from kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_sums
from kernels.reference import Objective
from logitless.memory import LiveTensorMeter

SCHEDULES = ("tokens", "vocab")
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES)
needs_interpreter = pytest.mark.skipif(HAS_GPU, reason="test_kernels_gpu.py runs the compiled kernels")


def leaves_and_loss(head: tuple, wanted=(True, True), **options) -> tuple[list, torch.Tensor]:
    """The leaves of hidden and weight that want gradients, and the loss."""
    hidden, weight, _, labels = head
    leaves = [t.detach().clone().requires_grad_(want) for t, want in zip((hidden, weight), wanted, strict=True)]
    loss = linear_cross_entropy(*leaves, labels, chunk=3, **options)
    return [leaf for leaf, want in zip(leaves, wanted, strict=True) if want], loss


@needs_interpreter
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_both_schedules_on_both_paths_agree(reduction, monkeypatch):
    monkeypatch.setattr(gemm, "BLOCK_N", 16)
    monkeypatch.setattr(gemm, "BLOCK_D", 32)
    hidden, weight, bias, labels = make_head(19, 521, 36, bias=True)
    results = []
    for uses_epilogue in (False, True):
        monkeypatch.setattr(row_kernels, "runs_triton", lambda tensor, uses_epilogue=uses_epilogue: uses_epilogue)
        for schedule in SCHEDULES:

            def loss(hidden, weight, bias, schedule=schedule):
                options = {"schedule": schedule, "reduction": reduction, "chunk": 7, "z_loss": 1e-3}
                return linear_cross_entropy(hidden, weight, labels, linear_bias=bias, **options).sum()

            results.append(sums_and_gradients(loss, {"hidden": hidden, "weight": weight, "bias": bias}))
    for other in results[1:]:
        assert_equal(other, results[0], 1e-5)


@pytest.mark.parametrize("wanted", [(True, True), (False, True), (True, False)], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@every_schedule
def test_a_second_backward_is_right_or_raises(schedule, reduction, wanted, engine):
    head = make_head(7, 33, 8)
    leaves, loss = leaves_and_loss(head, wanted, schedule=schedule, reduction=reduction)
    refuses = wanted[0] if schedule == "vocab" else reduction == "mean"
    for factor in (0.37, -2.0):
        upstream = torch.full_like(loss, factor)
        if factor == -2.0 and refuses:
            with pytest.raises(RuntimeError, match="first backward"):
                torch.autograd.grad(loss, leaves, upstream, retain_graph=True)
            continue
        gradients = torch.autograd.grad(loss, leaves, upstream, retain_graph=True)
        copies = [gradient.clone() for gradient in gradients]
        right = exact_rows(*head, torch.full((7,), factor / (6 if reduction == "mean" else 1)))
        names = [name for name, want in zip(("dhidden", "dweight"), wanted, strict=True) if want]
        for name, gradient in zip(names, gradients, strict=True):
            assert relative_error(gradient, right[name]) < 1e-5
    assert all(torch.equal(*pair) for pair in zip(gradients, copies, strict=True))


@every_schedule
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_double_backward_raises(schedule, reduction):
    leaves, loss = leaves_and_loss(make_head(7, 33, 8), schedule=schedule, reduction=reduction)
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(loss.sum(), leaves, create_graph=True)


@every_schedule
def test_a_gradient_that_arrives_strided_or_expanded_is_read_right(schedule, engine):
    head = make_head(7, 33, 8)
    for upstream in (torch.tensor(0.37).expand(7), torch.linspace(-1, 2, 14)[::2]):
        leaves, losses = leaves_and_loss(head, schedule=schedule, reduction="none")
        gradients = torch.autograd.grad(losses, leaves, upstream)
        right = exact_rows(*head, upstream)
        for name, gradient in zip(("dhidden", "dweight"), gradients, strict=True):
            assert relative_error(gradient, right[name]) < 1e-5


@pytest.mark.parametrize("number", [float("inf"), float("nan")])
@pytest.mark.parametrize("uses_epilogue", [False, pytest.param(True, marks=needs_interpreter)])
@every_schedule
def test_no_upstream_gradient_of_an_ignored_token_reaches_anything(schedule, uses_epilogue, number, monkeypatch):
    """As of losses that are divided by a count of tokens, which is 0 there."""
    monkeypatch.setattr(row_kernels, "runs_triton", lambda tensor: uses_epilogue)
    hidden, weight, _, labels = make_head(7, 33, 8)
    labels[2] = -100
    results = []
    for upstream_of_ignored in (0.0, number):
        upstream = torch.linspace(-1, 2, 7)
        upstream[2] = upstream_of_ignored
        leaves, losses = leaves_and_loss((hidden, weight, None, labels), schedule=schedule, reduction="none")
        results.append(torch.autograd.grad(losses, leaves, upstream))
    for ours, right in zip(*results, strict=True):
        assert torch.equal(ours, right)


@every_schedule
def test_the_cross_entropy_beside_the_loss_is_plain_and_has_no_gradient(schedule, engine):
    hidden, weight, _, labels = make_head(7, 33, 8)
    sums = linear_cross_entropy_sums(
        hidden.requires_grad_(), weight, labels, Objective(z_loss=0.1), chunk=3, schedule=schedule
    )
    right = exact_rows(hidden, weight, None, labels, torch.ones(7))["loss"].sum()
    assert relative_error(sums.cross_entropy, right) < 1e-5
    assert sums.loss > sums.cross_entropy
    assert not sums.cross_entropy.requires_grad


# Memory, of the plain path and a bf16 head


def peak_above_inputs(hidden, weight, labels, **options) -> int:
    """Bytes of live tensors, above the inputs', at the peak of a loss and its backward."""
    module = nn.Module()
    module.hidden, module.weight = nn.Parameter(hidden), nn.Parameter(weight)
    module.register_buffer("labels", labels)
    meter = LiveTensorMeter(module)
    before = meter.bytes
    with meter:
        loss = linear_cross_entropy(module.hidden, module.weight, module.labels, **options)
        loss.backward(torch.ones_like(loss))
    assert module.weight.grad.dtype == weight.dtype
    return meter.peak - before


@pytest.fixture
def small_blocks(monkeypatch):
    """What the plain path takes for 64 rows at a time would hide what the schedules take."""
    monkeypatch.setattr(reference, "BLOCK_ROWS", 4)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("n", [256, 512])
def test_vocabulary_slabs_hold_neither_a_sum_of_the_weights_shape_nor_all_logits(n, reduction, small_blocks):
    v, d, chunk = 8192, 128, 32
    hidden, weight, _, labels = make_head(n, v, d)
    peak = peak_above_inputs(
        hidden.bfloat16(), weight.bfloat16(), labels, schedule="vocab", chunk=chunk, reduction=reduction
    )
    gradients = 2 * (n + v) * d
    slack = 100 * n + 10 * 4 * 4 * v  # vectors, and blocks of the plain path
    assert peak - gradients < max(2 * chunk * v, 2 * n * 256) + slack
    assert peak - gradients < min(4 * v * d, 2 * n * v)
    by_tokens = peak_above_inputs(
        hidden.bfloat16(), weight.bfloat16(), labels, schedule="tokens", chunk=chunk, reduction=reduction
    )
    assert by_tokens - gradients > 4 * v * d - 2 * v * d  # which has that sum, until it is cast


@every_schedule
def test_a_frozen_head_costs_no_gradient_of_its_shape(schedule, small_blocks):
    hidden, weight, _, labels = make_head(64, 8192, 64)
    module = nn.Module()
    module.hidden = nn.Parameter(hidden)
    module.register_buffer("weight", weight)
    meter = LiveTensorMeter(module)
    before = meter.bytes
    with meter:
        linear_cross_entropy(module.hidden, module.weight, labels, schedule=schedule, chunk=4).backward()
    assert meter.peak - before < 4 * 8192 * 64 / 2


@every_schedule
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_under_no_grad_nothing_has_a_graph_or_a_gradient_buffer(schedule, reduction, small_blocks):
    hidden, weight, _, labels = make_head(64, 8192, 64)
    module = nn.Module()
    module.hidden, module.weight = nn.Parameter(hidden), nn.Parameter(weight)
    meter = LiveTensorMeter(module)
    before = meter.bytes
    with meter, torch.no_grad():
        loss = linear_cross_entropy(
            module.hidden, module.weight, labels, schedule=schedule, chunk=4, reduction=reduction
        )
    assert loss.grad_fn is None
    assert not loss.requires_grad
    assert meter.peak - before < 4 * 8192 * 64 / 2
