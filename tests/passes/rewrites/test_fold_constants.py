"""Folding: before and after as pictures, and again without a change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import ml_dtypes
import numpy as np
import onnx
import pytest

import passes
from passes.context import PassContext
from passes.errors import PolicyError
from passes.rewrites.fold_constants import FoldConstants
from passes.rewrites.fold_scale import FoldScale
from passes.weights.detached import attach
from passes.weights.sessions import Session
from passes.worker.client import Worker
from tests.support.onnx_models import detached, matrix, model_of, vector
from tests.support.onnx_text import body

Fold = Callable[..., onnx.ModelProto]


@pytest.fixture
def folded(context: PassContext) -> Fold:
    def fold(model: onnx.ModelProto, **options: int) -> onnx.ModelProto:
        return attach(FoldConstants(**options).apply(detached(model), context).model)

    return fold


PICTURES = {
    "a transposed weight": (
        "g (float[2, 8] x) => (float[2, 4] y) { t = Transpose <perm = [1, 0]> (w) y = MatMul (x, t) }",
        ["y = MatMul (x, t)"],
    ),
    "a chain, of which only the end is read": (
        "g (float[2, 8] x) => (float[2, 4] y) "
        "{ t = Transpose <perm = [1, 0]> (w) n = Neg (t) a = Abs (n) y = MatMul (x, a) }",
        ["y = MatMul (x, a)"],
    ),
    "what depends on an input stays": (
        "g (float[2, 8] x) => (float[2] s, float[2, 8] y) { r = Shape (x) s = Cast <to = 1> (r) y = Neg (x) }",
        ["r = Shape (x)", "s = Cast (r)", "y = Neg (x)"],
    ),
    "a constant that is an output stays": (
        "g (float[2, 8] x) => (float[8, 4] t, float[2, 8] y) { t = Transpose <perm = [1, 0]> (w) y = Neg (x) }",
        ["t = Transpose (w)", "y = Neg (x)"],
    ),
    "random numbers stay": (
        "g (float[2, 8] x) => (float[2, 8] y) { r = RandomUniform <shape = [2, 8]> () y = Add (x, r) }",
        ["r = RandomUniform ()", "y = Add (x, r)"],
    ),
    "what onnxruntime has no kernel for": (
        "g (float[4, 8] x) => (float[4, 8] y) { e = EyeLike <dtype = 3> (w) f = Cast <to = 1> (e) y = Add (x, f) }",
        ["y = Add (x, f)"],
    ),
    "a value that only a branch reads": (
        "g (bool c, float[4, 8] x) => (float[4, 8] y) { n = Neg (w) "
        "y = If (c) <then_branch = t () => (float[4, 8] a) { a = Add (x, n) }, "
        "else_branch = e () => (float[4, 8] b) { b = Identity (x) }> }",
        ["y = If (c)"],
    ),
}


@pytest.mark.parametrize("name", PICTURES)
def test_before_and_after(name: str, folded: Fold) -> None:
    text, expected = PICTURES[name]
    model = model_of(text, w=matrix(4, 8, 0))
    after = folded(model)
    assert body(after) == expected
    onnx.checker.check_model(after)
    assert body(folded(after)) == expected
    assert {t.name for t in folded(after).graph.initializer} == {t.name for t in after.graph.initializer}


def test_numbers_are_those_of_the_model_before(folded: Fold) -> None:
    text, _ = PICTURES["a chain, of which only the end is read"]
    model = model_of(text, w=matrix(4, 8, 0))
    feeds = {"x": matrix(2, 8, 1)}
    before, after = (Session.of(detached(source)).run(feeds)["y"] for source in (model, folded(model)))
    np.testing.assert_array_equal(before, after)


def test_a_tiny_expand_does_not_become_megabytes(folded: Fold) -> None:
    text = """
    g (float[1024, 512] x) => (float[1024, 512] y) {
        shape = Constant <value_ints = [1024, 512]> ()
        two = Constant <value_float = 2.0> ()
        wide = Expand (two, shape)
        y = Mul (x, wide)
    }
    """
    after = folded(model_of(text))
    assert body(after) == ["wide = Expand (two, shape)", "y = Mul (x, wide)"]
    assert body(folded(model_of(text), grow_limit=2**22)) == ["y = Mul (x, wide)"]


def test_what_is_declared_as_megabytes_is_not_even_computed(context: PassContext) -> None:
    text = """
    g (float[1024, 512] x) => (float[1024, 512] y) <float[1024, 512] wide> {
        wide = Expand (two, shape)
        y = Mul (x, wide)
    }
    """
    refuses = replace(context, worker=Worker(preload=("no_such_module",)))  # it fails when it is asked
    result = FoldConstants().apply(detached(model_of(text, shape=np.array([1024, 512]), two=np.float32([2]))), refuses)
    assert not result.changed and "larger" in (result.why or "")


def test_before_ir_version_4_an_initializer_has_to_be_an_input_too(folded: Fold) -> None:
    """The checker refuses it otherwise; constants are nodes there, since an initializer may be overridden."""
    source = model_of("g (float[2] x) => (float[2] y) { c = Constant <value_floats = [1.0, 2.0]> () y = Add (x, c) }")
    source.ir_version = 3
    after = folded(source)
    assert body(after) == ["y = Add (x, c)"]
    assert [info.name for info in after.graph.input] == ["x", "c"]
    onnx.checker.check_model(after, full_check=True)


def test_an_ir_version_that_onnxruntime_does_not_know_yet_is_no_matter(folded: Fold) -> None:
    source = model_of("g (float[2, 8] x) => (float[2, 8] y) { n = Neg (w) y = Add (x, n) }", w=matrix(2, 8, 0))
    source.ir_version = onnx.IR_VERSION
    assert body(folded(source)) == ["y = Add (x, n)"]


def test_values_of_a_dtype_that_numpy_does_not_have_are_folded(context: PassContext) -> None:
    model = model_of(
        """g (float[4] x) => (float[4] y, bfloat16[4] z) {
            half = Cast <to = 16> (c)
            z = Identity (half)
            twice = Add (c, c)
            y = Mul (x, twice)
        }""",
        c=np.arange(4, dtype=np.float32) / 3,
    )
    after = FoldConstants().apply(detached(model), context).model
    assert [node.op_type for node in after.proto.graph.node] == ["Identity", "Mul"]
    half = after.array(after.index.initializers["half"])
    assert half.dtype == ml_dtypes.bfloat16
    assert half.tolist() == (np.arange(4, dtype=np.float32) / 3).astype(ml_dtypes.bfloat16).tolist()


# Scalar factors: one around a product, or none where a weight takes it; sums with zeros go.

SCORES = """g (float[2, 4, 8] x) => (float[2, 4, 4] y) {
    q = MatMul (x, wq) b = Add (q, bq) a = Mul (b, root)
    k = MatMul (x, wk) t = Transpose <perm = [0, 2, 1]> (k) c = Mul (root, t)
    s = MatMul (a, c) d = Div (s, two) y = Add (d, zeros)
}"""


def folded_scales(
    text: str, context: PassContext, into: str = "product", **weights: np.ndarray | np.generic
) -> list[str]:
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
    lines = folded_scales(SCORES, context, **WEIGHTS, root=np.float32(0.5), two=np.float32(2))
    assert lines == ["MatMul", "Add", "Mul 0.125", "MatMul", "Transpose", "MatMul"]


def test_a_weight_takes_the_factor(context: PassContext) -> None:
    lines = folded_scales(SCORES, context, "weight", **WEIGHTS, root=np.float32(0.5), two=np.float32(2))
    assert lines == ["MatMul", "Add", "MatMul", "Transpose", "MatMul"]


def test_factors_that_others_see_stay(context: PassContext) -> None:
    text = """g (float[2, 4, 8] x) => (float[2, 4, 8] a, float[2, 4, 4] y) {
        a = Mul (x, two) t = Transpose <perm = [0, 2, 1]> (x) c = Mul (t, two) y = MatMul (a, c)
    }"""
    assert folded_scales(text, context, two=np.float32(2)) == ["Mul 2", "Transpose", "Mul 2", "MatMul"]


def test_zeros_that_broadcast_a_value_stay(context: PassContext) -> None:
    text = """g (float[2, 4, 8] x) => (float[3, 2, 4, 8] y, float[2, 4, 8] z) {
        y = Add (x, zeros) a = Div (x, ones) z = Relu (a)
    }"""
    weights = {"zeros": np.zeros((3, 1, 1, 1), np.float32), "ones": np.ones(8, np.float32)}
    assert folded_scales(text, context, **weights) == ["Add", "Relu"]


def test_a_bound_at_infinity_goes(context: PassContext) -> None:
    text = """g (float[2, 4, 8] x) => (float[2, 4, 8] y, float[2, 4, 8] z) {
        a = Max (low, x) b = Min (a, high) y = Sub (x, b) z = Max (x, low, y)
    }"""
    assert folded_scales(text, context, low=np.float32(-np.inf), high=np.float32(np.inf)) == ["Sub", "Max -inf"]


def test_one_number_goes_also_where_dims_are_open(context: PassContext) -> None:
    text = """g (float[n, 4, 8] x) => (float[n, 4, 8] y, float[m, k] z) {
        a = ReduceMax <keepdims = 0> (x, axes) b = Max (low, a) c = Relu (b) y = Add (x, c) z = Max (b, row)
    }"""
    axes, low = np.array([0, 1, 2]), np.float32(-np.inf)
    kinds = [line.split()[0] for line in folded_scales(text, context, axes=axes, low=low, row=np.full((1, 1), low))]
    assert kinds == ["ReduceMax", "Relu", "Add", "Max"]  # a row gives a scalar its rank


def test_a_factor_that_the_dtype_cannot_hold_stays(context: PassContext) -> None:
    text = "g (float[2, 4, 8] x) => (float[2, 4, 8] y) { a = Mul (x, tiny) y = Mul (a, tiny) }"
    assert folded_scales(text, context, tiny=np.float32(1e-30)) == ["Mul 1e-30", "Mul 1e-30"]


def test_another_place_is_refused(context: PassContext) -> None:
    with pytest.raises(PolicyError, match="into is 'bias'; expected product or weight"):
        passes.optimize(
            model_of("g (float[2] x) => (float[2] y) { y = Relu (x) }"),
            [{"fold-scale": {"into": "bias"}}],
            context=context,
        )
