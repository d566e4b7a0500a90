"""Folded numbers are those of ONNX's reference evaluator; what may not fold stays an op."""

from __future__ import annotations

import numpy as np
import pytest
from onnx.reference import ReferenceEvaluator

from pipeline.errors import Unsupported
from pipeline.importers.from_onnx.fold import FOLDERS
from tests.pipeline.importers.from_onnx.import_text import graph_from, model, ops


def array(name: str, *items: int) -> str:
    return f"{name} = Constant <value_ints = [{', '.join(map(str, items))}]> () "


def scalar(name: str, item: int) -> str:
    return f"{name} = Constant <value_int = {item}> () "


A = array("a", -7, 7, -7, 0, 5, 3)
B = array("b", 2, -2, -2, 4, 5, -1)
BOOLS = A + B + "c = Less(a, b) d = Equal(a, b) "
TABLE = A + array("s", 2, 3) + "m = Reshape(a, s) "

CASES = {
    "Abs": A + "y = Abs(a)",
    "Add": A + B + "y = Add(a, b)",
    "And": BOOLS + "y = And(c, d)",
    "Cast": BOOLS + "y = Cast <to = 7> (c)",
    "CastLike": BOOLS + "y = CastLike(c, a)",
    "Ceil": A + "f = Cast <to = 1> (a) h = Constant <value_float = 2.0> () q = Div(f, h) y = Ceil(q)",
    "Concat": A + B + "y = Concat <axis = 0> (a, b)",
    "ConstantOfShape": array("s", 3, 2) + "y = ConstantOfShape <value = int64[1] {5}> (s)",
    "CumSum": TABLE + scalar("x", 1) + "y = CumSum <reverse = 1, exclusive = 1> (m, x)",
    "Div": A + array("b", 2, -2, -2, 4, 5, -1) + "y = Div(a, b)",
    "Equal": BOOLS + "y = Equal(a, b)",
    "Expand": A + array("s", 2, 6) + "y = Expand(a, s)",
    "Floor": A + "f = Cast <to = 1> (a) h = Constant <value_float = 2.0> () q = Div(f, h) y = Floor(q)",
    "Gather": TABLE + array("i", 1, 0, -1) + "y = Gather <axis = 1> (m, i)",
    "GatherND": TABLE + array("i", 1, 0) + array("t", 2, 1) + "j = Reshape(i, t) y = GatherND <batch_dims = 1> (m, j)",
    "Greater": BOOLS + "y = Greater(a, b)",
    "GreaterOrEqual": BOOLS + "y = GreaterOrEqual(a, b)",
    "Less": BOOLS + "y = Less(a, b)",
    "LessOrEqual": BOOLS + "y = LessOrEqual(a, b)",
    "Max": A + B + scalar("z", 1) + "y = Max(a, b, z)",
    "Min": A + B + scalar("z", 1) + "y = Min(a, b, z)",
    "Mod": A + array("b", 2, -2, -3, 4, 5, -2) + "y = Mod(a, b)",
    "Mul": A + B + "y = Mul(a, b)",
    "Neg": A + "y = Neg(a)",
    "NonZero": TABLE + "y = NonZero(m)",
    "Not": BOOLS + "y = Not(c)",
    "Or": BOOLS + "y = Or(c, d)",
    "Range": scalar("p", 9) + scalar("q", -2) + scalar("r", -3) + "y = Range(p, q, r)",
    "ReduceMax": TABLE + array("x", -1) + "y = ReduceMax (m, x)",
    "ReduceMin": TABLE + array("x", 0) + "y = ReduceMin <keepdims = 0> (m, x)",
    "ReduceProd": A + "y = ReduceProd <keepdims = 0> (a)",
    "ReduceSum": TABLE + array("x", 0, 1) + "y = ReduceSum (m, x)",
    "Reshape": A + array("s", 3, -1) + "y = Reshape(a, s)",
    "Sign": A + "y = Sign(a)",
    "Slice": TABLE + array("p", -1) + array("q", -9) + array("x", 1) + array("t", -2) + "y = Slice(m, p, q, x, t)",
    "Squeeze": A + array("s", 1, 6, 1) + "m = Reshape(a, s)" + array("x", -1) + "y = Squeeze(m, x)",
    "Sub": A + B + "y = Sub(a, b)",
    "Sum": "f = Constant <value_floats = [1.0, 2.0]> () y = Sum(f, f, f)",
    "Transpose": TABLE + "y = Transpose(m)",
    "Trilu": TABLE + "y = Trilu <upper = 0> (m)",
    "Unsqueeze": A + array("x", 0, -1) + "y = Unsqueeze(a, x)",
    "Where": BOOLS + "y = Where(c, a, b)",
    "Xor": BOOLS + "y = Xor(c, d)",
    "Shape": "y = Shape <start = -2> (given)",
    "Size": "y = Size(given)",
}


def test_every_folder_has_a_case() -> None:
    assert set(CASES) == {*FOLDERS, "Shape", "Size"}


