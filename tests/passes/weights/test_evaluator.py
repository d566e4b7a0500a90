"""ONNX's evaluator with a Loop and a Scan of ours, next to onnxruntime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx.parser import parse_model as parse

from passes.weights.evaluator import open_evaluator

LOOP = """
<ir_version: 10, opset_import: ["" : 20, "own" : 1]>
g (float[2, 4] x, int64 n) => (float[2, 4] y, float[2, 4] z, float[T, 2, 4] rows, int64[T] turns)
    <bool yes = {1}, float[4] w = {1, 2, 3, 4}> {
    y, z, rows, turns = CALL
}
<domain: "own", opset_import: ["" : 20]> F (n, yes, x, w) => (y, z, rows, turns) {
    y, z, rows, turns = Loop (n, yes, x, x) <body =
        b (int64 i, bool goes, float[2, 4] a, float[2, 4] b) =>
          (bool more, float[2, 4] c, float[2, 4] d, float[2, 4] e, int64 k) {
            two = Constant <value_int = 2> ()
            more = Less (i, two)
            c = Add (a, w)
            d = Mul (b, c)
            e = Relu (d)
            k = Identity (i)
    }>
}
"""


@pytest.mark.parametrize("turns", [0, 1, 2, 9])
@pytest.mark.parametrize("call", ["own.F (n, yes, x, w)", "own.F (n, , x, w)"], ids=["a condition", "none"])
def test_a_loop_makes_its_turns(call: str, turns: int) -> None:
    model = parse(LOOP.replace("CALL", call))
    feeds = {"x": np.arange(-4, 4, dtype=np.float32).reshape(2, 4), "n": np.array(turns)}
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    results: tuple[Any, ...] = (session.run(None, feeds), open_evaluator(model).run(None, feeds))
    for expected, found in zip(*results, strict=True):
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


SCAN = """
<ir_version: 9, opset_import: ["" : 18]>
g (float[3, 4] start, float[SHAPE] x, float[1] c) => (float[3, 4] last, float[?, ?, ?] y, float[?, ?, ?] z) {
    outer = Neg (c)
    last, y, z = Scan <body = b (float[3, 4] a, float[3, 4] e) => (float[3, 4] f, float[3, 4] g, float[3, 4] h) {
        f = Sub (a, e)
        g = Mul (f, outer)
        h = Abs (f)
    }, num_scan_inputs = 1 ATTRIBUTES> (start, x)
}
"""


@pytest.mark.parametrize(
    ("attributes", "shape"),
    [
        ("", (5, 3, 4)),
        (", scan_input_axes = [1], scan_output_axes = [2, -2]", (3, 5, 4)),
        (", scan_input_axes = [-1], scan_input_directions = [1]", (3, 4, 5)),
        (", scan_output_directions = [1, 0], scan_output_axes = [1, 1]", (5, 3, 4)),
    ],
)
def test_a_scan_goes_along_any_axis(attributes: str, shape: tuple[int, ...]) -> None:
    text = SCAN.replace("ATTRIBUTES", attributes).replace("SHAPE", ", ".join(map(str, shape)))
    model, draw = parse(text.replace("[?, ?, ?]", "[M, N, K]")), np.random.default_rng(0)
    feeds = {"start": (3, 4), "x": shape, "c": (1,)}
    arrays = {name: draw.standard_normal(sizes, np.float32) for name, sizes in feeds.items()}
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    results: tuple[Any, ...] = (session.run(None, arrays), open_evaluator(model).run(None, arrays))
    for expected, found in zip(*results, strict=True):
        np.testing.assert_array_equal(found, expected)
