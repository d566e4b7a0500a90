"""Where the answer is not plain: a later pass repairs what an earlier pass has broken."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxoptimizer
import pytest

from passes.bisect import Bisection, Deviation, bisect
from passes.bisect.faults import Fault, Run, Sighting, StepOutcome
from passes.context import PassContext
from passes.errors import ModelError, OnnxlineError
from passes.external.onnxoptimizer import OnnxOptimizerPasses, default_set
from passes.model.canonical import canonical_digest
from passes.recipe.recipe import RecipeItem, steps_of
from passes.weights.detached import DetachedModel
from passes.weights.files import save
from passes.weights.sessions import Session
from tests.support.onnx_models import attention, biased_attention, detached, matrix, model_of, vector


class CastWithoutIdentity(Fault):
    """A model with a Cast has an Identity, too: broken by who removes Identities, and repaired by who removes Casts."""

    description = "a Cast without an Identity"
    not_found_message = "nothing"

    def observe(self, outcome: StepOutcome) -> Sighting | None:
        ops = {node.op_type for node in outcome.model.proto.graph.node}
        return Sighting("a Cast is alone") if "Cast" in ops and "Identity" not in ops else None

    def reproduces(self, part: DetachedModel, run: Run) -> bool:
        return self.observe(StepOutcome(part)) is None and self.observe(run(part)) is not None


TEXT = "g (float[4] x) => (float[4] y) { a = Relu (x) b = Identity (a) c = Cast <to = 1> (b) y = Neg (c) }"


def model() -> DetachedModel:
    return detached(model_of(TEXT))


def test_what_a_later_pass_repairs_is_found_step_by_step(context: PassContext) -> None:
    recipe = ["nop", "eliminate_identity", "eliminate_nop_cast"]
    finding = bisect(model(), steps_of(recipe), CastWithoutIdentity(), context)
    assert finding.culprit is not None and finding.smallest is not None
    assert finding.culprit.name == "eliminate_identity"
    assert [node.op_type for node in finding.smallest.model.proto.graph.node] == ["Identity", "Cast"]


def test_in_another_order_nothing_is_broken(context: PassContext) -> None:
    recipe = ["nop", "eliminate_nop_cast", "eliminate_identity"]
    finding = bisect(model(), steps_of(recipe), CastWithoutIdentity(), context)
    assert finding.culprit is None
    assert finding.runs == 3


def test_the_step_is_named_wherever_it_stands(context: PassContext) -> None:
    for place in range(0, 9, 4):
        recipe = ["nop"] * 9
        recipe[place] = "eliminate_identity"
        finding = bisect(model(), steps_of(recipe), CastWithoutIdentity(), context, budget_s=0)
        assert finding.culprit is not None
        assert (finding.culprit.name, finding.culprit.place) == ("eliminate_identity", place + 1)
        assert finding.runs == place + 1


def test_passes_in_one_call_make_what_they_make_one_at_a_time(context: PassContext) -> None:
    source = detached(biased_attention())
    alone = source
    for name in default_set():
        alone = OnnxOptimizerPasses((name,)).apply(alone, context).model
    together = OnnxOptimizerPasses(default_set()).apply(source, context).model
    assert canonical_digest(alone) == canonical_digest(together) != canonical_digest(source)


def test_a_path_a_recipe_of_names_and_a_wish_are_enough(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    onnx.save(biased_attention(), tmp_path / "model.onnx")
    finding = bisect(str(tmp_path / "model.onnx"), ["eliminate_identity", "fuse_qkv"], lost="qkv", progress=True)
    assert finding.culprit is not None and finding.culprit.name == "fuse_qkv"
    assert capfd.readouterr().err.splitlines() == ["bisect: running the recipe", "bisect: making the model smaller"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": [1]}, "found list, expected an onnx.ModelProto or the path"),
        ({"recipe": "fuse_qkv"}, r'recipe is "fuse_qkv", expected a list'),
        ({"fault": 3}, "fault is 3, expected a Loss, Deviation or Breakdown"),
        ({"lost": 3}, "Loss.of: found int, expected the name of a structure"),
        ({"lost": "qkv", "error": 1.0}, "one fault at a time"),
        ({"error": "much"}, "the error to look for is 'much', expected a number from 0"),
        ({"context": {}}, "context is a dict, expected what open_context gives"),
        ({"budget_s": float("nan")}, "budget_s is nan, expected seconds"),
        ({"progress": "yes"}, "progress is 'yes', expected True, False or None"),
        ({"observer": None}, "observer is None, expected a function"),
    ],
    ids=lambda value: "" if isinstance(value, str) else ",".join(value),
)
def test_what_an_argument_cannot_have_is_said(arguments: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"model": biased_attention(), "recipe": ["nop"], "progress": False, **arguments}
    with pytest.raises(OnnxlineError, match=message):
        bisect(**given)


def test_nodes_keep_their_names_in_one_call(context: PassContext) -> None:
    text = "g (float[4] x) => (float[4] y) { [first] a = Relu (x) [second] b = Identity (a) [third] y = Neg (b) }"
    named = detached(onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": 20]> {text}'))
    result = OnnxOptimizerPasses(("nop", "eliminate_identity")).apply(named, context).model
    assert [node.name for node in result.proto.graph.node] == ["first", "third"]
    assert not OnnxOptimizerPasses(("nop", "eliminate_nop_cast")).apply(result, context).changed


# Who moves the numbers, and a small model on which they are wrong.

TWO_RESHAPES = """
g (float[2, 3, 4] x) => (float[3, 8] y) {
    a = Relu (x)
    b = Reshape (a, first)
    c = Reshape (b, second)
    d = Reshape (c, third)
    y = Neg (d)
}
"""

OWN_PASSES = """
import onnx
from onnx import numpy_helper

