"""How much code the product may have: each line costs its next reader time."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.support.paths import ROOT

PACKAGES = ("onnxline", "passes", "pipeline")

MOST_CODE_LINES = 91_410

"""Lines that are neither blank, comment nor docstring. A commit that raises the bound says what the lines buy."""


def test_code_stays_within_its_bound() -> None:
    sizes = {package: sum(map(count_code, sorted((ROOT / package).rglob("*.py")))) for package in PACKAGES}
    assert sum(sizes.values()) <= MOST_CODE_LINES, sizes


def count_code(path: Path) -> int:
    """Lines of a file without blank lines, comments and docstrings; a string that stands alone is a docstring."""
    text = path.read_text(encoding="utf-8")
    left_out = {place for place, line in enumerate(text.splitlines(), 1) if not line.strip() or line.lstrip()[0] == "#"}
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                assert node.end_lineno is not None
                left_out |= set(range(node.lineno, node.end_lineno + 1))
    return len(text.splitlines()) - len(left_out)
