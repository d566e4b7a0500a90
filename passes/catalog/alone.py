"""A step that runs one pass and no other."""

from __future__ import annotations

from collections.abc import Sequence

from passes.catalog.entry import Entry
from passes.external.onnxoptimizer import OnnxOptimizerPass
from passes.external.onnxruntime_graph import RULES
from passes.external.onnxsim import OnnxSim
from passes.recipe.recipe import OWN_STEPS
from passes.step import Step

__all__ = ["alone"]


def alone(entry: Entry, rows: Sequence[Entry]) -> Step:
    """The pass of `entry` by itself: of a composite step, everything else that `rows` list is left out."""
    name, _, bare = entry.name.rpartition("/")
    if not name:
        return OWN_STEPS[bare]() if bare in OWN_STEPS else OnnxOptimizerPass(bare)
    step = OWN_STEPS[name]()
    if isinstance(step, OnnxSim) and entry.runs == "extra":
        step = OnnxSim({"extra_optimizers": [bare]})
    needed = {bare, *_appliers(name, bare)}
    return step.without([row.bare for row in rows if row.name.startswith(f"{name}/") and row.bare not in needed])


def _appliers(step: str, bare: str) -> list[str]:
    """What applies the pass, and so has to run with it: onnxruntime's rules run in groups."""
    return [group for group, rules in RULES.items() if bare in rules] if step == "onnxruntime" else []
