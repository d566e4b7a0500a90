"""Views and steps to rebind when tensors of the caller's change: they cannot be bound before a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipeline.lowering import KernelCall, Layout
from pipeline.planning import ExecutionPlan

__all__ = ["Rebinding", "View", "find_rebinding", "large_outputs", "views_of"]

LARGE = 2**16
"""Bytes of an output from which on a copy costs more than binding the steps that make it."""


@dataclass(frozen=True, slots=True)
class View:
    """An alias, and where it lies in the storage of the value that owns it."""

    vid: int
    root: int
    layout: Layout


@dataclass(frozen=True, slots=True)
class Rebinding:
    """Views and steps to rebind when the tensors of some values change."""

    vids: tuple[int, ...]
    views: tuple[View, ...]
    """Views of them, in the order of the calls."""
    steps: tuple[int, ...]
    """Positions of the calls that read or write them or those views."""


def find_rebinding(
    plan: ExecutionPlan, calls: Sequence[KernelCall], vids: set[int], but: Iterable[int] = ()
) -> Rebinding:
    """Views and steps to rebind when the tensors of `vids` change; `calls` are the steps, `but` positions of others."""
    touched = [
        at for at, call in enumerate(calls) if any(plan.root(vid) in vids for vid in (*call.in_vids, *call.out_vids))
    ]
    steps = tuple(at for at in touched if at not in set(but))
    return Rebinding(tuple(sorted(vids)), tuple(view for view in views_of(plan) if view.root in vids), steps)


def views_of(plan: ExecutionPlan) -> list[View]:
    """The aliases, those of one root in the order of the calls."""
    vids = [vid for call in plan.calls for vid in call.out_vids if vid in plan.alias]
    return [View(vid, plan.root(vid), plan.layout(vid)) for vid in vids]


def large_outputs(plan: ExecutionPlan) -> set[int]:
    """Values in the arena that a run may make in a tensor of the caller's: large ones that are outputs as a whole."""
    leaving = (*plan.outputs, *(after for vid, after in plan.updates.items() if vid in plan.inputs))
    return {
        plan.root(vid)
        for vid in leaving
        if plan.root(vid) in plan.offsets
        and plan.strides(vid) is None
        and plan.slots[vid].spec.nbytes == plan.slots[plan.root(vid)].spec.nbytes >= LARGE
    }