def shift(model, *, by, name):
    for tensor in model.graph.initializer:
        if tensor.name == name:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) + by, tensor.name))
    return model

def forget(model):
    for node in model.graph.node:
        if node.op_type == "Sigmoid":
            node.op_type = "Forgotten"
    return model
"""

SUM = "g (float[4] x) => (float[4] y) { h = Relu (x) a = Add (h, one) b = Add (a, other) y = Sigmoid (b) }"


def find(model: DetachedModel, recipe: list[RecipeItem], tolerance: float, context: PassContext) -> Bisection:
    return bisect(model, steps_of(recipe), Deviation.of(tolerance, model, context), context)


@pytest.fixture
def own(tmp_path: Path) -> str:
    path = tmp_path / "own.py"
    path.write_text(textwrap.dedent(OWN_PASSES))
    return str(path)


@pytest.fixture(scope="module")
def summed() -> DetachedModel:
    return detached(model_of(SUM, one=vector(4, 0), other=vector(4, 1)))


def test_a_pass_of_onnxoptimizer_that_is_wrong(context: PassContext, tmp_path: Path) -> None:
    """A 0 in the shape of the last Reshape means the first dim of what it reads, and that is another one without the
    Reshape before it."""
    shapes = {"first": [6, 4], "second": [3, 2, 4], "third": [0, -1]}
    weights = {name: np.array(shape, np.int64) for name, shape in shapes.items()}
    model = detached(model_of(TWO_RESHAPES, **weights))
    finding = find(model, ["default"], 1e-3, context)
    assert finding.culprit is not None and finding.smallest is not None
    assert finding.culprit.name == "eliminate_consecutive_idempotent_ops"
    assert finding.culprit.why == "output y: shape (2, 12), expected (3, 8)"
    assert (finding.culprit.error_before, finding.culprit.error_after) == (0.0, np.inf)
    assert finding.runs <= 45

    save(finding.smallest.model, tmp_path / "small.onnx")
    small = onnx.load(tmp_path / "small.onnx")
    assert [node.op_type for node in small.graph.node] == ["Reshape", "Reshape"]
    wrong = onnxoptimizer.optimize(small, [finding.culprit.name])
    fed = {info.name: np.arange(24, dtype=np.float32).reshape(6, 4) for info in small.graph.input}
    (expected,), (got,) = (Session.of(detached(model)).run(fed).values() for model in (small, wrong))
    assert expected.shape != got.shape


def test_a_wrong_pass_of_the_users(context: PassContext, own: str, summed: DetachedModel) -> None:
    recipe: list[RecipeItem] = [
        "eliminate_identity",
        {f"{own}:shift": {"by": 0.5, "name": "other"}},
        "eliminate_deadend",
    ]
    finding = find(summed, recipe, 1e-3, context)
    assert finding.culprit is not None and finding.smallest is not None
    assert (finding.culprit.name, finding.culprit.source, finding.culprit.place) == ("shift", "user", 2)
    assert [node.op_type for node in finding.smallest.model.proto.graph.node] == ["Add"]
    assert [tensor.name for tensor in finding.smallest.model.proto.graph.initializer] == ["other"]
    (changed,) = finding.smallest.changed
    assert changed == "initializer other float[4]: 4 of 4 values differ, by up to 0.5"
    assert not finding.notes


def test_an_error_that_grows_over_several_passes(context: PassContext, own: str, summed: DetachedModel) -> None:
    shifts: list[RecipeItem] = [{f"{own}:shift": {"by": 4e-3, "name": name}} for name in ("one", "other")]
    finding = find(summed, shifts, 1.2e-3, context)
    culprit = finding.culprit
    assert culprit is not None and finding.smallest is not None
    assert culprit.place == 2 and culprit.error_before is not None and culprit.error_after is not None
    assert 0 < culprit.error_before <= 1.2e-3 < culprit.error_after
    assert finding.notes == (
        f"the error was {culprit.error_before:.3g} before it: passes before this one add to it too",
    )
    assert finding.smallest.nodes == 1, "half of what this pass alone adds is looked for"


def test_a_model_that_does_not_run_any_more(context: PassContext, own: str, summed: DetachedModel) -> None:
    finding = find(summed, [f"{own}:forget"], 1e-3, context)
    assert finding.culprit is not None and finding.smallest is not None
    assert "Forgotten" in finding.culprit.why
    assert [node.op_type for node in finding.smallest.model.proto.graph.node] == ["Sigmoid"]


def test_nothing_is_wrong(context: PassContext) -> None:
    model = detached(attention())
    finding = find(model, ["default"], 1e-4, context)
    assert (finding.culprit, finding.smallest) == (None, None)
    assert finding.nothing.startswith("nothing wrong: outputs are off by at most ")
    assert finding.nothing.endswith(", and 0.0001 is allowed")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("g (float[2] x) => (float[2] y) { n = Neg (x) z = Sub (n, n) y = Div (z, z) }", "'y' holds NaN"),
        ("g (float[2] x) => (float[2] y) { r = RandomNormalLike (x) y = Add (r, x) }", "the model is random"),
        ("g (float[2, 3] x, float[5] z) => (float[2, 3] y) { y = Add (x, z) }", "does not run as it is"),
    ],
)
def test_a_model_that_cannot_be_judged(context: PassContext, text: str, words: str) -> None:
    model = detached(onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": 20]> {text}'))
    with pytest.raises(ModelError, match=words):
        Deviation.of(1e-3, model, context)


def test_only_weights_that_are_read_are_in_the_smallest_model(context: PassContext, own: str) -> None:
    text = "g (float[2, 16] x) => (float[2, 16] y) { h = MatMul (x, w) a = MatMul (h, v) y = Add (a, bias) }"
    model = detached(model_of(text, w=matrix(16, 16, 0), v=matrix(16, 16, 1), bias=vector(16, 2)))
    finding = find(model, [{f"{own}:shift": {"by": 1, "name": "bias"}}], 1e-2, context)
    assert finding.smallest is not None
    assert [tensor.name for tensor in finding.smallest.model.proto.graph.initializer] == ["bias"]


MASK = "g (float[b, 5] x) => (float[b, 5] y) { d, m = Dropout (x, ratio) f = Cast <to = 1> (m) y = Mul (d, f) }"

BRANCHES = """
g (float[4] x, bool c) => (float[4] y) {
    y = If (c) <
        then_branch = t () => (float[4] a) { a = Relu (x) }, else_branch = e () => (float[4] b) { b = Relu (x) }
    >
}
"""

WRONG = """
def halve(model):
    bodies = [entry.g for node in model.graph.node for entry in node.attribute if entry.HasField("g")]
    for body in bodies or [model.graph]:
        for node in body.node:
            if node.op_type == "Relu":
                node.op_type = "Abs"
    return model
"""


@pytest.mark.parametrize(
    ("text", "recipe", "nodes"),
    [
        (MASK, "onnxslim", ["Dropout", "Cast", "Mul"]),
        ("g (float[4] x) => (float[4] y) { y = Relu (x) }", "halve", ["Relu"]),
        ("g (float[4] x) => (float[4] y) { y, m = Dropout (r) r = Relu (x) }", "halve", ["Relu"]),
        (BRANCHES, "halve", ["If"]),
    ],
    ids=["a mask that is read", "one node", "beside an output that nobody reads", "in a branch"],
)
def test_the_smallest_of_a_small_model(
    text: str, recipe: str, nodes: list[str], tmp_path: Path, context: PassContext
) -> None:
    (tmp_path / "wrong.py").write_text(WRONG)
    weights = {"ratio": np.array(0.3, np.float32)} if "ratio" in text else {}
    model = detached(model_of(text, **weights))
    finding = find(model, [f"{tmp_path}/wrong.py:{recipe}" if recipe == "halve" else recipe], 1e-3, context)
    assert finding.smallest is not None and finding.smallest.seconds < 30
    assert [node.op_type for node in finding.smallest.model.proto.graph.node] == nodes
