"""ONNX's evaluator with a Loop of ours, next to onnxruntime."""

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
