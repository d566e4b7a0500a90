"""Match the caller's arguments, nested as the model takes them, to the graph's inputs by name.

Where the nesting differs from the trace, that is reported and the rest is matched all the same, so that one message can
report the wrong dtype of one argument and the absence of another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.utils import _pytree as pytree

from pipeline.export.tree import register_cache_types
from pipeline.torch_ir.ir import IR
from pipeline.torch_ir.tree import Branch, Leaf, Tree, fixed_of, leaves, structure, under

Arguments: TypeAlias = Sequence[Any] | torch.Tensor
"""The positional arguments of a model; a tensor is an only argument."""

Inputs: TypeAlias = Arguments | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Fed:
    """The inputs that could be matched, by name, and what is wrong with the arguments, a line each.

    `explained` are absent inputs for which a problem gives the reason, such as the tensors of a cache where None was
    given. `only_absent`: the problems only say that tensors were not given.
    """

    tensors: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    explained: frozenset[str] = frozenset()
    only_absent: bool = False


def feed(ir: IR, inputs: Inputs, kwargs: Mapping[str, Any] | None = None) -> Fed:
    """Match arguments to inputs.

    `inputs` are positional arguments as the model takes them, or all tensors in a row, in the order of the graph's
    inputs; a mapping gives them by the names of the graph's inputs. `kwargs` are the model's own.
    """
    graph = ir.graph
    names = [graph.values[vid].name for vid in graph.inputs]
    if isinstance(inputs, Mapping):
        return _feed_by_name(names, {**inputs, **(kwargs or {})})
    given = list(inputs) if isinstance(inputs, list | tuple) else [inputs]
    if not kwargs and len(given) == len(names) and all(isinstance(item, torch.Tensor) for item in given):
        return Fed(dict(zip(names, given, strict=True)))
    if ir.signature.inputs is None:
        return _feed_in_order(names, (given, dict(kwargs or {})))
    return _feed_nested(names, ir.signature.inputs, _place_named(names, ir.signature.inputs, given, dict(kwargs or {})))


def _feed_by_name(names: Sequence[str], given: Mapping[str, Any]) -> Fed:
    problems = [
        f"input {name!r}: the IR has no such input; its inputs are {', '.join(names)}"
        for name in given
        if name not in names
    ]
    return Fed({name: given[name] for name in names if name in given}, problems)


def _feed_in_order(names: Sequence[str], given: Any) -> Fed:
    tensors = [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, torch.Tensor)]
    said = f"inputs: Expected {len(names)} inputs, got {len(tensors)} tensors; the graph's own are {', '.join(names)}"
    problems = [] if len(tensors) == len(names) else [said]
    return Fed(dict(zip(names, tensors, strict=False)), problems, only_absent=len(tensors) < len(names))


def _place_named(
    names: Sequence[str], tree: Tree, args: list[Any], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Move keyword arguments that the trace had by position into args: torch names an input after its parameter.

    For nested arguments, and for those that are no tensors, the trace does not have the parameter's name.
    """
    positional = tree.children[0] if isinstance(tree, Branch) and tree.children else tree
    left = positional.children[len(args) :] if isinstance(positional, Branch) else ()
    row = list(args)
    for child in left:
        name = names[child.index] if isinstance(child, Leaf) and child.index is not None else None
        if name not in kwargs:
            break
        row.append(kwargs.pop(name))
    return tuple(row), kwargs


def _feed_nested(names: Sequence[str], tree: Tree, given: tuple[tuple[Any, ...], dict[str, Any]]) -> Fed:
    matched = _ArgumentMatcher()
    matched.walk(tree, given, "")
    problems = [f"inputs: {problem}" for problem in matched.problems]
    if problems:
        problems[-1] += f"; the graph's own are {', '.join(names)}"
    others = [
        f"argument {_readable(path)}: found {part!r:.60}, but the IR was traced with {leaf.value!r}; extract it again"
        for path, leaf, part in matched.leaves
        if leaf.index is None and not _same(leaf.value, part)
    ]
    others += matched.fixed
    tensors = {names[leaf.index]: part for _, leaf, part in matched.leaves if leaf.index is not None}
    explained = frozenset(names[index] for index in matched.explained)
    return Fed(tensors, [*problems, *others], explained, matched.only_absent and not others)


