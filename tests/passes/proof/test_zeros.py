"""What follows from a zeroed weight is what running it would show, and nothing is claimed where it is not sure."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest

from passes.proof.fault_injection import zeros_of

GRAPH = """
< ir_version: 10, opset_import: ["" : 20] >
g (float[2, 3] x) => (float[2, 4] bare, float[2, 4] turned, float[2, 4] biased, float[2, 4] other, float[2, 4] curved)
< float[3, 4] w = {%s}, float[4, 3] t = {%s}, float[4] b = {1, 2, 3, 4}, float[3, 4] v = {%s} > {
    bare = MatMul(x, w)
    u = Transpose<perm = [1, 0]>(t)
    turned = MatMul(x, u)
    biased = Gemm(x, w, b)
    other = MatMul(x, v)
    deeper = Add(x, x)
    curved = MatMul(deeper, w)
}
""" % ((", ".join(map(str, range(1, 13))),) * 3)


def model() -> onnx.ModelProto:
    return onnx.parser.parse_model(GRAPH)


def test_products_with_zeros_in_whatever_layout_are_zeros() -> None:
    assert zeros_of(model().graph, ["w", "t"], {"x": np.ones((2, 3), np.float32)}) == {"w", "t", "u", "bare", "turned"}


def test_what_is_said_to_be_zero_is_zero_when_it_is_run() -> None:
    proto, fed = model(), {"x": np.arange(6, dtype=np.float32).reshape(2, 3)}
    zeros = zeros_of(proto.graph, ["w", "t"], fed)
    for tensor in proto.graph.initializer:
        if tensor.name in ("w", "t"):
            tensor.CopyFrom(onnx.numpy_helper.from_array(np.zeros(tuple(tensor.dims), np.float32), tensor.name))
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_outputs()]
    ran = {name for name, array in zip(names, session.run(None, fed), strict=True) if not np.asarray(array).any()}
    assert zeros.intersection(names) == {"bare", "turned"}
    assert zeros.intersection(names) <= ran


@pytest.mark.parametrize("odd", [np.nan, np.inf])
def test_zero_times_what_is_not_finite_is_not_zero(odd: float) -> None:
    x = np.ones((2, 3), np.float32)
    x[0, 0] = odd
    assert zeros_of(model().graph, ["w", "t"], {"x": x}) == {"w", "t", "u"}
