"""A training step, and what a block and the head hold in it, in bytes, which `footprint` adds up. Pure Python.

The head, c bytes to a number of the logits (2 in bf16-mixed, 4 in 32-true):

    naive    8NV in forward (fp32 logits, log-softmax), 12NV in backward (log-softmax, its gradient, that of the logits)
    inplace  cNV in both, and in backward the gradients of the GEMM's operands, cVD + cND
    fused    what `kernels.plan` says

Attention is flash or cuDNN's, memory-efficient for fp32 on a GPU, and that of the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kernels import plan
from kernels.devices import Device
from kernels.plan import Plan

if TYPE_CHECKING:
    from logitless.model import GPTConfig  # which imports torch

DTYPES = {  # to compute in, which is also that of the stream between the blocks, and of the weights
    "32-true": ("fp32", "fp32"),
    "bf16-mixed": ("bf16", "fp32"),
    "16-mixed": ("fp16", "fp32"),
    "bf16-true": ("bf16", "bf16"),
}
BLOCK_ROWS = 64  # of kernels.reference


@dataclass(frozen=True)
class Step:
    """A training step of `model` on `batch_size` sequences of `seq_len` tokens.

    Args:
        model: dropout must be 0.
        precision: a key of DTYPES.
        chunk: rows of logits alive at once in `fused`; "auto" to let kernels.plan choose.
        budget_mib: the largest transient of `fused`, or None, as in kernels.plan.
        memory_limit_gib: what the allocator's segments may take of a GPU, or all but P of a CPU; None for no limit.
    """

    model: GPTConfig
    device: Device
    seq_len: int
    batch_size: int
    precision: str
    chunk: int | str = "auto"
    budget_mib: float | None = None
    memory_limit_gib: float | None = None

    def __post_init__(self):
        if self.model.dropout:
            raise ValueError(f"model.dropout={self.model.dropout}: its masks are not counted here, it must be 0")
        if self.precision not in DTYPES:
            raise ValueError(f"precision={self.precision} must be one of {', '.join(DTYPES)}")
        if min(self.seq_len, self.batch_size) < 1:
            raise ValueError(f"seq_len={self.seq_len} and batch_size={self.batch_size} must be >= 1")
        if self.memory_limit_gib is not None and self.memory_limit_gib <= 0:
            raise ValueError(f"memory_limit_gib={self.memory_limit_gib} must be > 0")

    @property
    def n_tokens(self) -> int:
        return self.batch_size * self.seq_len

    @property
    def is_cpu(self) -> bool:
        return self.device.name == "cpu"

    @property
    def dtypes(self) -> tuple[str, str]:
        """To compute in, also of the stream, and of the weights."""
        return DTYPES[self.precision]

    @property
    def sizes(self) -> tuple[int, int]:
        """Bytes of a number of each of `dtypes`."""
        compute, weight = self.dtypes
        return plan.BYTES[compute], plan.BYTES[weight]

    @property
    def casts(self) -> bool:
        """Whether autocast copies the weights."""
        return self.sizes[0] != self.sizes[1]


def inner_width(model: GPTConfig) -> int:
    """Width inside the MLP: three matrices of 8/3 D, rounded up to 64, cost what two of 4 D do."""
    return -(-8 * model.width // 192) * 64 if model.mlp == "swiglu" else 4 * model.width


def up_width(model: GPTConfig) -> int:
    """Width of what the MLP's `up` gives: gate and value, or what is activated."""
    return (2 if model.mlp == "swiglu" else 1) * inner_width(model)


def matrices(model: GPTConfig) -> int:
    """Numbers in the matrices of a block."""
    return 4 * model.width**2 + (3 if model.mlp == "swiglu" else 2) * model.width * inner_width(model)


def norm_bytes(step: Step) -> int:
    """What a norm keeps: its input, and a number a row; on a CPU, in fp32, also what it multiplies with its weight."""
    return step.n_tokens * (step.model.width * (8 if step.is_cpu else step.sizes[0]) + 4)


