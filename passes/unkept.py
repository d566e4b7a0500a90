"""What the same recipe makes of one structure when nothing keeps it, tried on the structure alone."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from onnx import NodeProto

from passes.errors import StepFailed
from passes.model.analysis import AnalyzedModel
from passes.model.extraction import cut
from passes.policy.known_effects import DESTROYS
from passes.provenance import Carrier
from passes.run.narrow import culprits
from passes.run.tracked import Watched
from passes.step import Composite, Step, Workbench
from passes.structures import Instance
from passes.structures.subgraph import extent_of
from passes.structures.view import GraphView
from passes.weights.detached import DetachedModel

__all__ = ["Unkept", "part_of", "without_keep"]

BUDGET_S: Final = 2.0
"""Seconds after which no further step is tried."""


@dataclass(frozen=True, slots=True)
class Unkept:
    """`broken_by` is the step that destroys the structure, `onnxsim/fuse_qkv` where its inner pass is known; `model` is
    what it makes of the part, with the marks of provenance."""

    broken_by: str
    model: DetachedModel


def without_keep(instance: Instance, view: GraphView, steps: Sequence[Step], bench: Workbench) -> Unkept | None:
    """Run `steps` on the nodes of `instance` alone, unpinned, up to the first that destroys it.

    None if none does, or if the part cannot be cut out or judged. What a step makes of a part it need not make of the
    whole model: a merging pass may ask for something around.
    """
    part = part_of(instance, view)
    if part is None:
        return None
    alone = _Alone(instance, bench)
    if alone.is_lost(part):
        return None
    subject, carrier = AnalyzedModel(part), Carrier()
    deadline = time.monotonic() + BUDGET_S
    for step in steps:
        if time.monotonic() > deadline:
            return None
        made = _applied(step, subject.model, bench)
        if made is None or made is subject.model:
            continue
        after = AnalyzedModel(made)
        carrier.carry(subject, after, step.name)
        if alone.is_lost(made):
            return Unkept(alone.author(step, subject.model), made)
        subject = after
    return None


@dataclass(frozen=True, slots=True)
class _Alone:
    """One structure in a model of its own."""

    instance: Instance
    bench: Workbench

    def is_lost(self, model: DetachedModel) -> bool:
        one = self.instance
        if one.core is not None:  # there are no others like it in the part
            one = replace(one, core=replace(one.core, copies=1))
        return bool(Watched({one.kind: (one,)}, frozenset(), frozenset()).lost(model))

    def author(self, step: Step, model: DetachedModel) -> str:
        """The step, or the inner pass without which it would not destroy the structure."""
        if not isinstance(step, Composite):
            return step.name
        suspects = [name for name, kinds in DESTROYS.items() if self.instance.kind in kinds]

        def is_good(names: tuple[str, ...]) -> bool:
            made = _applied(step.without(names), model, self.bench)
            return made is not None and not self.is_lost(made)

        # Only known suspects: to search all inner passes would cost more than the name is worth.
        names = [name for name in step.inner(self.bench) if name in suspects]
        found = culprits(names, names, is_good) if names else None
        return f"{step.name}/{found[0]}" if found else step.name


def _applied(step: Step, model: DetachedModel, bench: Workbench) -> DetachedModel | None:
    """What the step makes; None if it fails on so small a model."""
    try:
        return step.apply(model, bench)
    except StepFailed:
        return None


def part_of(instance: Instance, view: GraphView) -> DetachedModel | None:
    """The nodes of `instance` as a model, with those that make their constants; None where a type is not known."""
    nodes = extent_of(instance, view)
    wanted = {id(node) for node in (*nodes, *_constants_of(nodes, view))}
    return cut(view.model, [node for node in view.nodes if id(node) in wanted], view.types, led_in=True)


def _constants_of(nodes: Sequence[NodeProto], view: GraphView) -> Iterator[NodeProto]:
    """The nodes that make the constants that `nodes` read; a Shape is one, what it is asked of is not."""
    front = [name for node in nodes for name in node.input if name in view.folded]
    seen = set(front)
    while front:
        maker = view.producers.get(front.pop())
        if maker is not None:
            yield maker
            news = [name for name in maker.input if name in view.folded and name not in seen]
            seen.update(news)
            front += news
