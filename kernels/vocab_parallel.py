"""Cross-entropy of a linear head whose vocabulary is cut over ranks: no rank ever holds the weight, or a whole row.

Rank r of W has weight [V_r, D] and bias [V_r] of its own classes, and hidden [N, D] and labels [N] of its own tokens,
as in data parallel training. It computes the logits of its classes for the tokens of all ranks, whose hidden states are
gathered. Of its slice of a row, with maximum m_r and l_r = sum exp(z - m_r), the ranks exchange m_r, ln l_r and, from
the one that has the label y, z_y - m_r. All then know

    m = max m_r,   ln l = ln sum exp(ln l_r + (m_r - m)),   z_y - m = (z_y - m_r) + (m_r - m)

and with them losses and dlogits (`reference.py`): dweight stays where it is made, dhidden is summed over the ranks.
Differences of logits are added, not logits, so that a common offset cancels exactly.

`eager_sums` leaves all to autograd, `inplace_sums` overwrites the slice's logits [W * N, V_r] with their gradient, and
`chunked_sums` has a few rows of them at a time. Which gradient is a sum and which a mean, `vocab_shard.py` says. All
are collective: all ranks call them, with as many tokens each.

Vocabulary parallel head: Megatron-LM, Shoeybi et al. 2019.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from . import geometry, head_ops, parts, reference, row_kernels, scaling
from .cross_entropy import refuse_double_backward
from .linear_cross_entropy import compute_dtype
from .parts import Head, Upstream
from .reference import LossSums, Objective, Rows
from .vocab_shard import VocabShard, all_gather, gather_rows, reduce_scatter, sum_own_rows


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
    exp_sum, label_logit, total = sum_own_rows(known, shard).unbind(dim=1)
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
        columns, _ = shard.columns(all_labels)
        of_ranks = _exchange(logits, columns, objective, shard)
        ctx.save_for_backward(logits, all_labels, *_merge(of_ranks))
        ctx.objective, ctx.shard = objective, shard
        rows = _finish(shard.own(of_ranks, dim=2), shard.own(all_labels), objective, shard)
        ctx.mark_non_differentiable(*rows[1:])
        return tuple(rows)

    @staticmethod
    def backward(ctx, dlosses, *_):
        refuse_double_backward()
        logits, all_labels, row_max, log_sum = ctx.saved_tensors  # raises if a first backward has overwritten logits
        dlosses = all_gather(dlosses / ctx.shard.world, ctx.shard)
        _dlogits_(logits, all_labels, ctx.objective, ctx.shard, Upstream(row_max, log_sum, dlosses))
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
    loss, *rows = _Chunked.apply(hidden, weight, bias, all_labels, objective, shard, chunk, wanted)
    return _sums(Rows(*rows), shard.own(all_labels), objective)._replace(loss=loss)


class _Chunked(torch.autograd.Function):
    """The summed loss of own tokens, and their Rows."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, all_labels, objective, shard, chunk, wanted):
        dtype = compute_dtype(hidden, weight, bias)
        gradients = parts.empty_gradients(hidden, weight, bias, wanted, chunk, dtype)
        head = head_ops.cast(hidden, weight, bias, dtype)
        n_rows = shard.world * min(chunk, len(hidden))
        buffer = parts.logits_buffer(head, n_rows, len(weight))
        ones, upstream = head.hidden.new_ones(n_rows), hidden.new_ones(n_rows, dtype=torch.float32)
        columns, _ = shard.columns(all_labels)
        own = hidden.new_empty(shard.world, len(Rows._fields), len(hidden), dtype=torch.float32)
        for part in parts.slices(len(hidden), chunk):
            of_all = Head(all_gather(head.hidden[part], shard), head.weight, head.bias)
            logits = buffer[: len(of_all.hidden)]
            parts.write_logits(of_all, logits)
            of_ranks = _exchange(logits, _part(columns, part, shard), objective, shard)
            own[:, :, part] = shard.own(of_ranks, dim=2)
            if any(wanted):
                vectors = Upstream(*_merge(of_ranks), upstream[: len(logits)])
                _dlogits_(logits, _part(all_labels, part, shard), objective, shard, vectors)
                parts.add_dweight(gradients, part, logits, of_all.hidden, ones[: len(logits)])
            if gradients.hidden is not None:
                products = parts.float_buffer(head, of_all.hidden.numel()).view_as(of_all.hidden)
                parts.multiply_classes(logits, head.weight, out=products)
                gradients.hidden[part] = reduce_scatter(products, shard)
        rows = _finish(own, shard.own(all_labels), objective, shard)
        ctx.save_for_backward(*gradients)
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (hidden, weight, bias)]
        ctx.world, ctx.is_used = shard.world, False
        ctx.mark_non_differentiable(*rows)
        return rows.losses.sum(), *rows

    @staticmethod
    def backward(ctx, dloss, *_):
        refuse_double_backward()
        head_ops.refuse_second_backward(ctx)
        shares = dloss.reshape(1), dloss.reshape(1) / ctx.world, dloss.reshape(1) / ctx.world
        scaled = (
            None if gradient is None else scaling.scale(gradient, share, dtype)
            for gradient, share, dtype in zip(ctx.saved_tensors, shares, ctx.dtypes, strict=True)
        )
        return *scaled, *[None] * 5


