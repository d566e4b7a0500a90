"""Two models on the same inputs: what both have is compared, and what one lacks at the next common value."""

from __future__ import annotations

import numpy as np
import pytest

from passes.context import PassContext
from passes.diff import compare_models
from passes.errors import ModelError
from passes.optimize import optimize
from passes.tools import compare, to_bf16
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
    """onnxsim makes a Gemm of MatMul and Add: the product alone is only in the first."""
    model = biased_attention()
    run = optimize(model, ["onnxsim"], context=context)
    found = compare(model, run, context=context)
    assert compare_models(run, run.model).is_empty
    assert found.ok
    assert found.meets["q0"] == "q" or found.meets["q0"] == "qh"
    assert {value.before for value in found.numbers.values} >= {"scores", "weights"}
    assert not {value.before for value in found.numbers.values} & found.meets.keys()
    assert "are compared where both meet again" in str(found)
    assert "<td" in found._repr_html_()


def test_values_cut_elsewhere_meet_again(context: PassContext) -> None:
    weights = {"w": matrix(8, 8, 1)}
    fused = "g (float[2, 8] x) => (float[2, 8] y) { c = MatMul (x, w) d = Relu (c) y = MatMul (d, w) }"
    models = model_of(SCALED.format(op="Relu"), **weights, half=np.float32(0.5)), model_of(fused, **weights)
    found = compare(*models, context=context)
    assert found.ok
    assert found.meets["b"] in ("c", "d", "y")
    assert all(errors.max_abs < 1e-5 for errors in found.numbers.outputs.values())


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
