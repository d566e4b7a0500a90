"""Models that draw random values: both sides of a proof get the same noise, and what comes after it is compared."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import passes
from passes import ModelError, Status
from passes.context import PassContext
from passes.proof.noise import FixedNoise
from passes.weights.sessions import Session
from tests.support.onnx_models import detached, matrix

PASSES = """
import numpy as np
from onnx import helper, numpy_helper

def zero(model, *, name):
    for tensor in model.graph.initializer:
        if tensor.name == name:
            tensor.CopyFrom(numpy_helper.from_array(np.zeros(tensor.dims, np.float32), name))
    return model

def merge(model, *, one, other):
    for node in model.graph.node:
        node.input[:] = [one if name == other else name for name in node.input]
    for node in [node for node in model.graph.node if other in node.output]:
        model.graph.node.remove(node)
    return model

def rename(model, *, old, new):
    for node in model.graph.node:
        node.input[:] = [new if name == old else name for name in node.input]
        node.output[:] = [new if name == old else name for name in node.output]
    return model

def swap(model, *, old, new):
    for node in model.graph.node:
        if node.op_type == old:
            node.op_type = new
    return model

def set_attribute(model, *, op, name, value):
    for node in model.graph.node:
        if node.op_type == op:
            for old in [one for one in node.attribute if one.name == name]:
                node.attribute.remove(old)
            node.attribute.append(helper.make_attribute(name, value))
    return model

def detach(model, *, value):
    for node in model.graph.node:
        node.input[:] = ["x" if name == value else name for name in node.input]
    return model
