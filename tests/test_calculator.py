"""The calculator's numbers are those of kernels.plan, and its committed page is what the command makes."""

import json
import random
import subprocess
from pathlib import Path

import pytest
from tiny import ROOT

from kernels import plan
from kernels.devices import DEVICES
from logitless.page import calculator_page

PLAN = (ROOT / "src" / "logitless" / "assets" / "plan.js").read_text("utf-8")
H200 = DEVICES["NVIDIA H200"]
MIXED = [("bf16", "bf16"), ("bf16", "fp32"), ("fp32", "fp32")]
EDGES = [
    (1, 1, 1, 1),
    (1, 64, 8, 1000),
    (7, 5, 3, 2),
    (300, 257, 8, 300),
    (300, 257, 12, 301),
    (8192, 128256, 4096, 1024),
    (129, 2**18, 64, 128),
    (65536, 50257, 768, 65535),  # more logits than a chunk may have
    (2**20, 2**18, 2**14, 1),
    (2**20, 2**18, 2**14, 2**20),
    (1016, 490, 8, 1016),  # a block of three tiles of classes
    (1372, 44818, 8, 14),
    (14977, 2872, 600, 14977),  # slabs that are as fast in one number of tiles as in another
]


def node() -> Path:
    """The node that playwright brings along."""
    playwright = pytest.importorskip("playwright", reason="needs playwright, for its node")
    return Path(playwright.__file__).parent / "driver" / "node"


def javascript(expression: str, argument: object) -> object:
    """The value of a function of plan.js at `argument`."""
    code = f"{PLAN}\nconsole.log(JSON.stringify(({expression})({json.dumps(argument)})))"
    result = subprocess.run([node(), "-"], input=code, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def points() -> list[dict]:
    draw = random.Random(5)

    def size(low: int, high: int) -> int:
        exact = round(2 ** draw.uniform(low, high))
        return exact if draw.random() < 0.5 else -(-exact // 64) * 64

    shapes = EDGES + [(size(0, 20), size(0, 18), size(0, 14), size(0, 20)) for _ in range(150)]
    names = ("tokens", "vocab", "width", "chunk", "dtype", "weightDtype", "schedule")
    dtypes = [(dtype, weight) for dtype in ("bf16", "fp32") for weight in ("bf16", "fp32")]
    kinds = [(*pair, schedule) for pair in dtypes for schedule in ("tokens", "vocab")]
    return [dict(zip(names, shape + kind, strict=True)) for shape in shapes for kind in kinds]


def test_javascript_predicts_the_bytes_that_python_does():
    asked = points()
    found = javascript("points => points.map(p => predict(p, p.schedule, p.chunk))", asked)
    for point, mine in zip(asked, found, strict=True):
        dtypes = {"dtype": point["dtype"], "weight_dtype": point["weightDtype"], "hidden_dtype": point["weightDtype"]}
        head = plan.Head(point["tokens"], point["vocab"], point["width"], **dtypes)
        right = plan.plan(head, H200, chunk=point["chunk"], schedule=point["schedule"])
        assert (mine["chunk"], mine["peak"]) == (right.chunk, right.peak_bytes), point
        assert mine["transient"] == right.transient_bytes, point
        assert 0 <= mine["sum"] <= mine["transient"], point


def test_the_other_bars_are_those_of_the_readme():
    heads = [{"tokens": 8192, "vocab": 128256, "width": 4096, "dtype": d, "weightDtype": w} for d, w in MIXED]
    bf16, mixed, fp32 = javascript("heads => heads.map(others)", heads)
    logits, copies = 8192 * 128256, 2 * (8192 + 128256) * 4096
    shares = {"logits": 2 * logits, "textbook": 6 * logits, "eager": 12 * logits, "inplace": 2 * logits}
    assert bf16 == shares | {"casts": 0}
    assert mixed == shares | {"casts": copies}
    assert fp32 == {
        "logits": 4 * logits,
        "textbook": 12 * logits,
        "eager": 12 * logits,
        "inplace": 4 * logits,
        "casts": 0,
    }


def test_the_committed_page_is_what_the_report_makes():
    assert (ROOT / "docs" / "calculator.html").read_text("utf-8") == calculator_page(), "make report"


def test_the_page_is_small_and_refers_to_nothing_outside():
    page = calculator_page()
    assert len(page) < 40_000
    assert "default-src 'none'" in page
    for word in ("src=", "url(", "import ", "fetch(", "https:"):
        assert word not in page
