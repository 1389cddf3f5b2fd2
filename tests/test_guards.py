"""Canaries around every buffer: no kernel reads or writes beside its buffers, whatever the label."""

from dataclasses import asdict

import pytest
import torch
from conftest import HAS_GPU
from heads import IGNORE, OBJECTIVES, eager_rows, exact_rows, make_head, random_logits, relative_error
from torch import Tensor

from kernels import gemm, row_kernels
from kernels.linear_cross_entropy import linear_cross_entropy, linear_evaluation
from kernels.reference import Objective, Rows

N, V, D, CHUNK = 6, 7, 5, 4
WIDTH = 128  # a label of -100 would still land in the canaries

CANARY = 12352  # exact in bf16; as a logit it would show in a loss, and as a label make one NaN

bad_labels = pytest.mark.parametrize(
    ("bad", "ignore_index"),
    [(7, -100), (-1, -100), (-100, -1), (2**31, -100), (15, -100), (2**40, -100), (-(2**31) - 1, -100)],
)
objectives = pytest.mark.parametrize("options", [OBJECTIVES["plain"], OBJECTIVES["all"]], ids=["plain", "all"])


class Guards:
    """Buffers that lie among canaries."""

    def __init__(self, device: str):
        self.device = device
        self.buffers = []  # memory with canaries, its state to be kept, and which of it is to be kept

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Contiguous, full of canaries itself, canaries before and after."""
        size = torch.Size(shape).numel()
        return self._among_canaries((size,), dtype).view(shape)

    def around(self, values: Tensor, *, is_input: bool = False) -> Tensor:
        """A copy of `values` with canaries on every side, between the rows too; an input must not change itself."""
        view = self._among_canaries(values.shape, values.dtype).copy_(values)
        if is_input:
            memory, _, must_stay = self.buffers.pop()
            self.buffers.append((memory, memory.clone(), must_stay.fill_(True)))
        return view

    def _among_canaries(self, shape, dtype: torch.dtype) -> Tensor:
        memory = torch.full([size + 2 * WIDTH for size in shape], CANARY, dtype=dtype, device=self.device)
        inside = tuple(slice(WIDTH, WIDTH + size) for size in shape)
        must_stay = torch.ones(memory.shape, dtype=torch.bool, device=self.device)
        must_stay[inside] = False
        self.buffers.append((memory, memory.clone(), must_stay))
        return memory[inside]

    def assert_untouched(self) -> None:
        for memory, before, must_stay in self.buffers:
            assert torch.equal(memory[must_stay], before[must_stay])


@pytest.fixture(
    params=[
        pytest.param(("cpu", torch.float32), marks=pytest.mark.skipif(HAS_GPU, reason="runs on the GPU instead")),
        pytest.param(("cuda", torch.float32), marks=pytest.mark.gpu),
        pytest.param(("cuda", torch.bfloat16), marks=pytest.mark.gpu),
    ],
    ids=["interpreter", "gpu-fp32", "gpu-bf16"],
)
def place(request, monkeypatch) -> tuple[str, torch.dtype]:
    """Device and dtype; on a CPU the kernel runs in the interpreter, which has no check of the labels before it."""
    monkeypatch.setattr(row_kernels, "runs_triton", lambda tensor: True)
    return request.param


def tolerance(dtype: torch.dtype) -> float:
    return 1e-5 if dtype == torch.float32 else 2e-2


def labels_with(bad: int, ignore_index: int) -> Tensor:
    """The second row is ignored, the last has the bad label."""
    labels = torch.tensor([0, 1, 2, 3, V - 1, bad])
    labels[1] = ignore_index
    return labels


def without_bad_row(labels: Tensor, ignore_index: int) -> Tensor:
    return torch.cat([labels[:-1], torch.tensor([ignore_index])])


@bad_labels
@objectives
@pytest.mark.parametrize("gradient", ["one launch", "over the logits", "separate"])
def test_a_bad_label_makes_its_row_nan_with_gradient_zero_and_touches_no_canary(
    place, bad, ignore_index, options, gradient
):
    device, dtype = place
    objective = Objective(**asdict(options) | {"ignore_index": ignore_index})
    values, labels = random_logits(N, V)[0].to(dtype), labels_with(bad, ignore_index)
    upstream = torch.ones(N) if gradient == "one launch" else torch.linspace(-1, 2, N)

    guards = Guards(device)
    logits = guards.around(values, is_input=gradient == "separate")
    dlogits = guards.around(torch.zeros_like(values)) if gradient == "separate" else logits
    guarded_labels = guards.around(labels, is_input=True)
    dlosses = guards.around(upstream, is_input=True)
    rows = Rows(*(guards.empty(N, dtype=torch.float32) for _ in Rows._fields))
    if gradient == "one launch":
        row_kernels.forward_backward_rows_(logits, guarded_labels, objective, rows)
    else:
        row_kernels.forward_rows(logits, guarded_labels, objective, rows)
        assert torch.equal(logits.cpu(), values)
        statistics = [vector.clone() for vector in rows]
        vectors = {"row_max": rows.row_max, "log_sum": rows.log_sum, "dlosses": dlosses}
        row_kernels.backward_rows(logits, guarded_labels, objective, **vectors, dlogits=dlogits)
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(rows, statistics, strict=True))
    guards.assert_untouched()

    exact = values.double().requires_grad_()
    losses = eager_rows(exact, without_bad_row(labels, ignore_index), objective)
    (right,) = torch.autograd.grad(losses, exact, upstream.double())
    for ours in (rows.losses, rows.cross_entropies):
        assert torch.isnan(ours).tolist() == [False] * (N - 1) + [True]
        assert ours[1] == 0
    assert relative_error(rows.losses[:-1].cpu(), losses[:-1]) < 1e-5
    without_extras = Objective(ignore_index, softcap=options.softcap)
    plain = eager_rows(exact, without_bad_row(labels, ignore_index), without_extras)
    assert relative_error(rows.cross_entropies[:-1].cpu(), plain[:-1]) < 1e-5
    assert relative_error(dlogits.cpu(), right) < tolerance(dtype)
    assert (dlogits[[1, N - 1]] == 0).all()
    assert all((vector != CANARY).all() for vector in rows)


@pytest.fixture
def guarded_allocations(monkeypatch):
    """Lets every buffer that the package allocates come from `Guards`; returns how to install them."""

    def install(guards: Guards) -> list[Tensor]:
        made, new_empty = [], torch.Tensor.new_empty

        def guarded(shape, dtype: torch.dtype) -> Tensor:
            made.append(guards.empty(*shape, dtype=dtype))
            return made[-1]

        def guarded_new_empty(tensor, *shape, dtype=None, **options):
            if options or shape == (0,):  # Triton's interpreter, and what an op returns for None
                return new_empty(tensor, *shape, dtype=dtype, **options)
            return guarded(shape[0] if isinstance(shape[0], torch.Size) else shape, dtype or tensor.dtype)

        def guarded_rows(n_rows, device):
            return Rows(*(guarded((n_rows,), torch.float32) for _ in Rows._fields))

        monkeypatch.setattr(Rows, "empty", guarded_rows)
        monkeypatch.setattr(
            torch, "empty_like", lambda tensor, *, dtype=None: guarded(tensor.shape, dtype or tensor.dtype)
        )
        monkeypatch.setattr(torch.Tensor, "new_empty", guarded_new_empty)
        return made

    return install


@bad_labels
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_a_bad_label_of_a_head_makes_its_token_nan_with_gradient_zero_and_touches_no_canary(
    place, bad, ignore_index, reduction, guarded_allocations
):
    device, dtype = place
    *values, _ = make_head(N, V, D, bias=True)
    values, labels = [value.to(dtype) for value in values], labels_with(bad, ignore_index)
    upstream = torch.linspace(-1, 2, N) if reduction == "none" else torch.tensor(0.37)

    guards = Guards(device)
    hidden, weight, bias = (guards.around(value, is_input=True).detach().requires_grad_() for value in values)
    made = guarded_allocations(guards)
    options = {"ignore_index": ignore_index, "reduction": reduction, "chunk": CHUNK}
    guarded_labels = guards.around(labels, is_input=True)
    losses = linear_cross_entropy(hidden, weight, guarded_labels, linear_bias=bias, **options)
    gradients = torch.autograd.grad(losses, (hidden, weight, bias), guards.around(upstream, is_input=True))
    guards.assert_untouched()
    chunks = [buffer for buffer in made if buffer.shape == (CHUNK, 64)]
    assert len(chunks) == (1 if reduction == "sum" else 2)
    assert all((buffer[:, V:] == CANARY).all() for buffer in chunks)
    assert {(N, D), (V, D), (V,), (N,)} <= {tuple(buffer.shape) for buffer in made}
    if dtype == torch.float32:  # others are cast at the end
        assert {g.data_ptr() for g in gradients} <= {buffer.data_ptr() for buffer in made}

    exact = [value.double().requires_grad_() for value in values]
    logits = torch.nn.functional.linear(*exact)
    right = eager_rows(logits, without_bad_row(labels, ignore_index), Objective(ignore_index))
    if reduction == "none":
        assert torch.isnan(losses).tolist() == [False] * (N - 1) + [True]
        assert relative_error(losses[:-1].cpu(), right[:-1]) < tolerance(dtype)
    else:
        assert torch.isnan(losses)
    right = torch.autograd.grad(right, exact, upstream.double().expand(N))
    for gradient, expected in zip(gradients, right, strict=True):
        assert relative_error(gradient.cpu(), expected) < tolerance(dtype)
    assert (gradients[0][[1, N - 1]] == 0).all()


@bad_labels
@pytest.mark.parametrize("launcher", [row_kernels.forward_rows, row_kernels.forward_backward_rows_])
def test_on_a_cpu_a_bad_label_raises_before_anything_is_written(launcher, bad, ignore_index):
    guards = Guards("cpu")
    logits = guards.around(random_logits(N, V)[0], is_input=True)
    labels = guards.around(labels_with(bad, ignore_index), is_input=True)
    rows = Rows(*(guards.empty(N, dtype=torch.float32) for _ in Rows._fields))
    with pytest.raises(IndexError, match=str(bad)):
        launcher(logits, labels, Objective(ignore_index), rows)
    guards.assert_untouched()
    assert all((vector == CANARY).all() for vector in rows)


@pytest.mark.parametrize("bad", [301, -1, 2**31, 2**32 + 5, 2**40, -(2**31) - 1, 319])
@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("schedule", ["tokens", "vocab"])
def test_a_bad_label_of_a_fused_head_touches_no_canary(
    place, bad, schedule, reduction, guarded_allocations, monkeypatch
):
    """Two tiles of classes, which the GEMM stores whole; 319 is a canary behind the logits."""
    device, dtype = place
    if device == "cuda" and (dtype != torch.bfloat16 or torch.cuda.get_device_capability()[0] not in (9, 10)):
        pytest.skip("the epilogue is for bf16 on compute capability 9 or 10")
    if device == "cpu":
        monkeypatch.setattr(gemm, "BLOCK_N", 16)
        monkeypatch.setattr(gemm, "BLOCK_D", 32)
    vocab, width = 301, 8
    *values, _ = make_head(N, vocab, width, bias=True)
    values, labels = [value.to(dtype) for value in values], torch.tensor([0, IGNORE, 255, 256, vocab - 1, bad])
    upstream = torch.linspace(-1, 2, N) if reduction == "none" else torch.tensor(0.37)

    guards = Guards(device)
    hidden, weight, bias = (guards.around(value, is_input=True).detach().requires_grad_() for value in values)
    assert gemm.takes((hidden, weight, bias))
    made = guarded_allocations(guards)
    guarded_labels = guards.around(labels, is_input=True)
    options = {"linear_bias": bias, "reduction": reduction, "schedule": schedule, "chunk": CHUNK}
    losses = linear_cross_entropy(hidden, weight, guarded_labels, **options)
    gradients = torch.autograd.grad(losses, (hidden, weight, bias), guards.around(upstream, is_input=True))
    linear_evaluation(hidden, weight, guarded_labels, Objective(), bias=bias, chunk=1)
    guards.assert_untouched()
    for buffer in made:
        if buffer.dim() == 2 and buffer.shape[1] == 320:
            assert (buffer[:, 304:] == CANARY).all()  # TMA writes whole 16 bytes, which end in the row's own padding

    right = exact_rows(*values, labels, upstream.expand(N))
    if reduction == "none":
        assert torch.isnan(losses).tolist() == [False] * (N - 1) + [True]
        assert relative_error(losses[:-1].cpu(), right["loss"][:-1]) < tolerance(dtype)
    else:
        assert torch.isnan(losses)
    for name, gradient in zip(("dhidden", "dweight", "dbias"), gradients, strict=True):
        assert relative_error(gradient.cpu(), right[name]) < tolerance(dtype)
    assert (gradients[0][[1, N - 1]] == 0).all()
