"""Any shape, layout and option: what the hand-picked cases of the other kernel tests might have missed.

Hypothesis draws the structure, a seed the numbers; both are the same in every run. A failure prints its example.
"""

from contextlib import contextmanager
from dataclasses import asdict, dataclass
from unittest.mock import patch

import torch
import torch.nn.functional as F
from heads import eager_rows, reduced
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import reference, row_kernels
from kernels.cross_entropy import cross_entropy
from kernels.linear_cross_entropy import linear_cross_entropy
from kernels.reference import Objective

FLOOR = 1e-6  # of the size of the terms that a result is the sum of
PADDING = 160  # elements on each side of a view: more than a narrow tile, so that overrunning one is no crash
REDUCTIONS = st.sampled_from(["mean", "sum", "none"])
SEEDS = st.integers(0, 2**16)

# `engine` patches a function for the whole test, which is what every example wants.
RUN = {"deadline": None, "derandomize": True, "suppress_health_check": [HealthCheck.function_scoped_fixture]}


# What hypothesis draws


@dataclass(frozen=True)
class Layout:
    """Where a matrix of `shape` lies in a buffer."""

    shape: tuple[int, int]
    stride: tuple[int, int]

    @property
    def overlaps(self) -> bool:
        index = torch.arange(self.numel).as_strided(self.shape, self.stride)
        return index.unique().numel() < index.numel()

    @property
    def numel(self) -> int:
        (rows, columns), (row_step, step) = self.shape, self.stride
        return 2 * PADDING + 1 + max(rows - 1, 0) * row_step + max(columns - 1, 0) * step

    def view(self, buffer: Tensor) -> Tensor:
        return buffer.as_strided(self.shape, self.stride, PADDING)

    def place(self, values: Tensor) -> Tensor:
        """`values` in this layout, among NaN."""
        view = self.view(torch.full((self.numel,), float("nan")))
        return view.copy_(values)


@st.composite
def layouts(draw, rows: int, columns: int, may_overlap: bool = False) -> Layout:
    """Padded rows, every second or third column, transposed storage; rows that share memory only if they may."""
    kinds = ["row by row", "column by column"] + ["overlapping rows"] * may_overlap
    kind, step, gap = draw(st.sampled_from(kinds)), draw(st.integers(1, 3)), draw(st.integers(0, 4))
    strides = {
        "row by row": (columns * step + gap, step),
        "column by column": (step, rows * step + gap),
        "overlapping rows": (min(gap, columns - 1), 1),
    }
    return Layout((rows, columns), strides[kind])


@st.composite
def objectives(draw, vocab: int) -> Objective:
    return Objective(
        ignore_index=draw(st.sampled_from([-100, -1, 0, vocab - 1, 2**40])),
        label_smoothing=draw(st.sampled_from([0.0, 0.0, 0.1, 0.9])),
        z_loss=draw(st.sampled_from([0.0, 0.0, 1e-4, 1e-2])),
        softcap=draw(st.sampled_from([None, None, 5.0, 30.0])),
    )


@st.composite
def labels_of(draw, n: int, vocab: int, ignore_index: int) -> Tensor:
    """[n] int32 or int64 with any stride, some rows ignored."""
    labels = torch.tensor(draw(st.lists(st.integers(0, vocab - 1), min_size=n, max_size=n)), dtype=torch.int64)
    is_ignored = torch.tensor(draw(st.lists(st.booleans(), min_size=n, max_size=n)), dtype=torch.bool)
    labels[is_ignored] = ignore_index
    dtype = draw(st.sampled_from([torch.int32, torch.int64] if abs(ignore_index) < 2**31 else [torch.int64]))
    step = draw(st.integers(1, 3))
    return labels.to(dtype).repeat_interleave(step)[::step]


@st.composite
def vocabularies(draw) -> tuple[int, int | None]:
    """(V, width of the tiles): up to five narrow tiles with a ragged end, or what the kernel takes by itself."""
    block = draw(st.sampled_from([16, 128, None]))
    return draw(st.integers(1, 600) if block is None else st.integers(1, 5 * block - 1)), block


def upstream_of(n: int, reduction: str, generator: torch.Generator) -> Tensor:
    """Strided, where it is a vector."""
    upstream = torch.randn(n, 2, generator=generator)[:, 0]
    return upstream if reduction == "none" else torch.randn((), generator=generator)


