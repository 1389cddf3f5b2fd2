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
from kernels.linear_cross_entropy import linear_cross_entropy, linear_evaluation
from kernels.reference import Objective
from logitless.bench.inputs import DTYPES, IGNORE

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]

CHUNKS = (1024, 2048, 4096)
SLABS = (256, 640, 1024)  # chunks of the vocabulary schedule
BUDGETS_MIB = (64, 174, 480, 1024, 4096)


class Family(NamedTuple):
    """Implementations that come from one package, under one name."""

    name: str  # every implementation's name begins with it
    package: str  # the distribution whose version a row records
    needs_cuda: bool
    implementations: Callable[[int, str], dict[str, Loss]]
    """By name, for N tokens and a compute dtype of bf16, fp16 or fp32; raises ImportError where they are absent."""
    is_evaluation: bool = False  # whether its losses have no gradient

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


def evaluation(hidden: Tensor, weight: Tensor, labels: Tensor, **limits) -> Tensor:
    """The mean of our evaluation's cross-entropies; it makes lse, accuracy and entropy as well."""
    kept = (labels != IGNORE).sum()
    return linear_evaluation(hidden, weight, labels, Objective(ignore_index=IGNORE), **limits).cross_entropy / kept


def _ours(n_tokens: int, dtype: str) -> dict[str, Loss]:
    tokens = {f"C={chunk}": {"chunk": chunk} for chunk in CHUNKS if chunk < n_tokens} | {"whole": {"chunk": n_tokens}}
    vocab = {f"vocab C={chunk}": {"chunk": chunk, "schedule": "vocab"} for chunk in SLABS if chunk < n_tokens}
    budgets = {f"within {budget} MiB": {"budget_mib": budget} for budget in BUDGETS_MIB}
    options = tokens | vocab | budgets
    return {f"ours {name}": partial(linear_cross_entropy, **limits) for name, limits in options.items()}


def _evaluations(n_tokens: int, dtype: str) -> dict[str, Loss]:
    return {"evaluation": partial(evaluation, chunk=512), "evaluation eager": eager_fp32}


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

    fused = {f"quack C={chunk}": partial(chunked_linear_cross_entropy, chunk_size=chunk) for chunk in (1024, 4096)}
    return fused | {"quack base C=4096": partial(fused["quack C=4096"], use_scaled_exp=False)}


FAMILIES = (
    Family("ours", "triton", False, _ours),
    Family("evaluation", "triton", False, _evaluations, is_evaluation=True),
    Family("inplace", "triton", False, lambda n_tokens, dtype: {"inplace": inplace}),
    Family("eager", "torch", False, _eager),
    Family("torch.compile", "torch", False, _compiled),
    Family("F.linear_cross_entropy", "torch", False, _torch),
    Family("Liger", "liger-kernel", True, _liger),
    Family("CCE", "cut-cross-entropy", True, _cce),
    Family("quack", "quack-kernels", True, _quack),
)
