"""Which stored tensors two models have otherwise."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations
from typing import Final

import numpy as np
from onnx import TensorProto

from passes.diff.found import InitializerChange
from passes.diff.labels import label_of
from passes.diff.matched import Matched
from passes.model.spelled import spelled_shape
from passes.provenance import form_of, marks_of
from passes.provenance.wiring import Wiring

__all__ = ["Stored", "initializer_changes"]

Stored = tuple[int, int]
"""The ids, before and after, of what two matched nodes read at the same place: a tensor whose values differ, or a
constant that one model stores and the other computes."""


def initializer_changes(matched: Matched, changed: Sequence[Stored]) -> Iterator[InitializerChange]:
    """What is changed, with how far; what has another form; what came, and what went. Copies count, names do not."""
    before, after = matched.same.before, matched.same.after
    gone, come = _surplus(before, after), _surplus(after, before)
    changed = list(dict.fromkeys(changed))
    pairs = [pair for pair in changed if pair[0] in before.tensors and pair[1] in after.tensors]
    # What no matched node reads is known again by its name, if that is the only one of it.
    names, other_names = ({wiring.names[one]: one for one in ids} for wiring, ids in ((before, gone), (after, come)))
    told = {old for old, _ in pairs} | {new for _, new in pairs}
    pairs += [(old, other_names[name]) for name, old in names.items() if name in other_names and old not in told]
    reshaped = _forms(matched, come, gone, {new: old for old, new in pairs})
    pairs = [pair for pair in pairs if pair[1] not in reshaped]
    for old, new in sorted(pairs, key=lambda pair: after.names[pair[1]]):
        tensor, other = before.tensors[old], after.tensors[new]
        what = _distance(matched, tensor, other)
        yield InitializerChange(after.names[new], spelled_shape(tensor), spelled_shape(other), what)
    for new, (form, olds) in reshaped.items():
        types = dict.fromkeys(spelled_shape(before.tensors[old]) for old in olds)
        was = tuple(before.names[old] for old in olds)
        yield InitializerChange(after.names[new], ", ".join(types), spelled_shape(after.tensors[new]), form, was)
    paired = {old for old, _ in pairs} | {old for _, olds in reshaped.values() for old in olds}
    makers = {old: _maker(after, new) for old, new in changed if new not in after.tensors}
    equals = {after.value_meanings[new]: after.names[new] for new in after.tensors}
    for old in gone:
        if old not in paired:
            equal = equals.get(before.value_meanings[old], "")
            what = f"equal to {equal}, which is read in its place" if equal else ""
            maker = makers.get(old, "")
            yield InitializerChange(before.names[old], spelled_shape(before.tensors[old]), "", what, computed_by=maker)
    paired = {new for _, new in pairs} | reshaped.keys()
    makers = {new: _maker(before, old) for old, new in changed if old not in before.tensors}
    for new in come:
        if new not in paired:
            maker = makers.get(new, "")
            yield InitializerChange(after.names[new], "", spelled_shape(after.tensors[new]), computed_by=maker)


def _maker(wiring: Wiring, value: int) -> str:
    maker = wiring.makers[value]
    return "" if maker < 0 else str(label_of(wiring.items[maker].node))


def _forms(
    matched: Matched, come: Sequence[int], gone: Sequence[int], paired: Mapping[int, int]
) -> dict[int, tuple[str, tuple[int, ...]]]:
    """New tensors that hold weights of the first model in another form, as (form, the weights).

    A tensor of the same numbers, reshaped or transposed, is found by its content: the one that is `paired` with it, or
    any of its size. That it was merged or folded of others is what the tensor itself says, if onnxline has made it.
    """
    before, after = matched.same.before, matched.same.after
    by_name = {before.names[old]: old for old in before.tensors}
    by_size: dict[tuple[int, int], list[int]] = defaultdict(list)
    for old in dict.fromkeys((*gone, *before.tensors)):  # those that are gone first
        tensor = before.tensors[old]
        if len(tensor.dims) and tensor.data_type != TensorProto.STRING:
            by_size[tensor.data_type, math.prod(tensor.dims)].append(old)
    found: dict[int, tuple[str, tuple[int, ...]]] = {}
    for new in come:
        tensor, size = after.tensors[new], math.prod(after.tensors[new].dims)
        olds = by_size.get((tensor.data_type, size), []) if size > 1 else []
        if new in paired:
            olds = [old for old in olds if old == paired[new]]
        forms = ((form, (old,)) for old in olds if (form := _form(matched, before.tensors[old], tensor)))
        known = next(forms, None)
        sources = tuple(by_name[name] for name in marks_of(tensor).replaced if name in by_name)
        if known is None and sources and new not in paired and form_of(tensor) in ("cast", "merged", "folded"):
            known = (form_of(tensor), sources)
        if known is not None:
            found[new] = known
    return found


def _form(matched: Matched, old: TensorProto, new: TensorProto) -> str:
    if old.dims == new.dims:
        square = len(old.dims) == 2 and old.dims[0] == old.dims[1]
        return "transposed" if square and _is_turned(matched, old, new, (1, 0)) else ""
    if matched.before.digest(old) == matched.after.digest(new):
        return "reshaped"
    turns = (axes for axes in permutations(range(len(old.dims))) if [old.dims[axis] for axis in axes] == list(new.dims))
    is_turned = len(old.dims) <= MOST_AXES and any(_is_turned(matched, old, new, axes) for axes in turns)
    return "transposed" if is_turned else ""


def _is_turned(matched: Matched, old: TensorProto, new: TensorProto, axes: Sequence[int]) -> bool:
    return matched.before.turned_digest(old, axes) == matched.after.digest(new)


MOST_AXES: Final = 4
"""Axes up to which all orders of them are tried."""


def _surplus(one: Wiring, other: Wiring) -> list[int]:
    """The initializers of `one` that `other` has not, or has fewer copies of."""
    there = Counter(other.value_meanings[value] for value in other.tensors)
    namesakes = {(other.names[value], other.value_meanings[value]) for value in other.tensors}
    copies: dict[int, list[int]] = defaultdict(list)
    for value in one.tensors:
        copies[one.value_meanings[value]].append(value)
    found = []
    for meaning, values in copies.items():
        # Of copies those are surplus that have no namesake.
        ordered = sorted(values, key=lambda value: (one.names[value], meaning) not in namesakes)
        found.extend(ordered[there[meaning] :])
    return found


def _distance(matched: Matched, before: TensorProto, after: TensorProto) -> str:
    if spelled_shape(before) != spelled_shape(after):
        return ""
    if before.data_type == TensorProto.STRING:
        count = sum(one != other for one, other in zip(before.string_data, after.string_data, strict=False))
        return f"{count} of {len(after.string_data)} values differ"
    old, new = matched.before.array(before), matched.after.array(after)
    bits = [np.ascontiguousarray(one).view(np.uint8).reshape(old.size, -1) for one in (old, new)]
    other = (bits[0] != bits[1]).any(axis=1)
    return f"{int(other.sum())} of {old.size} values differ{_furthest(old.ravel()[other], new.ravel()[other])}"


def _furthest(old: np.ndarray, new: np.ndarray) -> str:
    if old.dtype.kind in "biu":
        return ""
    kind = np.complex128 if old.dtype.kind == "c" else np.float64
    with np.errstate(all="ignore"):
        apart = np.abs(new.astype(kind) - old.astype(kind))
    apart = apart[np.isfinite(apart)]
    return f", by up to {apart.max():.3g}" if apart.size else ""
