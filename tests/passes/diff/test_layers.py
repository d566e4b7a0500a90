"""Errors where a layer ends, and the draws on which two models are compared."""

from __future__ import annotations

import math

import numpy as np
import onnx

from passes.context import PassContext
from passes.diff import compare_layers, compare_numbers, draw_inputs, layers_as_data, layers_text, match_models
from tests.support.annotated_models import annotate_modules
from tests.support.onnx_models import detached, matrix, model_of

BLOCKS = """
g (float[N, 8] x) => (float[N, 8] y) {{
    [up0] a = MatMul (x, w0)
    [act0] b = {} (a)
    [up1] c = MatMul (b, w1)
    [act1] d = Tanh (c)
    [out] y = MatMul (d, w2)
}}
"""
MODULES = {"up0": "layers.0.up", "act0": "layers.0.act", "up1": "layers.1.up", "act1": "layers.1.act", "out": "head"}


def blocks(act: str = "Tanh", scale: float = 1) -> onnx.ModelProto:
    weights = {f"w{i}": matrix(8, 8, i) for i in range(3)}
    weights["w1"] = weights["w1"] * np.float32(scale)
    return model_of(BLOCKS.format(act), **weights)


def test_layers_are_named_by_module_and_show_where_the_error_begins(context: PassContext) -> None:
    matched = match_models(detached(annotate_modules(blocks(), **MODULES)), detached(blocks(scale=1.01)))
    layers = compare_layers(matched, draw_inputs(matched, context), context)
    assert [layer.layer for layer in layers] == ["layers.0.up", "layers.0", "layers.1.up", "layers.1", "head"]
    assert [layer.errors.sqnr_db == math.inf for layer in layers] == [True, True, False, False, False]
    assert all(30 < layer.errors.sqnr_db < 50 and layer.dtype == "float32" for layer in layers[2:])
    outermost = compare_layers(matched, draw_inputs(matched, context, 1), context, most=1)
    assert [layer.layer for layer in outermost] == ["head"]
    text = layers_text(layers)
    assert text.splitlines()[2].split() == ["layer", "op", "dtype", "max", "abs", "error", "SQNR"]
    assert text.splitlines()[3].split() == ["layers.0.up", "MatMul", "float32", "0", "equal"]
    assert len(layers_text(layers, most=2).splitlines()) == 6
    assert layers_as_data(layers)[0]["errors"]["sqnr_db"] == "Infinity"


def test_without_modules_a_layer_is_a_node_with_weights(context: PassContext) -> None:
    matched = match_models(detached(blocks()), detached(blocks("Sin")))
    layers = compare_layers(matched, draw_inputs(matched, context), context)
    assert [(layer.layer, layer.op) for layer in layers] == [
        ("MatMul up0", "MatMul"),
        ("MatMul up1", "MatMul"),
        ("MatMul out", "MatMul"),
    ]
    assert layers[0].errors.max_abs == 0 < layers[1].errors.max_abs


ALONE = """
g (float[N, 8] x) => (float[N, 8] y) {{
    sizes = Shape <start = 0, end = 1> (x)
    is_one = Equal (sizes, one)
    t = Cast <to = 1> (is_one)
    wrong = Mul (t, {})
    y = Add (x, wrong)
}}
"""


def test_an_error_at_batch_one_alone_is_seen(context: PassContext) -> None:
    single = np.array([1], np.int64)
    before, after = (
        detached(model_of(ALONE.format(what), one=single, zero=np.float32([0]), w=np.float32([3])))
        for what in ("zero", "w")
    )
    matched = match_models(before, after)
    draws = draw_inputs(matched, context)
    numbers = compare_numbers(matched, draws, context)
    assert 2.9 < numbers.outputs["y"].max_abs < 3.1
    assert any("N=1" in label for label in numbers.draws)
    assert compare_numbers(matched, draws[:1], context).outputs["y"].max_abs == 0


def test_a_model_that_runs_at_some_sizes_only(context: PassContext) -> None:
    text = "g (float[N, 8] x) => (float[M, 4] y) {{ y = Reshape (x, s) }}"
    before, after = (detached(model_of(text.format(), s=np.array(shape, np.int64))) for shape in ([-1, 4], [4, 4]))
    matched = match_models(before, after)
    numbers = compare_numbers(matched, draw_inputs(matched, context), context)
    assert numbers.outputs["y"].ok
    assert any(said.startswith("the second model does not run on draw") and "N=8" in said for said in numbers.not_run)


def test_a_size_that_only_the_second_model_fixes_is_drawn(context: PassContext) -> None:
    text = "g (float[{0}, 8] x) => (float[{0}, 8] y) {{ y = Neg (x) }}"
    matched = match_models(detached(model_of(text.format("N"))), detached(model_of(text.format("5"))))
    assert {draw.feeds["x"].shape for draw in draw_inputs(matched, context)} == {(5, 8)}


def test_a_product_over_fewer_dims_is_the_same_layer(context: PassContext) -> None:
    weights = {"w": matrix(8, 8, 0), "b": matrix(1, 8, 1)[0]}
    before = model_of(
        "g (float[2, 3, 8] x) => (float[2, 3, 8] y) { [up] h = MatMul (x, w) [sum] s = Add (h, b) [act] y = Relu (s) }",
        **weights,
    )
    after = """g (float[2, 3, 8] x) => (float[2, 3, 8] y) {
        flat = Reshape (x, two)
        p = Gemm (flat, w, b)
        s = Reshape (p, three)
        y = Relu (s)
    }"""
    shapes = {"two": np.array([6, 8]), "three": np.array([2, 3, 8])}
    matched = match_models(
        detached(annotate_modules(before, up="layers.0.up", sum="layers.0.up", act="layers.0.act")),
        detached(model_of(after, **weights, **shapes)),
    )
    layers = compare_layers(matched, draw_inputs(matched, context), context)
    assert [layer.layer for layer in layers] == ["layers.0.up", "layers.0"]
    assert all(layer.errors.ok for layer in layers)
