"""The rows of a batch as a table for people, and below it what was wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from io import StringIO
from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table

from pipeline.batch.rows import Row

__all__ = ["WIDTH", "batch_text", "print_batch"]


def batch_text(rows: Sequence[Row]) -> str:
    """All of it, as plain text."""
    out = StringIO()
    print_batch(rows, Console(file=out, width=WIDTH, color_system=None))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def print_batch(rows: Sequence[Row], console: Console) -> None:
    """The table, a paragraph for each row that is not done, and how many of each there are."""
    console.print(_table(rows))
    faults = [f"{row.config}: {row.trace}{row.why}" for row in rows if row.exit_code]
    counts = Counter(row.state for row in rows)
    told = ", ".join(f"{count} {state}" for state, count in counts.items()) + f" of {len(rows)}"
    for line in (*faults, told):
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def _table(rows: Sequence[Row]) -> Table:
    table = Table("run", "state", "nodes", "kept", "reverted", "worst error", "seconds", box=box.SIMPLE_HEAD)
    for row in rows:
        state = f"{row.state} before" if row.known else row.state
        if row.found.get("unsupported"):
            state += f" without {', '.join(row.found['unsupported'])}"
        tried = f", attempt {row.attempts}" if row.attempts > 1 else ""
        seconds = f"{row.seconds:.1f}" if row.attempts else ""
        table.add_row(row.name, f"[{STYLES[row.exit_code]}]{state}[/]{tried}", *_found(row), seconds)
    return table


def _found(row: Row) -> tuple[str, str, str, str]:
    if not row.found:
        return ("", "", "", "")
    found, error = row.found, row.found["worst_error"]
    return (
        f"{found['nodes_before']} → {found['nodes_after']}",
        f"{found['kept']}/{found['structures']}" if found["structures"] else "",
        str(found["reverted"] or ""),
        "" if error is None else f"{error:.1e}",
    )


STYLES: Final = {0: "green", 1: "yellow", 2: "red", 3: "red"}
"""By exit code."""

WIDTH: Final = 160
"""Of the table where no terminal says how wide it is."""
