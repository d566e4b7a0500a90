"""Models as ONNX text with drawn weights, and models as text again: what a pass has made, one line for each node."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import groupby

import numpy as np
import onnx
import onnx.parser
from onnx import NodeProto, numpy_helper

from passes.graph.formatting import format_attribute
from passes.proof.draws import draw_array
from passes.weights.detached import DetachedModel

HEADER = '<ir_version: 9, opset_import: ["": {opset}, "com.microsoft": 1]>\n'

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
"""Q, K and V as pieces of a product with a bias after it."""


def for_q_k_and_v(text: str) -> str:
    """Lines with `$` that follow each other stand there three times: `$` is q, then k, then v."""
    runs = [(roles, list(lines)) for roles, lines in groupby(text.splitlines(), lambda line: "$" in line)]
    return "\n".join(
        line.replace("$", role) for roles, lines in runs for role in ("qkv" if roles else "q") for line in lines
    )


def merged_model(text: str, opset: int = 20) -> onnx.ModelProto:
    """A model from a graph in ONNX text. What it declares and does not compute is a weight, drawn by its name.

    `$` stands for q, k and v, as in `for_q_k_and_v`; `#` before integers in the inputs of a node makes a constant of
    them, and names may have dots.
    """
    stored: dict[str, np.ndarray] = {}

    def name(found: re.Match[str]) -> str:
        numbers = np.array(eval(found[1]), np.int64)
        known = f"n_{re.sub(r'[^0-9]+', '_', found[1].replace('-', 'm'))}_{len(stored)}"
        stored[known] = numbers
        return known

    quoted = re.sub(r"(?<![\w.])(?!com\.)[a-zA-Z_]\w*(\.\w+)+", r'"\g<0>"', for_q_k_and_v(text))
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


def parse_renamed(text: str, new_name: Callable[[str], str]) -> onnx.ModelProto:
    """The model of a text, with the names of its values changed: ONNX's text has no `present.0.key`."""
    model = onnx.parser.parse_model(text)
    for info in (*model.graph.input, *model.graph.output):
        info.name = new_name(info.name)
    for node in model.graph.node:
        node.input[:], node.output[:] = map(new_name, node.input), map(new_name, node.output)
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
    return [line.strip() for line in for_q_k_and_v(text.strip()).splitlines()]


def arrays_of(model: DetachedModel) -> dict[str, np.ndarray]:
    return {one.name: model.array(one) for one in model.proto.graph.initializer}


def body(model: onnx.ModelProto) -> list[str]:
    """One line for each node, without attributes."""
    return [f"{', '.join(n.output)} = {n.op_type} ({', '.join(n.input)})" for n in model.graph.node]
