"""The tools of the package `onnx` as steps: its version converter (`convert-opset`) and its shape inference."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import onnx
from onnx import NodeProto, TensorProto, version_converter

from passes.context import PassContext
from passes.errors import PolicyError, StepFailed
from passes.graph.index import GraphIndex, constant_of, extract, replace_entries
from passes.graph.inference import InferenceError, dims_of, infer_shapes, infer_types
from passes.graph.op_facts import ONNX_DOMAINS, RANDOM_OPS, attribute_of, opset_of
from passes.graph.traversal import bodies_in, every_graph, every_node, inline_functions, without_sparse
from passes.provenance.annotations import op_and_name
from passes.step import PassResult, Step
from passes.weights.detached import DetachedModel
from passes.weights.sharing import portable, why_not_run

OLDEST: Final = 7
"""The oldest opset to convert to: onnx's converter lacks operators of older ones."""


@dataclass(frozen=True, slots=True)
class ConvertOpset(Step, name="convert-opset", reads="structure", source="onnx"):
    """Convert the model to another opset of ONNX, up or down. Local functions are inlined first.

    onnx's converter gets stand-ins of the weights: it reads only small constants, such as axes. onnxscript's converter
    is not used: it only goes up, from 18 to 25, and leaves attributes of older operators as they are.
    """

    to: int = 21

    def check(self, context: PassContext) -> None:
        """Refuse an opset that the installed onnx does not have.

        Raises:
            PolicyError: naming the range.
        """
        newest = onnx.defs.onnx_opset_version()
        if not OLDEST <= self.to <= newest:
            raise PolicyError(f"{self.name}: found opset {self.to}, expected {OLDEST} to {newest}")

    def apply(self, model: DetachedModel, context: PassContext) -> PassResult:
        if opset_of(model.proto) == self.to:
            return PassResult(model, changed=False, why=f"the model has opset {self.to}")
        if not opset_of(model.proto) and not any(node.domain in ONNX_DOMAINS for node in every_node(model.proto.graph)):
            return PassResult(_with_opset(model, self.to))
        _refuse_attention(model.proto, self.to)
        converted = context.worker.call(convert, model=model.proto.SerializeToString(), to=self.to)
        proto = onnx.load_from_string(converted)
        for node, reason in _without_form(proto, self.to):
            raise StepFailed(f"{op_and_name(node)} {reason} at opset {self.to}: onnx's converter left it unchanged")
        made = model.with_proto(proto)
        if not any(node.op_type in RANDOM_OPS for node in every_node(proto.graph)):
            return PassResult(made)
        why = context.proofs.ask(why_not_run, model=portable(made, context.spill))
        return PassResult(made, why=f"proven with fixed noise alone, since {why}" if why else None)


def _with_opset(model: DetachedModel, to: int) -> DetachedModel:
    """`model`, whose operators are all of other domains (such as ai.onnx.ml), with an import of ONNX's domain."""
    proto = model.copy_proto()
    proto.opset_import.append(onnx.helper.make_opsetid("", to))
    least = onnx.helper.find_min_ir_version_for(list(proto.opset_import), ignore_unknown=True)
    proto.ir_version = max(proto.ir_version, least)
    return model.with_proto(proto)


