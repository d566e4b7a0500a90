"""Checks of a node against the schema of its operator, or against the function that it calls; none is recursive."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

import onnx
from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto

from passes.custom_ops.declarations import declared_ops
from passes.errors import ModelError
from passes.graph.traversal import bodies_of, every_node
from passes.load.values import check_entries, check_text

KINDS: Final[Mapping[int, str]] = {number: name for name, number in AttributeProto.AttributeType.items()}
VALUE_FIELD: Final[Mapping[int, str]] = {
    AttributeProto.FLOAT: "f",
    AttributeProto.INT: "i",
    AttributeProto.STRING: "s",
    AttributeProto.TENSOR: "t",
    AttributeProto.GRAPH: "g",
    AttributeProto.SPARSE_TENSOR: "sparse_tensor",
    AttributeProto.TYPE_PROTO: "tp",
    AttributeProto.FLOATS: "floats",
    AttributeProto.INTS: "ints",
    AttributeProto.STRINGS: "strings",
    AttributeProto.TENSORS: "tensors",
    AttributeProto.GRAPHS: "graphs",
    AttributeProto.SPARSE_TENSORS: "sparse_tensors",
    AttributeProto.TYPE_PROTOS: "type_protos",
}
KIND_OF_FIELD: Final = {field: kind for kind, field in VALUE_FIELD.items()}
NOT_A_VALUE: Final = frozenset({"name", "type", "doc_string", "ref_attr_name"})
HAS_TO_BE_SET: Final = frozenset({"t", "g", "sparse_tensor", "tp"})
"""Other fields may be absent where they are 0 or empty, as writers of proto3 leave them out."""


@dataclass(frozen=True, slots=True)
class NodeSchema:
    """The constraints that an operator's schema puts on a node."""

    inputs: tuple[int, int]
    """Least and largest number."""
    outputs: tuple[int, int]
    needed: tuple[bool, ...]
    """For each input that is not variadic, whether it is required."""
    variadic: bool
    kinds: Mapping[str, int]
    """Attribute → its type."""
    required: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class OperatorScope:
    """The operators that the nodes of one graph may use."""

    versions: Mapping[str, int]
    """Domain → the imported version."""
    functions: Mapping[FunctionKey, FunctionProto] = field(default_factory=dict)
    """The model's own functions."""
    parameters: frozenset[str] | None = None
    """Inside of a function, the names of its attributes."""

    def find_schema(self, node: NodeProto) -> NodeSchema | None:
        """The schema of `node`; None if ONNX has none: onnxruntime adds operators, also to ONNX's own domain. A custom
        operator that the user declared holds its nodes to its attributes itself."""
        domain = "" if node.domain == "ai.onnx" else node.domain
        if domain and (domain, node.op_type) in declared_ops():
            return None
        return load_schema(node.op_type, self.versions.get(domain, 0), domain)


@cache
def load_schema(op_type: str, version: int, domain: str) -> NodeSchema | None:
    """ONNX's schema of an operator in one version of its domain; None where it has none, or it is deprecated."""
    try:
        schema = onnx.defs.get_schema(op_type, version, domain)
    except onnx.defs.SchemaError:
        return None
    if schema.deprecated:
        return None
    single, variadic = (
        onnx.defs.OpSchema.FormalParameterOption.Single,
        onnx.defs.OpSchema.FormalParameterOption.Variadic,
    )
    return NodeSchema(
        (schema.min_input, schema.max_input),
        (schema.min_output, schema.max_output),
        tuple(parameter.option == single for parameter in schema.inputs if parameter.option != variadic),
        any(parameter.option == variadic for parameter in schema.inputs),
        {name: number_of(attribute.type) for name, attribute in schema.attributes.items()},
        tuple(name for name, attribute in schema.attributes.items() if attribute.required),
    )


def number_of(kind: Any) -> int:
    """AttributeProto's number of a schema's attribute type, whose stub has no members."""
    return int(kind.value)


