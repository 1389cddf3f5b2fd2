"""cross_entropy on logits: values, gradients, and what may be overwritten."""

from dataclasses import asdict

import pytest
import torch
import torch.nn.functional as F
from conftest import HAS_GPU
from heads import IGNORE, OBJECTIVES, RACE_VOCABULARIES, eager_rows, random_logits, relative_error
from torch.utils.checkpoint import checkpoint

from kernels import row_kernels
from kernels.cross_entropy import cross_entropy, cross_entropy_sums
from kernels.reference import Objective, Rows


def grad(loss, logits, upstream):
    """Gradient at a leaf through a copy, so that ours may overwrite it."""
    leaf = logits.clone().requires_grad_()
    return torch.autograd.grad(loss(leaf * 1), leaf, upstream)[0]


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
@pytest.mark.parametrize("shape", [(1, 1), (5, 2), (7, 33), (4, 257), (2, 9001)], ids=str)
def test_losses_and_gradients_equal_fp64(engine, shape, objective):
    logits, labels = random_logits(*shape)
    labels[shape[0] // 2] = IGNORE if shape[0] > 1 else labels[0]
    upstream = torch.linspace(-1, 2, shape[0])
    ours = cross_entropy(logits.clone(), labels, reduction="none", **asdict(objective))
    right = eager_rows(logits.double(), labels, objective)
    assert relative_error(ours, right) < 1e-6
    dlogits = grad(lambda x: cross_entropy(x, labels, reduction="none", **asdict(objective)), logits, upstream)
    right = grad(lambda x: eager_rows(x, labels, objective), logits.double(), upstream.double())
    assert relative_error(dlogits, right) < 1e-6


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_reductions_take_any_upstream_gradient(engine, reduction):
    logits, labels = random_logits(7, 33)
    labels[2] = IGNORE
    upstream = torch.tensor(-0.3)
    ours = grad(lambda x: cross_entropy(x, labels, reduction=reduction), logits, upstream)
    right = grad(lambda x: F.cross_entropy(x, labels, reduction=reduction), logits.double(), upstream.double())
    assert relative_error(ours, right) < 1e-6


def test_confident_rows_and_a_common_offset_keep_their_accuracy(engine):
    logits, labels = random_logits(6, 50, offset=3000.0)
    logits[torch.arange(6), labels] += 40.0
    objective = Objective(label_smoothing=0.1)
    loss = cross_entropy(logits.clone(), labels, reduction="sum", label_smoothing=0.1)
    assert relative_error(loss, eager_rows(logits.double(), labels, objective).sum()) < 1e-6
    ours = grad(lambda x: cross_entropy(x, labels, label_smoothing=0.1), logits, torch.tensor(1.0))
    right = grad(lambda x: eager_rows(x, labels, objective).mean(), logits.double(), torch.tensor(1.0).double())
    assert relative_error(ours, right) < 1e-6


def test_rows_that_begin_with_minus_infinity_are_finite(engine):
    logits, labels = random_logits(3, 9001)
    logits[:, :8500] = -float("inf")
    labels[:] = 9000
    loss = cross_entropy(logits.clone(), labels, reduction="none")
    assert relative_error(loss, F.cross_entropy(logits.double(), labels, reduction="none")) < 1e-6
    dlogits = grad(lambda x: cross_entropy(x, labels), logits, torch.tensor(1.0))
    assert torch.isfinite(dlogits).all()
    assert (dlogits[:, :8500] == 0).all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_labels_may_be_strided_and_of_either_integer_type(engine, dtype):
    logits, labels = random_logits(6, 11)
    strided = torch.stack([labels, labels.flip(0)], dim=1).to(dtype)[:, 0]
    assert strided.stride() == (2,)
    torch.testing.assert_close(cross_entropy(logits, strided), F.cross_entropy(logits, labels))


@pytest.mark.parametrize(("smoothing", "right"), [(0.1, 0.447122), (0.0, 0.104265)])
def test_smoothing_and_ignore_index_act_together(engine, smoothing, right):
    logits = torch.zeros(3, 7)
    logits[torch.arange(3), torch.arange(3)] = 4.0
    labels = torch.tensor([0, 1, -1])
    loss = cross_entropy(logits, labels, ignore_index=-1, label_smoothing=smoothing)
    assert loss.item() == pytest.approx(right, abs=2e-6)


def test_ignore_index_may_be_a_valid_class(engine):
    logits, labels = random_logits(5, 7)
    labels[:2] = 3
    torch.testing.assert_close(
        cross_entropy(logits, labels, ignore_index=3), F.cross_entropy(logits, labels, ignore_index=3)
    )


@pytest.mark.parametrize(("vocab", "right"), [(50257, 10.824905), (256, 5.545177)])
def test_the_loss_of_bf16_logits_is_fp32(vocab, right):
    loss = cross_entropy(torch.zeros(3, vocab, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.int64))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(right, abs=1e-6)


def test_no_kept_row_gives_zero_connected_to_the_graph(engine):
    logits = torch.randn(4, 7, requires_grad=True)
    loss = cross_entropy(logits * 1, torch.full((4,), IGNORE))
    loss.backward()
    assert loss.item() == 0
    assert (logits.grad == 0).all()


def test_no_row_at_all_gives_zero(engine):
    logits = torch.randn(0, 7, requires_grad=True)
    loss = cross_entropy(logits * 1, torch.zeros(0, dtype=torch.int64))
    loss.backward()
    assert loss.item() == 0
    assert logits.grad.shape == (0, 7)


# What may be overwritten


def test_backward_overwrites_the_logits_and_forward_does_not(engine):
    hidden = torch.randn(4, 7, requires_grad=True)
    logits = hidden * 1
    before = logits.detach().clone()
    labels = torch.tensor([1, IGNORE, 3, IGNORE])
    loss = cross_entropy(logits, labels)
    assert torch.equal(logits, before)
    accuracy_after_loss = (logits.argmax(1) == labels).float().mean()
    assert accuracy_after_loss == (before.argmax(1) == labels).float().mean()
    loss.backward()
    assert torch.equal(logits, hidden.grad)


def test_no_grad_leaves_the_logits_alone(engine):
    logits, labels = random_logits(4, 7)
    before = logits.clone()
    with torch.no_grad():
        cross_entropy(logits.requires_grad_(), labels)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("view", [lambda leaf: leaf, lambda leaf: leaf[:, 1:5]], ids=["leaf", "view of a leaf"])
def test_a_leaf_is_never_overwritten(engine, view):
    leaf = torch.randn(4, 7, requires_grad=True)
    before = leaf.detach().clone()
    labels = torch.tensor([0, 1, 2, 3])
    cross_entropy(view(leaf), labels).backward()
    assert torch.equal(leaf, before)
    other = before.clone().requires_grad_()
    F.cross_entropy(view(other), labels).backward()
    torch.testing.assert_close(leaf.grad, other.grad)


LAYOUTS = {
    "sliced from a padded buffer": lambda x: F.pad(x, (0, 64 - x.shape[-1]))[..., : x.shape[-1]].flatten(0, 1),
    "shifted": lambda x: x[:, :-1].reshape(-1, x.shape[-1]),
    "one row of each sequence": lambda x: x[:, 0],
    "transposed storage": lambda x: x.flatten(0, 1).t().contiguous().t(),
    "every second class": lambda x: x.flatten(0, 1).repeat_interleave(2, dim=1)[:, ::2],
    "expanded row": lambda x: (x * 1)[0, :1].expand(5, -1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_strided_logits_equal_their_contiguous_clone(engine, layout, dtype):
    if engine == "triton" and dtype == torch.bfloat16:
        pytest.skip("the interpreter's bf16 arithmetic is wrong")
    source = torch.randn(2, 4, 9, generator=torch.Generator().manual_seed(0)).to(dtype)
    ours, right = (source.clone().requires_grad_() for _ in range(2))
    logits = layout(ours * 1)
    labels = torch.arange(logits.shape[0]) % 9
    loss = cross_entropy(logits, labels)
    loss.backward()
    expected = cross_entropy(layout(right * 1).contiguous(), labels)
    expected.backward()
    torch.testing.assert_close(loss, expected)
    assert relative_error(ours.grad, right.grad) < (1e-6 if dtype == torch.float32 else 1e-3)
    assert relative_error(loss, F.cross_entropy(layout(source.double()), labels)) < 1e-6


def test_memory_outside_a_slice_is_untouched(engine):
    leaf = torch.randn(6, 9, requires_grad=True)
    buffer = leaf * 1
    before = buffer.detach().clone()
    cross_entropy(buffer[1:5, 2:7], torch.tensor([0, 1, 2, 3])).backward()
    after = buffer.detach().clone()
    assert not torch.equal(after[1:5, 2:7], before[1:5, 2:7])
    after[1:5, 2:7] = before[1:5, 2:7]
    assert torch.equal(after, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [torch.tanh, lambda z: torch.softmax(z, 1)], ids=["tanh", "softmax"])
def test_an_operation_that_saved_the_logits_raises(engine, make, dtype):
    if engine == "triton" and dtype == torch.bfloat16:
        pytest.skip("the interpreter's bf16 arithmetic is wrong")
    ours = torch.randn(6, 7, dtype=dtype, requires_grad=True)
    labels = torch.arange(6)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        cross_entropy(make(ours), labels).backward()


def test_an_operation_that_saved_something_else_is_right(engine):
    ours = torch.randn(6, 7, generator=torch.Generator().manual_seed(0), requires_grad=True)
    right = ours.detach().clone().requires_grad_()
    cross_entropy(30 * torch.tanh(ours / 30), torch.arange(6)).backward()
    F.cross_entropy(30 * torch.tanh(right / 30), torch.arange(6)).backward()
    assert relative_error(ours.grad, right.grad) < 1e-5


def test_logits_used_by_a_second_loss_raise(engine):
    logits = torch.randn(6, 7, requires_grad=True) * 1
    z_loss = torch.logsumexp(logits, 1).square().mean()  # saved the logits; autograd runs what came last first
    loss = cross_entropy(logits, torch.arange(6))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (loss + z_loss).backward()


def test_second_backward_raises_after_the_logits_are_gone(engine):
    leaf = torch.randn(6, 7, requires_grad=True)
    loss = cross_entropy(leaf * 1, torch.arange(6)) * 0.5
    (first,) = torch.autograd.grad(loss, leaf, retain_graph=True)
    kept = first.clone()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, leaf, retain_graph=True)
    assert torch.equal(first, kept)


def test_second_backward_of_a_leaf_is_right(engine):
    leaf = torch.randn(6, 7, requires_grad=True)
    loss = cross_entropy(leaf, torch.arange(6))
    (right,) = torch.autograd.grad(F.cross_entropy(leaf, torch.arange(6)), leaf)
    for upstream in (0.5, 2.0):
        (gradient,) = torch.autograd.grad(loss, leaf, torch.tensor(upstream), retain_graph=True)
        torch.testing.assert_close(gradient, right * upstream)


def test_the_gradient_of_the_logits_has_no_graph(engine):
    logits = torch.randn(6, 7, requires_grad=True) * 1
    (gradient,) = torch.autograd.grad(cross_entropy(logits, torch.arange(6)), logits)
    assert gradient.data_ptr() == logits.data_ptr()
    assert not gradient.requires_grad


def test_double_backward_raises(engine):
    leaf = torch.randn(6, 7, requires_grad=True)
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(cross_entropy(leaf, torch.arange(6)), leaf, create_graph=True)


@pytest.mark.parametrize("make", [torch.tanh, lambda z: torch.softmax(z, 1)], ids=["tanh", "softmax"])
@pytest.mark.parametrize("hooks", ["checkpoint", "identity"])
def test_under_saved_tensor_hooks_nothing_is_overwritten(engine, make, hooks):
    """There autograd does not notice that a tensor was overwritten."""
    ours, right = (torch.randn(4, 7, generator=torch.Generator().manual_seed(0), requires_grad=True) for _ in range(2))
    labels = torch.tensor([1, 2, 3, IGNORE])
    if hooks == "checkpoint":
        checkpoint(lambda z: cross_entropy(make(z), labels), ours, use_reentrant=False).backward()
    else:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            cross_entropy(make(ours), labels).backward()
    F.cross_entropy(make(right), labels).backward()
    torch.testing.assert_close(ours.grad, right.grad)


# Numbers


def test_the_default_dtype_does_not_matter(engine):
    """Lightning's bf16-true changes it."""
    logits, labels = random_logits(8, 300, offset=20.0)
    torch.set_default_dtype(torch.float16)
    try:
        loss = cross_entropy(logits.clone(), labels, reduction="sum")
        dlogits = grad(lambda x: cross_entropy(x, labels), logits, torch.tensor(1.0, dtype=torch.float32))
    finally:
        torch.set_default_dtype(torch.float32)
    assert loss.dtype == torch.float32
    assert relative_error(loss, F.cross_entropy(logits.double(), labels, reduction="sum")) < 1e-6
    right = grad(lambda x: F.cross_entropy(x, labels), logits.double(), torch.tensor(1.0).double())
    assert relative_error(dlogits, right) < 1e-6


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("softcap", "level"), [(30.0, 150.0), (30.0, 100.0), (200.0, 1000.0)])
def test_a_saturated_softcap_keeps_its_digits(engine, softcap, level, seed):
    objective = Objective(softcap=softcap)
    logits, labels = random_logits(8, 257, scale=1.0, offset=level, seed=seed)
    ours = grad(lambda x: cross_entropy(x, labels, softcap=softcap), logits, torch.tensor(1.0))
    theirs = grad(lambda x: eager_rows(x, labels, objective).mean(), logits, torch.tensor(1.0))
    right = grad(lambda x: eager_rows(x, labels, objective).mean(), logits.double(), torch.tensor(1.0).double())
    assert relative_error(ours, right) <= 2 * relative_error(theirs, right) + 1e-6


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_an_ignored_row_of_nan_and_infinity_has_no_part_in_anything(engine, softcap):
    logits, labels = random_logits(3, 7)
    logits[1] = torch.tensor([float("nan"), float("inf"), -float("inf"), 0, 0, 0, 0])
    labels[1] = IGNORE
    assert torch.isfinite(cross_entropy(logits.clone(), labels, softcap=softcap))
    dlogits = grad(lambda x: cross_entropy(x, labels, softcap=softcap), logits, torch.tensor(1.0))
    assert torch.isfinite(dlogits).all()
    assert (dlogits[1] == 0).all()


def test_smoothing_over_a_logit_of_minus_infinity_is_infinite(engine):
    logits = torch.zeros(1, 7)
    logits[0, 3] = -float("inf")
    for label in (3, 4):
        assert cross_entropy(logits.clone(), torch.tensor([label]), label_smoothing=0.6).item() == float("inf")


def test_an_ignore_index_beyond_int32_ignores_nothing_else(engine):
    logits, labels = random_logits(4, 7)
    labels[0] = 0
    loss = cross_entropy(logits, labels.int(), ignore_index=2**32)
    torch.testing.assert_close(loss, F.cross_entropy(logits, labels))


# Launches


@pytest.mark.skipif(HAS_GPU, reason="the interpreter reads memory of a CPU")
def test_classes_may_lie_further_apart_than_int32_can_count(monkeypatch):
    """Column-major logits of 2**21 rows, of which the first alone is touched."""
    monkeypatch.setattr(row_kernels, "runs_triton", lambda tensor: True)
    stride, vocab = 2**21, 1100
    logits = torch.empty(stride * vocab).as_strided((1, vocab), (1, stride))
    logits.zero_()
    logits[0, -1] = 5.0
    rows = Rows.empty(1, logits.device)
    row_kernels.forward_rows(logits, torch.tensor([vocab - 1]), Objective(), rows)
    torch.testing.assert_close(
        rows.losses, F.cross_entropy(logits.clone(), torch.tensor([vocab - 1]), reduction="none")
    )


def test_the_race_hunt_launches_every_number_of_warps():
    """That of `test_no_warp_overtakes_another`, which needs a GPU."""

    def warps(vocab):
        logits = torch.empty(1, vocab, dtype=torch.bfloat16, device="meta")
        launches = ((None, True), (logits, True), (logits, False))
        return {row_kernels.launch_options(logits, *launch, False)["num_warps"] for launch in launches}

    hunted = set().union(*(warps(vocab) for vocab in RACE_VOCABULARIES))
    assert hunted == set().union(*(warps(2**n) for n in range(20)))


# What is refused


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, y: cross_entropy(x[None], y[None]), r"\[1, 6, 7\].*flatten"),
        (lambda x, y: cross_entropy(x, y[:5]), r"\[6\].*\[5\]"),
        (lambda x, y: cross_entropy(x.double(), y), "float64"),
        (lambda x, y: cross_entropy(x, y.float()), "float32"),
        (lambda x, y: cross_entropy(x, y, reduction="avg"), "avg"),
        (lambda x, y: cross_entropy(x, y, label_smoothing=1.0), "label_smoothing"),
        (lambda x, y: cross_entropy(x, y, z_loss=-1.0), "z_loss"),
        (lambda x, y: cross_entropy(x, y, softcap=0.0), "softcap"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.randn(6, 7), torch.arange(6))


def test_sums_give_the_objective_and_the_plain_loss(engine):
    logits, labels = random_logits(6, 7)
    sums = cross_entropy_sums(logits.requires_grad_(), labels, Objective(label_smoothing=0.1, z_loss=0.1))
    assert sums.loss.requires_grad
    assert not sums.cross_entropy.requires_grad
    torch.testing.assert_close(sums.cross_entropy, F.cross_entropy(logits.detach(), labels, reduction="sum"))
    assert sums.loss > sums.cross_entropy