def convert(model: bytes, to: int) -> bytes:
    """In the worker: `model` at opset `to`, without local functions, which the converter would drop, and with dense
    tensors in place of sparse ones, which it does not know.

    Raises:
        StepFailed: naming the nodes that the converter cannot convert.
    """
    proto = without_sparse(inline_functions(onnx.load_from_string(model)))
    called = {(node.domain, node.op_type) for node in every_node(proto.graph)}
    own = next((function for function in proto.functions if (function.domain, function.name) in called), None)
    if own is not None:
        raise StepFailed(
            f"function {own.domain}::{own.name} imports other opsets than the model, so onnx cannot inline it, and its "
            "converter would drop it; let both import one opset"
        )
    _write_constants_as_tensors(proto)
    _drop_defaults(proto, to)
    _refuse_inner_axes(proto, to)
    try:
        return version_converter.convert_version(proto, to).SerializeToString()
    except Exception as error:
        refused = list(_unconvertible(proto, to))
        types = _value_types(proto)
        owners = [node for node in every_node(proto.graph) if bodies_in(node)]  # the converter still sees their bodies
        kept = [node for node in (*owners, *(node for node, _ in refused)) if _has_same_form(node, types, proto, to)]
        names = {node.output[0] for node in kept}
        blamed = [(node, reason) for node, reason in refused if node.output[0] not in names]
        if kept and not blamed:
            return _convert_around(proto, names, to).SerializeToString()
        if not blamed:
            raise
        raise StepFailed(_describe_refusals(blamed)) from error


def _describe_refusals(blamed: Sequence[tuple[NodeProto, str]]) -> str:
    """The first node with its reason, and the names of the next `NAMED` nodes."""
    (node, reason), *others = blamed
    names = ", ".join(op_and_name(other) for other, _ in others[:NAMED])
    count = f"{len(others)} more" if len(others) > NAMED else "also"
    return f"{op_and_name(node)} {reason}" + (f"; {count}: {names}" if names else "")


def _convert_around(proto: onnx.ModelProto, kept: Collection[str], to: int) -> onnx.ModelProto:
    """Convert `proto` to opset `to`, except the nodes whose first output is in `kept`.

    For the time of the conversion these nodes are in a domain of their own: the converter leaves operators of other
    domains as they are.

    Raises:
        StepFailed: the converter refuses the rest.
    """
    proto.graph.CopyFrom(infer_types(proto))  # the converter infers no type through operators of other domains
    for node in every_node(proto.graph):
        node.domain = KEPT if node.output and node.output[0] in kept else node.domain
    proto.opset_import.append(onnx.helper.make_opsetid(KEPT, 1))
    try:
        converted = version_converter.convert_version(proto, to)
    except Exception as error:
        raise StepFailed(f"onnx's converter: {' '.join(str(error).split())}") from error
    for node in every_node(converted.graph):
        node.domain = "" if node.domain == KEPT else node.domain
    replace_entries(converted.opset_import, [entry for entry in converted.opset_import if entry.domain != KEPT])
    return converted


KEPT: Final = "onnxline.kept"
"""The domain of the nodes that the converter must leave as they are."""


def _has_same_form(node: NodeProto, types: Mapping[str, onnx.ValueInfoProto], proto: onnx.ModelProto, to: int) -> bool:
    """Whether the node can stay as it is: opset `to` has the operator with the same inputs and outputs, and with the
    attributes and types that the node uses.

    Add 14 differs from Add 13 in its types alone, say, and onnx has no adapter down. That the node still computes the
    same is proven by a run of the result.
    """
    schemas = _schemas_of(node, opset_of(proto), to)
    if schemas is None:
        return False
    old, new = schemas
    unused = old.attributes.keys() - {attribute.name for attribute in node.attribute}
    if new.deprecated or _signature(old, unused - new.attributes.keys()) != _signature(new):
        return False
    pairs = [*_with_formal(node.input, new.inputs), *_with_formal(node.output, new.outputs)]
    return all(_type_text(types[name]) in formal.types for name, formal in pairs if name in types)


def _signature(schema: onnx.defs.OpSchema, without: Collection[str] = ()) -> object:
    """What two versions of an operator have to share: attributes (but `without`), inputs and outputs, to compare."""
    attributes = {
        name: (found.type, found.required, str(found.default_value))
        for name, found in schema.attributes.items()
        if name not in without
    }
    return attributes, [[(formal.name, formal.option) for formal in side] for side in (schema.inputs, schema.outputs)]


def _with_formal(
    names: Sequence[str], formals: Sequence[onnx.defs.OpSchema.FormalParameter]
) -> Iterator[tuple[str, onnx.defs.OpSchema.FormalParameter]]:
    """Each value with its formal parameter; the last parameter may stand for several values."""
    for place, name in enumerate(names):
        yield name, formals[min(place, len(formals) - 1)]


