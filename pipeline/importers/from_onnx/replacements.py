"""Replace one node by nodes that compute the same.

An If becomes the branch that it takes, a function the body that the standard gives it, an attention of onnxruntime its
products and softmax, and an operator before opset 7 what opset 7 has for it. Every value inside of a body gets a name
that is new in the model, since bodies may use the same names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from passes.graph.index import copy_of, delete_named, replace_entries
from passes.rewrites.attention_core import write_core
from passes.rewrites.attention_operators import READERS, read_attention
from passes.rewrites.graph_values import GraphValues
from passes.rewrites.node_writer import NodeWriter
from passes.structures.view import GraphView
from passes.weights.detached import DetachedModel
from pipeline.errors import Unsupported
from pipeline.importers.from_onnx.source import element_type, op_key, schema_of
from pipeline.ir.graph import TensorSpec

Specs = Mapping[str, TensorSpec]

Fresh = Callable[[str], str]
"""A new name for a value of a body."""


@dataclass(frozen=True, slots=True)
class PendingNode:
    """A node that is still to be imported, and the opsets that say what it means."""

    proto: onnx.NodeProto
    opsets: Mapping[str, int]

    @property
    def key(self) -> str:
        return op_key(self.proto.domain, self.proto.op_type)

    @property
    def opset(self) -> int:
        """The opset of the node's domain; the newest where the model imports none."""
        domain = "" if self.proto.domain == "ai.onnx" else self.proto.domain
        return self.opsets.get(domain) or newest_opset(domain)

    def with_proto(self, proto: onnx.NodeProto) -> PendingNode:
        return PendingNode(proto, self.opsets)


def newest_opset(domain: str) -> int:
    if domain == "":
        return onnx.defs.onnx_opset_version()
    return max((schema.since_version for schema in onnx.defs.get_all_schemas() if schema.domain == domain), default=1)


def pending_nodes(nodes: Iterable[onnx.NodeProto], imports: Iterable[onnx.OperatorSetIdProto]) -> list[PendingNode]:
    opsets = {"" if entry.domain == "ai.onnx" else entry.domain: entry.version for entry in imports}
    return [PendingNode(node, opsets) for node in nodes]


def branch_nodes(node: PendingNode, taken: bool, fresh: Fresh) -> list[PendingNode]:
    """Copies of the nodes of the branch that the If `node` takes, to replace it.

    Initializers become Constant nodes, and the If's outputs are Identities of the branch's.
    """
    wanted = "then_branch" if taken else "else_branch"
    branch = next(attribute.g for attribute in node.proto.attribute if attribute.name == wanted)
    made = [tensor.name for tensor in branch.initializer] + [
        name for inner in branch.node for name in inner.output if name
    ]
    names = {name: fresh(name) for name in made}
    nodes = [
        helper.make_node("Constant", [], [names[tensor.name]], name=tensor.name, value=tensor)
        for tensor in branch.initializer
    ]
    nodes += [_with_renamed_values(inner, names) for inner in branch.node]
    nodes += [
        helper.make_node("Identity", [names.get(inner.name, inner.name)], [outer], name=node.proto.name)
        for inner, outer in zip(branch.output, node.proto.output, strict=True)
        if outer
    ]
    return [node.with_proto(inner) for inner in nodes]


def function_nodes(node: PendingNode, specs: Specs, fresh: Fresh) -> list[PendingNode] | None:
    """The nodes of the standard's body of the operator, for inputs of these `specs`; None where it has none."""
    schema = schema_of(node.proto.op_type, node.proto.domain, node.opset)
    body = None if schema is None else _body_of(schema, node, specs)
    if schema is None or body is None or not body.node:
        return None
    proto = node.proto
    names = dict(zip(body.input, (*proto.input, *[""] * len(body.input)), strict=False))
    names |= {inner: outer or fresh(inner) for inner, outer in zip(body.output, proto.output, strict=False)}
    label = proto.name or proto.output[0]
    for inner in body.node:
        for name in inner.output:
            if name and name not in names:
                names[name] = fresh(f"{label}.{name}")
    attributes = {
        default.name: default.default_value for default in schema.attributes.values() if default.default_value.type
    } | {attribute.name: attribute for attribute in proto.attribute}
    opsets = {**node.opsets, **{entry.domain: entry.version for entry in body.opset_import}}
    copies = [_with_attributes(_with_renamed_values(inner, names), attributes, proto) for inner in body.node]
    nodes = [PendingNode(copy, opsets) for copy in copies]
    # An output may be an input of the body under its own name.
    straight = [
        helper.make_node("Identity", [names[inner]], [outer])
        for inner, outer in zip(body.output, proto.output, strict=False)
        if outer and inner in body.input
    ]
    return nodes + [PendingNode(copy, opsets) for copy in straight]


def has_body(node: PendingNode) -> bool:
    """Whether other nodes may replace it: the standard defines its operator as a function, or onnxruntime adds the
    operator."""
    if node.proto.domain == "com.microsoft":
        return True
    schema: Any = schema_of(node.proto.op_type, node.proto.domain, node.opset)  # the stubs of onnx lack its bodies
    versions = () if schema is None else schema.all_function_opset_versions
    return any(version <= node.opset for version in versions)


