"""The epilogue, where logits live in the GEMM's registers only: in the interpreter, in fp32, against fp64.

The anchors of `row_anchors.py` cost a few 1e-6 of accuracy, which is nothing beside bf16's 2^-9; FLOOR says so.
"""

import itertools

import pytest
import torch
from conftest import HAS_GPU
from heads import (
    GAPS,
    IGNORE,
    assert_equal,
    eager_rows,
    exact_rows,
    gold,
    head_with_gaps,
    make_head,
    relative_error,
    row_errors,
)

from kernels import gemm, row_kernels, row_sums
from kernels.linear_cross_entropy import linear_cross_entropy, linear_evaluation
from kernels.reference import Objective

pytestmark = pytest.mark.skipif(HAS_GPU, reason="test_kernels_gpu.py runs the compiled kernels")

FLOOR = 1e-5
N, V, D = 21, 301, 36  # two tiles of rows and of classes and two steps, none of them whole; rows of 16 bytes
SCHEDULES, REDUCTIONS = ("tokens", "vocab"), ("mean", "sum", "none")
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES)
every_reduction = pytest.mark.parametrize("reduction", REDUCTIONS)


@pytest.fixture(autouse=True)
def launched(monkeypatch) -> list[str]:
    """Runs the kernels in the interpreter, in small tiles; lists those over rows of logits that run."""
    monkeypatch.setattr(row_kernels, "runs_triton", lambda tensor: True)
    monkeypatch.setattr(gemm, "BLOCK_N", 16)
    monkeypatch.setattr(gemm, "BLOCK_D", 32)
    names = []

    def watched(name: str):
        original = getattr(row_kernels, name)
        return lambda *args, **options: (names.append(name), original(*args, **options))[1]

    for name in ("forward_rows", "forward_backward_rows_", "backward_rows"):
        monkeypatch.setattr(row_kernels, name, watched(name))
    return names


def upstreams(n: int) -> torch.Tensor:
    """A factor for each row: negative, zero and positive ones."""
    return torch.linspace(-1, 2, n).round(decimals=1)


def losses_and_gradients(hidden, weight, bias, labels, *, upstream, reduction="none", wanted=(1, 1, 1), **options):
    """The loss and, by their names, the wanted gradients for `upstream`: [N] for "none", else []."""
    tensors = {"hidden": hidden, "weight": weight, "bias": bias}
    leaves = {
        name: None if tensor is None else tensor.detach().clone().requires_grad_(bool(is_wanted))
        for (name, tensor), is_wanted in zip(tensors.items(), wanted, strict=True)
    }
    loss = linear_cross_entropy(
        leaves["hidden"], leaves["weight"], labels, linear_bias=leaves["bias"], reduction=reduction, **options
    )
    if loss.requires_grad:
        loss.backward(upstream)
    gradients = {f"d{name}": leaf.grad for name, leaf in leaves.items() if leaf is not None and leaf.grad is not None}
    return {"loss": loss.detach()} | gradients


def assert_right(head: tuple, *, reduction: str, wanted=(1, 1, 1), tolerance: float = FLOOR, **options) -> None:
    """The loss and all gradients equal fp64's, for upstream gradients other than 1."""
    n, labels = len(head[0]), head[3]
    per_row = upstreams(n) if reduction == "none" else torch.full((n,), 0.37)
    if reduction == "mean":
        per_row = per_row / (labels != IGNORE).sum().clamp(min=1)
    right = exact_rows(*head, per_row, z_loss=options.get("z_loss", 0.0))
    upstream = per_row if reduction == "none" else torch.tensor(0.37)
    ours = losses_and_gradients(*head, upstream=upstream, reduction=reduction, wanted=wanted, **options)
    if reduction != "none":
        right["loss"] = (right["loss"] * per_row.double()).sum() / 0.37
    names = [f"d{name}" for name, want in zip(("hidden", "weight", "bias"), wanted, strict=True) if want]
    assert_equal(ours, {name: right[name] for name in ("loss", *names) if name in right}, tolerance)


@every_schedule
@every_reduction
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_losses_and_gradients_equal_fp64(schedule, reduction, bias, z_loss, launched):
    head = make_head(N, V, D, bias=bias, ignored=2)
    assert_right(head, reduction=reduction, schedule=schedule, chunk=13, z_loss=z_loss)
    assert launched == []


