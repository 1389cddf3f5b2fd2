"""linear_cross_entropy: values and gradients over chunks, dtypes, autocast, and what is asked for."""

import itertools
import os
import subprocess
import sys
from dataclasses import asdict
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from conftest import HAS_GPU
from heads import (
    IGNORE,
    OBJECTIVES,
    assert_as_good_as_eager,
    eager,
    eager_rows,
    gold,
    make_head,
    relative_error,
    sums_and_gradients,
)
from tiny import ROOT
from torch import distributed

from kernels import parts, reference, scaling
from kernels.linear_cross_entropy import (
    linear_cross_entropy,
    linear_cross_entropy_sums,
    linear_evaluation,
    linear_logprobs,
)
from kernels.reference import Objective


def fused_sum(labels, objective=OBJECTIVES["plain"], chunk=4):
    def loss(hidden, weight, bias=None):
        return linear_cross_entropy_sums(hidden, weight, labels, objective, bias=bias, chunk=chunk).loss

    return loss


def assert_close(ours: dict, tensors: dict, labels, objective=OBJECTIVES["plain"]):
    arguments = (tensors["hidden"], tensors["weight"], tensors.get("bias"), labels, objective)
    assert_as_good_as_eager(ours, eager(*arguments), gold(*arguments), floor=1e-6)


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_losses_and_gradients_equal_fp64_for_every_chunk(engine, chunk, objective):
    hidden, weight, bias, labels = make_head(7, 33, 5, bias=True)
    tensors = {"hidden": hidden, "weight": weight, "bias": bias}
    assert_close(sums_and_gradients(fused_sum(labels, objective, chunk), tensors), tensors, labels, objective)


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 2, 3), (5, 97, 8), (3, 9001, 2)], ids=str)
def test_shapes_that_divide_nothing_are_right(engine, shape):
    hidden, weight, _, labels = make_head(*shape, ignored=0)
    tensors = {"hidden": hidden, "weight": weight}
    assert_close(sums_and_gradients(fused_sum(labels, chunk=2), tensors), tensors, labels)


@pytest.mark.parametrize("chunk", [1, 7, 128, 384, 385, 1000])
def test_the_mean_does_not_depend_on_the_chunk(chunk):
    """385 rows of zeros, but for one logit of 10: a mean of chunks' means would give 1.7985, a sum of them 7.1941."""
    hidden = torch.zeros(385, 1)
    hidden[384] = 1.0
    weight = torch.zeros(11, 1)
    weight[0] = 10.0
    labels = torch.zeros(385, dtype=torch.int64)
    assert linear_cross_entropy(hidden, weight, labels, chunk=chunk).item() == pytest.approx(2.391668, abs=1e-6)
    assert linear_cross_entropy(hidden, weight, labels, chunk=chunk, reduction="none").shape == (385,)


@pytest.mark.parametrize("chunk", [1, 7, 128, 384, 385, 1000])
def test_ignored_tokens_do_not_count_in_the_mean(chunk):
    hidden, weight, _, labels = make_head(385, 11, 6)
    labels[:64] = IGNORE
    leaves = [t.clone().requires_grad_() for t in (hidden, weight)]
    loss = linear_cross_entropy(*leaves, labels, chunk=chunk)
    loss.backward()
    right = [t.double().requires_grad_() for t in (hidden, weight)]
    expected = F.cross_entropy(right[0] @ right[1].T, labels)
    expected.backward()
    assert relative_error(loss, expected) < 1e-6
    for ours, gradient in zip(leaves, right, strict=True):
        assert relative_error(ours.grad, gradient.grad) < 2e-6


