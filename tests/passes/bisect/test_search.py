"""Where the answer is not plain: a later pass repairs what one has broken; several passes in one call."""

from __future__ import annotations

import onnx

from passes.bisect import bisect
from passes.bisect.faults import Fault, Run, Sighting
from passes.bisect.replay import Runs, StepOutcome, join_blocks, replay
from passes.bisect.search import HIDDEN
from passes.context import PassContext
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
    assert finding.notes == (HIDDEN,)
    assert [node.op_type for node in finding.smallest.model.proto.graph.node] == ["Identity", "Cast"]


def test_in_another_order_nothing_is_broken(context: PassContext) -> None:
    recipe = ["nop", "eliminate_nop_cast", "eliminate_identity"]
    finding = bisect(model(), steps_of(recipe), CastWithoutIdentity(), context)
    assert finding.culprit is None
    assert finding.runs == 1 + 3, "all in one call, and then one at a time"


def test_halves_meet_at_each_place(context: PassContext) -> None:
    """Whichever of nine passes it is, the one that does it is named, and then by itself."""
    for place in range(9):
        recipe = ["nop"] * 9
        recipe[place] = "eliminate_identity"
        finding = bisect(model(), steps_of(recipe), CastWithoutIdentity(), context, budget_s=0)
        assert finding.culprit is not None
        assert (finding.culprit.name, finding.culprit.place) == ("eliminate_identity", place + 1)
        assert finding.runs <= 1 + 4 + 1


def test_passes_in_one_call_make_what_they_make_one_at_a_time(context: PassContext) -> None:
    source = detached(biased_attention())
    runs = Runs(context)
    ends = []
    for together in (True, False):
        *_, last = replay(join_blocks(steps_of(["default"])), source, runs, together=together)
        ends.append(canonical_digest(last.outcome.model))
    assert ends[0] == ends[1] != canonical_digest(source)
    assert runs.count == 1 + len(default_set())


def test_nodes_keep_their_names_in_one_call(context: PassContext) -> None:
    text = "g (float[4] x) => (float[4] y) { [first] a = Relu (x) [second] b = Identity (a) [third] y = Neg (b) }"
    named = detached(onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": 20]> {text}'))
    result = OnnxOptimizerPasses(("nop", "eliminate_identity")).apply(named, context).model
    assert [node.name for node in result.proto.graph.node] == ["first", "third"]
    assert not OnnxOptimizerPasses(("nop", "eliminate_nop_cast")).apply(result, context).changed
