"""An IR as Mermaid text: a flowchart of its nodes, and a pie of their types."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from pipeline.errors import UserMistake
from pipeline.ir import Dim, Graph, Op, Role, Value
from pipeline.torch_ir.document.expected import is_whole
from pipeline.torch_ir.ir import IR, an_ir

__all__ = ["generate_op_distribution_pie", "ir_to_mermaid"]

STORED = (Role.PARAM, Role.STATE, Role.CONST)


def ir_to_mermaid(ir: IR, max_nodes: int = 30, include_weights: bool = True) -> str:
    """A flowchart: inputs, the first `max_nodes` nodes with what they read, outputs. Weights hang on dotted edges.

    Raises:
        UserMistake: it is no IR, or `max_nodes` is no whole number of 0 or more.
    """
    _refuse_other_counts("max_nodes", max_nodes)
    lines = _Flowchart(an_ir(ir, UserMistake).graph).lines(max_nodes, include_weights)
    return "\n".join(["flowchart TD", *(f"    {line}" for line in lines)])


def generate_op_distribution_pie(ir: IR, top_n: int = 10) -> str:
    """How many nodes there are of each type; what comes after the first `top_n` types is one slice.

    Raises:
        UserMistake: it is no IR, or `top_n` is no whole number of 0 or more.
    """
    _refuse_other_counts("top_n", top_n)
    counts = Counter(short(op.kind) for op in an_ir(ir, UserMistake).graph.ops).most_common()
    others = sum(count for _, count in counts[top_n:])
    slices = [*counts[:top_n], *([("Others", others)] if others else [])]
    return "\n".join(
        ["pie showData", '    title "Operator Distribution"', *(f'    "{text(kind)}" : {n}' for kind, n in slices)]
    )


def _refuse_other_counts(what: str, given: Any) -> None:
    if not is_whole(given):
        raise UserMistake(f"{what}: found {given!r}, expected a whole number of 0 or more")


class _Flowchart:
    """The lines of one flowchart; `_ids` are the names that it has used."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._ids: dict[str, str] = {}
        self._drawn: set[str] = set()

    def lines(self, most: int, weights: bool) -> Iterator[str]:
        graph = self._graph
        for vid in graph.inputs:
            value = graph.values[vid]
            yield f'{self._id("input", value.name)}[/"Input: {text(value.name)}<br/>{sizes(value.spec.shape)}"/]'
        for op in graph.ops[:most]:
            yield from self._op(op, weights)
        for place, vid in enumerate(graph.outputs):
            value = graph.values[vid]
            yield f'output_{place}[\\"Output<br/>{sizes(value.spec.shape)}"/]'
            source = self._source(value)
            if source in self._drawn or value.role is Role.INPUT:
                yield f"{source} --> output_{place}"
        if len(graph.ops) > most:
            yield f'note["... {len(graph.ops) - most} more nodes ..."]'

    def _op(self, op: Op, weights: bool) -> Iterator[str]:
        values = self._graph.values
        node = self._id("op", op.name)
        self._drawn.add(node)
        shape = sizes(values[op.outputs[0]].spec.shape) if op.outputs else ""
        yield f'{node}["{text(short(op.kind))}<br/>{shape}"]'
        for value in (values[vid] for vid in op.inputs):
            source, label = self._source(value), sizes(value.spec.shape)
            if value.role not in STORED:
                yield f'{source} -->|"{label}"| {node}'
            elif weights:
                if source not in self._drawn:
                    self._drawn.add(source)
                    yield f'{source}[/"{text(value.name)}<br/>{label}"/]'
                yield f'{source} -.->|"{label}"| {node}'

    def _source(self, value: Value) -> str:
        if value.producer is not None:
            return self._id("op", self._graph.ops[value.producer].name)
        return self._id("input" if value.role is Role.INPUT else "w", value.name)

    def _id(self, kind: str, name: str) -> str:
        """Letters, digits and underlines; two names that differ elsewhere only are still two."""
        plain = f"{kind}_{re.sub(r'[^0-9A-Za-z_]', '_', name)}"
        while self._ids.setdefault(plain, f"{kind} {name}") != f"{kind} {name}":
            plain += "_"
        return plain


def short(kind: str) -> str:
    """`linear` of aten.linear.default, `mul.Tensor` of aten.mul.Tensor."""
    return kind.removeprefix("aten.").removesuffix(".default")


def sizes(shape: Sequence[Dim]) -> str:
    """`1x16x64`; names of dims stand apart."""
    return ("x" if all(isinstance(dim, int) for dim in shape) else " x ").join(map(str, shape))


def text(label: str) -> str:
    """Safe between quotes."""
    return label.replace('"', "#quot;").replace("\n", " ")
