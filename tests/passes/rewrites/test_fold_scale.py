"""Scalar factors: one around a product, or none where a weight takes it; sums with zeros go."""

from __future__ import annotations

import numpy as np
import pytest

import passes
from passes.context import PassContext
from passes.errors import PolicyError
from passes.rewrites.fold_scale import FoldScale
from passes.weights.sessions import Session
from tests.support.onnx_models import detached, matrix, model_of, vector

SCORES = """g (float[2, 4, 8] x) => (float[2, 4, 4] y) {
    q = MatMul (x, wq) b = Add (q, bq) a = Mul (b, root)
    k = MatMul (x, wk) t = Transpose <perm = [0, 2, 1]> (k) c = Mul (root, t)
    s = MatMul (a, c) d = Div (s, two) y = Add (d, zeros)
}"""


def folded(text: str, context: PassContext, into: str = "product", **weights: np.ndarray | np.generic) -> list[str]:
    model = model_of(text, **weights)
    result = FoldScale(into).apply(detached(model), context)
    assert not FoldScale(into).apply(result.model, context).changed
    feeds = {info.name: matrix(8, 8, 9).reshape(2, 4, 8) for info in model.graph.input}
    before, after = Session.of(detached(model)).run(feeds), Session.of(result.model).run(feeds)
    for name, array in before.items():
        np.testing.assert_allclose(after[name], array, rtol=1e-5, atol=1e-6)  # products in another order
    stored = {tensor.name: result.model.array(tensor) for tensor in result.model.proto.graph.initializer}
    numbers = {name: f"{array.item():g}" for name, array in stored.items() if array.size == 1}
    return [
        " ".join([node.op_type, *(numbers[name] for name in node.input if name in numbers)])
        for node in result.model.proto.graph.node
    ]


WEIGHTS = {"wq": matrix(8, 8, 0), "wk": matrix(8, 8, 1), "bq": vector(8, 2), "zeros": np.zeros((4, 4), np.float32)}


def test_all_factors_of_a_product_are_one(context: PassContext) -> None:
    lines = folded(SCORES, context, **WEIGHTS, root=np.float32(0.5), two=np.float32(2))
    assert lines == ["MatMul", "Add", "Mul 0.125", "MatMul", "Transpose", "MatMul"]


def test_a_weight_takes_the_factor(context: PassContext) -> None:
    lines = folded(SCORES, context, "weight", **WEIGHTS, root=np.float32(0.5), two=np.float32(2))
    assert lines == ["MatMul", "Add", "MatMul", "Transpose", "MatMul"]


def test_factors_that_others_see_stay(context: PassContext) -> None:
    text = """g (float[2, 4, 8] x) => (float[2, 4, 8] a, float[2, 4, 4] y) {
        a = Mul (x, two) t = Transpose <perm = [0, 2, 1]> (x) c = Mul (t, two) y = MatMul (a, c)
    }"""
    assert folded(text, context, two=np.float32(2)) == ["Mul 2", "Transpose", "Mul 2", "MatMul"]


def test_zeros_that_broadcast_a_value_stay(context: PassContext) -> None:
    text = """g (float[2, 4, 8] x) => (float[3, 2, 4, 8] y, float[2, 4, 8] z) {
        y = Add (x, zeros) a = Div (x, ones) z = Relu (a)
    }"""
    weights = {"zeros": np.zeros((3, 1, 1, 1), np.float32), "ones": np.ones(8, np.float32)}
    assert folded(text, context, **weights) == ["Add", "Relu"]


def test_a_bound_at_infinity_goes(context: PassContext) -> None:
    text = """g (float[2, 4, 8] x) => (float[2, 4, 8] y, float[2, 4, 8] z) {
        a = Max (low, x) b = Min (a, high) y = Sub (x, b) z = Max (x, low, y)
    }"""
    assert folded(text, context, low=np.float32(-np.inf), high=np.float32(np.inf)) == ["Sub", "Max -inf"]


def test_one_number_goes_also_where_dims_are_open(context: PassContext) -> None:
    text = """g (float[n, 4, 8] x) => (float[n, 4, 8] y, float[m, k] z) {
        a = ReduceMax <keepdims = 0> (x, axes) b = Max (low, a) c = Relu (b) y = Add (x, c) z = Max (b, row)
    }"""
    axes, low = np.array([0, 1, 2]), np.float32(-np.inf)
    kinds = [line.split()[0] for line in folded(text, context, axes=axes, low=low, row=np.full((1, 1), low))]
    assert kinds == ["ReduceMax", "Relu", "Add", "Max"]  # a row gives a scalar its rank


def test_a_factor_that_the_dtype_cannot_hold_stays(context: PassContext) -> None:
    text = "g (float[2, 4, 8] x) => (float[2, 4, 8] y) { a = Mul (x, tiny) y = Mul (a, tiny) }"
    assert folded(text, context, tiny=np.float32(1e-30)) == ["Mul 1e-30", "Mul 1e-30"]


def test_another_place_is_refused(context: PassContext) -> None:
    with pytest.raises(PolicyError, match="into is 'bias'; expected product or weight"):
        passes.optimize(
            model_of("g (float[2] x) => (float[2] y) { y = Relu (x) }"),
            [{"fold-scale": {"into": "bias"}}],
            context=context,
        )
