"""Matrix products, and recurrent ops, which are products over time.

Optional inputs of an LSTM are filled in: the IR's kind has all inputs and all three outputs.
"""

from __future__ import annotations

import numpy as np

from pipeline.importers.from_onnx.node import Importer, Node, direct, read_flag, read_number
from pipeline.ir.graph import TensorSpec

__all__ = ["IMPORTERS"]

PLAIN_ACTIVATIONS = ("Sigmoid", "Tanh", "Tanh")
SEQUENCE_LENGTHS, PEEPHOLES = 4, 7


def einsum(node: Node) -> None:
    node.emit("Einsum", node.operands(), {"equation": node.attributes.text("equation").replace(" ", "")})


def lstm(node: Node) -> None:
    """W, R and B hold the gates in the order input, output, forget, cell, for each direction."""
    refuse_odd_cells(node)
    node.attributes.settle("hidden_size")
    x, weight, hidden = node.spec(0), node.spec(1), node.spec(2).sizes[2]
    steps, batch, directions = x.sizes[0], x.sizes[1], weight.sizes[0]
    state = (directions, batch, hidden)
    inputs = [node.operand(index) for index in range(3)]
    inputs.append(node.operand(3) if node.has(3) else zeros(node, (directions, 8 * hidden)))
    inputs += [node.operand(index) if node.has(index) else zeros(node, state) for index in (5, 6)]
    shapes = ((steps, directions, batch, hidden), state, state)
    names = [*node.output_names, "", ""][:3]
    base = next(filter(None, names))
    outputs = [
        (name or node.fresh(f"{base}.{role}"), TensorSpec(shape, x.dtype))
        for name, role, shape in zip(names, ("Y", "Y_h", "Y_c"), shapes, strict=True)
    ]
    node.make("LSTM", inputs, outputs, {"direction": node.attributes.text("direction", "forward")})


def refuse_odd_cells(node: Node) -> None:
    read = node.attributes
    activations = read.texts("activations") or PLAIN_ACTIVATIONS
    given = (
        ("layout 1", read.flag("layout")),
        ("a clip", "clip" in read),
        ("input_forget", read.flag("input_forget")),
        ("peepholes", node.has(PEEPHOLES)),
        (f"activations {activations}", activations[:3] != PLAIN_ACTIVATIONS or len(set(activations)) != 2),
        ("sequence lengths", node.has(SEQUENCE_LENGTHS)),
    )
    for what, found in given:
        if found:
            raise node.refusal(f"it has {what}, expected the plain cell over whole sequences")


def zeros(node: Node, shape: tuple[int, ...]) -> int:
    return node.constant_operand(np.zeros(shape, node.spec(0).dtype))


IMPORTERS: dict[str, Importer] = {
    "Einsum": einsum,
    "Gemm": direct(
        alpha=read_number("alpha", 1.0),
        beta=read_number("beta", 1.0),
        trans_a=read_flag("transA"),
        trans_b=read_flag("transB"),
    ),
    "LSTM": lstm,
    "MatMul": direct(),
}