@pytest.mark.parametrize("kind", CASES)
def test_numbers_are_those_of_the_reference(kind: str) -> None:
    text = f"g (float[2, 3] given) => (y) {{ {CASES[kind]} }}"
    graph = graph_from(text)
    results = ReferenceEvaluator(model(text)).run(None, {"given": np.zeros((2, 3), np.float32)})
    expected = np.asarray(next(iter(results)))
    value = graph.value("y")
    actual = graph.payloads[value.vid].numpy()
    assert not graph.ops
    assert actual.dtype == expected.dtype
    np.testing.assert_array_equal(actual, expected)
    assert (value.spec.shape, value.spec.dtype) == (expected.shape, expected.dtype.name)


@pytest.mark.parametrize("saturate", ["", ", saturate = 0", ", saturate = 1"])
@pytest.mark.parametrize("to", ["17", "18", "19", "20"])  # the types of float8
def test_a_constant_saturates_as_the_reference_does(to: str, saturate: str) -> None:
    """numpy makes NaN of what a float8 cannot hold."""
    numbers = "c = Constant <value_floats = [1.0e6, -500.0, 3.3, 0.0]> ()"
    text = f"g (float[1] x) => (float[4] y) {{ {numbers} n = Cast <to = {to}{saturate}> (c) y = Cast <to = 1> (n) }}"
    graph = graph_from(text)
    (expected,) = ReferenceEvaluator(model(text)).run(None, {"x": np.zeros(1, np.float32)})
    np.testing.assert_array_equal(graph.payloads[graph.value("y").vid].numpy(), expected)


def test_a_constant_takes_the_type_of_what_only_a_run_knows() -> None:
    """The body of Attention-24 makes the number that it pads a mask with so."""
    text = "c = Constant <value_floats = [3.0]> () k = CastLike(c, x) y = Add(x, k)"
    assert ops(f"g (float16[2] x) => (float16[2] y) {{ {text} }}") == (
        'const %1 "k": float16[1]\n%2 "y": float16[2] = aten.add.Tensor(%0, %1)'
    )


def test_a_constant_of_a_type_below_a_byte_is_not_made() -> None:
    text = "c = Constant <value_floats = [3.0]> () k = CastLike(c, w) q = Cast <to = 1> (k) y = Add(x, q)"
    with pytest.raises(Unsupported, match="'k'"):
        graph_from(f"g (float[2] x) => (float[2] y) <int4[1] w = {{1}}> {{ {text} }}", 21)


def test_axes_of_older_opsets_are_attributes() -> None:
    graph = graph_from(
        f"g (float[2] x) => (y) {{ {A} u = Unsqueeze <axes = [0]> (a) y = Squeeze <axes = [0]> (u) }}", 12
    )
    assert graph.payloads[graph.value("y").vid].numpy().tolist() == [-7, 7, -7, 0, 5, 3]


def test_what_only_gives_a_shape_is_not_in_the_graph() -> None:
    text = (
        f"d = Shape(x) {array('k', -1)} {array('i', 0)} n = Gather(d, i) s = Concat <axis = 0> (n, k) y = Reshape(x, s)"
    )
    assert ops(f"g (float[2, 3, 4] x) => (float[2, 12] y) {{ {text} }}") == (
        '%1 "y": float32[2, 12] = aten.reshape.default(%0) {shape: [2, 12]}'
    )


def test_a_float_weight_is_not_folded() -> None:
    weights = ", ".join("1.0" for _ in range(17))
    text = f"w = Constant <value_floats = [{weights}]> () v = Neg(w) y = Add(x, v)"
    assert '"v": float32[17] = aten.neg.default(%1)' in ops(f"g (float[17] x) => (float[17] y) {{ {text} }}")


def test_a_trainable_param_is_not_folded() -> None:
    text = "g (float[1] x) => (float[1] y) <float[1] w = {2.0}> { v = Neg(w) y = Add(x, v) }"
    assert ops(text).startswith('const %1 "v": float32[1]')
    assert ops(text, trainable=["w"]).startswith('param %1 "w": float32[1]\n%2 "v": float32[1] = aten.neg.default(%1)')


def test_a_large_fill_is_one_element_expanded() -> None:
    text = f"{array('s', 100, 100)} y = ConstantOfShape <value = float[1] {{2.5}}> (s)"
    graph = graph_from(f"g (float[1] x) => (float[100, 100] y) {{ {text} }}")
    assert [op.kind for op in graph.ops] == ["aten.expand.default"]
    assert graph.payloads[1].numpy().tolist() == 2.5


def test_a_range_folds_at_every_length() -> None:
    text = f"{scalar('p', 0)} {scalar('q', 5000)} {scalar('r', 1)} y = Range(p, q, r)"
    assert graph_from(f"g (float[1] x) => (y) {{ {text} }}").value("y").spec.shape == (5000,)


def test_a_range_of_run_time_numbers_is_refused() -> None:
    with pytest.raises(Unsupported, match=r"Range: 1 × at 'y'"):
        graph_from(f"g (int64 q) => (int64[n] y) {{ {scalar('p', 0)} {scalar('r', 1)} y = Range(p, q, r) }}")