@every_schedule
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize(
    ("n", "v", "d", "chunk"),
    [
        (1, 1, 4, 1),
        (1, 2, 4, 7),
        (3, 255, 32, 1),
        (17, 256, 32, 16),
        (5, 257, 28, 2),
        (16, 97, 68, 100),
        (9, 601, 4, 8),
    ],
)
def test_shapes_that_divide_nothing_are_right(n, v, d, chunk, schedule, reduction, launched):
    assert_right(make_head(n, v, d, bias=True, ignored=0), reduction=reduction, schedule=schedule, chunk=chunk)
    assert launched == []


@every_schedule
def test_labels_at_the_edges_of_tiles_and_of_half_tiles_are_right(schedule):
    hidden, weight, _, _ = make_head(12, 601, 8)
    labels = torch.tensor([0, 127, 128, 255, 256, 257, 383, 384, 511, 512, 599, 600])
    for reduction in ("sum", "none"):
        assert_right((hidden, weight, None, labels), reduction=reduction, schedule=schedule, chunk=12)


@every_schedule
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("wanted", list(itertools.product([False, True], repeat=3)), ids=str)
def test_gradients_come_exactly_where_they_are_asked_for(wanted, schedule, reduction):
    head = make_head(7, 33, 8, bias=True)
    assert_right(head, reduction=reduction, schedule=schedule, chunk=4, wanted=wanted)


@every_schedule
@every_reduction
def test_no_kept_token_gives_zero(schedule, reduction):
    hidden, weight, bias, _ = make_head(5, 33, 8, bias=True)
    labels = torch.full((5,), IGNORE)
    upstream = upstreams(5) if reduction == "none" else torch.tensor(0.37)
    options = {"reduction": reduction, "schedule": schedule, "chunk": 3, "z_loss": 1e-2}
    ours = losses_and_gradients(hidden, weight, bias, labels, upstream=upstream, **options)
    assert len(ours) == 4
    assert all((value == 0).all() for value in ours.values())


@every_schedule
@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("bad", [V, -1, 2**31, 2**32 + 5, 2**40, -(2**31) - 1])
def test_a_bad_label_makes_its_row_nan_with_gradient_zero(bad, schedule, reduction):
    head = make_head(6, V, 8, bias=True)
    head[3][4] = bad
    per_row = upstreams(6) if reduction == "none" else torch.full((6,), 0.37)
    upstream = per_row if reduction == "none" else torch.tensor(0.37)
    options = {"reduction": reduction, "schedule": schedule, "chunk": 4, "z_loss": 1e-2}
    ours = losses_and_gradients(*head, upstream=upstream, **options)
    right = exact_rows(*head, per_row, z_loss=1e-2)
    assert torch.isnan(ours["loss"]).any()
    if reduction == "none":
        assert torch.isnan(ours["loss"]).tolist() == [False, False, False, False, True, False]
        ours["loss"] = ours["loss"].nan_to_num()
        assert relative_error(ours["loss"], right["loss"]) < FLOOR
    assert (ours["dhidden"][4] == 0).all()
    del ours["loss"], right["loss"]
    assert_equal(ours, right, FLOOR)


@every_schedule
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_a_z_loss_that_cancels_the_gradients_of_the_others_is_right(reduction, schedule):
    """1 + 2 lam lse is 0 where lse is -1 / (2 lam): a bias brings all tokens there."""
    hidden, weight, _, labels = make_head(4, 33, 8, ignored=0)
    hidden[:] = hidden[0]
    lse = (hidden[0].double() @ weight.double().T).logsumexp(0)
    bias = torch.full((33,), -(lse + 1).item())
    assert_right((hidden, weight, bias, labels), reduction=reduction, schedule=schedule, chunk=3, z_loss=0.5)


# Labels far below or above all others

ENTRIES = [1.25 * 2.0**-7, 1.0]  # of hidden states