@contextmanager
def tiles_of(block: int | None):
    """Lets the kernel walk a row in tiles of `block`, and its plain twin the rows in blocks of 4."""
    with patch.object(reference, "BLOCK_ROWS", 4):
        if block is None:
            yield
        else:
            with patch.object(row_kernels, "launch_options", lambda *_: {"BLOCK_V": block, "num_warps": 1}):
                yield


# What is right


def term_sizes(logits: Tensor, labels: Tensor, objective: Objective, has_exact_logits: bool) -> tuple[Tensor, Tensor]:
    """What rounding errors are measured by: the sizes of the terms of the losses [N] and of the gradient [N, V].

    A loss or gradient near 0 is a difference of such terms. Logits that a tanh or a GEMM has rounded, by an error that
    grows with them, move exp(logits) by as much.
    """
    x = logits.double()
    u = torch.zeros_like(x) if objective.softcap is None else x / objective.softcap
    z = x if objective.softcap is None else objective.softcap * torch.tanh(u)
    finite = torch.where(z.isfinite(), z, 0.0)
    lse = torch.logsumexp(z, 1)
    rounding = 1 + u.abs().clamp(max=50)  # the slope's digits go with u, until the slope is 0
    if not has_exact_logits or objective.softcap is not None:
        rounding = rounding + finite.abs()
    spread = finite.amax(1) - finite.amin(1)
    losses = 1 + spread + lse.abs() * (not has_exact_logits) + objective.z_loss * lse.square()
    p = torch.exp(z - lse[:, None]) * (1 + 2 * objective.z_loss * lse.abs()[:, None])
    onehot = F.one_hot(torch.where(labels == objective.ignore_index, 0, labels).long(), x.shape[1])
    gradient = (p + onehot + objective.label_smoothing / x.shape[1]) / torch.cosh(u).square()
    return losses * rounding.amax(1), gradient * rounding


def assert_close(ours: Tensor, theirs: Tensor, right: Tensor, size: Tensor, name: str) -> None:
    """At most twice eager's error, row by row, plus a little of the terms' sizes. Infinities are where they belong."""
    assert ours.dtype == torch.float32, name
    is_finite = right.isfinite()
    assert torch.equal(ours[~is_finite].double(), right[~is_finite]), name
    error, yardstick = ((value.double() - right).where(is_finite, 0.0) for value in (ours, theirs))
    if right.dim() == 2:
        error, yardstick, size = (torch.linalg.vector_norm(value, dim=1) for value in (error, yardstick, size))
    limit = 2 * yardstick.abs() + FLOOR * size
    assert (error.abs() <= limit).all(), f"{name}: {error.tolist()}, eager {yardstick.tolist()}, limit {limit.tolist()}"


def bits(buffer: Tensor) -> Tensor:
    return buffer.detach().view(torch.int32).clone()


# On logits


@st.composite
def logits_cases(draw) -> dict:
    vocab, block = draw(vocabularies())
    layout = draw(layouts(draw(st.integers(0, 9 if vocab < 100 else 3)), vocab, may_overlap=True))
    objective = draw(objectives(vocab))
    return {
        "layout": layout,
        "block": block,
        "objective": objective,
        "labels": draw(labels_of(layout.shape[0], vocab, objective.ignore_index)),
        "reduction": draw(REDUCTIONS),
        "scale": draw(st.sampled_from([0.0, 0.1, 3.0])),
        "confidence": draw(st.sampled_from([0.0, 8.0, 60.0])),
        "offset": draw(st.sampled_from([0.0, -50.0, 1e4])),
        "hole_rate": draw(st.sampled_from([0.0, 0.0, 0.3, 0.9])),  # of logits of -inf
        "seed": draw(SEEDS),
    }


def logits_buffer(layout, objective, labels, scale, confidence, offset, hole_rate, generator) -> Tensor:
    """Logits in `layout`, the rest of the buffer NaN, so that whoever reads there shows it."""
    n, vocab = layout.shape
    buffer = torch.full((layout.numel,), float("nan"))
    if n == 0:
        return buffer
    logits = layout.view(buffer)
    if layout.overlaps:
        for row in logits:
            row.copy_(torch.randn(vocab, generator=generator) * scale + offset)
        return buffer
    values = torch.randn(n, vocab, generator=generator) * scale
    picked = torch.where(labels == objective.ignore_index, 0, labels).long()
    values[torch.arange(n), picked] += confidence
    holes = torch.rand(n, vocab, generator=generator) < hole_rate
    holes[torch.arange(n), torch.randint(vocab, (n,), generator=generator)] = False  # one finite logit, at least
    logits.copy_((values + offset).masked_fill(holes, -float("inf")))
    return buffer


