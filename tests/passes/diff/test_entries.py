"""Every difference is listed, wherever it is: before, after, and the text."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from passes.diff import Diff, compare_models
from tests.support.onnx_models import detached, model_of

LOOP = """
g (int64 trips, float[2] x) => (float[2] c, float[2] d) {{
    c, d = Loop (trips, , x, x) <body = b (int64 i, bool more, float[2] one, float[2] two) => (bool go, {order}) {{
        go = Identity (more)
        a = Neg (one)
        e = Abs (two)
    }}>
}}
"""

BRANCHES = """
g (bool c, float[2] x) => (float[2] y) {{
    y = If (c) <
        then_branch = t () => (float[2] a) {{ a = {then} }},
        else_branch = e () => (float[2] b) {{ b = {else_} }}
    >
}}
"""

DRAWS = (
    "g () => (float[2] y) {{ a = RandomNormal <shape = [2]> () b = RandomNormal <shape = [2]> () y = Sub ({reads}) }}"
)

TWO = "g (float[2] x) => (float[2] y, float[2] z) "


def diff_of(before: onnx.ModelProto, after: onnx.ModelProto) -> Diff:
    return compare_models(detached(before), detached(after))


def diff_sentences(before: onnx.ModelProto, after: onnx.ModelProto) -> list[str]:
    return [str(entry) for entry in diff_of(before, after).entries()]


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        pytest.param(
            TWO + "{ y = Relu (x) z = Neg (x) }",
            TWO + "{ z = Relu (x) y = Neg (x) }",
            ["what output y is Relu y → Neg y", "what output z is Neg z → Relu z"],
            id="outputs swapped",
        ),
        pytest.param(
            "g (float[2] x) => (float[2] y) { y = Relu (x) z = Neg (y) }",
            "g (float[2] x) => (float[2] y) { z = Relu (x) y = Neg (z) }",
            ["what output y is Relu y → Neg y"],
            id="another value is the output",
        ),
        pytest.param(
            "g (float[6] x) => (float[N] y) { y, b = Split <axis = 0> (x) }",
            "g (float[6] x) => (float[N] y) { y, b, c = Split <axis = 0> (x) }",
            ["Split y: outputs 2 → 3"],
            id="how many outputs a node makes",
        ),
        pytest.param(
            "g (float[2] x) => (float[2] y) { a = Neg (x) b = Neg (x) y = Add (a, b) }",
            "g (float[2] x) => (float[2] y) { a = Neg (x) b = Neg (x) y = Add (a, a) }",
            ["how often values equal to that of a are read 1, 1 → 2, 0"],
            id="one of two equal values",
        ),
        pytest.param(
            DRAWS.format(reads="b, a"),
            DRAWS.format(reads="a, a"),
            ["how often values equal to that of a are read 1, 1 → 2, 0"],
            id="one of two draws",
        ),
        pytest.param(
            "g (seq(float[2]) x) => (float[2] y) { z = Constant <value_int = 0> () y = SequenceAt (x, z) }",
            "g (seq(float16[2]) x) => (float[2] y) { z = Constant <value_int = 0> () y = SequenceAt (x, z) }",
            ["input x sequence(float[2]) → sequence(float16[2])"],
            id="the type of a sequence",
        ),
        pytest.param(
            "g (float[N] x) => (float[N] y) { y = Neg (x) }",
            "g (float[N] x) => (float[M] y) { y = Neg (x) }",
            ["output y float[N] → float[M]"],
            id="a named dim",
        ),
        pytest.param(
            BRANCHES.format(then="Neg (x)", else_="Abs (x)"),
            BRANCHES.format(then="Neg (x)", else_="Relu (x)"),
            ["Abs b → Relu b"],
            id="in a branch",
        ),
    ],
)
def test_a_difference_is_listed(before: str, after: str, words: list[str]) -> None:
    assert diff_sentences(model_of(before), model_of(after)) == words


def test_the_order_of_what_a_loop_carries() -> None:
    first, other = (
        model_of(LOOP.format(order=order)) for order in ("float[2] a, float[2] e", "float[2] e, float[2] a")
    )
    assert diff_sentences(first, other)


SPARSE = "g (float[4] x) => (float[4] y) { y = Add (x, W) }"


def sparse(values: list[float], name: str = "W") -> onnx.ModelProto:
    model = model_of(SPARSE.replace("W", name))
    tensor = helper.make_tensor(name, TensorProto.FLOAT, [2], values)
    where = helper.make_tensor("where", TensorProto.INT64, [2], [0, 2])
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(tensor, where, [4]))
    return model


def test_sparse_initializers() -> None:
    assert diff_sentences(sparse([1, 2]), sparse([1, 3])) == ["Add y: input 1 W → W"]
    assert diff_sentences(sparse([1, 2]), sparse([1, 2], "V")) == []


FUNCTION = """
<ir_version: 9, opset_import: ["": 20, "own": 1]>
g (float[2] x) => (float[2] y) {{ y = own.f (x) }}
<domain: "own", opset_import: ["": 20]>
f (x) => (y) {{ {body} }}
"""


def test_functions() -> None:
    first, other, renamed = (
        onnx.parser.parse_model(FUNCTION.format(body=body))
        for body in ("y = Relu (x) z = Neg (x)", "z = Relu (x) y = Neg (x)", "y = Relu (x) q = Neg (x)")
    )
    assert any(entry.startswith("function own::f") for entry in diff_sentences(first, other))
    assert diff_sentences(first, renamed) == []


def test_an_input_of_a_function_is_told_from_a_value_of_that_name() -> None:
    called = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 20, "own": 1]> g (float[2] x) => (float[2] y) { y = own.f (x) }'
        '<domain: "own", opset_import: ["": 20]> f (x) => (z) { t = Abs (x) z = Exp (t) }'
    )
    flat = model_of("g (float[2] x) => (float[2] y) { t = Abs (x) y = Exp (t) }")
    assert "Abs t: input 0 x of own::f → x" in diff_sentences(called, flat)
    assert "Abs t: input 0 x → x of own::f" in diff_sentences(flat, called)


def test_a_default_that_can_be_fed_is_part_of_the_signature() -> None:
    first, other = (
        model_of("g (float[2] x) => (float[2] y) { y = Add (x, w) }", w=np.ones(2, np.float32)) for _ in "ab"
    )
    other.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [2]))
    assert diff_sentences(first, other) == ["input w (none) → float[2], has a default"]


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (np.float32([0.0, 1.0]), np.float32([-0.0, 1.0]), "1 of 2 values differ, by up to 0"),
        (np.complex64([1 + 2j]), np.complex64([1 + 7j]), "1 of 1 values differ, by up to 5"),
        (np.int64([1, 2]), np.int64([1, 3]), "1 of 2 values differ"),
        (np.float32([np.nan, 1]), np.float32([np.nan, 2]), "1 of 2 values differ, by up to 1"),
    ],
)
def test_how_far_stored_values_are_apart(before: np.ndarray, after: np.ndarray, words: str) -> None:
    text = "g (float[2] x) => (float[2] y) { y = Custom (x, w) }"
    (entry,) = diff_of(model_of(text, w=before), model_of(text, w=after)).initializers
    assert entry.what == words


def test_strings_need_not_be_text() -> None:
    models = []
    for value in (b"\xff\x00", b"\xfe\x00"):
        model = model_of("g (string[1] x) => (string[1] y) { y = StringConcat (x, w) }")
        model.graph.initializer.append(helper.make_tensor("w", TensorProto.STRING, [1], [value]))
        models.append(model)
    assert diff_sentences(*models) == ["w string[1]: 1 of 1 values differ"]


def test_branches_may_use_one_name() -> None:
    def model(value: float) -> onnx.ModelProto:
        model = model_of(BRANCHES.format(then="Add (x, W)", else_="Mul (x, W)"))
        for attribute, number in zip(model.graph.node[0].attribute, (5.0, value), strict=True):
            attribute.g.initializer.append(numpy_helper.from_array(np.float32([number, 1]), "W"))
        return model

    assert diff_sentences(model(5.5), model(6)) == ["W float[2]: 1 of 2 values differ, by up to 0.5"]


def test_long_attributes_are_distinguished() -> None:
    def model(last: float) -> onnx.ModelProto:
        model = model_of("g (float[30] x) => (float[30] y) { y = Neg (x) }")
        value = numpy_helper.from_array(np.float32([*range(29), last]))
        model.graph.node.insert(0, helper.make_node("Constant", [], ["c"], value=value))
        model.graph.node[1].CopyFrom(helper.make_node("Add", ["x", "c"], ["y"]))
        return model

    (entry,) = diff_sentences(model(1), model(2))
    assert entry.startswith("Constant c: value float[30] (30 elements) #")
    before, after = entry.rsplit(" → ", 1)
    assert before.rsplit(" ", 1)[1] != after.rsplit(" ", 1)[1]


def test_weights_that_change_places_have_other_content() -> None:
    """Each content is in the other model too, under the other name."""
    text = "g (float[4] x) => (float[4] y) { a = Mul (x, one) y = Div (a, two) }"
    first, second = np.float32([1, 2, 3, 4]), np.float32([5, 6, 7, 8])
    assert diff_sentences(model_of(text, one=first, two=second), model_of(text, one=second, two=first)) == [
        "one float[4]: 4 of 4 values differ, by up to 4",
        "two float[4]: 4 of 4 values differ, by up to 4",
    ]


def test_a_constant_that_is_stored_in_one_model_and_computed_in_the_other() -> None:
    w = np.float32([1, 2, 3, 4])
    computed = model_of("g (float[4] x) => (float[4] y) { w = Neg (n) y = Mul (x, w) }", n=-w)
    stored = model_of("g (float[4] x) => (float[4] y) { y = Mul (x, w) }", w=w)
    assert diff_sentences(computed, stored) == [
        "Neg w → stored constant w",
        "removed n float[4]",
        "computed by Neg w → stored constant w float[4]",
    ]
    beside = model_of("g (float[4] x) => (float[4] y) { w = Neg (n) b = Abs (w) y = Mul (b, v) }", n=-w, v=w)
    assert "Mul y: input 1 w → v" in diff_sentences(computed, beside), "Neg is still there"