@every_schedule
@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("entries", ENTRIES)
def test_labels_far_from_the_maximum_are_as_good_as_eager_row_by_row(entries, reduction, schedule):
    """Beyond 104 nats below, a row is computed again; beyond 43 above, the others vanish, as eager's loss does."""
    hidden, weight, _, labels = head = head_with_gaps(18, V, D, entries=entries)
    per_row = torch.full((len(labels),), 0.37)
    right = exact_rows(*head, per_row)
    upstream = per_row if reduction == "none" else torch.tensor(0.37)
    options = {"schedule": schedule, "chunk": 11}
    ours = losses_and_gradients(*head, upstream=upstream, reduction=reduction, **options)
    ours["loss"] = losses_and_gradients(*head, upstream=per_row, **options)["loss"]
    leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    losses = eager_rows(leaves[0] @ leaves[1].T, labels, Objective())
    gradients = torch.autograd.grad(losses, leaves, per_row)
    theirs = {"loss": losses, "dhidden": gradients[0], "dweight": gradients[1]}
    for name, value in right.items():
        errors, yardsticks = row_errors(ours[name], value), row_errors(theirs[name], value)
        bad = (errors > 2 * yardsticks + FLOOR).nonzero().flatten().tolist()
        assert not bad, [(name, row, errors[row].item(), yardsticks[row].item()) for row in bad]
    # Where eager has no digits left, the label apart keeps them: the loss of a label 20 nats above is 1e-6.
    rows = [GAPS.index(gap) for gap in (-5, -20)]
    assert row_errors(ours["loss"], right["loss"])[rows].max() < FLOOR
    assert row_errors(ours["dhidden"], right["dhidden"])[rows].max() < FLOOR


@every_schedule
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("scale", [0.01, 30.0, 100.0], ids=["flat", "confident", "certain"])
def test_flat_and_confident_rows_are_right(scale, reduction, schedule):
    """Certain rows have an lse of 400, and fp32 rounds that by 2e-5."""
    hidden, weight, _, labels = make_head(N, V, D, scale=scale)
    labels[5:] = (hidden @ weight.T).argmax(1)[5:]
    options = {"z_loss": 1e-3, "tolerance": max(FLOOR, 3e-7 * scale)}
    assert_right((hidden, weight, None, labels), reduction=reduction, schedule=schedule, chunk=13, **options)


@every_schedule
def test_a_row_that_is_nan_stays_alone(schedule):
    head = make_head(N, V, D, bias=True)
    head[0][5, 3] = float("nan")
    ours = losses_and_gradients(*head, upstream=upstreams(N), schedule=schedule, chunk=13)
    assert torch.isnan(ours["loss"]).nonzero().flatten().tolist() == [5]
    assert torch.isnan(ours["dhidden"]).any(1).nonzero().flatten().tolist() == [5]
    without = (head[0].nan_to_num(), *head[1:])
    without[3][5] = IGNORE
    right = exact_rows(*without, upstreams(N))
    for name in ("loss", "dhidden"):
        others = torch.arange(N) != 5
        assert relative_error(ours[name][others], right[name][others]) < FLOOR


@every_schedule
@every_reduction
def test_classes_of_bias_minus_infinity_take_no_part(schedule, reduction):
    hidden, weight, bias, labels = make_head(N, V, D, bias=True)
    shut = torch.arange(0, V, 3)
    bias[shut[~torch.isin(shut, labels)]] = -float("inf")
    bias[128:256] = -float("inf")  # half a tile
    labels[(labels >= 128) & (labels < 256)] = 1
    bias[1] = 0.0
    assert_right((hidden, weight, bias, labels), reduction=reduction, schedule=schedule, chunk=13)


@every_schedule
@every_reduction
def test_a_label_of_bias_minus_infinity_has_an_infinite_loss_and_eagers_gradient(schedule, reduction):
    hidden, weight, bias, labels = make_head(N, V, D, bias=True)
    bias[labels[7]] = -float("inf")
    labels[8:][labels[8:] == labels[7]] = IGNORE
    assert torch.isinf(exact_rows(hidden, weight, bias, labels, upstreams(N))["loss"][7])
    per_row = upstreams(N) if reduction == "none" else torch.full((N,), 0.37)
    upstream = per_row if reduction == "none" else torch.tensor(0.37)
    if reduction == "mean":
        per_row = per_row / (labels != IGNORE).sum()
    ours = losses_and_gradients(
        hidden, weight, bias, labels, upstream=upstream, reduction=reduction, schedule=schedule, chunk=13
    )
    assert torch.isinf(ours["loss"]).sum() == 1
    right = exact_rows(hidden, weight, bias, labels, per_row)
    del ours["loss"], right["loss"]
    assert_equal(ours, right, FLOOR)


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("entries", ENTRIES)
def test_an_evaluation_of_labels_far_from_the_maximum_equals_fp64(entries, bias, launched):
    hidden, weight, _, labels = head_with_gaps(18, V, D, entries=entries)
    offset = torch.linspace(-1, 1, V) if bias else None
    sums = linear_evaluation(hidden, weight, labels, Objective(z_loss=1e-3), bias=offset, chunk=1)
    logits = torch.nn.functional.linear(*(t if t is None else t.double() for t in (hidden, weight, offset)))
    lse = logits.logsumexp(1)
    losses = exact_rows(hidden, weight, offset, labels, torch.ones(len(labels)), z_loss=1e-3)["loss"]
    right = {
        "loss": losses.sum(),
        "cross_entropy": (losses - 1e-3 * lse.square()).sum(),
        "lse": lse.sum(),
        "correct": (logits.argmax(1) == labels).sum(),
        "entropy": torch.special.entr(logits.softmax(1)).sum(),
    }
    assert_equal(sums._asdict(), right, FLOOR)
    assert launched == []


