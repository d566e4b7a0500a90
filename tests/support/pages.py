"""The pages that users read, as data."""

from __future__ import annotations

import re

from tests.support.paths import ROOT

FOLDERS = (
    ".",
    "docs",
    "docs/start",
    "docs/tutorials",
    "docs/how-to",
    "docs/reference",
    "docs/explanation",
    "examples",
    "benchmarks",
)
PAGES = sorted(path for folder in FOLDERS for path in (ROOT / folder).glob("*.md"))


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of one language."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def rows(page: str) -> list[list[str]]:
    """The cells of every table row, the heads and rules left out, backticks taken off."""
    table: list[list[str]] = []
    previous = ""
    for line in (ROOT / page).read_text(encoding="utf-8").splitlines():
        if line.startswith("|") and not line.startswith("| ---") and previous.startswith("|"):
            table.append([cell.strip().strip("`") for cell in line.strip("|").split(" | ")])
        previous = line
    return table
