"""AWQ's scaling and cross-layer equalization: what they compute stays, and where the factors go."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnxsim import apply_awq, quantize_weight_only_int4
from onnxsim.quark_equalization import equalize

import passes
from passes import PassRow, PolicyError
from passes.context import PassContext
from passes.weights.detached import DetachedModel
from tests.support.onnx_models import detached, matrix, model_of
from tests.support.onnx_text import arrays_of, picture

WIDTH = 32
GATED = """g (float[2, 16, 32] x) => (float[2, 16, 8] y) {
    n = LayerNormalization <axis = -1> (x, scale, shift)
    a = MatMul (n, up)
    b = MatMul (n, gate)
    y = Mul (a, b)
}"""
CONVOLUTIONS = """g (float[1, 3, 8, 8] x) => (float[1, 4, 8, 8] y) {
    a = Conv <group = 1, pads = [1, 1, 1, 1]> (x, first, bias)
    r = Relu (a)
    y = Conv <group = 1, pads = [1, 1, 1, 1]> (r, second)
}"""


def gated() -> onnx.ModelProto:
    scale = np.ones(WIDTH, np.float32)
    scale[[3, 11]] = 30
    shift = np.zeros(WIDTH, np.float32)
    return model_of(GATED, scale=scale, shift=shift, up=matrix(WIDTH, 8, 0), gate=matrix(WIDTH, 8, 1))


def convolutions() -> onnx.ModelProto:
    draw = np.random.default_rng(0)
    first, second = draw.normal(size=(8, 3, 3, 3)), draw.normal(size=(4, 8, 3, 3))
    first[2] *= 50
    return model_of(
        CONVOLUTIONS,
        first=first.astype(np.float32),
        bias=draw.normal(size=8).astype(np.float32),
        second=second.astype(np.float32),
    )


def run(model: onnx.ModelProto, item: object, context: PassContext) -> tuple[DetachedModel, PassRow]:
    result = passes.optimize(model, [item], context=context)  # type: ignore[list-item]
    [row] = result.rows
    return result.model, row


def test_awq_gives_the_norm_the_inverse_of_what_the_rows_of_both_weights_get(context: PassContext) -> None:
    model = gated()
    after, row = run(model, {"awq": {"alphas": 5}}, context)
    assert (row.status.value, row.changed, row.reason) == ("ran", True, "smoothed 2 products")
    assert picture(after) == picture(detached(model)), "no node is added, and all names stay"
    old, new = arrays_of(detached(model)), arrays_of(after)
    factor = new["scale"] / old["scale"]
    for name in ("up", "gate"):
        np.testing.assert_allclose(new[name] * factor[:, None], old[name], rtol=1e-6)
    assert factor[[3, 11]].max() < 0.8 * np.delete(factor, [3, 11]).min(), "rows that meet large numbers become larger"


def test_awq_gives_the_integers_of_the_librarys_own_call(context: PassContext) -> None:
    """A product with a norm of its own: the factor is the library's, and rounding gives the integers that it stores."""
    text = """g (float[2, 16, 32] x) => (float[2, 16, 8] y) {
        n = LayerNormalization <axis = -1> (x, scale, shift) y = MatMul (n, up)
    }"""
    scale = np.ones(WIDTH, np.float32)
    scale[[3, 11]] = 30
    model = model_of(text, scale=scale, shift=np.zeros(WIDTH, np.float32), up=matrix(WIDTH, 8, 0))
    model.opset_import[0].version = 21  # onnxsim has no int4 below
    feeds = [{"x": np.random.default_rng(0).normal(size=(2, 16, 32)).astype(np.float32)}]
    after = passes.optimize(model, [{"awq": {"alphas": 5}}], feeds=feeds, context=context).model
    model = onnx.shape_inference.infer_shapes(model)  # it passes over a product of a value without a type
    library = apply_awq(model, quantize_weight_only_int4(model), feeds, num_alpha_steps=5)
    (integers,) = (tensor for tensor in library.graph.initializer if tensor.data_type == onnx.TensorProto.INT4)
    scaled = arrays_of(after)["up"]
    steps = np.abs(scaled).max(axis=0) / 7
    assert not np.array_equal(scaled, matrix(WIDTH, 8, 0))
    np.testing.assert_array_equal(np.rint(scaled / steps), onnx.numpy_helper.to_array(integers).astype(np.float32))


def test_equalization_gives_the_weights_of_the_librarys_own_call(context: PassContext) -> None:
    model = convolutions()
    after, _ = run(model, "cross-layer-equalization", context)
    library = {tensor.name: tensor for tensor in equalize(model, steps=1, weight_threshold=0.5).graph.initializer}
    for name, array in arrays_of(after).items():
        np.testing.assert_array_equal(array, onnx.numpy_helper.to_array(library[name]), name)


def test_equalization_gives_both_sides_of_a_channel_one_size(context: PassContext) -> None:
    model = convolutions()
    after, row = run(model, {"cross-layer-equalization": {"weight_threshold": 0}}, context)
    assert (row.status.value, row.changed) == ("ran", True)
    assert picture(after) == picture(detached(model))
    old, new = arrays_of(detached(model)), arrays_of(after)

    def spread(arrays: dict[str, np.ndarray]) -> float:
        sizes = np.abs(arrays["first"]).max((1, 2, 3))
        return float(sizes.max() / sizes.min())

    assert spread(new) < spread(old) / 4


def test_a_model_without_such_pairs_stays(context: PassContext) -> None:
    _, row = run(gated(), "cross-layer-equalization", context)
    assert (row.changed, row.reason) == (False, "no two products with only Relu and the like between them")


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"awq": {"alphas": 1}}, "alphas is 1; expected an integer of 2 or more"),
        ({"cross-layer-equalization": {"rounds": 0}}, "rounds is 0; expected an integer of 1 or more"),
        ({"awq": {"alpha": 0.5}}, "no option 'alpha'; did you mean 'alphas'?"),
    ],
)
def test_options_are_checked(item: object, message: str, context: PassContext) -> None:
    with pytest.raises(PolicyError) as error:
        run(gated(), item, context)
    assert message in str(error.value)
