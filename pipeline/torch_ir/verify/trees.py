"""Two results as trees: the model's own, and the tensors of the IR under the structure that it recorded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pipeline.torch_ir.tree import Leaf, Tree, structure, under

__all__ = ["Pair", "pairs"]


@dataclass(frozen=True, slots=True)
class Pair:
    """One leaf on both sides. `why`, without the path, is how they differ where they cannot be compared as tensors."""

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
    kind, children = structure(result) or ("", {})
    if kind != tree.kind:
        yield Pair(path, result, None, f"the model gives {_said(result)}, the IR {_a(tree.kind)}")
        return
    if tree.keys is None and len(children) != len(tree.children):  # without names, places are all there is
        yield Pair(path, result, None, f"the model gives {len(children)} items, the IR {len(tree.children)}")
        return
    recorded = dict(zip(tree.keys or children, tree.children, strict=False))
    for key in dict.fromkeys([*children, *recorded]):
        below = under(path, key)
        if key not in recorded:
            yield Pair(below, children[key], None, f"the model gives {_said(children[key])}, the IR nothing")
        elif key not in children:
            yield Pair(below, None, None, "the model gives nothing, the IR something")
        else:
            yield from _walk(children[key], recorded[key], outputs, below)


def _leaf(result: Any, leaf: Leaf, outputs: Sequence[torch.Tensor], path: str) -> Pair:
    if leaf.index is None:
        both_nan = result != result and leaf.value != leaf.value
        same = type(result) is type(leaf.value) and (result == leaf.value or both_nan)
        return Pair(path, result, leaf.value, "" if same else _constants(result, leaf.value))
    if not isinstance(result, torch.Tensor):
        return Pair(path, result, outputs[leaf.index], f"the model gives {_said(result)}, the IR a tensor")
    return Pair(path, result, outputs[leaf.index])


def _constants(result: Any, recorded: Any) -> str:
    """Numbers and words are shown as they are, where the model has one too."""
    plain = isinstance(result, bool | int | float | complex | str)
    return f"the model gives {repr(result) if plain else _said(result)}, the IR the constant {recorded!r}"


def _in_order(result: Any, outputs: Sequence[torch.Tensor]) -> Iterator[Pair]:
    expected = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    if len(expected) != len(outputs):
        yield Pair("", result, None, f"Output count mismatch: original={len(expected)}, ir={len(outputs)}")
        return
    for index, (left, right) in enumerate(zip(expected, outputs, strict=True)):
        yield Pair(str(index), left, right)


def _said(item: Any) -> str:
    if isinstance(item, torch.Tensor):
        return "a tensor"
    return "None" if item is None else _a(type(item).__qualname__)


def _a(kind: str) -> str:
    return f"{'an' if kind[0] in 'aeiouAEIOU' else 'a'} {kind}"
