"""Small models for quantization, as ONNX text, and how their graphs are read back."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import numpy_helper, parser, printer

from passes.weights.detached import DetachedModel, attach, detach
from pipeline.config.quantsim import FLOAT, parse_precision
from pipeline.quantsim.placement import Placement, PlacementRule


def model_of(text: str, opset: int = 21, /, **constants: np.ndarray) -> DetachedModel:
    """The model of a graph in ONNX's text form, with constants beside it."""
    model = parser.parse_model(f'<ir_version: 10, opset_import: ["" : {opset}]>\n{text}')
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in constants.items())
    onnx.checker.check_model(model)
    return detach(model)


def dependent_rows(count: int, seed: int) -> list[dict[str, np.ndarray]]:
    """Samples of x: rows whose elements depend on each other, as those of a trained model do, so that rounding one
    element up can make up for another."""
    draw = np.random.default_rng(seed)
    mixed = np.random.default_rng(9).normal(size=(6, 32))
    rows = (draw.normal(size=(16, 6)) @ mixed + draw.normal(size=(16, 32)) / 10 for _ in range(count))
    return [{"x": array.astype(np.float32)} for array in rows]


def nodes_of(model: DetachedModel) -> list[str]:
    """Each node in a line of ONNX's text form, without its name."""
    lines = []
    for node in attach(model).graph.node:
        node.ClearField("name")
        lines.append(" ".join(printer.to_text(node).split()))
    return lines


def rule(selector: str, weights: str | None = None, activations: str | None = None) -> PlacementRule:
    """A rule with formats as a configuration writes them."""
    formats = (None if text is None else parse_precision(text) or FLOAT for text in (weights, activations))
    return PlacementRule(selector, *formats)


def picture(placement: Placement) -> list[str]:
    """A line for each tensor: its role, and its format or why it stays in float."""
    return [
        f"{placed.site.role} {placed.site.tensor}: {placed.precision or placed.reason}" for placed in placement.sites
    ]


MLP = """mlp (float[2, 4] x) => (float[2, 3] y) {
    h = Gemm(x, first, bias)
    r = Relu(h)
    t = Reshape(r, shape)
    y = MatMul(t, second)
}"""


def mlp() -> DetachedModel:
    """Two products with a Relu and a Reshape between them."""
    draw = np.random.default_rng(0)
    return model_of(
        MLP,
        first=draw.standard_normal((4, 8)).astype(np.float32),
        bias=draw.standard_normal(8).astype(np.float32),
        shape=np.array([2, 8], np.int64),
        second=draw.standard_normal((8, 3)).astype(np.float32),
    )
