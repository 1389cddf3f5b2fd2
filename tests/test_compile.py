"""The losses as operators of torch.library: opcheck, torch.compile, CUDA graphs."""

import functools
import itertools
import math
import re
from contextlib import nullcontext
from dataclasses import asdict

import hydra
import pytest
import torch
import torch.nn.functional as F
from heads import (
    CHUNK,
    IGNORE,
    LOSSES,
    OBJECTIVES,
    D,
    N,
    V,
    assert_equal,
    eager_mean,
    eager_rows,
    every_loss,
    fused,
    gold,
    inplace,
    leaves_of,
    loss_and_gradients,
    make_head,
    peak_mib,
    per_token,
    random_logits,
    relative_error,
)
from test_model import make_gpt
from tiny import BACKENDS, compose
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._inductor.utils import run_fw_bw_and_get_code

from kernels import parts, reference
from kernels.cross_entropy import cross_entropy
from kernels.linear_cross_entropy import linear_cross_entropy, linear_evaluation, linear_logprobs
from kernels.reference import Objective
from logitless import losses

OPS = torch.ops.logitless
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def compiler(request):
    """The name of the backend that the test asks for."""
    return request.getfixturevalue("inductor") if request.param == "inductor" else request.param


# opcheck


def op_arguments(device, dtype, compute_dtype, objective, *, bias, wanted, n=9, chunk=4):
    hidden, weight, offset, labels = make_head(n, 33, 16, bias=bias, ignored=min(n, 1))
    head = [None if t is None else t.to(device, dtype) for t in (hidden, weight, offset)]
    head = [t if t is None else t.requires_grad_(want) for t, want in zip(head, wanted, strict=True)]
    return *head, labels.to(device), compute_dtype, chunk, wanted, *asdict(objective).values()


def check_linear_ops(*arguments):
    device = arguments[0].device
    # With another factor than 1 backward changes gradients in place that the operator returned, which opcheck looks at.
    torch.library.opcheck(OPS.linear_cross_entropy.default, (*arguments, torch.ones(1, device=device)))
    detached = [a.detach() if isinstance(a, torch.Tensor) else a for a in arguments]
    vectors = [torch.rand(arguments[0].shape[0], device=device) for _ in range(3)]
    for schedule in ("tokens", "vocab"):
        torch.library.opcheck(OPS.linear_cross_entropy_per_token.default, (*arguments, schedule))
        backward = OPS.linear_cross_entropy_per_token_backward.default
        torch.library.opcheck(backward, (*vectors, *detached, schedule))
    torch.library.opcheck(OPS.linear_evaluation.default, detached)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("dtype", "compute_dtype"),
    list(itertools.combinations_with_replacement([torch.float32, torch.bfloat16], 2)),
    ids=["fp32", "autocast", "bf16"],
)
@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True), (False, False)], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_opcheck_passes_the_linear_operators(device, dtype, compute_dtype, wanted, bias):
    wanted = [*wanted, bias and wanted[1]]
    check_linear_ops(*op_arguments(device, dtype, compute_dtype, OBJECTIVES["all"], bias=bias, wanted=wanted))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("n", "chunk"), [(9, 100), (1, 1), (0, 4)])