def _body_of(schema: Any, node: PendingNode, specs: Specs) -> onnx.FunctionProto | None:
    """The body for the node's opset: one for all nodes, or one that is made for its attributes and input types."""
    versions = [version for version in schema.function_opset_versions if version <= node.opset]
    if versions:
        encoded = schema.get_function_with_opset_version(max(versions))
        return encoded if isinstance(encoded, onnx.FunctionProto) else onnx.FunctionProto.FromString(encoded)
    versions = [version for version in schema.context_dependent_function_opset_versions if version <= node.opset]
    if not versions or any(name and name not in specs for name in node.proto.input):
        return None
    types = [
        helper.make_tensor_type_proto(element_type(specs[name].dtype), specs[name].shape).SerializeToString()
        if name
        else onnx.TypeProto().SerializeToString()
        for name in node.proto.input
    ]
    encoded = schema.get_context_dependent_function_with_opset_version(
        max(versions), node.proto.SerializeToString(), types
    )
    return onnx.FunctionProto.FromString(encoded)


def _with_attributes(
    node: onnx.NodeProto, given: Mapping[str, onnx.AttributeProto], caller: onnx.NodeProto
) -> onnx.NodeProto:
    """`node` with the values of the caller's attributes in place of references to these, also in bodies inside of
    it."""
    resolved = []
    for attribute in node.attribute:
        if attribute.ref_attr_name:
            if attribute.ref_attr_name in given:
                copy = copy_of(given[attribute.ref_attr_name])
                copy.name = attribute.name
                resolved.append(copy)
            continue
        for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
            for inner in graph.node:
                _with_attributes(inner, given, caller)
        resolved.append(attribute)
    replace_entries(node.attribute, resolved)
    if not node.metadata_props:
        node.metadata_props.extend(caller.metadata_props)
    return node


def _with_renamed_values(node: onnx.NodeProto, names: Mapping[str, str]) -> onnx.NodeProto:
    """A copy with new names, also inside its own branches, whose names shadow none in valid ONNX."""
    copy = copy_of(node)
    _rename(copy, names)
    return copy


def _rename(node: onnx.NodeProto, names: Mapping[str, str]) -> None:
    node.input[:] = [names.get(name, name) for name in node.input]
    node.output[:] = [names.get(name, name) for name in node.output]
    for attribute in node.attribute:
        for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
            own = {value.name for value in (*graph.input, *graph.initializer)}
            free = {old: new for old, new in names.items() if old not in own}
            for inner in graph.node:
                _rename(inner, free)
            for output in graph.output:
                output.name = free.get(output.name, output.name)


def read_names(nodes: Sequence[onnx.NodeProto]) -> set[str]:
    """The names that `nodes` read, bodies included; some of these may be values of the bodies themselves."""
    names: set[str] = set()
    for node in nodes:
        names.update(filter(None, node.input))
        for attribute in node.attribute:
            for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                names |= read_names(graph.node)
                names.update(value.name for value in graph.output)
    return names


OPSET = 23
"""The first opset with all operators that take an attention apart."""


def attention_nodes(
    node: PendingNode, specs: Specs, constants: Callable[[str], np.ndarray | None], fresh: Fresh
) -> list[PendingNode] | None:
    """An attention of onnxruntime as the nodes that the step decompose-attention makes of it; None for other nodes.

    Raises:
        NotHandledError: the step leaves the node as it is; with the reason.
    """
    domain = "" if node.proto.domain == "ai.onnx" else node.proto.domain
    known = domain and (domain, node.proto.op_type) in READERS
    if not known or any(name and name not in specs for name in node.proto.input):
        return None
    copy = copy_of(node.proto)
    copy.name = fresh(copy.name or copy.output[0])
    arrays = {name: array for name in copy.input if name and (array := constants(name)) is not None}
    graph = helper.make_graph(
        [copy], "one_node", [], [], [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)])
    values = GraphValues(GraphView(DetachedModel(model, {})))
    for name in filter(None, copy.input):
        values.declare(name, element_type(specs[name].dtype), specs[name].sizes)
    writer = NodeWriter(copy, values)
    write_core(read_attention(writer), writer)
    made = {name: array for name in values.stored if name not in arrays and (array := values.array(name)) is not None}
    stored = [
        helper.make_node("Constant", [], [name], value=numpy_helper.from_array(array, name))
        for name, array in made.items()
    ]
    opsets = {**node.opsets, "": max(node.opsets.get("", 0), OPSET)}
    for inner in stored:
        inner.metadata_props.extend(node.proto.metadata_props)
    return [PendingNode(inner, opsets) for inner in (*stored, *writer.nodes)]


OLDEST_WITH_BROADCASTING = 7

Adapter = Callable[[onnx.NodeProto, Specs, Fresh], list[onnx.NodeProto]]


