"""Cross-entropy in plain PyTorch: what the kernels must compute, and the path that CPU tensors take.

Per row of V logits x, with z = softcap * tanh(x / softcap) (or z = x), y the label, eps `label_smoothing`,
lam `z_loss`:

    m = max z,  l = sum exp(z - m),  lse = m + ln l
    cross_entropy = lse - z_y
    loss          = (1 - eps) * (lse - z_y) + eps * (lse - mean z) + lam * lse^2
    dloss/dz_v    = p_v * (1 + 2 * lam * lse) - (1 - eps) * [v = y] - eps / V,   p_v = exp(z_v - m) / l
    dloss/dx_v    = dloss/dz_v * (1 - (z_v / softcap)^2)
    entropy       = lse - sum p_v z_v = ln l - sum p_v (z_v - m)

A row whose label is `ignore_index` gives loss, entropy and gradient 0. A label outside [0, V) is an IndexError on a
CPU; on a GPU, where raising would wait for the device, its row gives loss and entropy NaN and gradient 0 (as it does,
compiled, in the eager path below).

`linear_cross_entropy_sums` is the eager path that people write, left to autograd. `forward_rows`,
`forward_backward_rows_` and `backward_rows` are the twins of the Triton launchers in `row_kernels.py`.

Smoothing: Szegedy et al. 2016. Penalty on lse^2: Devlin et al. 2014, as z-loss in PaLM, 2022. Softcap: Gemma 2, 2024.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# 64 rows of 8192 fp32 logits are 2 MiB: a block is read from memory once and stays in a core's cache for every pass.
BLOCK_ROWS = 64


@dataclass(frozen=True)
class Objective:
    """What is minimised; the formulas are in the module docstring. Raises ValueError for an option out of range."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None

    def __post_init__(self):
        if not isinstance(self.ignore_index, int) or not -(2**63) <= self.ignore_index < 2**63:
            raise ValueError(f"ignore_index must be an integer of 64 bits, got {self.ignore_index!r}")
        if not 0.0 <= self.label_smoothing < 1.0:
            raise ValueError(f"label_smoothing must lie in [0, 1), got {self.label_smoothing}")
        if not 0.0 <= self.z_loss < math.inf:
            raise ValueError(f"z_loss must be >= 0 and finite, got {self.z_loss}")
        if self.softcap is not None and not 0.0 < self.softcap < math.inf:
            raise ValueError(f"softcap must be > 0 and finite, or None, got {self.softcap}")

    def arguments(self) -> tuple[int, float, float, float | None]:
        """The fields as OBJECTIVE_SCHEMA lists them. (Not by dataclasses.astuple, which torch 2.11 cannot trace.)"""
        return self.ignore_index, self.label_smoothing, self.z_loss, self.softcap


# The fields of Objective as arguments of a custom op. SymInt: another value does not compile anew.
OBJECTIVE_SCHEMA = "SymInt ignore_index, float label_smoothing, float z_loss, float? softcap"


class Rows(NamedTuple):
    """Per-row results, each [N] fp32: the two losses in nats, and max z and ln sum exp(z - max z)."""

    losses: Tensor
    cross_entropies: Tensor
    row_max: Tensor
    log_sum: Tensor

    @classmethod
    def empty(cls, n_rows: int, device: torch.device) -> "Rows":
        return cls(*(torch.empty(n_rows, dtype=torch.float32, device=device) for _ in cls._fields))

    def slice(self, part: slice) -> "Rows":
        return Rows(*(vector[part] for vector in self))


class LossSums(NamedTuple):
    """Sums over the kept rows, each [] fp32.

    `loss` has a gradient, `cross_entropy` is plain and detached, both in nats. `correct` counts the rows whose label's
    logit no other exceeds, up to rounding; it is None where gradients are recorded (`torch.is_grad_enabled()`),
    and always from `linear_cross_entropy.linear_cross_entropy_sums`.
    """

    loss: Tensor
    cross_entropy: Tensor
    correct: Tensor | None = None


def check_reduction(reduction: str) -> None:
    """Raises ValueError for a reduction that does not exist."""
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'reduction must be "mean", "sum" or "none", got {reduction!r}')


def reduce(losses: Tensor, labels: Tensor, ignore_index: int, reduction: str) -> Tensor:
    """`losses` (per row [N], or already summed []) as "mean" over the kept rows, "sum" or "none"."""
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / (labels != ignore_index).sum().clamp(min=1)