@settings(max_examples=120, **RUN)
@given(case=logits_cases())
def test_losses_and_gradients_on_logits_equal_fp64_and_nothing_else_is_written(engine, case):
    generator = torch.Generator().manual_seed(case.pop("seed"))
    block, reduction = case.pop("block"), case.pop("reduction")
    layout, objective, labels = case["layout"], case["objective"], case["labels"]
    n = layout.shape[0]
    buffer = logits_buffer(**case, generator=generator)
    upstream = upstream_of(n, reduction, generator)

    def run(loss, leaf):
        value = loss(leaf)
        return value.detach(), torch.autograd.grad(value, leaf, upstream.to(value.dtype))[0]

    logits = layout.view(buffer).clone()
    theirs, right = (
        run(lambda x: reduced(eager_rows(x, labels, objective), labels, objective, reduction), leaf)
        for leaf in (logits.clone().requires_grad_(), logits.double().requires_grad_())
    )

    memory = buffer.requires_grad_().clone()
    view = layout.view(memory)
    before, labels_before = bits(memory), labels.clone()
    with tiles_of(block):
        loss = cross_entropy(view, labels, reduction=reduction, **asdict(objective))
        assert torch.equal(bits(memory), before)
        (dlogits,) = torch.autograd.grad(loss, view, upstream)

    kept = labels != objective.ignore_index
    losses_size, gradient_size = term_sizes(logits, labels, objective, has_exact_logits=True)
    losses_size = losses_size.where(kept, 0.0)
    weight = upstream.double().abs().expand(n)
    if reduction == "mean":
        weight, losses_size = weight / kept.sum().clamp(min=1), losses_size / kept.sum().clamp(min=1)
    losses_size = losses_size if reduction == "none" else losses_size.sum()
    assert_close(loss.detach(), theirs[0], right[0], losses_size, "loss")
    assert_close(dlogits, theirs[1], right[1], gradient_size * (weight * kept)[:, None], "dlogits")

    written = torch.zeros(layout.numel, dtype=torch.bool)
    if n and not layout.overlaps:
        layout.view(written).fill_(True)
        assert torch.equal(layout.view(memory.detach()), dlogits)
    assert torch.equal(bits(memory)[~written], before[~written])
    assert torch.equal(labels, labels_before)


@settings(max_examples=4, **RUN)
@given(
    vocab=st.integers(1025, 1100).map(lambda n: 16 * n),
    objective=objectives(16400),
    label=st.integers(0, 16399),
    seed=SEEDS,
)
def test_a_row_of_more_than_one_tile_at_full_width_equals_fp64(engine, vocab, objective, label, seed):
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(seed))
    backward_alone = row_kernels.launch_options(logits, logits, False, objective.softcap is not None)
    assert backward_alone["BLOCK_V"] == 16384
    labels = torch.tensor([label])
    results = []
    for dtype, loss in (
        (torch.float32, lambda x: cross_entropy(x, labels, reduction="none", **asdict(objective))),
        (torch.float32, lambda x: eager_rows(x, labels, objective)),
        (torch.float64, lambda x: eager_rows(x, labels, objective)),
    ):
        leaf = logits.to(dtype).requires_grad_()
        value = loss(leaf)
        results.append((value.detach(), *torch.autograd.grad(value, leaf, torch.ones_like(value))))
    kept = labels != objective.ignore_index
    losses_size, gradient_size = term_sizes(logits, labels, objective, has_exact_logits=True)
    for name, size, values in zip(
        ("loss", "dlogits"), (losses_size * kept, gradient_size * kept), zip(*results, strict=True), strict=True
    ):
        assert_close(*values, size, name)


# What needs no reference


