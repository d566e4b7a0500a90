"""Gauges: extra outputs of the reference model that measure coverage during a run.

They show which rows of tables were read, which branches were taken, how often loops ran, and whether values reached the
limits of a Clip. The model gets further outputs and a few more nodes; its own outputs do not change.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Final

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto, helper

from passes.graph.index import GraphIndex
from passes.graph.op_facts import ONNX_DOMAINS, attribute_of, first_output
from passes.graph.traversal import bodies_in, every_graph, every_node
from passes.proof.lookups import OPS, Lookup, find_lookups, values_of_inputs
from passes.proof.weak_blocks import SumTerm, find_terms
from passes.weights.detached import DetachedModel

GAUGE: Final = "onnxline.gauge/"
"""Prefix of the names of the values that gauges add."""


@dataclass(frozen=True, slots=True)
class Limit:
    """A node that changes values beyond some limit; `value` is the limited input.

    `low` and `high` are the limits of `value`; without them, the node acts where its output differs from `value`. For a
    Where, `value` is the condition. For a Relu and its like the limit is zero.
    """

    output: str
    op: str
    value: str
    low: float | None = None
    high: float | None = None
    acts_below: bool = True
    """Whether it has a lower limit at all."""
    acts_above: bool = True


@dataclass(frozen=True, slots=True)
class Gate:
    """A value that a pass has brought in, which may switch others on and off: by a product, a Where or an index."""

    value: str
    op: str
    inputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Gauges:
    """The nodes to measure, by the name of their first output."""

    lookups: tuple[Lookup, ...] = ()
    branches: tuple[tuple[str, str], ...] = ()
    """For each If, its first output and its condition."""
    loops: tuple[str, ...] = ()
    limits: tuple[Limit, ...] = ()
    terms: tuple[SumTerm, ...] = ()
    """Terms of sums: the norm of the term is measured, and the norm of the value that it is added to."""
    nested: int = 0
    """Nodes of these kinds inside of bodies and functions, where nothing is measured."""
    gates: tuple[Gate, ...] = ()
    """Values of which the least and the greatest number are measured."""


@dataclass(slots=True)
class Readings:
    """The measurements so far, in the order of `Gauges`."""

    rows: dict[int, np.ndarray] = field(default_factory=dict)
    """Lookup → for each row whether it was read."""
    selectors: dict[int, list[bytes]] = field(default_factory=dict)
    """Lookup → a digest of its selectors, for each draw; none where values of inputs decide them."""
    taken: dict[int, set[bool]] = field(default_factory=dict)
    counts: dict[int, list[int]] = field(default_factory=dict)
    reached: dict[int, tuple[bool, bool, bool]] = field(default_factory=dict)
    """Limit → whether it acted below, acted above, and did nothing."""
    ratios: dict[int, float] = field(default_factory=dict)
    """SumTerm of a sum → the largest ratio of its norm to the norm of the value that it is added to."""
    spans: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Gate → its least and its greatest number in all draws."""
    why_not: str = ""
    """Why nothing was measured; empty if something was."""

    def add(self, gauges: Gauges, got: Mapping[str, np.ndarray]) -> None:
        """Record one run."""
        for index, lookup in enumerate(gauges.lookups):
            if not lookup.is_nested:
                self._add_rows(index, lookup, got)
        for index, _ in enumerate(gauges.branches):
            self.taken.setdefault(index, set()).add(bool(got[_name("branch", index)].ravel()[0]))
        for index, _ in enumerate(gauges.loops):
            self.counts.setdefault(index, []).append(len(got[_name("loop", index)]))
        for index, _ in enumerate(gauges.limits):
            now = [bool(got[_name("limit", index, part)]) for part in PARTS]
            was = self.reached.get(index, (False, False, False))
            self.reached[index] = (was[0] or now[0], was[1] or now[1], was[2] or now[2])
        for index, term in enumerate(gauges.terms):
            added, trunk = (float(got[_name("norm", value)].ravel()[0]) for value in (term.added, term.trunk))
            ratio = added / trunk if trunk else math.inf
            self.ratios[index] = max(self.ratios.get(index, 0.0), ratio)
        for index, _ in enumerate(gauges.gates):
            low, high = (float(got[_name("gate", index, part)]) for part in ("least", "most"))
            least, most = self.spans.get(index, (low, high))
            self.spans[index] = min(least, low), max(most, high)

    def _add_rows(self, index: int, lookup: Lookup, got: Mapping[str, np.ndarray]) -> None:
        values = {name: got[_name("lookup", index, str(at))] for at, name in enumerate(lookup.selectors) if name}
        dims = tuple(int(dim) for dim in got[_name("lookup", index, "dims")])
        read = lookup.rows_read(dims, values)
        self.rows[index] = self.rows[index] | read if index in self.rows else read
        if not lookup.by_value:
            digest = hashlib.sha256(b"".join(array.tobytes() for array in values.values()))
            self.selectors.setdefault(index, []).append(digest.digest())


