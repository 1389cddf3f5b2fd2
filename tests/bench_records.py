"""The rows of docs/results/bench_h200 that measured our own linear heads, and the plans that are made for them now."""

import json

from tiny import ROOT

from kernels import plan
from kernels.devices import DEVICES
from logitless.bench.peers import FAMILIES, evaluation

FILES = ("head", "head_fp32_weight", "head_65536", "scaling")


def own_rows(name: str) -> list[dict]:
    lines = (ROOT / "docs" / "results" / "bench_h200" / f"{name}.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "plan" in row]


def plan_of(row: dict) -> plan.Plan:
    """What is planned and predicted today, for the limits by which the row's method calls the loss."""
    own = [family.implementations(row["n_tokens"], row["dtype"]) for family in FAMILIES if family.package == "triton"]
    loss = {name: loss for losses in own for name, loss in losses.items()}[row["method"]]
    grads = (False,) * 3 if loss.func is evaluation else (True, True, False)
    head = plan.Head(row["n_tokens"], row["vocab"], row["width"], row["dtype"], row["weight_dtype"], grads=grads)
    return plan.plan(head, DEVICES[row["device"]], **loss.keywords)
