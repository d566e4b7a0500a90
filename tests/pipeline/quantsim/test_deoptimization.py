"""What a baseline holds of the final model: sizes, fused operators, islands of targets, cost."""

from __future__ import annotations

import numpy as np
import onnx

from pipeline.baseline import changes
from pipeline.quantsim.deoptimization import graph_entry
from tests.support.onnx_models import detached, matrix

HEAD = '<ir_version: 10, opset_import: ["": 20, "com.microsoft": 1]>'
BLOCK = """g (float[{batch}, 4, 8] x) => (float[{batch}, 4, 8] y) {{
    a = MatMul (x, w) b = LayerNormalization (a, s) c = Gelu (b) y = Softmax (c)
}}"""
BROKEN = """g (float[2, 4, 8] x) => (float[2, 4, 8] y) {
    a = MatMul (x, w) b = LayerNormalization (a, s) c = Div (b, root) d = Erf (c) e = Add (d, one) f = Mul (b, e)
    h = Mul (f, half) i = Erf (h) y = Softmax (i)
}"""


def entry(text: str) -> dict[str, object]:
    model = onnx.parser.parse_model(HEAD + text)
    numbers = {"root": np.sqrt(2), "one": 1, "half": 0.5}
    stored = {"w": matrix(8, 8, 0), "s": np.ones(8, np.float32)}
    stored |= {name: np.array(number, np.float32) for name, number in numbers.items() if name in text.split("{")[1]}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in stored.items())
    return graph_entry(detached(model))


def test_fused_operators_fixed_sizes_and_cost_are_counted() -> None:
    found = entry(BLOCK.format(batch=2))
    assert found["shapes"] == {"fixed": 4, "open": 0}
    assert found["fused"] == {"Gelu": 1, "LayerNormalization": 1, "Softmax": 1}
    assert found["cost"] == {"macs": 2 * 4 * 8 * 8, "peak_bytes": 2 * (2 * 4 * 8 * 4)}
    assert found["islands"] == found["islands"] | {"qnn-htp": 0, "ort-cpu": 0}  # pyright: ignore[reportOperatorIssue]


def test_what_is_lost_is_a_line_of_the_check() -> None:
    before, lost, opened = entry(BLOCK.format(batch=2)), entry(BROKEN), entry(BLOCK.format(batch="N"))
    lines = changes({"graph": before}, {"graph": lost})
    assert "graph › fused › Gelu: 1 → (nothing)" in lines
    assert "graph › islands › qnn-htp: 0 → 2" in lines  # two Erf, with other operators between them
    lines = changes({"graph": before}, {"graph": opened})
    assert "graph › shapes › open: 0 → 4" in lines and "graph › shapes › fixed: 4 → 0" in lines
