"""Memory and time of `linear_cross_entropy` in closed form, and the choice of its schedule and chunk. Pure Python.

Bytes are those that `schedules.py` allocates, counted line by line; peaks are above the live inputs. Times are what
each GEMM takes (the larger of arithmetic and traffic, in whole waves of tiles over the multiprocessors) and what the
other passes over memory take; the constants were fitted to an H200.

    tokens   3 GEMMs, or 4 where the upstream gradients come after the losses; an fp32 sum of dweight [V, D]
             unless one chunk holds all tokens, to which each further chunk costs a read and a write
    vocab    4 GEMMs, no sum: dweight is made slab by slab, each from all tokens at once
"""

import functools
import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from numbers import Integral, Real

from .devices import Device
from .geometry import (
    STATISTICS_ROWS,
    TILE_ROWS,
    block_of,
    class_tiles,
    cublas_share,
    dhidden_rows,
    largest_chunk,
    padded,
    slab_classes,
    waves,
)

MIB = 2**20
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}

# Without a budget a loss may take this share of the device's memory beyond inputs and gradients.
DEFAULT_SHARE = 1 / 16

# An epilogue with exponentials takes as long as this many more columns of the hidden states would, on an H200.
EPILOGUE_WIDTH = 150
OVERLAP = 0.75  # of the traffic that sums dweight up is not hidden by the GEMM that causes it
SECONDS_PER_LAUNCH = 3e-6
PYTHON_SECONDS_PER_LAUNCH = 33e-6  # while the GPU works on what was launched before


@dataclass(frozen=True)
class Head:
    """What is to be computed: the loss of N tokens over V classes from hidden states of width D, and its gradients.

    Args:
        n_tokens, vocab, width: N >= 0, V >= 1 and D >= 1.
        dtype: "bf16", "fp16" or "fp32": what the GEMMs compute in.
        weight_dtype, hidden_dtype: of the inputs and their gradients; None for `dtype`. Another one is cast, as by
            autocast.
        grads: which gradients are wanted, of (hidden, weight, bias).
        per_token: upstream gradients differ from row to row, as for reduction "none".
        lacking: what keeps this head from the epilogues of gemm.py, an option of the loss ("label smoothing",
            "softcap") or rows that it cannot read, or "".

    Raises:
        ValueError: a size, a dtype or `grads` is none of these.
    """

    n_tokens: int
    vocab: int
    width: int
    dtype: str = "bf16"
    weight_dtype: str | None = None
    hidden_dtype: str | None = None
    grads: tuple[bool, bool, bool] = (True, True, False)
    per_token: bool = False
    has_bias: bool = False
    lacking: str = ""

    def __post_init__(self):
        for name, smallest in (("n_tokens", 0), ("vocab", 1), ("width", 1)):
            size = getattr(self, name)
            if not isinstance(size, int) or isinstance(size, bool) or size < smallest:
                raise ValueError(f"{name} must be an integer >= {smallest}, got {size!r}")
        for name in ("dtype", "weight_dtype", "hidden_dtype"):
            dtype = getattr(self, name)
            if dtype not in tuple(BYTES) and (dtype is not None or name == "dtype"):
                raise ValueError(f"{name} must be one of {', '.join(BYTES)}, got {dtype!r}")
        is_triple = isinstance(self.grads, tuple) and len(self.grads) == 3
        if not is_triple or not all(isinstance(wanted, bool) for wanted in self.grads):
            raise ValueError(f"grads must be a tuple of three bools, got {self.grads!r}")


@dataclass(frozen=True)
class Plan:
    """A schedule and its predictions; bytes are above the live inputs, `transient_bytes` without the gradients."""

    schedule: str
    chunk: int
    peak_bytes: int
    transient_bytes: int
    flops: int
    bytes_moved: int
    predicted_ms: float
    dlogits: str  # how they are made, and why so

    def __str__(self) -> str:
        return f"{self.size()}, {self.predicted_ms:.2f} ms predicted; dlogits {self.dlogits}"

    def size(self) -> str:
        """In words, the transient rounded up: as a budget it is enough."""
        transient_mib = math.ceil(100 * self.transient_bytes / MIB) / 100
        return f"schedule={self.schedule} chunk={self.chunk}: transient {transient_mib:,.2f} MiB"


def lacking(label_smoothing: float, softcap: float | None) -> str:
    """The option that keeps a head from the epilogues of gemm.py, by its name, or ""."""
    return "label smoothing" if label_smoothing else "softcap" if softcap else ""