def _type_text(info: onnx.ValueInfoProto) -> str:
    """The element type as schemas write it: `tensor(float)`."""
    return f"tensor({TensorProto.DataType.Name(info.type.tensor_type.elem_type).lower()})"


def _drop_defaults(proto: onnx.ModelProto, to: int) -> None:
    """Drop attributes, in place, that opset `to` does not know and that hold their defaults."""
    for node in every_node(proto.graph):
        schemas = _schemas_of(node, opset_of(proto), to)
        if schemas is None:
            continue
        old, new = (schema.attributes for schema in schemas)
        kept = [
            found
            for found in node.attribute
            if found.name in new or found.name not in old or not _is_default(found, old[found.name].default_value)
        ]
        if len(kept) < len(node.attribute):
            replace_entries(node.attribute, kept)


def _schemas_of(node: NodeProto, *opsets: int) -> list[onnx.defs.OpSchema] | None:
    """The operator's schema in each of `opsets`; None if the node is not ONNX's, or an opset lacks its operator."""
    if node.domain not in ONNX_DOMAINS:
        return None
    try:
        return [onnx.defs.get_schema(node.op_type, opset, "") for opset in opsets]
    except onnx.defs.SchemaError:
        return None


def _is_default(attribute: onnx.AttributeProto, default: onnx.AttributeProto) -> bool:
    return onnx.helper.get_attribute_value(attribute) == (
        onnx.helper.get_attribute_value(default) if default.type else None
    )


def _write_constants_as_tensors(proto: onnx.ModelProto) -> None:
    """Store each numeric Constant in the attribute `value`, in place: the converter reads axes from `value` alone."""
    for node in every_node(proto.graph):
        tensor = constant_of(node)
        if tensor is not None and node.attribute[0].name != "value":
            replace_entries(node.attribute, [onnx.helper.make_attribute("value", tensor)])


def _value_types(proto: onnx.ModelProto) -> dict[str, onnx.ValueInfoProto]:
    """The inferred types of all values, also in bodies."""
    return {name: info for graph in every_graph(infer_types(proto)) for name, info in GraphIndex(graph).types.items()}


def _unconvertible(proto: onnx.ModelProto, to: int) -> Iterator[tuple[NodeProto, str]]:
    """(node, reason) for each node that the converter cannot convert, found by converting each node alone.

    The converter's own message names only the operator that it met first, and no node.
    """
    known, stored = _value_types(proto), dict[str, TensorProto]()
    for index in map(GraphIndex, every_graph(proto.graph)):
        stored |= index.initializers
    held = {node.output[0]: node for node in every_node(proto.graph) if node.op_type == "Constant"}
    for node in every_node(proto.graph):
        if node.domain not in ONNX_DOMAINS or bodies_in(node) or node.op_type == "Constant":
            continue
        read = list(dict.fromkeys(filter(None, node.input)))
        alone = extract(
            proto,
            [*(held[name] for name in read if name in held and name not in stored), node],
            inputs=[
                known.get(name) or onnx.helper.make_tensor_value_info(name, 1, None)
                for name in read
                if name not in stored and name not in held
            ],
            outputs=[known.get(name, name) for name in node.output if name],
            initializers=[stored[name] for name in read if name in stored],
        )
        try:
            version_converter.convert_version(alone, to)
        except Exception as error:
            yield node, _why_not(str(error), opset_of(proto), to)


def _why_not(error: str, of: int, to: int) -> str:
    """The converter's message on a node as the end of a sentence that begins with the node."""
    lacks = NO_ADAPTER.search(error)
    if lacks is not None:
        return (
            f"is another operator {'before' if to < of else 'after'} opset {lacks[1]}, and onnx has no adapter for it"
        )
    if "No Previous Version" in error:
        return f"has no form at opset {to} that onnx's converter knows"
    return f"cannot be converted: {' '.join(error.rpartition('` failed: ')[2].split())}"


