"""Layers of models in which passes moved work from one node into another are compared where the values are equal."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import passes
from passes.context import PassContext
from passes.diff import LayerErrors, compare_layers, compare_numbers, draw_inputs, match_models
from passes.weights.detached import DetachedModel, attach
from tests.support.annotated_models import annotate_modules
from tests.support.onnx_models import detached, matrix, model_of, vector

ROUNDED = 100
"""dB: 130 and more come of float32's rounding in two orders, and 35 of an error of 2 %."""

RESIDUAL = """g (float[2, 3, 8, 8] x) => (float[2, 5] y) {
    [conv1] c1 = Conv <pads = [1, 1, 1, 1]> (x, w1)
    [bn1] b1 = BatchNormalization (c1, scale1, shift1, mean1, var1)
    [act1] r1 = Relu (b1)
    [conv2] c2 = Conv <pads = [1, 1, 1, 1]> (r1, w2)
    [bn2] b2 = BatchNormalization (c2, scale2, shift2, mean2, var2)
    [conv3] c3 = Conv (r1, w3)
    [bn3] b3 = BatchNormalization (c3, scale3, shift3, mean3, var3)
    [sum] s = Add (b2, b3)
    [act2] r2 = Relu (s)
    [pool] p = GlobalAveragePool (r2)
    [flat] f = Flatten (p)
    [fc] h = MatMul (f, w4)
    [bias] y = Add (h, shift4)
}"""
MODULES = {
    **{"conv1": "stem.conv", "bn1": "stem.bn", "act1": "stem.act", "conv2": "layers.0.conv", "bn2": "layers.0.bn"},
    **{"conv3": "layers.0.down.0", "bn3": "layers.0.down.1", "sum": "layers.0", "act2": "layers.0.act"},
    **{"pool": "pool", "flat": "pool", "fc": "head", "bias": "head"},
}


def residual(channels: int) -> onnx.ModelProto:
    shapes = {"w1": (channels, 3, 3, 3), "w2": (channels, channels, 3, 3), "w3": (channels, channels, 1, 1)}
    weights = {name: matrix(shape[0], int(np.prod(shape[1:])), 1).reshape(shape) for name, shape in shapes.items()}
    for place, size in enumerate((channels, channels, channels, 5), start=1):
        weights |= {f"scale{place}": vector(size, place) + 3, f"var{place}": vector(size, 10 + place) ** 2 + 0.1}
        weights |= {f"{name}{place}": vector(size, 20 + place) for name in ("shift", "mean")}
    return model_of(RESIDUAL, w4=matrix(channels, 5, 4), **weights)


def after(model: onnx.ModelProto, step: str, context: PassContext) -> DetachedModel:
    run = passes.optimize(model, [step], context=context)
    assert any(row.changed for row in run.rows)
    return run.model


def layers_of(before: onnx.ModelProto, after: DetachedModel, context: PassContext) -> list[LayerErrors]:
    matched = match_models(detached(before), after)
    draws = draw_inputs(matched, context, 1)
    values = compare_numbers(matched, draws, context, values=True).values
    assert all(value.errors.sqnr_db > ROUNDED for value in values)
    return list(compare_layers(matched, draws, context))


FOLDING = ["onnxsim", "fold-batchnorm", "fuse_bn_into_conv", "onnxruntime"]


@pytest.mark.parametrize("step", FOLDING)
def test_a_folded_conv_is_compared_with_the_batchnorm(step: str, context: PassContext) -> None:
    model = annotate_modules(residual(16), **MODULES)
    layers = layers_of(model, after(model, step, context), context)
    assert all(layer.errors.sqnr_db > ROUNDED for layer in layers)
    found = {layer.layer: layer.before for layer in layers}
    assert found.items() >= {"stem": "r1", "layers.0.bn": "b2", "layers.0.down.1": "b3", "layers.0": "r2"}.items()
    assert found.keys().isdisjoint({"layers.0.conv", "layers.0.down.0"}), "the second model has no such values"


