"""What an audit tries: a single pass, or a library's own set of passes, and how the library is called."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from passes.advisories import ROUND_TRIP
from passes.catalog import catalog
from passes.catalog.demo import isolate_pass
from passes.catalog.listing import CatalogEntry
from passes.context import PassContext
from passes.external import onnxoptimizer
from passes.external.onnxruntime_graph import NOTHING
from passes.recipe.recipe import OWN_STEPS

__all__ = ["DEFAULT", "AuditTarget", "targets_of", "with_inner"]

DEFAULT: Final = "default"
"""onnxoptimizer's default set in its own order, as a recipe calls it."""


@dataclass(frozen=True, slots=True)
class AuditTarget:
    """A call to try. `distribution` is the library's name in pip, `step` its name in a recipe.

    `passes` are onnxoptimizer's; `left_out` are the passes that a composite step leaves out, and `options` its other
    options. `inner` are the passes of a step that are searched for the one at fault. `data` and `AuditTarget(**data)`
    convert to JSON and back.
    """

    name: str
    distribution: str
    step: str
    passes: Sequence[str] = ()
    left_out: Sequence[str] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    inner: Sequence[str] = ()

    def data(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def targets_of(context: PassContext, *, every: bool = False) -> tuple[AuditTarget, ...]:
    """Each pass of onnxoptimizer alone, its default set, and each step of a recipe that is installed.

    onnxruntime loads a model before it optimizes it, and may refuse it then: that is `onnxruntime/nop`.

    Args:
        every: the passes inside of the steps too, each alone. There are hundreds.
    """
    rows = catalog(context, steps=None if every else ())
    default = AuditTarget(DEFAULT, "onnxoptimizer", "onnxoptimizer", onnxoptimizer.default_set())
    idle = AuditTarget(f"onnxruntime/{ROUND_TRIP}", "onnxruntime", "onnxruntime", options={"level": NOTHING})
    others = [_subject(row, rows) for row in rows if row.runs not in ("missing", "never") and _is_known(row)]
    return (default, idle, *others)


def with_inner(subjects: Sequence[AuditTarget], context: PassContext) -> tuple[AuditTarget, ...]:
    """Fill in the inner passes of whole steps. Asking a library takes seconds, so choose `subjects` before."""
    return tuple(
        replace(subject, inner=_inner(subject, context)) if subject.name in OWN_STEPS else subject
        for subject in subjects
    )


def _inner(subject: AuditTarget, context: PassContext) -> tuple[str, ...]:
    step = OWN_STEPS[subject.name]()
    return step.inner(context)


def _is_known(row: CatalogEntry) -> bool:
    """Whether the pass is one of the supported libraries', and not announced by another package."""
    return row.source == "onnxoptimizer" or row.name.partition("/")[0] in OWN_STEPS


def _subject(row: CatalogEntry, rows: Sequence[CatalogEntry]) -> AuditTarget:
    if row.source == "onnxoptimizer":
        return AuditTarget(row.name, row.source, row.source, (row.bare,))
    if "/" not in row.name:
        return AuditTarget(row.name, row.source, row.name)
    step = isolate_pass(row, rows)
    return AuditTarget(
        row.name, row.source, step.name, left_out=tuple(step.left_out), options=getattr(step, "options", {})
    )
