"""A finding as plain data, for JSON."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from passes.bisect.found import Finding, Smallest

__all__ = ["finding_as_data"]


def finding_as_data(finding: Finding, file: str = "") -> dict[str, Any]:
    """The fields of `Finding`; of the smallest model its `file` and the number of its `nodes`. No number is infinite:
    the word stands for it."""
    culprit = None
    if finding.culprit is not None:
        culprit = {"name": finding.culprit.name, **dataclasses.asdict(finding.culprit)}
        for key in ("error_before", "error_after"):
            culprit[key] = _number(culprit[key])
    return {
        "fault": finding.fault,
        "found": culprit is not None,
        "culprit": culprit,
        "smallest": None if finding.smallest is None else _smallest(finding.smallest, file),
        **{key: getattr(finding, key) for key in ("steps", "nothing", "runs", "seconds", "failed", "notes")},
    }


def _smallest(smallest: Smallest, file: str) -> dict[str, Any]:
    removed, added = ([dataclasses.asdict(node) for node in nodes] for nodes in (smallest.removed, smallest.added))
    return {
        "file": file,
        "nodes": smallest.nodes,
        "removed": removed,
        "added": added,
        "changed": smallest.changed,
        "elsewhere": smallest.elsewhere,
        "runs": smallest.runs,
        "seconds": smallest.seconds,
    }


def _number(value: float | None) -> float | str | None:
    return "Infinity" if value is not None and math.isinf(value) else value
