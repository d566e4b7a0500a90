"""Functions whose attributes have defaults compute the same after they are inlined."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime

from passes.graph.traversal import inline_functions
from pipeline.onnx_backend import OnnxlineBackend

MODEL = """
<ir_version: 10, opset_import: ["": 20, "my": 1]>
g (float[2, 3] x, bool c) => (float[2, 3] y, float[2, 3] z) {
    a = my.twice (x)
    y = my.leaky <slope = 0.5> (a)
    z = If (c) <then_branch = t () => (float[2, 3] u) { u = my.leaky (x) },
                else_branch = e () => (float[2, 3] v) { v = my.twice (x) }>
}
<domain: "my", opset_import: ["": 20]>
leaky <slope: float = 0.25> (x) => (y) { y = LeakyRelu <alpha: float = @slope> (x) }
<domain: "my", opset_import: ["": 20, "my": 1]>
twice (x) => (y) { a = my.leaky (x)  y = my.leaky <slope = 0.125> (a) }
"""
X = np.array([[-1, 2, -4], [8, -16, 0.5]], np.float32)


def test_a_call_without_an_attribute_has_the_default_of_the_function() -> None:
    """ONNX's inliner drops the default, and LeakyRelu then has its own, 0.01."""
    model = onnx.parser.parse_model(MODEL)
    before = model.SerializeToString()
    inlined = inline_functions(model)
    assert not inlined.functions
    for branch in (True, False):
        feeds = {"x": X, "c": np.array(branch)}
        first, then = X * np.where(X < 0, 0.25, 1), X * np.where(X < 0, 0.03125, 1)
        for found in (model, inlined):
            session = onnxruntime.InferenceSession(found.SerializeToString(), providers=["CPUExecutionProvider"])
            y, z = session.run(None, feeds)
            assert np.array_equal(y, then * np.where(X < 0, 0.5, 1))
            assert np.array_equal(z, first if branch else then)
        assert np.array_equal(OnnxlineBackend.prepare(model).run(feeds)[1], first if branch else then)
    assert model.SerializeToString() == before, "the user's model has changed"