def check_limits(chunk: int | str, budget_mib: float | None, schedule: str) -> None:
    """Raises ValueError for what no plan can obey."""
    is_auto = isinstance(chunk, str) and chunk == "auto"
    if not is_auto and (isinstance(chunk, bool) or not isinstance(chunk, Integral) or chunk < 1):
        raise ValueError(f'chunk must be an integer >= 1, or "auto", got {chunk!r}')
    is_number = isinstance(budget_mib, Real) and not isinstance(budget_mib, bool)
    if budget_mib is not None and not (is_number and 0 < budget_mib < math.inf):
        raise ValueError(f"budget_mib must be a number > 0 and finite, or None, got {budget_mib!r}")
    if schedule not in ("auto", "tokens", "vocab"):
        raise ValueError(f'schedule must be "auto", "tokens" or "vocab", got {schedule!r}')


def plan(
    head: Head, device: Device, *, budget_mib: float | None = None, chunk: int | str = "auto", schedule: str = "auto"
) -> Plan:
    """The plan of least predicted time whose transient fits.

    Args:
        head: what is to be computed.
        device: where.
        budget_mib: largest transient in MiB; None for no limit if `chunk` is a number, otherwise for DEFAULT_SHARE of
            the device's memory, or the smallest plan where none fits into that.
        chunk: rows of logits alive at once (for slabs, at most the memory of these, or one tile of classes), which is
            obeyed; "auto" to choose.
        schedule: "tokens" or "vocab", which is obeyed; "auto" to choose, which means tokens where a chunk is given.

    Raises:
        ValueError: a limit that no plan can obey; nothing fits into the budget. The message names the smallest plan.
    """
    check_limits(chunk, budget_mib, schedule)  # not in what is cached, where True is 1
    return _plan(head, device, budget_mib, chunk if chunk == "auto" else operator.index(chunk), schedule)


@functools.lru_cache(maxsize=256)
def _plan(head: Head, device: Device, budget_mib: float | None, chunk: int | str, schedule: str) -> Plan:
    given = {"chunk": chunk, "schedule": schedule if any(head.grads) else "auto"}
    if not any(head.grads) or (schedule == "auto" and chunk != "auto"):
        schedule = "tokens"  # without gradients they do not differ
    schedules = ("tokens", "vocab") if schedule == "auto" else (schedule,)
    chunks = list(_chunks(head)) if chunk == "auto" else [min(chunk, largest_chunk(head.vocab))]
    plans = [predict(head, device, schedule=s, chunk=c) for s in schedules for c in chunks]
    limit = device.memory_bytes * DEFAULT_SHARE if budget_mib is None else budget_mib * MIB
    fitting = [p for p in plans if p.transient_bytes <= limit]
    smallest = min(plans, key=lambda p: p.transient_bytes)
    if not fitting and budget_mib is not None:
        limits = " and ".join(f"{name}={value}" for name, value in given.items() if value != "auto")
        limits = limits and f" with {limits}"
        raise ValueError(f"no plan fits into {budget_mib:,.15g} MiB{limits}; the smallest is {smallest.size()}")
    # A larger plan is worth it from one part in a thousand on.
    fastest = min(p.predicted_ms for p in fitting or [smallest])
    return min((p for p in fitting or [smallest] if p.predicted_ms <= 1.001 * fastest), key=lambda p: p.transient_bytes)