@pytest.mark.parametrize("step", FOLDING)
def test_without_modules_the_conv_has_a_row_too(step: str, context: PassContext) -> None:
    model = residual(8)  # its vectors are too small to count as weights
    layers = layers_of(model, after(model, step, context), context)
    assert [layer.layer for layer in layers] == ["Conv conv1", "Conv conv2", "Conv conv3", "MatMul fc"]
    assert [layer.before for layer in layers][:3] == ["r1" if step == "onnxruntime" else "b1", "b2", "b3"]
    assert all(layer.errors.sqnr_db > ROUNDED for layer in layers)


def test_an_error_in_a_folded_conv_is_seen_where_it_begins(context: PassContext) -> None:
    model = annotate_modules(residual(16), **MODULES)
    folded = attach(after(model, "fold-batchnorm", context))
    broken = next(tensor for tensor in folded.graph.initializer if tensor.name == "w2")
    broken.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(broken)[::-1].copy(), "w2"))
    matched = match_models(detached(model), detached(folded))
    layers = compare_layers(matched, draw_inputs(matched, context, 1), context)
    sqnr = {layer.layer: layer.errors.sqnr_db for layer in layers}
    assert min(sqnr["stem"], sqnr["layers.0.down.1"]) > ROUNDED
    assert max(sqnr["layers.0"], sqnr["head"]) < 20
    assert max(ratio for name, ratio in sqnr.items() if name in ("layers.0.conv", "layers.0.bn")) < 20


SMALL_BLOCK = """g (float[2, 5, 16] x) => (float[2, 5, 16] y) {
    [up] a = MatMul (x, w1)
    [act] b = Relu (a)
    [down] c = MatMul (b, w2)
    [scale] s = Mul (c, tiny)
    [sum] y = Add (x, s)
}"""


def test_an_error_that_the_outputs_hardly_show_has_its_row(context: PassContext) -> None:
    """No other weight makes up for the change: the second product reads another value with the same weights."""
    weights = {"w1": matrix(16, 16, 1), "w2": matrix(16, 16, 2), "tiny": np.full((16,), 1e-5, np.float32)}
    models = [detached(model_of(SMALL_BLOCK, **stored)) for stored in (weights, {**weights, "w1": -weights["w1"]})]
    matched = match_models(*models)
    draws = draw_inputs(matched, context, 1)
    assert compare_numbers(matched, draws, context).outputs["y"].sqnr_db > 90
    sqnr = {layer.layer: layer.errors.sqnr_db for layer in compare_layers(matched, draws, context)}
    assert sqnr.keys() == {"MatMul up", "MatMul down", "Mul scale"}
    assert max(sqnr.values()) < 0


CHAIN = """g (float[2, 5, 16] x) => (float[2, 5, 16] y) {{
    [norm] n = LayerNormalization <axis = -1> (x, scale, shift)
    {}
}}"""


def test_a_scale_that_moved_into_the_next_product_is_no_error(context: PassContext) -> None:
    """Between two products whose weights changed for each other, no value of the second model is one of the first."""
    weights = {
        "scale": np.ones(16, np.float32),
        "shift": vector(16, 1),
        "w1": matrix(16, 16, 2),
        "w2": matrix(16, 16, 3),
    }
    body = "[up] a = MatMul (n, w1) [act] b = Relu (a) [down] c = MatMul (b, w2) [end] y = Tanh (c)"
    factor = np.geomspace(0.1, 30, 16, dtype=np.float32)
    scaled = {**weights, "w1": weights["w1"] * factor, "w2": weights["w2"] / factor[:, None]}
    before, second = (model_of(CHAIN.format(body), **stored) for stored in (weights, scaled))
    matched = match_models(detached(before), detached(second))
    layers = compare_layers(matched, draw_inputs(matched, context, 1), context)
    assert [layer.layer for layer in layers] == ["LayerNormalization norm", "MatMul down"]
    assert all(layer.errors.sqnr_db > ROUNDED for layer in layers)


