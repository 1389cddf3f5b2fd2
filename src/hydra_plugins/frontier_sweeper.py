"""The frontier sweeper: the longest sequence that trains, for each combination of the other overrides."""

import math
from dataclasses import dataclass, field

from hydra.core.override_parser.types import Override

from logitless.config import COUNT
from logitless.records import ENOUGH_STEPS, RESULTS, place
from logitless.sweeps import sweep
from logitless.sweeps.sweep import Overrides
from logitless.sweeps.sweeper import FreshProcessSweeper, jobs_of

KEY = "seq_len"
SHORT = {"max_steps": ENOUGH_STEPS, "val_every": ENOUGH_STEPS}
SHORT |= {"val_batches": 1, "log_every": 1, "checkpoint_every": "null"}


@dataclass
class Search:
    """What is known of one combination: the records at the longest length that trains and the shortest that does not.

    Args:
        overrides: the combination, with those that make a run short.
        label: what the combination is, in a few words.
        start: the first length.
    """

    overrides: Overrides
    label: str
    start: int
    records: dict[str, dict | None] = field(default_factory=dict)  # by status
    lengths: dict[str, int] = field(default_factory=dict)
    is_done: bool = False

    def add(self, length: int, record: dict | None) -> None:
        """The job of this length has ended, now or in an earlier search."""
        status = record["status"] if record and record["status"] in RESULTS else "error"
        good, bad = self.lengths.get("ok", 0), self.lengths.get("oom", math.inf)
        if (status == "ok" and length < good) or (status == "oom" and length > bad):
            return
        self.records[status], self.lengths[status] = record, length
        self.is_done = status == "error"

    def known(self) -> str:
        """`trains at 4096, not at 8192`."""
        good, bad = self.lengths.get("ok"), self.lengths.get("oom")
        parts = [f"trains at {good}"] if good else []
        parts += [f"{'not' if good else 'does not train'} at {bad}"] if bad else []
        parts += [f"failed at {self.lengths['error']}"] if "error" in self.lengths else []
        return ", ".join(parts)


class FrontierSweeper(FreshProcessSweeper):
    """conf/hydra/sweeper/frontier.yaml says what its arguments are."""

    def __init__(self, grace_s: float, start: int | None, resolution: float, multiple: int, longest: int):
        super().__init__(grace_s)
        self.start, self.resolution, self.multiple, self.longest = start, resolution, multiple, longest

    def run(self, overrides: list[Override]) -> bool:
        searches = self._searches(overrides)
        by_key = {sweep.key_of(search.overrides): search for search in searches}
        for line in sweep.remove_unfinished(
            self.folder, lambda job: _without_length(job) in by_key, may_run=not self.is_sequential()
        ):
            print(line)
        print(f"frontier of {len(searches)} combinations in {self.folder}", flush=True)
        for job, record in sweep.finished(self.folder).items():
            if search := by_key.get(_without_length(job)):
                search.add(record["seq_len"], record)
        progress = sweep.Progress()
        try:
            for search in searches:
                self._search(search, progress)
        finally:
            print("\n" + frontier_table(searches), flush=True)
        return not any("error" in search.lengths for search in searches)

    def _searches(self, overrides: list[Override]) -> list[Search]:
        if any(override.key_or_group == KEY for override in overrides):
            raise ValueError(f"{KEY} is what the frontier finds: choose where it starts with hydra.sweeper.start")
        for name in ("start", "multiple", "longest"):
            value = getattr(self, name)
            if not COUNT.holds(value) and not (name == "start" and value is None):
                raise ValueError(f"hydra.sweeper.{name}={value} must be {COUNT.words}")
        if not isinstance(self.resolution, int | float) or not self.resolution > 0 or self.multiple > self.longest:
            raise ValueError("hydra.sweeper: resolution must be a number > 0, and multiple at most longest")
        given = {override.key_or_group for override in overrides}
        short = [f"{key}={value}" for key, value in SHORT.items() if key not in given]
        jobs = jobs_of(overrides)
        positions = sweep.varying(jobs)
        searches = []
        for job in jobs:
            config = self.hydra_context.config_loader.load_sweep_config(self.config, [*job, *short])
            if config.max_steps < ENOUGH_STEPS:
                raise ValueError(f"max_steps={config.max_steps} must be at least {ENOUGH_STEPS} to show what fits")
            label = " ".join(job[i] for i in positions)
            start = self._round(config[KEY] if self.start is None else self.start)
            searches.append(Search((*job, *short), label or "this configuration", start))
        return searches

    def _search(self, search: Search, progress: sweep.Progress) -> None:
        """Runs jobs until the frontier of one combination is known, or a job fails."""
        while not search.is_done and (length := self._next_length(search)):
            job = (*search.overrides, f"{KEY}={length}")
            progress.start(sweep.next_number(self.folder), f"{search.label} {KEY}={length}")
            (record,) = self.launch([job])
            search.add(length, record)
            progress.end(record)
            print(f"{search.label}: {search.known()}", flush=True)
        search.is_done = True

    def _next_length(self, search: Search) -> int | None:
        """The length to try next; None if the frontier is known."""
        good, bad = search.lengths.get("ok", 0), search.lengths.get("oom")
        if not good and bad is None:
            return search.start
        if bad is None:
            longest = self._round(self.longest)
            return min(2 * good, longest) if good < longest else None
        if not good:
            return self._round(bad // 2) if bad > self.multiple else None
        if bad - good <= max(self.multiple, self.resolution * good):
            return None
        middle = self._round(math.sqrt(good * bad))
        return max(middle, good + self.multiple)

    def _round(self, length: float) -> int:
        """A multiple at most as long, in [multiple, longest]."""
        return max(self.multiple, int(min(length, self.longest)) // self.multiple * self.multiple)


def _without_length(job: Overrides) -> Overrides:
    return sweep.key_of([override for override in job if not override.startswith(f"{KEY}=")])


def frontier_table(searches: list[Search]) -> str:
    """A row for each combination."""
    rows = [["combination", "longest", "too long", "where", "peak at the longest"]]
    for search in searches:
        good, bad = search.records.get("ok"), search.records.get("oom")
        longest = str(search.lengths.get("ok", 0 if bad and search.is_done and "error" not in search.lengths else "-"))
        last = sweep.peak(good) if good else "-"
        if "error" in search.lengths:
            last += f"; at {search.lengths['error']} {sweep.result(search.records['error'])}"
        elif not search.is_done:
            last += "; not finished"
        ran_out = (place(bad) or "OOM") if bad else "-"
        unknown = "none so far" if good and search.is_done and "error" not in search.lengths else "-"
        rows.append([search.label, longest, str(search.lengths.get("oom", unknown)), ran_out, last])
    return sweep.table(rows)