def check_node(node: NodeProto, operators: OperatorScope) -> None:
    """
    Raises:
        ModelError: naming the node, and what is wrong with its names, its attributes, or the number of its inputs or
            outputs.
    """
    texts = (node.op_type, node.domain, node.name, node.doc_string, getattr(node, "overload", ""))
    for text in (*texts, *node.input, *node.output):
        if type(text) is not str:
            check_text(text, f"a name in a node of type {node.op_type!r}")
    if not node.op_type:
        raise ModelError(f"{describe_node(node)} has no op type; expected the name of an operator")
    if not any(node.output):
        raise ModelError(f"{describe_node(node)} makes no output; expected one at least")
    check_entries(node.metadata_props, node)
    if node.domain in ("", "ai.onnx") and "" not in operators.versions and key_of_call(node) not in operators.functions:
        raise ModelError(
            f"{describe_node(node)} is of ONNX's own domain, and the model imports no opset of it; "
            "expected one in opset_import"
        )
    if node.domain:
        _check_version(node, operators.versions.get(node.domain, 0))
    callee = operators.functions.get(key_of_call(node)) if operators.functions else None
    if callee is not None:
        _check_count(node, "inputs", node.input, (0, len(callee.input)))
        _check_count(node, "outputs", node.output, (0, len(callee.output)))
    schema = operators.find_schema(node) if callee is None else None
    if node.attribute:
        _check_attributes(node, operators, schema)
    if schema is None:
        return
    _check_count(node, "inputs", node.input, schema.inputs)
    _check_count(node, "outputs", node.output, schema.outputs)
    for index, name in enumerate(node.input):
        if not name and (schema.needed[index] if index < len(schema.needed) else schema.variadic):
            raise ModelError(
                f"{describe_node(node)} leaves out its input {index}, which {node.op_type} cannot do without"
            )
    given = {attribute.name for attribute in node.attribute}
    for name in schema.required:
        if name not in given:
            raise ModelError(f"{describe_node(node)} has no attribute {name!r}, which {node.op_type} cannot do without")


def _check_version(node: NodeProto, imported: int) -> None:
    """Refuse a custom operator of the user's that its domain has from a later version."""
    op = declared_ops().get((node.domain, node.op_type))
    if op is not None and imported < op.version:
        raise ModelError(
            f"{describe_node(node)}: the model imports version {imported} of {node.domain}, and {op.key} is declared "
            f"from version {op.version}; expected version {op.version} in opset_import, or a smaller one in CustomOp"
        )


def describe_node(node: NodeProto) -> str:
    """The node's name and op type, for a message."""
    name = node.name or next(filter(None, node.output), "")
    return f"node {name!r} ({node.op_type})"


def bodies_in(node: NodeProto) -> Iterator[tuple[str, GraphProto]]:
    """The graphs inside of `node`, each with the name of its attribute."""
    for attribute in node.attribute:
        for body in bodies_of(attribute):
            yield attribute.name, body


def tensors_in(node: NodeProto) -> Iterator[TensorProto]:
    """The tensors in the attributes of a node."""
    for attribute in node.attribute:
        if attribute.HasField("t"):
            yield attribute.t
        yield from attribute.tensors


def sparse_in(node: NodeProto) -> Iterator[onnx.SparseTensorProto]:
    """The sparse tensors in the attributes of a node."""
    for attribute in node.attribute:
        if attribute.HasField("sparse_tensor"):
            yield attribute.sparse_tensor
        yield from attribute.sparse_tensors


def _check_count(node: NodeProto, what: str, names: Sequence[str], bounds: tuple[int, int]) -> None:
    least, most = bounds
    if not least <= len(names) <= most:
        many = f"{least}" if least == most else f"{least} or more" if most > 2**20 else f"{least} to {most}"
        raise ModelError(f"{describe_node(node)} has {len(names)} {what}; {node.op_type} takes {many}")


def _check_attributes(node: NodeProto, operators: OperatorScope, schema: NodeSchema | None) -> None:
    seen = set()
    for attribute in node.attribute:
        name = attribute.name
        check_text(name, f"the name of an attribute of {describe_node(node)}")
        if not name or name in seen:
            raise ModelError(f"{describe_node(node)} has an attribute {name!r} {'twice' if name else 'without a name'}")
        seen.add(name)
        kind = _kind(attribute, node, operators)
        if schema is None:
            continue
        expected = schema.kinds.get(name)
        if expected is None:
            known = ", ".join(sorted(schema.kinds)) or "none"
            raise ModelError(f"{describe_node(node)} has an attribute {name!r}, and {node.op_type} knows {known}")
        if kind != expected:
            raise ModelError(
                f"{describe_node(node)} has an attribute {name!r} of type {KINDS[kind]}; "
                f"{node.op_type} takes {KINDS[expected]}"
            )
        if node.domain in ("", "ai.onnx"):
            _check_strings(attribute, node)
            _check_split(attribute, node)