def _gather_hidden(hidden: Tensor, shard: VocabShard) -> Tensor:
    """[W * N, D] in the dtype that the GEMM takes."""
    kind = hidden.device.type
    return gather_rows(hidden.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else hidden, shard)


def _gather_labels(hidden: Tensor, weight: Tensor, labels: Tensor, objective: Objective, shard: VocabShard) -> Tensor:
    """The labels of all ranks, [W * N] int64, once all shapes are checked."""
    reference.check_labels(labels, len(hidden))
    n_classes = shard.classes.stop - shard.classes.start
    if hidden.dim() != 2 or weight.shape != (n_classes, hidden.shape[1]):
        raise ValueError(
            f"expected hidden [N, D] and {n_classes} classes of {shard.vocab} as weight [{n_classes}, D], got "
            f"{list(hidden.shape)} and {list(weight.shape)}"
        )
    all_labels = all_gather(labels.long(), shard)
    reference.check_label_range(all_labels, shard.vocab, objective.ignore_index)
    return all_labels


def _part(of_all: Tensor, part: slice, shard: VocabShard) -> Tensor:
    """Of a vector of all ranks' tokens, the same part of each rank's, in one piece as the kernels want it."""
    return of_all.view(shard.world, -1)[:, part].flatten().contiguous()


def _exchange(logits: Tensor, columns: Tensor, objective: Objective, shard: VocabShard) -> Tensor:
    """The Rows of all ranks' slices, as one tensor [W, 4, M], from the own slice's logits [M, V_r].

    Their losses are of `columns`, which are a row's label on one rank only, and without z-loss.
    """
    known = logits.new_empty(1, len(Rows._fields), len(logits), dtype=torch.float32)
    options = Objective(-1, objective.label_smoothing, 0.0, objective.softcap)
    row_kernels.forward_rows(logits, columns, options, Rows(*known[0]))
    return all_gather(known, shard)


def _merge(of_ranks: Tensor) -> tuple[Tensor, Tensor]:
    """row_max and log_sum [M] over the whole vocabulary."""
    _, _, maxima, log_sums = of_ranks.unbind(dim=1)
    row_max = maxima.amax(dim=0)
    return row_max, (log_sums + (maxima - row_max)).exp().sum(dim=0).log()


def _finish(of_ranks: Tensor, labels: Tensor, objective: Objective, shard: VocabShard) -> Rows:
    """Row results over the whole vocabulary, from those of the slices [W, 4, N] and the labels [N]."""
    eps, (row_max, log_sum) = objective.label_smoothing, _merge(of_ranks)
    slice_losses, slice_cross_entropies, maxima, log_sums = of_ranks.unbind(dim=1)
    # Not by what a slice's lse lacks of the row's: a label that is the largest must get log_sum, to the bit.
    label_logits = (log_sums - slice_cross_entropies) + (maxima - row_max)
    cross_entropies = log_sum - label_logits.gather(0, shard.owners(labels)[None])[0]
    losses = (1 - eps) * cross_entropies + objective.z_loss * (row_max + log_sum).square()
    if eps:
        # A slice's part of eps * (lse - mean z).
        gaps = (log_sum - log_sums) + (row_max - maxima)
        parts_of_mean = slice_losses - (1 - eps) * slice_cross_entropies + eps * gaps
        losses += (shard.shares(labels.device)[:, None] * parts_of_mean).sum(dim=0)
    return _masked(Rows(losses, cross_entropies, row_max, log_sum), labels, objective, shard)


def _masked(rows: Rows, labels: Tensor, objective: Objective, shard: VocabShard) -> Rows:
    """Losses 0 where a label does not count, NaN where it is none (on a CPU that raised)."""
    is_ignored = labels == objective.ignore_index
    is_bad = (labels < 0) | (labels >= shard.vocab)
    losses, cross_entropies = (
        vector.masked_fill(is_bad, float("nan")).masked_fill(is_ignored, 0.0) for vector in rows[:2]
    )
    return rows._replace(losses=losses, cross_entropies=cross_entropies)


def _dlogits_(logits: Tensor, labels: Tensor, objective: Objective, shard: VocabShard, upstream: Upstream) -> None:
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
