"""Quantized models as tools write them, and the float tensors that their encodings are for."""

from __future__ import annotations

import numpy as np
import pytest

from passes.encodings.from_qdq import read_qdq
from passes.errors import UsageError
from passes.weights.detached import DetachedModel
from tests.support.onnx_models import detached, model_of

NAMES = {
    "onnxline": ("h", "h_quantized", "h_dequantized", "w_quantized", "w_dequantized"),
    "onnxruntime": (
        "h",
        "h_QuantizeLinear_Output",
        "h_DequantizeLinear_Output",
        "w_quantized",
        "w_DequantizeLinear_Output",
    ),
    "onnxsim": ("h/f", "h/q", "h", "w/qdq21/int8", "w/qdq21/dq"),
    "NNCF": ("h", "q_output_h_1", "dq_output_h_1", "q_output_w_1", "dq_output_w_1"),
}
"""Tool → its names of a float value, the same quantized and dequantized, and of a stored weight."""


def tools_model(tool: str) -> DetachedModel:
    value, numbers, back, stored, weight = (f"name_{index}" for index in range(5))
    text = f"""
    g (float[2, 4] x) => (float[2, 3] y) {{
        {value} = Relu (x)
        {numbers} = QuantizeLinear ({value}, s, z)
        {back} = DequantizeLinear ({numbers}, s, z)
        {weight} = DequantizeLinear <axis = 1> ({stored}, ws, wz)
        y = MatMul ({back}, {weight})
    }}"""
    whole = np.arange(12).reshape(4, 3).astype(np.int8)
    scales = {"s": np.array(0.5, np.float32), "ws": np.array([1, 2, 3], np.float32)}
    model = model_of(text, name_3=whole, z=np.array(7, np.uint8), wz=np.zeros(3, np.int8), **scales)
    spelled = dict(zip((value, numbers, back, stored, weight), NAMES[tool], strict=True))
    for tensor in model.graph.initializer:
        tensor.name = spelled.get(tensor.name, tensor.name)
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = [spelled.get(name, name) for name in names]
    del model.graph.value_info[:]
    return detached(model)


@pytest.mark.parametrize("tool", NAMES)
def test_the_names_of_tools(tool: str) -> None:
    found = read_qdq(tools_model(tool))
    assert found.keys() == {"h", "w"}
    assert (str(found["h"].precision), float(found["h"].scale), int(found["h"].zero_point)) == ("uint8", 0.5, 7)
    assert (str(found["w"].precision), found["w"].axis, found["w"].scale.tolist()) == ("int8/channel", 1, [1, 2, 3])


TWICE = """
g (float[2] x) => (float[2] y) {
    a = QuantizeLinear (x, s, z)
    b = DequantizeLinear (a, s, z)
    c = QuantizeLinear (x, t, z)
    d = DequantizeLinear (c, t, z)
    y = Add (b, d)
}
"""
COMPUTED = """
g (float[2] x, float s) => (float[2] y) {
    a = QuantizeLinear (x, s, z)
    y = DequantizeLinear (a, s, z)
}
"""


def test_a_tensor_with_two_encodings_is_refused() -> None:
    model = model_of(TWICE, s=np.array(1, np.float32), t=np.array(2, np.float32), z=np.array(0, np.uint8))
    with pytest.raises(UsageError, match="quantizes 'x' in two ways"):
        read_qdq(detached(model))


def test_a_scale_that_is_computed_is_refused() -> None:
    with pytest.raises(UsageError, match="'s' is computed; expected a constant"):
        read_qdq(detached(model_of(COMPUTED, z=np.array(0, np.uint8))))
