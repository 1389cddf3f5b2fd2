"""What the sweepers of src/hydra_plugins share: each job is a plain run of the script, in a process of its own.

The launcher gets `FreshProcess` as the function to call, instead of the script's. So peaks, compile caches, the RNG,
W&B and CUDA errors do not pass from a job to the next, and a job that is killed leaves a record, whatever the launcher.
"""

import os
import re
import signal
import sys
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.utils import JobStatus
from hydra.errors import HydraException
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from logitless import processes
from logitless.records import FILE_NAME
from logitless.sweeps import sweep
from logitless.sweeps.sweep import Overrides

SOURCE = Path(__file__).resolve().parents[2]
INTERRUPTED = 130
OF_THE_SWEEP = ("mode", "run.", "sweep.", "sweeper", "launcher", "job.num", "job.id")  # below hydra: not for its jobs


@dataclass(frozen=True)
class FreshProcess:
    """A task of Hydra's that runs the script as a new process, with its output in the job's folder.

    Args:
        script: the command up to the overrides.
        hydra_overrides: overrides of hydra.* for every job.
        grace_s: seconds that a job has to end in when it is stopped.
    """

    script: tuple[str, ...]
    hydra_overrides: tuple[str, ...]
    grace_s: float

    def __call__(self, config: DictConfig) -> None:
        hydra = HydraConfig.get()
        overrides, run_dir = list(hydra.overrides.task), Path(hydra.runtime.output_dir)
        folder = run_dir.parent
        (run_dir / FILE_NAME).unlink(missing_ok=True)  # of the same job, before a scheduler put it back into its queue
        own = ("hydra.mode=RUN", f"hydra.job.num={hydra.job.num}")
        own += (f"hydra.run.dir={_quoted(run_dir)}", f"hydra.sweep.dir={_quoted(folder)}")
        output, exit_code, reason = run_dir / sweep.OUTPUT, None, ""
        command = [*self.script, *overrides, *self.hydra_overrides, *own]
        try:
            exit_code = processes.run(command, output, self.grace_s, cwd=hydra.runtime.cwd)
            reason = sweep.reason_of_end(exit_code, output)
        except BaseException as error:
            reason = f"stopped with the sweep: {type(error).__name__} {error}".strip()
            raise
        finally:
            sweep.close_record(run_dir, overrides, folder, reason, exit_code)


def identity(hydra: DictConfig) -> tuple[list[str], str | None]:
    """A run's overrides, and the folder of its sweep, None for a single run."""
    is_job = not OmegaConf.is_missing(hydra.job, "num")
    return list(hydra.overrides.task), os.path.abspath(hydra.sweep.dir) if is_job else None


def jobs_of(overrides: list[Override]) -> list[Overrides]:
    """Every combination of the overrides' values, each once.

    Raises:
        ValueError: there is none.
        HydraException: values that cannot be counted, such as interval().
    """
    (jobs,) = BasicSweeper.split_arguments(overrides, max_batch_size=None)
    if not jobs:
        raise ValueError("these values make no job: a glob() matches nothing")
    return list(dict.fromkeys(map(tuple, jobs)))


class FreshProcessSweeper(Sweeper):
    """A sweeper in whose folder each job has a numbered one; `run` says which jobs."""

    def __init__(self, grace_s: float):
        self.grace_s = grace_s

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.hydra_context, self.config = hydra_context, config
        self.folder = Path(os.path.abspath(config.hydra.sweep.dir))
        flags = get_args_parser().parse_args()
        config_dir = flags.config_dir and os.path.abspath(flags.config_dir)
        given = {"--config-path": flags.config_path, "--config-name": flags.config_name, "--config-dir": config_dir}
        script = [sys.executable, os.path.abspath(sys.argv[0])]
        script += [f"{flag}={value}" for flag, value in given.items() if value is not None]
        overrides = tuple(
            o
            for o in config.hydra.overrides.hydra
            if not o.lstrip("+~").removeprefix("hydra.").startswith(OF_THE_SWEEP)
        )
        self.launcher: Launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context,
            task_function=FreshProcess(tuple(script), overrides, self.grace_s),
            config=config,
        )

    def sweep(self, arguments: list[str]) -> None:
        """Runs the sweep; SystemExit with 1 if a job failed, with 130 after Ctrl-C."""
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        if not self.is_sequential():  # where workers on this or another machine find this module
            os.environ["PYTHONPATH"] = os.pathsep.join([str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])])
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        try:
            subdir = OmegaConf.to_container(self.config.hydra.sweep, resolve=False)["subdir"]
            if subdir != "${hydra.job.num}":
                raise ValueError(f"hydra.sweep.subdir={subdir} cannot be chosen: the folders of jobs are numbered")
            with sweep.locked(self.folder):
                is_success = self.run(parser.parse_overrides(arguments))
        except (ValueError, OSError, HydraException) as error:
            sys.exit(f"error: {error}")
        except KeyboardInterrupt:
            print(f"go on with hydra.sweep.dir={self.folder}", file=sys.stderr)
            sys.exit(INTERRUPTED)
        if not is_success:
            sys.exit(1)

    @abstractmethod
    def run(self, overrides: list[Override]) -> bool:
        """Runs the jobs of the sweep, and prints its table also if it is interrupted; False if a job failed.

        Raises:
            ValueError: the sweep cannot be as it was asked for.
        """

    def is_sequential(self) -> bool:
        """Whether the launcher runs jobs here, one after another, so that nothing is lost by handing over one."""
        return self.config.hydra.launcher._target_.endswith(".BasicLauncher")

    def launch(self, jobs: Sequence[Overrides]) -> list[dict | None]:
        """Runs jobs and returns their records; None for one of which nobody knows whether it has ended."""
        first = sweep.next_number(self.folder)
        run_dirs = [self.folder / str(first + i) for i in range(len(jobs))]
        try:
            returns = self.launcher.launch([list(job) for job in jobs], initial_job_idx=first)
        except Exception as error:
            print(f"the launcher gave up: {error}", file=sys.stderr)
            print(f"wait for its jobs, then repeat what is missing with hydra.sweep.dir={self.folder}", file=sys.stderr)
            records = [sweep.read_record(run_dir) for run_dir in run_dirs]
            return [record if record and record["status"] in sweep.FINAL else None for record in records]
        records = []
        for run_dir, job, returned in zip(run_dirs, jobs, returns, strict=True):
            is_failed = returned.status == JobStatus.FAILED
            reason = f"{returned._return_value!r}" if is_failed else "the launcher did not run it"
            records.append(sweep.close_record(run_dir, job, self.folder, reason, exit_code=None))
        return records


def _quoted(path: object) -> str:
    """A path as a value that Hydra's parser takes as it is."""
    text = str(path)
    if re.fullmatch(r"[\w/.:-]+", text, re.ASCII):
        return text
    return "'" + re.sub(r"(\\*)('|$)", lambda found: 2 * found[1] + ("\\'" if found[2] else ""), text) + "'"
