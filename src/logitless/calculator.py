"""The calculator of a head's memory: a part of the report's page, and docs/calculator.html, a page of its own."""

import html
from importlib import resources

ASSETS = resources.files("logitless") / "assets"


def fragment() -> str:
    """Controls, bars and their code as HTML; once a page."""
    text = (ASSETS / "calculator.html").read_text("utf-8")
    for name in ("plan", "calculator"):
        text = text.replace(f"{{{name}}}", (ASSETS / f"{name}.js").read_text("utf-8"))
    return text


def shell(title: str, body: str) -> str:
    """A whole document around `body`, which may fetch nothing."""
    text = (ASSETS / "page.html").read_text("utf-8")
    return text.replace("{title}", html.escape(title)).replace("{body}", body)


def page() -> str:
    return shell("Logitless: calculator", f"<h1>Logitless: calculator</h1>\n{fragment()}")
