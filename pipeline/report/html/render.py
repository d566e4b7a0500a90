"""A page as HTML: one text that loads nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from pipeline.report.html.page import Page

__all__ = ["render"]

HERE: Final = Path(__file__).parent


def render(page: Page) -> str:
    """Every text is escaped; what the script reads is JSON in which no `<` is left that could end it."""
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "separators": (",", ":")}
    template = environment.get_template("page.html.j2")
    return template.render(page=page, style=_own("page.css"), script=_own("page.js"))


def _own(name: str) -> Markup:
    """A file of ours, which is no text of a user's."""
    return Markup((HERE / name).read_text(encoding="utf-8"))