@pytest.mark.parametrize("chunk", [2, 100])
def test_reduction_none_takes_an_upstream_gradient_per_token(engine, chunk):
    hidden, weight, bias, labels = make_head(7, 33, 5, bias=True)
    objective = OBJECTIVES["all"]
    upstream = torch.linspace(-1, 2, 7)
    leaves = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
    losses = linear_cross_entropy(
        *leaves[:2], labels, linear_bias=leaves[2], reduction="none", chunk=chunk, **asdict(objective)
    )
    for _ in range(2):  # nothing is overwritten, so a second backward is right as well
        gradients = torch.autograd.grad(losses, leaves, upstream, retain_graph=True)
        right = [t.double().requires_grad_() for t in (hidden, weight, bias)]
        total = 0.0
        for row, factor in enumerate(upstream.double()):
            one = slice(row, row + 1)
            sums = reference.linear_cross_entropy_sums(right[0][one], right[1], labels[one], objective, bias=right[2])
            total = total + factor * sums.loss
        for ours, expected in zip(gradients, torch.autograd.grad(total, right), strict=True):
            assert relative_error(ours, expected) < 2e-6


def test_losses_of_reduction_none_may_be_changed_in_place():
    hidden, weight, _, labels = make_head(7, 33, 5)
    losses = linear_cross_entropy(hidden.requires_grad_(), weight, labels, reduction="none", chunk=3)
    losses *= 2
    losses.sum().backward()
    assert torch.isfinite(hidden.grad).all()


def test_leading_dimensions_and_strides_are_kept(engine):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(4, 2, 8, generator=generator).transpose(0, 1)
    weight = torch.randn(8, 9, generator=generator).t()
    labels = torch.randint(9, (2, 4, 2), generator=generator)[..., 0]
    ours, right = hidden.clone().requires_grad_(), hidden.double().requires_grad_()
    linear_cross_entropy(ours, weight, labels, chunk=3).backward()
    F.cross_entropy((right @ weight.double().T).flatten(0, 1), labels.flatten()).backward()
    assert relative_error(ours.grad, right.grad) < 2e-6
    assert linear_cross_entropy(hidden, weight, labels, reduction="none").shape == (2, 4)


def test_no_kept_token_gives_zero_connected_to_the_graph(engine):
    hidden, weight, _, _ = make_head(4, 7, 3)
    labels = torch.full((4,), IGNORE)
    gradients = sums_and_gradients(
        lambda hidden, weight: linear_cross_entropy(hidden, weight, labels, chunk=2),
        {"hidden": hidden, "weight": weight},
    )
    assert all((value == 0).all() for value in gradients.values())


def test_a_chunk_without_kept_tokens_changes_nothing(engine):
    hidden, weight, _, labels = make_head(12, 7, 3, ignored=0)
    labels[4:8] = IGNORE
    tensors = {"hidden": hidden, "weight": weight}
    assert_close(sums_and_gradients(fused_sum(labels, chunk=4), tensors), tensors, labels)


def test_no_token_at_all_gives_zero(engine):
    _, weight, _, _ = make_head(1, 7, 3)
    labels = torch.zeros(0, dtype=torch.int64)
    gradients = sums_and_gradients(
        lambda hidden, weight: linear_cross_entropy(hidden, weight, labels),
        {"hidden": torch.zeros(0, 3), "weight": weight},
    )
    assert gradients["dhidden"].shape == (0, 3)
    assert (gradients["dweight"] == 0).all()


