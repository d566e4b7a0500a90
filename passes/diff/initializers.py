"""Compare the stored tensors of two models."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from onnx import TensorProto

from passes.diff.model_matching import ModelMatching
from passes.diff.types import InitializerChange, label_of
from passes.graph.formatting import format_tensor_type
from passes.matching.flat_graph import FlatGraph
from passes.provenance import annotations_of, form_of
from passes.weights.relations import TensorForms

Stored = tuple[int, int]
"""The ids, before and after, of two values that matched nodes read at the same position: tensors whose content differs,
or a constant that one model stores and the other computes."""


def initializer_changes(matched: ModelMatching, differing: Sequence[Stored]) -> Iterator[InitializerChange]:
    """The stored tensors that differ: changed, in another form, added or removed. Copies count, names do not.

    Args:
        matched: the matched nodes and values of the two models.
        differing: ids of values that matched nodes read at the same position and that differ.
    """
    before, after = matched.nodes.before, matched.nodes.after
    gone, come = _surplus(before, after), _surplus(after, before)
    differing = list(dict.fromkeys(differing))
    pairs = _pairs(before, after, gone, come, differing)
    reshaped = _forms(matched, come, gone, {new: old for old, new in pairs})
    pairs = [pair for pair in pairs if pair[1] not in reshaped]
    for old, new in sorted(pairs, key=lambda pair: after.names[pair[1]]):
        tensor, other = before.tensors[old], after.tensors[new]
        distance = _distance(matched, tensor, other)
        yield InitializerChange(after.names[new], format_tensor_type(tensor), format_tensor_type(other), distance)
    for new, (form, olds) in reshaped.items():
        types = dict.fromkeys(format_tensor_type(before.tensors[old]) for old in olds)
        was = tuple(before.names[old] for old in olds)
        yield InitializerChange(after.names[new], ", ".join(types), format_tensor_type(after.tensors[new]), form, was)
    listed = {old for old, _ in pairs} | {old for _, olds in reshaped.values() for old in olds}
    yield from _removals(before, after, [old for old in gone if old not in listed], differing)
    listed = {new for _, new in pairs} | reshaped.keys()
    producers = {new: _producer(before, old) for old, new in differing if old not in before.tensors}
    for new in (new for new in come if new not in listed):
        shape = format_tensor_type(after.tensors[new])
        yield InitializerChange(after.names[new], "", shape, computed_by=producers.get(new, ""))


def _pairs(
    before: FlatGraph, after: FlatGraph, gone: Sequence[int], come: Sequence[int], differing: Sequence[Stored]
) -> list[Stored]:
    """Tensors that changed: pairs that matched nodes read at the same position, and other pairs of the same name."""
    pairs = [pair for pair in differing if pair[0] in before.tensors and pair[1] in after.tensors]
    paired = {old for old, _ in pairs} | {new for _, new in pairs}
    names = {before.names[old]: old for old in gone}
    other_names = {after.names[new]: new for new in come}
    named = [(old, other_names[name]) for name, old in names.items() if name in other_names and old not in paired]
    return [*pairs, *named]


def _removals(
    before: FlatGraph, after: FlatGraph, gone: Sequence[int], differing: Sequence[Stored]
) -> Iterator[InitializerChange]:
    producers = {old: _producer(after, new) for old, new in differing if new not in after.tensors}
    equals = {after.value_digests[new]: after.names[new] for new in after.tensors}
    for old in gone:
        equal = equals.get(before.value_digests[old], "")
        how = f"equal to {equal}, which is read in its place" if equal else ""
        shape = format_tensor_type(before.tensors[old])
        yield InitializerChange(before.names[old], shape, "", how, computed_by=producers.get(old, ""))


def _producer(flat: FlatGraph, value: int) -> str:
    producer = flat.producers[value]
    return "" if producer < 0 else str(label_of(flat.items[producer].node))


def _forms(
    matched: ModelMatching, come: Sequence[int], gone: Sequence[int], paired: Mapping[int, int]
) -> dict[int, tuple[str, tuple[int, ...]]]:
    """New tensors that hold weights of the first model in another form, as (form, the weights).

    The weight of a reshaped or transposed tensor is found by its content: it is the tensor `paired` with the new one or
    any tensor of its size. The weights of a merged or folded tensor are read from its annotations, if onnxline made it.
    """
    before, after = matched.nodes.before, matched.nodes.after
    by_name = _tensors_by_name(before)
    forms = TensorForms(matched.before, {old: before.tensors[old] for old in (*gone, *before.tensors)})
    tensors: dict[int, tuple[str, tuple[int, ...]]] = {}
    for new in come:
        tensor = after.tensors[new]
        if tensor.data_type == TensorProto.STRING or math.prod(tensor.dims) < 2:
            continue
        digest = matched.after.digest(tensor)
        known = paired.get(new)
        own = forms if known is None else TensorForms(matched.before, {known: before.tensors[known]})
        form, old = own.find(tensor, digest) or ("", -1)
        sources = tuple(by_name[name] for name in annotations_of(tensor).replaced if name in by_name)
        if form:
            tensors[new] = form, (old,)
        elif sources and new not in paired and form_of(tensor) in ("cast", "merged", "folded"):
            tensors[new] = (form_of(tensor), sources)
    return tensors


def _tensors_by_name(before: FlatGraph) -> dict[str, int]:
    """{name: tensor id} of the first model; a tensor that is another form of one weight has that weight's name too."""
    by_name = {before.names[old]: old for old in before.tensors}
    for old, tensor in before.tensors.items():
        replaced = annotations_of(tensor).replaced
        if len(replaced) == 1:
            by_name.setdefault(replaced[0], old)
    return by_name


def _surplus(first: FlatGraph, other: FlatGraph) -> list[int]:
    """The initializers of `first` of which `other` has fewer copies, or none."""
    counts = Counter(other.value_digests[value] for value in other.tensors)
    namesakes = {(other.names[value], other.value_digests[value]) for value in other.tensors}
    copies: dict[int, list[int]] = defaultdict(list)
    for value in first.tensors:
        copies[first.value_digests[value]].append(value)
    surplus = []
    for digest, values in copies.items():
        # Among copies, the tensors without a namesake are surplus.
        ordered = sorted(values, key=lambda value: (first.names[value], digest) not in namesakes)
        surplus.extend(ordered[counts[digest] :])
    return surplus


def _distance(matched: ModelMatching, before: TensorProto, after: TensorProto) -> str:
    """`3 of 64 values differ, by up to 0.1`; empty for tensors of different types."""
    if format_tensor_type(before) != format_tensor_type(after):
        return ""
    if before.data_type == TensorProto.STRING:
        count = sum(old != new for old, new in zip(before.string_data, after.string_data, strict=False))
        return f"{count} of {len(after.string_data)} values differ"
    old, new = matched.before.array(before), matched.after.array(after)
    bits = [np.ascontiguousarray(array).view(np.uint8).reshape(old.size, -1) for array in (old, new)]
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
