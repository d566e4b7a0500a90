"""Folding of BatchNormalization: before and after as pictures, with names and numbers, and what stays and why."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import passes
from passes.context import PassContext
from passes.encodings.encoding import Encoding, Precision
from passes.provenance import annotations_of
from passes.rewrites.fold_batchnorm import FoldBatchnorm
from passes.run.result import PassRow
from passes.weights.detached import attach
from passes.weights.sessions import Session
from tests.support.onnx_models import detached
from tests.support.onnx_text import arrays_of, lines_of, merged_model, picture

NORM = "float[{0}] bn.weight, float[{0}] bn.bias, float[{0}] mean, float[{0}] bn.var"


def model_with(text: str, channels: int = 4, opset: int = 20) -> onnx.ModelProto:
    """A model from text, in which NORM stands for the numbers of a BatchNormalization."""
    model = merged_model(text.replace("NORM", NORM.format(channels)), opset)
    for tensor in model.graph.initializer:
        if tensor.name == "bn.var":  # never negative
            array = np.abs(onnx.numpy_helper.to_array(tensor)) + 0.5
            tensor.CopyFrom(onnx.numpy_helper.from_array(array.astype(np.float32), "bn.var"))
    return model


FORMS = {
    "Conv, which gets a bias": (
        """g (float[2, 3, 8, 8] x) => (float[2, 4, 6, 6] y) <float[4, 3, 3, 3] conv.weight, NORM> {
            a = Conv (x, conv.weight)
            y = BatchNormalization (a, bn.weight, bn.bias, mean, bn.var)
        }""",
        "y = Conv (x, conv.weight, bn.bias)",
    ),
    "Conv in groups, with a bias": (
        """g (float[2, 2, 8] x) => (float[2, 4, 8] y) <float[4, 1, 1] w, float[4] b, NORM> {
            a = Conv <group = 2> (x, w, b)
            n = BatchNormalization <epsilon = 0.1> (a, bn.weight, bn.bias, mean, bn.var)
            y = Relu (n)
        }""",
        """
            n = Conv <group = 2> (x, w, b)
            y = Relu (n)""",
    ),
    "ConvTranspose in groups, whose channels are spread over two axes": (
        """g (float[2, 4, 5, 5] x) => (float[2, 4, 7, 7] y) <float[4, 2, 3, 3] w, float[4] b, NORM> {
            a = ConvTranspose <group = 2> (x, w, b)
            y = BatchNormalization (a, bn.weight, bn.bias, mean, bn.var)
        }""",
        "y = ConvTranspose <group = 2> (x, w, b)",
    ),
    "ConvTranspose without groups": (
        """g (float[2, 4, 5, 5] x) => (float[2, 4, 7, 7] y) <float[4, 4, 3, 3] w, float[4] b, NORM> {
            a = ConvTranspose (x, w, b)
            y = BatchNormalization (a, bn.weight, bn.bias, mean, bn.var)
        }""",
        "y = ConvTranspose (x, w, b)",
    ),
    "Gemm with factors and a bias of one number": (
        """g (float[5, 3] x) => (float[5, 4] y) <float[4, 3] w, float[1] b, NORM> {
            a = Gemm <alpha = 0.5, beta = 2.0, transB = 1> (x, w, b)
            y = BatchNormalization (a, bn.weight, bn.bias, mean, bn.var)
        }""",
        "y = Gemm <alpha = 0.5, beta = 2.0, transB = 1> (x, w, b)",
    ),
    "MatMul without a bias: the shift becomes an Add": (
        """g (float[5, 3] x) => (float[5, 4] y) <float[3, 4] w, NORM> {
            a = MatMul (x, w)
            y = BatchNormalization (a, bn.weight, bn.bias, mean, bn.var)
        }""",
        """
            a = MatMul (x, w)
            y = Add (a, bn.bias)""",
    ),
    "MatMul and Add, whose channels a Transpose brings to the front": (
        """g (float[2, 5, 3] x) => (float[2, 4, 5] y) <float[3, 4] w, float[4] b, NORM> {
            a = MatMul (x, w)
            c = Add (b, a)
            t = Transpose <perm = [0, 2, 1]> (c)
            y = BatchNormalization (t, bn.weight, bn.bias, mean, bn.var)
        }""",
        """
            a = MatMul (x, w)
            c = Add (b, a)
            y = Transpose <perm = [0, 2, 1]> (c)""",
    ),
    "LeViT: a matrix of all places, and the Shape of the product": (
        """g (float[2, 5, 3] x) => (float[2, 5, 4] y) <float[4, 3] w, NORM> {
            turned = Transpose (w)
            a = MatMul (x, turned)
            flat = Reshape (a, #[10, 4])
            n = BatchNormalization (flat, bn.weight, bn.bias, mean, bn.var)
            sizes = Shape (a)
            y = Reshape (n, sizes)
        }""",
        """
            turned = Transpose (w)
            a = MatMul (x, turned)
            flat = Reshape (a, [10,4])
            n = Add (flat, bn.bias)
            sizes = Shape (a)
            y = Reshape (n, sizes)""",
    ),
    "two in a row": (
        """g (float[2, 3, 8] x) => (float[2, 4, 8] y) <float[4, 3, 1] w, NORM> {
            a = Conv (x, w)
            n = BatchNormalization (a, bn.weight, bn.bias, mean, bn.var)
            y = BatchNormalization (n, bn.weight, bn.bias, mean, bn.var)
        }""",
        "y = Conv (x, w, bn.bias_2)",
    ),
    "a weight that others read stays for them": (
        """g (float[2, 4, 8] x) => (float[2, 4, 8] y) <float[4, 4, 1] w, NORM> {
            a = Conv (x, w)
            n = BatchNormalization (a, bn.weight, bn.bias, mean, bn.var)
            y = Conv (n, w)
        }""",
        """
            n = Conv (x, w_2, bn.bias)
            y = Conv (n, w)""",
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_before_and_after(form: str, context: PassContext) -> None:
    text, expected = FORMS[form]
    model = model_with(text)
    before = detached(model)
    bytes_before = before.proto.SerializeToString()
    result = FoldBatchnorm().apply(before, context)
    assert before.proto.SerializeToString() == bytes_before, "the given model was changed"
    assert (result.changed, result.why) == (True, None)
    assert picture(result.model) == lines_of(expected)
    onnx.checker.check_model(attach(result.model), full_check=True)
    shape = [dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim]
    feeds = {"x": np.random.default_rng(0).standard_normal(shape).astype(np.float32)}
    was, now = Session.of(before).run(feeds)["y"], Session.of(result.model).run(feeds)["y"]
    np.testing.assert_allclose(now, was, rtol=0, atol=2e-6)
    assert not FoldBatchnorm().apply(result.model, context).changed


def test_weights_are_rounded_once(context: PassContext) -> None:
    model = model_with(FORMS["Conv, which gets a bias"][0])
    before = arrays_of(detached(model))
    after = arrays_of(FoldBatchnorm().apply(detached(model), context).model)
    wide = {name: array.astype(np.float64) for name, array in before.items()}
    factor = wide["bn.weight"] / np.sqrt(wide["bn.var"] + 1e-5)
    expected = (wide["conv.weight"] * factor[:, None, None, None]).astype(np.float32)
    np.testing.assert_array_equal(after["conv.weight"], expected)
    np.testing.assert_array_equal(after["bn.bias"], (wide["bn.bias"] - wide["mean"] * factor).astype(np.float32))
    assert set(after) == {"conv.weight", "bn.bias"}


LEFT = {
    "training": (
        """g (float[2, 3, 8] x) => (float[2, 4, 8] y) <float[4, 3, 1] w, NORM> {
            a = Conv (x, w)
            y, m, v = BatchNormalization <training_mode = 1> (a, bn.weight, bn.bias, mean, bn.var)
        }""",
        "y is in training mode",
    ),
    "another operator in front": (
        """g (float[2, 3, 8] x) => (float[2, 4, 8] y) <float[4, 3, 1] w, NORM> {
            a = Conv (x, w)
            r = Relu (a)
            y = BatchNormalization (r, bn.weight, bn.bias, mean, bn.var)
        }""",
        "y follows Relu, which is no product with a weight",
    ),
    "another reader": (
        """g (float[2, 4, 8] x) => (float[2, 4, 8] y) <float[4, 4, 1] w, NORM> {
            a = Conv (x, w)
            n = BatchNormalization (a, bn.weight, bn.bias, mean, bn.var)
            y = Add (n, a)
        }""",
        "n follows a value that others read too",
    ),
    "an output": (
        """g (float[2, 4, 8] x) => (float[2, 4, 8] y, float[2, 4, 8] a) <float[4, 4, 1] w, NORM> {
            a = Conv (x, w)
            y = BatchNormalization (a, bn.weight, bn.bias, mean, bn.var)
        }""",
        "y follows a value that the model's output reads too",
    ),
    "a weight that is fed": (
        """g (float[2, 4, 8] x, float[4, 4, 1] w) => (float[2, 4, 8] y) <NORM> {
            a = Conv (x, w)
            y = BatchNormalization (a, bn.weight, bn.bias, mean, bn.var)
        }""",
        "y follows a product with w, which is no stored tensor",
    ),
    "numbers that are computed": (
        """g (float[2, 4, 8] x, float[4] fed) => (float[2, 4, 8] y) <float[4, 4, 1] w, NORM> {
            a = Conv (x, w)
            y = BatchNormalization (a, fed, bn.bias, mean, bn.var)
        }""",
        "y has values that are computed, fed, or unread",
    ),
    "channels along another axis": (
        """g (float[2, 4, 3] x) => (float[2, 4, 8] y) <float[3, 8] w, NORM> {
            a = MatMul (x, w)
            y = BatchNormalization (a, bn.weight, bn.bias, mean, bn.var)
        }""",
        "y has other channels than the MatMul before it",
    ),
}


@pytest.mark.parametrize("form", LEFT)
def test_what_stays_says_why(form: str, context: PassContext) -> None:
    text, why = LEFT[form]
    model = detached(model_with(text))
    result = FoldBatchnorm().apply(model, context)
    assert (result.model, result.changed, result.why) == (model, False, f"left as they are: {why}")


def test_a_weight_that_its_dtype_cannot_hold_stays(context: PassContext) -> None:
    text, _ = FORMS["Conv, which gets a bias"]
    model = model_with(text)
    for tensor in model.graph.initializer:
        if tensor.name in ("bn.weight", "conv.weight"):
            huge = np.full(list(tensor.dims), 1e30, np.float32)
            tensor.CopyFrom(onnx.numpy_helper.from_array(huge, tensor.name))
    result = FoldBatchnorm().apply(detached(model), context)
    assert result.why == "left as they are: y would make a weight that its dtype cannot hold"


BLOCK = """g (float[2, 3, 8, 8] x) => (float[2, 4, 6, 6] y) <float[4, 3, 3, 3] conv.weight, NORM> {
    a = Conv (x, conv.weight)
    n = BatchNormalization (a, bn.weight, bn.bias, mean, bn.var)
    y = Relu (n)
}"""


def run_block(keep: tuple[str, ...], recipe: list[str], context: PassContext) -> tuple[list[str], list[PassRow]]:
    result = passes.optimize(model_with(BLOCK), recipe, keep=keep, context=context)
    return [node.op_type for node in result.model.proto.graph.node], list(result.rows)


def test_a_run_proves_it_and_says_what_was_made_of_what(context: PassContext) -> None:
    model = model_with(BLOCK)
    for node, name in zip(model.graph.node, ("/conv", "/bn", "/relu"), strict=True):
        node.name = name
    result = passes.optimize(model, ["fold-batchnorm"], context=context)
    [row] = result.rows
    assert (row.status.value, row.changed, row.diff) == ("ran", True, {"BatchNormalization": -1})
    conv = result.model.proto.graph.node[0]
    assert (conv.name, annotations_of(conv).changed_by) == ("/conv", ("fold-batchnorm",))
    weight = next(one for one in result.model.proto.graph.initializer if one.name == "conv.weight")
    assert annotations_of(weight).replaced[:1] == ("conv.weight",)
    assert list(conv.input) == ["x", "conv.weight", "bn.bias"]


@pytest.mark.parametrize("recipe", [["fold-batchnorm"], ["onnxsim"], ["default", "onnxsim", "fold-batchnorm"]])
def test_who_keeps_batchnorm_has_it_after_every_library(recipe: list[str], context: PassContext) -> None:
    folded, _ = run_block((), recipe, context)
    assert folded == ["Conv", "Relu"]
    kept, _ = run_block(("batchnorm",), recipe, context)
    assert kept == ["Conv", "BatchNormalization", "Relu"]


def test_encodings_go_with_the_value_and_leave_the_weight(context: PassContext) -> None:
    precision = Precision(8, signed=False, symmetric=False)
    encodings = {
        name: Encoding(precision, np.array(0.1, np.float32), np.array(128))
        for name in ("x", "a", "n", "y", "conv.weight")
    }
    result = passes.optimize(model_with(BLOCK), ["fold-batchnorm"], encodings=encodings, context=context)
    assert result.encodings is not None
    assert set(result.encodings.encodings) == {"x", "n", "y"}
    assert {one.tensor: (one.kind, one.by) for one in result.encodings.lost} == {
        "a": ("gone", "fold-batchnorm"),
        "conv.weight": ("stale", "fold-batchnorm"),
    }
