"""Which runs may be compared over sequence lengths, and the lines and panels that they form."""

from collections.abc import Callable

from logitless import palette, settings
from logitless.figures import FACTS
from logitless.records import RESULTS, lacks, outcome

NEEDED = {key: kind for key, kind in FACTS.items() if key != "curves"} | {"seq_len": int}


def problem(record: dict) -> str | None:
    """Why a run has no place at a length, or None; one that ran out of memory has one."""
    if record.get("status") not in RESULTS:
        return outcome(record)
    missing = lacks(record, NEEDED)
    return f"no {', '.join(missing)}" if missing else None


def split(records: list[dict], problem: Callable[[dict], str | None]) -> tuple[dict[str, str], list[dict]]:
    """Why runs are left out, by folder, and the runs to draw, by backend and length.

    Of runs with the same settings and length the last counts. A panel needs two lengths, or one that ran out of memory.
    """
    left_out, kept = {}, {}
    for record in sorted(records, key=lambda record: str(record.get("time", ""))):
        if reason := problem(record):
            left_out[record["run_dir"]] = reason
            continue
        key = settings.key_of(settings.without(settings.settings_of(record), settings.INERT)), record["seq_len"]
        if key in kept:
            left_out[kept[key]["run_dir"]] = f"{record['run_dir']} is a later run of the same"
        kept[key] = record
    found = panels(list(kept.values())).values()
    alone = [runs for runs in found if len({run["seq_len"] for run in runs}) == 1 and not _any_oom(runs)]
    if kept and len(alone) == len(found):
        return {}, []
    single = {run["run_dir"]: "no run of another length to compare with" for runs in alone for run in runs}
    drawn = [record for record in kept.values() if record["run_dir"] not in single]
    return left_out | single, sorted(drawn, key=_place)


def _any_oom(runs: list[dict]) -> bool:
    return any(run["status"] == "oom" for run in runs)


def _place(record: dict) -> tuple[int, str, int]:
    return palette.rank(record["backend"]), label_of(record), record["seq_len"]


def label_of(record: dict) -> str:
    """The name of a line: `fused, chunk=1024`."""
    return settings.in_words(settings.settings_of(record), settings.BACKEND)


def panels(records: list[dict]) -> dict[str, list[dict]]:
    """The runs that may be compared, by what they alone have in common."""
    return settings.alike(records, settings.INERT + settings.BACKEND)


def titled(text: str, records: list[dict]) -> str:
    """The text with the limit and the batch size that all runs share."""
    own = [settings.settings_of(record) for record in records]
    shared = [key for key in ("memory_limit_gib", "batch_size") if key not in settings.differing(own)]
    words = settings.in_words(own[0], shared)
    return f"{text} ({words})" if words else text