def check_weight(weight: Tensor) -> None:
    """Raises ValueError for a rank's part of a weight, as FSDP leaves it outside of its module's forward."""
    if weight.numel() == 0 or hasattr(weight, "device_mesh"):  # flattened away, or a DTensor
        raise ValueError(
            f"weight not materialised: {list(weight.shape)}, empty or cut over ranks; call the loss inside the forward "
            "of the module that owns the weight"
        )


def check_labels(labels: Tensor, n_rows: int) -> None:
    """Raises ValueError for a wrong shape or dtype."""
    if labels.shape != (n_rows,):
        raise ValueError(f"expected one label a row, [{n_rows}], got {list(labels.shape)}")
    if labels.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"labels must be int32 or int64, got {labels.dtype}")


def check_label_range(labels: Tensor, vocab: int, ignore_index: int) -> None:
    """Raises IndexError for a CPU label outside [0, vocab). Reads the labels, which a compiler cannot trace."""
    if labels.device.type == "cpu":
        bad = labels[(labels != ignore_index) & ((labels < 0) | (labels >= vocab))]
        if bad.numel():
            raise IndexError(f"label {bad[0].item()} is out of range for a vocabulary of {vocab}")


def linear_cross_entropy_sums(
    hidden: Tensor, weight: Tensor, labels: Tensor, objective: Objective, *, bias: Tensor | None = None
) -> LossSums:
    """Loss sums of `hidden @ weight.T + bias` the eager way: logits in the compute dtype, then fp32 (fp64 stays fp64).

    Args:
        hidden: [N, D].
        weight: [V, D].
        labels: [N] int32 or int64.
        objective: the options of the loss.
        bias: [V], or None.
    """
    check_labels(labels, hidden.shape[0])
    check_weight(weight)
    labels = labels.long()
    if not torch.compiler.is_compiling():
        check_label_range(labels, weight.shape[0], objective.ignore_index)
    logits = F.linear(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if objective.softcap is not None:
        logits = objective.softcap * torch.tanh(logits / objective.softcap)

    kept = labels != objective.ignore_index
    # Reached by a bad label only on a GPU or in compiled code; inside F.cross_entropy it would abort the device.
    bad = kept & ((labels < 0) | (labels >= weight.shape[0]))
    labels = labels.masked_fill(bad, objective.ignore_index)

    def losses(logits: Tensor, label_smoothing: float) -> Tensor:
        options = {"ignore_index": objective.ignore_index, "label_smoothing": label_smoothing, "reduction": "none"}
        return F.cross_entropy(logits, labels, **options).masked_fill(bad, float("nan"))

    objective_losses = losses(logits, objective.label_smoothing)
    cross_entropies = objective_losses.detach()
    if objective.label_smoothing:
        cross_entropies = losses(logits.detach(), 0.0)
    if objective.z_loss:
        squares = torch.logsumexp(logits, dim=1).square()
        objective_losses = objective_losses + objective.z_loss * squares.masked_fill(~kept | bad, 0.0)
    correct = None
    if not torch.is_grad_enabled():
        label_logits = logits.gather(1, labels.masked_fill(~kept | bad, 0)[:, None])[:, 0]
        correct = ((label_logits >= logits.amax(dim=1)) & kept & ~bad).sum(dtype=torch.float32)
    return LossSums(objective_losses.sum(), cross_entropies.sum(), correct)


def forward_rows(
    logits: Tensor, labels: Tensor, objective: Objective, rows: Rows, entropies: Tensor | None = None
) -> None:
    """Writes the results of `logits` [N, V], which are left alone, into `rows`.

    And the entropies in nats into `entropies` [N] fp32, if there is one.
    """
    check_label_range(labels, logits.shape[1], objective.ignore_index)
    for block in _blocks(logits):
        z = _softcapped(logits[block], objective)
        _row_results(z, labels[block], objective, rows.slice(block))
        if entropies is not None:
            is_ignored = labels[block] == objective.ignore_index
            # entr(p) is -p ln p, and 0 at 0.
            entropies[block] = torch.special.entr(z.softmax(dim=1)).sum(dim=1).masked_fill_(is_ignored, 0.0)


def forward_backward_rows_(logits: Tensor, labels: Tensor, objective: Objective, rows: Rows) -> None:
    """Writes the results of `logits` [N, V] into `rows`, and the gradient of their summed loss over them."""
    check_label_range(labels, logits.shape[1], objective.ignore_index)
    scale = torch.ones((), dtype=torch.float32, device=logits.device)
    for block in _blocks(logits):
        z = _softcapped(logits[block], objective)
        part = rows.slice(block)
        _row_results(z, labels[block], objective, part)
        logits[block] = _gradient_(z, logits[block], labels[block], objective, part.row_max, part.log_sum, scale)


def backward_rows(
    logits: Tensor,
    labels: Tensor,
    objective: Objective,
    *,
    row_max: Tensor,
    log_sum: Tensor,
    dlosses: Tensor,
    dlogits: Tensor,
    first_class: int = 0,
    vocab: int | None = None,
) -> None:
    """Writes the gradient for the upstream gradients `dlosses` [N] into `dlogits` [N, V], which may be `logits`.

    The V columns are the classes from `first_class` on of `vocab` classes, None for V. Labels, `row_max` and `log_sum`
    are those of the whole vocabulary, and so is the gradient.
    """
    for block in _blocks(logits):
        z, scale = _softcapped(logits[block], objective), dlosses[block, None]
        vectors = (labels[block], objective, row_max[block], log_sum[block], scale)
        dlogits[block] = _gradient_(z, logits[block], *vectors, first_class, vocab)


def _blocks(logits: Tensor) -> list[slice]:
    return [slice(start, start + BLOCK_ROWS) for start in range(0, logits.shape[0], BLOCK_ROWS)]


def _softcapped(logits: Tensor, objective: Objective) -> Tensor:
    z = logits.to(torch.float32, copy=True)
    if objective.softcap is not None:
        z.div_(objective.softcap).tanh_().mul_(objective.softcap)
    return z


def _row_results(z: Tensor, labels: Tensor, objective: Objective, rows: Rows) -> None:
    kept = labels != objective.ignore_index
    index = torch.where(kept, labels, 0)[:, None]
    torch.amax(z, dim=1, out=rows.row_max)
    rows.log_sum.copy_((z - rows.row_max[:, None]).exp_().sum(dim=1).log_())
    cross_entropies = rows.log_sum - (z.gather(1, index)[:, 0] - rows.row_max)
    losses = cross_entropies
    if objective.label_smoothing:
        uniform = rows.log_sum - (z - rows.row_max[:, None]).mean(dim=1)
        losses = (1 - objective.label_smoothing) * losses + objective.label_smoothing * uniform
    if objective.z_loss:
        losses = losses + objective.z_loss * (rows.row_max + rows.log_sum).square()
    rows.cross_entropies.copy_(cross_entropies.masked_fill(~kept, 0.0))
    rows.losses.copy_(losses.masked_fill(~kept, 0.0))


def _gradient_(
    z: Tensor,
    logits: Tensor,
    labels: Tensor,
    objective: Objective,
    row_max: Tensor,
    log_sum: Tensor,
    scale: Tensor,
    first_class: int = 0,
    vocab: int | None = None,
) -> Tensor:
    """The gradient over `logits` [N, V] times `scale` ([] or [N, 1]); their softcapped form `z` is destroyed."""
    vocab = z.shape[1] if vocab is None else vocab
    kept = (labels != objective.ignore_index) & (labels >= 0) & (labels < vocab)
    is_here = kept & (labels >= first_class) & (labels < first_class + z.shape[1])
    index = torch.where(is_here, labels - first_class, 0)[:, None]
    gradient = z.sub_(row_max[:, None]).sub_(log_sum[:, None]).exp_()
    if objective.z_loss:
        gradient.mul_(1 + 2 * objective.z_loss * (row_max + log_sum)[:, None])
    if objective.label_smoothing:
        gradient.sub_(objective.label_smoothing / vocab)
    gradient.scatter_add_(1, index, is_here[:, None].float().mul_(objective.label_smoothing - 1.0))
    if objective.softcap is not None:
        # The slope 1 - tanh^2 is 1 / cosh^2, and only the second form keeps its digits where tanh is near 1.
        gradient.div_((logits.float() / objective.softcap).cosh_().square_())
    return gradient.mul_(scale).masked_fill_(~kept[:, None], 0.0)
