"""Two models on the same inputs: what both have is compared, and what one lacks at the next common value."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest

from passes import ModelError, optimize
from passes.context import PassContext
from passes.diff import compare_models
from passes.tools import compare, inspect_model, split, to_bf16, to_fp16
from tests.support.onnx_models import biased_attention, matrix, model_of

SCALED = """
g (float[2, 8] x) => (float[2, 8] y) <float[8, 8] w> {{
  a = MatMul (x, w)
  b = Mul (a, half)
  c = Add (b, b)
  d = {op} (c)
  y = MatMul (d, w)
}}"""


def test_a_model_and_its_optimized_form(context: PassContext) -> None:
    """onnxsim merges the three projections, and splits their product: a layer is compared at a part of it."""
    model = biased_attention()
    run = optimize(model, ["onnxsim"], context=context)
    found = compare(model, run, context=context)
    assert compare_models(run, run.model).is_empty
    assert found.ok
    assert {"q0", "k0", "v0"} <= {layer.before for layer in found.layers}
    assert not found.meets
    assert {value.before for value in found.numbers.values} >= {"scores", "weights"}
    assert not {value.before for value in found.numbers.values} & found.meets.keys()
    assert "<td" in found._repr_html_()


def test_a_half_model_is_judged_as_half(context: PassContext) -> None:
    """An error of float16's size is over the tolerance of float32."""
    text = "g (float[8, 8] x) => (float[8, 8] y) { a = MatMul (x, w) y = Mul (a, a) }"
    model = model_of(text, w=matrix(8, 8, 1))
    half = to_fp16(model, context=context)
    found = compare(model, half, context=context)
    (errors,) = found.numbers.outputs.values()
    assert (found.ok, errors.judged_as) == (True, "float16")
    assert errors.max_abs > 1e-5
    assert "judged by the tolerance of float16: for each value" in str(found)
    assert "judged by" not in str(compare(model, model, context=context))


def test_values_cut_elsewhere_meet_again(context: PassContext) -> None:
    weights = {"w": matrix(8, 8, 1)}
    fused = "g (float[2, 8] x) => (float[2, 8] y) { c = MatMul (x, w) d = Relu (c) y = MatMul (d, w) }"
    models = model_of(SCALED.format(op="Relu"), **weights, half=np.float32(0.5)), model_of(fused, **weights)
    found = compare(*models, context=context)
    assert found.ok
    assert found.meets["b"] in ("c", "d", "y")
    assert "are compared where both meet again" in str(found)
    assert all(errors.max_abs < 1e-5 for errors in found.numbers.outputs.values())


def test_a_value_of_which_all_readers_were_merged_is_compared(context: PassContext) -> None:
    """And a value that a layer is compared at is not called one without a counterpart."""
    text = "g (float[2, 8] x) => (float[2, 8] y) { n = Relu (x) q = MatMul (n, w) k = MatMul (n, v) y = Mul (q, k) }"
    model = model_of(text, w=matrix(8, 8, 1), v=matrix(8, 8, 2))
    text = "g (float[2, 8] x) => (float[2, 8] y) { n = Relu (x) m = MatMul (n, wv) "
    text += "q, k = Split <axis = 1, num_outputs = 2> (m) y = Mul (q, k) }"
    merged = model_of(text, wv=np.concatenate([matrix(8, 8, 1), matrix(8, 8, 2)], 1))
    found = compare(model, merged, context=context)
    assert "n" in {value.before for value in found.numbers.values}
    assert not {layer.before for layer in found.layers} & found.meets.keys()


def test_a_wrong_model_is_wrong(context: PassContext) -> None:
    weights = {"w": matrix(8, 8, 1), "half": np.float32(0.5)}
    one, other = (model_of(SCALED.format(op=op), **weights) for op in ("Relu", "Abs"))
    found = compare(one, other, [{"x": np.float32(np.random.default_rng(0).standard_normal((2, 8)))}], context=context)
    assert not found.ok
    assert found.as_data()["ok"] is False
    exact = {value.before for value in found.numbers.values if value.errors.max_abs == 0}
    assert {"a", "b"} <= exact


def test_a_row_that_no_input_reads_is_named_although_all_outputs_are_equal(context: PassContext) -> None:
    rows = matrix(64, 4, 1)
    other = rows.copy()
    other[50, 2] += 1
    text = "g (int64[3] i) => (float[3, 4] y) { y = Gather (w, i) }"
    places = [{"i": np.array([0, 1, 2])}]
    found = compare(model_of(text, w=rows), model_of(text, w=other), places, context=context)
    assert found.ok
    assert "equal in every bit" in str(found)
    assert [change.name for change in found.stored] == ["w"]
    assert "stored tensors that differ, also where none of these inputs reads them\n  w float[64,4]: " in str(found)
    assert not compare(model_of(text, w=rows), model_of(text, w=rows), places, context=context).stored


