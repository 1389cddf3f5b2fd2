"""What `footprint` predicts of the runs in records, at many lengths."""

from collections.abc import Callable
from itertools import pairwise

from kernels.devices import DEVICES, Device
from logitless.footprint import BACKENDS, GIB, peak_bytes, peak_parts
from logitless.footprint_parts import Step

POINTS = 24  # of a predicted line
OPTIONS = {"label_smoothing": 0.0, "z_loss": 0.0, "softcap": None, "accumulate": 1}


def predicted_peaks(runs: list[dict], label_of: Callable[[dict], str]) -> tuple[list[dict], dict[str, str]]:
    """Points of the predicted line of each label among `runs`, and by label why there is none."""
    sizes = sorted({run["seq_len"] for run in runs})
    lengths = _between(sizes)
    points, reasons = [], {}
    for label, run in {label_of(run): run for run in runs}.items():
        try:
            own = [(length, predicted_gib(run, length)) for length in lengths]
            points += [{"label": label, "seq_len": length, "value": value} for length, value in own]
        except (KeyError, TypeError, ValueError) as error:
            reasons[label] = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    return points, reasons


def predicted_gib(run: dict, seq_len: int) -> float:
    """The peak of a run's training step at another length; raises what `step_of` does."""
    return peak_bytes(step_of(run, seq_len), run["backend"]) / GIB


def largest_part(run: dict) -> tuple[str, float] | None:
    """What takes most of a run's peak, by its name in `footprint.Parts`, and its share; None if nobody can say."""
    try:
        parts = peak_parts(step_of(run, run["seq_len"]), run["backend"])
    except (KeyError, TypeError, ValueError):
        return None
    name, size = max(parts._asdict().items(), key=lambda part: part[1])
    return name, size / sum(parts)


def step_of(run: dict, seq_len: int) -> Step:
    """A run's training step at another length.

    Raises:
        ValueError: it cannot be predicted, and why; KeyError or TypeError where the record lacks what is needed.
    """
    from logitless.model import GPTConfig  # imports torch

    if run["backend"] not in BACKENDS:
        raise ValueError(f"only {', '.join(BACKENDS)} are counted in logitless.footprint")
    config = run["config"]
    if others := [f"{key}={config[key]}" for key, value in OPTIONS.items() if config.get(key, value) != value]:
        raise ValueError(f"{', '.join(others)} is not counted")
    loss = config.get("loss") or {}
    model, device = GPTConfig(**config["model"]), _device(run["device"])
    chunk = "auto" if run.get("chunk") is None else run["chunk"]
    limits = loss.get("budget_mib"), run.get("memory_limit_gib")
    return Step(model, device, seq_len, run["batch_size"], run["precision"], chunk, *limits)


def _device(name: str) -> Device:
    if name.startswith("cpu"):
        return DEVICES["cpu"]
    if name not in DEVICES:
        raise ValueError(f"device {name} is not among those of kernels.devices")
    return DEVICES[name]


def _between(sizes: list[int]) -> list[int]:
    """About POINTS lengths from the first of `sizes` to the last, these among them."""
    steps = max(POINTS // len(sizes), 3)
    more = {round(low * (high / low) ** (i / steps)) for low, high in pairwise(sizes) for i in range(steps)}
    return sorted(more | set(sizes))
