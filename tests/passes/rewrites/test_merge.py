"""The step `merge`: a second model runs after the first, and the proof runs both in turn."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx.parser import parse_model as parse

import passes.tools
from passes import PolicyError, optimize
from passes.context import PassContext
from passes.proof.relation import ModelInputs, prove_relation
from passes.rewrites.merge import Merge
from passes.weights.sessions import Session
from tests.support.onnx_models import detached

FIRST = """
<ir_version: 10, opset_import: ["" : 20]>
g (float[N, 4] x) => (float[N, 4] y, float[N, 4] z) <float[4] w = {1, 2, 3, 4}> {
    i = Identity (x)
    y = Mul (i, w)
    z = Exp (x)
}
"""

SECOND = """
<ir_version: 10, opset_import: ["" : 20]>
g (float[N, 4] a) => (float[N, 4] y, float[N] sum) <float[4] w = {5, 6, 7, 8}, int64[1] last = {1}> {
    t = Add (a, w)
    y = Tanh (t)
    sum = ReduceSum <keepdims = 0> (t, last)
}
"""

MERGED = """
x -> Identity -> i
i, w -> Mul -> y
x -> Exp -> z
y, w_2 -> Add -> t
t -> Tanh -> y_2
t, last -> ReduceSum -> sum
gives z, y_2, sum
"""


@pytest.fixture
def second(tmp_path: Path) -> str:
    onnx.save(parse(SECOND), tmp_path / "second.onnx")
    return str(tmp_path / "second.onnx")


def picture(model: onnx.ModelProto) -> str:
    lines = [f"{', '.join(node.input)} -> {node.op_type} -> {', '.join(node.output)}" for node in model.graph.node]
    return "\n".join([*lines, f"gives {', '.join(info.name for info in model.graph.output)}"])


def test_two_models_as_one(second: str) -> None:
    run = optimize(parse(FIRST), [{"merge": {"model": second, "map": {"y": "a"}}}])
    (row,) = run.rows
    assert picture(run.to_proto()) == MERGED.strip()
    assert {name: errors.max_abs for name, errors in row.errors.items()} == {"z": 0.0, "y_2": 0.0, "sum": 0.0}
    x = np.random.default_rng(0).standard_normal((3, 4), np.float32)
    made = Session.of(detached(parse(FIRST))).run({"x": x})
    after = Session.of(detached(parse(SECOND))).run({"a": made["y"]})
    found = Session.of(run.model).run({"x": x})
    np.testing.assert_array_equal(found["y_2"], after["y"])
    np.testing.assert_array_equal(found["sum"], after["sum"])


def annotate(text: str, metadata: dict[str, str], *notes: tuple[str, str]) -> onnx.ModelProto:
    model = parse(text)
    for owner in (model, model.graph):
        for key, value in metadata.items():
            owner.metadata_props.add(key=key, value=value)
    for name, scale in notes:
        note = model.graph.quantization_annotation.add(tensor_name=name)
        note.quant_parameter_tensor_names.add(key="SCALE_TENSOR", value=scale)
    return model


def test_metadata_and_annotations_of_both_models_stay() -> None:
    first = annotate(FIRST, {"labels": "a", "author": "me"}, ("i", "w"), ("y", "w"))
    second = annotate(SECOND, {"labels": "b", "author": "me", "length": "4"}, ("a", "w"), ("t", "w"), ("y", "last"))
    merged = passes.tools.merge(first, second, {"y": "a"}).to_proto()
    said = {"labels": "a", "author": "me", "labels_2": "b", "length": "4"}
    assert {entry.key: entry.value for entry in merged.metadata_props} == said
    assert {entry.key: entry.value for entry in merged.graph.metadata_props} == said
    notes = [
        (note.tensor_name, note.quant_parameter_tensor_names[0].value) for note in merged.graph.quantization_annotation
    ]
    assert notes == [("i", "w"), ("y", "w"), ("t", "w_2"), ("y_2", "last")]


def test_an_annotation_of_an_input_that_is_fed_names_its_value() -> None:
    second = annotate(SECOND, {}, ("a", "w"))
    (note,) = passes.tools.merge(parse(FIRST), second, {"y": "a"}).to_proto().graph.quantization_annotation
    assert note.tensor_name == "y"


def test_steps_before_and_after_it(second: str) -> None:
    step = {"merge": {"model": second, "map": {"y": "a"}}}
    run = optimize(parse(FIRST), ["eliminate_identity", step, {"outputs": {"drop": ["z", "sum"]}}, "onnxsim"])
    assert [row.status for row in run.rows] == ["ran"] * 4
    assert [node.op_type for node in run.to_proto().graph.node] == ["Mul", "Add", "Tanh"]


def test_the_proof_runs_both_models_in_turn(second: str, context: PassContext) -> None:
    """A merged model whose second half computes something else differs in the outputs of that half alone."""
    before = detached(parse(FIRST))
    result = Merge(second, {"y": "a"}).apply(before, context)
    proto = result.model.copy_proto()
    next(node for node in proto.graph.node if node.op_type == "Tanh").op_type = "Sigmoid"
    feeds = [{"x": np.full((3, 4), 0.5, np.float32)}]
    assert result.relation is not None
    for model, wrong in ((result.model, []), (result.model.with_proto(proto), ["y_2"])):
        inputs = ModelInputs(before, context, feeds)
        proof = prove_relation(before, model, result.relation, inputs, context)
        assert [name for name, errors in proof.errors.items() if not errors.ok] == wrong


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"map": {"y": "b"}}, "second model has no input 'b'"),
        ({"map": {"q": "a"}}, "first model has no output or input 'q'"),
        ({"map": {}}, "found no pair"),
        ({"map": {"y": "a", "z": "a"}}, "'y' and 'z' are mapped to the input 'a'; expected one output for an input"),
        ({"map": ["y"]}, "expected a mapping of names"),
        ({"model": __file__, "map": {"y": "a"}}, "merge: "),
        ({"model": "none.onnx", "map": {"y": "a"}}, "no such file; expected the path of an ONNX file"),
    ],
)
def test_mistakes(options: dict[str, object], words: str, second: str) -> None:
    with pytest.raises(PolicyError, match=re.escape(words)):
        optimize(parse(FIRST), [{"merge": {"model": second, **options}}])


def test_each_input_of_the_second_is_fed(tmp_path: Path) -> None:
    text = (
        '<ir_version: 10, opset_import: ["" : 20]> g (float[N, 4] a, float[4] m) => (float[N, 4] r) { r = Mul (a, m) }'
    )
    onnx.save(parse(text), tmp_path / "two.onnx")
    with pytest.raises(PolicyError, match="no output is mapped to the second model's input 'm'"):
        optimize(parse(FIRST), [{"merge": {"model": str(tmp_path / "two.onnx"), "map": {"y": "a"}}}])
