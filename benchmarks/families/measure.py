"""Run one optimizer over an exported family three ways: freely, with its Q, K and V kept, and with its merging passes
skipped by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.families.detect import Exported
from benchmarks.families.table import Family
from passes.context import PassContext
from passes.policy.policy import Policy
from passes.proof.numeric import NumericProver
from passes.recipe.recipe import RecipeItem, steps_of
from passes.run.result import PassRun
from passes.run.runner import run_passes
from passes.step import Repeat, Step


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An item of a recipe, and those of its passes that merge projections or scale them, by their library's names.

    Those in `scaling` scale more than that, so they are skipped only where it is not enough to skip `merging`. `before`
    is run first, where the optimizer by itself sees nothing in what torch exports: weights that are transposed by a
    node.
    """

    step: str
    merging: tuple[str, ...]
    scaling: tuple[str, ...] = ()
    before: str = ""
    model_type: bool = False
    """Whether the step has the option of that name."""

    def steps(self, family: Family) -> list[Step]:
        """Twice the same: an optimizer may not be done after one call, and keep would profit from the second."""
        item: RecipeItem = {self.step: {"model_type": family.fusions}} if self.model_type else self.step
        recipe = [one for one in (self.before, item, item) if one]
        return [step for step in steps_of(recipe) if not isinstance(step, Repeat)]


@dataclass(frozen=True, slots=True)
class Side:
    """One way of running an optimizer: the triples that the final model has no more, and its nodes."""

    lost: int
    nodes: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one optimizer did to one family."""

    instances: int
    freely: Side
    kept: Side
    by_name: Side
    trouble: tuple[str, ...]
    """What did not run to a good end while everything was kept, or beside it by name, with the reason."""

    @property
    def extra(self) -> float:
        """Nodes per instance that keeping costs, against skipping by name."""
        return (self.kept.nodes - self.by_name.nodes) / self.instances


def measure(family: Family, exported: Exported, optimizer: Optimizer, context: PassContext) -> Outcome:
    """Run it three times; the model has at least one instance."""
    steps = optimizer.steps(family)
    freely = _run(exported, steps, FREE, context)
    kept = _run(exported, steps, Policy(keep=("qkv",)), context)
    by_name = _run(exported, _without(steps, optimizer.merging), FREE, context)
    if optimizer.scaling and _side(by_name).lost:
        by_name = _run(exported, _without(steps, (*optimizer.merging, *optimizer.scaling)), FREE, context)
    trouble = (f"{row.name} {row.status}: {row.reason}" for run in (kept, by_name) for row in run.reverted)
    return Outcome(len(_verdicts(kept)), _side(freely), _side(kept), _side(by_name), tuple(dict.fromkeys(trouble)))


def _without(steps: Sequence[Step], names: Sequence[str]) -> list[Step]:
    """The steps, and the passes inside of them, that are not called by one of `names`."""
    left = [step for step in steps if step.name not in names]
    return [step.without(names) for step in left]


def _run(exported: Exported, steps: Sequence[Step], policy: Policy, context: PassContext) -> PassRun:
    return run_passes(exported.model, steps, policy, NumericProver.of_itself(exported.feeds, context), context)


def _side(run: PassRun) -> Side:
    return Side(_verdicts(run).count(False), len(run.model.proto.graph.node))


def _verdicts(run: PassRun) -> list[bool]:
    return [verdict.kept for verdict in run.structures if verdict.kind == "qkv"]


FREE: Final = Policy(watch=False)

OPTIMIZERS: Final = {
    "onnxsim": Optimizer("onnxsim", ("fuse_qkv", "fuse_attention", "fuse_gqa")),
    "onnxoptimizer": Optimizer("default", ("fuse_qkv",), before="fold_constants"),
    "onnxslim": Optimizer("onnxslim", ("FusionGemmMul",)),
    "onnxruntime": Optimizer(
        "onnxruntime", ("AttentionFusion", "GroupQueryAttentionFusion"), scaling=("MatMulScaleFusion",)
    ),
    "onnxruntime_fusions": Optimizer(
        "onnxruntime_fusions", ("enable_attention",), before="onnxscript", model_type=True
    ),
}
"""The optimizers of the table."""
