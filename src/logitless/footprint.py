"""Peak memory of a training step in closed form, before anything is built. Pure Python.

P parameters, S the two states of AdamW, G gradients, A what autograd keeps of the blocks. The peak is that of one of
these phases, and which one depends on the shape; what a block and the head take is in `footprint_parts`:

    forward               P + S + G of the step before + A + the head's forward    (G goes between forward and backward)
    head backward         P + S + A + the head's backward
    last block backward   P + S + A + G of the head + the MLP's backward
    first block backward  P + S + A of one block + G of the head and the other blocks + the MLP's backward
    embedding backward    P + S + G + the embedding's own gradient, which a tied head's is added to in a third tensor
    optimizer             P + S + G + what AdamW needs

With `model.checkpoint` A is the blocks' inputs, beside it in forward a block's own forward if that takes more than the
head's, and in the backward of a block all that autograd keeps of it, made anew: where the last block's begins, that and
the inputs of all. Lightning's autocast remembers no copies of weights, so a block's are gone when it ends.

Counted are tensors and cuBLAS's workspaces, for one micro-batch a step from the second step on, without dropout,
options of the loss or torch.compile. tests/test_footprint.py compares with bf16-mixed on an H200, and with all but
16-mixed on a CPU.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from kernels.devices import DEVICES, Device
from logitless.footprint_parts import (
    Step,
    block_bytes,
    block_forward_bytes,
    head_bytes,
    matrices,
    mlp_backward_bytes,
    norm_bytes,
)

if TYPE_CHECKING:
    from logitless.model import GPTConfig  # which imports torch

BACKENDS = ("naive", "inplace", "fused")

# A context takes about 0.5 GiB of the device. Of a limit of 24 GiB runs took 98.0% (docs/results/frontier_h200).
USABLE_SHARE, USABLE_SHARE_OF_LIMIT = 0.95, 0.985
GIB = 2**30
# PyTorch's workspaces for cuBLAS: two, for the threads of forward and backward. 32 MiB each from Hopper on.
WORKSPACES_BYTES, OLDER_WORKSPACES_BYTES = 2 * 32 * 2**20, 2 * 8320 * 2**10
LENGTH_STEP = 128
LONGEST = 2**30


def find_device(name: str) -> Device:
    """The device of kernels.devices that is called `name`, or the only one whose name has it as a part; in any case.

    Raises:
        ValueError: there is none, or more than one.
    """
    wanted = name.lower()
    found = [device for device in DEVICES.values() if wanted in device.name.lower()]
    found = [device for device in found if wanted == device.name.lower()] or found
    if len(found) != 1:
        names = found or DEVICES.values()
        problem = "may be any of" if found else "is none of"
        raise ValueError(f"device {name!r} {problem} {', '.join(device.name for device in names)}")
    return found[0]


def n_parameters(model: GPTConfig) -> int:
    """Parameters, a tied weight counted once."""
    embedding = model.padded_vocab_size * model.width
    head = model.padded_vocab_size * model.head_bias + (0 if model.tied else embedding)
    return embedding + head + model.n_layers * (matrices(model) + 2 * model.width) + model.width


class Parts(NamedTuple):
    """What the bytes of a moment belong to.

    Args:
        states: parameters, their gradients and AdamW's states, and the tokens.
        blocks: what autograd keeps of the blocks, and what a block makes in forward or backward.
        head: what the head and its loss hold, from the final norm on.
    """

    states: int
    blocks: int
    head: int


def peak_bytes(step: Step, backend: str) -> int:
    """The largest of `phases`."""
    return sum(peak_parts(step, backend))


def peak_parts(step: Step, backend: str) -> Parts:
    """The parts of the largest of `phases`."""
    return max(phases(step, backend).values(), key=sum)


def phases(step: Step, backend: str) -> dict[str, Parts]:
    """Bytes at the worst moment of each phase; of `fused` by token chunks "head backward" is a bound below "forward".

    Raises:
        ValueError: a backend that does not exist, or a budget into which no plan of `fused` fits.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend {backend!r} must be one of {', '.join(BACKENDS)}")
    model, (compute_size, size) = step.model, step.sizes
    gradients = size * n_parameters(model)
    embedding = size * model.padded_vocab_size * model.width
    head = embedding + size * model.padded_vocab_size * model.head_bias
    others = gradients - head - (0 if model.tied else embedding)
    always = 3 * gradients + 16 * step.n_tokens + _workspaces(step.device)  # P and S; tokens and labels
    rotary = 4 * step.seq_len * model.width // model.n_heads
    block, mlp_backward, norm = block_bytes(step), mlp_backward_bytes(step), norm_bytes(step)
    stream = compute_size * step.n_tokens * model.width
    into_embedding = size * step.n_tokens * model.width  # the gradient of what it gave
    first, last = block + rotary, model.n_layers * block + rotary  # kept where the backward of that block begins
    blocks, block_forward = last, 0
    forward, backward = head_bytes(step, backend)
    if model.checkpoint:
        blocks, block_forward = model.n_layers * stream + rotary, block_forward_bytes(step)
        is_kept_twice = step.is_cpu and compute_size == 2  # a norm there keeps its input in fp32
        first += stream if is_kept_twice else 0
        last = first + (model.n_layers - 1) * stream
    # Behind a loss scaler AdamW is not fused: a root and a denominator, one weight after another.
    denominators = 2 * embedding if step.precision == "16-mixed" else 0
    head_forward, head_backward = norm + forward, norm + backward
    if block_forward > head_forward:
        in_forward = Parts(always + gradients, blocks + block_forward, 0)
    else:
        in_forward = Parts(always + gradients, blocks, head_forward)
    return {
        "forward": in_forward,
        "head backward": Parts(always, blocks, head_backward),
        "last block backward": Parts(always + head, last + mlp_backward, 0),
        "first block backward": Parts(always + head + others - size * matrices(model), first + mlp_backward, 0),
        "embedding backward": Parts(always + others + head, 0, embedding + max(into_embedding, embedding * model.tied)),
        "optimizer": Parts(always + gradients + denominators, 0, 0),
    }


def usable_bytes(step: Step) -> float:
    """What tensors may take of the device's memory, and of the limit."""
    of_device = USABLE_SHARE * step.device.memory_bytes
    if step.memory_limit_gib is None:
        return of_device
    beside = step.sizes[1] * n_parameters(step.model) if step.is_cpu else 0
    return min(of_device, beside + USABLE_SHARE_OF_LIMIT * step.memory_limit_gib * GIB)


def fits(step: Step, backend: str) -> bool:
    """Whether the peak stays within `usable_bytes`, and a plan of `fused` within the budget."""
    try:
        return peak_bytes(step, backend) <= usable_bytes(step)
    except ValueError:
        if backend != "fused":
            raise
        return False


def longest(step: Step, backend: str) -> int:
    """The largest multiple of LENGTH_STEP whose step fits, 0 if none does; `step.seq_len` has no effect.

    Where kernels.plan chooses, a longer sequence may get a plan that needs less; then this is a length that fits, and
    the next one does not.
    """
    low, high = 0, 1
    while high * LENGTH_STEP < LONGEST and fits(replace(step, seq_len=high * LENGTH_STEP), backend):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        is_enough = fits(replace(step, seq_len=middle * LENGTH_STEP), backend)
        low, high = (middle, high) if is_enough else (low, middle)
    return low * LENGTH_STEP


def _workspaces(device: Device) -> int:
    if device.capability is None:
        return 0
    return WORKSPACES_BYTES if device.capability[0] in (9, 10) else OLDER_WORKSPACES_BYTES
