"""Opsets up and down: before and after as pictures, weights that stay where they are, and what cannot be converted."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import passes
from passes.context import PassContext
from passes.errors import PolicyError, StepFailed
from passes.rewrites.convert_opset import ConvertOpset
from passes.weights.detached import DetachedModel, attach
from passes.weights.sessions import Session
from tests.support.onnx_models import detached, matrix

SUM_12 = "{ n = Neg (x) y = ReduceSum <axes = [1]> (n) }"
BRANCH = """{
    y = If (c) <then_branch = t () => (float[4, 1] a) { a = ReduceMax <axes = [1]> (x) },
                else_branch = e () => (float[4, 1] b) { b = ReduceMin <axes = [1]> (x) }>
}"""


def model_at(opset: int, text: str, *functions: str, **weights: np.ndarray) -> DetachedModel:
    header = f'<ir_version: 8, opset_import: ["": {opset}, "local": 1, "com.microsoft": 1]>\n'
    model = onnx.parser.parse_model(header + text + "\n".join(functions))
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    return detached(model)


def picture(model: DetachedModel) -> list[str]:
    return [
        f"{node.output[0]} = {node.op_type} ({', '.join(node.input)})"
        + "".join(f" {attribute.name}" for attribute in node.attribute)
        for node in model.proto.graph.node
        if node.op_type != "Constant"
    ]


def version_of(model: DetachedModel) -> int:
    return next(entry.version for entry in model.proto.opset_import if entry.domain == "")


def test_up_an_attribute_becomes_an_input(context: PassContext) -> None:
    model = model_at(12, f"g (float[4, 8] x) => (float[4, 1] y) {SUM_12}")
    after = ConvertOpset(to=20).apply(model, context).model
    assert version_of(after) == 20
    [negated, summed] = picture(after)
    assert negated == "n = Neg (x)"
    assert summed.startswith("y = ReduceSum (n, ")
    assert "axes" not in summed
    feeds = {"x": matrix(4, 8, 0)}
    np.testing.assert_array_equal(Session.of(after).run(feeds)["y"], Session.of(model).run(feeds)["y"])
    assert not ConvertOpset(to=20).apply(after, context).changed


def test_down_operators_that_have_that_form_stay(context: PassContext) -> None:
    model = model_at(21, "g (float[4, 8] x) => (float[8, 4] y) { r = Relu (x) y = Transpose <perm = [1, 0]> (r) }")
    after = ConvertOpset(to=17).apply(model, context).model
    assert version_of(after) == 17
    assert picture(after) == picture(model)


def test_weights_stay_detached(context: PassContext) -> None:
    model = model_at(17, "g (float[4, 32] x) => (float[4, 32] y) { y = MatMul (x, w) }", w=matrix(32, 32, 0))
    after = ConvertOpset(to=21).apply(model, context).model
    assert after.weights is model.weights
    [before], [tensor] = model.proto.graph.initializer, after.proto.graph.initializer
    assert (tensor.name, after.weight(tensor)) == ("w", model.weight(before))
    np.testing.assert_array_equal(numpy_helper.to_array(attach(after).graph.initializer[0]), matrix(32, 32, 0))


def test_functions_are_inlined_and_operators_of_others_stay(context: PassContext) -> None:
    function = '<domain: "local", opset_import: ["": 12]> total (x) => (y) ' + SUM_12
    text = "g (float[4, 8] x) => (float[4, 1] y) { h = com.microsoft.FastGelu (x) y = local.total (h) }"
    after = ConvertOpset(to=18).apply(model_at(12, text, function), context).model
    assert len(after.proto.functions) == 0
    assert [node.op_type for node in after.proto.graph.node if node.op_type != "Constant"] == [
        "FastGelu",
        "Neg",
        "ReduceSum",
    ]


def test_a_function_of_another_opset_than_the_model_is_named(context: PassContext) -> None:
    function = '<domain: "local", opset_import: ["": 11]> total (x) => (y) { y = Softmax (x) }'
    model = model_at(17, "g (float[4, 8] x) => (float[4, 8] y) { y = local.total (x) }", function)
    with pytest.raises(StepFailed, match="function local::total imports other opsets than the model"):
        ConvertOpset(to=18).apply(model, context)


REFUSED = {
    "attention has no older form": (
        23,
        "g (float[1, 2, 4, 8] q) => (float[1, 2, 4, 8] y) { [attend] y = Attention (q, q, q) }",
        21,
        "Attention 'attend' has no form at opset 21: put decompose-attention before it",
    ),
    "the converter has no way down": (
        21,
        "g (int8[4] x) => (int8[4] y) { [act] y = Relu (x) }",
        13,
        "Relu 'act' is another operator before opset 14, and onnx has no adapter for it",
    ),
    "the older operator lacks what the node uses": (
        17,
        "g (float[0, 4] x) => (float[4, 0] y) <int64[2] s = {4, 0}> { [act] y = Reshape <allowzero = 1> (x, s) }",
        13,
        "Reshape 'act' is another operator before opset 14, and onnx has no adapter for it",
    ),
    "the converter knows no other form": (
        20,
        "g (float[4] x) => (float[4] y) { [act] y = Gelu (x) }",
        17,
        "Gelu 'act' has no form at opset 17 that onnx's converter knows",
    ),
    "an operator that another form exists of is not to blame": (
        20,
        "g (float[4, 8] x) => (float[4, 1] y) "
        "{ a = Constant <value_ints = [1]> () m = ReduceMean (x, a) [act] y = Gelu (m) }",
        17,
        "^Gelu 'act' has no form at opset 17 that onnx's converter knows$",
    ),
    "several, and one in a branch": (
        20,
        "g (bool c, float[4] x) => (float[4] y) { [first] a = Gelu (x) y = If (c) <"
        "then_branch = t () => (float[4] p) { [second] p = Mish (a) }, "
        "else_branch = e () => (float[4] q) { q = Relu (a) }> }",
        17,
        "Gelu 'first' has no form at opset 17 that onnx's converter knows; also: Mish 'second'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_converted_is_named(name: str, context: PassContext) -> None:
    opset, text, to, message = REFUSED[name]
    with pytest.raises(StepFailed, match=message):
        ConvertOpset(to=to).apply(model_at(opset, text), context)


def test_branches_are_converted_or_refused(context: PassContext) -> None:
    model = model_at(17, f"g (bool c, float[4, 8] x) => (float[4, 1] y) {BRANCH}")
    try:
        after = ConvertOpset(to=20).apply(model, context).model
    except StepFailed as failure:
        assert "ReduceMax 'a' has the attribute 'axes', which is not known at opset 20" in str(failure)
        return
    onnx.checker.check_model(attach(after))


@pytest.mark.parametrize("to", [3, 999])
def test_an_opset_that_is_not_there(to: int, context: PassContext) -> None:
    with pytest.raises(PolicyError, match=f"found opset {to}, expected 7 to "):
        ConvertOpset(to=to).check(context)


def test_a_run_proves_and_takes_it(context: PassContext) -> None:
    text = "g (float[1, 4, 8] q) => (float[1, 4, 8] y) { y = Attention <q_num_heads = 2, kv_num_heads = 2> (q, q, q) }"
    model = attach(model_at(23, text))
    run = passes.optimize(model, ["decompose-attention", {"convert-opset": {"to": 21}}], context=context)
    taken = [row.name for row in run.rows if row.changed and row.status == "ran"]
    assert taken == ["decompose-attention", "convert-opset"]
    assert version_of(run.model) == 21


def test_a_model_without_an_operator_of_onnx_gets_its_import(context: PassContext) -> None:
    """As scikit-learn's converter writes them: the operators are all those of ai.onnx.ml."""
    header = '<ir_version: 3, opset_import: ["ai.onnx.ml": 1]>\n'
    model = onnx.parser.parse_model(header + "g (float[2] x) => (float[2] y) { y = ai.onnx.ml.Scaler (x) }")
    after = ConvertOpset(to=13).apply(detached(model), context).model
    assert (picture(after), version_of(after)) == (["y = Scaler (x)"], 13)
    onnx.checker.check_model(attach(after))


