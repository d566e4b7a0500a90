"""Embedding: a lookup of rows in a table of weights, by numbers that are known only at run time."""

from __future__ import annotations

from collections.abc import Iterator

from onnx import TensorProto, helper

from passes.structures.sketch import Sketch
from passes.structures.view import GraphView

__all__ = ["embeddings"]

TABLE_TYPES = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE})


def embeddings(view: GraphView) -> Iterator[Sketch]:
    """Gather on axis 0 of a matrix. A lookup by a constant is a constant, whoever folds it; it is left out later."""
    for node in view.by_op.get("Gather", ()):
        axis = next((helper.get_attribute_value(one) for one in node.attribute if one.name == "axis"), 0)
        table = view.weight_behind(node.input[0])
        if table is None or axis != 0 or len(table.dims) != 2 or table.data_type not in TABLE_TYPES:
            continue
        yield Sketch(node, (node,), (node.output[0],))