@st.composite
def plain_cases(draw) -> dict:
    vocab, block = draw(vocabularies())
    n = draw(st.integers(1, 9 if vocab < 100 else 3))
    logits = torch.randn(n, vocab, generator=torch.Generator().manual_seed(draw(SEEDS))) * 4
    return {"logits": logits, "block": block, "labels": draw(labels_of(n, vocab, -100))}


def losses_and_gradient(logits: Tensor, labels: Tensor, block: int | None, **options) -> tuple[Tensor, Tensor]:
    leaf = logits.clone().requires_grad_()
    with tiles_of(block):
        losses = cross_entropy(leaf, labels, reduction="none", **options)
        losses.sum().backward()
    return losses.detach(), leaf.grad


@settings(max_examples=25, **RUN)
@given(case=plain_cases())
def test_each_row_of_the_gradient_sums_to_zero(engine, case):
    _, dlogits = losses_and_gradient(**case)
    assert dlogits.double().sum(1).abs().max() < FLOOR


@settings(max_examples=25, **RUN)
@given(case=plain_cases(), smoothing=st.sampled_from([0.0, 0.1]), constant=st.integers(-(2**13), 2**13))
def test_a_constant_added_to_all_logits_changes_no_bit(engine, case, smoothing, constant):
    """The logits are multiples of 2^-7, so that the sum is exact."""
    case["logits"] = (case["logits"] * 128).round() / 128
    first = losses_and_gradient(**case, label_smoothing=smoothing)
    second = losses_and_gradient(**case | {"logits": case["logits"] + constant}, label_smoothing=smoothing)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@settings(max_examples=25, **RUN)
@given(case=plain_cases(), seed=SEEDS)
def test_permuted_classes_give_the_same_losses_and_the_permuted_gradient(engine, case, seed):
    order = torch.randperm(case["logits"].shape[1], generator=torch.Generator().manual_seed(seed))
    losses, dlogits = losses_and_gradient(**case)
    labels = case["labels"].long()
    moved = torch.where(labels == -100, -100, order.argsort()[labels.clamp(min=0)])
    permuted = losses_and_gradient(case["logits"][:, order], moved, case["block"])
    torch.testing.assert_close(permuted[0], losses, rtol=FLOOR, atol=10 * FLOOR)
    torch.testing.assert_close(permuted[1], dlogits[:, order], rtol=10 * FLOOR, atol=FLOOR)


# On a linear head


@st.composite
def heads(draw) -> dict:
    """Arguments of `linear_losses_and_gradients`, all but `chunk`."""
    (vocab, block), n, d = draw(vocabularies()), draw(st.integers(0, 9)), draw(st.integers(1, 7))
    vocab, n = (vocab, n) if vocab < 100 else (vocab, min(n, 3))
    generator = torch.Generator().manual_seed(draw(SEEDS))
    objective = draw(objectives(vocab))
    scale = draw(st.sampled_from([0.0, 1.0, 6.0])) / d**0.5
    tensors = {
        "hidden": draw(layouts(n, d)).place(torch.randn(n, d, generator=generator)),
        "weight": draw(layouts(vocab, d)).place(torch.randn(vocab, d, generator=generator) * scale),
    }
    if draw(st.booleans()):
        tensors["bias"] = draw(layouts(1, vocab)).place(torch.randn(1, vocab, generator=generator))[0]
    reduction = draw(REDUCTIONS)
    return {
        "tensors": tensors,
        "labels": draw(labels_of(n, vocab, objective.ignore_index)),
        "wanted": [name for name in tensors if draw(st.booleans())],
        "objective": objective,
        "reduction": reduction,
        "upstream": upstream_of(n, reduction, generator),
        "block": block,
    }


def linear_losses_and_gradients(
    loss, tensors, labels, wanted, reduction, upstream, leading=None, dtype=torch.float32
) -> dict[str, Tensor]:
    """loss, and d<name> of the wanted tensors, for `loss` called with hidden, weight, bias and labels."""
    leaves = {name: tensor.to(dtype).detach() for name, tensor in tensors.items()}  # the layout is kept
    for name in wanted:
        leaves[name].requires_grad_()
    hidden, weight, bias = leaves["hidden"], leaves["weight"], leaves.get("bias")
    if leading is not None:
        hidden, labels = hidden.unflatten(0, leading), labels.unflatten(0, leading)
    losses = loss(hidden, weight, bias, labels)
    assert losses.shape == (labels.shape if reduction == "none" else ())
    assert losses.requires_grad == bool(wanted)
    if wanted:
        losses.backward(upstream.to(losses.dtype).view(losses.shape))
    for name, leaf in leaves.items():
        assert (leaf.grad is not None) == (name in wanted), name
    return {"loss": losses.detach().reshape(upstream.shape)} | {f"d{name}": leaves[name].grad for name in wanted}


