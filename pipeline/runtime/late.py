"""What cannot be bound before a run: views and steps that hang on tensors of the caller's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipeline.lowering import KernelCall, Layout
from pipeline.planning import ExecutionPlan

__all__ = ["Late", "View", "handed_over", "late", "views_of"]

LARGE = 2**16
"""Bytes of an output from which on a copy costs more than binding the steps that make it."""


@dataclass(frozen=True, slots=True)
class View:
    """An alias, and where it lies in the storage of the value that owns it."""

    vid: int
    root: int
    layout: Layout


@dataclass(frozen=True, slots=True)
class Late:
    """What hangs on some values that own their storage, and is bound anew when they are other tensors."""

    vids: tuple[int, ...]
    views: tuple[View, ...]
    """Views of them, in the order of the calls."""
    steps: tuple[int, ...]
    """Positions of the calls that read or write them or those views."""


def late(plan: ExecutionPlan, calls: Sequence[KernelCall], vids: set[int], but: Iterable[int] = ()) -> Late:
    """What hangs on `vids`, of the `calls` that have something to do, without those at the positions `but`."""
    touched = [
        at for at, call in enumerate(calls) if any(plan.root(vid) in vids for vid in (*call.in_vids, *call.out_vids))
    ]
    steps = tuple(at for at in touched if at not in set(but))
    return Late(tuple(sorted(vids)), tuple(view for view in views_of(plan) if view.root in vids), steps)


def views_of(plan: ExecutionPlan) -> list[View]:
    """The aliases, those of one root in the order of the calls."""
    vids = [vid for call in plan.calls for vid in call.out_vids if vid in plan.alias]
    return [View(vid, plan.root(vid), plan.layout(vid)) for vid in vids]


def handed_over(plan: ExecutionPlan) -> set[int]:
    """Values in the arena that a run may make in a tensor of the caller's: large ones that are outputs as a whole."""
    leaving = (*plan.outputs, *(after for vid, after in plan.updates.items() if vid in plan.inputs))
    return {
        plan.root(vid)
        for vid in leaving
        if plan.root(vid) in plan.offsets
        and plan.strides(vid) is None
        and plan.slots[vid].spec.nbytes == plan.slots[plan.root(vid)].spec.nbytes >= LARGE
    }
