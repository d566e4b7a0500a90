"""In the worker: what rules and fusions the installed onnxscript has, and how to run it without some of them.

A rule set is a list, which can be shortened. A fusion set is one function of the library that calls many others and has
no skip list: to leave one out, its name is bound to something that does nothing while the function runs.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any, Final

FUSIONS: Final[Mapping[str, tuple[str, str]]] = {
    "ort_fusions": ("onnxscript.rewriter.ort_fusions", "optimize_for_ort"),
    "onnx_fusions": ("onnxscript.rewriter.onnx_fusions", "fuse"),
}
"""Fusion set → module and function: attention and its parts as operators of onnxruntime, or of ONNX opset 23."""

PATTERNS: Final = "ORT_PATTERN_REWRITE_RULES"
"""A list of rules that `optimize_for_ort` applies after its fusions."""

Rules = list[tuple[str, Any]]


@cache
def rule_sets() -> dict[str, Rules]:
    """Set → (name, rule), in order: `default`, and every export of `onnxscript.rewriter.rules.common` alone.

    A rule is named by its export, since half of the rules have no name of their own.
    """
    from onnxscript import rewriter
    from onnxscript.rewriter.rules import common

    exported = {name: _rules_of(getattr(common, name)) for name in common.__all__}
    names = {id(_replacement(rules[0])): name for name, rules in exported.items() if len(rules) == 1}
    default = [
        (names.get(id(_replacement(rule))) or _own_name(rule, at), rule)
        for at, rule in enumerate(rewriter._DEFAULT_REWRITE_RULES)
    ]
    alone = {
        name: [(name if len(rules) == 1 else _own_name(rule, at), rule) for at, rule in enumerate(rules)]
        for name, rules in exported.items()
    }
    return {"default": default, **alone}


@cache
def fusion_sets() -> dict[str, dict[str, tuple[ModuleType, str]]]:
    """Set → the name of each part → where its function is looked up; for a rule of `PATTERNS`, where the list is."""
    sets = {}
    for entry in FUSIONS:
        module = _module_of(entry)
        called = {name for value in vars(module).values() for name in _names_in(value, module)}
        parts = {
            name: (holder, name)
            for holder in (module, *(value for value in vars(module).values() if isinstance(value, ModuleType)))
            for name, value in vars(holder).items()
            if name in called and getattr(value, "__qualname__", "").startswith("apply_fusion_rules.")
        }
        patterns = enumerate(getattr(module, PATTERNS, ()))
        sets[entry] = {**parts, **{_own_name(rule, at): (module, PATTERNS) for at, rule in patterns}}
    return sets


@contextmanager
def fusions_without(entry: str, left_out: frozenset[str]) -> Iterator[Callable[[Any], Any]]:
    """The function of a fusion set; inside the block it skips the fusions and rules in `left_out`."""
    module, parts = _module_of(entry), fusion_sets()[entry]
    names: list[tuple[ModuleType, str, Any]] = []
    names += [(*where, _nothing) for name, where in parts.items() if name in left_out and where[1] != PATTERNS]
    if hasattr(module, PATTERNS):
        rules = enumerate(getattr(module, PATTERNS))
        names.append((module, PATTERNS, [rule for at, rule in rules if _own_name(rule, at) not in left_out]))
    with rebind(names):
        yield getattr(importlib.import_module(FUSIONS[entry][0]), FUSIONS[entry][1])


@contextmanager
def matching_by_operator() -> Iterator[None]:
    """Inside the block, a rule is tried only at nodes of its first output's operator.

    Elsewhere it cannot match. onnxscript 0.7 builds a result for each such try, which is a third of its time, and lists
    the whole graph at each node for a rule with several outputs.
    """
    module = importlib.import_module("onnxscript.rewriter._matcher")
    matcher = module.SimplePatternMatcher
    match = matcher.match
    failure = module._basics.MatchResult().fail("The node is of another operator.")

    def match_where_possible(self: Any, model: Any, graph: Any, node: Any, **options: Any) -> Any:
        operator = self.pattern.output_nodes[0].op_identifier()
        if operator is not None and (operator[1] != node.op_type or operator[0] != node.domain):
            return failure
        return match(self, model, graph, node, **options)

    with rebind([(matcher, "match", match_where_possible)]):
        yield


def _nothing(*_: Any, **__: Any) -> int:
    """A fusion that is left out: it was done 0 times."""
    return 0


def _module_of(entry: str) -> ModuleType:
    """The module that the function of a fusion set is written in, whose names it calls."""
    package, function = FUSIONS[entry]
    return sys.modules[getattr(importlib.import_module(package), function).__module__]


def _names_in(value: Any, module: ModuleType) -> tuple[str, ...]:
    """The names that a function of `module` and its inner functions use."""
    code = getattr(value, "__code__", None)
    return code.co_names if code is not None and value.__module__ == module.__name__ else ()


def _rules_of(exported: Any) -> list[Any]:
    from onnxscript.rewriter import RewriteRule, RewriteRuleSet

    if callable(exported) and not isinstance(exported, RewriteRule | RewriteRuleSet):
        exported = exported()
    return list(exported.rules) if isinstance(exported, RewriteRuleSet) else [exported]


def _replacement(rule: Any) -> Any:
    """What the variants of a rule share, such as those for x + 0 and 0 + x."""
    return getattr(rule, "_replacement_pattern", rule)


def _own_name(rule: Any, at: int) -> str:
    """The rule's name; without one, the name of the function that makes its replacement, or its number."""
    function = getattr(_replacement(rule), "_function", None)
    return rule.name or getattr(function, "__name__", f"rule_{at}")


@contextmanager
def rebind(names: Iterable[tuple[ModuleType | type, str, Any]]) -> Iterator[None]:
    """Inside the block, each (module or class, name) is bound to another value. Not for more than one thread."""
    before: list[tuple[ModuleType | type, str, Any]] = []
    try:
        for module, name, value in names:
            before.append((module, name, getattr(module, name)))
            setattr(module, name, value)
        yield
    finally:
        for module, name, value in reversed(before):
            setattr(module, name, value)
