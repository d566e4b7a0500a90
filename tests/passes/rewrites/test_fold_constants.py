"""Folding: before and after as pictures, and again without a change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import ml_dtypes
import numpy as np
import onnx
import pytest

from passes.context import PassContext
from passes.rewrites.fold_constants import FoldConstants
from passes.weights.detached import attach
from passes.weights.sessions import Session
from passes.worker.client import Worker
from tests.support.onnx_models import detached, matrix, model_of
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
