"""One colour, mark and dash for each loss backend, the same in every figure.

The colours are those of Okabe and Ito (Color Universal Design, 2008), which people with any colour vision tell apart.
"""

COLORS = {
    "naive": "#d55e00",
    "inplace": "#0072b2",
    "fused": "#009e73",
    "compiled": "#cc79a7",
    "liger": "#e69f00",
    "cce": "#56b4e9",
    "quack": "#7f4f24",
}
SHAPES = {
    "naive": "square",
    "inplace": "triangle-up",
    "fused": "circle",
    "compiled": "diamond",
    "liger": "triangle-down",
}
MORE_SHAPES = ("triangle-right", "triangle-left", "wedge", "arrow", "stroke")
DASHES = {"naive": [1, 0], "inplace": [7, 3], "fused": [2, 2], "compiled": [7, 2, 2, 2], "liger": [10, 4]}
OTHER_COLOR, OTHER_DASH = "#595959", [4, 1]
CROSS = {"shape": "cross", "angle": 45, "size": 90}  # stands for "out of memory"
# What the benchmark calls them; the first word of a method.
FAMILIES = {"ours": "fused", "eager": "naive", "torch.compile": "compiled", "Liger": "liger", "CCE": "cce"}


def color(backend: str) -> str:
    """Of a backend, or of a method of the benchmark."""
    family = backend.partition(" ")[0]
    return COLORS.get(FAMILIES.get(family, family), OTHER_COLOR)


def shades(methods: list[str]) -> list[str]:
    """A colour for each method: its family's, lighter the more of the family went before."""
    colors = [color(method) for method in methods]
    return [_lighter(own, colors[:i].count(own) / (colors.count(own) + 1)) for i, own in enumerate(colors)]


def shapes(backends: list[str]) -> list[str]:
    """A mark for each line of a panel: its backend's for the first of a backend, others for the rest."""
    marks = []
    for backend in backends:
        candidates = [*filter(None, [SHAPES.get(backend)]), *MORE_SHAPES]
        marks.append(next((shape for shape in candidates if shape not in marks), MORE_SHAPES[-1]))
    return marks


def rank(backend: str) -> int:
    """Where a backend comes among others."""
    order = list(COLORS)
    return order.index(backend) if backend in order else len(order)


def dash(backend: str) -> list[int]:
    return DASHES.get(backend, OTHER_DASH)


def _lighter(color: str, share: float) -> str:
    """`color` mixed with a share of white."""
    channels = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(channel + share * (255 - channel)):02x}" for channel in channels)