def test_a_model_in_bfloat16_is_compared(context: PassContext) -> None:
    """onnxruntime has no kernels of bfloat16; ONNX's evaluator runs it, and inner values differ by numbers."""
    model = biased_attention()
    found = compare(model, to_bf16(model, context=context).model, context=context)
    ratios = [value.errors.sqnr_db for value in found.numbers.values if value.errors.max_abs]
    assert ratios
    assert 20 < min(ratios) < max(ratios) < 80


UNEQUAL = """
g (float[2, 8] x) => (float[2, 8] y, float[2, 8] noise) {
  noise = RandomNormalLike (x)
  y = Relu (x)
}"""


def test_outputs_that_cannot_be_compared_are_named(context: PassContext) -> None:
    found = compare(model_of(UNEQUAL), model_of(UNEQUAL), context=context)
    assert (found.ok, [*found.numbers.outputs]) == (True, ["y"])
    assert found.as_data()["not_compared"] == ("noise",)
    assert str(found).count("output noise: not compared, since its values are random") == 1
    assert found._repr_html_().count("not compared") == 1


@pytest.mark.parametrize("other", ["double[2, 8]", "float[2, 8, 1]", "float[3, 8]"])
def test_inputs_of_other_types_take_no_values_in_common(other: str, context: PassContext) -> None:
    first, second = (model_of(f"g ({kind} x) => ({kind} y) {{ y = Relu (x) }}") for kind in ("float[2, 8]", other))
    with pytest.raises(ModelError, match=r"'x' is float\[2,8\] in the first model"):
        compare(first, second, context=context)


# What `inspect_model` counts, against numbers worked out by hand.

IMAGE = """
g (float[N, 3, 8, 8] images) => (float[N, 10] y)
  <float[4, 3, 3, 3] w, float[2, 2, 3, 3] grouped, float[4, 2, 2, 2] up, float[10, 512] fc> {
  a = Conv <pads = [1, 1, 1, 1]> (images, w)
  b = ConvTranspose <strides = [2, 2]> (a, up)
  c = Conv <group = 1, kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (b, grouped)
  d = Flatten (c)
  y = Gemm <transB = 1> (d, fc)
}"""
SHAPES = {"w": (4, 3, 3, 3), "grouped": (2, 2, 3, 3), "up": (4, 2, 2, 2), "fc": (10, 512)}


def image() -> onnx.ModelProto:
    return model_of(IMAGE, **{name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()})


def test_products_are_counted() -> None:
    facts = inspect_model(image())
    convolutions = 4 * 64 * 27 + 2 * 256 * 18
    assert dict(facts.macs) == {"Conv": convolutions, "ConvTranspose": 4 * 64 * 8, "Gemm": 5120}
    assert facts.sizes == {"N": 1}
    assert facts.parameters == sum(int(np.prod(shape)) for shape in SHAPES.values())
    # a and b are alive at once, and so are b and c; b has 2 x 16 x 16 floats.
    assert facts.peak == 4 * (512 + 512)


def test_at_another_size() -> None:
    one, three = inspect_model(image()), inspect_model(image(), {"images": [3, 3, 8, 8]})
    assert {name: 3 * count for name, count in one.macs.items()} == dict(three.macs)
    assert three.peak == 3 * (one.peak or 0)


def test_structures_and_text() -> None:
    facts = inspect_model(biased_attention())
    assert dict(facts.structures) == {"qkv": 1, "attention": 1}
    assert facts.operators["MatMul"] == 6
    assert "MACs         73,728" in str(facts)
    assert len(str(facts)) < 3000
    json.dumps(facts.as_data())


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", "\x1b]0;title\x07"])
def test_names_stay_text(name: str) -> None:
    model = biased_attention()
    model.graph.input[0].name = model.graph.node[0].input[0] = name
    facts = inspect_model(model)
    assert name not in facts._repr_html_() + str(facts) or "<script>" in str(facts)
    assert "<script>" not in facts._repr_html_()


def test_what_cannot_be_counted_is_said() -> None:
    facts = inspect_model(
        model_of('g (float[2, 3] x) => (float[2, 2] y) { y = Einsum <equation = "ij,kj->ik"> (x, x) }')
    )
    assert facts.uncounted == ("Einsum",)
    assert "without Einsum" in str(facts)


