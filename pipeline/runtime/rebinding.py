"""Views and steps to rebind when the caller's tensors change: they cannot be bound before a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipeline.lowering import KernelCall, Layout
from pipeline.planning import ExecutionPlan

__all__ = ["Rebinding", "View", "find_rebinding", "large_outputs", "views_of"]

LARGE = 2**16
"""Bytes of an output from which a copy costs more than rebinding the steps that write it."""


@dataclass(frozen=True, slots=True)
class View:
    """An alias, and its layout in the storage of its root."""

    vid: int
    root: int
    layout: Layout


@dataclass(frozen=True, slots=True)
class Rebinding:
    """Views and steps to rebind when the tensors of some values change."""

    vids: tuple[int, ...]
    views: tuple[View, ...]
    """Views of these values, in the order of the calls."""
    steps: tuple[int, ...]
    """Positions of the calls that read or write these values or views."""


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
    """The aliases of a plan, in the order of the calls."""
    vids = [vid for call in plan.calls for vid in call.out_vids if vid in plan.alias]
    return [View(vid, plan.root(vid), plan.layout(vid)) for vid in vids]


def large_outputs(plan: ExecutionPlan) -> set[int]:
    """Values in the arena that a run may write into a new tensor for the caller: large ones that are whole outputs."""
    leaving = (*plan.outputs, *(after for vid, after in plan.updates.items() if vid in plan.inputs))
    return {
        plan.root(vid)
        for vid in leaving
        if plan.root(vid) in plan.offsets
        and plan.strides(vid) is None
        and plan.slots[vid].spec.nbytes == plan.slots[plan.root(vid)].spec.nbytes >= LARGE
    }
