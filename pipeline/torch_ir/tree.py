"""How the arguments and the result of a model nest: tuples, dicts, dataclasses, caches, down to tensors and numbers.

Kept with the IR, so that a result is compared as the tree that it is, and arguments are taken as the model takes them.
"""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

__all__ = ["Branch", "Leaf", "Tree", "from_json", "keys_of", "kind_of", "leaves", "to_json", "tree_of"]


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor (its place among the graph's inputs or outputs), or a value of Python that is the same in every run."""

    index: int | None = None
    value: Any = None


@dataclass(frozen=True, slots=True)
class Branch:
    """`kind` is `tuple`, `list`, `dict` or the full name of a class; `keys` name the children that have names."""

    kind: str
    keys: tuple[str, ...] | None
    children: tuple[Tree, ...]


Tree: TypeAlias = Leaf | Branch


def tree_of(spec: Any, ends: Sequence[Leaf]) -> Tree:
    """The tree that torch's TreeSpec `spec` describes, with `ends` as its leaves in order."""
    remaining = iter(ends)
    return _built(spec, remaining)


def leaves(tree: Tree, path: str = "") -> Iterator[tuple[str, Leaf]]:
    """(path, leaf) from left to right; a path is such as `past_key_values.0.1`."""
    if isinstance(tree, Leaf):
        yield path, tree
        return
    keys = tree.keys or tuple(map(str, range(len(tree.children))))
    for key, child in zip(keys, tree.children, strict=True):
        yield from leaves(child, f"{path}.{key}" if path else key)


def to_json(tree: Tree) -> Any:
    """A number is the index of a tensor; `{"value": 3}` a constant, `{"float": "inf"}` one that JSON has not;
    `{"kind", "keys", "items"}` a branch."""
    if isinstance(tree, Branch):
        keys = {} if tree.keys is None else {"keys": list(tree.keys)}
        return {"kind": tree.kind, **keys, "items": [to_json(child) for child in tree.children]}
    if tree.index is not None:
        return tree.index
    finite = not isinstance(tree.value, float) or math.isfinite(tree.value)
    return {"value": tree.value} if finite else {"float": repr(tree.value)}


def from_json(data: Any) -> Tree:
    if isinstance(data, int):
        return Leaf(data)
    if "float" in data:
        return Leaf(None, float(data["float"]))
    if "value" in data:
        return Leaf(None, data["value"])
    keys = data.get("keys")
    return Branch(data["kind"], None if keys is None else tuple(keys), tuple(map(from_json, data["items"])))


def _built(spec: Any, ends: Iterator[Leaf]) -> Tree:
    if spec.is_leaf():
        return next(ends)
    children = tuple(_built(child, ends) for child in spec.children())
    kind = spec.context if spec.type is namedtuple else spec.type  # torch has one entry for all named tuples
    return Branch(kind_of(kind), keys_of(spec, len(children)), children)


def kind_of(kind: Any) -> str:
    return kind.__name__ if kind in (tuple, list, dict) else f"{kind.__module__}.{kind.__qualname__}"


def keys_of(spec: Any, count: int) -> tuple[str, ...] | None:
    """A dict keeps its keys as the context of its spec, a dataclass the names of its fields, maybe among others."""
    context = spec.context
    if spec.type is namedtuple:
        return tuple(context._fields)
    if isinstance(context, Mapping):
        context = list(context)
    candidates = [context, *(context if isinstance(context, list | tuple) else ())]
    for names in candidates:
        if isinstance(names, list | tuple) and len(names) == count and all(isinstance(name, str) for name in names):
            return tuple(names)
    return None
