"""onnxsim simplifies a model whose outputs have no shape, which it refuses as they are."""

from __future__ import annotations

import onnx
import pytest
from onnx import helper

from passes.context import PassContext
from passes.errors import StepFailed
from passes.external.onnxsim import OnnxSim
from tests.support.onnx_models import detached

HEAD = '<ir_version: 10, opset_import: ["": 20]> g'

CASES = {
    "the value becomes the output": (
        "(float[a, b, 1] x) => (float[] y) { q = Squeeze(x) p = Cast<to = 1>(q) y = Neg(p) }",
        "(float[a, b, 1] x) => (float[] y) { q = Squeeze(x) y = Neg(q) }",
    ),
    "its name is the output's": (
        "(float[a, b, 1] x) => (float[] y) { q = Squeeze(x) y = Identity(q) }",
        "(float[a, b, 1] x) => (float[] y) { y = Squeeze(x) }",
    ),
    "its name is the output's, for another reader, too": (
        "(float[a, b, 1] x) => (float[] y, float[] z) { q = Squeeze(x) y = Identity(q) z = Neg(q) }",
        "(float[a, b, 1] x) => (float[] y, float[] z) { y = Squeeze(x) z = Neg(y) }",
    ),
    "one value for two outputs": (
        "(float[a, b, 1] x) => (float[] y, float[a, b, 1] r, float[] z) "
        "{ y = Squeeze(x) p = Identity(x) z = Squeeze(p) r = Relu(x) }",
        "(float[a, b, 1] x) => (float[] y, float[a, b, 1] r, float[] z) { y = Squeeze(x) r = Relu(x) z = Identity(y) }",
    ),
}


def parse(text: str, *, shapeless: str = "yz") -> onnx.ModelProto:
    """The text of ONNX has no form for a tensor without a shape."""
    model = onnx.parser.parse_model(f"{HEAD} {text}")
    for info in (*model.graph.input, *model.graph.output):
        if info.name in shapeless:
            info.type.tensor_type.ClearField("shape")
    return model


def picture(model: onnx.ModelProto) -> tuple[list[str], set[str]]:
    outputs = [f"{info.name} {info.type.tensor_type.HasField('shape')}" for info in model.graph.output]
    return outputs, {f"{list(node.output)} = {node.op_type}({list(node.input)})" for node in model.graph.node}


@pytest.mark.parametrize("name", CASES)
def test_onnxsim_simplifies_before_an_output_without_a_shape(name: str, context: PassContext) -> None:
    before, after = map(parse, CASES[name])
    found = OnnxSim().apply(detached(before), context).model.proto
    assert picture(found) == picture(after)
    assert [entry.domain for entry in found.opset_import] == [""]


def test_an_output_without_any_type_stays_so(context: PassContext) -> None:
    model = parse("(float[a, 1] x) => (float[] y) { p = Identity(x) y = Squeeze(p) }")
    model.graph.output[0].CopyFrom(helper.make_empty_tensor_value_info("y"))
    found = OnnxSim().apply(detached(model), context).model.proto
    assert [node.op_type for node in found.graph.node] == ["Squeeze"]
    assert found.graph.output[0].name == "y"


def test_an_input_without_a_shape_is_named(context: PassContext) -> None:
    model = parse("(float[] x) => (float[] y) { y = Neg(x) }", shapeless="xy")
    with pytest.raises(StepFailed, match="the input 'x' has no shape, which onnxsim refuses; run fix-shapes"):
        OnnxSim().apply(detached(model), context)
