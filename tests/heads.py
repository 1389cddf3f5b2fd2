"""What the kernel tests share: random heads and logits, losses, their gold, and how errors and peaks are measured."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import reference
from kernels.cross_entropy import cross_entropy
from kernels.linear_cross_entropy import linear_cross_entropy
from kernels.reference import Objective

IGNORE = -100
MIB = 2**20
OBJECTIVES = {
    "plain": Objective(),
    "smoothing": Objective(label_smoothing=0.1),
    "z_loss": Objective(z_loss=1e-2),
    "softcap": Objective(softcap=5.0),
    "all": Objective(label_smoothing=0.1, z_loss=1e-2, softcap=5.0),
}
# One vocabulary for each number of warps that is launched, and those that a race would show in.
RACE_VOCABULARIES = [97, 1000, 2000, 32000, 50257, 50304, 65537, 131072]
N, D, V, CHUNK = 385, 32, 97, 128  # what `leaves_of` makes: three whole chunks and one of a single row


def make_head(n: int, v: int, d: int, *, bias: bool = False, scale: float = 3.0, seed: int = 0, ignored: int = 1):
    """hidden [n, d], weight [v, d], bias [v] or None, labels [n] of which the first `ignored` are IGNORE."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, d, generator=generator)
    weight = torch.randn(v, d, generator=generator) * (scale / d**0.5)
    offset = torch.randn(v, generator=generator) if bias else None
    labels = torch.randint(v, (n,), generator=generator)
    labels[:ignored] = IGNORE
    return hidden, weight, offset, labels


GAPS = (50, 90, 100, 103, 105, 118, 125, 131, 132.721, 133, 150, 300, -5, -20, -40, -60)