def _kind(attribute: AttributeProto, node: NodeProto, operators: OperatorScope) -> int:
    """The type of an attribute; refuses one whose value is of another type."""
    where = f"attribute {attribute.name!r} of {describe_node(node)}"
    kind, reference = attribute.type, attribute.ref_attr_name
    held = [field.name for field, _ in attribute.ListFields() if field.name not in NOT_A_VALUE]
    check_text(attribute.doc_string, f"the description of {where}")
    check_text(reference, f"the reference of {where}")
    if reference:
        if operators.parameters is None or reference not in operators.parameters or held or kind not in VALUE_FIELD:
            raise ModelError(
                f"{where} refers to {reference!r}; expected an attribute of the function that the node is in, "
                "and no value"
            )
        return kind
    if not kind and len(held) == 1:  # IR versions before 4 wrote no type
        return KIND_OF_FIELD[held[0]]
    field = VALUE_FIELD.get(kind)
    if field is None or (held and held != [field]) or (not held and field in HAS_TO_BE_SET):
        raise ModelError(
            f"{where} has the type {KINDS.get(kind, kind)} and holds {' and '.join(held) or 'nothing'}; "
            f"expected {field or 'one value and its type'}"
        )
    return kind


def _check_split(attribute: AttributeProto, node: NodeProto) -> None:
    """ONNX's inference allocates what `num_outputs` says, and onnxruntime's process dies where it is too small."""
    counts = (node.op_type, attribute.name) == ("Split", "num_outputs") and not attribute.ref_attr_name
    if counts and attribute.i != len(node.output):
        raise ModelError(
            f"{describe_node(node)} has num_outputs {attribute.i} and {len(node.output)} outputs; expected as many"
        )


def _check_strings(attribute: AttributeProto, node: NodeProto) -> None:
    for text in (*([attribute.s] if attribute.HasField("s") else []), *attribute.strings):
        try:
            text.decode()
        except UnicodeDecodeError:
            check_text(text, f"attribute {attribute.name!r} of {describe_node(node)}")


FunctionKey = tuple[str, str, str]
"""Domain, name and overload."""

MOST_NODES: Final = 2_000_000
"""The limit for a model with its functions inlined."""


def functions_by_key(model: ModelProto) -> dict[FunctionKey, FunctionProto]:
    """
    Raises:
        ModelError: two have the same name.
    """
    found: dict[FunctionKey, FunctionProto] = {}
    for function in model.functions:
        key = (_domain(function.domain), function.name, getattr(function, "overload", ""))
        if key in found:
            raise ModelError(f"the model has two functions {_format_key(key)}; expected one of each name")
        found[key] = function
    return found


def key_of_call(node: NodeProto) -> FunctionKey:
    """The key of the function that a node calls, if the model has it."""
    return (_domain(node.domain), node.op_type, getattr(node, "overload", ""))


def check_calls(graph: GraphProto, functions: Mapping[FunctionKey, FunctionProto]) -> None:
    """
    Raises:
        ModelError: a function calls itself, directly or not; or the inlined model has too many nodes.
    """
    sizes: dict[FunctionKey, int] = {}
    for key in functions:
        _measure(key, functions, sizes)
    total = sum(sizes.get(key_of_call(node), 1) for node in every_node(graph))
    if total > MOST_NODES:
        raise ModelError(
            f"the model's functions are {total:,} nodes once they are inlined; expected {MOST_NODES:,} at most"
        )


def _measure(start: FunctionKey, functions: Mapping[FunctionKey, FunctionProto], sizes: dict[FunctionKey, int]) -> None:
    """Count the nodes of an inlined function, callees first; iterative, since chains of calls may be long."""
    path: list[FunctionKey] = [start]
    while path:
        key = path[-1]
        if key in sizes:
            path.pop()
            continue
        called = [callee for node in every_node(functions[key]) if (callee := key_of_call(node)) in functions]
        unknown = [callee for callee in dict.fromkeys(called) if callee not in sizes]
        if unknown:
            if unknown[0] in path:
                circle = [*path[path.index(unknown[0]) :], unknown[0]]
                raise ModelError(
                    f"the function {_format_key(unknown[0])} calls itself ({' → '.join(map(_format_key, circle))}); "
                    "ONNX has no recursion"
                )
            path.append(unknown[0])
            continue
        sizes[key] = min(1 + sum(sizes.get(key_of_call(node), 1) for node in every_node(functions[key])), 2**62)
        path.pop()


def _domain(domain: str) -> str:
    return "" if domain == "ai.onnx" else domain


def _format_key(key: FunctionKey) -> str:
    domain, name, overload = key
    return f"{domain or 'ai.onnx'}::{name}" + (f":{overload}" if overload else "")
