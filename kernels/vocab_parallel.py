"""Cross-entropy of a linear head whose vocabulary is cut over ranks: no rank ever holds the weight, or a whole row.

Rank r of W holds weight [V_r, D] and bias [V_r] of its own classes, and hidden [N, D] and labels [N] of its own tokens,
as in data parallel training. It computes the logits of its classes for the tokens of all ranks, whose hidden states are
gathered. Per row, with m_r and l_r the maximum and the sum of its slice (`reference.py`), the ranks exchange m_r, ln l_r
and, from the rank that has the label's class, z_y - m_r; then all know

    m = max m_r,   ln l = ln sum exp(ln l_r + (m_r - m)),   z_y - m = (z_y - m_r) + (m_r - m)

and with them the loss, and dlogits of their slice. dweight stays where it is made; dhidden is summed over the ranks.
Differences of logits are exchanged, not logits: a common offset cancels exactly.

**Gradients** follow the convention of data parallel training, where a rank differentiates its own loss and shared
parameters get the mean over ranks: dhidden is that of the sum of all ranks' losses, dweight and dbias that of their
mean. So a gradient is divided by W where it goes from a rank's own tensors to those that the ranks share, and
multiplied by W on the way back.

All functions are collective: all ranks call them, with as many tokens each. Vocabulary parallel head: Megatron-LM,
Shoeybi et al. 2019.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from . import geometry, head_ops, parts, reference, row_kernels, scaling
from .cross_entropy import refuse_double_backward
from .linear_cross_entropy import compute_dtype
from .parts import Head
from .reference import LossSums, Objective, Rows


@dataclass(frozen=True)
class VocabShard:
    """What this rank has of V classes that are cut over the ranks of a group: ceil(V / W) each, the last ranks less.

    That is how a DTensor with Shard(0) is cut. Raises ValueError if a rank would have no class.
    """

    group: dist.ProcessGroup
    vocab: int

    def __post_init__(self):
        if self.size * (self.world - 1) >= self.vocab:
            raise ValueError(
                f"{self.vocab} classes cannot be cut over {self.world} ranks: with {self.size} each, the last has none"
            )

    @property
    def world(self) -> int:
        return self.group.size()

    @property
    def size(self) -> int:
        """Classes of a rank that is not the last."""
        return -(-self.vocab // self.world)

    @property
    def classes(self) -> slice:
        start = self.group.rank() * self.size
        return slice(start, min(start + self.size, self.vocab))

    def own(self, of_all: Tensor) -> Tensor:
        """[N, ...], this rank's part of [W * N, ...]."""
        return of_all.chunk(self.world)[self.group.rank()]

    def columns(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """For class ids: their columns in this rank's slice, any column for a class elsewhere, and which are here."""
        classes = self.classes
        is_here = (labels >= classes.start) & (labels < classes.stop)
        # Spread out, because the gradient of an embedding adds up what has the same index, also zeros.
        return torch.where(is_here, labels - classes.start, labels % (classes.stop - classes.start)), is_here


def _all_gather(own: Tensor, shard: VocabShard) -> Tensor:
    """[W * N, ...] of [N, ...]."""
    of_all = own.new_empty(shard.world * len(own), *own.shape[1:])
    dist.all_gather_into_tensor(of_all, own.contiguous(), group=shard.group)
    return of_all


def _reduce_scatter(of_all: Tensor, shard: VocabShard) -> Tensor:
    """[N, ...], this rank's part of the sum over ranks of [W * N, ...]."""
    own = of_all.new_empty(len(of_all) // shard.world, *of_all.shape[1:])
    dist.reduce_scatter_tensor(own, of_all.contiguous(), group=shard.group)
    return own


class _Gather(torch.autograd.Function):
    """Own rows [N, ...] to those of all ranks [W * N, ...]; their gradients are summed in fp32."""

    @staticmethod
    def forward(ctx, own, shard):
        ctx.shard = shard
        return _all_gather(own, shard)

    @staticmethod
    def backward(ctx, dof_all):
        wide = dof_all.to(torch.promote_types(dof_all.dtype, torch.float32))
        return _reduce_scatter(wide, ctx.shard).mul_(ctx.shard.world).to(dof_all.dtype), None


class _SumOwn(torch.autograd.Function):
    """What each rank knows of the rows of all ranks [W * N, ...] to the sums over ranks of own rows [N, ...]."""

    @staticmethod
    def forward(ctx, of_all, shard):
        ctx.shard = shard
        return _reduce_scatter(of_all, shard)

    @staticmethod
    def backward(ctx, down):
        return _all_gather(down / ctx.shard.world, ctx.shard), None


def embedding(tokens: Tensor, weight: Tensor, shard: VocabShard) -> Tensor:
    """Rows [..., D] of an embedding that is cut over ranks, for own `tokens` [...] int64 in [0, V)."""
    columns, is_here = shard.columns(_all_gather(tokens.flatten(), shard))
    rows = F.embedding(columns, weight).masked_fill(~is_here[:, None], 0.0)
    return _SumOwn.apply(rows, shard).view(*tokens.shape, -1)


def eager_sums(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    objective: Objective,
    shard: VocabShard,
    *,
    bias: Tensor | None = None,
) -> LossSums:
    """Loss sums of own tokens the eager way: the slice's logits of all tokens, and the rest is autograd's.

    Args:
        hidden: [N, D], this rank's tokens; N is that of all ranks.
        weight: [V_r, D], this rank's classes.
        labels: [N] int32 or int64 in [0, V), or `ignore_index`.
        objective: the options of the loss.
        shard: how the vocabulary is cut.
        bias: [V_r], or None.

    Raises:
        ValueError: a shape or dtype that is not supported.
        IndexError: a label outside [0, V) on a CPU; on a GPU its row is NaN with gradient 0.
    """
    all_labels = _gather_labels(hidden, weight, labels, objective, shard)
    logits = F.linear(_gather_hidden(hidden, shard), weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if objective.softcap is not None:
        logits = objective.softcap * torch.tanh(logits / objective.softcap)
    columns, is_here = shard.columns(all_labels)
    row_max = logits.detach().amax(dim=1)
    dist.all_reduce(row_max, op=dist.ReduceOp.MAX, group=shard.group)
    logits = logits - row_max[:, None]
    label_logits = logits.gather(1, columns[:, None])[:, 0].masked_fill(~is_here, 0.0)
    known = torch.stack([logits.exp().sum(dim=1), label_logits, logits.sum(dim=1)], dim=1)
    exp_sum, label_logit, total = _SumOwn.apply(known, shard).unbind(dim=1)
    log_sum, eps = exp_sum.log(), objective.label_smoothing
    cross_entropies = log_sum - label_logit
    losses = (1 - eps) * cross_entropies + eps * (log_sum - total / shard.vocab)
    losses = losses + objective.z_loss * (shard.own(row_max) + log_sum).square()
    rows = Rows(losses, cross_entropies.detach(), shard.own(row_max), log_sum.detach())
    return _sums(_masked(rows, shard.own(all_labels), objective, shard), shard.own(all_labels), objective)


def inplace_sums(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    objective: Objective,
    shard: VocabShard,
    *,
    bias: Tensor | None = None,
) -> LossSums:
    """The same with one tensor of logits, [W * N, V_r], which the gradient overwrites."""
    all_labels = _gather_labels(hidden, weight, labels, objective, shard)
    logits = F.linear(_gather_hidden(hidden, shard), weight, bias)
    rows = Rows(*_CrossEntropy.apply(logits, all_labels, objective, shard))
    return _sums(rows, shard.own(all_labels), objective)


class _CrossEntropy(torch.autograd.Function):
    """Rows of own tokens from logits [W * N, V_r], which no one else has."""

    @staticmethod
    def forward(ctx, logits, all_labels, objective, shard):
        rows = _row_results(logits, all_labels, objective, shard)
        ctx.save_for_backward(logits, all_labels, rows.row_max, rows.log_sum)
        ctx.objective, ctx.shard = objective, shard
        own = Rows(*(shard.own(vector).clone() for vector in rows))
        ctx.mark_non_differentiable(*own[1:])
        return tuple(own)

    @staticmethod
    def backward(ctx, dlosses, *_):
        refuse_double_backward()
        logits, all_labels, row_max, log_sum = ctx.saved_tensors  # raises if a first backward has overwritten logits
        dlosses = _all_gather(dlosses / ctx.shard.world, ctx.shard)
        _dlogits_(logits, all_labels, ctx.objective, ctx.shard, parts.Upstream(row_max, log_sum, dlosses))
        return logits.detach(), None, None, None


def chunked_sums(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    objective: Objective,
    shard: VocabShard,
    *,
    bias: Tensor | None = None,
    chunk: int,
) -> LossSums:
    """The same with `chunk` rows of V_r logits at a time, as many of each rank, and at least one.

    Forward makes the gradients, so that the upstream gradient of `loss` must be the same on all ranks, as it is for a
    mean over all of their tokens.

    Raises:
        RuntimeError: a second backward, or a double backward.
    """
    all_labels = _gather_labels(hidden, weight, labels, objective, shard)
    wanted = [t is not None and t.requires_grad and torch.is_grad_enabled() for t in (hidden, weight, bias)]
    chunk = max(min(chunk, geometry.largest_chunk(len(weight))) // shard.world, 1)
    rows = Rows.empty(len(hidden), hidden.device)
    loss = _Chunked.apply(hidden, weight, bias, all_labels, objective, shard, chunk, wanted, rows)
    return _sums(rows, shard.own(all_labels), objective)._replace(loss=loss)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, all_labels, objective, shard, chunk, wanted, rows):
        dtype = compute_dtype(hidden, weight, bias)
        head, gradients = (
            head_ops.cast(hidden, weight, bias, dtype),
            parts.empty_gradients(hidden, weight, bias, wanted, chunk, dtype),
        )
        all_labels = all_labels.view(shard.world, -1)
        n_rows = shard.world * min(chunk, len(hidden))
        buffer, ones = parts.logits_buffer(head, n_rows, len(weight)), head.hidden.new_ones(n_rows)
        for part in parts.slices(len(hidden), chunk):
            of_all = Head(_all_gather(head.hidden[part], shard), head.weight, head.bias)
            logits, part_labels = buffer[: len(of_all.hidden)], all_labels[:, part].flatten()
            parts.write_logits(of_all, logits)
            results = _row_results(logits, part_labels, objective, shard)
            for own, vector in zip(rows.slice(part), results, strict=True):
                own.copy_(shard.own(vector))
            if any(wanted):
                upstream = parts.Upstream(results.row_max, results.log_sum, torch.ones_like(results.losses))
                _dlogits_(logits, part_labels, objective, shard, upstream)
                parts.add_dweight(gradients, part, logits, of_all.hidden, ones[: len(logits)])
            if gradients.hidden is not None:
                products = parts.float_buffer(head, of_all.hidden.numel()).view_as(of_all.hidden)
                parts.multiply_classes(logits, head.weight, out=products)
                gradients.hidden[part] = _reduce_scatter(products, shard)
        ctx.save_for_backward(*gradients)
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (hidden, weight, bias)]
        ctx.world, ctx.is_used = shard.world, False
        return rows.losses.sum()

    @staticmethod
    def backward(ctx, dloss):
        refuse_double_backward()
        head_ops.refuse_second_backward(ctx)
        shares = dloss.reshape(1), dloss.reshape(1) / ctx.world, dloss.reshape(1) / ctx.world
        scaled = (
            None if gradient is None else scaling.scale(gradient, share, dtype)
            for gradient, share, dtype in zip(ctx.saved_tensors, shares, ctx.dtypes, strict=True)
        )
        return *scaled, *[None] * 6


def _gather_hidden(hidden: Tensor, shard: VocabShard) -> Tensor:
    """[W * N, D] in the dtype that the GEMM takes."""
    kind = hidden.device.type
    return _Gather.apply(hidden.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else hidden, shard)


def _gather_labels(
    hidden: Tensor, weight: Tensor, labels: Tensor, objective: Objective, shard: VocabShard
) -> Tensor:
    """The labels of all ranks, [W * N] int64, once all shapes are checked."""
    reference.check_labels(labels, len(hidden))
    n_classes = shard.classes.stop - shard.classes.start
    if hidden.dim() != 2 or weight.shape != (n_classes, hidden.shape[1]):
        raise ValueError(
            f"expected hidden [N, D] and {n_classes} classes of {shard.vocab} as weight [{n_classes}, D], got "
            f"{list(hidden.shape)} and {list(weight.shape)}"
        )
    all_labels = _all_gather(labels.long(), shard)
    reference.check_label_range(all_labels, shard.vocab, objective.ignore_index)
    return all_labels


def _row_results(logits: Tensor, labels: Tensor, objective: Objective, shard: VocabShard) -> Rows:
    """Row results over the whole vocabulary, from the slice's logits [M, V_r] and all labels [M]."""
    eps, (columns, _) = objective.label_smoothing, shard.columns(labels)
    rows = Rows.empty(len(labels), labels.device)
    row_kernels.forward_rows(logits, columns, Objective(-1, eps, 0.0, objective.softcap), rows)
    # What smoothing adds to a loss over the slice: eps * (lse_r - mean z).
    smoothing = (rows.losses - (1 - eps) * rows.cross_entropies) * (logits.shape[1] / shard.vocab)
    known = torch.stack([rows.row_max, rows.log_sum, rows.log_sum - rows.cross_entropies, smoothing])
    maxima, log_sums, label_logits, smoothings = _all_gather(known[None], shard).unbind(dim=1)
    row_max = maxima.amax(dim=0)
    shifts = maxima - row_max
    log_sum = torch.logsumexp(log_sums + shifts, dim=0)
    owner = (labels // shard.size).clamp(0, shard.world - 1)
    cross_entropies = log_sum - (label_logits + shifts).gather(0, owner[None])[0]
    losses = (1 - eps) * cross_entropies + objective.z_loss * (row_max + log_sum).square()
    if eps:
        weights = _class_shares(shard, logits.device)
        losses += smoothings.sum(dim=0) + eps * (weights[:, None] * (log_sum - log_sums - shifts)).sum(dim=0)
    return _masked(Rows(losses, cross_entropies, row_max, log_sum), labels, objective, shard)


def _class_shares(shard: VocabShard, device: torch.device) -> Tensor:
    """[W] fp32, each rank's part of the vocabulary."""
    ends = (torch.arange(1, shard.world + 1, device=device) * shard.size).clamp(max=shard.vocab)
    return ends.diff(prepend=ends.new_zeros(1)) / shard.vocab


def _masked(rows: Rows, labels: Tensor, objective: Objective, shard: VocabShard) -> Rows:
    """Losses 0 where a label does not count, NaN where it is none (on a CPU that raised)."""
    is_ignored = labels == objective.ignore_index
    is_bad = (labels < 0) | (labels >= shard.vocab)
    losses, cross_entropies = (
        vector.masked_fill(is_bad, float("nan")).masked_fill(is_ignored, 0.0) for vector in rows[:2]
    )
    return rows._replace(losses=losses, cross_entropies=cross_entropies)


def _dlogits_(
    logits: Tensor, labels: Tensor, objective: Objective, shard: VocabShard, upstream: parts.Upstream
) -> None:
    """Overwrites the slice's logits with the gradient."""
    place = {"first_class": shard.classes.start, "vocab": shard.vocab}
    row_kernels.backward_rows(logits, labels, objective, **upstream._asdict(), dlogits=logits, **place)


def _sums(rows: Rows, labels: Tensor, objective: Objective) -> LossSums:
    correct = None
    if not torch.is_grad_enabled():
        # log_sum is the cross-entropy of a label whose logit is the largest.
        is_right = (rows.cross_entropies <= rows.log_sum) & (labels != objective.ignore_index)
        correct = is_right.sum(dtype=torch.float32)
    return LossSums(rows.losses.sum(), rows.cross_entropies.sum(), correct)
