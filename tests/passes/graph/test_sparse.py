"""Sparse initializers and Constants compute what the dense ones compute, wherever a model is run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import onnxruntime
import pytest
from onnx import ModelProto, SparseTensorProto, helper, numpy_helper

import passes
from passes.graph.inference import dims_of, infer_shapes, types_of
from passes.graph.traversal import dense_of, without_sparse
from passes.tools import change_outputs, convert_opset, inspect_model, to_fp16
from pipeline.onnx_backend import OnnxlineBackend
from tests.support.onnx_models import model_of

WHOLE = np.array([[0, 2, 0], [0, 0, 3]], np.float32)
X = np.array([[1.0, 10.0]], np.float32)


def sparse(indices: list[int] | list[list[int]]) -> SparseTensorProto:
    values = numpy_helper.from_array(np.array([2, 3], np.float32), "w")
    return helper.make_sparse_tensor(values, numpy_helper.from_array(np.array(indices), "at"), [2, 3])


FLAT, BY_AXES = sparse([1, 5]), sparse([[0, 1], [1, 2]])


def stored(tensor: SparseTensorProto) -> ModelProto:
    model = model_of("g (float[N, 2] x) => (float[N, 3] y) { y = MatMul (x, w) }")
    model.graph.sparse_initializer.append(tensor)
    return model


def constant(tensor: SparseTensorProto) -> ModelProto:
    model = model_of("g (float[N, 2] x) => (float[N, 3] y) { y = MatMul (x, w) }")
    node = helper.make_node("Constant", [], ["w"], sparse_value=tensor)
    nodes = [node, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model


@pytest.mark.parametrize("tensor", [FLAT, BY_AXES])
def test_a_sparse_tensor_made_dense(tensor: SparseTensorProto) -> None:
    assert np.array_equal(numpy_helper.to_array(dense_of(tensor)), WHOLE)


@pytest.mark.parametrize("make", [stored, constant])
def test_a_model_with_a_sparse_tensor(make: Callable[[SparseTensorProto], ModelProto]) -> None:
    model = make(FLAT)
    before = model.SerializeToString()
    dense = without_sparse(model)
    assert without_sparse(dense) is dense
    assert np.array_equal(*(OnnxlineBackend.prepare(found).run([X])[0] for found in (model, dense)))
    assert np.array_equal(OnnxlineBackend.prepare(model).run([X])[0], X @ WHOLE)
    for found in (step(model).to_proto() for step in (passes.optimize, to_fp16, partial(convert_opset, to=21))):
        run = onnxruntime.InferenceSession(found.SerializeToString(), providers=["CPUExecutionProvider"])
        assert np.array_equal(
            np.asarray(run.run(None, {"x": X})[0]), X @ WHOLE
        )  # small integers: float16 has them, too
    assert model.SerializeToString() == before, "the user's model has changed"


def test_a_model_without_one_stays_itself() -> None:
    model = model_of("g (float[N, 2] x) => (float[N, 2] y) { y = Relu (x) }")
    assert without_sparse(model) is model


@pytest.mark.parametrize("make", [stored, constant])
def test_what_reads_a_sparse_tensor_has_a_type(make: Callable[[SparseTensorProto], ModelProto]) -> None:
    """ONNX infers no type of what reads one, so it could be no output, and to-fp16 put no Cast after it."""
    model = make(FLAT)
    model.graph.node[-1].output[0] = "p"
    model.graph.node.append(helper.make_node("Relu", ["p"], ["y"]))
    assert dims_of(types_of(model)["p"]) == ("N", 3)
    assert infer_shapes(model).graph.sparse_initializer == model.graph.sparse_initializer
    found = change_outputs(model, add=["p"]).to_proto()
    assert [info.name for info in found.graph.output] == ["y", "p"]
    half = to_fp16(model).to_proto()
    session = onnxruntime.InferenceSession(half.SerializeToString(), providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(None, {"x": X})[0], X @ WHOLE)


@pytest.mark.parametrize("make", [stored, constant])
def test_a_product_with_a_sparse_tensor_is_counted_as_it_is_run(
    make: Callable[[SparseTensorProto], ModelProto],
) -> None:
    facts = inspect_model(make(FLAT), {"x": [5, 2]})
    assert (facts.macs, facts.uncounted) == ({"MatMul": 5 * 2 * 3}, ())
