"""The dashboard, declared once: what the report's page draws and what a W&B workspace shows."""

from dataclasses import asdict, dataclass

from logitless.records import PEAKS


@dataclass(frozen=True)
class Panel:
    """A quantity against another, in one colour for each value of `group`.

    Args:
        figure: the file that shows it.
        x, y: of "curves" columns of a run's curves, else keys of its record, which W&B has as its summary.
        unit: of y, or of x if that is a bar's length.
        kind: "curves", a line for each run; "runs", a point for each; "bars", the largest x of each group.
    """

    figure: str
    title: str
    x: str
    y: str
    unit: str
    kind: str
    group: str = "backend"

    def y_title(self) -> str:
        return f"{self.title.lower()} ({self.unit})"


TRAINING_LOSS = Panel("training_loss", "Training loss", "tokens", "train/loss", "nats a token", "curves")
VALIDATION_LOSS = Panel("training_loss", "Validation loss", "tokens", "val/loss", "nats a token", "curves")
PEAK_PANELS = tuple(Panel("peak_memory", title, "seq_len", key, "GiB", "runs") for key, title in PEAKS.items())
PEAK_ALLOCATED, PEAK_LIVE_TENSORS = PEAK_PANELS
SPEED = Panel("speed", "Speed", "seq_len", "tokens_per_s", "tokens/s", "runs")
FRONTIER = Panel("frontier", "Longest sequence that trains", "seq_len", "backend", "tokens", "bars")

PANELS = (TRAINING_LOSS, VALIDATION_LOSS, *PEAK_PANELS, SPEED, FRONTIER)
AXES = {"tokens": "tokens", "seq_len": "sequence length (tokens)"}
# Of a run's summary: what ran out of memory or failed has partial numbers, which are no results.
FILTERS = {"status": "ok"}


def spec() -> dict:
    """The dashboard in plain containers."""
    return {"filters": FILTERS, "panels": [asdict(panel) for panel in PANELS]}