@dataclass(slots=True)
class _ArgumentMatcher:
    """Walks the traced tree and the given arguments together; collects (path, leaf, given part), and problems."""

    leaves: list[tuple[str, Leaf, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    fixed: list[str] = field(default_factory=list)
    """Differences in Python numbers inside of caches, which the trace has as constants."""
    explained: set[int] = field(default_factory=set)
    """The indices of tensors in branches that were not given, or given as something else."""
    only_absent: bool = True
    """Whether the only problems are single tensors that were not given."""

    def walk(self, tree: Tree, given: Any, path: str) -> None:
        if isinstance(tree, Leaf):
            self.leaves.append((path, tree, given))
            return
        for key, child, part in self._children(tree, given, path):
            self.walk(child, part, under(path, key))

    def _children(self, tree: Branch, given: Any, path: str) -> Iterator[tuple[str, Tree, Any]]:
        if type(given) not in pytree.SUPPORTED_NODES:
            register_cache_types()  # an IR from a file comes without the model, whose export would have registered them
        kind, found = structure(given) or (_leaf(given), None)
        count = len(tree.children)
        if found is None or not (kind == tree.kind or {kind, tree.kind} <= ROWS):
            self.problems.append(f"{_write_path(path)}: found {kind}, expected {tree.kind} of {count}")
            self.only_absent = False
            self._explain(tree.children)
            return
        if tree.fixed is not None and len(found) == count:
            self._compare_fixed(tree.fixed, given, path)
        if tree.keys is None or kind in ROWS:  # without names, only positions can be compared
            if len(found) != count:
                said = f"{_write_path(path)}: found {kind} of {len(found)}, expected {tree.kind} of {count}"
                self.problems.append(f"Expected {count} inputs, got {len(found)}: {said}" if path == "0" else said)
                self._leave_out(tree, tree.children[len(found) :], too_many=len(found) > count)
            yield from zip(tree.keys or map(str, range(count)), tree.children, found.values(), strict=False)
            return
        self._compare_keys(tree.keys, found, path)
        lacking = [child for key, child in zip(tree.keys, tree.children, strict=True) if key not in found]
        self._leave_out(tree, lacking, too_many=any(key not in tree.keys for key in found))
        for key, child in zip(tree.keys, tree.children, strict=True):
            if key in found:
                yield key, child, found[key]

    def _leave_out(self, tree: Branch, children: Sequence[Tree], too_many: bool) -> None:
        """Note absent children; a single tensor that is no part of a cache is reported by its own name instead."""
        is_plain = tree.kind in PLAIN
        self._explain([child for child in children if isinstance(child, Branch) or not is_plain])
        single = is_plain and all(isinstance(child, Leaf) and child.index is not None for child in children)
        self.only_absent = self.only_absent and single and not too_many

    def _explain(self, trees: Sequence[Tree]) -> None:
        self.explained.update(leaf.index for tree in trees for _, leaf in leaves(tree) if leaf.index is not None)

    def _compare_keys(self, expected: Sequence[str], found: Mapping[str, Any], path: str) -> None:
        missing = [_quote(key) for key in expected if key not in found]
        unknown = [_quote(key) for key in found if key not in expected]
        said = [f"without {', '.join(missing)}"] if missing else []
        said += [f"with {', '.join(unknown)}, which the trace had not"] if unknown else []
        if said:
            keys = ", ".join(expected) or "none"
            self.problems.append(f"{_write_path(path)}: {' and '.join(said)}; expected {keys}")

    def _compare_fixed(self, expected: Mapping[str, Any], given: Any, path: str) -> None:
        found = fixed_of(given)
        if found is None:
            return
        for key in dict.fromkeys([*expected, *found]):
            if not (key in expected and key in found and _same(expected[key], found[key])):
                self.fixed.append(
                    f"argument {_readable(under(path, key))}: found {_repr_at(found, key)}, but the IR was traced with "
                    f"{_repr_at(expected, key)}, which may be part of its graph; extract it again with such a cache"
                )


def _same(traced: Any, given: Any) -> bool:
    return type(traced) is type(given) and (traced == given or traced != traced)


def _repr_at(values: Mapping[str, Any], key: str) -> str:
    return f"{values[key]!r:.60}" if key in values else "nothing"


def _leaf(given: Any) -> str:
    return "None" if given is None else type(given).__name__


def _quote(key: str) -> str:
    return key if key.startswith("[") else repr(key)


def _write_path(path: str) -> str:
    return HALVES.get(path) or f"argument {_readable(path)}"


def _readable(path: str) -> str:
    """A path without its first part: `0` for positional, `1` for keyword arguments."""
    return path[2:] if path.startswith(("0.", "1.")) else path[1:]


HALVES = {"": "the arguments", "0": "positional arguments", "1": "keyword arguments"}

ROWS = frozenset({"tuple", "list"})
"""Either is accepted for the other."""

PLAIN = ROWS | {"dict"}
"""Kinds of plain containers; the branches of a cache are none."""
