"""Who lives where in the arena of a plan, and when: storage classes with their bytes, calls and lifetimes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.argument_checks import A_LIST, WHOLE, a, expects
from pipeline.planning.arena import Lifetime
from pipeline.planning.plan import ExecutionPlan


@dataclass(frozen=True, slots=True)
class Occupant:
    """A storage class in the arena, named by its root."""

    root: int
    name: str
    offset: int
    nbytes: int
    life: Lifetime
    """What leaves the graph, or is the new value of a state, lives to the number of calls."""
    calls: tuple[int, ...]
    """The calls that read or write it, in order."""


@expects(plan=a(ExecutionPlan, "an ExecutionPlan"))
def occupants(plan: ExecutionPlan) -> dict[int, Occupant]:
    """By root, in the order of offsets in the plan; those without bytes are left out."""
    calls: dict[int, list[int]] = {root: [] for root in plan.offsets}
    for at, call in enumerate(plan.calls):
        for root in {plan.root(vid) for vid in (*call.in_vids, *call.out_vids)} & calls.keys():
            calls[root].append(at)
    leaving = {plan.root(vid) for vid in (*plan.outputs, *plan.updates.values())}
    return {
        root: Occupant(
            root,
            plan.slots[root].name,
            plan.offsets[root],
            plan.slots[root].spec.nbytes,
            Lifetime(seen[0], len(plan.calls) if root in leaving else seen[-1]),
            tuple(seen),
        )
        for root, seen in calls.items()
        if plan.slots[root].spec.nbytes
    }


@expects(everyone=A_LIST, calls=WHOLE)
def alive_bytes(everyone: Sequence[Occupant], calls: int) -> list[int]:
    """By call, the bytes that are alive in it."""
    change = [0] * (calls + 2)
    for occupant in everyone:
        change[occupant.life.first] += occupant.nbytes
        change[min(occupant.life.last, calls) + 1] -= occupant.nbytes
    alive, found = 0, []
    for step in change[:calls]:
        alive += step
        found.append(alive)
    return found
