"""An IR as Mermaid text: a flowchart of its nodes, and a pie of their types.

Nodes may be drawn by module; modules are folded until the picture has few enough boxes to be read.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Final

from passes.visible import visible
from pipeline.errors import UsageError
from pipeline.ir import Dim, Graph, Op, Role, Value
from pipeline.torch_ir.ir import IR, an_ir

SMALL: Final = 60
"""Nodes of a graph that is drawn as it is, with all its layers."""


@dataclass(slots=True)
class ModuleBox:
    """A call of a module: consecutive ops. `name` is its path relative to the outer box; `items` are op indices and
    inner boxes.

    A folded box shows none of its items, because there is no room, or because the box before it looks the same; then
    it may stand for several calls.
    """

    name: str
    path: str
    items: list[int | ModuleBox]
    is_folded: bool = False
    like: str = ""
    """The path of the box before it, if that looks the same."""
    kinds: tuple[str, ...] = field(default=(), repr=False)
    """The kinds of all its ops, in order."""

    @property
    def detail(self) -> str:
        """The second line of a folded box."""
        return f"like {self.like}" if self.like else f"{len(self.kinds)} nodes"

    @property
    def ops(self) -> Iterator[int]:
        for item in self.items:
            if isinstance(item, ModuleBox):
                yield from item.ops
            else:
                yield item


def parts_of(graph: Graph, most: int) -> tuple[list[int | ModuleBox], int]:
    """What to draw, and how many ops are left out since even folded there is no room for them.

    Unless the graph is small, consecutive modules that look the same are merged: the first is drawn, the others become
    one box next to it. If there is no room for all nodes, modules are opened from the outside inwards while there is.
    """
    items = _group_by_module(graph, range(len(graph.ops)), "")
    if len(graph.ops) > min(most, SMALL):
        items = _with_repeats_merged(items)
        shown = len(items)
        waiting = [item for item in items if isinstance(item, ModuleBox)]
        while waiting:
            part = waiting.pop(0)
            part.is_folded = bool(part.like) or shown + len(part.items) - 1 > most
            if not part.is_folded:
                shown += len(part.items) - 1
                waiting += [item for item in part.items if isinstance(item, ModuleBox)]
    left = sum(1 if isinstance(item, int) else len(item.kinds) for item in items[most:])
    return items[:most], left


def _with_repeats_merged(items: Sequence[int | ModuleBox]) -> list[int | ModuleBox]:
    merged: list[int | ModuleBox] = []
    for item in items:
        last = merged[-1] if merged else None
        if isinstance(item, int) or not isinstance(last, ModuleBox):
            merged.append(item)
        elif last.like and item.kinds * len(last.items) == last.kinds:
            last.items.append(item)
            last.kinds += item.kinds
            last.name = f"{last.name.partition(' … ')[0]} … {item.name}"
        elif item.kinds == last.kinds:
            merged.append(ModuleBox(item.name, item.path, [item], like=last.path, kinds=item.kinds))
        else:
            merged.append(item)
    for item in merged:
        if isinstance(item, ModuleBox) and not item.like:
            item.items = _with_repeats_merged(item.items)
    return merged


def _group_by_module(graph: Graph, ops: Sequence[int], path: str) -> list[int | ModuleBox]:
    """Ops in the order of the graph; neighbours in one module below `path` are put into a box."""
    depth = len(path.split(".")) if path else 0
    items: list[int | ModuleBox] = []
    for below, run in groupby(ops, key=lambda at: ".".join(graph.ops[at].origin.split(".")[: depth + 1])):
        members = list(run)
        if len(members) == 1 or len(below.split(".")) <= depth or not below:
            items += members
            continue
        inner = _group_by_module(graph, members, below)
        while len(inner) == 1 and isinstance(inner[0], ModuleBox):  # nothing but another module
            below, inner = inner[0].path, inner[0].items
        name = below.removeprefix(f"{path}.") if path else below
        items.append(ModuleBox(name, below, inner, kinds=tuple(graph.ops[at].kind for at in members)))
    return items


STORED = (Role.PARAM, Role.STATE, Role.CONST)


def ir_to_mermaid(ir: IR, max_nodes: int = 30, include_weights: bool = True, *, by_module: bool = False) -> str:
    """A flowchart: inputs, the first `max_nodes` nodes with what they read, outputs. Weights hang on dotted edges.

    Args:
        ir: what `extract_ir` gives, or `IR.load`.
        max_nodes: the most nodes that are drawn, 0 or more.
        include_weights: draw weights too.
        by_module: draw each module as a frame around its nodes, and fold modules until `max_nodes` boxes are enough.

    Raises:
        UsageError: it is no IR, or `max_nodes` is no integer of 0 or more.
    """
    refuse_other_counts("max_nodes", max_nodes)
    chart = _Flowchart(an_ir(ir, UsageError).graph)
    lines = (chart.lines_by_module if by_module else chart.lines)(max_nodes, include_weights)
    return "\n".join(["flowchart TD", *(f"    {line}" for line in lines)])


def generate_op_distribution_pie(ir: IR, top_n: int = 10) -> str:
    """How many nodes there are of each type; what comes after the first `top_n` types is one slice.

    Args:
        ir: the IR.
        top_n: how many types have a slice of their own.

    Raises:
        UsageError: it is no IR, or `top_n` is no integer of 0 or more.
    """
    refuse_other_counts("top_n", top_n)
    counts = Counter(short(op.kind) for op in an_ir(ir, UsageError).graph.ops).most_common()
    others = sum(count for _, count in counts[top_n:])
    slices = [*counts[:top_n], *([("Others", others)] if others else [])]
    return "\n".join(
        ["pie showData", '    title "Operator Distribution"', *(f'    "{text(kind)}" : {n}' for kind, n in slices)]
    )


def refuse_other_counts(what: str, given: Any) -> None:
    """Refuse what is no integer of 0 or more."""
    if type(given) is not int or given < 0:
        raise UsageError(f"{what}: found {given!r}, expected an integer of 0 or more")


class _Flowchart:
    """The lines of one flowchart; `_ids` are the names that it has used."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._ids: dict[str, str] = {}
        self._drawn: set[str] = set()
        self._folded: dict[str, str] = {}
        """Name of an op → the box of the module that it is folded into."""

    def lines(self, most: int, weights: bool) -> Iterator[str]:
        graph = self._graph
        for vid in graph.inputs:
            value = graph.values[vid]
            yield f'{self._id("input", value.name)}[/"Input: {text(value.name)}<br/>{sizes(value.spec.shape)}"/]'
        for op in graph.ops[:most]:
            yield self._box(op)
            yield from self._reads(op, weights)
        yield from self._outputs()
        if len(graph.ops) > most:
            yield f'note["... {len(graph.ops) - most} more nodes ..."]'

    def lines_by_module(self, most: int, weights: bool) -> Iterator[str]:
        """Boxes and frames first, then what flows between them; what flows inside of a folded module is not shown."""
        graph = self._graph
        items, left = parts_of(graph, most)
        for vid in graph.inputs:
            value = graph.values[vid]
            yield f'{self._id("input", value.name)}[/"Input: {text(value.name)}<br/>{sizes(value.spec.shape)}"/]'
        yield from self._frames(items)
        lines = dict.fromkeys(
            line
            for op in graph.ops
            if self._home(op) in self._drawn
            for line in self._reads(op, weights and op.name not in self._folded)
        )
        yield from lines
        yield from self._outputs()
        if left:
            yield f'note["... {left} more nodes ..."]'

    def _frames(self, items: Sequence[int | ModuleBox]) -> Iterator[str]:
        for item in items:
            if isinstance(item, int):
                yield self._box(self._graph.ops[item])
                continue
            first = self._graph.ops[next(iter(item.ops))].name
            if item.is_folded:
                node = self._id("module", f"{item.path} {first}")
                self._drawn.add(node)
                self._folded.update((self._graph.ops[at].name, node) for at in item.ops)
                yield f'{node}[["{text(item.name)}<br/>{text(item.detail)}"]]'
                continue
            yield f'subgraph {self._id("frame", f"{item.path} {first}")}["{text(item.name)}"]'
            yield from (f"    {line}" for line in self._frames(item.items))
            yield "end"

    def _outputs(self) -> Iterator[str]:
        graph = self._graph
        for index, vid in enumerate(graph.outputs):
            value = graph.values[vid]
            yield f'output_{index}[\\"Output<br/>{sizes(value.spec.shape)}"/]'
            source = self._source(value)
            if source in self._drawn or value.role is Role.INPUT:
                yield f"{source} --> output_{index}"

    def _box(self, op: Op) -> str:
        node = self._home(op)
        self._drawn.add(node)
        shape = sizes(self._graph.values[op.outputs[0]].spec.shape) if op.outputs else ""
        return f'{node}["{text(short(op.kind))}<br/>{shape}"]'

    def _home(self, op: Op) -> str:
        """The box of `op`, or of the folded module that it is in."""
        return self._folded.get(op.name) or self._id("op", op.name)

    def _reads(self, op: Op, weights: bool) -> Iterator[str]:
        values, node = self._graph.values, self._home(op)
        for value in (values[vid] for vid in op.inputs):
            source, label = self._source(value), sizes(value.spec.shape)
            if source == node:
                continue
            if value.role not in STORED:
                yield f'{source} -->|"{label}"| {node}'
            elif weights:
                if source not in self._drawn:
                    self._drawn.add(source)
                    yield f'{source}[/"{text(value.name)}<br/>{label}"/]'
                yield f'{source} -.->|"{label}"| {node}'

    def _source(self, value: Value) -> str:
        if value.producer is not None:
            return self._home(self._graph.ops[value.producer])
        return self._id("input" if value.role is Role.INPUT else "w", value.name)

    def _id(self, kind: str, name: str) -> str:
        """A unique id of letters, digits and underscores."""
        plain = f"{kind}_{re.sub(r'[^0-9A-Za-z_]', '_', name)}"
        while self._ids.setdefault(plain, f"{kind} {name}") != f"{kind} {name}":
            plain += "_"
        return plain


def short(kind: str) -> str:
    """`linear` of aten.linear.default, `mul.Tensor` of aten.mul.Tensor."""
    return kind.removeprefix("aten.").removesuffix(".default")


def sizes(shape: Sequence[Dim]) -> str:
    """`1x16x64`, with spaces around names of dims."""
    return ("x" if all(isinstance(dim, int) for dim in shape) else " x ").join(map(str, shape))


def text(label: str) -> str:
    """Safe between quotes."""
    return visible(label.replace('"', "#quot;").replace("\n", " "))