NO_ADAPTER: Final = re.compile(r"No Adapter From Version \$?(\d+) for (\w+)")

NAMED: Final = 3
"""How many more nodes a message names."""


def _refuse_attention(proto: onnx.ModelProto, to: int) -> None:
    for node, reason in _without_form(proto, to):
        if node.op_type == "Attention" and "no form" in reason:
            raise StepFailed(f"{op_and_name(node)} {reason} at opset {to}: put decompose-attention before it")


def _refuse_inner_axes(proto: onnx.ModelProto, to: int) -> None:
    """Refuse a Softmax along an axis before the last one on the way to an opset below 13.

    onnx's converter leaves such a Softmax unchanged, and the older Softmax computes along that axis and all after it.

    Raises:
        StepFailed: naming the node.
    """
    if to >= ALONG_ONE_AXIS or opset_of(proto) < ALONG_ONE_AXIS:
        return
    nodes = [node for node in every_node(proto.graph) if node.op_type in FLATTENING and node.domain in ONNX_DOMAINS]
    inner = [(node, axis) for node in nodes if (axis := attribute_of(node, "axis", -1)) != -1]
    types = _value_types(proto) if inner else {}
    for node, axis in inner:
        dims = dims_of(types[node.input[0]]) if node.input[0] in types else None
        if dims is not None and axis % len(dims) != len(dims) - 1:
            raise StepFailed(
                f"{op_and_name(node)} computes along axis {axis} of {len(dims)}; at opset {to} it would compute along "
                "all axes after that one, too: transpose that axis to the end"
            )


FLATTENING: Final = frozenset({"Softmax", "LogSoftmax", "Hardmax"})
ALONG_ONE_AXIS: Final = 13
"""The opset since which `FLATTENING` operators compute along one axis."""


def _without_form(proto: onnx.ModelProto, to: int) -> Iterator[tuple[NodeProto, str]]:
    """(node, reason) for each node of ONNX's domain that is not valid at opset `to`."""
    graphs = (proto.graph, *proto.functions)
    own = {(function.domain, function.name) for function in proto.functions}
    for node in (node for graph in graphs for node in every_node(graph)):
        if node.domain not in ONNX_DOMAINS or (node.domain, node.op_type) in own:
            continue
        reason = _lack_of(node, to)
        if reason:
            yield node, reason


def _lack_of(node: NodeProto, to: int) -> str:
    """Why the node is not valid at opset `to`, as the end of a sentence; empty if it is valid."""
    try:
        schema = onnx.defs.get_schema(node.op_type, to, "")
    except onnx.defs.SchemaError:
        known = onnx.defs.has(node.op_type)
        return "has no form" if known else ""  # onnxruntime adds operators without versions to ONNX's domain
    if schema.deprecated:
        return "has no form"
    unknown = [attribute.name for attribute in node.attribute if attribute.name not in schema.attributes]
    if unknown:
        return f"has the attribute {unknown[0]!r}, which is not known"
    lacks = not schema.min_input <= len(node.input) <= schema.max_input
    return "has another number of inputs than it takes" if lacks else ""


@dataclass(frozen=True, slots=True)
class InferShapes(Step, name="infer_shapes", reads="structure", source="onnx"):
    """Write the inferred type and shape of every value into the model."""

    data_prop: bool = True
    annotates: ClassVar[bool] = True

    def apply(self, model: DetachedModel, context: PassContext) -> PassResult:
        try:
            inferred = infer_shapes(model.proto, strict_mode=True, data_prop=self.data_prop)
        except InferenceError as error:
            raise StepFailed(f"shape inference: {error}") from error
        return PassResult(model.with_proto(inferred))

    def call_library(self, model: onnx.ModelProto) -> onnx.ModelProto:
        return onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=self.data_prop)

    def format_call(self) -> str:
        return f"onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop={self.data_prop})"
