"""The W&B workspace shows the panels of the report, of runs that ended ok; without W&B the panels become JSON."""

import json
import os
import subprocess
import sys

import pytest
from tiny import ROOT

from logitless import palette, panels

# A server that knows who one is, and two runs.
LOGGED_IN = """
import types, wandb
from wandb_workspaces.workspaces import Workspace
wandb.login = lambda **options: True
runs = [types.SimpleNamespace(id="1a", tags=["fused"]), types.SimpleNamespace(id="2b", tags=[])]
own = {"default_entity": "somebody", "client": types.SimpleNamespace(app_url="https://wandb.ai")}
wandb.Api = lambda: types.SimpleNamespace(**own, runs={"somebody/mine": runs, "somebody/logitless": []}.__getitem__)
"""


def dashboard(tmp_path, *arguments, code: str = "", **environment) -> subprocess.CompletedProcess:
    """scripts/dashboard.py after `code`, without anybody's login."""
    script = str(ROOT / "scripts" / "dashboard.py")
    program = f"import runpy, sys\n{code}\nsys.argv = [{script!r}, *sys.argv[1:]]\n"
    program += f"sys.path.insert(0, {str(ROOT / 'scripts')!r})\nrunpy.run_path({script!r}, run_name='__main__')"
    kept = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    options = {"cwd": tmp_path, "env": kept | {"HOME": str(tmp_path)} | environment, "stdin": subprocess.DEVNULL}
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **options)


@pytest.mark.parametrize(
    ("code", "environment", "reason"),
    [
        ("", {"WANDB_MODE": "offline"}, "WANDB_MODE=offline"),
        ("", {}, "not logged in"),
        ("sys.modules['wandb_workspaces'] = None", {}, "pip install -e '.[dashboard]'"),
        (LOGGED_IN + "Workspace.save = lambda self: 1 / 0", {}, "no workspace: ZeroDivisionError"),
    ],
    ids=["offline", "logged-out", "no-package", "server"],
)
def test_without_wandb_it_says_why_and_writes_the_panels(tmp_path, code, environment, reason):
    pytest.importorskip("wandb_workspaces")
    result = dashboard(tmp_path, "--out", "panels.json", code=code, **environment)
    assert result.returncode == 0, result.stderr
    assert reason in result.stderr
    assert result.stdout.splitlines()[-1] == "panels.json"
    assert json.loads((tmp_path / "panels.json").read_text()) == json.loads(json.dumps(panels.spec()))


def test_online_it_saves_the_workspace_and_prints_its_address(tmp_path):
    pytest.importorskip("wandb_workspaces")
    saves = """
def save(self):
    self._internal_name = "nw-abc-v"
    print({run: own.color for run, own in self.runset_settings.run_settings.items()}, file=sys.stderr)
Workspace.save = save
"""
    result = dashboard(tmp_path, "--project", "mine", code=LOGGED_IN + saves)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "https://wandb.ai/somebody/mine?nw=abc"
    assert result.stderr.splitlines()[-1] == repr({"1a": palette.COLORS["fused"]})
    assert not (tmp_path / "dashboard.json").exists()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the package's own
def test_a_workspace_has_every_panel_and_only_runs_that_ended_ok_in_our_colors():
    pytest.importorskip("wandb_workspaces")
    from logitless.workspace import workspace

    tags = {"1a": ["naive"], "2b": ["mine", "fused"], "3c": ["mine"]}
    view = workspace("me", "logitless", tags)._to_model().model_dump(by_alias=True)["spec"]["section"]
    assert view["customRunColors"] == {"1a": palette.COLORS["naive"], "2b": palette.COLORS["fused"]}
    (filtered,) = view["runSets"][0]["filters"]["filters"]
    assert (filtered["key"], filtered["op"], filtered["value"]) == ({"section": "summary", "name": "status"}, "=", "ok")
    configs = [panel["config"] for panel in view["panelBankConfig"]["sections"][0]["panels"]]
    assert [config["chartTitle"].partition(" (")[0] for config in configs] == [panel.title for panel in panels.PANELS]
    shown = [config.get("metrics") or [config["yAxis"]] for config in configs]
    assert shown[:5] == [["train/loss"], ["val/loss"]] + [
        [f"summary:{key}"] for key in ("peak_allocated_gib", "peak_live_tensor_gib", "tokens_per_s")
    ]
    assert (configs[5]["metrics"], configs[5]["groupAgg"]) == (["summary_metrics.seq_len"], "max")
    assert configs[5]["groupBy"] == "loss.value._target_"
