"""`to-float32`: every value inside is float32, and inputs and outputs keep their types."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from passes import Status, optimize
from passes.graph.inference import types_of
from passes.rewrites.to_float32 import widen_attributes
from passes.weights.detached import attach
from tests.support.onnx_models import model_of

KINDS = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}

TEXT = """g (KIND[2, 4] x, KIND[4] b) => (KIND[2, 4] y, KIND[2, 4] z, KIND[2, 4] x2, int64[2] n) {
    one = Constant <value_float = 0.5> () half = Cast <to = NUMBER> (one)
    h = MatMul(x, w) s = Add(h, b) wide = Cast <to = NUMBER> (s) y = Mul(wide, half) z = Relu(y) x2 = Identity(x)
    n = Shape(y)
}"""


@pytest.mark.parametrize("kind", KINDS)
def test_all_that_is_computed_is_float32(kind: str) -> None:
    text = TEXT.replace("KIND", kind).replace("NUMBER", str(KINDS[kind]))
    weight = np.random.default_rng(0).normal(size=(4, 4)).astype(kind if kind == "float16" else ml_dtypes.bfloat16)
    model = model_of(text, 21, w=weight)
    run = optimize(model, ["to-float32"])
    (row,) = run.rows
    assert row.status == Status.RAN and row.changed and all(errors.ok for errors in row.errors.values())
    made = attach(run.model)
    ends = {info.name for info in (*made.graph.input, *made.graph.output)}
    assert {info.name: info.type for info in model.graph.output} == {info.name: info.type for info in made.graph.output}
    types = {name: info.type.tensor_type.elem_type for name, info in types_of(made).items() if name not in ends}
    assert {*types.values()} == {TensorProto.FLOAT}
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in made.graph.initializer}
    np.testing.assert_array_equal(stored["w"], weight.astype(np.float32))


def test_what_has_nothing_to_widen_stays() -> None:
    row = optimize(model_of("g (float[2] x) => (float[2] y) { y = Relu(x) }", 21), ["to-float32"]).rows[0]
    assert (row.changed, row.reason) == (False, "no value is a float of 16 bits")


def test_attributes_that_name_a_type_of_16_bits_name_float32() -> None:
    node = helper.make_node("Attention", ["x", "x", "x"], ["y"], softmax_precision=TensorProto.FLOAT16, q_num_heads=10)
    widen_attributes(node)
    assert {attribute.name: attribute.i for attribute in node.attribute} == {
        "q_num_heads": 10,
        "softmax_precision": TensorProto.FLOAT,
    }