def ours_of(case: dict, chunk: int, leading=None) -> dict[str, Tensor]:
    case = case.copy()
    objective, block = case.pop("objective"), case.pop("block")

    def loss(hidden, weight, bias, labels):
        options = asdict(objective) | {"reduction": case["reduction"], "chunk": chunk}
        return linear_cross_entropy(hidden, weight, labels, linear_bias=bias, **options)

    with tiles_of(block):
        return linear_losses_and_gradients(loss, **case, leading=leading)


def eager_of(case: dict, dtype: torch.dtype) -> dict[str, Tensor]:
    case = case.copy()
    objective, _ = case.pop("objective"), case.pop("block")

    def loss(hidden, weight, bias, labels):
        losses = eager_rows(F.linear(hidden, weight, bias), labels, objective)
        return reduced(losses, labels, objective, case["reduction"])

    return linear_losses_and_gradients(loss, **case, dtype=dtype)


def linear_term_sizes(case: dict) -> dict[str, Tensor]:
    """`term_sizes` of the loss and of each gradient."""
    tensors, labels, objective, upstream = (case[key] for key in ("tensors", "labels", "objective", "upstream"))
    hidden, weight = tensors["hidden"].double(), tensors["weight"].double()
    bias = tensors["bias"].double() if "bias" in tensors else None
    losses, gradient = term_sizes(F.linear(hidden, weight, bias), labels, objective, has_exact_logits=False)
    kept = (labels != objective.ignore_index).double()
    count = kept.sum().clamp(min=1) if case["reduction"] == "mean" else 1.0
    gradient = gradient * (kept * upstream.double().abs() / count)[:, None]
    losses = losses * kept / count
    return {
        "loss": losses if case["reduction"] == "none" else losses.sum(),
        "dhidden": gradient @ weight.abs(),
        "dweight": gradient.T @ hidden.abs(),
        "dbias": gradient.sum(0),
    }


@settings(max_examples=60, **RUN)
@given(case=heads(), chunk=st.integers(1, 11), data=st.data())
def test_losses_and_gradients_of_a_head_equal_fp64(engine, case, chunk, data):
    n = case["labels"].shape[0]
    leading = data.draw(st.sampled_from([None, (1, n), (n, 1), (n // 2, 2) if n % 2 == 0 else (1, n, 1)]))
    before = {name: tensor.clone() for name, tensor in (case["tensors"] | {"labels": case["labels"]}).items()}
    ours, theirs, right = ours_of(case, chunk, leading), eager_of(case, torch.float32), eager_of(case, torch.float64)
    sizes = linear_term_sizes(case)
    for name, value in right.items():
        assert_close(ours[name], theirs[name], value, sizes[name], name)
    for name, tensor in (case["tensors"] | {"labels": case["labels"]}).items():
        assert torch.equal(tensor, before[name]), name


@settings(max_examples=30, **RUN)
@given(case=heads(), chunk=st.integers(1, 9), data=st.data())
def test_the_sum_over_a_split_batch_is_that_of_the_whole(engine, case, chunk, data):
    case |= {"reduction": "sum", "upstream": torch.tensor(-0.7)}
    cut = data.draw(st.integers(0, case["labels"].shape[0]))
    parts = []
    for part in (slice(0, cut), slice(cut, None)):
        tensors = case["tensors"] | {"hidden": case["tensors"]["hidden"][part]}
        parts.append(ours_of(case | {"tensors": tensors, "labels": case["labels"][part]}, chunk))
    joined = {name: torch.cat if name == "dhidden" else sum for name in parts[0]}
    joined = {name: join([part[name] for part in parts]) for name, join in joined.items()}
    whole, sizes = ours_of(case, chunk), linear_term_sizes(case)
    assert joined.keys() == whole.keys()
    for name, value in whole.items():
        exact = value.double()
        assert_close(joined[name], exact, exact, sizes[name], name)
