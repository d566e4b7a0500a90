"""Import an ONNX model, or the first nodes of a list as far as one plan can run them.

A plan ends before a node whose sizes or kind depend on the data.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf import json_format

from pipeline.errors import InternalError, OnnxlineError, SourceError, Unsupported, UsageError
from pipeline.importers.from_onnx import contrib, conv, elementwise, index, own, quantize, reduce, resize, shape, signal
from pipeline.importers.from_onnx.node import Importer, NameScope, Node, import_by
from pipeline.importers.from_onnx.replacements import PendingNode, has_body, pending_nodes, read_names
from pipeline.importers.from_onnx.resolve import Resolved, Rules, Scope, first_output, identity, resolve
from pipeline.importers.from_onnx.source import Stored, read_initializers, read_source
from pipeline.importers.from_onnx.specs import Sizes
from pipeline.ir.builder import Builder, FindEmitter
from pipeline.ir.check import check
from pipeline.ir.graph import DTYPE_BITS, Attr, Graph, TensorSpec


def from_onnx(
    model: onnx.ModelProto | str | Path,
    *,
    dims: Mapping[str, int] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    values: Mapping[str, np.ndarray] | None = None,
    emitter_of: FindEmitter | None = None,
    trainable: Collection[str] = (),
    base_dir: str | Path | None = None,
    fallback: bool = False,
) -> Graph:
    """The Graph of an ONNX model. Every shape is static; every value keeps its name; initializers are referenced.

    An initializer that is also an input counts as stored, and one that no op reads is left out. Payloads are views of
    the model's `raw_data`, or maps of its data file: keep both alive and unchanged. If the bytes or the data file are
    missing, the graph is weight-free: no payload. A graph output that has the name of a stored value or an input is
    that value; every other output is computed.

    Args:
        model: a model or the path of its file.
        dims: sizes of named dimensions of the inputs: `{"batch": 2}`.
        shapes: shapes of whole inputs, `{"x": (2, 3)}`, and with them the dimensions that they name.
        values: arrays of inputs, such as a sample rate that chooses a branch; they become constants, and are inputs no
            more.
        emitter_of: finds the emitter of a kind of op; an op that no emitter knows has `kernel=None`.
        trainable: initializers, by name or glob, that become params; the others become consts.
        base_dir: the folder of the data files of a ModelProto; a path brings its own.
        fallback: a node that no importer takes becomes an op `OnnxNode`, which another runtime computes.

    Returns:
        The Graph; `compile_graph` makes a program of it.

    Raises:
        SourceError: the model cannot be read, is not valid, or its data files are outside its folder or cut short.
        Unsupported: op types, dtypes or cases of ops that this release does not have; op types are listed all at once.
        UsageError: shapes that are not static, or entries of `dims`, `values` or `trainable` that match nothing.

    Example:
        >>> import onnxline
        >>> graph = onnxline.from_onnx("model.onnx")
        >>> [(graph.values[vid].name, graph.values[vid].spec.shape) for vid in graph.inputs]
        [('x', (2, 8, 32))]
    """
    source = read_source(model, base_dir)
    graph = source.model.graph
    stored = read_initializers(graph, source.folder, trainable)
    sizes = Sizes(graph, dims or {}, shapes or {})
    fixed = {name: np.asarray(array) for name, array in (values or {}).items()}
    if strange := [name for name in fixed if name in stored or all(name != value.name for value in graph.input)]:
        raise UsageError(
            f"values: found {', '.join(map(repr, strange))}, expected names of inputs: "
            f"{', '.join(repr(value.name) for value in graph.input if value.name not in stored)}"
        )
    # Up to IR version 3 an initializer has to be listed as an input too.
    free = [value for value in graph.input if value.name not in stored and value.name not in fixed]
    scope = Scope(
        name=graph.name or "graph",
        nodes=pending_nodes(graph.node, source.model.opset_import),
        inputs={value.name: sizes.of(value) for value in free},
        others=frozenset(value.name for value in free if value.type.WhichOneof("value") != "tensor_type"),
        outputs=[value.name for value in graph.output],
        stored=stored,
        fixed=fixed,
        notes={value.name: value for value in (*graph.value_info, *graph.output)},
        dims=sizes.dims,
    )
    built, _ = build_graph(scope, Rules(importers().keys(), fallback=fallback), emitter_of, sizes)
    return built


def build_graph(
    scope: Scope, rules: Rules, emitter_of: FindEmitter | None = None, sizes: Sizes | None = None
) -> tuple[Graph, Resolved]:
    """The Graph of `scope`, and how its values were resolved.

    A node that its importer refuses is replaced by the body that the standard gives the operator, or else computed by
    another runtime, as far as `rules` allow.

    Raises:
        SourceError, Unsupported, UsageError: see `from_onnx`.
    """
    refused: dict[str, Unsupported] = {}
    while True:
        try:
            resolved = resolve(scope, replace(rules, refused=frozenset(refused)), sizes)
        except Unsupported as error:
            if refused:  # what its importer said is closer than that nothing else takes the node
                raise next(iter(refused.values())) from error
            raise
        graph, more = GraphBuilding(scope, rules, resolved, emitter_of).run()
        if not more:
            check(graph, read_payloads=False)
            return graph, resolved
        for name, error in more.items():
            if name in refused or not can_replace(name, resolved, rules):
                raise error
            refused[name] = error


def can_replace(name: str, resolved: Resolved, rules: Rules) -> bool:
    """Whether the node with this identity has a body in the standard, or another runtime may compute it."""
    node = next(node for node in resolved.nodes if identity(node) == name)
    return rules.fallback or has_body(node)


class ImportBuilder(Builder):
    """A Builder that importers call, whose wrong calls are bugs of ours."""

    mistake = InternalError


class GraphBuilding:
    """One pass over resolved nodes, which builds a Graph, or finds the nodes that their importers refuse."""

    def __init__(self, scope: Scope, rules: Rules, resolved: Resolved, emitter_of: FindEmitter | None) -> None:
        self._resolved = resolved
        self._builder = ImportBuilder(scope.name, emitter_of)
        made = {name for node in resolved.nodes for name in node.proto.output}
        stops = rules.stops
        left = read_names([node.proto for node in resolved.rest])
        wanted = {*scope.outputs, *left}
        self._inputs = list(scope.inputs)
        self._outputs = list(scope.outputs)
        if stops:
            reads = {name for node in resolved.nodes for name in node.proto.input}
            self._inputs = [name for name in scope.inputs if name in reads]
            asked = sorted(wanted & made)
            self._outputs = [name for name in asked if resolved.constant(name) is None]
        labels = output_labels(self._outputs, resolved)
        self._names = NameScope(self._builder, resolved, labels, value_names(scope, resolved))
        self._read = {name for node in resolved.nodes for name in node.proto.input} | wanted

    def run(self) -> tuple[Graph, dict[str, Unsupported]]:
        table, resolved = importers(), self._resolved
        for name in self._inputs:
            self._names.input(name)
        refused: dict[str, Unsupported] = {}
        for pending in resolved.nodes:
            proto = pending.proto
            if first_output(proto) in resolved.constants or first_output(proto) in resolved.roots:
                continue
            node = Node(pending, self._names, self._read)
            try:
                if identity(pending) in resolved.fallbacks:
                    import_fallback(node, pending)
                else:
                    import_by(table[node.kind], node)
                    node.refuse_leftovers()
            except Unsupported as refusal:
                refused[identity(pending)] = refusal
                self._names.stand_in(node.output_names)
            except (ValueError, IndexError, ZeroDivisionError) as error:  # lists of another length than the rank
                raise SourceError(
                    f"node {node.label!r} ({proto.op_type}) has attributes and inputs that do not fit each other: "
                    f"{error}; check the length of its lists"
                ) from error
            except OnnxlineError:
                if not refused:  # else a consequence of it
                    raise
                break
        if refused:
            return self._builder.build([]), refused
        return self._builder.build([output_vid(self._names, name) for name in self._outputs]), {}


def output_labels(outputs: Sequence[str], resolved: Resolved) -> dict[str, str]:
    """Computed values that take the name of the graph output that is an Identity of them."""
    computed = {name for node in resolved.nodes for name in node.proto.output}
    computed -= {*resolved.constants, *outputs}
    labels: dict[str, str] = {}
    for name in outputs:
        root = resolved.root(name)
        if root in computed:
            labels.setdefault(root, name)
    return labels


def output_vid(scope: NameScope, name: str) -> int:
    """The vid of a graph output; a copy is added where the value has another name."""
    if name in scope.resolved.sequences:
        raise Unsupported(
            f"the output {name!r} is a sequence of tensors, expected tensors; make each of them an output by SequenceAt"
        )
    if narrow := scope.resolved.narrow.get(scope.resolved.root(name)):
        raise Unsupported(f"the output {name!r} is of {narrow}, expected a type of whole bytes; dequantize it first")
    vid = scope.vid(name)
    if scope.name(vid) == name:
        return vid
    return scope.emit("aten.clone.default", [vid], [(name, scope.spec(vid))], {})[0]


def value_names(scope: Scope, resolved: Resolved) -> set[str]:
    """The names of all values: inputs, stored tensors, and outputs of nodes."""
    begin = {*scope.inputs, *scope.stored, *scope.fixed}
    return begin | {name for node in (*resolved.nodes, *resolved.rest) for name in node.proto.output}


def import_fallback(node: Node, pending: PendingNode) -> None:
    """An op `OnnxNode` with the inputs of the node that are given; its attributes say which are left out."""
    proto = pending.proto
    given = tuple(bool(name) for name in proto.input)
    encoded = json_format.MessageToDict(proto, preserving_proto_field_name=True)
    for field in ("input", "output", "name", "metadata_props", "doc_string"):
        encoded.pop(field, None)
    attrs: dict[str, Attr] = {
        "op": node.kind,
        "opset": pending.opset,
        "node": json.dumps(encoded, sort_keys=True, separators=(",", ":")),
        "inputs": tuple(map(int, given)),
        "outputs": tuple(int(bool(name)) for name in node.output_names),
    }
    names = [name for name in node.output_names if name]
    node.make("OnnxNode", node.operands(), [(name, node.spec_of(name)) for name in names], attrs)


@dataclass(frozen=True, slots=True)
class NodeList:
    """Nodes in the order of execution, the requested values, and the stored values that nodes may read."""

    name: str
    nodes: Sequence[PendingNode]
    outputs: Sequence[str]
    stored: Mapping[str, Stored]

    def after(self, nodes: Sequence[PendingNode]) -> NodeList:
        return NodeList(self.name, nodes, self.outputs, self.stored)

    def reads(self) -> list[str]:
        """The names that the nodes read, those in bodies too, and what is asked for."""
        return sorted(read_names([node.proto for node in self.nodes]) | set(self.outputs))


@dataclass(frozen=True, slots=True)
class StaticPart:
    """A Graph of the first nodes, and the rest of the nodes."""

    graph: Graph
    constants: Mapping[str, np.ndarray]
    """Values that the nodes of the graph make, and that are known without a run."""
    rest: Sequence[PendingNode]
    """The first node that is not in the graph, and all later nodes."""
    begins: bool
    """Whether the graph has at least the first node."""
    fixed: Mapping[str, np.ndarray]
    """Values whose elements, and not only their shapes, determine the graph."""


def import_static_part(part: NodeList, values: Mapping[str, Any], fixed: Collection[str] = ()) -> StaticPart:
    """As many of the first nodes of `part` as one Graph holds.

    The elements of a value become part of the Graph where a node needs them, such as the shape that a Reshape reads.

    Args:
        part: the nodes that are left.
        values: name → array, sequence or other value that the nodes read; the Graph holds for these shapes.
        fixed: values whose elements become part of the Graph even where no node needs them.

    Raises:
        SourceError, Unsupported, UsageError: as `from_onnx`.
    """
    specs = {name: spec for name, value in values.items() if (spec := tensor_spec(value)) is not None}
    known = {name: np.array(values[name]) for name in fixed}
    while True:
        scope = Scope(
            name=part.name,
            nodes=part.nodes,
            inputs={name: spec for name, spec in specs.items() if name not in known},
            outputs=part.outputs,
            stored=part.stored,
            fixed=known,
            others=frozenset(values) - specs.keys(),
        )
        graph, resolved = build_graph(scope, Rules(importers(), fallback=True, stops=True))
        needed = {name for name in resolved.needs if name in specs} - known.keys()
        if not needed:
            break
        known |= {name: np.array(values[name]) for name in needed}
    made = {name for node in resolved.nodes for name in node.proto.output}
    wanted = made & ({*part.outputs} | read_names([node.proto for node in resolved.rest]))
    constants = {name: array for name in wanted if (array := resolved.constant(name)) is not None}
    return StaticPart(graph, constants, resolved.rest, bool(resolved.nodes), known)


def tensor_spec(value: object) -> TensorSpec | None:
    """The spec of an array; None for values that the IR does not have: sequences, optionals, strings, types below a
    byte."""
    if not isinstance(value, np.ndarray) or value.dtype.name not in DTYPE_BITS:
        return None
    return TensorSpec(value.shape, value.dtype.name)


def importers() -> dict[str, Importer]:
    """Op type → the function that imports it. Shape, Size, Range and Constant have none: they are folded before."""
    return join(FAMILIES)


def join(families: Mapping[str, Mapping[str, Importer]]) -> dict[str, Importer]:
    """One table of all `families`.

    Raises:
        InternalError: two families have the same op type.
    """
    table: dict[str, Importer] = {}
    owner: dict[str, str] = {}
    for family, entries in families.items():
        for kind, importer in entries.items():
            if kind in table:
                raise InternalError(f"op type {kind} is in the tables of {owner[kind]} and {family}; keep one of them")
            table[kind], owner[kind] = importer, family
    return table


FAMILIES: dict[str, Mapping[str, Importer]] = {
    "elementwise": elementwise.IMPORTERS,
    "conv": conv.IMPORTERS,
    "reduce": reduce.IMPORTERS,
    "shape": shape.IMPORTERS,
    "index": index.IMPORTERS,
    "own": own.IMPORTERS,
    "quantize": quantize.IMPORTERS,
    "resize": resize.IMPORTERS,
    "signal": signal.IMPORTERS,
    "contrib": contrib.IMPORTERS,
}