# What the tensor memory accelerator cannot read


@every_schedule
@pytest.mark.parametrize(
    "change",
    [
        lambda hidden, weight: (hidden[:, :7], weight[:, :7].contiguous()),  # rows of 28 bytes
        lambda hidden, weight: (hidden, weight.t().contiguous().t()),
        lambda hidden, weight: (hidden[:, 1:33], weight[:, 1:33]),  # begin at 4 bytes
        lambda hidden, weight: (hidden[:1].expand(5, -1), weight),
    ],
    ids=["odd width", "transposed", "shifted", "expanded"],
)
def test_what_cannot_be_read_in_tiles_takes_the_plain_path_and_is_right(change, schedule, launched):
    hidden, weight, _, labels = make_head(5, 33, 36)
    hidden, weight = (t.requires_grad_() for t in change(hidden, weight))
    hidden.retain_grad()
    loss = linear_cross_entropy(hidden, weight, labels, reduction="sum", schedule=schedule, chunk=3)
    ours = torch.autograd.grad(loss, (hidden, weight), torch.tensor(0.37))
    right = exact_rows(hidden, weight, None, labels, torch.full((5,), 0.37))
    assert_equal(dict(zip(("dhidden", "dweight"), ours, strict=True)), {k: right[k] for k in ("dhidden", "dweight")})
    assert launched != []


@pytest.mark.parametrize("options", [{"label_smoothing": 0.1}, {"softcap": 5.0}], ids=str)
def test_what_the_epilogues_lack_takes_the_plain_path(options, launched):
    losses_and_gradients(*make_head(5, 33, 36), upstream=torch.tensor(1.0), reduction="sum", chunk=3, **options)
    assert launched != []


@every_schedule
def test_rows_that_are_slices_of_wider_ones_are_read_in_place(schedule, launched):
    hidden, weight, bias, labels = make_head(9, 33, 64, bias=True)
    head = hidden[:, 16:52], weight[:, 8:44], bias, labels
    tensors = [t.requires_grad_() for t in head[:3]]
    loss = linear_cross_entropy(*tensors[:2], labels, linear_bias=bias, reduction="sum", schedule=schedule, chunk=4)
    ours = torch.autograd.grad(loss, tensors, torch.tensor(0.37))
    right = exact_rows(*head, torch.full((9,), 0.37))
    del right["loss"]
    assert_equal(dict(zip(("dhidden", "dweight", "dbias"), ours, strict=True)), right, FLOOR)
    assert launched == []


@pytest.mark.parametrize("schedule", ["tokens", "vocab"])
@pytest.mark.parametrize("layout", ["strided", "expanded"])
def test_a_bias_of_any_stride_is_read_right(layout, schedule):
    hidden, weight, bias, labels = make_head(40, 300, 32, bias=True)
    wide = torch.stack([bias, torch.full_like(bias, 1e3)], dim=1)
    bias = wide[:, 0] if layout == "strided" else bias[:1].expand(300)

    def loss(hidden, weight, bias):
        return linear_cross_entropy(
            hidden, weight, labels, linear_bias=bias, reduction="sum", chunk=16, schedule=schedule
        )

    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    assert gemm.takes((hidden, weight, bias))
    value = loss(*leaves, bias)
    right = gold(hidden, weight, bias, labels, Objective(), upstream=1.0)
    assert relative_error(value, right["loss"]) < 1e-5
    for gradient, name in zip(torch.autograd.grad(value, leaves), ("dhidden", "dweight"), strict=True):
        assert relative_error(gradient, right[name]) < 2e-5


def test_a_weight_with_a_nan_gives_nan_without_computing_rows_again(monkeypatch):
    hidden, weight, _, labels = make_head(40, 300, 32)
    weight[7, 3] = float("nan")
    labels[labels == 7] = 8
    monkeypatch.setattr(row_sums, "maximum_and_sum", None)  # a program that came there would fail
    assert torch.isnan(linear_cross_entropy(hidden.requires_grad_(), weight, labels, chunk=16))
