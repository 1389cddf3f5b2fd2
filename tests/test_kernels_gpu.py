"""What only a GPU can show of the kernels: bf16 and fp16 accuracy, peak memory, large offsets, no waiting, no races."""

from contextlib import nullcontext
from dataclasses import asdict

import pytest
import torch
from heads import (
    IGNORE,
    MIB,
    OBJECTIVES,
    RACE_VOCABULARIES,
    assert_as_good_as_eager,
    eager,
    eager_rows,
    gold,
    make_head,
    peak_mib,
    sums_and_gradients,
)

from kernels import row_kernels
from kernels.cross_entropy import cross_entropy
from kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_sums
from kernels.reference import Objective, Rows
from logitless.losses import fused, inplace, naive

pytestmark = pytest.mark.gpu

FLOORS = {torch.float32: 1e-6, torch.bfloat16: 2**-9, torch.float16: 2**-12}
BACKENDS = {
    "naive": naive,
    "inplace": inplace,
    "fused": lambda *args, **options: fused(*args, chunk=100, **options),
    "fused, one chunk": lambda *args, **options: fused(*args, chunk=10**6, **options),
}


def cuda_head(n, v, d, dtype=torch.bfloat16, **options):
    hidden, weight, bias, labels = (None if t is None else t.cuda() for t in make_head(n, v, d, **options))
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype), labels


@pytest.mark.parametrize("dtype", FLOORS, ids=str)
@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
@pytest.mark.parametrize("vocab", [97, 257, 50257])
def test_every_backend_is_as_good_as_eager(vocab, objective, backend, dtype):
    hidden, weight, bias, labels = cuda_head(331, vocab, 72, dtype, bias=True)

    def loss(hidden, weight, bias):
        return backend(hidden, weight, labels, bias=bias, objective=objective).loss

    ours = sums_and_gradients(loss, {"hidden": hidden, "weight": weight, "bias": bias})
    arguments = (hidden, weight, bias, labels, objective)
    assert_as_good_as_eager(ours, eager(*arguments), gold(*arguments), FLOORS[dtype])