@pytest.mark.parametrize("wanted", list(itertools.product([False, True], repeat=3)), ids=str)
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_gradients_come_exactly_where_they_are_asked_for(wanted, reduction, monkeypatch):
    hidden, weight, bias, labels = make_head(7, 33, 5, bias=True)
    leaves = [t.clone().requires_grad_(want) for t, want in zip((hidden, weight, bias), wanted, strict=True)]
    made = []
    original = parts.matmul
    monkeypatch.setattr(
        parts, "matmul", lambda a, b, *, out, add=False: (made.append(out.shape), original(a, b, out=out, add=add))
    )
    loss = linear_cross_entropy(*leaves[:2], labels, linear_bias=leaves[2], chunk=3, reduction=reduction)
    assert loss.requires_grad == any(wanted)
    if any(wanted):
        loss.sum().backward()
    right = gold(hidden, weight, bias, labels, Objective(), upstream=1.0)
    for leaf, want, name in zip(leaves, wanted, ("dhidden", "dweight", "dbias"), strict=True):
        assert (leaf.grad is not None) == want
        assert not want or relative_error(leaf.grad, right[name]) < 2e-6
    assert (weight.shape in made) == wanted[1]  # a frozen head costs no [V, D] buffer


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_no_grad_makes_no_gradient(reduction, monkeypatch):
    hidden, weight, _, labels = make_head(7, 33, 5)
    monkeypatch.setattr(parts, "matmul", lambda *args, **kwargs: pytest.fail("a gradient was made"))
    with torch.no_grad():
        loss = linear_cross_entropy(hidden.requires_grad_(), weight.requires_grad_(), labels, reduction=reduction)
    assert not loss.requires_grad


def test_second_backward_raises_and_keeps_the_first():
    hidden, weight, _, labels = make_head(6, 7, 5)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    loss = linear_cross_entropy(*leaves, labels, chunk=4) * 0.5
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    kept = [gradient.clone() for gradient in first]
    with pytest.raises(RuntimeError, match="first backward"):
        torch.autograd.grad(loss, leaves, torch.tensor(2.0), retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, kept, strict=True))


def test_the_sums_count_no_right_guesses_without_gradients_either():
    hidden, weight, _, labels = make_head(6, 7, 5)
    with torch.no_grad():
        assert linear_cross_entropy_sums(hidden, weight, labels, Objective(), chunk=4).correct is None


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_double_backward_raises(reduction):
    hidden, weight, _, labels = make_head(6, 7, 5)
    loss = linear_cross_entropy(hidden.requires_grad_(), weight, labels, reduction=reduction).sum()
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(loss, hidden, create_graph=True)


# dtypes


