"""Models with merged projections as ONNX text, what a pass makes of them as text, and the comparison of both."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import onnx
from onnx import NodeProto, numpy_helper

from passes.graph.formatting import format_attribute
from passes.proof.draws import draw_array
from passes.rewrites.split_product import SplitModel
from passes.weights.detached import DetachedModel, attach
from passes.weights.sessions import Session
from tests.support.onnx_models import detached

HEADER = '<ir_version: 9, opset_import: ["": {opset}, "com.microsoft": 1]>\n'

TOLERANCE = 2e-6
"""Sums of 32 float32 products of about 0.03 each, which a matrix of another width adds up in another order."""

ATTENTION = """
    kt = Transpose <perm = [0, 1, 3, 2]> (k)
    s = MatMul (q, kt)
    p = Softmax <axis = -1> (s)
    y = MatMul (p, v)
"""
"""Attention of q, k and v, which are (batch, heads, length, size)."""

ATTENTION_PICTURE = [line.strip() for line in ATTENTION.strip().splitlines()]

THREE_SLICES = """g (float[2, 1, 8, 32] x) => (float[2, 1, 8, 32] y) <float[32, 96] qkv.weight, float[96] qkv.bias> {
    product = MatMul (x, qkv.weight)
    sum = Add (qkv.bias, product)
    q = Slice (sum, #[0], #[32], #[3], #[1])
    k = Slice (sum, #[32], #[64], #[-1])
    v = Slice (sum, #[64], #[9223372036854775807], #[3])"""
"""Q, K and V as pieces of a product with a bias behind it."""


def merged_model(text: str, opset: int = 20) -> onnx.ModelProto:
    """A model from a graph in ONNX text. What it declares and does not compute is a weight, drawn by its name.

    `#` before integers in the inputs of a node makes a constant of them, and names may have dots.
    """
    stored: dict[str, np.ndarray] = {}

    def name(found: re.Match[str]) -> str:
        numbers = np.array(eval(found[1]), np.int64)
        known = f"n_{re.sub(r'[^0-9]+', '_', found[1].replace('-', 'm'))}_{len(stored)}"
        stored[known] = numbers
        return known

    quoted = re.sub(r"(?<![\w.])(?!com\.)[a-zA-Z_]\w*(\.\w+)+", r'"\g<0>"', text)
    model = onnx.parser.parse_model(HEADER.format(opset=opset) + re.sub(r"#(\[[^]]*\]|-?\d+)", name, quoted))
    computed = {output for node in model.graph.node for output in node.output}
    for info in [info for info in model.graph.value_info if info.name not in computed]:
        shape = [dim.dim_value for dim in info.type.tensor_type.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type)
        low, high = (-0.3, 0.3) if dtype.kind == "f" else (1, 100)
        stored[info.name] = draw_array(info.name, shape, dtype.name, low, high)
    del model.graph.value_info[:]
    model.graph.initializer.extend(numpy_helper.from_array(array, known) for known, array in stored.items())
    return model


def picture(model: DetachedModel) -> list[str]:
    """One line for each node; constants of integers are written out."""
    numbers = {
        one.name: str(numpy_helper.to_array(one).tolist()).replace(" ", "")
        for one in model.proto.graph.initializer
        if one.data_type == onnx.TensorProto.INT64
    }
    return [_line(node, numbers) for node in model.proto.graph.node]


def _line(node: NodeProto, numbers: dict[str, str]) -> str:
    given = ", ".join(f"{one.name} = {format_attribute(one)}" for one in sorted(node.attribute, key=lambda a: a.name))
    inputs = ", ".join(numbers.get(name, name) for name in node.input)
    return f"{', '.join(node.output)} = {node.op_type}{f' <{given}>' if given else ''} ({inputs})"


def lines_of(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


def split_and_compare(
    model: onnx.ModelProto, split: Callable[[DetachedModel], SplitModel], feeds: dict[str, np.ndarray] | None = None
) -> SplitModel:
    """Split `model`, and check what holds for every form: a valid model, the same signature, the same outputs, and
    nothing left to do for a second run."""
    before = detached(model)
    text = before.proto.SerializeToString()
    result = split(before)
    assert before.proto.SerializeToString() == text, "the given model was changed"
    after = attach(result.model)
    onnx.checker.check_model(after, full_check=True)
    assert list(after.graph.input) == list(model.graph.input)
    assert list(after.graph.output) == list(model.graph.output)
    drawn = feeds or {
        info.name: draw_array(
            info.name, [dim.dim_value or 4 for dim in info.type.tensor_type.shape.dim], "float32", -1, 1
        )
        for info in model.graph.input
    }
    was, now = Session.of(before).run(drawn), Session.of(result.model).run(drawn)
    for name, value in was.items():
        np.testing.assert_allclose(now[name], value, rtol=0, atol=TOLERANCE)
    assert split(result.model).split == ()
    return result


def arrays_of(model: DetachedModel) -> dict[str, np.ndarray]:
    return {one.name: model.array(one) for one in model.proto.graph.initializer}


def assert_parts_of(merged: np.ndarray, parts: list[np.ndarray], axis: int = -1) -> None:
    """Each slice of `merged` is in one of `parts`, bit for bit and once."""

    def slices(array: np.ndarray) -> list[bytes]:
        moved = np.moveaxis(array, axis, 0)
        return [moved[at].tobytes() for at in range(len(moved))]

    assert sorted(slices(merged)) == sorted(one for part in parts for one in slices(part))
