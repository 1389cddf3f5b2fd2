"""The grid sweeper: every combination of the values in the command, each job a fresh process."""

from hydra.core.override_parser.types import Override

from logitless import sweep
from logitless.records import RESULTS
from logitless.sweep import Overrides
from logitless.sweeper import FreshProcessSweeper, jobs_of


class GridSweeper(FreshProcessSweeper):
    """`a=1,2 b=x,y` are four jobs, in this order; conf/hydra/sweeper/grid.yaml tells more."""

    def run(self, overrides: list[Override]) -> bool:
        jobs = jobs_of(overrides)
        self.validate_batch_is_legal(jobs)
        planned = set(map(sweep.key_of, jobs))
        for line in sweep.remove_unfinished(self.folder, planned.__contains__, may_run=not self.is_sequential()):
            print(line)
        before = sweep.finished(self.folder)
        records = {job: before[key] for job in jobs if (key := sweep.key_of(job)) in before}
        left = [job for job in jobs if job not in records]
        print(f"sweep of {len(jobs)} jobs in {self.folder}, {len(jobs) - len(left)} done before", flush=True)
        try:
            if self.is_sequential():
                self._run_one_by_one(jobs, left, records)
            elif left:
                records |= dict.fromkeys(left)  # so the table tells of them when it is interrupted
                records |= zip(left, self.launch(left), strict=True)
                for job in left:
                    sweep.tell_failure(" ".join(job), records[job])
        finally:
            print("\n" + grid_table(jobs, records), flush=True)
        return all((record := records.get(job)) and record["status"] in RESULTS for job in jobs)

    def _run_one_by_one(self, jobs: list[Overrides], left: list[Overrides], records: dict) -> None:
        """Runs what is left, and adds to the records."""
        positions = sweep.varying(jobs)
        progress = sweep.Progress(len(jobs), len(left))
        for job in left:
            progress.start(sweep.next_number(self.folder), " ".join(job[i] for i in positions))
            records[job] = None  # so the table tells of it when it is interrupted
            (records[job],) = self.launch([job])
            progress.end(records[job])


def grid_table(jobs: list[Overrides], records: dict) -> str:
    """A row for each planned job: its folder's number, the overrides that vary, and its outcome."""
    positions = sweep.varying(jobs)
    head = ["job", *(jobs[0][i].partition("=")[0] for i in positions), f"{'peak memory':>12} {'tokens/s':>11}"]
    rows = [head]
    for job in jobs:
        record = records.get(job)
        number = record["run_dir"].rpartition("/")[2] if record else "-"
        result = sweep.result(record) if job in records else "not run"
        if record and record["status"] == "ok":
            result = f"{sweep.peak(record):>12} {sweep.speed(record):>11}"
        rows.append([number, *(job[i].partition("=")[2] for i in positions), result])
    return sweep.table(rows)
