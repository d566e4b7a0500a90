"""Rewrite onnxruntime's attention operators that take Q, K and V in one input to take them as three inputs.

`Attention` and `QAttention` hold the weight of the product that makes Q, K and V: it becomes a product in the graph. A
packed input is divided by layout operators. A product of the graph itself that makes Q, K and V together is the work of
`split-qkv`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from onnx import TensorProto

from passes.graph.op_facts import CONTRIB, attribute_of, input_of, op_of
from passes.rewrites.graph_values import Dim
from passes.rewrites.node_writer import NodeWriter, NotHandledError
from passes.rewrites.rewriter import Rewriter
from passes.structures.view import GraphView
from passes.weights.detached import DetachedModel


@dataclass(frozen=True, slots=True)
class InputPart:
    """Q, K or V as a value of its own: [batch, length, width]. The width is that of all heads together."""

    value: str
    width: int
    length: Dim


@dataclass(frozen=True, slots=True)
class SeparateInputs:
    """Q, K and V of one operator."""

    parts: tuple[InputPart, InputPart, InputPart]
    marker: str
    """The output of the node that takes the joined value apart."""

    @property
    def values(self) -> list[str]:
        return [part.value for part in self.parts]


def separate_inputs(writer: NodeWriter) -> SeparateInputs | None:
    """Write the nodes that separate the inputs of `writer.node`; None if each of Q, K and V is an input already.

    Raises:
        NotHandledError: the sizes are not known, or not those that the operator takes.
    """
    return SEPARATORS[op_of(writer.node)](writer)


def _separate_multi_head(writer: NodeWriter) -> SeparateInputs | None:
    """MultiHeadAttention with [batch, length, heads, 3, size] as Q, or [batch, length, heads, 2, size] as K."""
    query, key, value = (input_of(writer.node, position) for position in range(3))
    if value:
        return None
    if not key:
        parts, marker = _unstack(writer, query, "qkv")
    else:
        width = writer.graph.dim(query, 2)
        if not isinstance(width, int) or writer.graph.rank(query) != 3:
            raise NotHandledError(f"the shape of its input {query} is not known, or not [batch, length, width]")
        parts, marker = _unstack(writer, key, "kv")
        parts = [InputPart(query, width, writer.graph.dim(query, 1)), *parts]
    first, second, third = parts
    return SeparateInputs((first, second, third), marker)


def _unstack(writer: NodeWriter, value: str, names: str) -> tuple[list[InputPart], str]:
    """Separate a value [batch, length, heads, parts, size].

    Args:
        writer: writes the nodes.
        value: its name.
        names: a letter for each part along axis 3: `qkv` or `kv`.

    Returns:
        The parts, and the output of the node that takes the first of them.

    Raises:
        NotHandledError: the value has another shape, or its shape is not known.
    """
    heads, size = writer.graph.dim(value, 2), writer.graph.dim(value, 4)
    is_packed = writer.graph.rank(value) == 5 and writer.graph.dim(value, 3) == len(names)
    if not is_packed or not isinstance(heads, int) or not isinstance(size, int):
        raise NotHandledError(f"its input {value} is not packed in {len(names)}, or its shape is not known")
    sizes = writer.ints([0, 0, heads * size], "shape")
    chosen = [
        writer.add("Gather", value, writer.scalar(at, TensorProto.INT64, f"place_{at}"), label=f"{name}_heads", axis=3)
        for at, name in enumerate(names)
    ]
    values = [writer.add("Reshape", part, sizes, label=name) for part, name in zip(chosen, names, strict=True)]
    return [InputPart(part, heads * size, writer.graph.dim(value, 1)) for part in values], chosen[0]


def _separate_grouped(writer: NodeWriter) -> SeparateInputs | None:
    """GroupQueryAttention with Q, K and V joined in its first input."""
    node = writer.node
    if input_of(node, 1) or input_of(node, 2):
        return None
    width = writer.graph.dim(node.input[0], 2)
    heads, groups = (int(attribute_of(node, name, 0)) for name in ("num_heads", "kv_num_heads"))
    if not isinstance(width, int) or not heads or not groups or width % (heads + 2 * groups):
        raise NotHandledError("its width is not known, or not that of its heads")
    size = width // (heads + 2 * groups)
    widths = [count * size for count in (heads, groups, groups)]
    return _split(writer, node.input[0], widths, writer.graph.dim(node.input[0], 1))


def _separate_product(writer: NodeWriter) -> SeparateInputs:
    """Attention multiplies with one weight for Q, K and V."""
    data, weight = writer.node.input[:2]
    return _split_product(writer, writer.add("MatMul", data, weight, label="projected"))


def _separate_quantized(writer: NodeWriter) -> SeparateInputs:
    """QAttention multiplies integers: the products are exact, and are scaled as the operator scales them."""
    node = writer.node
    integers = [input_of(node, position) for position in (0, 1, 6, 7)]
    while not integers[-1]:
        integers.pop()
    value = writer.add("MatMulInteger", *integers, label="projected")
    value = writer.add("Cast", value, label="projected_float", to=TensorProto.FLOAT)
    value = writer.add("Mul", value, node.input[3], label="projected_of_input")
    return _split_product(writer, writer.add("Mul", value, node.input[4], label="projected_scaled"))


def _split_product(writer: NodeWriter, value: str) -> SeparateInputs:
    """Add the bias of the operator, and divide its product by `qkv_hidden_sizes`."""
    node = writer.node
    width = writer.graph.dim(node.input[1], 1)
    if not isinstance(width, int):
        raise NotHandledError("the size of its weight is not known")
    widths = attribute_of(node, "qkv_hidden_sizes") or [width // 3] * 3
    if sum(widths) != width:
        raise NotHandledError("its weight is not that of its heads")
    if input_of(node, 2):
        value = writer.add("Add", value, node.input[2], label="projected_with_bias")
    return _split(writer, value, list(widths), writer.graph.dim(node.input[0], 1))


def _split(writer: NodeWriter, value: str, widths: Sequence[int], length: Dim) -> SeparateInputs:
    names = writer.add_many("Split", [value, writer.ints(widths, "sizes")], "qkv", axis=-1)
    first, second, third = (InputPart(name, width, length) for name, width in zip(names, widths, strict=True))
    return SeparateInputs((first, second, third), names[0])


SEPARATORS: Final[Mapping[str, Callable[[NodeWriter], SeparateInputs | None]]] = {
    f"{CONTRIB}.MultiHeadAttention": _separate_multi_head,
    f"{CONTRIB}.GroupQueryAttention": _separate_grouped,
    f"{CONTRIB}.Attention": _separate_product,
    f"{CONTRIB}.QAttention": _separate_quantized,
}
"""Operator → the function that separates its inputs."""


@dataclass(frozen=True, slots=True)
class UnpackedModel:
    """The result of `unpack_attentions`.

    unpacked: output of a rewritten operator → `SeparateInputs.marker`.
    notes: a sentence on each operator that was left.
    """

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
    """Separate the inputs of all packed attention operators of `model`.

    Args:
        model: the model, which does not change.
        left: outputs of operators that stay as they are.
    """
    view = GraphView(model)
    packed = [node for node in view.own if op_of(node) in SEPARATORS and node.output[0] not in left]
    if not packed:
        return UnpackedModel(model)
    rewriter = Rewriter(view)
    markers: dict[str, str] = {}
    notes: list[str] = []
    for node in packed:
        writer = _UnpackedWriter(node, rewriter)
        try:
            _check(writer)
            inputs = separate_inputs(writer)
        except NotHandledError as why:
            notes.append(f"{node.name or node.output[0]}, a {op_of(node)}, is not taken apart: {why}")
            continue
        if inputs is not None:
            ENDS[op_of(node)](writer, inputs)
            rewriter.replace_by(node, writer.nodes)
            markers[node.output[0]] = inputs.marker
    return UnpackedModel(rewriter.to_model() if markers else model, markers, tuple(notes))


def _check(writer: NodeWriter) -> None:
    """Raise where the operator has an input, an attribute or an output that the new operator does not take."""
    node = writer.node
    limits = LIMITS.get(op_of(node))
    if limits is None:
        return
    for position, title in limits.refused_inputs.items():
        if input_of(node, position):
            raise NotHandledError(f"it has {title}{limits.advice}")
    for name in ("do_rotary", "past_present_share_buffer"):
        if attribute_of(node, name, 0):
            raise NotHandledError(f"it has {name}")
    if any(node.output[limits.most_outputs :]):
        raise NotHandledError(f"it has a second output{limits.advice}")
    mask = input_of(node, limits.mask)
    if mask and writer.graph.rank(mask) not in (2, 3):
        raise NotHandledError(f"it has a mask of lengths{limits.advice}")


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
        writer.add("Gather", past, writer.constant(np.array(at), f"past_{name}.place"), label=f"past_{name}", axis=0)
        for at, name in enumerate(("key", "value") if past else ())
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
"""Label in `separate_inputs`, which other rewrites call too → the label in this writer's names."""