@pytest.mark.parametrize("hidden_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_autocast_computes_in_bf16_and_returns_gradients_in_the_inputs_dtypes(hidden_dtype, bias, reduction):
    hidden, weight, bias, labels = make_head(34, 50, 16, bias=bias)
    hidden = hidden.to(hidden_dtype)
    tensors = {"hidden": hidden, "weight": weight} | ({} if bias is None else {"bias": bias})

    def fused(hidden, weight, bias=None):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses = linear_cross_entropy(hidden, weight, labels, linear_bias=bias, chunk=8, reduction=reduction)
        return losses if reduction == "mean" else losses.sum() / 33

    def theirs(hidden, weight, bias=None):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return reference.linear_cross_entropy_sums(hidden, weight, labels, Objective(), bias=bias).loss / 33

    right = gold(hidden, weight, bias, labels, Objective(), upstream=0.37 / 33)
    right["loss"] /= 33
    ours = sums_and_gradients(fused, tensors)
    assert_as_good_as_eager(ours, sums_and_gradients(theirs, tensors), right, floor=2**-9)
    assert ours["loss"].dtype == torch.float32
    assert {name: ours[f"d{name}"].dtype for name in tensors} == {name: t.dtype for name, t in tensors.items()}


def test_autocast_does_not_round_an_fp32_dweight_to_bf16():
    hidden, weight, _, labels = make_head(34, 50, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        linear_cross_entropy(hidden, weight.requires_grad_(), labels, chunk=8).backward()
    assert not torch.equal(weight.grad, weight.grad.bfloat16().float())


def test_bf16_weights_get_bf16_gradients():
    hidden, weight, _, labels = make_head(34, 50, 16)
    tensors = {"hidden": hidden.bfloat16(), "weight": weight.bfloat16()}
    ours = sums_and_gradients(fused_sum(labels, chunk=8), tensors)
    assert (ours["dhidden"].dtype, ours["dweight"].dtype) == (torch.bfloat16, torch.bfloat16)


def test_the_error_of_dweight_does_not_grow_with_the_number_of_chunks():
    """A bf16 sum over 256 chunks would be five times worse than one chunk."""
    generator = torch.Generator().manual_seed(0)
    hidden = (torch.randn(4096, 32, generator=generator) + 1).bfloat16()
    weight = torch.randn(64, 32, generator=generator).bfloat16()
    labels = torch.zeros(4096, dtype=torch.int64)  # so that dlogits have a mean
    right = gold(hidden, weight, None, labels, Objective())["dweight"]
    errors = {}
    for chunks in (1, 4, 64, 256):
        ours = sums_and_gradients(fused_sum(labels, chunk=4096 // chunks), {"hidden": hidden, "weight": weight})
        errors[chunks] = relative_error(ours["dweight"], right)
    assert max(errors.values()) <= 1.2 * errors[1], errors


def test_an_fp16_gradient_whose_sum_passes_fp16s_range_is_finite_as_a_mean():
    hidden = torch.full((1000, 1), 150.0, dtype=torch.float16)
    weight = torch.zeros(4, 1, dtype=torch.float16, requires_grad=True)
    labels = torch.zeros(1000, dtype=torch.int64)
    linear_cross_entropy(hidden, weight, labels).backward()
    assert weight.grad.dtype == torch.float16
    assert weight.grad[:, 0].tolist() == [-112.5, 37.5, 37.5, 37.5]


@pytest.mark.parametrize("factor", [1.0, -0.37])
@pytest.mark.parametrize(
    ("source", "target"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("float32", "float16")]
)
def test_scaling_is_in_place_where_the_dtype_stays(engine, source, target, factor):
    if engine == "triton" and "bfloat16" in (source, target):
        pytest.skip("the interpreter's bf16 arithmetic is wrong")
    gradient = torch.randn(3, 1500, generator=torch.Generator().manual_seed(0)).to(getattr(torch, source))
    right, version = gradient.double() * factor, gradient._version
    scaled = scaling.scale(gradient, torch.tensor(factor), getattr(torch, target))
    assert relative_error(scaled, right) < {"float32": 1e-7, "bfloat16": 2**-8, "float16": 2**-11}[target]
    assert (scaled.data_ptr() == gradient.data_ptr()) == (source == target)
    assert (gradient._version > version) == (source == target)


@pytest.mark.skipif(HAS_GPU, reason="on tensors of the CPU, in the interpreter")
@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_over_the_gradient_itself_a_factor_of_one_writes_nothing(factor):
    source, written = torch.ones(scaling.BLOCK), torch.zeros(scaling.BLOCK)
    options = {"HAS_ROWS": False, "BLOCK": scaling.BLOCK, "BLOCKS": scaling.BLOCKS}
    scaling._scale_kernel[(1,)](source, written, torch.tensor([factor]), scaling.BLOCK, IN_PLACE=True, **options)
    assert written.unique().tolist() == [0.0 if factor == 1.0 else factor]


# Log-probabilities and evaluations


@pytest.mark.parametrize("schedule", ["tokens", "vocab", "auto"])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_logprobs_are_log_softmax_at_the_labels_and_differentiable(engine, softcap, schedule):
    hidden, weight, bias, labels = make_head(6, 33, 8, bias=True)
    hidden, labels = hidden.view(2, 3, 8), labels.view(2, 3)
    upstream = torch.linspace(-1, 2, 6).view(2, 3)
    leaves = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
    chunk = "auto" if schedule == "auto" else 4
    ours = linear_logprobs(*leaves[:2], labels, bias=leaves[2], softcap=softcap, chunk=chunk, schedule=schedule)
    gradients = torch.autograd.grad(ours, leaves, upstream)
    doubles = [t.double().requires_grad_() for t in (hidden, weight, bias)]
    logits = F.linear(*doubles)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    kept = labels != IGNORE
    right = logits.log_softmax(-1).gather(-1, labels.where(kept, 0)[..., None])[..., 0].where(kept, 0.0)
    assert ours.shape == labels.shape
    assert ours.dtype == torch.float32
    assert (ours <= 0).all()
    assert relative_error(ours, right) < 1e-6
    for gradient, expected in zip(gradients, torch.autograd.grad(right, doubles, upstream.double()), strict=True):
        assert relative_error(gradient, expected) < 1e-5


def exact_evaluation(hidden, weight, bias, labels, objective: Objective) -> dict[str, torch.Tensor]:
    """Sums over the kept tokens in fp64; the label is right where it is the first of the largest."""
    kept = labels != objective.ignore_index
    z = F.linear(*(None if t is None else t.double() for t in (hidden, weight, bias)))[kept]
    losses = eager_rows(z, labels[kept], objective)
    if objective.softcap is not None:
        z = objective.softcap * torch.tanh(z / objective.softcap)
    return {
        "loss": losses.sum(),
        "cross_entropy": F.cross_entropy(z, labels[kept], reduction="sum"),
        "lse": z.logsumexp(1).sum(),
        "correct": (z.argmax(1) == labels[kept]).sum(),
        "entropy": torch.special.entr(z.softmax(1)).sum(),
    }


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("chunk", [1, 5, 100, "auto"])
def test_an_evaluation_equals_sums_in_fp64(engine, chunk, bias, objective):
    hidden, weight, bias, labels = make_head(13, 301, 8, bias=bias, ignored=2)
    labels[7:] = F.linear(hidden, weight, bias).argmax(1)[7:]
    sums = linear_evaluation(hidden, weight, labels, objective, bias=bias, chunk=chunk)
    right = exact_evaluation(hidden, weight, bias, labels, objective)
    assert right["correct"] >= 6
    assert sums.correct == right["correct"]
    for name, value in sums._asdict().items():
        assert value.shape == ()
        assert value.dtype == torch.float32
        assert relative_error(value, right[name]) < 1e-5, name


def test_an_evaluation_makes_no_graph_and_changes_no_input(engine):
    hidden, weight, bias, labels = make_head(13, 301, 8, bias=True)
    leaves = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
    sums = linear_evaluation(*leaves[:2], labels, Objective(), bias=leaves[2], chunk=5)
    assert not any(value.requires_grad for value in sums)
    assert all(torch.equal(leaf, t) for leaf, t in zip(leaves, (hidden, weight, bias), strict=True))


def test_an_evaluation_without_kept_tokens_is_zero(engine):
    hidden, weight, _, _ = make_head(5, 33, 8)
    assert linear_evaluation(hidden, weight, torch.full((5,), IGNORE), Objective(), chunk=3) == (0, 0, 0, 0, 0)
    assert linear_evaluation(hidden[:0], weight, torch.zeros(0, dtype=torch.int64), Objective()) == (0, 0, 0, 0, 0)


def test_an_evaluation_of_a_label_with_bias_minus_infinity_has_a_finite_entropy(engine):
    hidden, weight, bias, labels = make_head(13, 301, 8, bias=True)
    bias[labels[7]] = -float("inf")
    sums = linear_evaluation(hidden, weight, labels, Objective(), bias=bias, chunk=5)
    right = exact_evaluation(hidden, weight, bias, labels, Objective())
    assert torch.isinf(sums.loss)
    assert relative_error(sums.entropy, right["entropy"]) < 1e-5
    assert relative_error(sums.lse, right["lse"]) < 1e-5


# What is refused


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_vmap_is_refused(reduction):
    """In it no tensor says that it wants a gradient."""
    hidden, weight = torch.randn(3, 6, 5), torch.randn(3, 7, 5)
    loss = partial(linear_cross_entropy, target=torch.arange(6), reduction=reduction)
    with pytest.raises(NotImplementedError, match="vmap"):
        torch.vmap(loss)(hidden, weight)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("label", [7, -1, 2**31, 15])
def test_a_label_outside_the_vocabulary_is_an_index_error(label, reduction):
    with pytest.raises(IndexError, match=str(label)):
        linear_cross_entropy(torch.randn(2, 3), torch.randn(7, 3), torch.tensor([0, label]), reduction=reduction)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chunk": 0}, "chunk"),
        ({"chunk": 2.5}, "chunk"),
        ({"chunk": True}, "chunk"),
        ({"reduction": "avg"}, "avg"),
        ({"label_smoothing": -0.1}, "label_smoothing"),
        ({"ignore_index": 2**63}, "ignore_index"),
        ({"ignore_index": -100.0}, "ignore_index"),
        ({"linear_bias": torch.zeros(6)}, r"\[7\].*\[6\]"),
        ({"linear_weight": torch.zeros(7, 4)}, r"\[7, 4\]"),
        ({"linear_weight": torch.zeros(0, 3)}, "not materialised"),
        ({"linear_weight": torch.zeros(7, 3).bfloat16()}, "autocast"),
        ({"input": torch.zeros(2, 3).double(), "linear_weight": torch.zeros(7, 3).double()}, "float64"),
        ({"target": torch.zeros(3, dtype=torch.int64)}, r"\[2\].*\[3\]"),
        ({"target": torch.zeros(2)}, "int32 or int64"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change, message):
    arguments = {"input": torch.randn(2, 3), "linear_weight": torch.randn(7, 3), "target": torch.tensor([0, 1])}
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**(arguments | change))


def test_a_sharded_weight_is_refused():
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        hidden, weight, _, labels = make_head(9, 97, 32)
        sharded = distribute_tensor(weight, init_device_mesh("cpu", (1,)), [Shard(0)]).requires_grad_()
        for reduction in ("mean", "none"):
            with pytest.raises(ValueError, match="weight not materialised"):
                linear_cross_entropy(hidden.requires_grad_(), sharded, labels, reduction=reduction)
    finally:
        distributed.destroy_process_group()


def test_without_asserts_a_bad_label_is_an_index_error_of_every_backend():
    program = """
import torch
from logitless.losses import fused, inplace, naive
for backend in (naive, inplace, lambda *tensors: fused(*tensors, chunk=4)):
    for label in (7, -1, 2**31, 15):
        try:
            backend(torch.randn(6, 3), torch.randn(7, 3), torch.tensor([0, 1, 2, 3, 4, label]))
        except IndexError as error:
            print(error)
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in ("", "src"))}
    done = subprocess.run([sys.executable, "-O", "-c", program], env=environment, capture_output=True, text=True)
    labels = (7, -1, 2**31, 15)
    assert done.stdout.splitlines() == 3 * [f"label {v} is out of range for a vocabulary of 7" for v in labels]
    assert done.returncode == 0, done.stderr


def test_int32_labels_count_as_int64_ones_do():
    """2**32 is 0 in 32 bits."""
    hidden, weight, _, labels = make_head(33, 40, 16)
    labels[:10] = 0
    labels = labels.clamp(min=0)
    options = {"ignore_index": 2**32, "chunk": 8}
    losses = [linear_cross_entropy(hidden, weight, own, **options) for own in (labels, labels.int())]
    assert torch.equal(*losses)


@pytest.mark.parametrize("schedule", ["tokens", "vocab"])
def test_the_default_dtype_changes_nothing(schedule):
    hidden, weight, _, labels = make_head(40, 40, 16)  # 39 count: 1/32 would be exact
    leaf = hidden.requires_grad_()

    def run():
        loss = linear_cross_entropy(leaf, weight, labels, chunk=8, schedule=schedule)
        return loss.detach(), *torch.autograd.grad(loss, leaf)

    right = run()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = run()
    finally:
        torch.set_default_dtype(before)
    assert all(map(torch.equal, found, right))


def test_a_width_of_zero_is_refused():
    with pytest.raises(ValueError, match="empty"):
        linear_cross_entropy(torch.zeros(3, 0), torch.zeros(5, 0), torch.zeros(3, dtype=torch.int64))
