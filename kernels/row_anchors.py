"""The numbers that the GEMM of `gemm.py` wants for every row, from the row's label: one dot product each.

For `gemm.exponentials` the anchor is the label's logit k plus SHIFT: exp(z - k - SHIFT) needs no row maximum, because
bf16 has the exponents of fp32. For `gemm.gradients` it is the lse that forward kept; with upstream gradients u:

    dloss/dz_v = u * (1 + 2 * lam * lse) * exp(z_v - lse)
    dloss/dz_y = u * (2 * lam * lse * p_y - (1 - p_y)),   1 - p_y = 1 - exp(-cross_entropy), without cancellation
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import gemm
from .reference import Objective

SHIFT = tl.constexpr(44.0)  # nats: exp(z - k - 44) is a normal number for z from k - 43 to k + 132
LOG2E = gemm.LOG2E


@triton.jit
def _one_minus_exp(x):
    """1 - exp(-x) for x >= 0, to a relative error of 1e-6."""
    series = x * (1 - x / 2 * (1 - x / 3 * (1 - x / 4 * (1 - x / 5 * (1 - x / 6)))))
    return tl.where(x < 0.25, series, 1 - tl.exp(-x))


@triton.jit
def _label_logit(hidden_ptr, weight_ptr, bias_ptr, D, BLOCK_D: tl.constexpr):
    """The dot product of one row of hidden states with one of the weight, plus one bias."""
    total = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, D, BLOCK_D):
        columns = start + tl.arange(0, BLOCK_D)
        hidden = tl.load(hidden_ptr + columns, mask=columns < D, other=0.0).to(tl.float32)
        total += hidden * tl.load(weight_ptr + columns, mask=columns < D, other=0.0).to(tl.float32)
    logit = tl.sum(total, 0)
    if bias_ptr is not None:
        logit += tl.load(bias_ptr).to(tl.float32)
    return logit


@triton.jit
def _anchors_kernel(
    hidden_ptr,  # [N, D] in
    weight_ptr,  # [V, D] in
    bias_ptr,  # [V] in, or None
    labels_ptr,  # [N] in
    label_logits_ptr,  # [N] fp32 out unless BACKWARD; 0 where there is no label
    anchors_ptr,  # [N] fp32 out, base 2: label logit + SHIFT, or lse if BACKWARD; +inf where there is no label
    row_max_ptr,  # [N] fp32 in, if BACKWARD
    log_sum_ptr,  # [N] fp32 in, if BACKWARD
    dlosses_ptr,  # [N] fp32 in, if BACKWARD: upstream gradients
    scales_ptr,  # [N] fp32 out, if BACKWARD: of the probabilities in dlogits
    label_values_ptr,  # [N] fp32 out, if BACKWARD: dlogits at the labels
    hidden_stride,
    weight_stride,
    V,
    D,
    ignore_index,
    z_loss,
    BACKWARD: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels_ptr + row)
    counts = (label != ignore_index) & (label >= 0) & (label < V)
    logit = 0.0
    if counts:
        bias = None if bias_ptr is None else bias_ptr + label
        logit = _label_logit(hidden_ptr + row * hidden_stride, weight_ptr + label * weight_stride, bias, D, BLOCK_D)
    if BACKWARD:
        row_max = tl.load(row_max_ptr + row)
        log_sum = tl.load(log_sum_ptr + row)
        upstream = tl.where(counts, tl.load(dlosses_ptr + row), 0.0)
        cross_entropy = log_sum - (logit - row_max)
        slope = 2 * z_loss * (row_max + log_sum)
        anchor = row_max + log_sum
        label_value = slope * tl.exp(-cross_entropy) - _one_minus_exp(cross_entropy)
        tl.store(scales_ptr + row, tl.where(counts, upstream * (1 + slope), 0.0))
        tl.store(label_values_ptr + row, tl.where(counts, upstream * label_value, 0.0))
    else:
        anchor = logit + SHIFT
        tl.store(label_logits_ptr + row, logit)
    tl.store(anchors_ptr + row, tl.where(counts, anchor * LOG2E, float("inf")))


def anchors(hidden, weight, bias, labels, objective: Objective) -> tuple[Tensor, Tensor]:
    """Label logits and anchors for `gemm.exponentials`, each [N] fp32; 0 and +inf for rows that do not count."""
    label_logits, anchors = (hidden.new_empty(hidden.shape[0], dtype=torch.float32) for _ in range(2))
    _launch_anchors(hidden, weight, bias, labels, objective, label_logits, anchors)
    return label_logits, anchors


def gradient_rows(
    hidden, weight, bias, labels, objective: Objective, *, row_max, log_sum, dlosses
) -> dict[str, Tensor]:
    """The `anchors`, `scales` and `label_values` for `gemm.gradients`, each [N] fp32."""
    rows = {name: torch.empty_like(row_max) for name in ("anchors", "scales", "label_values")}
    vectors = (row_max, log_sum, dlosses, rows["scales"], rows["label_values"])
    _launch_anchors(hidden, weight, bias, labels, objective, None, rows["anchors"], *vectors)
    return rows


def _launch_anchors(hidden, weight, bias, labels, objective, label_logits, anchors, *vectors) -> None:
    width = hidden.shape[1]
    with torch.cuda.device_of(hidden):
        _anchors_kernel[(hidden.shape[0],)](
            hidden,
            weight,
            bias,
            labels,
            label_logits,
            anchors,
            *(vectors or (None,) * 5),
            hidden.stride(0),
            weight.stride(0),
            weight.shape[0],
            width,
            objective.ignore_index,
            float(objective.z_loss),
            BACKWARD=bool(vectors),
            BLOCK_D=min(triton.next_power_of_2(width), 1024),
            num_warps=4,
        )
