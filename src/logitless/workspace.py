"""The panels as a workspace of Weights & Biases. Needs the extra `dashboard`, and the network only to save."""

import wandb_workspaces.reports.v2 as reports
import wandb_workspaces.workspaces as workspaces

from logitless import palette
from logitless.panels import AXES, FILTERS, PANELS, Panel

# A run's config is its whole configuration, in which the backend is the function that computes the loss.
GROUPS = {"backend": "loss._target_"}


def workspace(entity: str, project: str, tags: dict[str, list[str]]) -> workspaces.Workspace:
    """The dashboard, unsaved: one section, of runs that ended ok only, in the colours of the figures.

    Args:
        tags: by the IDs of the runs that there are; a backend's name gives its colour.
    """
    filters = workspaces.And(*(workspaces.Summary(key) == value for key, value in FILTERS.items()))
    colors = {run: palette.COLORS[tag] for run, own in tags.items() for tag in own if tag in palette.COLORS}
    run_settings = {run: workspaces.RunSettings(color=color) for run, color in colors.items()}
    return workspaces.Workspace(
        entity=entity,
        project=project,
        name="Loss backends",
        sections=[workspaces.Section(name="Loss backends", panels=[_panel(panel) for panel in PANELS], is_open=True)],
        runset_settings=workspaces.RunsetSettings(filters=filters, run_settings=run_settings),
    )


def _panel(panel: Panel) -> reports.LinePlot | reports.ScatterPlot | reports.BarPlot:
    if panel.kind == "curves":
        titles = {"title_x": AXES[panel.x], "title_y": panel.unit}
        return reports.LinePlot(title=panel.title, x=panel.x, y=[panel.y], **titles)
    if panel.kind == "bars":
        group = {"groupby": reports.Config(GROUPS[panel.group]), "groupby_aggfunc": "max"}
        lengths = [reports.SummaryMetric(panel.x)]
        return reports.BarPlot(title=panel.title, metrics=lengths, title_x=AXES[panel.x], **group)
    x, y = reports.SummaryMetric(panel.x), reports.SummaryMetric(panel.y)
    return reports.ScatterPlot(title=f"{panel.title} ({panel.unit})", x=x, y=y)
