"""`op:Softmax` and `node:layer0_*`: every node of an op, or of a name, is a structure of its own."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from onnx import NodeProto

from passes.structures.base import Found, Instance
from passes.structures.core_check import lost_cores
from passes.structures.sketch import Sketch, instances_of
from passes.structures.view import GraphView, op_of
from passes.suggest import nearest
from passes.weights.detached import DetachedModel

__all__ = ["ChosenNodes", "name_of", "op_of"]

SHOWN: Final = 6


@dataclass(frozen=True, slots=True)
class ChosenNodes:
    """The nodes whose `label` matches the glob `pattern`. Once found, neither counts any more: the checker looks for
    nodes of the same op with the same weights."""

    kind: str
    pattern: str
    label: Callable[[NodeProto], str]

    @property
    def what(self) -> str:
        return f"nodes that match {self.kind}"

    def find(self, model: DetachedModel) -> Found:
        return self.search(GraphView(model))

    def search(self, view: GraphView) -> Found:
        chosen = [node for node in view.nodes if self._matches(self.label(node))]
        instances = instances_of(self.kind, map(_alone, chosen), view)
        return Found(instances, "" if instances else self._instead(view, len(chosen)))

    def lost(self, instances: Sequence[Instance], model: DetachedModel) -> dict[str, str]:
        return {name: why for (_, name), why in lost_cores(instances, model).items()}

    def _matches(self, label: str) -> bool:
        return bool(label) and fnmatch.fnmatchcase(label, self.pattern)

    def _instead(self, view: GraphView, constants: int) -> str:
        if constants:
            return f"{constants} of them, but all compute a constant, which may be folded"
        labels = Counter(label for node in view.nodes if (label := self.label(node)))
        if not labels:
            return "nodes without names"
        there = ", ".join(f"{count} {label}" if count > 1 else label for label, count in labels.most_common(SHOWN))
        return f"{there}{' …' if len(labels) > SHOWN else ''}{nearest(self.pattern, labels)}"


def name_of(node: NodeProto) -> str:
    return node.name


def _alone(node: NodeProto) -> Sketch:
    """A node as a structure by itself."""
    return Sketch(node, (node,), (*node.input, *node.output), name=node.name or node.output[0])
