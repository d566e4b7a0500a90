"""What an audit shows: how much was found of each library, and what of it is new; as text, or as data for JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from passes.advisories import KINDS, UNSAFE, Table
from passes.advisories.known import News
from passes.advisories.text import quoted

__all__ = ["FORMAT_VERSION", "audit_as_data", "news_text", "summary_text", "unread_text"]

FORMAT_VERSION: Final = 1
"""Of what `--json` writes."""

SHOWN: Final = 3
"""Cases that a new finding names."""

MOST: Final = 40
"""New findings that are shown."""


def audit_as_data(
    tables: Sequence[Table], unread: Mapping[str, str], found: Sequence[News], out: Path
) -> dict[str, Any]:
    """Everything that the text says, uncut."""
    return {
        "format_version": FORMAT_VERSION,
        "tables": [
            {
                "library": table.distribution,
                "version": table.version,
                "models": sum(table.cases.values()),
                "found": {name: dict(counts) for name, counts in table.counts().items()},
            }
            for table in tables
        ],
        "not_read": dict(unread),
        "not_accepted": [
            {
                "pass": one.entry.name,
                "kind": one.entry.kind,
                "why": one.entry.why,
                "cases": list(one.cases),
                "accepted": one.accepted,
            }
            for one in found
        ],
        "folder": str(out),
    }


def summary_text(tables: Sequence[Table]) -> str:
    """A line for each library, and one for each of its passes with an unsafe finding."""
    lines = []
    for table in tables:
        total = sum(table.counts().values(), Counter[str]())
        said = ", ".join(f"{total[kind]} {kind}" for kind in KINDS if total[kind]) or "nothing found"
        lines.append(f"{table.distribution} {table.version} on {sum(table.cases.values())} models: {said}")
        for name, counts in table.counts().items():
            unsafe = ", ".join(f"{counts[kind]} {kind}" for kind in KINDS if kind in UNSAFE and counts[kind])
            lines += [f"  {name}: {unsafe}"] if unsafe else []
    return "".join(f"{line}\n" for line in lines)


def unread_text(unread: Mapping[str, str]) -> str:
    """A line for each model that cannot be read, with the reason."""
    return "".join(f"not read: {quoted(case)}: {quoted(unread[case])}\n" for case in sorted(unread))


def news_text(found: Sequence[News], out: Path) -> str:
    """What is not accepted, the worst first, and how to accept it."""
    if not found:
        return f"nothing that is not accepted; tables: {out}/\n"
    order = list(KINDS)
    lines = [f"not accepted: {len(found)}"]
    worst_first = sorted(found, key=lambda one: (order.index(one.entry.kind), one.entry.name))
    lines += [_line(one) for one in worst_first[:MOST]]
    lines += [f"  and {len(found) - MOST} more"] if len(found) > MOST else []
    lines.append(f"reproducers and tables: {out}/; to accept it, keep the tables and name their folder with --accepted")
    return "".join(f"{line}\n" for line in lines)


def _line(one: News) -> str:
    more = f" and {len(one.cases) - SHOWN} more" if len(one.cases) > SHOWN else ""
    where = ", ".join(map(quoted, one.cases[:SHOWN])) + more
    against = f"not in {one.accepted}" if one.accepted else "no table of this library is accepted"
    said = (where, one.entry.why, against)
    return f"  {one.entry.name} {one.entry.kind}: " + "; ".join(part for part in said if part)
