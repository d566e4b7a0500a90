"""Rewrite onnxruntime's attention operators that take packed Q, K and V as operators with separate inputs.

Products merged in the graph itself are split elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from passes.graph.op_facts import attribute_of, input_of, op_of
from passes.rewrites.attention_operators import is_attention
from passes.rewrites.graph_edit import GraphEdit
from passes.rewrites.joined_inputs import DOMAIN, SEPARATORS, SeparateInputs, separate_inputs
from passes.rewrites.node_writer import GraphTypes, NodeWriter, NotHandledError
from passes.structures.view import GraphView
from passes.weights.detached import DetachedModel


@dataclass(frozen=True, slots=True)
class UnpackedModel:
    """`unpacked` maps the output of each operator that was written out to the node that takes Q, K and V apart now."""

    model: DetachedModel
    unpacked: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class _UnpackedWriter(NodeWriter):
    """Calls values OUTPUT.LABEL and nodes NODE.OPERATOR, as all releases do: users have rules by these names."""

    __slots__ = ()

    def _title(self, label: str) -> str:
        return f"{self.node.output[0]}.{LABELS.get(label, label)}"

    def _name_node(self, op_type: str, output: str) -> str:
        return f"{self.node.name}.{op_type.lower()}" if self.node.name else ""


def unpack_attentions(model: DetachedModel, left: Collection[str] = ()) -> UnpackedModel:
    """`model` with packed attention operators written out, except the operators with an output in `left`."""
    view = GraphView(model)
    packed = [node for node in view.own if op_of(node) in SEPARATORS and node.output[0] not in left]
    if not packed:
        return UnpackedModel(model)
    edit, types = GraphEdit.of(view), GraphTypes.of(view)
    markers: dict[str, str] = {}
    notes: list[str] = []
    for node in packed:
        writer = _UnpackedWriter(node, edit)
        try:
            _check(writer, types)
            inputs = separate_inputs(writer, types)
        except NotHandledError as why:
            notes.append(f"{node.name or node.output[0]}, a {op_of(node)}, is not taken apart: {why}")
            continue
        if inputs is not None:
            ENDS[op_of(node)](writer, inputs)
            edit.replace_by(writer)
            markers[node.output[0]] = inputs.marker
    return UnpackedModel(edit.model() if markers else model, markers, tuple(notes))


def _check(writer: NodeWriter, types: GraphTypes) -> None:
    """Raise where the operator has an input, an attribute or an output that the new operator does not take."""
    node = writer.node
    inputs, outputs, mask = LIMITS.get(op_of(node), ({}, 0, 0))
    advice = "; put decompose-attention before split-qkv" if is_attention(node) else ""
    for place, title in inputs.items():
        if input_of(node, place):
            raise NotHandledError(f"it has {title}{advice}")
    for name in ("do_rotary", "past_present_share_buffer") if outputs else ():
        if attribute_of(node, name, 0):
            raise NotHandledError(f"it has {name}")
    if outputs and any(node.output[outputs:]):
        raise NotHandledError(f"it has a second output{advice}")
    if mask and input_of(node, mask) and types.rank(input_of(node, mask)) not in (2, 3):
        raise NotHandledError(f"it has a mask of lengths{advice}")


def _end_as_it_is(writer: NodeWriter, inputs: SeparateInputs) -> None:
    node = writer.node
    writer.end(node.op_type, [*inputs.values, *node.input[3:]], node.output)


def _end_multi_head(writer: NodeWriter, inputs: SeparateInputs) -> None:
    node = writer.node
    _attend(writer, inputs, input_of(node, 3), input_of(node, 5))


def _end_quantized(writer: NodeWriter, inputs: SeparateInputs) -> None:
    node = writer.node
    _attend(writer, inputs, input_of(node, 5), "", input_of(node, 8))


def _attend(writer: NodeWriter, inputs: SeparateInputs, mask: str, scores_bias: str, past: str = "") -> None:
    """MultiHeadAttention, which has the keys and the values of a cache in two inputs and two outputs."""
    output, present = writer.node.output[0], [*writer.node.output[1:2]]
    pasts = [
        writer.add("Gather", past, writer.constant(np.array(place), f"past_{name}.place"), label=f"past_{name}", axis=0)
        for place, name in enumerate(("key", "value") if past else ())
    ]
    halves = [writer.name(f"present_{name}") for name in ("key", "value")] if past or any(present) else []
    writer.end("MultiHeadAttention", [*inputs.values, "", mask, scores_bias, *pasts], [output, *halves], KEPT)
    if any(present):
        axis = writer.ints([0], "first_axis")
        stacked = [
            writer.add("Unsqueeze", half, axis, label=f"present_{name}_apart")
            for name, half in zip(("key", "value"), halves, strict=True)
        ]
        writer.give(writer.add("Concat", *stacked, label="present", axis=0), present[0])


LABELS: Final[Mapping[str, str]] = {
    "projected": "qkv_product",
    "projected_float": "qkv_float",
    "projected_of_input": "qkv_of_input",
    "projected_scaled": "qkv_scaled",
    "projected_with_bias": "qkv_biased",
    **{f"{name}_heads": f"{name}.heads" for name in "qkv"},
}
"""Label of the shared reader → the label in these names."""

KEPT: Final = ("num_heads", "scale", "mask_filter_value", "unidirectional")
"""The attributes that Attention and QAttention share with MultiHeadAttention."""

LIMITS: Final[Mapping[str, tuple[Mapping[int, str], int, int]]] = {
    f"{DOMAIN}.Attention": ({4: "a past", 6: "past_sequence_length"}, 1, 3),
    f"{DOMAIN}.QAttention": ({}, 2, 5),
}
"""Operator → inputs that MultiHeadAttention does not take, the most outputs, and the position of the mask."""

ENDS: Final[Mapping[str, Callable[[NodeWriter, SeparateInputs], None]]] = {
    f"{DOMAIN}.MultiHeadAttention": _end_as_it_is,
    f"{DOMAIN}.GroupQueryAttention": _end_as_it_is,
    f"{DOMAIN}.Attention": _end_multi_head,
    f"{DOMAIN}.QAttention": _end_quantized,
}
"""Operator → the function that writes it with separate inputs."""
