"""Weak blocks: values so small next to the value that they are added to that a fault in them stays in tolerance.

A LayerScale of 1e-5, as in the first epochs of a vision transformer, hides its whole block; so does a factor in any
other sum, such as 1 + scale. Such terms are found by the norms of both operands of each Add and Sub, and then their own
values are compared, before constant factors and after them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

from onnx import GraphProto, NodeProto

from passes.graph.index import GraphIndex
from passes.graph.op_facts import LAYOUT_OPS, ONNX_DOMAINS
from passes.graph.traversal import live_nodes
from passes.structures.view import module_of


@dataclass(frozen=True, slots=True)
class SumTerm:
    """A term of a sum: `added` is the value that it adds to `trunk`; `value` is `added` before constant factors."""

    name: str
    """The torch module that computes the term; the node if no module is known."""
    added: str
    trunk: str
    value: str

    @property
    def compared(self) -> tuple[str, ...]:
        """The values that are compared if the term is weak."""
        return tuple(dict.fromkeys((self.value, self.added)))

    def share(self, ratio: float) -> float:
        """The factor on the absolute tolerance of `added`, whose norm is `ratio` of that of `trunk`.

        A term without a constant factor may be small because large values cancel; their rounding errors remain.
        """
        return ratio if self.value != self.added else max(ratio, CANCELLED)


CANCELLED: Final = 0.2
"""16 units of rounding, as a share of the absolute tolerance of float32, which is 84 such units."""


def find_terms(graph: GraphProto, constant: AbstractSet[str], single: Collection[str] = ()) -> tuple[SumTerm, ...]:
    """The terms of the sums in `graph` that may be weak.

    In a residual sum, the term is the operand that is computed from the other operand; in another sum of computed
    values each operand is a term. Scores to which a mask is added are no term: the mask is large where it hides them.

    Args:
        graph: the graph with the sums.
        constant: values that depend on no input.
        single: values of one element; a term may be weak next to these too.
    """
    index = GraphIndex(graph)
    producers, terms = index.producers, list[SumTerm]()
    for node in live_nodes(graph)[::-1]:
        if node.op_type not in ("Add", "Sub") or node.domain not in ONNX_DOMAINS:
            continue
        ways = tuple(node.input), tuple(node.input)[::-1]
        if constant.isdisjoint(node.input):
            residual = next((way for way in ways if _reaches(way[0], way[1], producers)), None)
            chosen = [residual] if residual else [] if _is_masked(node, index) else ways
        else:
            chosen = [way for way in ways if way[1] in single and way[0] not in constant]
        for added, trunk in chosen:
            if added in producers:
                value = _before_factors(added, producers, constant)
                terms.append(SumTerm(module_of([producers[value]]) or value, added, trunk, value))
    return tuple(terms)


def _is_masked(node: NodeProto, index: GraphIndex) -> bool:
    """Whether a Softmax reads a sum, perhaps after further sums and layout operators."""
    front, seen = [node], 0
    while front and seen < MOST_READERS:
        seen += 1
        for consumer in index.consumers[front.pop().output[0]]:
            if consumer.op_type in ("Softmax", "LogSoftmax"):
                return True
            if consumer.op_type in MASKING or consumer.op_type in LAYOUT_OPS:
                front.append(consumer)
    return False


def _reaches(start: str, end: str, producers: Mapping[str, NodeProto]) -> bool:
    front, seen = [start], {start}
    while front and len(seen) < MOST_VISITED:
        node = producers.get(front.pop())
        for name in node.input if node is not None else ():
            if name == end:
                return True
            if name and name not in seen:
                seen.add(name)
                front.append(name)
    return False


def _before_factors(name: str, producers: Mapping[str, NodeProto], constant: Collection[str]) -> str:
    while (node := producers[name]).domain in ONNX_DOMAINS:
        moving = [operand for operand in node.input if operand not in constant]
        is_factor = node.op_type in ("Mul", "Div") and len(moving) == 1
        if not (is_factor or node.op_type in LAYOUT_OPS) or moving[0] not in producers:
            break
        name = moving[0]
    return name


MOST_READERS: Final = 16
"""The most sums and layout operators after a sum that are looked at."""

MASKING: Final = frozenset({"Add", "Sub", "Where", "Max", "Clip", "Cast"})

MOST_VISITED: Final = 500
"""The most values of a branch that are looked at."""
