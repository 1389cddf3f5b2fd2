"""All runs as a table in HTML: what they differ in and how they ended; what they have in common is said once."""

import html
import math
from collections.abc import Iterable

from logitless import settings
from logitless.panels import PEAK_PANELS, Panel
from logitless.records import outcome

FIRST = ("backend", "chunk", "seq_len")  # columns
RESULTS = ("tokens/s", "training loss (nats a token)", "validation loss (nats a token)")
MOST_LETTERS = 150  # of how a run ended


def counted(records: list[dict]) -> str:
    """`5 runs: 3 ok, 1 oom, 1 started.`"""
    found = {}
    for record in records:
        kind = record.get("status") if isinstance(record.get("status"), str) else "without a status"
        found[kind] = found.get(kind, 0) + 1
    words = ", ".join(f"{count} {html.escape(kind)}" for kind, count in found.items())
    return f"{len(records)} runs: {words}." if records else "No runs."


def table(records: list[dict]) -> str:
    """A row for each run, whatever its status."""
    if not records:
        return ""
    own = [settings.settings_of(record) for record in records]
    # A run without its configuration would differ in all of it.
    whole = [mine for mine, record in zip(own, records, strict=True) if isinstance(record.get("config"), dict)] or own
    keys = [key for key in settings.differing(whole) if key not in FIRST]
    common = {key: value for key, value in whole[0].items() if key not in (*FIRST, *keys)}
    peaks = [panel for panel in PEAK_PANELS if any(panel.y in record for record in records)]
    columns = [*FIRST, "status", *(panel.y_title() for panel in peaks), *RESULTS, *keys, "folder"]
    rows = sorted(zip(own, records, strict=True), key=lambda row: [_sortable(row[0].get(key)) for key in FIRST])
    lines = [
        _row(record, [*_texts(mine, FIRST), *_results(record, peaks), *_texts(mine, keys), _text(record["run_dir"])])
        for mine, record in rows
    ]
    shared = "".join(f"<li>{html.escape(key)} = {_text(value)}</li>" for key, value in common.items())
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    return (
        f"<h2>All runs</h2>\n<details><summary>What all have in common ({len(common)})</summary><ul>{shared}</ul>"
        f'</details>\n<div class="wide"><table><thead><tr>{head}</tr></thead>\n<tbody>\n'
        + "\n".join(lines)
        + "\n</tbody></table></div>"
    )


def _row(record: dict, cells: list[str]) -> str:
    kind = record.get("status") if record.get("status") in ("ok", "oom") else "error"
    return f'<tr class="{kind}">' + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _texts(own: settings.Settings, keys: Iterable[str]) -> list[str]:
    return [_text(own.get(key)) for key in keys]


def _results(record: dict, panels: list[Panel]) -> list[str]:
    partial = "" if record.get("status") == "ok" else " so far"
    peaks = [_number(record.get(panel.y), ".2f") for panel in panels]
    losses = [_number(record.get(name), ".4f") for name in ("train_loss", "val_loss")]
    speed = _number(record.get("tokens_per_s"), ",.0f")
    return [_text(outcome(record)[:MOST_LETTERS]), *(peak and peak + partial for peak in peaks), speed, *losses]


def _number(value: object, form: str) -> str:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return format(value, form) if is_number else ""


def _text(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "" if value is None else html.escape(str(value))


def _sortable(value: object) -> tuple[bool, object]:
    """Numbers before words before nothing."""
    return (isinstance(value, str), value) if isinstance(value, int | float | str) else (True, "~")
