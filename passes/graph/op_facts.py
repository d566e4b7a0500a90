"""What operators do with elements. The checkers (`structures/*_check.py`) have tables of their own, on purpose."""

from __future__ import annotations

from typing import Final

from onnx import NodeProto

__all__ = [
    "COMMUTATIVE",
    "LAYOUT_OPS",
    "ONNX_DOMAINS",
    "RANDOM_OPS",
    "RESHAPES",
    "SIZES",
    "has_body",
    "is_opaque",
    "moved_inputs",
]

ONNX_DOMAINS: Final = ("", "ai.onnx")
"""Two names of ONNX's own domain."""

RANDOM_OPS: Final = frozenset(
    {"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Bernoulli", "Multinomial", "Dropout"}
)
"""Ops whose value is another one each time."""

SIZES: Final = frozenset({"Shape", "Size"})
"""To ask for a size is not to compute with a value."""

COMMUTATIVE: Final = frozenset({"Add", "Mul", "And", "Or", "Xor", "Max", "Min", "Sum", "Mean", "Equal"})

RESHAPES: Final = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten"})
"""Ops that leave the elements in their order."""

LAYOUT_OPS: Final = RESHAPES | {"Transpose", "Identity"}
"""Ops whose result has all elements of their first input, each once."""

MOVES: Final = LAYOUT_OPS | {"Slice", "Expand", "Tile", "Split", "Gather", "DepthToSpace", "SpaceToDepth"}
"""Ops that move the elements of their first input; the others say where to."""


def moved_inputs(node: NodeProto) -> list[str]:
    """The inputs whose elements `node` moves; empty when it does something else with them."""
    if node.domain not in ONNX_DOMAINS:
        return []
    return list(node.input) if node.op_type == "Concat" else list(node.input[: node.op_type in MOVES])


def has_body(node: NodeProto) -> bool:
    """Whether a graph lies inside of it."""
    return any(one.HasField("g") or one.graphs for one in node.attribute)


def is_opaque(node: NodeProto) -> bool:
    """A node that is not run in pieces: its value is another one each time, or it holds a graph."""
    return node.op_type in RANDOM_OPS or has_body(node)