def modern_nodes(node: PendingNode, specs: Specs, fresh: Fresh) -> list[PendingNode] | None:
    """The nodes of opset 7 that compute what `node` computes in its opset; None if its opset is 7 or later.

    Raises:
        Unsupported: an attribute that opset 7 cannot express.
    """
    opset = node.opsets.get("", OLDEST_WITH_BROADCASTING)
    if opset >= OLDEST_WITH_BROADCASTING:
        return None
    copy = copy_of(node.proto)
    delete_named(copy.attribute, {"consumed_inputs"})  # a hint about memory
    adapt = ADAPTERS.get(copy.op_type) if node.proto.domain in ("", "ai.onnx") else None
    nodes = adapt(copy, specs, fresh) if adapt else [copy]
    opsets = {**node.opsets, "": OLDEST_WITH_BROADCASTING}
    return [PendingNode(proto, opsets) for proto in nodes]


def broadcast(node: onnx.NodeProto, specs: Specs, fresh: Fresh) -> list[onnx.NodeProto]:
    """Operand 1 is laid along the axes of operand 0 that begin with `axis`, or along its last axes."""
    found = {attribute.name: attribute.i for attribute in node.attribute}
    delete_named(node.attribute, {"broadcast", "axis"})
    axis = found.get("axis")
    if not found.get("broadcast") or axis is None or any(name not in specs for name in node.input):
        return [node]
    rank, inner = specs[node.input[0]].rank, specs[node.input[1]]
    trailing = rank - axis % max(rank, 1) - inner.rank
    return [node] if trailing <= 0 else reshape_operand(node, (*inner.sizes, *(1,) * trailing), fresh)


def per_channel(node: onnx.NodeProto, specs: Specs, fresh: Fresh) -> list[onnx.NodeProto]:
    """The slopes of a PRelu lie along axis 1."""
    if any(name not in specs for name in node.input):
        return [node]
    rank, slope = specs[node.input[0]].rank, specs[node.input[1]]
    if slope.rank != 1 or slope.numel == 1 or rank <= 2:
        return [node]
    return reshape_operand(node, (*slope.sizes, *(1,) * (rank - 2)), fresh)


def reshape_operand(node: onnx.NodeProto, shape: tuple[int, ...], fresh: Fresh) -> list[onnx.NodeProto]:
    """`node` with input 1 in this shape."""
    label, sizes = fresh(f"{node.output[0]}.shape"), np.array(shape, np.int64)
    reshaped = fresh(f"{node.output[0]}.operand")
    before = [
        helper.make_node("Constant", [], [label], value=numpy_helper.from_array(sizes)),
        helper.make_node("Reshape", [node.input[1], label], [reshaped], name=node.name),
    ]
    node.input[1] = reshaped
    return [*before, node]


def inference_only(node: onnx.NodeProto, _specs: Specs, _fresh: Fresh) -> list[onnx.NodeProto]:
    """`is_test` says that nothing is trained. Without it these operators would train, which is refused."""
    is_test = any(attribute.name == "is_test" and attribute.i for attribute in node.attribute)
    delete_named(node.attribute, {"is_test"})
    if not is_test and (node.op_type == "Dropout" or len(node.output) > 1):
        raise Unsupported(
            f"node {node.name or node.output[0]!r} ({node.op_type}) is in training mode before opset 7, expected "
            "is_test = 1; export the model after model.eval()"
        )
    return [node]


def without_broadcast(node: onnx.NodeProto, _specs: Specs, _fresh: Fresh) -> list[onnx.NodeProto]:
    delete_named(node.attribute, {"broadcast"})
    return [node]


def cast(node: onnx.NodeProto, _specs: Specs, _fresh: Fresh) -> list[onnx.NodeProto]:
    """Up to opset 5 the type was a word."""
    for attribute in node.attribute:
        if attribute.name == "to" and attribute.type == onnx.AttributeProto.STRING:
            target = TensorProto.DataType.Value(attribute.s.decode())
            attribute.CopyFrom(helper.make_attribute("to", target))
    return [node]


def default_axis(axis: int) -> Adapter:
    def adapt(node: onnx.NodeProto, _specs: Specs, _fresh: Fresh) -> list[onnx.NodeProto]:
        if all(attribute.name != "axis" for attribute in node.attribute):
            node.attribute.append(helper.make_attribute("axis", axis))
        return [node]

    return adapt


def rename_attribute(old: str, new: str) -> Adapter:
    def adapt(node: onnx.NodeProto, _specs: Specs, _fresh: Fresh) -> list[onnx.NodeProto]:
        for attribute in node.attribute:
            if attribute.name == old:
                attribute.name = new
        return [node]

    return adapt


ADAPTERS: dict[str, Adapter] = {
    **dict.fromkeys(("Add", "Sub", "Mul", "Div", "Pow", "And", "Or", "Xor", "Equal", "Greater", "Less"), broadcast),
    "BatchNormalization": inference_only,
    "Cast": cast,
    "Concat": default_axis(1),
    "Dropout": inference_only,
    "Gemm": without_broadcast,
    "PRelu": per_channel,
    "Pad": rename_attribute("paddings", "pads"),
}
"""Operators before opset 7 → how they are spelled by opset 7.

Until then an operand was stretched to another by the attributes `broadcast` and `axis`, not by numpy's rules, and some
operators had attributes of training. What the attribute says is said by a Reshape, or by nothing.
"""
