"""What the figures share: a drawing, its title, the labels of its lines, and the curves of a run.

The subtitle names the devices, the versions, the commits and the commands that made the numbers.
"""

import csv
import os
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import altair as alt

from logitless.records import lacks, outcome
from logitless.report.settings import label_of

FACTS = dict.fromkeys(("backend", "curves", "command", "device"), str) | {"versions": dict, "config": dict}
ENOUGH_POINTS = 10  # of training loss, for a curve
TOO_SHORT = f"fewer than {ENOUGH_POINTS} points of training loss"
MOST_POINTS = 400  # of a curve, on a page of many
MOST_COMMANDS, MOST_VALUES = 4, 6  # that a subtitle has room for
VERSIONS = ("torch", "triton", "lightning")  # that the subtitle names


class Drawing(NamedTuple):
    """A figure, or None where there is nothing to draw; why runs are not in it, by their folders; and what to know."""

    chart: alt.TopLevelMixin | None
    left_out: dict[str, str]
    notes: list[str] = []  # noqa: RUF012 - never changed


def curve_problem(record: dict, needed: dict[str, type]) -> str | None:
    """Why a run has no training loss to draw, or lacks what is needed beside it, or None."""
    if record.get("status") != "ok":
        return outcome(record)
    if missing := lacks(record, needed):
        return f"no {', '.join(missing)}"
    try:
        return None if losses(record) else f"no training loss in {record['curves']}"
    except (OSError, KeyError, ValueError, csv.Error) as error:
        return f"{record['curves']} cannot be read: {type(error).__name__}: {error}"


def labels_of(records: list[dict]) -> list[str]:
    """A name for each record: its label, and where several have the same, the folder from where these part."""
    labels = [label_of(record) for record in records]
    folders = [Path(record["run_dir"]).resolve() for record in records]
    twins = {label: [own for own, other in zip(folders, labels, strict=True) if other == label] for label in labels}
    return [
        label if len(twins[label]) == 1 else f"{label}, {os.path.relpath(folder, os.path.commonpath(twins[label]))}"
        for label, folder in zip(labels, folders, strict=True)
    ]


def title(records: list[dict]) -> alt.TitleParams:
    """Devices, versions, and the overrides of the runs without those that name a backend or a folder."""
    words = [_overrides(record, ("loss=", "hydra.", "logger=")) for record in records]
    is_one_each = len({record["backend"] for record in records}) == len(records)
    text = "One run with each loss backend" if is_one_each else "Runs"
    return provenance(
        text, _with_shown_versions(records), [" ".join(["python scripts/train.py", *own]) for own in words]
    )


def provenance_of_runs(text: str, records: list[dict]) -> alt.TitleParams:
    """A title with devices, versions, commits, and the runs' commands; of many, those with the same keys as one."""
    words = [_overrides(record, ("hydra.", "logger=")) for record in records]
    commands = list(dict.fromkeys(" ".join(own) for own in words))
    if len(commands) > MOST_COMMANDS:
        alike = {}
        for own in words:
            alike.setdefault(tuple(word.partition("=")[0] for word in own), []).append(own)
        commands = [_joined(own) for own in alike.values()]
    lines = [f"python scripts/train.py {command}" for command in commands]
    return provenance(text, _with_shown_versions(records), lines)


def _with_shown_versions(records: list[dict]) -> list[dict]:
    return [record | {"versions": {name: record["versions"].get(name) for name in VERSIONS}} for record in records]


def _overrides(record: dict, private: tuple[str, ...]) -> list[str]:
    """The words of a run's command but for those that begin as `private` does, with or without a plus."""
    return [word for word in record["command"].split() if not word.lstrip("+").startswith(private)]


def _joined(commands: list[list[str]]) -> str:
    """One command with all values of each key: `loss=naive,fused seq_len=1024,...,8192`."""
    values = {}
    for key, sign, value in (word.partition("=") for words in commands for word in words):
        values.setdefault(key + sign, {})[value] = None
    return " ".join(
        key + ",".join(own if len(own := list(found)) <= MOST_VALUES else [own[0], "...", own[-1]])
        for key, found in values.items()
    )


def provenance(text: str, records: list[dict], commands: Iterable[str]) -> alt.TitleParams:
    """A title with the devices, versions and commits of `records`, all that there are, and the commands below it."""
    versions = {}
    for name, version in (item for record in records for item in record["versions"].items() if item[1]):
        versions.setdefault(name, {})[str(version)] = None
    facts = dict.fromkeys(record["device"] for record in records)
    facts |= dict.fromkeys(f"{name} {' and '.join(found)}" for name, found in versions.items())
    facts |= dict.fromkeys(f"commit {record['commit']}" for record in records if record.get("commit"))
    subtitle = [line for entry in (", ".join(facts), *dict.fromkeys(commands)) for line in textwrap.wrap(entry, 150)]
    return alt.TitleParams(text, subtitle=subtitle, anchor="start")


def curve(losses: dict[int, float], right: dict[int, float]) -> list[dict]:
    """The points of a training curve, with the difference from another where that has the same step, and a loss."""
    return [
        {"tokens": tokens, "loss": loss, "difference": 100 * (loss / right[tokens] - 1) if right.get(tokens) else None}
        for tokens, loss in losses.items()
    ]


def thinned(points: list[dict]) -> list[dict]:
    """Every k-th point, so that no more than MOST_POINTS are left."""
    return points[:: _stride(len(points))]


def thinning_notes(n_points: dict[str, int]) -> list[str]:
    """Which runs' curves were thinned, from the number of their points by folder."""
    by_stride = {}
    for run, n in n_points.items():
        by_stride.setdefault(_stride(n), []).append(run)
    return [f"one point of {k} is drawn of {', '.join(runs)}" for k, runs in by_stride.items() if k > 1]


def _stride(n_points: int) -> int:
    return max(-(-n_points // MOST_POINTS), 1)


def losses(record: dict) -> dict[int, float]:
    """Training loss by tokens seen."""
    return column(record, "train/loss")


def column(record: dict, name: str) -> dict[int, float]:
    """A column of the curves by tokens; OSError, KeyError, ValueError or csv.Error for a file that is none, or cut."""
    with open(Path(record["run_dir"]) / record["curves"]) as stream:
        rows = list(csv.DictReader(stream))
    if any(None in row or None in row.values() for row in rows):
        raise ValueError("a line has other columns than the first")
    return {int(row["tokens"]): float(row[name]) for row in rows if row[name]}
