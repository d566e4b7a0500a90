"""Errors where a layer ends, and the draws on which two models are compared."""

from __future__ import annotations

import math

import numpy as np
import onnx
import pytest

from passes.context import PassContext
from passes.diff import (
    compare_layers,
    compare_models,
    compare_numbers,
    diff_text,
    draw_inputs,
    layers_as_data,
    layers_text,
    match_models,
)
from passes.provenance import carry, name_weights
from tests.support.annotated_models import annotate_modules
from tests.support.onnx_models import detached, matrix, model_of, vector

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


# Weights in another form, constants that one model computes and the other stores, and how long all that gets.

READS = "g (float[2, 8] x) => (float[2, 12] y) {{ {} [p] y = MatMul (x, {}) }}"
TURNED = READS.format("[t] wt = Transpose <perm = [1, 0]> (w)", "wt")
STORED = READS.format("", "val_27")
BOTH = READS.format("[t] wt = Add (w, w)", "wt")


def lines(before: onnx.ModelProto, after: onnx.ModelProto, most: int | None = 20) -> list[str]:
    text = diff_text(compare_models(detached(before), detached(after)), most=most)
    return [line for line in text.splitlines() if line.startswith("  ")]


def test_a_weight_that_comes_back_transposed_under_another_name() -> None:
    weight = matrix(12, 8, 0)
    before, after = model_of(TURNED, w=weight), model_of(STORED, val_27=weight.T.copy())
    assert lines(before, after) == [
        "  Transpose t → stored constant val_27",
        "  w float[12,8], transposed → val_27 float[8,12]",
    ]
    assert lines(after, before) == ["  added Transpose t", "  val_27 float[8,12], transposed → w float[12,8]"]


@pytest.mark.parametrize(
    ("shape", "perm", "form"),
    [((2, 3, 4), (2, 0, 1), "transposed"), ((24,), (0,), "reshaped"), ((3, 3), (1, 0), "transposed")],
)
def test_forms_are_found_by_content(shape: tuple[int, ...], perm: tuple[int, ...], form: str) -> None:
    weight = vector(int(np.prod(shape)), 0).reshape(shape)
    other = weight.transpose(perm) if len(shape) > 1 else weight.reshape(4, 6)
    spelled, other_spelled = (",".join(map(str, array.shape)) for array in (weight, other))
    before = model_of(f"g () => (float[{spelled}] y) {{ y = Neg (w) }}", w=weight)
    after = model_of(f"g () => (float[{other_spelled}] y) {{ y = Neg (fresh) }}", fresh=np.ascontiguousarray(other))
    assert f"  w float[{spelled}], {form} → fresh float[{other_spelled}]" in lines(before, after)
    changed = np.ascontiguousarray(other).copy()
    changed.flat[0] += 1
    after = model_of(f"g () => (float[{other_spelled}] y) {{ y = Neg (fresh) }}", fresh=changed)
    assert not any(form in line for line in lines(before, after))


def test_a_computed_value_that_is_stored() -> None:
    weight = matrix(8, 12, 0)
    before, after = model_of(BOTH, w=weight), model_of(STORED, val_27=weight + weight)
    assert lines(before, after) == [
        "  Add t → stored constant val_27",
        "  removed w float[8,12]",
        "  computed by Add t → stored constant val_27 float[8,12]",
    ]
    assert lines(after, before)[1] == "  stored constant val_27 float[8,12] → computed by Add t"


def test_one_of_equal_tensors_is_left() -> None:
    text = "g (float[32] x) => (float[32] y) {{ h = Add (x, a) y = Add (h, {}) }}"
    zeros = np.zeros(32, np.float32)
    lines_of_diff = lines(model_of(text.format("b"), a=zeros, b=zeros), model_of(text.format("a"), a=zeros))
    assert lines_of_diff == ["  removed b float[32], equal to a, which is read in its place"]


ARRANGED = """g (float[2, 8] x) => (float[2, 8] q, float[2, 8] k) {{
    {}
    q = MatMul (x, {})
    k = MatMul (x, {})
}}"""
MERGED = "g (float[2, 8] x) => (float[2, 8] q, float[2, 8] k) { b = MatMul (x, v) q, k = Split <num_outputs = 2> (b) }"


def test_a_merge_of_transposed_weights_names_them_as_the_first_model_does() -> None:
    """The merged tensor knows the module's weights alone, which were transposed before."""
    query, key = matrix(8, 8, 0), matrix(8, 8, 1)
    turns = "qt = Transpose <perm = [1, 0]> (wq) kt = Transpose <perm = [1, 0]> (wk)"
    source = detached(model_of(ARRANGED.format(turns, "qt", "kt"), wq=query, wk=key))
    turned = detached(model_of(ARRANGED.format("", "v1", "v2"), v1=query.T.copy(), v2=key.T.copy()))
    turned = name_weights(source, carry(source, turned, "turn"))
    merged = detached(model_of(MERGED, v=np.concatenate([query.T, key.T], axis=1)))
    merged = name_weights(turned, carry(turned, merged, "merge"))
    said = "  wq_transposed, wk_transposed float[8,8], merged → wq_merged float[8,16]"
    assert said in diff_text(compare_models(turned, merged)).splitlines()


def test_a_line_lists_fewer_nodes_rather_than_cut_a_name() -> None:
    names = [f"layer_{place}_{'of_a_deep_model_' * 3}" for place in range(7)]
    chain = " ".join(f"[{name}] v{place + 1} = Neg (v{place})" for place, name in enumerate(names))
    (line,) = lines(
        model_of(f"g (float[2] v0) => (float[2] y) {{ {chain} y = Relu (v7) }}"),
        model_of("g (float[2] v0) => (float[2] y) { y = Relu (v0) }"),
    )
    assert line == f"  removed {', '.join(f'Neg {name}' for name in names[:3])} and 4 more"


def test_long_lists_and_names_are_cut_with_a_count() -> None:
    name = "layer_" * 60
    chain = " ".join(f"[{name}{i}] v{i + 1} = Neg (v{i})" for i in range(40))
    before = model_of(f"g (float[2] v0) => (float[2] y) {{ {chain} y = Relu (v40) }}")
    after = model_of("g (float[2] v0) => (float[2] y) { y = Relu (v0) }")
    cut, whole = (diff_text(compare_models(detached(before), detached(after)), most=most) for most in (20, None))
    assert max(map(len, cut.splitlines())) <= 300
    assert len(cut) < 1500
    assert "Neg -40" in cut
    assert "and 39 more" in cut
    assert whole.count(name) == 40