def test_products_in_bodies_are_counted() -> None:
    """Of an If the branch with more, and of a Loop one turn."""
    text = """
    g (float[2, 3] x, bool p, int64 turns) => (float[2, 3] y, float[2, 3] z) {
      y = If (p) <then_branch = t () => (float[2, 3] u) { u = MatMul (x, w) }, else_branch = e () => (float[2, 3] v) {
        once = MatMul (x, w)
        v = MatMul (once, w)
      }>
      z = Loop (turns, p, x) <body = b (int64 at, bool on, float[2, 3] s) => (bool off, float[2, 3] t) {
        off = Identity (on)
        t = MatMul (s, w)
      }>
    }"""
    facts = inspect_model(model_of(text, w=np.ones((3, 3), np.float32)))
    assert dict(facts.macs) == {"MatMul": 3 * 2 * 3 * 3}
    assert (facts.repeated, facts.uncounted) == (("Loop",), ())
    assert "54, with one turn of each Loop" in str(facts)


def test_weights_in_constant_nodes_and_in_bodies_are_parameters() -> None:
    text = """
    g (float[2, 3] x, bool p) => (float[2, 3] y) {
      w = Constant <value = float[3, 3] {1, 0, 0, 0, 1, 0, 0, 0, 1}> ()
      a = MatMul (x, w)
      y = If (p) <then_branch = t () => (float[2, 3] u) { u = Neg (a) }, else_branch = e () => (float[2, 3] v) {
        k = Constant <value = float[2] {1, 2}> ()
        v = Abs (a) }>
    }"""
    facts = inspect_model(model_of(text))
    assert (facts.parameters, facts.parameter_bytes) == (11, 44)
    assert dict(facts.macs) == {"MatMul": 18}
    assert facts.uncounted == ()
    assert set(facts.activations) == {"a", "y"}


def test_operators_of_other_domains_are_counted_by_their_rule_or_said_to_be_missing() -> None:
    text = """<ir_version: 10, opset_import: ["": 20, "com.microsoft": 1]>
    g (float[8, 2] x, float[8, 4] w) => (float[2, 4] z) <float[2, 4] y>
    { y = com.microsoft.FusedMatMul <transA = 1> (x, w) z = com.microsoft.QuickGelu (y) }"""
    facts = inspect_model(onnx.parser.parse_model(text))
    assert (facts.macs, facts.uncounted) == ({"com.microsoft::FusedMatMul": 2 * 4 * 8}, ("com.microsoft::QuickGelu",))


def test_a_value_that_a_branch_reads_is_alive_until_then() -> None:
    text = """g (bool c, float[100] x) => (float[1] y) {
        a = Neg (x) b = Abs (x) d = ReduceMax <keepdims = 1> (b)
        y = If (c) <then_branch = t () => (u) { u = ReduceMax <keepdims = 1> (READ) },
            else_branch = f () => (w) { w = Neg (d) }>
    }"""
    by_branch, by_none = (inspect_model(model_of(text.replace("READ", name))).peak for name in ("a", "d"))
    assert (by_branch, by_none) == (1 + 3 * 400, 1 + 2 * 400), "x, b and, for the branch, a"


def test_inputs_that_are_no_tensors_are_named_with_what_each_command_can_do(context: PassContext) -> None:
    model = model_of("g (seq(float[N, 8]) x) => (float[M, 8] y) { y = ConcatFromSequence <axis = 0> (x) }")
    with pytest.raises(ModelError, match=r"drawn for tensors only; let both models begin after it: onnxline extract"):
        compare(model, model, context=context)
    with pytest.raises(ModelError, match=r"drawn for tensors only; leave the proof out: --no-proof \(proof=False\)$"):
        split(model, at=["y"], context=context)


def test_a_model_that_does_not_run_on_a_sample_does_not_agree(context: PassContext) -> None:
    text = "g (float[N, 8] x) => (float[M, 4] y) { y = Reshape (x, s) }"
    models = [model_of(text, s=np.array(shape, np.int64)) for shape in ([-1, 4], [4, 4])]
    samples = [{"x": np.ones((size, 8), np.float32)} for size in (2, 3)]
    assert compare(*models, samples[:1], context=context).ok
    found = compare(*models, samples, context=context)
    assert (found.ok, found.as_data()["ok"]) == (False, False)
    assert "the second model does not run on sample 1" in str(found)


def test_outputs_that_only_one_model_has_are_said(context: PassContext) -> None:
    both = model_of("g (float[N, 8] x) => (float[N, 8] y, float[N, 8] z) { y = Neg (x) z = Abs (x) }")
    one = model_of("g (float[N, 8] x) => (float[N, 8] y) { y = Neg (x) }")
    found = [compare(*models, context=context) for models in ((both, one), (one, both), (both, both))]
    words = [f"output z: only the {which} model has it, so it is not compared" for which in ("first", "second")]
    assert [line.unpaired for line in found] == [(words[0],), (words[1],), ()]
    assert f"\n{words[0]}\n" in str(found[0])
