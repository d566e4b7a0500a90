"""What the draws of the proof have covered, in words."""

from __future__ import annotations

from collections import Counter
from typing import Final

from passes.proof.coverage import Coverage, LimitCoverage, TableCoverage

__all__ = ["coverage_facts"]

MOST_NOTES: Final = 12
"""Of what is not covered; `report.json` has all."""


def coverage_facts(coverage: Coverage | None) -> dict[str, str]:
    """Label → text."""
    if coverage is None or not coverage.draws:
        return {}
    facts = {"verify.inputs": f"{len(coverage.given)} of {len(coverage.draws)} draws"} if coverage.given else {}
    facts |= {f"size of {name or 'unnamed dims'}": _listed(sizes) for name, sizes in coverage.sizes.items()}
    facts |= {f"mask {name}": ", ".join(kinds) for name, kinds in coverage.masks.items()}
    if coverage.outliers:
        facts["ten times their range"] = ", ".join(coverage.outliers)
    facts |= {f"table {table.name}": _table(table) for table in coverage.tables}
    if coverage.branches:
        taken = sum(one.then_taken + one.else_taken for one in coverage.branches)
        facts["branches of If"] = f"{taken} of {2 * len(coverage.branches)} taken"
    facts |= {f"loop {loop.node}": f"{_listed(sorted(set(loop.turns)))} turns" for loop in coverage.loops}
    facts |= _limits(coverage.limits)
    notes = coverage.not_covered
    more = f"; and {len(notes) - MOST_NOTES} more in report.json" if len(notes) > MOST_NOTES else ""
    facts["not covered"] = "; ".join(notes[:MOST_NOTES]) + more or "nothing that is known"
    return facts


def _listed(numbers: tuple[int, ...] | list[int]) -> str:
    return ", ".join(map(str, numbers))


def _table(table: TableCoverage) -> str:
    if table.read is None:
        return f"{table.rows:,} rows, inside of a body; compared as a weight" if table.compared else "inside of a body"
    rest = "; the others compared as a weight" if table.compared else ""
    return f"{table.read:,} of {table.rows:,} rows read{rest if table.read < table.rows else ''}"


def _limits(limits: tuple[LimitCoverage, ...]) -> dict[str, str]:
    """By operator: how many of its limits were reached."""
    there: Counter[str] = Counter()
    reached: Counter[str] = Counter()
    for limit in limits:
        sides = [side for side in (limit.below, limit.above) if side is not None]
        there[limit.op] += len(sides)
        reached[limit.op] += sum(sides)
    return {f"limits of {op}": f"{reached[op]} of {count} reached" for op, count in there.items()}