PARTS: Final = ("below", "above", "inside")


def _name(*parts: object) -> str:
    return GAUGE + "/".join(map(str, parts))


def gauges_of(model: DetachedModel) -> Gauges:
    """Find everything in `model` that gauges can measure."""
    branches, loops, limits, index = [], [], [], model.index
    by_value = cache(lambda: values_of_inputs(model))  # few models have a lookup or a limit that asks for them
    nested = sum(node.op_type in MEASURED | COMPARISONS for node in _nested_nodes(model))
    nested += sum(node.op_type in OPS for function in model.proto.functions for node in function.node)
    for node in model.index.live[::-1]:
        if node.domain not in ONNX_DOMAINS:
            continue
        if node.op_type == "If":
            branches.append((first_output(node), node.input[0]))
        elif node.op_type == "Loop":
            loops.append(first_output(node))
        elif node.op_type in LIMITING:
            limit = _limit(node, index, by_value)
            if limit is not None:
                limits.append(limit)
    tensors = {**index.initializers, **index.constants}
    single = {name for name, tensor in tensors.items() if math.prod(tensor.dims) == 1}
    terms = find_terms(model.proto.graph, index.folded, single)
    nested += sum(len(find_terms(body, index.folded | GraphIndex(body).folded)) for body in _bodies(model))
    lookups = [replace(lookup, by_value=not by_value().isdisjoint(lookup.selectors)) for lookup in find_lookups(model)]
    return Gauges(tuple(lookups), tuple(branches), tuple(loops), tuple(limits), terms, nested)


def gauges_of_changes(before: DetachedModel, after: DetachedModel) -> Gauges:
    """What gauges can measure in the nodes that passes have brought in: rows, branches, loops, limits, conditions and
    gates.

    Comparisons of sizes count too, since a pass may act at one size alone. Nodes with the operator and the first output
    of a node of `before` are not new.
    """
    known = {(node.op_type, first_output(node)) for node in before.proto.graph.node}
    nodes = [node for node in after.index.live[::-1] if node.domain in ONNX_DOMAINS]
    new = {first_output(node): node for node in nodes if (node.op_type, first_output(node)) not in known}
    inside = {(node.op_type, first_output(node)) for node in _nested_nodes(before)}
    nested = [node for node in _nested_nodes(after) if node.op_type in MEASURED | COMPARISONS]
    unseen = sum((node.op_type, first_output(node)) not in inside for node in nested)
    if not any(node.op_type in MEASURED | COMPARISONS | STEPPED | OPS for node in new.values()):
        return Gauges(nested=unseen)
    every, constant, by_value = gauges_of(after), after.index.folded, values_of_inputs(after)
    compared = tuple(
        Limit(name, node.op_type, name)
        for name, node in new.items()
        if node.op_type in COMPARISONS and name not in constant
    )
    gates = tuple(
        Gate(name, node.op_type, tuple(node.input))
        for name, node in new.items()
        if node.op_type in GATES and name in by_value and attribute_of(node, "to", TensorProto.FLOAT) in CASTS
    )
    measured = {*(gate.value for gate in gates), *(limit.output for limit in compared)}
    chosen = tuple(
        Limit(name, node.op_type, node.input[0])
        for name, node in new.items()
        if node.op_type == "Where" and node.input[0] not in constant | measured
    )
    limits = tuple(limit for limit in every.limits if limit.output in new and limit.op != "Where")
    return Gauges(
        lookups=tuple(lookup for lookup in every.lookups if lookup.output in new),
        branches=tuple(branch for branch in every.branches if branch[0] in new),
        loops=tuple(name for name in every.loops if name in new),
        limits=limits + compared + chosen,
        gates=gates,
        nested=unseen,
    )


def _bodies(model: DetachedModel) -> Iterator[GraphProto]:
    """The bodies of If, Loop and Scan."""
    return itertools.islice(every_graph(model.proto.graph), 1, None)


