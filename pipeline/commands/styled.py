"""Text with colours on a terminal, and as it is anywhere else."""

from __future__ import annotations

from collections.abc import Mapping

import typer
from rich.console import Console
from rich.text import Text

__all__ = ["print_styled"]


def print_styled(text: str, styles: Mapping[str, str]) -> None:
    """Print lines; on a terminal each in the style of the first of the beginnings that it has.

    Args:
        styles: how a line begins → a style of rich.
    """
    console = Console(highlight=False)
    if not console.is_terminal:
        typer.echo(text, nl=False)
        return
    for line in text.splitlines():
        style = next((style for begin, style in styles.items() if line.startswith(begin)), "")
        console.print(Text(line, style), soft_wrap=True)