def test_opcheck_passes_one_chunk_one_token_and_none(device, n, chunk):
    options = {"bias": True, "wanted": [True] * 3, "n": n, "chunk": chunk}
    check_linear_ops(*op_arguments(device, torch.bfloat16, torch.bfloat16, Objective(), **options))


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck_passes_inputs_of_any_strides(device):
    hidden, weight, bias, *rest = op_arguments(
        device, torch.float32, torch.bfloat16, Objective(), bias=True, wanted=[True] * 3
    )
    strided = (t.detach().t().contiguous().t().requires_grad_() for t in (hidden, weight))
    check_linear_ops(*strided, bias, *rest)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("objective", [OBJECTIVES["plain"], OBJECTIVES["all"]], ids=["plain", "all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", [OPS.cross_entropy.default, OPS.cross_entropy_.default], ids=str)
def test_opcheck_passes_the_operators_on_logits(op, dtype, objective, device):
    logits, labels = (tensor.to(device) for tensor in random_logits(9, 33))
    logits, labels[2] = logits.to(dtype), IGNORE
    for layout in (logits, F.pad(logits, (0, 31))[:, :33]):
        torch.library.opcheck(op, (layout, labels, *asdict(objective).values()))


# A compiled training step


MODELS = {"untied": {"tied": False, "head_bias": True}, "tied": {"tied": True, "head_bias": False, "mlp": "gelu"}}


def backend_of(name: str, objective: str = "plain"):
    """The recipe's backend in conf/loss/<name>.yaml."""
    options = asdict(OBJECTIVES[objective])
    softcap = options.pop("softcap")
    keys = [f"{key}={value}" for key, value in (options | {"softcap": softcap or "null"}).items()]
    return hydra.utils.instantiate(compose(f"loss={name}", f"chunk={CHUNK}", *keys).loss)


def train(backend, compile_, *, model: str = "untied", precision: torch.dtype = torch.float32) -> dict:
    """Loss, gradients and parameters of two steps of the recipe's GPT on 385 tokens.

    `compile_` takes the GPT and the function of (tokens, labels) that gives the loss, and returns such a function.
    """
    gpt = make_gpt(n_layers=1, n_heads=2, width=D, padded_vocab_size=V, **MODELS[model]).train()
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=1e-3, eps=1e-4)
    generator = torch.Generator().manual_seed(3)
    result = {}

    def loss_of(gpt, tokens, labels):
        sums = gpt.head(gpt(tokens), labels, backend)
        return sums.loss / (labels != IGNORE).sum().clamp(min=1), sums.cross_entropy

    step = compile_(gpt, loss_of)
    for number in range(2):
        tokens, labels = torch.randint(V, (2, 5, N // 5), generator=generator)
        labels[0, :3] = IGNORE
        with torch.autocast("cpu", dtype=precision, enabled=precision != torch.float32):
            loss, cross_entropy_sum = step(gpt, tokens, labels)
        optimizer.zero_grad()
        loss.backward()
        result |= {f"loss {number}": loss.detach(), f"cross-entropy {number}": cross_entropy_sum}
        result |= {f"d{name} {number}": p.grad.clone() for name, p in gpt.named_parameters()}
        optimizer.step()
        result |= {f"{name} {number}": p.detach().clone() for name, p in gpt.named_parameters()}
    return result


@functools.cache
def uncompiled(name: str, objective: str = "plain", **options) -> dict:
    """`train` of the backend `name` without a compiler; not to be changed."""
    return train(backend_of(name, objective), lambda gpt, loss_of: loss_of, **options)


def whole(compiler):
    return lambda gpt, loss_of: torch.compile(loss_of, backend=compiler, fullgraph=True)


def only_the_backbone(gpt, loss_of):
    gpt.compile(backend="aot_eager", fullgraph=True)
    return loss_of


@pytest.mark.parametrize(
    ("name", "objective", "model", "compiler"),
    [
        *itertools.product(BACKENDS, ["plain", "all"], MODELS, ["aot_eager"]),
        *itertools.product(["fused", "inplace"], ["all"], ["untied"], ["inductor"]),
    ],
    indirect=["compiler"],
)
def test_a_compiled_training_step_is_one_graph_and_equals_eager(name, objective, model, compiler):
    counter = CompileCounterWithBackend(compiler)
    ours = train(backend_of(name, objective), whole(counter), model=model)
    assert_equal(ours, uncompiled(name, objective, model=model))
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", BACKENDS)
def test_a_step_with_only_the_backbone_compiled_equals_eager(name):
    backend = backend_of(name)
    is_compiled = []

    def watched(*tensors, **options):
        is_compiled.append(torch.compiler.is_compiling())
        return backend(*tensors, **options)

    assert_equal(train(watched, only_the_backbone), uncompiled(name))
    assert is_compiled == [False, False]


@pytest.mark.parametrize("name", BACKENDS)
def test_a_graph_break_before_the_loss_changes_no_number(name):
    backend = backend_of(name)
    counter = CompileCounterWithBackend("aot_eager")

    def broken(hidden, weight, labels, *, bias):
        torch._dynamo.graph_break()  # what a print or a logging call does
        return backend(hidden, weight, labels, bias=bias)

    ours = train(broken, lambda gpt, loss_of: torch.compile(loss_of, backend=counter))
    assert_equal(ours, uncompiled(name))
    assert counter.frame_count > 1


@pytest.mark.parametrize("name", BACKENDS)
def test_a_step_compiled_under_autocast_is_as_near_to_fp32_as_eager(name):
    eager = uncompiled(name, "all", precision=torch.bfloat16)
    ours = train(backend_of(name, "all"), whole("aot_eager"), precision=torch.bfloat16)
    for key, value in uncompiled(name, "all").items():
        if key == "cross-entropy 0" or key.endswith(" 1"):  # the second step starts from other parameters
            continue
        assert ours[key].dtype == eager[key].dtype == torch.float32
        error, yardstick = relative_error(ours[key], value), relative_error(eager[key], value)
        assert error <= 1.2 * yardstick + 1e-3, f"{key}: {error:.1e}, eager {yardstick:.1e}"


@pytest.mark.parametrize("backend", [losses.inplace, lambda *args, **options: losses.fused(*args, chunk=4, **options)])
def test_autocast_inside_of_compiled_code_sets_the_dtype(backend):
    hidden, weight, labels = leaves_of(9)

    def loss(hidden, weight, labels):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return backend(hidden, weight, labels).loss

    ours = loss_and_gradients(torch.compile(loss, backend="aot_eager", fullgraph=True), hidden, weight, labels)
    assert_equal(ours, loss_and_gradients(loss, hidden, weight, labels), 1e-2)
    assert relative_error(ours["loss"], gold(hidden, weight, None, labels, Objective())["loss"]) > 1e-6


@every_loss
def test_evaluation_under_no_grad_compiles_and_makes_no_gradient(loss, monkeypatch):
    hidden, weight, labels = leaves_of()
    right = loss(hidden, weight, labels)
    for module, name in ((parts, "matmul"), (reference, "_gradient_")):
        monkeypatch.setattr(module, name, lambda *args, **options: pytest.fail("a gradient was made"))
    with torch.no_grad():
        value = torch.compile(loss, backend="aot_eager", fullgraph=True)(hidden, weight, labels)
    assert not value.requires_grad
    torch.testing.assert_close(value, right)


@pytest.mark.parametrize("wanted", [(True, False), (False, True)], ids=["frozen head", "frozen backbone"])
@every_loss
def test_compiled_gradients_come_exactly_where_they_are_asked_for(loss, wanted):
    hidden, weight, labels = leaves_of()
    right = eager_mean(hidden, weight, labels, upstream=1.0)
    for leaf, want in zip((hidden, weight), wanted, strict=True):
        leaf.requires_grad_(want)
    torch.compile(loss, backend="aot_eager", fullgraph=True)(hidden, weight, labels).backward()
    for leaf, want, name in zip((hidden, weight), wanted, ("dhidden", "dweight"), strict=True):
        assert (leaf.grad is not None) == want
        assert not want or relative_error(leaf.grad, right[name]) < 1e-5


def test_compiled_losses_per_token_take_an_upstream_gradient_each():
    upstream = torch.linspace(-1, 2, N)
    objective = OBJECTIVES["all"]
    options = asdict(objective)

    def loss(hidden, weight, labels):
        return (fused(hidden, weight, labels, reduction="none", **options) * upstream).sum()

    def formula(hidden, weight, labels):
        return (eager_rows(F.linear(hidden, weight), labels, objective) * upstream).sum()

    hidden, weight, labels = leaves_of()
    ours = loss_and_gradients(torch.compile(loss, backend="aot_eager", fullgraph=True), hidden, weight, labels)
    assert_equal(ours, loss_and_gradients(formula, hidden, weight, labels))


# Recompilation


def graphs_over(loss, lengths) -> list[int]:
    """How many graphs were compiled after a step of each length; N is never V or D, which would be taken for equal."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(loss, backend=counter, fullgraph=True)
    counts = []
    for length in lengths:
        hidden, weight, labels = leaves_of(length)
        assert_equal(loss_and_gradients(compiled, hidden, weight, labels), eager_mean(hidden, weight, labels))
        counts.append(counter.frame_count)
    return counts


@every_loss
def test_a_sweep_over_lengths_compiles_twice(loss):
    """For the first length, and for any."""
    assert graphs_over(loss, [200, 256, 385, 130, 512, 1000, 333]) == [1, 2, 2, 2, 2, 2, 2]


@pytest.mark.parametrize("loss", [fused, per_token], ids=["fused", "per token"])
def test_lengths_of_one_chunk_cost_one_graph_more(loss):
    """There a bf16 gradient needs no buffer in fp32: the dtype depends on the length."""
    assert graphs_over(loss, [200, 385, 64, 17, 128, 129, 512]) == [1, 2, 3, 3, 3, 3, 3]


def test_a_sweep_over_chunks_compiles_twice():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda *tensors, chunk: fused(*tensors, chunk=chunk), backend=counter, fullgraph=True)
    hidden, weight, labels = leaves_of()
    for chunk in (7, 64, 128, 200, 384):
        ours = loss_and_gradients(lambda *tensors: compiled(*tensors, chunk=chunk), hidden, weight, labels)  # noqa: B023
        assert_equal(ours, eager_mean(hidden, weight, labels))
    assert counter.frame_count == 2


# What compiled code overwrites


def test_a_compiled_step_has_one_buffer_of_logits(inductor):
    """Neither the copy that forward asks for, nor one for the scaled gradient in backward."""
    tensors = leaves_of(24, v=1537)
    with torch._inductor.config.patch(force_disable_caches=True):
        _, codes = run_fw_bw_and_get_code(lambda: torch.compile(inplace, fullgraph=True)(*tensors))
    assert len(codes) == 2
    assert "torch.ops.logitless.cross_entropy_.default" in codes[0]
    shapes = [re.findall(r"= empty_strided\w*\(\(([\d, ]*)\)", code) for code in codes]
    sizes = [[math.prod(int(size) for size in re.findall(r"\d+", shape)) for shape in graph] for graph in shapes]
    assert [sum(size >= 24 * 1537 for size in graph if size != 1537 * D) for graph in sizes] == [1, 0]


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"], indirect=True)
def test_what_is_taken_from_the_logits_after_a_compiled_loss_is_right(compiler):
    def with_metrics(hidden, weight, labels):
        logits = F.linear(hidden, weight)
        loss = cross_entropy(logits, labels)
        accuracy = (logits.argmax(1) == labels).float().mean()
        return loss, accuracy, logits.logsumexp(1), logits

    hidden, weight, labels = leaves_of(24, v=1537)
    labels[::2] = F.linear(hidden, weight).argmax(1)[::2]  # an accuracy between 0 and 1
    *right, before = (value.detach() for value in with_metrics(hidden, weight, labels))
    before = before.clone()
    loss, accuracy, lse, logits = torch.compile(with_metrics, backend=compiler, fullgraph=True)(hidden, weight, labels)
    (loss + 0.1 * lse.square().mean()).backward()  # the second use of the logits has a gradient too
    for value, expected in zip((loss, accuracy, lse, logits), (*right, before), strict=True):
        torch.testing.assert_close(value, expected)
    assert 0.4 < accuracy < 0.6

    def both(hidden, weight, labels):
        logits = F.linear(hidden, weight)
        return F.cross_entropy(logits, labels) + 0.1 * logits.logsumexp(1).square().mean()

    expected = loss_and_gradients(both, hidden, weight, labels, upstream=1.0)
    assert_equal({"dhidden": hidden.grad, "dweight": weight.grad}, {k: expected[k] for k in ("dhidden", "dweight")})


MAKERS = {
    "leaf": lambda x: x,
    "view": lambda x: x[:, 3:70],
    "expanded": lambda x: x[:1].expand(9, -1),
    "tanh": torch.tanh,
    "softmax": lambda x: torch.softmax(x, 1),
    "softcap": lambda x: 5 * torch.tanh(x / 5),
}


@pytest.mark.parametrize("compiler", ["eager", "aot_eager", "inductor"], indirect=True)
def test_compiled_code_never_overwrites_what_others_need(compiler):
    """A leaf, its view, and outputs that their own backward needs: the last raise if not compiled."""
    labels = torch.arange(9)
    leaf, right = (torch.randn(9, V, generator=torch.Generator().manual_seed(0)).requires_grad_() for _ in range(2))
    before = leaf.detach().clone()

    def total(x, loss):
        return sum(loss(make(x), labels) for make in MAKERS.values())

    torch.compile(lambda x: total(x, cross_entropy), backend=compiler, fullgraph=True)(leaf).backward()
    total(right, F.cross_entropy).backward()
    assert torch.equal(leaf, before)
    assert relative_error(leaf.grad, right.grad) < 1e-5


def with_z_loss(x, weight):
    logits = F.linear(x, weight)
    return logits.flatten(0, 1), 0.1 * logits.logsumexp(2).square().mean()


COMPILED_MODELS = {
    "linear": F.linear,
    "flattened": lambda x, weight: F.linear(x, weight).flatten(0, 1),
    "softcap": lambda x, weight: (5 * torch.tanh(F.linear(x, weight) / 5)).flatten(0, 1),
    "tanh": lambda x, weight: torch.tanh(F.linear(x, weight)),
    "sigmoid, flattened": lambda x, weight: torch.sigmoid(F.linear(x, weight)).flatten(0, 1),
    "softmax, flattened": lambda x, weight: torch.softmax(F.linear(x, weight), -1).flatten(0, 1),
    "exp, viewed": lambda x, weight: F.linear(x, weight).exp().view(24, 16),
    "z-loss": with_z_loss,
}


@pytest.mark.parametrize("model", COMPILED_MODELS.values(), ids=COMPILED_MODELS)
def test_an_eager_loss_on_logits_of_a_compiled_model_is_right(model):
    """The compiled graph may have saved the logits for its own backward."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(4, 6, 8, generator=generator), torch.randn(16, 8, generator=generator)
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    labels = torch.randint(16, (24,), generator=generator)

    def gradients(model, loss):
        outputs = model(*leaves)
        logits, *more = outputs if isinstance(outputs, tuple) else (outputs,)
        return torch.autograd.grad(loss(logits.view(24, 16), labels) + sum(more), leaves)

    ours = gradients(torch.compile(model, backend="aot_eager", fullgraph=True), cross_entropy)
    assert max(map(relative_error, ours, gradients(model, F.cross_entropy))) < 1e-5


# Errors


@every_loss
def test_a_bad_label_in_compiled_code_is_an_index_error(loss):
    hidden, weight, labels = leaves_of(9)
    labels[3] = V
    with pytest.raises(IndexError, match=f"label {V} is out of range"):
        torch.compile(loss, backend="aot_eager", fullgraph=True)(hidden, weight, labels)


@pytest.mark.parametrize("label", [V, -1, 2**31])
def test_a_bad_label_in_the_compiled_eager_path_is_nan_without_a_gradient(label):
    """A compiler cannot trace the check, which reads the labels: the path does what it does on a GPU."""
    hidden, weight, labels = leaves_of(9)
    labels[3] = label
    sums = torch.compile(losses.naive, backend="aot_eager", fullgraph=True)(hidden, weight, labels)
    assert torch.isnan(sums.loss)
    assert torch.isnan(sums.cross_entropy)
    sums.loss.backward()
    assert (hidden.grad[3] == 0).all()
    assert torch.isfinite(weight.grad).all()


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@every_loss
def test_a_compiled_double_backward_raises(loss, compiler, request):
    if loss is inplace and compiler == "eager":
        request.applymarker(pytest.mark.xfail(strict=True, reason="the gradient is taken for a constant"))
    if loss is fused and compiler == "aot_eager" and torch.__version__ < (2, 13):
        pytest.skip("torch before 2.13 takes the gradient for a constant")
    hidden, weight, labels = leaves_of(9)
    value = torch.compile(loss, backend=compiler, fullgraph=True)(hidden, weight, labels)

    def penalty():
        (gradient,) = torch.autograd.grad(value, hidden, create_graph=True)
        (value + gradient.square().sum()).backward()

    with pytest.raises(RuntimeError, match=r"create_graph|double backward"):
        penalty()


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"], indirect=True)
@every_loss
def test_a_second_backward_of_compiled_code_is_right(loss, compiler):
    hidden, weight, labels = leaves_of()
    value = torch.compile(loss, backend=compiler, fullgraph=True)(hidden, weight, labels)
    for upstream in (0.37, 2.0):
        gradients = torch.autograd.grad(value, (hidden, weight), torch.tensor(upstream), retain_graph=True)
        right = eager_mean(hidden, weight, labels, upstream=upstream)
        assert max(map(relative_error, gradients, (right["dhidden"], right["dweight"]))) < 1e-5


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return None


@every_loss
def test_a_loss_that_nothing_flows_back_to_gives_no_gradient(loss):
    """Autograd hands an undefined gradient to whatever comes before a function that returns None."""
    hidden, weight, labels = leaves_of(9)
    (NoGradient.apply(loss(hidden, weight, labels)) + weight.sum()).backward()
    assert hidden.grad is None or (hidden.grad == 0).all()
    assert (weight.grad == 1).all()


# Schedules, log-probabilities, evaluations


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_vocabulary_slabs_compile_into_one_graph_and_equal_eager(reduction):
    def loss(hidden, weight, labels):
        losses = linear_cross_entropy(hidden, weight, labels, chunk=CHUNK, schedule="vocab", reduction=reduction)
        return losses if reduction == "mean" else losses.sum() / (labels != IGNORE).sum()

    leaves = leaves_of()
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    assert_equal(loss_and_gradients(compiled, *leaves), loss_and_gradients(loss, *leaves))
    assert_equal(loss_and_gradients(loss, *leaves), eager_mean(*leaves))


def test_plans_for_a_budget_compile_into_one_graph_and_equal_eager():
    def loss(hidden, weight, labels):
        return linear_cross_entropy(hidden, weight, labels, budget_mib=1)

    leaves = leaves_of()
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    assert_equal(loss_and_gradients(compiled, *leaves), eager_mean(*leaves))


@pytest.mark.parametrize("chunk", [CHUNK, "auto"])
def test_logprobs_and_evaluations_compile_into_one_graph_and_equal_eager(chunk):
    hidden, weight, labels = leaves_of()

    def logprobs(hidden, weight, labels):
        return -linear_logprobs(hidden, weight, labels, chunk=chunk).sum() / (labels != IGNORE).sum()

    def evaluation(hidden, weight, labels):
        return linear_evaluation(hidden, weight, labels, Objective(z_loss=1e-2), chunk=chunk)

    compiled = torch.compile(logprobs, backend="aot_eager", fullgraph=True)
    assert_equal(loss_and_gradients(compiled, hidden, weight, labels), eager_mean(hidden, weight, labels))
    ours = torch.compile(evaluation, backend="aot_eager", fullgraph=True)(hidden, weight, labels)
    right = evaluation(hidden, weight, labels)
    assert not any(value.requires_grad for value in ours)
    assert_equal(ours._asdict(), right._asdict(), 1e-6)


# On a GPU: no waiting, CUDA graphs, memory


def steps_of(loss, precision: str):
    """`loss` on fp32 leaves under autocast, or on bf16 leaves."""

    def under_autocast(*tensors):
        with torch.autocast("cuda", dtype=torch.bfloat16) if precision == "autocast" else nullcontext():
            return loss(*tensors)

    return under_autocast, torch.float32 if precision == "autocast" else torch.bfloat16


every_precision = pytest.mark.parametrize("precision", ["autocast", "bf16"])
eager_or_compiled = pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])