def _nested_nodes(model: DetachedModel) -> Iterator[NodeProto]:
    """The nodes inside of bodies and functions, where nothing is measured."""
    for node in model.index.live:
        for body in bodies_in(node):
            yield from every_node(body)
    for function in model.proto.functions:
        yield from every_node(function)


def _limit(node: NodeProto, index: GraphIndex, by_value: Callable[[], set[str]]) -> Limit | None:
    output, op = first_output(node), node.op_type
    if output in index.folded:
        return None
    if op in KINKED:
        return Limit(output, op, node.input[0], acts_above=False)
    if op in BETWEEN:
        of_output, low, high = BETWEEN[op]
        return Limit(output, op, output if of_output else node.input[0], low, high)
    if op == "Where":
        return Limit(output, op, node.input[0]) if _compares(node.input[0], index, by_value) else None
    if op == "Clip":
        names = {attribute.name for attribute in node.attribute}
        names.update(name for name, read in zip(("min", "max"), node.input[1:], strict=False) if read)
        return Limit(output, op, node.input[0], acts_below="min" in names, acts_above="max" in names)
    if op == "ThresholdedRelu":
        return Limit(output, op, node.input[0], attribute_of(node, "alpha", 1.0), math.inf, acts_above=False)
    moving = [name for name in node.input if name not in index.folded]
    if len(node.input) != 2 or (len(moving) > 1 and not by_value().issuperset(moving)):
        return None
    return Limit(output, op, moving[0], acts_below=op == "Max", acts_above=op == "Min")


def _compares(condition: str, index: GraphIndex, by_value: Callable[[], set[str]]) -> bool:
    """Whether a condition compares values (with a threshold, or with a single number), or combines such conditions."""
    node = index.producers.get(condition)
    if node is None:
        return False
    if node.op_type in ("And", "Or", "Not", "Xor", "Cast"):
        return any(_compares(name, index, by_value) for name in node.input)
    if node.op_type in ("IsNaN", "IsInf", "Equal"):  # these also compare sizes
        return condition in by_value()
    return node.op_type in ("Less", "Greater", "LessOrEqual", "GreaterOrEqual")


def add_gauges(graph: GraphProto, gauges: Gauges) -> list[str]:
    """Add the gauges' nodes to `graph`; returns the names of its further outputs."""
    wanted: list[str] = []
    for index, lookup in enumerate(gauges.lookups):
        if lookup.is_nested:
            continue
        wanted.append(_name("lookup", index, "dims"))
        _add(graph, "Shape", [lookup.data], wanted[-1])
        for at, name in enumerate(lookup.selectors):
            if name:
                wanted.append(_name("lookup", index, str(at)))
                _add(graph, "Identity", [name], wanted[-1])
    for index, (_, condition) in enumerate(gauges.branches):
        wanted.append(_name("branch", index))
        _add(graph, "Identity", [condition], wanted[-1])
    nodes = {first_output(node): node for node in graph.node if node.op_type == "Loop"}
    for index, output in enumerate(gauges.loops):
        wanted.append(_name("loop", index))
        _count_turns(nodes[output], wanted[-1])
    for value in dict.fromkeys(value for term in gauges.terms for value in (term.added, term.trunk)):
        wanted.append(_name("norm", value))
        number = _add(graph, "Cast", [value], _name("norm", value, "number"), to=TensorProto.FLOAT)
        _add(graph, "ReduceL2", [number], wanted[-1], keepdims=0)
    for index, gate in enumerate(gauges.gates):
        number = _add(graph, "Cast", [gate.value], _name("gate", index, "number"), to=TensorProto.FLOAT)
        for part, op in (("least", "ReduceMin"), ("most", "ReduceMax")):
            wanted.append(_add(graph, op, [number], _name("gate", index, part), keepdims=0))
    for index, limit in enumerate(gauges.limits):
        _watch_limit(graph, limit, index)
        wanted.extend(_name("limit", index, part) for part in PARTS)
    return wanted


def _add(graph: GraphProto, op: str, inputs: Sequence[str], output: str, **attributes: Any) -> str:
    graph.node.append(helper.make_node(op, list(inputs), [output], **attributes))
    return output