def block_bytes(step: Step) -> int:
    """What autograd keeps of a block, besides its parameters.

    Two norms. Of attention: input, queries, keys and values, result, log-sums. Of the MLP: input and what `up` gives.
    The weights as autocast copied them, but for the MLP's `down`, which is copied again where the MLP is activated.
    """
    model, (size, _) = step.model, step.sizes
    attention = size * 5 * model.width + 4 * model.n_heads
    mlp = size * (model.width + up_width(model))
    casts = size * (matrices(model) - model.width * inner_width(model)) if step.casts else 0
    return 2 * norm_bytes(step) + step.n_tokens * (attention + mlp) + casts


def block_forward_bytes(step: Step) -> int:
    """What a block holds at most beside its input while autograd keeps nothing of it.

    In attention, where the keys are rotated in fp32, or in the MLP, where the gated or activated numbers are made.
    """
    model, size = step.model, step.sizes[0]
    rotation = 12 if size < 4 else 8  # the copy of the keys; both parts of a half, and its sum; the halves' result
    attention = (4 * size + rotation) * model.width
    mlp = size * ((2 if model.mlp == "swiglu" else 3) * model.width + 2 * up_width(model))
    return step.n_tokens * max(attention, mlp)


def mlp_backward_bytes(step: Step) -> int:
    """What the MLP's backward makes less what it frees, when it leaves `down` or, if there is one, the gate.

    What `down` takes, once more, with an activated gate; the gradients of the stream, of this, and of `down`, with
    its copy.
    """
    model, size = step.model, step.sizes[0]
    inner = size * inner_width(model)
    n_inside = 4 if model.mlp == "swiglu" else 2
    return step.n_tokens * (n_inside * inner + size * model.width) + (1 + step.casts) * model.width * inner


def head_plan(step: Step) -> Plan:
    """What `fused` does at the end of the model. Raises ValueError if nothing fits into the budget."""
    head = head_of(step.model, step.n_tokens, step.precision)
    return plan.plan(head, step.device, budget_mib=step.budget_mib, chunk=step.chunk)


def head_of(model: GPTConfig, n_tokens: int, precision: str, *, lacking: str = "") -> plan.Head:
    """What a plan is made for: the head of a micro-batch in training. `lacking` is that of kernels.plan.Head."""
    dtype, weight_dtype = DTYPES[precision]
    return plan.Head(
        n_tokens,
        model.padded_vocab_size,
        model.width,
        dtype,
        weight_dtype,
        hidden_dtype=dtype,
        grads=(True, True, model.head_bias),
        has_bias=model.head_bias,
        lacking=lacking,
    )


def head_bytes(step: Step, backend: str) -> tuple[int, int]:
    """Of the head, from its hidden states on, the most that is alive at once in forward and in backward."""
    n, v, d = step.n_tokens, step.model.padded_vocab_size, step.model.width
    size = step.sizes[0]
    hidden = size * n * d
    if backend == "fused":
        chosen = head_plan(step)
        forward, on_cpu = chosen.peak_bytes, _cpu_bytes(step, chosen.chunk)
        if chosen.schedule == "vocab":  # forward makes dhidden only
            head = head_of(step.model, n, step.precision)
            only_hidden = replace(head, grads=(True, False, False))
            forward = plan.predict(only_hidden, step.device, schedule="vocab", chunk=chosen.chunk).peak_bytes
        return hidden + forward + on_cpu, chosen.peak_bytes + on_cpu
    kept = hidden + (size * v * d if step.casts else 0)
    backward = kept + size * (n * v + v * d + n * d)
    if backend == "naive":
        return kept + 8 * n * v, max(kept + 12 * n * v, backward)
    rows = _reference_bytes(step, n)
    return kept + size * n * v + rows, max(backward, kept + size * n * v + rows)


def _cpu_bytes(step: Step, chunk: int) -> int:
    """What `fused` holds on a CPU beside its plan: rows in fp32, or fp32 copies of a GEMM's operands."""
    chunk, v, d = min(chunk, step.n_tokens), step.model.padded_vocab_size, step.model.width
    rows = _reference_bytes(step, chunk)
    if not step.is_cpu or step.sizes[0] == 4 or (step.sizes[1] == 2 and chunk == step.n_tokens):
        return rows
    return max(rows, 4 * chunk * (v + d))


def _reference_bytes(step: Step, n_rows: int) -> int:
    """What kernels.reference holds of a block of rows on a CPU: the logits and their exponentials in fp32."""
    return 8 * min(BLOCK_ROWS, n_rows) * step.model.padded_vocab_size if step.is_cpu else 0