def _chunks(head: Head) -> Iterator[int]:
    """Sizes of even chunks, whole tiles of rows, from all tokens down to one tile."""
    largest = max(min(head.n_tokens, largest_chunk(head.vocab)), 1)
    seen = set()
    for tiles in range(1, -(-largest // TILE_ROWS) + 1):
        n_chunks = max(-(-head.n_tokens // min(tiles * TILE_ROWS, largest)), 1)
        chunk = min(max(-(-head.n_tokens // (n_chunks * TILE_ROWS)), 1) * TILE_ROWS, largest)
        if chunk not in seen:
            seen.add(chunk)
            yield chunk


def why_no_epilogue(head: Head, device: Device) -> str:
    """ "" if the logits' own GEMM makes dlogits, or the reason why a kernel of its own does."""
    if device.capability is None or device.capability[0] not in (9, 10):
        return f"{device.name} is not of compute capability 9 or 10"
    if head.dtype != "bf16":
        return f"{head.dtype} is not bf16"
    if head.width % 8:
        return f"rows of {head.width} elements do not begin at multiples of 16 bytes"
    return head.lacking


def predict(head: Head, device: Device, *, schedule: str, chunk: int) -> Plan:
    """Bytes, operations and time of a schedule, "tokens" or "vocab", and a chunk >= 1, which are not checked."""
    chunk = min(chunk, max(head.n_tokens, 1))
    why_not = why_no_epilogue(head, device)
    multiprocessors = device.multiprocessors
    forward, backward, returned = _bytes(head, schedule, chunk, multiprocessors, uses_epilogue=not why_not)
    gemms = list(_gemms(head, schedule, chunk, multiprocessors, uses_epilogue=not why_not))
    passes = _bytes_of_passes(head, schedule, chunk, uses_epilogue=not why_not)
    rate = device.fp32_flops_per_s if head.dtype == "fp32" else device.half_flops_per_s
    launches = 2 * sum(gemm.count for gemm in gemms)  # each GEMM has about one small kernel beside it
    seconds = passes / device.bytes_per_s + sum(gemm.seconds(device, rate) for gemm in gemms)
    seconds = max(seconds + SECONDS_PER_LAUNCH * launches, PYTHON_SECONDS_PER_LAUNCH * launches)
    peak = max(forward, backward)
    return Plan(
        schedule=schedule,
        chunk=chunk,
        peak_bytes=peak,
        transient_bytes=peak - returned,
        flops=sum(gemm.flops() for gemm in gemms),
        bytes_moved=passes + sum(gemm.count * gemm.bytes for gemm in gemms),
        predicted_ms=1000 * seconds,
        dlogits=f"by a kernel over the logits ({why_not})" if why_not else "in the epilogue of the logits' GEMM",
    )


def _bytes(head: Head, schedule: str, chunk: int, multiprocessors: int, *, uses_epilogue: bool) -> tuple[int, int, int]:
    """Peaks of forward and backward above the live inputs, and the gradients returned."""
    n, v, d = head.n_tokens, head.vocab, head.width
    size = BYTES[head.dtype]
    hidden_size, weight_size = (BYTES[dtype or head.dtype] for dtype in (head.hidden_dtype, head.weight_dtype))
    wants_hidden, wants_weight, wants_bias = head.grads
    numbers = n * d, v * d, v
    sizes = hidden_size, weight_size, weight_size
    returned = sum(count * s for count, s, wanted in zip(numbers, sizes, head.grads, strict=True) if wanted)
    casts = (n * d * size if hidden_size != size else 0) + (v * d * size if weight_size != size else 0)
    if head.has_bias and weight_size != size:
        casts += v * size
    is_half = head.dtype == "fp16"
    one_sum = chunk >= n or schedule == "vocab"
    sums = (
        wants_hidden * n * d * (4 if is_half else hidden_size),
        wants_weight * v * d * (weight_size if one_sum and not is_half else 4),
        wants_bias * v * 4,
    )
    copies = [
        count * s if buffer and buffer != count * s else 0
        for count, s, buffer in zip(numbers, sizes, sums, strict=True)
    ]
    vector = 4 * n
    logits = chunk * padded(v) * size
    partials = 4 * class_tiles(v) * chunk if uses_epilogue else 0
    results = _result_bytes(head, chunk, uses_epilogue=uses_epilogue)

    if not any(head.grads):
        return casts + results + 4 * vector, 0, 0
    if schedule == "vocab":
        slab = n * padded(slab_classes(chunk, n, v, d, multiprocessors)) * size
        if not wants_hidden:
            forward = casts + results + 4 * vector
        elif uses_epilogue:
            rows, classes = block_of(chunk, n, v, d, multiprocessors)
            rows = max(min(rows, n), 1)
            block = rows * (padded(classes) * size + 4 * d + 4 * class_tiles(v))
            forward = casts + sums[0] + block + 6 * vector
        else:
            forward = casts + sums[0] + logits + 4 * vector
        kept = sums[0] + 4 * vector
        backward = kept + vector + (sums[1] + sums[2] + casts + slab + 3 * vector if wants_weight or wants_bias else 0)
        after = kept + sum(sums[1:]) + casts + sum(copies[1:])  # what comes back from the slabs is cast
        handed_over = kept + copies[0] + sum(copies[i] or sums[i] for i in (1, 2))
        return forward, max(backward, after, handed_over), returned
    if head.per_token:
        backward = sum(sums) + casts + max(logits + 3 * vector, sum(copies)) + 5 * vector
        return casts + results + 4 * vector, backward, returned
    if uses_epilogue:
        products = wants_hidden * (hidden_size < 4) * 4 * dhidden_rows(chunk, d, multiprocessors) * d
        logits += max(partials, products) + wants_weight * chunk * d * size + 2 * vector + 4 * chunk
    forward = sum(sums) + casts + logits + 4 * vector
    return forward, sum(sums) + sum(copies) + 2 * vector, returned


def _result_bytes(head: Head, chunk: int, *, uses_epilogue: bool) -> int:
    """Buffers of a pass that makes no gradients."""
    if not uses_epilogue:
        return chunk * padded(head.vocab) * BYTES[head.dtype]
    return 24 * class_tiles(head.vocab) * min(STATISTICS_ROWS * chunk, head.n_tokens) + 8 * head.n_tokens


@dataclass(frozen=True)
class _Gemm:
    """`count` products of [rows, inner] by [inner, columns]; `bytes` is the traffic of one."""

    count: float
    rows: int
    columns: int
    inner: int
    bytes: int
    epilogue_width: int = 0

    def flops(self) -> int:
        return round(2 * self.count * self.rows * self.columns * self.inner)

    def seconds(self, device: Device, flops_per_s: float) -> float:
        if not self.flops():
            return 0.0
        share = cublas_share(self.rows, self.columns, device.multiprocessors)
        if self.epilogue_width:
            tiles = -(-self.rows // TILE_ROWS) * class_tiles(self.columns)
            share = tiles / device.multiprocessors / waves(tiles, device.multiprocessors)
        arithmetic = self.flops() * (1 + self.epilogue_width / self.inner) / (flops_per_s * share)
        return max(arithmetic, self.count * self.bytes / device.bytes_per_s)


def _gemms(head: Head, schedule: str, chunk: int, multiprocessors: int, *, uses_epilogue: bool) -> Iterator[_Gemm]:
    n, v, d, size = head.n_tokens, head.vocab, head.width, BYTES[head.dtype]
    wants_hidden, wants_weight, _ = head.grads
    chunks = n / chunk
    epilogue = EPILOGUE_WIDTH if uses_epilogue else 0
    rows, classes = chunk, v
    if schedule == "vocab" and wants_hidden and uses_epilogue:
        rows, classes = block_of(chunk, n, v, d, multiprocessors)
        rows = max(min(rows, n), 1)
    operands, parts = (rows * d + classes * d) * size, n / rows * v / classes
    yield _Gemm(parts, rows, classes, d, operands + rows * classes * size, epilogue)
    if wants_hidden:
        sums = 8 * rows * d if classes < v else 0
        yield _Gemm(parts, rows, d, classes, operands + rows * classes * size + sums)
    if schedule == "vocab" and any(head.grads[1:]):
        slab = slab_classes(chunk, n, v, d, multiprocessors)
        operands = (n * d + slab * d + n * slab) * size
        yield _Gemm(v / slab, n, slab, d, operands, epilogue)
        if wants_weight:
            yield _Gemm(v / slab, slab, d, n, operands)
    if schedule == "tokens" and any(head.grads):
        if head.per_token:
            yield _Gemm(chunks, chunk, v, d, (chunk * d + v * d + chunk * v) * size, epilogue)
        if wants_weight:
            yield _Gemm(chunks, v, d, chunk, (chunk * v + chunk * d) * size)


def _bytes_of_passes(head: Head, schedule: str, chunk: int, *, uses_epilogue: bool) -> int:
    """Traffic of what is not a GEMM's own: row kernels, the sum of dweight, casts and scaling."""
    n, v, d, size = head.n_tokens, head.vocab, head.width, BYTES[head.dtype]
    weight_size = BYTES[head.weight_dtype or head.dtype]
    total = 0 if uses_epilogue else n * v * size * (3 if any(head.grads) else 1)
    if not uses_epilogue and any(head.grads) and (schedule == "vocab" or head.per_token):
        total += n * v * size * (2 if schedule == "vocab" else 1)
    if weight_size != size:
        total += v * d * (weight_size + size)
    if head.grads[1] and schedule == "tokens":
        total += round(OVERLAP * 8 * v * d * max(n / chunk - 1, 0))
        if chunk < n and weight_size == 2:
            total += 6 * v * d
    return total