def _count_turns(loop: NodeProto, name: str) -> None:
    """Let the loop collect the number of each iteration; how many it collects is the count of iterations."""
    body = next(attribute.g for attribute in loop.attribute if attribute.name == "body")
    body.node.append(helper.make_node("Identity", [body.input[0].name], [name]))
    body.output.append(helper.make_tensor_value_info(name, TensorProto.INT64, []))
    missing = len(body.output) - 2 - len(loop.output)  # outputs that nobody reads may be left out
    loop.output.extend([""] * missing + [name])


def _watch_limit(graph: GraphProto, limit: Limit, index: int) -> None:
    def name(part: str) -> str:
        return _name("limit", index, part)

    if limit.op in CONDITIONS:
        above, below = limit.value, _add(graph, "Not", [limit.value], name("not"))
        both = _add(graph, "And", [above, below], name("neither"))  # a Where does one or the other
        conditions = {"below": below, "above": above, "inside": both}
    elif limit.op in KINKED:
        value = _add(graph, "Cast", [limit.value], name("value"), to=TensorProto.FLOAT)
        graph.initializer.append(helper.make_tensor(name("zero"), TensorProto.FLOAT, [], [0.0]))
        least = _add(graph, "ReduceMin", [value], name("least"), keepdims=0)
        most = _add(graph, "ReduceMax", [value], name("most"), keepdims=0)
        below = _add(graph, "Less", [least, name("zero")], name("less"))
        conditions = {
            "below": below,
            "above": _add(graph, "Less", [most, least], name("never")),
            "inside": _add(graph, "Less", [name("zero"), most], name("rests")),
        }
    else:
        value = _add(graph, "Cast", [limit.value], name("value"), to=TensorProto.FLOAT)
        if limit.low is None or limit.high is None:
            low = high = _add(graph, "Cast", [limit.output], name("result"), to=TensorProto.FLOAT)
            below = _add(graph, "Less", [value, low], name("less"))
            above = _add(graph, "Less", [high, value], name("more"))
        else:
            for part, bound in (("low", limit.low), ("high", limit.high)):
                graph.initializer.append(helper.make_tensor(name(part), TensorProto.FLOAT, [], [bound]))
            below = _add(graph, "Not", [_add(graph, "Less", [name("low"), value], name("over"))], name("less"))
            above = _add(graph, "Not", [_add(graph, "Less", [value, name("high")], name("under"))], name("more"))
        acts = _add(graph, "Or", [below, above], name("acts"))
        conditions = {"below": below, "above": above, "inside": _add(graph, "Not", [acts], name("rests"))}
    for part, condition in conditions.items():
        number = _add(graph, "Cast", [condition], name(f"{part}/number"), to=TensorProto.INT32)
        _add(graph, "ReduceMax", [number], name(part), keepdims=0)


BETWEEN: Final[Mapping[str, tuple[bool, float, float]]] = {
    "HardSigmoid": (True, 0.0, 1.0),
    "HardSwish": (False, -3.0, 3.0),
}
"""Op → whether its output is measured (else its input), and the range in which it does not saturate."""

KINKED: Final = frozenset({"Abs", "Celu", "Elu", "LeakyRelu", "PRelu", "Relu", "Softplus"})
"""Ops that change values below zero, and leave values (far) above zero unchanged."""

LIMITING: Final = frozenset({"Clip", "Min", "Max", "ThresholdedRelu", "Where", *BETWEEN, *KINKED})
COMPARISONS: Final = frozenset({"Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "IsNaN", "IsInf"})

CONDITIONS: Final = COMPARISONS | {"Where"}
"""Ops whose limit is a condition: false counts as below the limit, true as above it."""

MEASURED: Final = LIMITING | {"If", "Loop"}

STEPPED: Final = frozenset(
    {"And", "ArgMax", "ArgMin", "Cast", "Ceil", "Erf", "Exp", "Floor", "Mod", "Not", "Or", "Pow", "Round", "Sigmoid"}
    | {"Sign", "Softmax", "Tanh", "Xor"}
)
"""Ops whose result may be one number over most of the range of what they read."""

GATES: Final = (
    COMPARISONS
    | STEPPED
    | {"Abs", "Add", "Clip", "Div", "Max", "Min", "Mul", "Neg", "Reciprocal", "Relu", "Sqrt", "Sub", "Sum"}
    | {"ReduceL1", "ReduceL2", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare"}
)
"""Ops by which a gate is computed."""

CASTS: Final = frozenset(
    getattr(TensorProto, name) for name in ("BOOL", "DOUBLE", "FLOAT", "FLOAT16", "INT32", "INT64", "INT8", "UINT8")
)
"""The types of gates that are cast."""
