"""Weak blocks: residual branches so small next to the value they are added to that a fault in them stays in tolerance.

A LayerScale of 1e-5, as in the first epochs of a vision transformer, hides its whole block. Such branches are found by
the norms of both operands of each residual Add, and then their own values are compared, before the scale and after it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

from onnx import NodeProto

from passes.graph.index import GraphIndex
from passes.graph.op_facts import LAYOUT_OPS, ONNX_DOMAINS
from passes.graph.traversal import live_nodes
from passes.structures.view import module_of
from passes.weights.detached import DetachedModel


@dataclass(frozen=True, slots=True)
class ResidualBranch:
    """A residual branch: `added` is the value that it adds to `trunk`; `value` is `added` before constant factors."""

    name: str
    """The torch module that computes it; else the node."""
    added: str
    trunk: str
    value: str

    @property
    def compared(self) -> tuple[str, ...]:
        """The values that are compared if the branch is weak."""
        return tuple(dict.fromkeys((self.value, self.added)))

    def share(self, ratio: float) -> float:
        """The factor on the absolute tolerance of `added`, whose norm is `ratio` of that of `trunk`.

        A branch without a constant factor may be small because large numbers cancel; their rounding errors remain.
        """
        return ratio if self.value != self.added else max(ratio, CANCELLED)


CANCELLED: Final = 0.2
"""The share of the absolute tolerance of float32, which is 84 units of rounding, that 16 units are."""


def find_branches(model: DetachedModel, constant: AbstractSet[str]) -> tuple[ResidualBranch, ...]:
    """The residual branches of the graph: an Add of a value and of what is computed from it."""
    makers = GraphIndex(model.proto.graph).producers
    branches = []
    for node in live_nodes(model.proto.graph)[::-1]:
        if node.op_type != "Add" or node.domain not in ONNX_DOMAINS or not constant.isdisjoint(node.input):
            continue
        for added, trunk in (tuple(node.input), tuple(node.input)[::-1]):
            if added in makers and _reaches(added, trunk, makers):
                value = _before_factors(added, makers, constant)
                branches.append(ResidualBranch(module_of([makers[value]]) or value, added, trunk, value))
                break
    return tuple(branches)


def _reaches(start: str, end: str, makers: Mapping[str, NodeProto]) -> bool:
    front, seen = [start], {start}
    while front and len(seen) < MOST_VISITED:
        node = makers.get(front.pop())
        for name in node.input if node is not None else ():
            if name == end:
                return True
            if name and name not in seen:
                seen.add(name)
                front.append(name)
    return False


def _before_factors(name: str, makers: Mapping[str, NodeProto], constant: Collection[str]) -> str:
    while (node := makers[name]).domain in ONNX_DOMAINS:
        moving = [operand for operand in node.input if operand not in constant]
        is_factor = node.op_type in ("Mul", "Div") and len(moving) == 1
        if not (is_factor or node.op_type in LAYOUT_OPS) or moving[0] not in makers:
            break
        name = moving[0]
    return name


MOST_VISITED: Final = 500
"""The most values of a branch that are looked at."""
