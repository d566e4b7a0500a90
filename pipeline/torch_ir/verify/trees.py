"""Two results as trees: the model's own, and the tensors of the IR under the structure that it recorded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pipeline.torch_ir.tree import Leaf, Tree, keys_of, kind_of

__all__ = ["Pair", "pairs", "structure"]


@dataclass(frozen=True, slots=True)
class Pair:
    """One leaf on both sides. `why` is set where they cannot be compared as tensors and differ."""

    path: str
    expected: Any
    found: Any
    why: str = ""


def pairs(result: Any, tree: Tree | None, outputs: Sequence[torch.Tensor]) -> Iterator[Pair]:
    """Every leaf of the model's `result` with that of the IR; a difference in structure is a pair with a reason.

    Without a recorded structure (an IR of pytorch-ir, or by hand) the tensors are paired in order.
    """
    if tree is None:
        yield from _in_order(result, outputs)
    else:
        yield from _walk(result, tree, outputs, "")


def _walk(result: Any, tree: Tree, outputs: Sequence[torch.Tensor], path: str) -> Iterator[Pair]:
    if isinstance(tree, Leaf):
        yield _leaf(result, tree, outputs, path)
        return
    kind, children = structure(result)
    if kind != tree.kind:
        yield Pair(path, result, None, f"{path or 'the result'}: the model gives {_said(result)}, the IR {tree.kind}")
        return
    recorded = dict(zip(tree.keys or children, tree.children, strict=False))
    if tree.keys is None and len(children) != len(tree.children):  # without names, places are all there is
        said = f"{len(children)} items, the IR {len(tree.children)}"
        yield Pair(path, result, None, f"{path or 'the result'}: the model gives {said}")
        return
    for key in dict.fromkeys([*children, *recorded]):
        below = f"{path}.{key}" if path else key
        if key not in recorded:
            yield Pair(below, children[key], None, f"{below}: the model gives {_said(children[key])}, the IR nothing")
        elif key not in children:
            yield Pair(below, None, None, f"{below}: the model gives nothing, the IR something")
        else:
            yield from _walk(children[key], recorded[key], outputs, below)


def _leaf(result: Any, leaf: Leaf, outputs: Sequence[torch.Tensor], path: str) -> Pair:
    place = path or "the result"
    if leaf.index is None:
        both_nan = result != result and leaf.value != leaf.value
        same = type(result) is type(leaf.value) and (result == leaf.value or both_nan)
        return Pair(
            path, result, leaf.value, "" if same else f"{place}: the model gives {_said(result)}, the IR {leaf.value!r}"
        )
    if not isinstance(result, torch.Tensor):
        return Pair(path, result, outputs[leaf.index], f"{place}: the model gives {_said(result)}, the IR a tensor")
    return Pair(path, result, outputs[leaf.index])


def structure(result: Any) -> tuple[str, dict[str, Any]]:
    """(the kind of a branch, its children by key), one level down; a leaf has no children."""
    children, spec = pytree.tree_flatten(result, is_leaf=lambda item: item is not result)
    if spec.is_leaf():
        return kind_of(type(result)), {}
    return kind_of(type(result)), dict(zip(_keys(result, spec, len(children)), children, strict=True))


def _keys(result: Any, spec: Any, count: int) -> Sequence[str]:
    """As the type's own flattening names them (a cache's `layers.0.keys`), where it does."""
    if pytree.SUPPORTED_NODES[spec.type].flatten_with_keys_fn is None:
        return keys_of(spec, count) or tuple(map(str, range(count)))
    found = pytree.tree_leaves_with_path(result, is_leaf=lambda item: item is not result)
    return [".".join(map(_key, path)) for path, _ in found]


def _key(key: Any) -> str:
    return str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key))))


def _in_order(result: Any, outputs: Sequence[torch.Tensor]) -> Iterator[Pair]:
    expected = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    if len(expected) != len(outputs):
        yield Pair("", result, None, f"Output count mismatch: original={len(expected)}, ir={len(outputs)}")
        return
    for index, (left, right) in enumerate(zip(expected, outputs, strict=True)):
        yield Pair(str(index), left, right)


def _said(item: Any) -> str:
    return "None" if item is None else f"a {type(item).__qualname__}"
