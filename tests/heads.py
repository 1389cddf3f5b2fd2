"""Random heads for the kernel tests, their gold in fp64, and how errors are measured."""

import torch
from torch import Tensor

from kernels import reference
from kernels.reference import Objective

IGNORE = -100


def make_head(n: int, v: int, d: int, *, bias: bool = False, scale: float = 3.0, seed: int = 0, ignored: int = 1):
    """hidden [n, d], weight [v, d], bias [v] or None, labels [n] of which the first `ignored` are IGNORE."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, d, generator=generator)
    weight = torch.randn(v, d, generator=generator) * (scale / d**0.5)
    offset = torch.randn(v, generator=generator) if bias else None
    labels = torch.randint(v, (n,), generator=generator)
    labels[:ignored] = IGNORE
    return hidden, weight, offset, labels


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


def relative_error(value: Tensor, right: Tensor) -> float:
    """||value - right|| / ||right|| in fp64."""
    value, right = value.detach().double(), right.detach().double()
    norm = torch.linalg.vector_norm(right)
    error = torch.linalg.vector_norm(value - right)
    return float(error / norm) if norm else float(error)


def assert_as_good_as_eager(ours: dict, eager: dict, gold: dict, floor: float) -> None:
    """Every error is at most twice that of the eager path in the same dtype, plus `floor`."""
    assert ours.keys() == gold.keys()
    for name, right in gold.items():
        error, yardstick = relative_error(ours[name], right), relative_error(eager[name], right)
        assert error <= 2 * yardstick + floor, f"{name}: {error:.1e}, eager {yardstick:.1e}"
