"""A vocabulary that is cut over ranks: who has which classes, what the ranks exchange, and an embedding cut so.

Gradients follow the convention of data parallel training, where a rank differentiates its own loss and parameters get
the mean over ranks: the gradient of a rank's own tensor is that of the sum of all ranks' losses, that of a parameter is
of their mean. So gradients are divided by W where they go from own rows to what the ranks share (`sum_own_rows`), and
multiplied by W where they come back (`gather_rows`).

All that exchanges something is collective: all ranks call it, with tensors of one shape. None has a second derivative.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from .cross_entropy import refuse_double_backward

# torch 2.13 has renamed them.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class VocabShard:
    """What this rank has of V classes that are cut over the W ranks of a group: ceil(V / W), the last what is left.

    DTensor's Shard(0) cuts like this. Raises ValueError where a rank would have none.
    """

    group: dist.ProcessGroup
    vocab: int

    def __post_init__(self):
        if self.size * (self.world - 1) >= self.vocab:
            raise ValueError(
                f"{self.vocab} classes cannot be cut over {self.world} ranks: with {self.size} each the last has none"
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

    def shares(self, device: torch.device) -> Tensor:
        """[W] fp32, each rank's part of the vocabulary."""
        ends = (torch.arange(1, self.world + 1, device=device) * self.size).clamp(max=self.vocab)
        return ends.diff(prepend=ends.new_zeros(1)) / self.vocab

    def owners(self, labels: Tensor) -> Tensor:
        """The ranks that have the classes `labels`; any rank for what is no class."""
        return (labels // self.size).clamp(0, self.world - 1)

    def columns(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The place of each label among the own classes, and which are there; for the others, any place."""
        start, n_own = self.classes.start, self.classes.stop - self.classes.start
        is_here = (labels >= start) & (labels < start + n_own)
        # Spread out, because the gradient of an embedding adds up all rows of one place, zeros too.
        return torch.where(is_here, labels - start, labels % n_own), is_here

    def own(self, rows: Tensor, dim: int = 0) -> Tensor:
        """[N, ...], the own part of [W * N, ...]; the rows may be another dimension."""
        return rows.chunk(self.world, dim)[self.group.rank()]


def all_gather(own: Tensor, shard: VocabShard) -> Tensor:
    """[W * N, ...] of [N, ...], without a gradient."""
    rows = own.new_empty(shard.world * len(own), *own.shape[1:])
    _all_gather(rows, own.contiguous(), group=shard.group)
    return rows


def reduce_scatter(rows: Tensor, shard: VocabShard) -> Tensor:
    """[N, ...], the own part of the sum over ranks of [W * N, ...], without a gradient."""
    own = rows.new_empty(len(rows) // shard.world, *rows.shape[1:])
    _reduce_scatter(own, rows.contiguous(), group=shard.group)
    return own


def gather_rows(own: Tensor, shard: VocabShard) -> Tensor:
    """[W * N, ...], the rows of all ranks, of [N, ...]; their gradients are summed in fp32."""
    return _GatherRows.apply(own, shard)


def sum_own_rows(rows: Tensor, shard: VocabShard) -> Tensor:
    """[N, ...], the sums over ranks of own rows, of [W * N, ...], what this rank knows of all rows."""
    return _SumOwnRows.apply(rows, shard)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, own, shard):
        ctx.shard = shard
        return all_gather(own, shard)

    @staticmethod
    def backward(ctx, drows):
        refuse_double_backward()
        wide = drows.to(torch.promote_types(drows.dtype, torch.float32))
        return reduce_scatter(wide, ctx.shard).mul_(ctx.shard.world).to(drows.dtype), None


class _SumOwnRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, shard):
        ctx.shard = shard
        return reduce_scatter(rows, shard)

    @staticmethod
    def backward(ctx, down):
        refuse_double_backward()
        return all_gather(down / ctx.shard.world, ctx.shard), None


def embedding(tokens: Tensor, weight: Tensor, shard: VocabShard) -> Tensor:
    """Rows of an embedding that is cut over ranks.

    Args:
        tokens: [...] int64 in [0, V), this rank's own.
        weight: [V_r, D], this rank's classes.
        shard: how the vocabulary is cut.

    Returns:
        [..., D] in the dtype of `weight`.
    """
    columns, is_here = shard.columns(all_gather(tokens.flatten(), shard))
    rows = F.embedding(columns, weight).masked_fill(~is_here[:, None], 0.0)
    return sum_own_rows(rows, shard).view(*tokens.shape, -1)
