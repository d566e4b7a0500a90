"""The caller's arguments, nested as the model takes them, as the graph's inputs by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.utils import _pytree as pytree

from pipeline.export.caches import register_cache_types
from pipeline.ir import Graph
from pipeline.torch_ir.ir import IR
from pipeline.torch_ir.tree import Branch, Leaf, Tree, kind_of

__all__ = ["Fed", "feed", "spread"]

Inputs: TypeAlias = Sequence[Any] | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Fed:
    """Inputs by the names of the graph, and what is wrong with the arguments, a line each."""

    tensors: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    by_name: bool = False
    """Whether what is not in `tensors` is known to be absent, also where something else is wrong."""


def feed(ir: IR, inputs: Inputs, kwargs: Mapping[str, Any] | None = None) -> Fed:
    """Which argument is which input.

    `inputs` are positional arguments as the model takes them, or all tensors in a row, in the order of the graph's
    inputs; a mapping gives them by the names of the graph's inputs. `kwargs` are the model's own.
    """
    graph = ir.graph
    names = [graph.values[vid].name for vid in graph.inputs]
    if isinstance(inputs, Mapping):
        return _named(graph, names, {**inputs, **(kwargs or {})})
    given = list(inputs) if isinstance(inputs, list | tuple) else [inputs]
    if not kwargs and len(given) == len(names) and all(isinstance(one, torch.Tensor) for one in given):
        return Fed(dict(zip(names, given, strict=True)))
    if ir.signature.inputs is None:
        return _in_a_row(names, (given, dict(kwargs or {})))
    return _nested(names, ir.signature.inputs, (tuple(given), dict(kwargs or {})))


def spread(tree: Tree, given: Any, path: str = "") -> Iterator[tuple[str, Leaf, Any]]:
    """(path, leaf of `tree`, what `given` has there), from left to right.

    Raises:
        ValueError: `given` is no such tree; the message says where, what was found and what was expected.
    """
    if isinstance(tree, Leaf):
        yield path, tree, given
        return
    for key, child, part in _children(tree, given, path):
        yield from spread(child, part, f"{path}.{key}" if path else key)


def _children(tree: Branch, given: Any, path: str) -> list[tuple[str, Tree, Any]]:
    if tree.kind == "dict" and isinstance(given, Mapping):
        keys = tree.keys or tuple(map(str, given))
        found = {str(key): part for key, part in given.items()}
        _refuse_others(path, keys, tuple(found))
        return [(key, child, found[key]) for key, child in zip(keys, tree.children, strict=True)]
    parts = _parts(given)
    kind = kind_of(type(given))
    alike = kind == tree.kind or (kind in ROWS and tree.kind in ROWS)
    if parts is None or not alike or len(parts) != len(tree.children):
        said = kind if parts is None or not alike else f"{kind} of {len(parts)}"
        raise ValueError(f"{path or 'the arguments'}: found {said}, expected {tree.kind} of {len(tree.children)}")
    keys = tree.keys or tuple(map(str, range(len(parts))))
    return list(zip(keys, tree.children, parts, strict=True))


def _refuse_others(path: str, expected: Sequence[str], found: Sequence[str]) -> None:
    missing = [key for key in expected if key not in found]
    unknown = [key for key in found if key not in expected]
    if missing or unknown:
        said = [
            *([f"without {', '.join(map(repr, missing))}"] if missing else []),
            *([f"with {', '.join(map(repr, unknown))}, which the trace had not"] if unknown else []),
        ]
        raise ValueError(f"{path or 'the arguments'}: {' and '.join(said)}; expected {', '.join(expected) or 'none'}")


def _parts(given: Any) -> list[Any] | None:
    """One level down, as torch.export takes apart tuples, dataclasses and caches; None for what is no branch."""
    register_cache_types()  # the IR may have been loaded from a file: then nobody has met the model
    parts = pytree.tree_leaves(given, is_leaf=lambda item: item is not given)
    return None if len(parts) == 1 and parts[0] is given else parts


def _named(graph: Graph, names: Sequence[str], given: Mapping[str, Any]) -> Fed:
    problems = [
        f"input {name!r}: the IR has no such input; its inputs are {', '.join(names)}"
        for name in given
        if name not in names
    ]
    return Fed({name: given[name] for name in names if name in given}, problems, by_name=True)


def _in_a_row(names: Sequence[str], given: Any) -> Fed:
    tensors = [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, torch.Tensor)]
    if len(tensors) != len(names):
        return Fed({}, [f"inputs: found {len(tensors)} tensors, expected {len(names)}: {', '.join(names)}"])
    return Fed(dict(zip(names, tensors, strict=True)))


def _nested(names: Sequence[str], tree: Tree, given: tuple[tuple[Any, ...], dict[str, Any]]) -> Fed:
    try:
        found = list(spread(tree, given))
    except ValueError as error:
        return Fed({}, [f"inputs: {_readable(str(error))}; the graph's own are {', '.join(names)}"])
    constants = [
        f"argument {_readable(path)}: found {part!r:.60}, but the IR was traced with {leaf.value!r}; extract it again"
        for path, leaf, part in found
        if leaf.index is None and not _same(leaf.value, part)
    ]
    return Fed({names[leaf.index]: part for _, leaf, part in found if leaf.index is not None}, constants)


def _same(traced: Any, given: Any) -> bool:
    return type(traced) is type(given) and (traced == given or traced != traced)


def _readable(path: str) -> str:
    """`0` and `1` are the two halves of a call: positional and by keyword."""
    for start, said in HALVES.items():
        if path.startswith(start):
            return said + path.removeprefix(start)
    return path


HALVES = {"0.": "", "1.": "", "0: ": "positional arguments: ", "1: ": "keyword arguments: "}

ROWS = ("tuple", "list")
"""Callers need not know which of the two the trace had."""