KEPT: Final = ("num_heads", "scale", "mask_filter_value", "unidirectional")
"""The attributes that Attention and QAttention share with MultiHeadAttention."""

ADVICE: Final = "; put decompose-attention before split-qkv"
"""The end of a message: the step that takes the operator apart."""


@dataclass(frozen=True, slots=True)
class _Limits:
    """What of an operator MultiHeadAttention cannot express.

    refused_inputs: position of an input that it does not take → what the input is.
    most_outputs: the outputs that it has too.
    mask: the position of the mask among the inputs.
    advice: the end of a message.
    """

    refused_inputs: Mapping[int, str]
    most_outputs: int
    mask: int
    advice: str = ""


LIMITS: Final[Mapping[str, _Limits]] = {
    f"{CONTRIB}.Attention": _Limits({4: "a past", 6: "past_sequence_length"}, most_outputs=1, mask=3, advice=ADVICE),
    f"{CONTRIB}.QAttention": _Limits({}, most_outputs=2, mask=5),
}
"""Operator → its limits; the others are written again as they are."""

ENDS: Final[Mapping[str, Callable[[NodeWriter, SeparateInputs], None]]] = {
    f"{CONTRIB}.MultiHeadAttention": _end_as_it_is,
    f"{CONTRIB}.GroupQueryAttention": _end_as_it_is,
    f"{CONTRIB}.Attention": _end_multi_head,
    f"{CONTRIB}.QAttention": _end_quantized,
}
"""Operator → the function that writes it with separate inputs."""
