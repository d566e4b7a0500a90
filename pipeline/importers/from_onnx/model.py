"""Import an ONNX model, stage by stage."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import onnx

from pipeline.errors import InternalError, SourceError, Unsupported
from pipeline.importers.from_onnx import contrib, conv, elementwise, index, linear, random, reduce, shape
from pipeline.importers.from_onnx.node import Importer, NameScope, Node
from pipeline.importers.from_onnx.resolve import Resolved, resolve
from pipeline.importers.from_onnx.source import read_initializers, read_source
from pipeline.importers.from_onnx.specs import Sizes
from pipeline.ir.builder import Builder, Emitter
from pipeline.ir.check import check
from pipeline.ir.graph import Graph

__all__ = ["FAMILIES", "from_onnx", "importers", "join"]


def from_onnx(
    model: onnx.ModelProto | str | Path,
    *,
    dims: Mapping[str, int] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    emitters: Mapping[str, Emitter] | None = None,
    trainable: Collection[str] = (),
    base_dir: str | Path | None = None,
) -> Graph:
    """The Graph of an ONNX model. Every shape is static; every value keeps its name; initializers are referenced.

    `dims` fixes named dimensions of the inputs: {"batch": 2}. `shapes` fixes whole inputs, {"x": (2, 3)}, and with them
    the dimensions that they name. `trainable` lists initializers, by name or glob, that
    become params; the others become consts. An initializer that is also an input counts as stored, and one that no op
    reads is left out. Payloads are views of the model's `raw_data`, or maps of its data file: keep both alive and
    unchanged. Where the bytes or the data file are missing, the graph is weight-free: no payload. `base_dir` is the
    folder of the data files of a ModelProto; a path brings its own. An op that no emitter knows has `kernel=None`.
    A graph output that has the name of a stored value or an input is that value; every other one is computed.

    Raises:
        SourceError: the model cannot be read, is not valid, or its data files are outside its folder or cut short.
        Unsupported: op types, dtypes or cases of ops that this release does not have; op types are listed all at once.
        UsageError: shapes that are not static, or entries of `dims` or `trainable` that match nothing.
    """
    table = importers()
    source = read_source(model, base_dir, table)
    graph = source.model.graph
    stored = read_initializers(graph, source.folder, trainable)
    resolved = resolve(source, stored, Sizes(graph, dims or {}, shapes or {}), table)

    builder = Builder(graph.name or "graph", emitters)
    scope = NameScope(builder, resolved, output_labels(graph, resolved), value_names(graph, resolved))
    for value in graph.input:
        if value.name not in stored:
            scope.input(value.name)
    read = {name for node in resolved.nodes for name in node.input} | {value.name for value in graph.output}
    for node in resolved.nodes:
        if node.output[0] not in resolved.constants and node.output[0] not in resolved.roots:
            try:
                imported = Node(node, scope, source.opset, read)
                table[imported.kind](imported)
                imported.refuse_leftovers()
            except (ValueError, IndexError, ZeroDivisionError) as error:  # lists of another length than the rank
                name = node.name or node.output[0]
                raise SourceError(
                    f"node {name!r} ({node.op_type}) has attributes and inputs that do not fit each other: {error}; "
                    "check the length of its lists"
                ) from error
    built = builder.build([output_vid(scope, value.name) for value in graph.output])
    check(built, read_payloads=False)
    return built


def output_labels(graph: onnx.GraphProto, resolved: Resolved) -> dict[str, str]:
    """Computed values that take the name of the graph output that is an Identity of them."""
    outputs = [value.name for value in graph.output]
    computed = {name for node in resolved.nodes for name in node.output} - set(resolved.constants) - set(outputs)
    labels: dict[str, str] = {}
    for name in outputs:
        root = resolved.root(name)
        if root != name and root in computed:
            labels.setdefault(root, name)
    return labels


def output_vid(scope: NameScope, name: str) -> int:
    """The vid of a graph output; an Identity is added where the value has another name."""
    if name in scope.resolved.sequences:
        raise Unsupported(
            f"the output {name!r} is a sequence of tensors, expected tensors; make each of them an output by SequenceAt"
        )
    vid = scope.vid(name)
    if scope.name(vid) == name:
        return vid
    return scope.emit("Identity", [vid], [(name, scope.spec(vid))], {}, "", "")[0]


def value_names(graph: onnx.GraphProto, resolved: Resolved) -> set[str]:
    begin = {item.name for item in (*graph.input, *graph.initializer)}
    return begin | {name for node in resolved.nodes for name in node.output}


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
    "linear": linear.IMPORTERS,
    "conv": conv.IMPORTERS,
    "reduce": reduce.IMPORTERS,
    "shape": shape.IMPORTERS,
    "index": index.IMPORTERS,
    "random": random.IMPORTERS,
    "contrib": contrib.IMPORTERS,
}
