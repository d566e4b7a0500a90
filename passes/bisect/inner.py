"""Which passes inside of a composite step are at fault."""

from __future__ import annotations

from dataclasses import dataclass

from passes.bisect.faults import Fault
from passes.bisect.route import Made, Runs
from passes.bisect.search import Guilty
from passes.errors import StepTimedOut
from passes.model.canonical import canonical_digest
from passes.policy.known_passes import DESTROYS
from passes.run.narrow import culprits, doer

__all__ = ["Inner", "find_inner"]


@dataclass(frozen=True, slots=True)
class Inner:
    """`doer` has done it; `others` would, were it left out. Empty if the step cannot be narrowed."""

    doer: str = ""
    others: tuple[str, ...] = ()


def find_inner(guilty: Guilty, fault: Fault, runs: Runs) -> Inner:
    """Ask by running the step without some of its passes; known suspects are tried first."""
    step = guilty.step
    # To wait for many more time limits would cost more than the name is worth.
    if not step.is_composite or isinstance(guilty.made.failure, StepTimedOut):
        return Inner()
    tried: dict[tuple[str, ...], Made] = {}

    def without(names: tuple[str, ...]) -> Made:
        key = tuple(sorted(names))
        if key not in tried:
            runs.observer(f"looking inside of {step.name}", f"without {', '.join(names)}", 0, 0)
            tried[key] = runs.run([step.without(names)], guilty.before)
        return tried[key]

    def is_good(names: tuple[str, ...]) -> bool:
        made = without(names)
        return made.failure is None and fault.seen(made) is None

    def does_the_same(names: tuple[str, ...]) -> bool:
        made = without(names)
        if made.failure or guilty.made.failure:
            return made.failure is not None and guilty.made.failure is not None
        return canonical_digest(made.model) == canonical_digest(guilty.made.model)

    suspects = [name for name, destroyed in DESTROYS.items() if set(fault.kinds) & set(destroyed)]
    found = culprits(step.inner(runs.bench), suspects or step.suspects, is_good)
    if found is None:
        return Inner()
    one = doer(found, does_the_same)
    return Inner(one, tuple(name for name in found if name != one))