def test_a_multiplication_that_a_product_took_in_is_no_layer(context: PassContext) -> None:
    """The factor before a product goes into its weight; the factor after a product goes into that one's."""
    weights = {"scale": np.ones(16, np.float32), "shift": vector(16, 1), "f": vector(16, 2) + 3, "w": matrix(16, 16, 3)}
    before = model_of(CHAIN.format("[factor] m = Mul (n, f) [up] a = MatMul (m, w) [end] y = Tanh (a)"), **weights)
    taken = {**weights, "w": weights["w"] * weights["f"][:, None]}
    del taken["f"]
    second = model_of(CHAIN.format("[up] a = MatMul (n, w) [end] y = Tanh (a)"), **taken)
    layers = layers_of(before, detached(second), context)
    assert [(layer.layer, layer.before, layer.after) for layer in layers] == [
        ("LayerNormalization norm", "n", "n"),
        ("MatMul up", "a", "a"),
    ]
    late = CHAIN.format("[up] a = MatMul (n, w) [factor] m = Mul (a, f) [end] y = Tanh (m)")
    taken = {**taken, "w": weights["w"] * weights["f"]}
    layers = layers_of(model_of(late, **weights), detached(second_of(taken)), context)
    assert ("m", "a") in [(layer.before, layer.after) for layer in layers]
    assert all(layer.errors.sqnr_db > ROUNDED for layer in layers)


def second_of(weights: dict[str, np.ndarray]) -> onnx.ModelProto:
    return model_of(CHAIN.format("[up] a = MatMul (n, w) [end] y = Tanh (a)"), **weights)


def test_a_product_and_its_bias_in_one_node(context: PassContext) -> None:
    weights = {"w": matrix(8, 8, 0), "b": vector(8, 1)}
    head = "g (float[6, 8] x) => (float[6, 8] y)"
    before = model_of(head + "{ [up] h = MatMul (x, w) [sum] s = Add (h, b) [act] y = Relu (s) }", **weights)
    second = model_of(head + "{ [new] h = Gemm (x, w, b) [act] y = Relu (h) }", **weights)
    [layer] = layers_of(before, detached(second), context)
    assert (layer.layer, layer.before, layer.after) == ("MatMul up", "s", "h")


def test_quantizers_stand_between_values_that_are_compared(context: PassContext) -> None:
    """A weight of 8 bits and a rounded activation, beside a BatchNormalization that went into the Conv."""
    channels, rng = 16, np.random.default_rng(0)
    weights = {"w": matrix(channels, 27, 1).reshape(channels, 3, 3, 3), "v": matrix(channels, 4, 2)}
    numbers = {"scale": vector(channels, 3) + 3, "shift": vector(channels, 4), "mean": vector(channels, 5)}
    numbers["var"] = rng.uniform(0.2, 1, channels).astype(np.float32)
    head = "g (float[2, 3, 8, 8] x) => (float[2, 6, 6, 4] y)"
    tail = "[act] r = Relu ({}) [turn] t = Transpose <perm = [0, 2, 3, 1]> (r) [out] y = MatMul (t, v)"
    before = model_of(
        f"""{head} {{
            [conv] c = Conv (x, w)
            [bn] b = BatchNormalization (c, scale, shift, mean, var)
            {tail.format("b")}
        }}""",
        **weights,
        **numbers,
    )
    factor = numbers["scale"] / np.sqrt(numbers["var"] + np.float32(1e-5))
    folded = weights["w"] * factor[:, None, None, None]
    step = np.array(np.abs(folded).max() / 127, np.float32)
    stored = {
        "q": np.round(folded / step).astype(np.int8),
        "step": step,
        "bias": numbers["shift"] - numbers["mean"] * factor,
    }
    second = model_of(
        f"""{head} {{
            d = DequantizeLinear (q, step)
            [conv] c = Conv (x, d, bias)
            k = QuantizeLinear (c, fine, zero)
            e = DequantizeLinear (k, fine, zero)
            {tail.format("e")}
        }}""",
        v=weights["v"],
        fine=np.array(0.25, np.float32),
        zero=np.array(0, np.int8),
        **stored,
    )
    matched = match_models(detached(before), detached(second))
    layers = compare_layers(matched, draw_inputs(matched, context, 1), context)
    assert {layer.layer for layer in layers} >= {"BatchNormalization bn", "MatMul out"}
    assert all(layer.errors.sqnr_db > 25 for layer in layers), "8 bits leave 30 dB and more"
