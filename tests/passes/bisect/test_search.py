"""Where the answer is not plain: a later pass repairs what an earlier pass has broken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest

from passes.bisect import bisect
from passes.bisect.faults import Fault, Run, Sighting, StepOutcome
from passes.context import PassContext
from passes.errors import OnnxlineError
from passes.external.onnxoptimizer import OnnxOptimizerPasses, default_set
from passes.model.canonical import canonical_digest
from passes.recipe.recipe import steps_of
from passes.weights.detached import DetachedModel
from tests.support.onnx_models import biased_attention, detached, model_of


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
