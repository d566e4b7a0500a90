"""Which stored tensors two models have otherwise."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
from onnx import TensorProto

from passes.diff.found import InitializerChange
from passes.diff.matched import Matched
from passes.model.spelled import spelled_shape
from passes.provenance.wiring import Wiring

__all__ = ["Stored", "initializer_changes"]

Stored = tuple[int, int]
"""The ids, before and after, of a tensor that two matched nodes read at the same place, and whose values differ."""


def initializer_changes(matched: Matched, changed: Sequence[Stored]) -> Iterator[InitializerChange]:
    """What is changed, with how far; what came, and what went. Copies count, names do not."""
    before, after = matched.same.before, matched.same.after
    gone, come = _surplus(before, after), _surplus(after, before)
    pairs = [pair for pair in dict.fromkeys(changed) if pair[0] in before.tensors and pair[1] in after.tensors]
    # What no matched node reads is known again by its name, if that is the only one of it.
    names, other_names = ({wiring.names[one]: one for one in ids} for wiring, ids in ((before, gone), (after, come)))
    told = {old for old, _ in pairs} | {new for _, new in pairs}
    pairs += [(old, other_names[name]) for name, old in names.items() if name in other_names and old not in told]
    for old, new in sorted(pairs, key=lambda pair: after.names[pair[1]]):
        tensor, other = before.tensors[old], after.tensors[new]
        what = _distance(matched, tensor, other)
        yield InitializerChange(after.names[new], spelled_shape(tensor), spelled_shape(other), what)
    for old in gone:
        if old not in {one for one, _ in pairs}:
            yield InitializerChange(before.names[old], spelled_shape(before.tensors[old]), "")
    for new in come:
        if new not in {one for _, one in pairs}:
            yield InitializerChange(after.names[new], "", spelled_shape(after.tensors[new]))


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
