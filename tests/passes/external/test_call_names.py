"""Short names: nothing but the time of a call changes."""

from __future__ import annotations

import onnx
import pytest

from passes.external.onnxoptimizer import optimize
from passes.external.through_files import ShortNames, number_nodes, quote_own_names
from tests.support.onnx_models import attention, model_of

BRANCHES = """
g (bool really, float[2] a_rather_long_name) => (float[2] y) {
    a_value_outside = Neg (a_rather_long_name)
    y = If (really) <
        then_branch = then () => (float[2] one_result) { one_result = Abs (a_value_outside) },
        else_branch = else () => (float[2] one_result) { one_result = Identity (a_rather_long_name) }
    >
}
"""


def copy_of(model: onnx.ModelProto) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return copy


SHORT = """
g (bool v2, float[2] v0) => (float[2] v3) {
    v1 = Neg (v0)
    v3 = If (v2) <
        then_branch = then () => (float[2] v4) { v4 = Abs (v1) },
        else_branch = else () => (float[2] v4) { v4 = Identity (v0) }
    >
}
"""


def test_one_name_is_one_name_in_every_scope() -> None:
    model = model_of(BRANCHES)
    ShortNames(model.graph)
    assert onnx.printer.to_text(model) == onnx.printer.to_text(model_of(SHORT))


@pytest.mark.parametrize("model", [attention(), model_of(BRANCHES)], ids=["attention", "branches"])
def test_names_come_back(model: onnx.ModelProto) -> None:
    changed = copy_of(model)
    names = ShortNames(changed.graph)
    names.restore(changed.graph)
    assert changed == model


def test_a_new_value_makes_way_for_one_that_has_its_name() -> None:
    model = model_of("g (float[2] x) => (float[2] y) { seven = Neg (x) y = Abs (seven) }")
    model.graph.node[0].output[0] = model.graph.node[1].input[0] = "7"
    names = ShortNames(model.graph)
    model.graph.node.insert(1, onnx.helper.make_node("Relu", [model.graph.node[0].output[0]], ["7"]))
    model.graph.node[2].input[0] = "7"

    names.restore(model.graph)

    assert [(list(node.input), list(node.output)) for node in model.graph.node] == [
        (["x"], ["7"]),
        (["7"], ["7_"]),
        (["7_"], ["y"]),
    ]


def test_what_is_new_keeps_its_name_from_one_pass_to_the_next() -> None:
    model = model_of("g (float[2] x) => (float[2] y) { v0 = Neg (x) y = Abs (v0) }")
    names = ShortNames(model.graph)
    model.graph.node.insert(1, onnx.helper.make_node("Relu", [model.graph.node[0].output[0]], ["7"]))
    later = copy_of(model)
    later.graph.node.append(onnx.helper.make_node("Relu", ["7"], ["8"]))
    names.restore(model.graph)
    names.restore(later.graph)
    assert [list(node.output) for node in later.graph.node] == [["v0"], ["7"], ["y"], ["8"]]
    assert later.graph.node[0] == model.graph.node[0]
    assert later.graph.node[1] == model.graph.node[1]


def test_a_message_quotes_the_names_of_the_model() -> None:
    model = model_of("g (float[2] x) => (float[2] y) { y = Add (x, a_missing_value) }")
    number_nodes(model)
    with pytest.raises(IndexError, match="Input a_missing_value is undefined"):
        optimize({}, model.SerializeToString(), ["nop"])


def test_a_message_quotes_the_names_of_nodes() -> None:
    model = model_of("g (float[2] x) => (float[2] y) { [first] a = Neg (x) y = Abs (a) }")
    source = copy_of(model)
    number_nodes(model)
    message = f"{model.graph.node[0].name} and {model.graph.node[1].name} of v0"
    assert quote_own_names(message, source.graph.node) == "first and y of v0"