@pytest.mark.parametrize("vocab", [32000, 50304, 128256])
@pytest.mark.parametrize("scale", [0.1, 30.0], ids=["flat", "confident"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_large_vocabularies_are_as_good_as_eager(vocab, scale, reduction):
    hidden, weight, _, labels = cuda_head(331, vocab, 64, scale=scale)

    def loss(hidden, weight):
        losses = linear_cross_entropy(hidden, weight, labels, chunk=100, reduction=reduction)
        return losses * 330 if reduction == "mean" else losses.sum()

    ours = sums_and_gradients(loss, {"hidden": hidden, "weight": weight})
    arguments = (hidden, weight, None, labels, Objective())
    assert_as_good_as_eager(ours, eager(*arguments), gold(*arguments), 2**-9)


def corner(name: str, logits: torch.Tensor, labels: torch.Tensor) -> None:
    """Changes fp32 `logits` [N, V] in place into what the name says."""
    rows = torch.arange(logits.shape[0], device=logits.device)
    if name == "confident":
        logits[rows, labels] += torch.linspace(0, 60, len(rows), device=logits.device)
    elif name == "common offset":
        logits += torch.linspace(-3000, 3000, len(rows), device=logits.device)[:, None]
    elif name == "minus infinity":
        kept = logits[rows, labels].clone()
        logits[:, : logits.shape[1] * 9 // 10] = -float("inf")
        logits[rows, labels] = kept
    elif name == "alone":
        logits.fill_(-float("inf"))
        logits[rows, labels] = 1.0


@pytest.mark.parametrize("dtype", FLOORS, ids=str)
@pytest.mark.parametrize("name", ["flat", "confident", "common offset", "minus infinity", "alone"])
@pytest.mark.parametrize("vocab", [97, 257, 32000, 50257, 50304, 128256])
def test_corners_of_logits_are_as_good_as_eager(vocab, name, dtype):
    generator = torch.Generator("cuda").manual_seed(0)
    logits = torch.randn(131, vocab, device="cuda", generator=generator) * 2
    labels = torch.randint(vocab, (131,), device="cuda", generator=generator, dtype=torch.int32)
    corner(name, logits, labels.long())
    logits = logits.to(dtype)
    labels[7] = IGNORE

    def eager_sum(logits):
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return eager_rows(wide, labels, Objective()).sum()

    ours = sums_and_gradients(lambda logits: cross_entropy(logits * 1, labels, reduction="sum"), {"logits": logits})
    theirs, right = (sums_and_gradients(eager_sum, {"logits": tensor}) for tensor in (logits, logits.double()))
    assert_as_good_as_eager(ours, theirs, right, FLOORS[dtype])


@pytest.mark.parametrize("hidden_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_accumulates_an_fp32_dweight(hidden_dtype):
    hidden, weight, bias, labels = cuda_head(331, 50257, 72, torch.float32, bias=True)
    tensors = {"hidden": hidden.to(hidden_dtype), "weight": weight, "bias": bias}

    def autocast(backend):
        def loss(hidden, weight, bias):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                return backend(hidden, weight, labels, bias=bias).loss

        return sums_and_gradients(loss, tensors)

    ours = autocast(BACKENDS["fused"])
    assert {name: ours[f"d{name}"].dtype for name in tensors} == {name: t.dtype for name, t in tensors.items()}
    right = gold(tensors["hidden"], weight, bias, labels, Objective())
    assert_as_good_as_eager(ours, autocast(naive), right, 2**-9)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_more_logits_than_int32_can_count(reduction):
    """43008 x 50257 > 2**31: only the last rows would be wrong."""
    logits = torch.zeros(43008, 50257, dtype=torch.bfloat16, device="cuda", requires_grad=True) * 1
    logits.data[-1, 50256] = 5.0
    labels = torch.full((43008,), 50256, device="cuda")
    loss = cross_entropy(logits, labels, reduction=reduction)
    if reduction == "none":
        assert loss[-1].item() == pytest.approx(5.827834, abs=1e-5)
        assert (loss[:-1] - 10.824905).abs().max() < 1e-5
    loss.sum().backward()
    n = 43008 if reduction == "mean" else 1
    p = torch.exp(torch.tensor(-5.827834)).item()
    assert logits[-1, 50256].item() == pytest.approx((p - 1) / n, rel=1e-2)
    assert logits[-1, 0].item() == pytest.approx(p / 148.413 / n, rel=1e-2)
    assert logits[0, 50256].item() == pytest.approx((1 / 50257 - 1) / n, rel=1e-2)


@pytest.mark.parametrize("backend", ["naive", "fused, one chunk"])
def test_more_logits_than_int32_can_count_in_a_head(backend):
    """The last token alone has a logit of 5, at its label."""
    hidden = torch.zeros(43008, 8, dtype=torch.bfloat16, device="cuda")
    hidden[-1, 0] = 1.0
    weight = torch.zeros(50257, 8, dtype=torch.bfloat16, device="cuda")
    weight[-1, 0] = 5.0
    labels = torch.full((43008,), 50256, device="cuda")
    ours = sums_and_gradients(
        lambda hidden, weight: BACKENDS[backend](hidden, weight, labels).loss,
        {"hidden": hidden, "weight": weight},
        upstream=1.0,
    )
    assert ours["loss"].item() == pytest.approx(43007 * 10.824905 + 5.827834, rel=1e-6)
    p = torch.exp(torch.tensor(-5.827834)).item()
    assert ours["dhidden"][-1, 0].item() == pytest.approx(5 * (p - 1), rel=1e-2)
    assert ours["dhidden"][0, 0].item() == pytest.approx(5 * (1 / 50257 - 1), rel=1e-2)
    assert ours["dweight"][-1, 0].item() == pytest.approx(p - 1, rel=1e-2)
    assert ours["dweight"][0, 0].item() == pytest.approx(p / 148.413, rel=1e-2)


@pytest.mark.parametrize(("n", "vocab"), [(2048, 32000), (600, 50257)])
@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
def test_a_scaled_fp16_gradient_does_not_vanish(backend, n, vocab):
    """1 / (V N) is below fp16's smallest number, 65536 times as much is not."""
    hidden = torch.zeros(n, 16, device="cuda").requires_grad_()
    with torch.no_grad():
        hidden[:, 0] = 1.0
    weight = torch.zeros(vocab, 16, device="cuda").requires_grad_()
    labels = torch.zeros(n, dtype=torch.int64, device="cuda")
    scaler = torch.amp.GradScaler("cuda", init_scale=65536.0)
    with torch.autocast("cuda", dtype=torch.float16):
        loss = backend(hidden, weight, labels).loss / n
    assert loss.dtype == torch.float32
    scaler.scale(loss).backward()
    torch.testing.assert_close(  # not row 0, which passes fp16's range where the GEMM's output is fp16
        weight.grad[1:, 0], torch.full_like(weight.grad[1:, 0], 65536 / vocab), rtol=1e-2, atol=0
    )


@pytest.mark.parametrize(("n", "vocab"), [(2048, 32000), (600, 50257)])
def test_a_scaled_fp16_gradient_over_logits_does_not_vanish(n, vocab):
    leaf = torch.zeros(n, vocab, dtype=torch.float16, device="cuda", requires_grad=True)
    (cross_entropy(leaf, torch.zeros(n, dtype=torch.int64, device="cuda")) * 65536).backward()
    torch.testing.assert_close(
        leaf.grad[:, 1:], torch.full_like(leaf.grad[:, 1:], 65536 / (vocab * n)), rtol=1e-2, atol=0
    )


@pytest.mark.parametrize("label", [50, -1, 2**31, 63])
def test_a_bad_label_of_the_eager_path_gives_nan_and_zero_gradient(label):
    """The kernels' are in test_guards.py."""
    hidden, weight, _, labels = cuda_head(7, 50, 16)
    labels[3] = label
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    sums = naive(hidden, weight, labels)
    assert torch.isnan(sums.loss)
    assert torch.isnan(sums.cross_entropy)
    sums.loss.backward()
    assert (hidden.grad[3] == 0).all()
    assert torch.isfinite(hidden.grad).all()
    assert torch.isfinite(weight.grad).all()


@pytest.mark.parametrize("vocab", [50257, 65537, 131072])
def test_repeats_are_identical_bit_for_bit(vocab):
    hidden, weight, _, labels = cuda_head(511, vocab, 64)

    def run():
        return sums_and_gradients(
            lambda hidden, weight: linear_cross_entropy_sums(hidden, weight, labels, Objective(), chunk=128).loss,
            {"hidden": hidden, "weight": weight},
        )

    first = run()
    for _ in range(20):
        again = run()
        assert all(torch.equal(again[name], value) for name, value in first.items())


@pytest.mark.parametrize("vocab", RACE_VOCABULARIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_no_warp_overtakes_another(vocab, dtype):
    """The label's logit is read before it is overwritten, and every launch gives the same bits."""
    generator = torch.Generator("cuda").manual_seed(0)
    logits = torch.randn(1031, vocab, device="cuda", generator=generator, dtype=dtype) * 3
    labels = torch.randint(vocab, (1031,), device="cuda", generator=generator)
    first = Rows.empty(1031, logits.device)
    gradient = logits.clone()
    row_kernels.forward_backward_rows_(gradient, labels, Objective(), first)
    apart = torch.empty_like(logits)
    vectors = {"row_max": first.row_max, "log_sum": first.log_sum, "dlosses": torch.ones(1031, device="cuda")}
    row_kernels.backward_rows(logits, labels, Objective(), **vectors, dlogits=apart)
    assert torch.equal(gradient, apart)
    alone = Rows.empty(1031, logits.device)  # whose tiles may differ, and so the order of its sums
    row_kernels.forward_rows(logits, labels, Objective(), alone)
    torch.testing.assert_close(tuple(first), tuple(alone), rtol=1e-6, atol=1e-6)
    for _ in range(50):
        again, rows, alone_again = logits.clone(), *(Rows.empty(1031, logits.device) for _ in range(2))
        row_kernels.forward_backward_rows_(again, labels, Objective(), rows)
        row_kernels.forward_rows(logits, labels, Objective(), alone_again)
        assert torch.equal(again, gradient)
        assert all(torch.equal(*pair) for pair in zip((*rows, *alone_again), (*first, *alone), strict=True))


@pytest.mark.parametrize("vocab", [50304, 50257])
@pytest.mark.parametrize("n", [8192, 16384])
def test_the_transient_is_one_chunk_and_does_not_grow_with_tokens(vocab, n):
    """fp32 weights under autocast: beyond the gradients, one chunk of logits and the bf16 copies of the inputs."""
    hidden, weight, _, labels = cuda_head(n, vocab, 256, torch.float32)
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()

    def step():
        with torch.autocast("cuda", dtype=torch.bfloat16):
            linear_cross_entropy(hidden, weight, labels, chunk=1024).backward()

    step()
    hidden.grad = weight.grad = None
    gradients = 4 * (hidden.numel() + weight.numel())
    copies = 2 * (hidden.numel() + weight.numel())
    chunk = 2 * 1024 * (-(-vocab // 64) * 64)
    assert peak_mib(step) == pytest.approx((gradients + copies + chunk) / MIB, rel=0.02)


def test_the_in_place_gradient_allocates_nothing_the_size_of_the_logits():
    logits = torch.randn(4096, 50304, device="cuda", dtype=torch.bfloat16, requires_grad=True) * 1
    labels = torch.zeros(4096, dtype=torch.int64, device="cuda")
    loss = cross_entropy(logits, labels)
    assert peak_mib(lambda: torch.autograd.grad(loss, logits)) < 1


@pytest.mark.parametrize(("vocab", "bias", "objective"), [(50304, False, "plain"), (50257, True, "all")])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("precision", ["autocast", "bf16"])
def test_nothing_is_allocated_per_chunk(precision, reduction, vocab, bias, objective):
    dtype = torch.float32 if precision == "autocast" else torch.bfloat16
    *leaves, labels = cuda_head(1024, vocab, 64, dtype, bias=bias)
    hidden, weight, offset = (None if t is None else t.requires_grad_() for t in leaves)
    options = asdict(OBJECTIVES[objective]) | {"linear_bias": offset, "reduction": reduction}

    def step(chunk):
        with torch.autocast("cuda", dtype=torch.bfloat16) if precision == "autocast" else nullcontext():
            linear_cross_entropy(hidden, weight, labels, chunk=chunk, **options).sum().backward()

    def allocations(chunk) -> int:
        step(chunk)  # compiles kernels, makes workspaces and .grad
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        step(chunk)
        return torch.cuda.memory_stats()["allocation.all.allocated"] - before

    assert allocations(128) == allocations(512)


def test_peaks_fall_from_naive_to_inplace_to_fused():
    hidden, weight, _, labels = cuda_head(8192, 50304, 256, torch.float32)
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    peaks = {}
    for name in ("naive", "inplace", "fused"):

        def step(backend=BACKENDS[name]):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                backend(hidden, weight, labels).loss.backward()

        step()
        hidden.grad = weight.grad = None
        peaks[name] = peak_mib(step)
        hidden.grad = weight.grad = None
    logits = 2 * 8192 * 50304 / MIB
    assert peaks["naive"] > 5 * logits
    assert logits < peaks["inplace"] < 1.5 * logits
    assert peaks["fused"] < 0.5 * logits


def test_a_frozen_head_costs_no_gradient_buffer():
    hidden, weight, _, labels = cuda_head(2048, 50304, 512)
    hidden.requires_grad_()

    def step():
        linear_cross_entropy(hidden, weight, labels, chunk=256).backward()

    step()
    frozen = peak_mib(step)
    weight.requires_grad_()
    step()
    weight.grad = None
    assert peak_mib(step) - frozen > 4 * weight.numel() / MIB
