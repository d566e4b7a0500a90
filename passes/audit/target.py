"""What an audit tries: a single pass, or a library's own set of passes, and how the library is called."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from passes.advisories import ROUND_TRIP
from passes.catalog import catalog
from passes.catalog.listing import CatalogEntry, isolate_pass
from passes.context import PassContext
from passes.errors import PolicyError
from passes.external.onnxruntime_graph import NOTHING
from passes.recipe.recipe import OWN_STEPS, default_passes, single_passes, steps_of
from passes.step import Step, flatten

DEFAULT: Final = "default"
"""The passes that a recipe calls by this name, in the order of their library."""


@dataclass(frozen=True, slots=True)
class AuditTarget:
    """A call to try. `distribution` is the library's name in pip, `step` its name in a recipe.

    `passes` are what one call runs of those that a recipe names one by one; `left_out` are the passes that a composite
    step leaves out, and `options` its other options. `inner` are the passes of a step that are searched for the pass at
    fault. `data` and `AuditTarget(**data)` convert to JSON and back.
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

    def make_step(self) -> Step:
        """The step whose library is called."""
        if not self.passes:
            return OWN_STEPS[self.step].from_options(self.options).without(self.left_out)
        first, *following = flatten(steps_of(self.passes))
        return first.join(following)


def targets_of(context: PassContext, *, every: bool = False) -> tuple[AuditTarget, ...]:
    """Each pass that a recipe names alone, the default set, and each step of a recipe that is installed.

    onnxruntime loads a model before it optimizes it, and may refuse it then: that is `onnxruntime/nop`.

    Args:
        every: the passes inside of the steps too, each alone. There are hundreds.
    """
    rows = catalog(context, steps=None if every else ())
    passes = default_passes()
    default = AuditTarget(DEFAULT, passes[0].source, passes[0].source, [step.name for step in passes])
    idle = AuditTarget(f"onnxruntime/{ROUND_TRIP}", "onnxruntime", "onnxruntime", options={"level": NOTHING})
    singles = {step.name for step in single_passes()}
    steps = OWN_STEPS.keys() - missing_steps(context).keys()
    known = [row for row in rows if row.name in singles or row.name.partition("/")[0] in steps]
    others = [_target(row, rows, singles) for row in known if row.runs not in ("missing", "never")]
    return (default, idle, *others)


def missing_steps(context: PassContext) -> Mapping[str, str]:
    """Name → why, for each step of a recipe whose library, an extra, is not installed."""
    missing = {}
    for name, make in OWN_STEPS.items():
        try:
            make().check(context)
        except PolicyError as error:
            missing[name] = f"{name} is not installed, so it is not tried: {error}"
    return missing


def with_inner(subjects: Sequence[AuditTarget], context: PassContext) -> tuple[AuditTarget, ...]:
    """Fill in the inner passes of whole steps. Asking a library takes seconds, so choose `subjects` before."""
    return tuple(
        replace(subject, inner=_inner(subject, context)) if subject.name in OWN_STEPS else subject
        for subject in subjects
    )


def _inner(subject: AuditTarget, context: PassContext) -> tuple[str, ...]:
    step = OWN_STEPS[subject.name]()
    return step.inner(context)


def _target(row: CatalogEntry, rows: Sequence[CatalogEntry], singles: Collection[str]) -> AuditTarget:
    if row.name in singles:
        return AuditTarget(row.name, row.source, row.source, (row.bare,))
    if "/" not in row.name:
        return AuditTarget(row.name, row.source, row.name)
    step = isolate_pass(row, rows)
    return AuditTarget(row.name, row.source, step.name, left_out=tuple(step.left_out), options=dict(step.options))
