"""A small model as a file, and formats to quantize it in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper, parser

from pipeline.config.quantsim import parse_precision
from pipeline.quantsim.placement import PlacementRule

MLP = """<ir_version: 10, opset_import: ["" : 21]>
mlp (float[2, 4] x) => (float[2, 3] y) {
    h = Gemm(x, first, bias)
    r = Relu(h)
    t = Reshape(r, shape)
    y = MatMul(t, second)
}"""

FORMATS = [("int8/channel", "uint8"), ("int8", "int16"), ("int4/block2", "uint16"), ("uint4/channel", "uint6")]
"""Of weights and of activations."""


def mlp_file(folder: Path) -> Path:
    """Two products with a Relu and a Reshape between them."""
    draw = np.random.default_rng(0)
    weights = {"first": (4, 8), "bias": (8,), "second": (8, 3)}
    model = parser.parse_model(MLP)
    arrays = {name: draw.standard_normal(shape).astype(np.float32) for name, shape in weights.items()}
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    model.graph.initializer.append(numpy_helper.from_array(np.array([2, 8], np.int64), "shape"))
    onnx.save(model, folder / "mlp.onnx")
    return folder / "mlp.onnx"


def placement_rule(weights: str, activations: str) -> PlacementRule:
    return PlacementRule("op:*", parse_precision(weights), parse_precision(activations))
