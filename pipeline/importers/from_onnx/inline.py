"""Replace one node by others: the branch that an If takes, or the body that the standard gives a function.

Every value inside of a body gets a name that is new in the model, since bodies may use the same names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
from onnx import helper

from pipeline.importers.from_onnx.attributes import op_key, schema_of
from pipeline.importers.from_onnx.specs import element_type
from pipeline.ir.graph import TensorSpec

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


def function_nodes(node: PendingNode, specs: Mapping[str, TensorSpec], fresh: Fresh) -> list[PendingNode] | None:
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
    """Whether other nodes may stand for it: the standard defines it as a function, or onnxruntime adds it."""
    if node.proto.domain == "com.microsoft":
        return True
    schema: Any = schema_of(node.proto.op_type, node.proto.domain, node.opset)  # the stubs of onnx lack its bodies
    versions = () if schema is None else schema.all_function_opset_versions
    return any(version <= node.opset for version in versions)


def _body_of(schema: Any, node: PendingNode, specs: Mapping[str, TensorSpec]) -> onnx.FunctionProto | None:
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
    """`node` with what the caller gives in place of the attributes that refer to it, also in bodies inside of it."""
    resolved = []
    for attribute in node.attribute:
        if attribute.ref_attr_name:
            if attribute.ref_attr_name in given:
                copy = onnx.AttributeProto()
                copy.CopyFrom(given[attribute.ref_attr_name])
                copy.name = attribute.name
                resolved.append(copy)
            continue
        for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
            for inner in graph.node:
                _with_attributes(inner, given, caller)
        resolved.append(attribute)
    kept = [onnx.AttributeProto.FromString(attribute.SerializeToString()) for attribute in resolved]
    del node.attribute[:]
    node.attribute.extend(kept)
    if not node.metadata_props:
        node.metadata_props.extend(caller.metadata_props)
    return node


def _with_renamed_values(node: onnx.NodeProto, names: Mapping[str, str]) -> onnx.NodeProto:
    """A copy with new names, also inside its own branches, whose names shadow none in valid ONNX."""
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
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