def head_with_gaps(n: int, v: int, d: int, *, entries: float, dtype: torch.dtype = torch.float32) -> tuple:
    """A head whose first tokens have labels that lie GAPS nats below all other classes, or above; the others are plain.

    Exact in `dtype`: each gap is in two weights, a rounded one and the rest. `entries` is the size of hidden states.
    """
    generator = torch.Generator().manual_seed(0)
    k, width = len(GAPS), 2 * len(GAPS)
    hidden = torch.randn(n, d, generator=generator) * entries
    weight = torch.randn(v, d, generator=generator) * (0.02 / entries)
    labels = torch.randint(v, (n,), generator=generator)
    labels[:k] = torch.arange(k) * (v // k) + 3
    hidden[:, :width] = 0
    for i in range(k):
        hidden[i, 2 * i : 2 * i + 2] = entries
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    weight[labels[:k]] = 0
    others = (hidden[:k].double() @ weight.double().T).scatter(1, labels[:k, None], -float("inf")).amax(1)
    for i, target in enumerate((others - torch.tensor(GAPS)) / entries):
        weight[labels[i], 2 * i] = target
        weight[labels[i], 2 * i + 1] = target - weight[labels[i], 2 * i].double()
    return hidden, weight, None, labels


def leaves_of(n: int = N, *, device: str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0, v: int = V):
    """hidden [n, D] and weight [v, D], which want gradients, and labels [n] of which one is ignored."""
    hidden, weight, _, labels = make_head(n, v, D, seed=seed)
    return *(t.to(device, dtype).requires_grad_() for t in (hidden, weight)), labels.to(device)


def random_logits(n: int, v: int, *, scale: float = 3.0, offset: float = 0.0, seed: int = 0) -> tuple[Tensor, Tensor]:
    """logits [n, v], labels [n]."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, v, generator=generator) * scale + offset
    labels = torch.randint(v, (n,), generator=generator)
    return logits, labels


# Means over the kept tokens, three ways


def fused(hidden, weight, labels, *, bias=None, **options):
    return linear_cross_entropy(hidden, weight, labels, linear_bias=bias, **{"chunk": CHUNK} | options)


def per_token(hidden, weight, labels, **options):
    """The mean of the losses of reduction "none", whose backward computes the logits again."""
    kept = (labels != IGNORE).sum()
    return fused(hidden, weight, labels, reduction="none", **options).sum() / kept


def inplace(hidden, weight, labels, *, bias=None, **options):
    return cross_entropy(F.linear(hidden, weight, bias), labels, **options)


LOSSES = {"fused": fused, "per token": per_token, "inplace": inplace}
every_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)


# What is right


def eager_rows(logits: Tensor, labels: Tensor, objective: Objective) -> Tensor:
    """Losses [N] in the dtype of `logits`, left to autograd."""
    z = logits if objective.softcap is None else objective.softcap * torch.tanh(logits / objective.softcap)
    labels, ignore_index = labels.long(), objective.ignore_index
    losses = F.cross_entropy(
        z, labels, ignore_index=ignore_index, label_smoothing=objective.label_smoothing, reduction="none"
    )
    if objective.z_loss:
        squares = torch.logsumexp(z, 1).square()
        losses = losses + objective.z_loss * squares.masked_fill(labels == ignore_index, 0.0)
    return losses


def reduced(losses: Tensor, labels: Tensor, objective: Objective, reduction: str) -> Tensor:
    """`losses` [N] as "mean" over the kept rows, "sum" or "none"."""
    count = max(int((labels != objective.ignore_index).sum()), 1)
    return {"none": losses, "sum": losses.sum(), "mean": losses.sum() / count}[reduction]


def sums_and_gradients(loss, tensors: dict[str, Tensor | None], upstream: float = 0.37) -> dict[str, Tensor]:
    """loss and d<name> for every tensor, for `loss` called with the tensors as fresh leaves, times `upstream`."""
    leaves = {k: None if t is None else t.detach().clone().requires_grad_() for k, t in tensors.items()}
    value = loss(**leaves)
    (value * upstream).backward()
    return {"loss": value.detach()} | {f"d{k}": leaf.grad for k, leaf in leaves.items() if leaf is not None}


def eager(hidden, weight, bias, labels, objective: Objective, upstream: float = 0.37) -> dict[str, Tensor]:
    """The sum of the losses and its gradients the eager way, in the tensors' own dtype."""

    def loss(hidden, weight, bias):
        return reference.linear_cross_entropy_sums(hidden, weight, labels, objective, bias=bias).loss

    return sums_and_gradients(loss, {"hidden": hidden, "weight": weight, "bias": bias}, upstream)


def gold(hidden, weight, bias, labels, objective: Objective, upstream: float = 0.37) -> dict[str, Tensor]:
    """`eager` in fp64, from inputs that are rounded already."""
    doubles = (None if tensor is None else tensor.double() for tensor in (hidden, weight, bias))
    return eager(*doubles, labels, objective, upstream)


def loss_and_gradients(loss, hidden: Tensor, weight: Tensor, labels: Tensor, *, upstream: float = 0.37) -> dict:
    """loss, dhidden and dweight of `loss` on copies of the leaves."""
    tensors = {"hidden": hidden, "weight": weight}
    return sums_and_gradients(lambda hidden, weight: loss(hidden, weight, labels), tensors, upstream)


def eager_mean(hidden, weight, labels, objective: Objective = OBJECTIVES["plain"], *, upstream: float = 0.37) -> dict:
    """`loss_and_gradients` of the mean over the kept tokens the eager way."""

    def loss(hidden, weight, labels):
        return reduced(eager_rows(F.linear(hidden, weight), labels, objective), labels, objective, "mean")

    return loss_and_gradients(loss, hidden, weight, labels, upstream=upstream)


def exact_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Losses [N] whose digits, and whose gradients', do not cancel where a label is above all others; fp64."""
    own = logits.gather(1, labels[:, None])[:, 0]
    others = logits.scatter(1, labels[:, None], -float("inf")).logsumexp(1)
    return F.softplus(others - own, threshold=700.0)


def exact_rows(hidden, weight, bias, labels, upstream: Tensor, *, z_loss: float = 0.0) -> dict[str, Tensor]:
    """Losses [N], and the gradients of their sum weighted with `upstream` [N], in fp64; 0 for what is no label."""
    leaves = [
        None if tensor is None else tensor.detach().double().requires_grad_() for tensor in (hidden, weight, bias)
    ]
    logits = F.linear(*leaves)
    is_label = (labels >= 0) & (labels < len(weight))
    losses = exact_losses(logits, labels.where(is_label, 0)) + z_loss * logits.logsumexp(1).square()
    losses = losses.masked_fill(~is_label, 0.0)
    tensors = {f"d{k}": leaf for k, leaf in zip(("hidden", "weight", "bias"), leaves, strict=True) if leaf is not None}
    gradients = torch.autograd.grad(losses, list(tensors.values()), upstream.double())
    return {"loss": losses.detach()} | dict(zip(tensors, gradients, strict=True))


# Errors and peaks


def relative_error(value: Tensor, right: Tensor) -> float:
    """||value - right|| / ||right|| in fp64."""
    value, right = value.detach().double(), right.detach().double()
    norm = torch.linalg.vector_norm(right)
    error = torch.linalg.vector_norm(value - right)
    return float(error / norm) if norm else float(error)


def row_errors(value: Tensor, right: Tensor) -> Tensor:
    """Relative errors [N] of the rows of `value` [N] or [N, D] in fp64."""
    value, right = (t.detach().double().reshape(len(t), -1) for t in (value, right))
    norms = torch.linalg.vector_norm(right, dim=1)
    return torch.linalg.vector_norm(value - right, dim=1) / norms.where(norms > 0, 1.0)


def assert_as_good_as_eager(ours: dict, eager: dict, gold: dict, floor: float) -> None:
    """Every error is at most twice that of the eager path in the same dtype, plus `floor`."""
    assert ours.keys() == gold.keys()
    for name, right in gold.items():
        error, yardstick = relative_error(ours[name], right), relative_error(eager[name], right)
        assert error <= 2 * yardstick + floor, f"{name}: {error:.1e}, eager {yardstick:.1e}"


def assert_equal(ours: dict, right: dict, tolerance: float = 1e-5) -> None:
    """Every relative error is at most `tolerance`."""
    assert ours.keys() == right.keys()
    errors = {name: relative_error(ours[name], value) for name, value in right.items()}
    assert max(errors.values()) <= tolerance, errors


def peak_mib(function) -> float:
    """Peak allocated on the GPU above what was alive before, in MiB."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / MIB
