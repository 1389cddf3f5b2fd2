"""The frontier sweeper: the longest sequence that trains, for each combination of the other overrides."""

import math
from dataclasses import dataclass, field

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.types import Override

from logitless import sweep
from logitless.sweep import Overrides
from logitless.sweeper import FreshProcessSweeper

KEY = "seq_len"
STEPS = 3  # what runs out of memory at step 2 does not fit: the optimizer's state is allocated at the end of step 1
SHORT = {"max_steps": STEPS, "val_every": STEPS, "val_batches": 1, "log_every": 1, "checkpoint_every": "null"}


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
        """The job of this length has ended."""
        status = "error" if record is None else record["status"]
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
        ours = {search.overrides for search in searches}
        for line in sweep.remove_unfinished(self.folder, lambda job: job[:-1] in ours):
            print(line)
        before = sweep.finished(self.folder)
        print(f"frontier of {len(searches)} combinations in {self.folder}", flush=True)
        progress = sweep.Progress()
        try:
            for search in searches:
                self._search(search, before, progress)
        finally:
            print("\n" + frontier_table(searches), flush=True)
        return not any("error" in search.lengths for search in searches)

    def _searches(self, overrides: list[Override]) -> list[Search]:
        if any(override.key_or_group == KEY for override in overrides):
            raise ValueError(f"{KEY} is what the frontier finds: choose where it starts with hydra.sweeper.start")
        if not self.resolution > 0 or not 0 < self.multiple <= self.longest:
            raise ValueError("hydra.sweeper: resolution must be > 0, and multiple in [1, longest]")
        given = {override.key_or_group for override in overrides}
        short = [f"{key}={value}" for key, value in SHORT.items() if key not in given]
        (jobs,) = BasicSweeper.split_arguments(overrides, max_batch_size=None)
        jobs = list(dict.fromkeys(map(tuple, jobs)))
        positions = sweep.varying(jobs)
        searches = []
        for job in jobs:
            config = self.hydra_context.config_loader.load_sweep_config(self.config, [*job, *short])
            if config.max_steps < STEPS:
                raise ValueError(f"max_steps={config.max_steps} must be at least {STEPS}: less tells not what fits")
            label = " ".join(job[i] for i in positions)
            searches.append(
                Search((*job, *short), label or "this configuration", self._round(self.start or config[KEY]))
            )
        return searches

    def _search(self, search: Search, before: dict[Overrides, dict], progress: sweep.Progress) -> None:
        """Runs jobs until the frontier of one combination is known, or a job fails; earlier jobs are not repeated."""
        while not search.is_done and (length := self._next_length(search)):
            job = (*search.overrides, f"{KEY}={length}")
            if job in before:
                search.add(length, before[job])
                continue
            progress.start(sweep.next_number(self.folder) + 1, f"{search.label} {KEY}={length}")
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


def frontier_table(searches: list[Search]) -> str:
    """A row for each combination."""
    rows = [["combination", "longest", "not", "ran out", "peak at the longest"]]
    for search in searches:
        good, bad = search.records.get("ok"), search.records.get("oom")
        longest = str(search.lengths.get("ok", 0 if bad and search.is_done and "error" not in search.lengths else "-"))
        last = sweep.peak(good) if good else "-"
        if "error" in search.lengths:
            last += f"; at {search.lengths['error']} {sweep.outcome(search.records['error'])}"
        elif not search.is_done:
            last += "; not finished"
        ran_out = (sweep.place(bad).removeprefix(" at ") or "OOM") if bad else "-"
        rows.append([search.label, longest, str(search.lengths.get("oom", "-")), ran_out, last])
    return sweep.table(rows)
