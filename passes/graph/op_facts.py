"""How operators treat elements. The checkers (`structures/*_check.py`) have tables of their own, on purpose."""

from __future__ import annotations

from typing import Final

from onnx import ModelProto, NodeProto

ONNX_DOMAINS: Final = ("", "ai.onnx")
"""Two names of ONNX's own domain."""

RANDOM_OPS: Final = frozenset(
    {"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Bernoulli", "Multinomial", "Dropout"}
)
"""Ops whose value differs from run to run."""

SIZES: Final = frozenset({"Shape", "Size"})
"""Ops that depend only on the shape of their input."""

COMMUTATIVE: Final = frozenset({"Add", "Mul", "And", "Or", "Xor", "Max", "Min", "Sum", "Mean", "Equal"})

RESHAPES: Final = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten"})
"""Ops that leave the elements in their order."""

LAYOUT_OPS: Final = RESHAPES | {"Transpose", "Identity"}
"""Ops whose result has all elements of their first input, each once."""

MOVES: Final = LAYOUT_OPS | {"Slice", "Expand", "Tile", "Split", "Gather", "DepthToSpace", "SpaceToDepth"}
"""Ops that move the elements of their first input; the other inputs are positions or sizes."""


def moved_inputs(node: NodeProto) -> list[str]:
    """The inputs whose elements `node` moves; empty when it does something else with them."""
    if node.domain not in ONNX_DOMAINS:
        return []
    return list(node.input) if node.op_type == "Concat" else list(node.input[: node.op_type in MOVES])


def has_body(node: NodeProto) -> bool:
    """Whether `node` has a graph as an attribute."""
    return any(one.HasField("g") or one.graphs for one in node.attribute)


def is_opaque(node: NodeProto) -> bool:
    """Whether `node` cannot be run apart from its model: it is random, or it has a body."""
    return node.op_type in RANDOM_OPS or has_body(node)


def op_name(node: NodeProto) -> str:
    """`Softmax`, or with a domain that is not ONNX's own: `com.microsoft::Attention`."""
    return node.op_type if node.domain in ONNX_DOMAINS else f"{node.domain}::{node.op_type}"


def opset_of(model: ModelProto) -> int:
    """The opset of ONNX's own operators; 0 where the model names none."""
    return max((entry.version for entry in model.opset_import if entry.domain in ONNX_DOMAINS), default=0)
