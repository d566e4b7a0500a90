"""Another opset: what each operator has become there, by onnx's converter."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Final

import onnx
from onnx import NodeProto, inliner, version_converter

from passes.context import PassContext
from passes.errors import PolicyError, StepFailed
from passes.graph.op_facts import ONNX_DOMAINS, opset_of
from passes.graph.traversal import every_node
from passes.step import Description, PassResult, Step, structure
from passes.weights.detached import DetachedModel

__all__ = ["ConvertOpset", "convert"]

OLDEST: Final = 7
"""onnx's converter knows older opsets in part."""


@dataclass(frozen=True, slots=True)
class ConvertOpset(Step):
    """Convert the model to opset `to`, up or down; local functions are inlined first.

    onnx's converter works on stand-ins: it looks at small constants alone, such as axes. onnxscript's converter is not
    taken: it goes up only, from 18 to 25, and leaves attributes of older operators as they are.
    """

    to: int = 21
    name: str = field(default="convert-opset", init=False)
    source: str = field(default="onnx", init=False)
    description: ClassVar[Description] = structure("Convert the model to another opset of ONNX, up or down")

    def check(self, context: PassContext) -> None:
        """Refuse an opset that the installed onnx does not have.

        Raises:
            PolicyError: naming the range.
        """
        newest = onnx.defs.onnx_opset_version()
        if not OLDEST <= self.to <= newest:
            raise PolicyError(f"pass {self.name!r}: to is {self.to}; expected {OLDEST} to {newest}")

    def apply(self, model: DetachedModel, context: PassContext) -> PassResult:
        if opset_of(model.proto) == self.to:
            return PassResult(model, changed=False)
        _refuse_attention(model.proto, self.to)
        try:
            proto = onnx.load_from_string(
                context.worker.call(convert, model=model.proto.SerializeToString(), to=self.to)
            )
        except StepFailed as failure:
            raise _with_node(failure, model.proto, self.to) from failure
        for node, reason in _without_form(proto, self.to):
            raise StepFailed(f"{_name_of(node)} {reason} at opset {self.to}: onnx's converter has left it as it was")
        return PassResult(model.with_proto(proto))


def convert(model: bytes, to: int) -> bytes:
    """In the worker: `model` at opset `to`, without local functions, which the converter would drop."""
    proto = onnx.load_from_string(model)
    if proto.functions:
        proto = inliner.inline_local_functions(proto)
    return version_converter.convert_version(proto, to).SerializeToString()


def _with_node(failure: StepFailed, proto: onnx.ModelProto, to: int) -> StepFailed:
    """`failure` with the node that the converter stumbled over, where that is known; a crash stays as it is."""
    if type(failure) is not StepFailed:
        return failure
    lost = next((node for node, _ in _without_form(proto, to)), None)
    if lost is not None:
        return StepFailed(f"{_name_of(lost)} has no form at opset {to} that onnx's converter knows")
    operator = NO_ADAPTER.search(str(failure))
    node = next((node for node in proto.graph.node if operator and node.op_type == operator[2]), None)
    if operator is None or node is None:
        return failure
    return StepFailed(
        f"{_name_of(node)} is another operator before opset {operator[1]}, and onnx has no adapter for it"
    )


NO_ADAPTER: Final = re.compile(r"No Adapter From Version \$?(\d+) for (\w+)")


def _refuse_attention(proto: onnx.ModelProto, to: int) -> None:
    for node, reason in _without_form(proto, to):
        if node.op_type == "Attention" and "no form" in reason:
            raise StepFailed(f"{_name_of(node)} {reason} at opset {to}: put decompose-attention in front")


def _without_form(proto: onnx.ModelProto, to: int) -> Iterator[tuple[NodeProto, str]]:
    """The nodes of ONNX's own operators that opset `to` does not have as they are, each with the reason."""
    graphs = (proto.graph, *proto.functions)
    own = {(function.domain, function.name) for function in proto.functions}
    for node in (node for graph in graphs for node in every_node(graph)):
        if node.domain not in ONNX_DOMAINS or (node.domain, node.op_type) in own:
            continue
        reason = _lack_of(node, to)
        if reason:
            yield node, reason


def _lack_of(node: NodeProto, to: int) -> str:
    try:
        schema = onnx.defs.get_schema(node.op_type, to, "")
    except onnx.defs.SchemaError:
        known = onnx.defs.has(node.op_type)
        return "has no form" if known else ""  # onnxruntime adds operators to ONNX's domain, which have no versions
    if schema.deprecated:
        return "has no form"
    unknown = [attribute.name for attribute in node.attribute if attribute.name not in schema.attributes]
    if unknown:
        return f"has the attribute {unknown[0]!r}, which is not known"
    lacks = not schema.min_input <= len(node.input) <= schema.max_input
    return "has another number of inputs than it takes" if lacks else ""


def _name_of(node: NodeProto) -> str:
    return f"{node.op_type} {(node.name or node.output[0])!r}"