def naive(hidden, weight, labels, *, bias, **options):
    sums = losses.naive(hidden, weight, labels, bias=bias, objective=Objective(**options))
    return sums.loss / (labels != IGNORE).sum()


@pytest.mark.gpu
@every_precision
@every_loss
def test_a_cuda_graph_replays_on_new_inputs(loss, precision):
    step, dtype = steps_of(loss, precision)
    hidden, weight, labels = leaves_of(device="cuda", dtype=dtype, v=513)

    def forward_backward():
        hidden.grad = weight.grad = None
        value = step(hidden, weight, labels)
        (value * 0.37).backward()
        return value.detach()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            forward_backward()  # compiles kernels, makes workspaces
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value = forward_backward()

    for seed in (1, 2):
        others = leaves_of(device="cuda", dtype=dtype, seed=seed, v=513)
        with torch.no_grad():
            for static, new in zip((hidden, weight, labels), others, strict=True):
                static.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        right = loss_and_gradients(step, *others)
        assert_equal({"loss": value, "dhidden": hidden.grad, "dweight": weight.grad}, right, 1e-2)


@pytest.mark.gpu
@every_loss
def test_the_compilers_own_cuda_graphs_equal_eager(loss):
    step, dtype = steps_of(loss, "autocast")
    compiled = torch.compile(step, mode="reduce-overhead", fullgraph=True)
    counters.clear()
    for seed in range(5):  # warms up, records, replays
        hidden, weight, labels = leaves_of(device="cuda", dtype=dtype, seed=seed, v=513)
        torch.compiler.cudagraph_mark_step_begin()
        value = compiled(hidden, weight, labels)
        gradients = torch.autograd.grad(value, (hidden, weight), torch.tensor(0.37, device="cuda"))
        ours = {"loss": value.detach().clone()}
        ours |= {f"d{name}": g.clone() for name, g in zip(("hidden", "weight"), gradients, strict=True)}
        assert_equal(ours, loss_and_gradients(step, hidden, weight, labels), 1e-2)
    assert counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.gpu
