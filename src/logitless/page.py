"""The report's page: figures, what is missing in them, all runs and the calculator, in one file without a network.

The calculator of a head's memory is also docs/calculator.html, a page of its own.
"""

import html
import json
import os
from importlib import resources

import vl_convert

from logitless import run_table
from logitless.figures import Drawing

ASSETS = resources.files("logitless") / "assets"
DRAW = """
for (const [name, spec] of Object.entries(SPECS)) vegaEmbed(`#${name}`, spec, {actions: false, renderer: "svg"});
"""


def page(drawings: dict[str, Drawing], records: list[dict]) -> str:
    """The report as HTML.

    Args:
        drawings: by the name of the figure; those without a chart only say what they left out.
        records: of all runs, whatever their status.
    """
    charts = {name: drawing.chart for name, drawing in drawings.items() if drawing.chart is not None}
    body = [
        "<h1>Logitless: report</h1>",
        f"<p>{run_table.counted(records)}</p>",
        *(f'<figure><div id="{name}"></div><figcaption>{_links(name)}</figcaption></figure>' for name in charts),
        missing(drawings),
        run_table.table(records),
        calculator(),
    ]
    if charts:
        specs = json.dumps({name: chart.to_dict() for name, chart in charts.items()})
        body += [script(vl_convert.javascript_bundle()), script(f"const SPECS = {specs};{DRAW}")]
    return document("Logitless: report", "\n".join(body))


def calculator_page() -> str:
    """The calculator alone as HTML."""
    return document("Logitless: calculator", f"<h1>Logitless: calculator</h1>\n{calculator()}")


def document(title: str, body: str) -> str:
    """A whole document around `body`, which may fetch nothing."""
    text = (ASSETS / "page.html").read_text("utf-8")
    return text.replace("{title}", html.escape(title)).replace("{body}", body)


def calculator() -> str:
    """Controls, bars and their code as HTML; once a page."""
    text = (ASSETS / "calculator.html").read_text("utf-8")
    for name in ("plan", "calculator"):
        text = text.replace(f"{{{name}}}", (ASSETS / f"{name}.js").read_text("utf-8"))
    return text


def script(code: str) -> str:
    """A script element; a string in `code` cannot end it."""
    return "<script>" + code.replace("</script", r"<\/script").replace("<!--", r"<\!--") + "</script>"


def missing(drawings: dict[str, Drawing]) -> str:
    """What was left out of the figures, and what there is to know of them, as HTML."""
    lines = [*left_out_lines(drawings), *notes(drawings)]
    if not lines:
        return ""
    items = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
    return f"<details><summary>What the figures leave out, and notes ({len(lines)})</summary><ul>{items}</ul></details>"


def left_out_lines(drawings: dict[str, Drawing]) -> list[str]:
    """`left out of peak_memory, speed: runs/3, started, and never ended`: a line for each reason.

    Without the names of the figures where all are meant.
    """
    figures, runs = {}, {}
    n_figures = sum(drawing.chart is not None or bool(drawing.left_out) for drawing in drawings.values())
    for name, drawing in drawings.items():
        for run, reason in drawing.left_out.items():
            figures.setdefault((run, reason), []).append(name)
    for (run, reason), names in figures.items():
        runs.setdefault((tuple(names), reason), []).append(run)
    return [
        f"left out{'' if len(names) == n_figures else ' of ' + ', '.join(names)}: {_names(found)}, {reason}"
        for (names, reason), found in runs.items()
    ]


def _names(folders: list[str]) -> str:
    """`runs/3`, or `3 runs in runs (3, 4, 5)`."""
    if len(folders) == 1:
        return folders[0]
    common = os.path.commonpath([os.path.abspath(folder) for folder in folders])
    names = ", ".join(os.path.relpath(folder, common) for folder in folders)
    return f"{len(folders)} runs in {os.path.relpath(common)} ({names})"


def notes(drawings: dict[str, Drawing]) -> list[str]:
    return list(dict.fromkeys(note for drawing in drawings.values() for note in drawing.notes))


def _links(name: str) -> str:
    return f'{name}: <a href="{name}.svg">SVG</a>, <a href="{name}.png">PNG</a>'
