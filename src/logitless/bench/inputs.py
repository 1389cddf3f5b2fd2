"""What the benchmark computes: shapes, random inputs, and the gold that errors are measured against.

Inputs are of two kinds. `uniform`: hidden states, weights and labels that have nothing to do with each other, logits of
standard deviation 1, as before the first training step. `peaked`, as after training: labels fall like Zipf's law, and
every hidden state points to its label's row of the weight by a random amount, so that the label's logit stands 0 to 20
nats above the others: some rows all but certain, some wrong. In both one row in twenty is ignored, and the number of
those that count is no power of two, because dividing by one is exact and would flatter whoever divides in bf16.
"""

from typing import NamedTuple

import torch
from torch import Tensor

KINDS = ("uniform", "peaked")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
IGNORE = -100
LARGEST_RISE = 20.0  # nats, of a peaked label's logit
GOLD_ROWS = 512  # logits in fp64 at once
FP64_LIMIT = 10**13  # N * V * D: three seconds of fp64 GEMMs on an H200, minutes where fp64 is slow


class Shape(NamedTuple):
    """N tokens, V words, and the width D of a head; D is None where logits are given and there is no head."""

    n_tokens: int
    vocab: int
    width: int | None

    @classmethod
    def parse(cls, text: str) -> "Shape":
        """The shape written as `NxVxD` or `NxV`; raises ValueError for anything else."""
        sizes = text.split("x")
        if len(sizes) not in (2, 3) or not all(size.isdecimal() and int(size) for size in sizes):
            raise ValueError(f"a shape is tokens x vocabulary x width, such as 8192x50304x768, got {text!r}")
        return cls(*map(int, sizes), *[None] * (3 - len(sizes)))

    def __str__(self) -> str:
        return "x".join(str(size) for size in self if size)


class Inputs(NamedTuple):
    """hidden [N, D] and weight [V, D], leaves that want gradients, and labels [N] int64."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor


class Gold(NamedTuple):
    """The mean loss [], dhidden [N, D] and dweight [V, D], all in one dtype."""

    loss: Tensor
    dhidden: Tensor
    dweight: Tensor

    @property
    def dtype(self) -> str:
        return "fp64" if self.loss.dtype == torch.float64 else "fp32"


def make_inputs(
    shape: Shape,
    kind: str,
    *,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    device: torch.device,
    sets: int,
) -> list[Inputs]:
    """`sets` inputs of one kind that share their weight."""
    generator = torch.Generator(device).manual_seed(0)
    options = {"generator": generator, "device": device}
    weight = torch.randn(shape.vocab, shape.width, **options) / shape.width**0.5
    inputs = []
    for _ in range(sets):
        hidden = torch.randn(shape.n_tokens, shape.width, **options)
        labels = make_labels(shape, kind, generator)
        if kind == "peaked":
            rise = LARGEST_RISE * torch.rand(shape.n_tokens, 1, **options)
            hidden += rise * weight[labels.clamp(min=0)]  # rows of the weight have norm 1, all but orthogonal
        inputs.append((hidden.to(dtype).requires_grad_(), labels))
    weight = weight.to(weight_dtype).requires_grad_()
    return [Inputs(hidden, weight, labels) for hidden, labels in inputs]


def make_logits(shape: Shape, kind: str, dtype: torch.dtype, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Logits [N, V] and labels [N] like those that `make_inputs` leads to, without a head."""
    options = {"generator": generator, "device": generator.device}
    logits = torch.randn(shape.n_tokens, shape.vocab, dtype=dtype, **options)
    labels = make_labels(shape, kind, generator)
    if kind == "peaked":
        rise = LARGEST_RISE * torch.rand(shape.n_tokens, 1, **options)
        logits.scatter_add_(1, labels.clamp(min=0)[:, None], rise.to(dtype))
    return logits, labels


def make_labels(shape: Shape, kind: str, generator: torch.Generator) -> Tensor:
    """Labels [N], some of them ignored."""
    options = {"generator": generator, "device": generator.device}
    if kind == "peaked":
        frequency = 1 / torch.arange(2.0, shape.vocab + 2, device=generator.device)
        labels = torch.multinomial(frequency, shape.n_tokens, replacement=True, generator=generator)
    else:
        labels = torch.randint(shape.vocab, (shape.n_tokens,), **options)
    ignored = shape.n_tokens // 20
    kept = shape.n_tokens - ignored
    if kept & (kept - 1) == 0 and kept > 1:
        ignored += 1
    labels[torch.randperm(shape.n_tokens, **options)[:ignored]] = IGNORE
    return labels


def make_gold(inputs: Inputs) -> Gold:
    """Mean loss and gradients of the rounded inputs in fp64, or in fp32 beyond FP64_LIMIT, some rows at a time."""
    n_tokens, width = inputs.hidden.shape
    vocab = inputs.weight.shape[0]
    dtype = torch.float64 if n_tokens * vocab * width <= FP64_LIMIT else torch.float32
    hidden, weight = (tensor.detach().to(dtype) for tensor in inputs[:2])
    kept = inputs.labels != IGNORE
    scale = kept.to(dtype) / kept.sum()
    labels = inputs.labels.clamp(min=0)[:, None]
    loss, dhidden, dweight = hidden.new_zeros(()), torch.empty_like(hidden), torch.zeros_like(weight)
    for start in range(0, n_tokens, GOLD_ROWS):
        part = slice(start, start + GOLD_ROWS)
        log_p = torch.log_softmax(hidden[part] @ weight.t(), dim=1)
        loss -= (log_p.gather(1, labels[part])[:, 0] * scale[part]).sum()
        dlogits = log_p.exp_()
        dlogits.scatter_add_(1, labels[part], torch.full_like(dlogits[:, :1], -1.0))
        dlogits *= scale[part, None]
        torch.mm(dlogits, weight, out=dhidden[part])
        dweight.addmm_(dlogits.t(), hidden[part])
    return Gold(loss, dhidden, dweight)


def relative_error(value: Tensor, right: Tensor) -> float:
    """||value - right|| / ||right|| in fp64."""
    right = right.double()
    return float(torch.linalg.vector_norm(value.detach().double() - right) / torch.linalg.vector_norm(right))
