"""A product with a part of a merged matrix has the encoding of the whole one, also if one position is all there is."""

from __future__ import annotations

import numpy as np
import onnx

from passes import optimize
from passes.context import PassContext
from passes.encodings.encoding import Encoding, Precision
from tests.support.onnx_text import ATTENTION, merged_model

MERGED = """g (float[1, 32, 1, 1] x) => (float[1, 1, 1, 32] y)
    <float[32, 32, 1, 1] conv, float[32] scale, float[32] shift, float[32] mean, float[96, 32] w, float[96] b> {
    c = Conv (x, conv)
    variance = Mul (scale, scale)
    h = BatchNormalization (c, scale, shift, mean, variance)
    row = Reshape (h, #[1, 1, 1, 32])
    turned = Transpose <perm = [1, 0]> (w)
    product = MatMul (row, turned)
    sum = Add (product, b)
    q, k, v = Split <axis = 3> (sum, #[32, 32, 32])"""
"""BatchNormalization becomes a part of Conv, so that no number after it is the same in every bit."""

RECIPE = ("fold_constants", "fold-batchnorm", "split-qkv")


def encoding_of(scale: float) -> Encoding:
    precision = Precision(16, signed=False, symmetric=False)
    return Encoding(precision, np.array(scale, np.float32), np.array(2**15))


def model_with(text: str) -> onnx.ModelProto:
    return merged_model(text + ATTENTION + "}")


NAMES = ("x", "h", "w", "product", "sum", "q", "k", "v")

ENCODINGS = {name: encoding_of(0.01 * place) for place, name in enumerate(NAMES, 1)}


def test_each_part_of_one_position_has_the_encoding_of_the_whole(context: PassContext) -> None:
    run = optimize(model_with(MERGED), RECIPE, encodings=ENCODINGS, context=context)
    assert run.encodings is not None
    for role in "qkv":
        assert run.encodings.encodings[f"product.{role}"] == ENCODINGS["product"]
        assert run.encodings.sources[f"product.{role}"] == ("product",)
        assert run.encodings.sources[f"w.{role}_transposed"] == ("w",)
    assert "product" not in {lost.tensor for lost in run.encodings.lost}


def test_a_matrix_that_is_not_traced_says_nothing_of_its_parts(context: PassContext) -> None:
    given = {name: encoding for name, encoding in ENCODINGS.items() if name != "w"}
    run = optimize(model_with(MERGED), RECIPE, encodings=given, context=context)
    assert run.encodings is not None
    assert "product.q" in {uncovered.tensor for uncovered in run.encodings.uncovered}
