"""Nothing but `pipeline/terminal/` writes to the terminal, so that it shows every name safely."""

from __future__ import annotations

import re

from tests.support.paths import ROOT

WRITERS = re.compile(
    r"(?<![\w.])print\(|typer\.echo|click\.echo|secho\(|sys\.(__)?std(out|err)(__)?\.write|(?<!\w)Console\("
    r"|from rich\.(console|progress) import .*\b(Console|Progress)\b|traceback\.print_|os\.write\([12],"
)
"""How code of Python writes to a terminal, and how a console of rich is made."""

PLACES = {
    "pipeline/terminal/screen.py": "the one place",
    "passes/visible.py": "for guard and bisect, which run in a user's processes and must not load rich",
    "passes/worker/server.py": "its streams, and those of its forks, are a file that the client reads",
}


def test_one_place_prints() -> None:
    found = {
        str(path.relative_to(ROOT))
        for package in ("onnxline", "passes", "pipeline")
        for path in (ROOT / package).rglob("*.py")
        if WRITERS.search(path.read_text(encoding="utf-8"))
    }
    assert found == set(PLACES)