@pytest.mark.parametrize("to", [13, 11, 9])
def test_down_an_operator_of_the_same_form_stays_where_onnx_has_no_adapter(to: int, context: PassContext) -> None:
    text = """g (float[4, 8] x) => (float[16, 2] y) <int64[2] s = {16, 2}> {
        r = Relu (x) a = Add (r, w) m = MatMul (a, v) y = Reshape <allowzero = 0> (m, s) }"""
    model = model_at(17, text, w=matrix(4, 8, 0), v=matrix(8, 8, 1))
    after = ConvertOpset(to=to).apply(model, context).model
    assert version_of(after) == to
    assert [line.split(" = ")[1] for line in picture(after)] == [
        "Relu (x)", "Add (r, w)", "MatMul (a, v)", "Reshape (m, s)"
    ]  # fmt: skip
    feeds = {"x": matrix(4, 8, 2)}
    np.testing.assert_array_equal(Session.of(after).run(feeds)["y"], Session.of(model).run(feeds)["y"])


def test_down_a_softmax_stays_along_the_last_axis_alone(context: PassContext) -> None:
    """Below opset 13 the axes after the named one count too, and onnx's converter takes the node as it is."""
    text = "g (float[2, 3, 4] x) => (float[2, 3, 4] y) {{ y = Softmax <axis = {}> (x) }}"
    assert picture(ConvertOpset(to=11).apply(model_at(13, text.format(2)), context).model) == ["y = Softmax (x) axis"]
    with pytest.raises(StepFailed, match="'y' computes along axis 1 of 3; at opset 11 it would compute along all axes"):
        ConvertOpset(to=11).apply(model_at(13, text.format(1)), context)


def test_down_with_bodies(context: PassContext) -> None:
    text = """g (bool c, float[4, 8] x) => (float[4, 8] y) { y = If (c) <
        then_branch = t () => (float[4, 8] a) { a = Relu (x) },
        else_branch = e () => (float[4, 8] b) { b = Neg (x) }> }"""
    model = model_at(17, text)
    after = ConvertOpset(to=12).apply(model, context).model
    assert version_of(after) == 12
    for choice in (True, False):
        feeds = {"c": np.array(choice), "x": matrix(4, 8, 2)}
        np.testing.assert_array_equal(Session.of(after).run(feeds)["y"], Session.of(model).run(feeds)["y"])
