"""Read the inputs of onnxruntime's attention operators that hold Q, K and V in one, and separate them.

The weight inside of `Attention` and `QAttention` becomes a product, and a packed input is divided by the layout ops
that the operator stands for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from onnx import TensorProto

from passes.graph.op_facts import attribute_of, input_of, op_of
from passes.rewrites.node_writer import Dim, GraphTypes, NodeWriter, NotHandledError

DOMAIN: Final = "com.microsoft"


@dataclass(frozen=True, slots=True)
class InputPart:
    """Q, K or V as a value of its own: [batch, length, width]."""

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


def separate_inputs(writer: NodeWriter, types: GraphTypes) -> SeparateInputs | None:
    """Write the nodes that separate the inputs of `writer.node`; None if each of Q, K and V is an input already.

    Raises:
        NotHandledError: the sizes are not known, or not those that the operator takes.
    """
    return SEPARATORS[op_of(writer.node)](writer, types)


def _separate_multi_head(writer: NodeWriter, types: GraphTypes) -> SeparateInputs | None:
    """MultiHeadAttention with [batch, length, heads, 3, size] as Q, or [batch, length, heads, 2, size] as K."""
    query, key, value = (input_of(writer.node, place) for place in range(3))
    if value:
        return None
    if not key:
        parts, marker = _unstack(writer, types, query, "qkv")
    else:
        width = types.dim(query, 2)
        if not isinstance(width, int) or types.rank(query) != 3:
            raise NotHandledError(f"the shape of its input {query} is not known, or not [batch, length, width]")
        parts, marker = _unstack(writer, types, key, "kv")
        parts = [InputPart(query, width, types.dim(query, 1)), *parts]
    first, second, third = parts
    return SeparateInputs((first, second, third), marker)


def _unstack(writer: NodeWriter, types: GraphTypes, value: str, names: str) -> tuple[list[InputPart], str]:
    """The parts of a value with all of them along its axis 3, and the output of the first node that takes one."""
    heads, size = types.dim(value, 2), types.dim(value, 4)
    is_packed = types.rank(value) == 5 and types.dim(value, 3) == len(names)
    if not is_packed or not isinstance(heads, int) or not isinstance(size, int):
        raise NotHandledError(f"its input {value} is not packed in {len(names)}, or its shape is not known")
    sizes = writer.ints([0, 0, heads * size], "shape")
    chosen = [
        writer.add(
            "Gather", value, writer.scalar(place, TensorProto.INT64, f"place_{place}"), label=f"{name}_heads", axis=3
        )
        for place, name in enumerate(names)
    ]
    values = [writer.add("Reshape", part, sizes, label=name) for part, name in zip(chosen, names, strict=True)]
    return [InputPart(part, heads * size, types.dim(value, 1)) for part in values], chosen[0]


def _separate_grouped(writer: NodeWriter, types: GraphTypes) -> SeparateInputs | None:
    """GroupQueryAttention with Q, K and V joined in its first input."""
    node = writer.node
    if input_of(node, 1) or input_of(node, 2):
        return None
    width = types.dim(node.input[0], 2)
    heads, groups = (int(attribute_of(node, name, 0)) for name in ("num_heads", "kv_num_heads"))
    if not isinstance(width, int) or not heads or not groups or width % (heads + 2 * groups):
        raise NotHandledError("its width is not known, or not that of its heads")
    size = width // (heads + 2 * groups)
    widths = [count * size for count in (heads, groups, groups)]
    return _split(writer, node.input[0], widths, types.dim(node.input[0], 1))


def _separate_product(writer: NodeWriter, types: GraphTypes) -> SeparateInputs:
    """Attention multiplies with one weight for Q, K and V."""
    data, weight = writer.node.input[:2]
    return _split_product(writer, types, writer.add("MatMul", data, weight, label="projected"))


def _separate_quantized(writer: NodeWriter, types: GraphTypes) -> SeparateInputs:
    """QAttention multiplies integers: the products are exact, and are scaled as the operator scales them."""
    node = writer.node
    integers = [input_of(node, place) for place in (0, 1, 6, 7)]
    while not integers[-1]:
        integers.pop()
    value = writer.add("MatMulInteger", *integers, label="projected")
    value = writer.add("Cast", value, label="projected_float", to=TensorProto.FLOAT)
    value = writer.add("Mul", value, node.input[3], label="projected_of_input")
    return _split_product(writer, types, writer.add("Mul", value, node.input[4], label="projected_scaled"))


def _split_product(writer: NodeWriter, types: GraphTypes, value: str) -> SeparateInputs:
    """Add the bias of the operator, and divide its product by `qkv_hidden_sizes`."""
    node = writer.node
    width = types.dim(node.input[1], 1)
    if not isinstance(width, int):
        raise NotHandledError("the size of its weight is not known")
    widths = attribute_of(node, "qkv_hidden_sizes") or [width // 3] * 3
    if sum(widths) != width:
        raise NotHandledError("its weight is not that of its heads")
    if input_of(node, 2):
        value = writer.add("Add", value, node.input[2], label="projected_with_bias")
    return _split(writer, value, list(widths), types.dim(node.input[0], 1))


def _split(writer: NodeWriter, value: str, widths: Sequence[int], length: Dim) -> SeparateInputs:
    names = writer.add_many("Split", [value, writer.ints(widths, "sizes")], "qkv", axis=-1)
    first, second, third = (InputPart(name, width, length) for name, width in zip(names, widths, strict=True))
    return SeparateInputs((first, second, third), names[0])


SEPARATORS: Final[Mapping[str, Callable[[NodeWriter, GraphTypes], SeparateInputs | None]]] = {
    f"{DOMAIN}.MultiHeadAttention": _separate_multi_head,
    f"{DOMAIN}.GroupQueryAttention": _separate_grouped,
    f"{DOMAIN}.Attention": _separate_product,
    f"{DOMAIN}.QAttention": _separate_quantized,
}
"""Operator → the function that separates its inputs."""