@eager_or_compiled
@every_precision
@pytest.mark.parametrize("loss", [*LOSSES.values(), naive], ids=[*LOSSES, "naive"])
def test_forward_and_backward_never_wait_for_the_device(loss, precision, is_compiled):
    options = asdict(OBJECTIVES["all"])
    step, dtype = steps_of(lambda *tensors: loss(*tensors[:3], bias=tensors[3], **options), precision)
    step = torch.compile(step, fullgraph=True) if is_compiled else step
    hidden, weight, labels = leaves_of(device="cuda", dtype=dtype, v=513)
    bias = torch.zeros(513, device="cuda", dtype=dtype, requires_grad=True)

    def train_and_evaluate():
        step(hidden, weight, labels, bias).backward()
        with torch.no_grad():
            step(hidden, weight, labels, bias)

    for _ in range(2):
        train_and_evaluate()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        train_and_evaluate()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@every_precision
@every_loss
def test_a_step_compiled_for_a_gpu_is_as_good_as_eager(loss, precision):
    options = asdict(OBJECTIVES["all"])
    step, dtype = steps_of(lambda *tensors: loss(*tensors, **options), precision)
    hidden, weight, labels = leaves_of(device="cuda", dtype=dtype, v=513)
    right = gold(hidden, weight, None, labels, OBJECTIVES["all"], 0.37 / (N - 1))
    right["loss"] /= N - 1
    eager = loss_and_gradients(step, hidden, weight, labels)
    ours = loss_and_gradients(torch.compile(step, fullgraph=True), hidden, weight, labels)
    for name, value in right.items():
        error, yardstick = relative_error(ours[name], value), relative_error(eager[name], value)
        assert ours[name].dtype == eager[name].dtype
        assert error <= 2 * yardstick + 2**-9, f"{name}: {error:.1e}, eager {yardstick:.1e}"


@pytest.mark.gpu
@every_precision
@every_loss
def test_a_compiled_step_peaks_no_higher_than_an_eager_one(loss, precision):
    options = {} if loss is inplace else {"chunk": 1024}
    step, dtype = steps_of(lambda *tensors: loss(*tensors, **options), precision)
    hidden, weight, _, labels = make_head(4096, 50304, 256)
    hidden, weight = (t.to("cuda", dtype).requires_grad_() for t in (hidden, weight))
    labels = labels.cuda()
    peaks = {}
    for name, run in (("eager", step), ("compiled", torch.compile(step, fullgraph=True))):
        for _ in range(2):
            run(hidden, weight, labels).backward()
            hidden.grad = weight.grad = None
        peaks[name] = peak_mib(lambda: run(hidden, weight, labels).backward())  # noqa: B023
        hidden.grad = weight.grad = None
    assert peaks["compiled"] <= 1.02 * peaks["eager"], peaks
