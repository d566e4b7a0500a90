"""Compare two models by structure: what each pair of matched nodes has otherwise, and what has no counterpart."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import zip_longest
from typing import Final

from onnx import AttributeProto, NodeProto

from passes.canonical import Reading, function_digests
from passes.diff.found import AttributeChange, Diff, HeaderChange, InputChange, NodeLabel, Renaming, Replacement
from passes.diff.header import header_changes
from passes.diff.initializers import Stored, initializer_changes
from passes.diff.matched import Matched, match_models
from passes.provenance.places import place_of
from passes.provenance.wiring import ABSENT, Item, Wiring
from passes.spelled import spelled_attribute
from passes.weights import DetachedModel

__all__ = ["compare_matched", "compare_models", "label_of"]


def compare_models(
    before: DetachedModel, after: DetachedModel, readings: tuple[Reading, Reading] | None = None
) -> Diff:
    """What `after` has otherwise than `before`; `readings` are theirs, if they have been read already.

    Nodes are matched by what they compute, so other names, another order of independent nodes and other metadata are no
    difference. A node that only computes something else because of what it reads is none either.
    """
    return compare_matched(match_models(before, after, readings))


def compare_matched(matched: Matched) -> Diff:
    """`compare_models`, of models that have been matched."""
    attributes, rewired = [], []
    stored: list[Stored] = []
    for old, new in matched.pairs():
        item, old_item = matched.same.after.items[new], matched.same.before.items[old]
        if item.settings != old_item.settings:
            attributes.extend(_attribute_changes(matched, item, old_item))
        attributes.extend(_output_count(item, old_item))
        changed, tensors = _input_changes(matched, item, old_item)
        rewired.extend(changed)
        stored.extend(tensors)
    header = [*header_changes(matched.before.proto, matched.after.proto), *_functions(matched), *_sources(matched)]
    found = Diff(
        replaced=tuple(_replacements(matched)),
        attributes=tuple(attributes),
        rewired=tuple(rewired),
        initializers=tuple(initializer_changes(matched, stored)),
        header=tuple(header),
        renamed=tuple(dict.fromkeys(_renamings(matched))),
    )
    return found if not found.is_empty else replace(found, header=tuple(_beside(matched)))


def _functions(matched: Matched) -> Iterator[HeaderChange]:
    old, new = (
        function_digests(model, reading)
        for model, reading in zip((matched.before, matched.after), matched.readings, strict=True)
    )
    for name in dict.fromkeys((*old, *new)):
        if old.get(name) != new.get(name):
            told = [f"({one[name][:SHOWN]})" if name in one else "" for one in (old, new)]
            yield HeaderChange(f"function {name}", *told)


def _sources(matched: Matched) -> Iterator[HeaderChange]:
    """Outputs, by name, that another node makes."""
    same = matched.same
    for name, old in same.before.outputs.items():
        new = same.after.outputs.get(name)
        if new is not None and not _is_same_value(matched, old, new):
            yield HeaderChange(f"what output {name} is", _maker(same.before, old), _maker(same.after, new))


def _maker(wiring: Wiring, value: int) -> str:
    maker = wiring.makers[value]
    if maker < 0:
        return wiring.names[value]
    item = wiring.items[maker]
    return f"{label_of(item.node)}" + (f", output {item.makes.index(value)}" if len(item.makes) > 1 else "")


def _beside(matched: Matched) -> Iterator[HeaderChange]:
    """What is left to tell of models that are the same node by node: which of several equal values is read."""
    first, second = matched.readings
    if first.canonical == second.canonical:
        return
    reads = [_reads(wiring) for wiring in (matched.same.before, matched.same.after)]
    told = [meaning for meaning in reads[0] if meaning in reads[1] and reads[0][meaning][1] != reads[1][meaning][1]]
    for meaning in told:
        counts = [", ".join(map(str, one[meaning][1])) for one in reads]
        yield HeaderChange(f"how often values equal to that of {reads[0][meaning][0]} are read", *counts)
    if not told:
        yield HeaderChange("digest", f"({first.canonical[:SHOWN]})", f"({second.canonical[:SHOWN]})")


def _reads(wiring: Wiring) -> dict[int, tuple[str, list[int]]]:
    """Meaning → the first value that has it, and how often each of them is read."""
    found: dict[int, tuple[str, list[int]]] = {}
    outputs = Counter(wiring.outputs.values())
    for value, meaning in enumerate(wiring.value_meanings):
        found.setdefault(meaning, (wiring.names[value], []))[1].append(len(wiring.users[value]) + outputs[value])
    return {meaning: (name, sorted(counts, reverse=True)) for meaning, (name, counts) in found.items()}


def label_of(node: NodeProto) -> NodeLabel:
    place = place_of(node)
    name = node.name or next((name for name in node.output if name), "")
    op = f"{node.domain}::{node.op_type}" if node.domain not in ("", "ai.onnx") else node.op_type
    return NodeLabel(op, name, place.paths[-1] if place is not None and place.paths else "")


def _replacements(matched: Matched) -> Iterator[Replacement]:
    before, after = matched.same.before.items, matched.same.after.items
    for olds, news in matched.groups:
        yield Replacement(
            tuple(label_of(before[old].node) for old in olds), tuple(label_of(after[new].node) for new in news)
        )


def _attribute_changes(matched: Matched, item: Item, old_item: Item) -> Iterator[AttributeChange]:
    old, new = _attributes(old_item.node), _attributes(item.node)
    for name in dict.fromkeys((*old, *new)):
        if name in old and name in new and _is_same(matched, old[name], new[name]):
            continue
        before, after = (spelled_attribute(one[name]) if name in one else "" for one in (old, new))
        if before == after:  # too long to be written out
            before, after = (f"{before} #{_digest(one[name])}" for one in (old, new))
        yield AttributeChange(label_of(item.node), name, before, after)


def _digest(attribute: AttributeProto) -> str:
    return hashlib.blake2b(attribute.SerializeToString(deterministic=True), digest_size=3).hexdigest()


def _output_count(item: Item, old_item: Item) -> Iterator[AttributeChange]:
    """Optional outputs that a node makes or not; on them may depend what it computes, as of Split."""
    old, new = ([bool(name) for name in one.node.output] for one in (old_item, item))
    if old != new:
        yield AttributeChange(label_of(item.node), "outputs", str(sum(old)), str(sum(new)))


def _attributes(node: NodeProto) -> Mapping[str, AttributeProto]:
    return {attribute.name: attribute for attribute in node.attribute}


def _is_same(matched: Matched, old: AttributeProto, new: AttributeProto) -> bool:
    if old.type != new.type:
        return False
    if old.type in (AttributeProto.TENSOR, AttributeProto.TENSORS) and not old.ref_attr_name:
        told = [
            [(list(tensor.dims), tensor.data_type, model.digest(tensor)) for tensor in (one.tensors or [one.t])]
            for one, model in ((old, matched.before), (new, matched.after))
        ]
        return told[0] == told[1]
    if old.type in (AttributeProto.GRAPH, AttributeProto.GRAPHS):  # its nodes are among the others
        return len(old.graphs) == len(new.graphs)
    bare = []
    for one in (old, new):
        copy = AttributeProto()
        copy.CopyFrom(one)
        copy.ClearField("doc_string")
        bare.append(copy.SerializeToString(deterministic=True))
    return bare[0] == bare[1]


def _input_changes(matched: Matched, item: Item, old_item: Item) -> tuple[list[InputChange], list[Stored]]:
    """The places where a node reads something else; stored tensors that have other values there, as pairs of ids."""
    same = matched.same
    changed, stored = [], []
    for position, (old, new) in enumerate(zip_longest(old_item.needs, item.needs, fillvalue=ABSENT)):
        if old in same.before.shapes and new in same.after.shapes:
            meaning, old_meaning = same.after.value_meanings[new], same.before.value_meanings[old]
            if meaning == old_meaning:
                continue
            if meaning not in matched.old_meanings or same.after.names[new] == same.before.names[old]:
                stored.append((old, new))
                continue
        elif (new != ABSENT and old != ABSENT and _is_same_value(matched, old, new)) or new == old == ABSENT:
            continue
        before, after = _name(same.before, old), _name(same.after, new)
        inner = position - len(item.node.input)
        what = f"input {position}" if inner < 0 else f"result {inner} of its bodies"
        changed.append(InputChange(label_of(item.node), position, before, after, what))
    return changed, stored


def _is_same_value(matched: Matched, old: int, new: int) -> bool:
    """Whether both are one value, or follow from nodes that came or went: those are told themselves."""
    same = matched.same
    known = same.known(new)
    if same.before.makers[old] < 0 and same.after.makers[new] < 0:  # inputs, and what is stored
        return same.before.value_meanings[old] == same.after.value_meanings[new]
    if known >= 0:
        return known == same.alike(old) or known in _behind_lost(matched, old)
    maker = same.after.makers[new]
    return maker >= 0 and same.old_of[maker] < 0


def _behind_lost(matched: Matched, value: int) -> set[int]:
    """What a value was computed from by nodes that are gone: with them gone, that stands in its place."""
    same, found, front = matched.same, set(), [value]
    while front:
        maker = same.before.makers[front.pop()]
        if maker >= 0 and same.lost(maker):
            needs = [one for one in same.before.items[maker].needs if one != ABSENT and same.alike(one) not in found]
            found.update(map(same.alike, needs))
            front.extend(needs)
    return found


def _name(wiring: Wiring, value: int) -> str:
    return "" if value == ABSENT else wiring.names[value]


def _renamings(matched: Matched) -> Iterator[Renaming]:
    before, after = matched.same.before, matched.same.after
    for old, new in matched.pairs():
        item, old_item = after.items[new], before.items[old]
        if item.node.name != old_item.node.name:
            yield Renaming("node", old_item.node.name, item.node.name)
        for one, other in zip(item.makes, old_item.makes, strict=False):
            if ABSENT not in (one, other) and after.names[one] != before.names[other]:
                yield Renaming("value", before.names[other], after.names[one])
        for one, other in zip(item.needs, old_item.needs, strict=False):
            if _is_initializer(after, one) and _is_initializer(before, other):
                is_same = after.value_meanings[one] == before.value_meanings[other]
                if is_same and after.names[one] != before.names[other]:
                    yield Renaming("initializer", before.names[other], after.names[one])


def _is_initializer(wiring: Wiring, value: int) -> bool:
    return value in wiring.shapes and wiring.makers[value] < 0


SHOWN: Final = 8
"""Digits of a digest."""