"""

HEAD = '<ir_version: 10, opset_import: ["": %d]>'
BODIES = {
    "RandomNormal": "r = RandomNormal <shape = [2, 4], scale = 2.0> () n = Add (x, r)",
    "RandomNormalLike": "r = RandomNormalLike <mean = 1.0> (x) n = Add (x, r)",
    "RandomUniform": "r = RandomUniform <shape = [2, 4], low = -3.0> () n = Add (x, r)",
    "RandomUniformLike": "r = RandomUniformLike (x) n = Add (x, r)",
    "Bernoulli": "p = Sigmoid (x) r = Bernoulli (p) n = Mul (x, r)",
    "Multinomial": "r = Multinomial <sample_size = 4, seed = 1.0> (x) c = Cast <to = 1> (r) n = Add (x, c)",
    "Dropout": "r, mask = Dropout (x, half, on) n = Identity (r)",
    "If": """n = If (on) <
        then_branch = t () => (float[2, 4] a) { r = RandomNormalLike (x) a = Add (x, r) },
        else_branch = e () => (float[2, 4] b) { b = Neg (x) }>""",
    "Loop": """n = Loop (three, on, x) <body = l (int64 i, bool c, float[2, 4] h) => (bool d, float[2, 4] k) {
        d = Identity (c) r = RandomNormalLike (h) k = Add (h, r) }>""",
}


def model(body: str, opset: int = 20) -> onnx.ModelProto:
    text = f"{HEAD % opset} g (float[2, 4] x) => (float[2, 4] y) {{ {body} h = MatMul (n, w) y = Tanh (h) }}"
    proto = onnx.parser.parse_model(text)
    constants = {"w": matrix(4, 4, 0), "half": np.float32(0.5), "on": np.bool_(True), "three": np.int64(3)}
    read = {name for node in proto.graph.node for name in node.input}
    proto.graph.initializer.extend(
        onnx.numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items() if name in read
    )
    return proto


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(PASSES)
    return str(tmp_path / "own.py")


@pytest.mark.parametrize("kind", BODIES)
def test_what_comes_after_noise_is_compared(kind: str, own: str, context: PassContext) -> None:
    recipe = ["eliminate_identity", "onnxsim", {f"{own}:zero": {"name": "w"}}]
    run = passes.optimize(model(BODIES[kind]), recipe=recipe, context=context)
    assert [row.status for row in run.rows] == [Status.RAN, Status.RAN, Status.REVERTED], run.rows
    assert run.rows[2].errors["y"].max_abs > 0.1 and run.rows[2].errors["y"].cosine < 0.5
    assert not any("random" in gap for gap in run.coverage.not_covered)


TWO = "r = RandomNormalLike (x) s = RandomNormalLike (x) d = Sub (r, s) n = Add (x, d)"


@pytest.mark.parametrize(
    ("step", "options", "status"),
    [
        ("rename", {"old": "r", "new": "q"}, Status.RAN),
        ("merge", {"one": "r", "other": "s"}, Status.REVERTED),
        ("set_attribute", {"op": "RandomNormalLike", "name": "scale", "value": 1.5}, Status.REVERTED),
        ("set_attribute", {"op": "RandomNormalLike", "name": "seed", "value": 1.5}, Status.REVERTED),
        ("swap", {"old": "RandomNormalLike", "new": "RandomUniformLike"}, Status.REVERTED),
        ("detach", {"value": "s"}, Status.REVERTED),
    ],
)
def test_what_passes_do_with_random_nodes_is_seen(
    step: str, options: dict[str, object], status: Status, own: str, context: PassContext
) -> None:
    run = passes.optimize(model(TWO), recipe=[{f"{own}:{step}": options}], context=context)
    assert [(row.status, row.changed) for row in run.rows] == [(status, True)], run.rows


def test_two_calls_of_a_function_draw_different_numbers(own: str, context: PassContext) -> None:
    text = """<ir_version: 10, opset_import: ["": 20, "own": 1]>
    g (float[2, 4] x) => (float[2, 4] y) { r = own.noise (x) s = own.noise (x) d = Sub (r, s) y = Mul (x, d) }
    <opset_import: ["": 20], domain: "own"> noise (v) => (z) { z = RandomNormalLike (v) }"""
    recipe = [{f"{own}:merge": {"one": "r", "other": "s"}}]
    run = passes.optimize(onnx.parser.parse_model(text), recipe=recipe, context=context)
    assert [row.status for row in run.rows] == [Status.REVERTED]


def test_a_random_node_keeps_its_noise_where_a_pass_removes_the_one_before_it() -> None:
    source = detached(model("r = RandomNormalLike (x) s = RandomNormalLike (x) n = Add (r, s)"))
    alone = detached(model("s = RandomNormalLike (x) n = Identity (s)"))
    feeds = {"x": np.zeros((2, 4), np.float32)}
    found, expected = (Session.of(FixedNoise.of(source).apply(made), ["s"]).run(feeds)["s"] for made in (alone, source))
    np.testing.assert_array_equal(found, expected)


def test_turns_of_a_loop_draw_different_numbers() -> None:
    """Noise that was moved out of its loop would be equal in each turn."""
    source = detached(model(BODIES["Loop"]))
    feeds = {"x": np.zeros((2, 4), np.float32)}
    values = Session.of(FixedNoise.of(source).apply(source), ["n"]).run(feeds)["n"]
    once = model(BODIES["Loop"].replace("(three,", "(one,"))
    once.graph.initializer.append(onnx.numpy_helper.from_array(np.array(1), "one"))
    first = Session.of(FixedNoise.of(detached(once)).apply(detached(once)), ["n"]).run(feeds)["n"]
    assert np.abs(values - 3 * first).max() > 0.1


@pytest.mark.parametrize("kind", ["RandomNormal", "RandomUniformLike", "Bernoulli"])
def test_noise_has_the_distribution_that_the_node_asks_for(kind: str) -> None:
    source = detached(
        onnx.parser.parse_model(
            f"""{HEAD % 20} g (float[300, 300] x) => (float[300, 300] y) {{ y = {kind} {
                {
                    "RandomNormal": "<shape = [300, 300], mean = 3.0, scale = 2.0> ()",
                    "RandomUniformLike": "<low = 1.0, high = 4.0> (x)",
                    "Bernoulli": "(x)",
                }[kind]
            } }}"""
        )
    )
    noise = Session.of(FixedNoise.of(source).apply(source)).run({"x": np.full((300, 300), 0.25, np.float32)})["y"]
    mean, deviation = {
        "RandomNormal": (3.0, 2.0),
        "RandomUniformLike": (2.5, 3 / 12**0.5),
        "Bernoulli": (0.25, (0.25 * 0.75) ** 0.5),
    }[kind]
    assert noise.mean() == pytest.approx(mean, abs=0.05) and noise.std() == pytest.approx(deviation, rel=0.03)
    assert noise.dtype == np.float32


def test_noise_that_cannot_be_fixed_is_a_mistake_where_all_outputs_depend_on_it(own: str, context: PassContext) -> None:
    source = model(BODIES["RandomNormalLike"], opset=9)
    with pytest.raises(ModelError, match="every output of the model depends on random values"):
        passes.optimize(source, recipe=[{f"{own}:zero": {"name": "w"}}], context=context)


def test_an_output_that_is_not_compared_has_no_numbers_and_is_said(own: str, context: PassContext) -> None:
    source = model(BODIES["RandomNormalLike"], opset=9)
    source.graph.node.append(onnx.helper.make_node("Neg", ["x"], ["z"]))
    source.graph.output.append(onnx.helper.make_tensor_value_info("z", onnx.TensorProto.FLOAT, [2, 4]))
    run = passes.optimize(source, recipe=[{f"{own}:zero": {"name": "w"}}], context=context)
    assert np.isnan(run.rows[0].errors["y"].max_abs) and np.isnan(run.rows[0].errors["y"].cosine)
    assert any(gap.startswith("not compared: 'y' (random values") for gap in run.coverage.not_covered)
