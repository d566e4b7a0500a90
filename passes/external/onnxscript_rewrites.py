"""onnxscript's rewrite rules: one composite step, whose inner passes are the rules and fusions of the chosen sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from passes.context import PassContext
from passes.external.installed import ask, refuse_unknown, texts
from passes.external.through_ir import through_ir
from passes.model.weights import DetachedModel
from passes.step import CompositeStep

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["OnnxScriptRewrites", "facts", "rewrite"]


@dataclass(frozen=True, slots=True)
class OnnxScriptRewrites(CompositeStep):
    """Run onnxscript's rewriter.

    Args:
        rules: what to apply, in order: `default`, `ort_fusions`, `onnx_fusions`, or single rules by the names under
            which `onnxscript.rewriter.rules.common` has them.
    """

    rules: Sequence[str] = ("default",)
    left_out: tuple[str, ...] = ()
    name: str = field(default="onnxscript_rewrites", init=False)
    source: str = field(default="onnxscript", init=False)

    def apply(self, model: DetachedModel, bench: PassContext) -> DetachedModel:
        options = {"rules": list(self.rules), "left_out": list(self.left_out)}
        return through_ir(model, bench, "passes.external.onnxscript_rewrites:rewrite", options)

    def inner(self, bench: PassContext) -> tuple[str, ...]:
        known = self._known(bench)
        names = [name for entry in self.rules for name in known[entry]]
        return tuple(name for name in dict.fromkeys(names) if name not in self.left_out)

    def check(self, bench: PassContext) -> None:
        """Refuse sets and rules that the installed release does not have.

        Raises:
            PolicyError: naming the nearest.
        """
        if self.rules != type(self)().rules:
            self._known(bench)

    def _known(self, bench: PassContext) -> dict[str, list[str]]:
        texts({"rules": self.rules}, "rules", self.name)
        known = ask(bench, "passes.external.onnxscript_rewrites:facts", self.name)
        refuse_unknown(self.rules, known, f"{self.name} has no rule or set")
        return known


@cache
def facts() -> dict[str, list[str]]:
    """In the worker: what `rules` may name → the rules that it stands for, in order."""
    from passes.external import onnxscript_rules

    sets = {name: [rule for rule, _ in rules] for name, rules in onnxscript_rules.rule_sets().items()}
    fusions = {name: list(parts) for name, parts in onnxscript_rules.fusion_sets().items()}
    return {**sets, **fusions}


def rewrite(model: ir.Model, options: Mapping[str, Any]) -> None:
    """In the worker: rewrite `model` in place."""
    from onnxscript import rewriter

    from passes.external import onnxscript_rules

    left_out = frozenset(options["left_out"])
    sets = onnxscript_rules.rule_sets()
    for entry in options["rules"]:
        if entry in sets:
            with onnxscript_rules.matching_in_linear_time():
                rewriter.rewrite(model, [rule for name, rule in sets[entry] if name not in left_out])
        else:
            with onnxscript_rules.fusions_without(entry, left_out) as fuse:
                fuse(model)
