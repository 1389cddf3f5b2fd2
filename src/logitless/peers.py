"""The implementations that `benchmark.py` compares: ours, PyTorch's own, and those of other packages.

Each is a plain function loss(hidden [N, D], weight [V, D], labels [N]) -> mean loss [] over the labels that are not
-100, called as its own documentation calls it. A family of them is imported when it is asked for, so that a package
that is not installed costs its own rows and no others.

Liger-Kernel: linkedin/Liger-Kernel (arXiv 2410.10989). CCE: apple/ml-cross-entropy (arXiv 2411.09009). quack:
Dao-AILab/quack.
"""

import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cross_entropy import cross_entropy
from kernels.linear_cross_entropy import linear_cross_entropy
from logitless.problems import DTYPES

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]

CHUNKS = (1024, 2048, 4096)


class Family(NamedTuple):
    """Implementations that come from one package, under one name."""

    name: str  # every implementation's name begins with it
    package: str  # the distribution whose version a row records
    needs_cuda: bool
    implementations: Callable[[int, str], dict[str, Loss]]
    """By name, for N tokens and a compute dtype of bf16, fp16 or fp32; raises ImportError where they are absent."""

    def may_have(self, word: str) -> bool:
        """Whether a name in this family begins with `word` for some N and dtype.

        Of a family that cannot be imported no name is known but its own, with which they all begin.
        """
        if chosen([self.name], [word]):
            return True
        if not chosen([word], [self.name]):
            return False
        try:
            names = [name for dtype in DTYPES for name in self.implementations(sys.maxsize, dtype)]
        except Exception:  # whatever it is, the family's row will say it
            return True
        return bool(chosen(names, [word]))


def chosen(names: Iterable[str], words: Iterable[str]) -> list[str]:
    """Those of `names` that begin with one of `words`, in any case."""
    beginnings = tuple(word.lower() for word in words)
    return [name for name in names if name.lower().startswith(beginnings)]


def eager_fp32(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Logits in the compute dtype, cross-entropy of their fp32 copy: the yardstick."""
    return F.cross_entropy(F.linear(hidden, weight).float(), labels)


def eager_half(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy in the dtype of the logits. Autocast would make an fp32 copy of them, so it is off for the loss."""
    logits = F.linear(hidden, weight)
    with torch.autocast(hidden.device.type, enabled=False):
        return F.cross_entropy(logits, labels)


def inplace(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Our cross-entropy on all logits, whose gradient overwrites them."""
    return cross_entropy(F.linear(hidden, weight), labels)


def _ours(n_tokens: int, dtype: str) -> dict[str, Loss]:
    chunks = {f"C={chunk}": chunk for chunk in CHUNKS if chunk < n_tokens} | {"whole": n_tokens}
    return {f"ours {name}": partial(linear_cross_entropy, chunk=chunk) for name, chunk in chunks.items()}


def _eager(n_tokens: int, dtype: str) -> dict[str, Loss]:
    return {"eager fp32": eager_fp32} | ({} if dtype == "fp32" else {f"eager {dtype}": eager_half})


def _compiled(n_tokens: int, dtype: str) -> dict[str, Loss]:
    return {"torch.compile": torch.compile(eager_fp32, dynamic=False)}


def _torch(n_tokens: int, dtype: str) -> dict[str, Loss]:
    from torch.nn import LinearCrossEntropyOptions
    from torch.nn.functional import linear_cross_entropy as loss

    chunked = partial(loss, options=LinearCrossEntropyOptions())
    return {"F.linear_cross_entropy": loss, "F.linear_cross_entropy chunked": chunked}


def _liger(n_tokens: int, dtype: str) -> dict[str, Loss]:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy as loss

    fp32 = partial(loss, accum_dtype=torch.float32)
    return {"Liger": loss, "Liger fp32": fp32, "Liger fp32 x16": partial(fp32, chunk_mem_const=16)}


def _cce(n_tokens: int, dtype: str) -> dict[str, Loss]:
    from cut_cross_entropy import LinearCrossEntropyImpl
    from cut_cross_entropy import linear_cross_entropy as loss

    modes = [mode.name.lower() for mode in LinearCrossEntropyImpl]
    named = {"CCE" if mode == "cce" else f"CCE {mode.removeprefix('cce_')}": partial(loss, impl=mode) for mode in modes}
    return named | {"CCE unfiltered": partial(loss, filter_eps=None)}


def _quack(n_tokens: int, dtype: str) -> dict[str, Loss]:
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return {"quack": chunked_linear_cross_entropy}


FAMILIES = (
    Family("ours", "triton", False, _ours),
    Family("inplace", "triton", False, lambda n_tokens, dtype: {"inplace": inplace}),
    Family("eager", "torch", False, _eager),
    Family("torch.compile", "torch", False, _compiled),
    Family("F.linear_cross_entropy", "torch", False, _torch),
    Family("Liger", "liger-kernel", True, _liger),
    Family("CCE", "cut-cross-entropy", True, _cce),
    Family("quack", "quack-kernels", True, _quack),
)
