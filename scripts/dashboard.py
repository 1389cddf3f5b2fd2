"""Saves the report's panels as a workspace of Weights & Biases, for runs that were logged online.

    python scripts/dashboard.py --entity my-team --project logitless

The runs that are there get the report's colours. Needs `pip install -e '.[dashboard]'` and `wandb login`; prints the
workspace's address. Where either is missing, with WANDB_MODE=offline, or where the server cannot be reached, it says so
and writes the panels to --out as JSON.
"""

import _path  # isort: skip  # noqa: F401

import argparse
import json
import os
import sys
from pathlib import Path

from logitless.report import panels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entity", help="user or team of the project; your default without it")
    parser.add_argument("--project", default="logitless", help="as logger.project of the runs (logitless)")
    parser.add_argument("--out", type=Path, default=Path("dashboard.json"), help="file for the panels (dashboard.json)")
    arguments = parser.parse_args()
    try:
        print(save(arguments.entity, arguments.project))
    except RuntimeError as error:
        print(f"no workspace: {error}", file=sys.stderr)
        try:
            arguments.out.write_text(json.dumps(panels.spec(), indent=2) + "\n")
        except OSError as problem:
            parser.error(f"--out: {problem}")
        print(arguments.out)


def save(entity: str | None, project: str) -> str:
    """The address of the workspace, saved. RuntimeError where it cannot be, and why."""
    if os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun"):
        raise RuntimeError(f"WANDB_MODE={os.environ['WANDB_MODE']}")
    try:
        import wandb

        from logitless.report.workspace import workspace
    except ModuleNotFoundError as error:
        raise RuntimeError(f"{error}: pip install -e '.[dashboard]'") from error
    try:
        if not wandb.login(prompt=False, verify=False):
            raise RuntimeError("not logged in to Weights & Biases: wandb login")
        api = wandb.Api()
        entity = entity or api.default_entity
        found = workspace(entity, project, {run.id: run.tags for run in api.runs(f"{entity}/{project}")})
        found.save()
        return found.url
    except RuntimeError:
        raise
    except Exception as error:  # whatever an unreachable server, a bad key or a foreign project makes of it
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


if __name__ == "__main__":
    main()
