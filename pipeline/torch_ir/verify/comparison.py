"""Compare two results as trees of tensors, and two tensors element by element."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from passes.proof.numbers import Tolerance, tolerance_for
from passes.suggest import with_article
from pipeline.runtime.tensors import dtype_name
from pipeline.torch_ir.tree import Leaf, Tree, structure, under


@dataclass(frozen=True, slots=True)
class Pair:
    """One leaf on both sides. `why` says, without the path, how they differ if they cannot be compared as tensors."""

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
        yield Pair(path, result, None, f"the model gives {_describe_item(result)}, the IR {with_article(tree.kind)}")
        return
    if tree.keys is None and len(children) != len(tree.children):  # without names, only positions can be compared
        yield Pair(path, result, None, f"the model gives {len(children)} items, the IR {len(tree.children)}")
        return
    recorded = dict(zip(tree.keys or children, tree.children, strict=False))
    for key in dict.fromkeys([*children, *recorded]):
        below = under(path, key)
        if key not in recorded:
            yield Pair(below, children[key], None, f"the model gives {_describe_item(children[key])}, the IR nothing")
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
        return Pair(path, result, outputs[leaf.index], f"the model gives {_describe_item(result)}, the IR a tensor")
    return Pair(path, result, outputs[leaf.index])


def _constants(result: Any, recorded: Any) -> str:
    """The message for a constant; the model's value is shown if it is a number or a string."""
    plain = isinstance(result, bool | int | float | complex | str)
    return f"the model gives {repr(result) if plain else _describe_item(result)}, the IR the constant {recorded!r}"


def _in_order(result: Any, outputs: Sequence[torch.Tensor]) -> Iterator[Pair]:
    expected = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    if len(expected) != len(outputs):
        yield Pair("", result, None, f"Output count mismatch: original={len(expected)}, ir={len(outputs)}")
        return
    for index, (left, right) in enumerate(zip(expected, outputs, strict=True)):
        yield Pair(str(index), left, right)


def _describe_item(item: Any) -> str:
    if isinstance(item, torch.Tensor):
        return "a tensor"
    return "None" if item is None else with_article(type(item).__qualname__)


OWN = {"float32": Tolerance(1e-5, 1e-5)}
"""As pytorch-ir: the same operators of torch run on both sides, so the order of sums differs in few places."""


@dataclass(frozen=True, slots=True)
class Difference:
    """`max_diff` and `mean_diff` are over elements that are finite on both sides, infinite where that says nothing."""

    is_close: bool
    max_diff: float
    mean_diff: float
    why: str = ""


def tolerance(dtype: torch.dtype, rtol: float | None = None, atol: float | None = None) -> Tolerance:
    """How far an element may be off, |a - b| ≤ atol + rtol·|a|: the caller's, else by dtype as
    docs/reference/tolerances.md says.

    A dtype that is listed nowhere, an integer or float8, has to be equal.
    """
    name = dtype_name(dtype)
    own = OWN.get(name) or tolerance_for(name)
    return Tolerance(own.atol if atol is None else atol, own.rtol if rtol is None else rtol)


def compare(
    expected: torch.Tensor, found: torch.Tensor, rtol: float | None = None, atol: float | None = None
) -> Difference:
    """`found` against `expected`: shape, dtype and values.

    NaN is equal to NaN, and an infinity to itself, in the same place; elsewhere they are counted in `why`. Integers and
    bools have to be equal whatever the tolerances.
    """
    if expected.shape != found.shape:
        return _report_mismatch(f"shape {list(found.shape)}, expected {list(expected.shape)}")
    if expected.dtype != found.dtype:
        return _report_mismatch(f"dtype {str(found.dtype)[6:]}, expected {str(expected.dtype)[6:]}")
    left, right = _wide(expected), _wide(found)
    if not left.numel():
        return Difference(True, 0.0, 0.0)
    if not (expected.dtype.is_floating_point or expected.dtype.is_complex):
        return _compare_integers(left, right)
    return _compare_floats(left, right, tolerance(expected.dtype, rtol, atol))


def _compare_tensors(
    original: torch.Tensor, ir_output: torch.Tensor, rtol: float | None = None, atol: float | None = None
) -> tuple[bool, float, float]:
    """(is_close, max_diff, mean_diff): `compare` under pytorch-ir's name."""
    found = compare(original, ir_output, rtol, atol)
    return found.is_close, found.max_diff, found.mean_diff


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the CPU, in a dtype that holds all its values and in which differences can be computed."""
    tensor = tensor.detach().to("cpu")
    if tensor.dtype.is_complex:
        return tensor.to(torch.complex128)
    return tensor.to(torch.float64) if tensor.dtype.is_floating_point else tensor


def _compare_integers(left: torch.Tensor, right: torch.Tensor) -> Difference:
    unequal = left != right
    count = int(unequal.sum())
    if not count:
        return Difference(True, 0.0, 0.0)
    distance = (left[unequal].double() - right[unequal].double()).abs()
    # Two large integers may be one apart and the same as doubles; unequal is at least 1.
    worst, total = max(float(distance.max()), 1.0), max(float(distance.sum()), float(count))
    return Difference(False, worst, total / left.numel(), f"{count} of {left.numel()} elements differ")


def _compare_floats(left: torch.Tensor, right: torch.Tensor, allowed: Tolerance) -> Difference:
    finite = torch.isfinite(left) & torch.isfinite(right)
    same = (left == right) | (torch.isnan(left) & torch.isnan(right))
    odd = int((~finite & ~same).sum())
    if odd:
        return _report_mismatch(
            f"{odd} of {left.numel()} elements are NaN or infinite on one side only ({_counts(left, right)})"
        )
    error = (left[finite] - right[finite]).abs()
    if not error.numel():
        return Difference(True, 0.0, 0.0)
    over = int((error > allowed.atol + allowed.rtol * left[finite].abs()).sum())
    why = f"{over} of {left.numel()} elements differ by more than {_format_bound(allowed)}" if over else ""
    return Difference(not over, float(error.max()), float(error.mean()), why)


def _format_bound(allowed: Tolerance) -> str:
    return f"{allowed.atol:g} + {allowed.rtol:g} · |expected|" if allowed.rtol else f"{allowed.atol:g}"


def _counts(left: torch.Tensor, right: torch.Tensor) -> str:
    sides = (
        f"{int(torch.isnan(side).sum())} NaN and {int(torch.isinf(side).sum())} infinite {of}"
        for side, of in ((left, "expected"), (right, "found"))
    )
    return ", ".join(sides)


def _report_mismatch(why: str) -> Difference:
    return Difference(False, math.inf, math.inf, why)
