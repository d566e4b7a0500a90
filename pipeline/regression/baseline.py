"""The report of a run → what of it has to stay as it is: no times, no paths, nothing that differs between machines."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from passes.proof.numbers import Errors
from passes.run.result import PassRow, Status, StructureVerdict
from pipeline.report import SOURCE, BackendReport, Mark, Report

__all__ = ["FORMAT_VERSION", "baseline_of"]

FORMAT_VERSION: Final = 1

Plain = dict[str, Any]

FOLDERS: Final = re.compile(r"(?<![\w.])/(?:[\w.+-]+/)+")
"""Of files that a tool names, which lie somewhere else on another machine, or in another run."""


def baseline_of(report: Report) -> Plain:
    """Plain data: versions, the source, each row of the passes, structures, errors of the final model.

    Errors are told by the power of ten that they do not exceed, since their last digits are another machine's business.
    """
    marks = {mark.row: mark for mark in report.marks}
    return {
        "format_version": FORMAT_VERSION,
        "versions": {name: _version(name, version) for name, version in report.versions.items()},
        "source": _mark(marks[SOURCE]) if SOURCE in marks else {},
        "passes": {
            f"{place + 1:02} {row.name}": _row(row, marks.get(place)) for place, row in enumerate(report.passes)
        },
        "structures": _structures(report.structures),
        "backends": {one.name: _backend(one) for one in report.runtime.backends} if report.runtime else {},
    }


def _version(name: str, version: str) -> str:
    """Without what says for which machine it was built."""
    plain = version.partition("+")[0]
    return ".".join(plain.split(".")[:2]) if name == "python" else plain


def _row(row: PassRow, mark: Mark | None) -> Plain | str:
    if row.status is Status.SKIPPED:
        return "skipped"
    reason = FOLDERS.sub("", row.reason)
    told: Plain = {} if row.status is Status.RAN else {"status": str(row.status), "reason": reason}
    if row.status is Status.RAN and reason:
        told["note"] = reason
    if row.changed:
        told |= {"change": dict(row.diff), **(_mark(mark) if mark else {}), "errors": _errors(row.errors)}
    if row.lost:
        told["lost"] = list(row.lost)
    return told or "idle"


def _mark(mark: Mark) -> Plain:
    return {
        "nodes": sum(mark.ops.values()),
        "bytes": mark.nbytes,
        "fingerprint": mark.fingerprint,
        "ops": dict(mark.ops),
    }


def _structures(verdicts: tuple[StructureVerdict, ...]) -> Plain:
    found: Plain = {}
    for kind, count in Counter(one.kind for one in verdicts).items():
        lost = {one.name: one.broken_by or "" for one in verdicts if one.kind == kind and not one.kept}
        found[kind] = {"found": count, "kept": count - len(lost), **({"lost": lost} if lost else {})}
    return found


def _backend(backend: BackendReport) -> Plain | str:
    return FOLDERS.sub("", backend.shortfall) or _errors(backend.errors)


def _errors(errors: Mapping[str, Errors]) -> Plain:
    return {name: _band(one.max_abs) for name, one in errors.items()}


def _band(error: float) -> str:
    """`0`, or the power of ten that the error does not exceed."""
    if error == 0 or not math.isfinite(error):
        return f"{error:g}"
    return f"<= 1e{math.ceil(math.log10(error)):+03}"
