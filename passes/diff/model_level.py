"""Model-level differences: opsets, inputs, outputs, functions, names, and which of equal values is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final

from onnx import ModelProto, ValueInfoProto

from passes.diff.model_matching import ModelMatching
from passes.diff.types import HeaderChange, Renaming, label_of
from passes.graph.formatting import format_type
from passes.matching.graph_index import ABSENT, GraphIndex
from passes.model.canonical import function_digests

__all__ = ["function_changes", "header_changes", "output_changes", "renamings", "sharing_changes"]


def function_changes(matched: ModelMatching) -> Iterator[HeaderChange]:
    """Model-local functions that were added or removed, or compute something else."""
    old, new = (
        function_digests(model, reading)
        for model, reading in zip((matched.before, matched.after), matched.readings, strict=True)
    )
    for name in dict.fromkeys((*old, *new)):
        if old.get(name) != new.get(name):
            digests = [f"({one[name][:SHOWN]})" if name in one else "" for one in (old, new)]
            yield HeaderChange(f"function {name}", *digests)


def output_changes(matched: ModelMatching) -> Iterator[HeaderChange]:
    """Outputs that, under the same name, another node makes."""
    same = matched.same
    for name, old in same.before.outputs.items():
        new = same.after.outputs.get(name)
        if new is not None and not matched.is_same_value(old, new):
            yield HeaderChange(f"what output {name} is", _maker(same.before, old), _maker(same.after, new))


def _maker(wiring: GraphIndex, value: int) -> str:
    maker = wiring.makers[value]
    if maker < 0:
        return wiring.names[value]
    item = wiring.items[maker]
    return f"{label_of(item.node)}" + (f", output {item.makes.index(value)}" if len(item.makes) > 1 else "")


def sharing_changes(matched: ModelMatching) -> Iterator[HeaderChange]:
    """For models that are equal node by node: which of several equal values is read."""
    first, second = matched.readings
    if first.canonical == second.canonical:
        return
    reads = [_reads(wiring) for wiring in (matched.same.before, matched.same.after)]
    changed = [meaning for meaning in reads[0] if meaning in reads[1] and reads[0][meaning][1] != reads[1][meaning][1]]
    for meaning in changed:
        counts = [", ".join(map(str, one[meaning][1])) for one in reads]
        yield HeaderChange(f"how often values equal to that of {reads[0][meaning][0]} are read", *counts)
    if not changed:
        yield HeaderChange("digest", f"({first.canonical[:SHOWN]})", f"({second.canonical[:SHOWN]})")


def _reads(wiring: GraphIndex) -> dict[int, tuple[str, list[int]]]:
    """Meaning → its first value, and how often each of its values is read."""
    found: dict[int, tuple[str, list[int]]] = {}
    outputs = Counter(wiring.outputs.values())
    for value, meaning in enumerate(wiring.value_meanings):
        found.setdefault(meaning, (wiring.names[value], []))[1].append(len(wiring.users[value]) + outputs[value])
    return {meaning: (name, sorted(counts, reverse=True)) for meaning, (name, counts) in found.items()}


SHOWN: Final = 8
"""Digits of a digest."""


def header_changes(before: ModelProto, after: ModelProto) -> Iterator[HeaderChange]:
    """Changes of versions, inputs and outputs. The latter are compared by name, as callers find them, and by order."""
    for describe in (_versions, _inputs, _outputs):
        old, new = describe(before), describe(after)
        for what in dict.fromkeys((*old, *new)):
            follows = what.startswith("order") and old.keys() != new.keys()
            if old.get(what) != new.get(what) and not follows:
                yield HeaderChange(what, old.get(what, ""), new.get(what, ""))


def _versions(model: ModelProto) -> Mapping[str, str]:
    opsets = {f"opset {entry.domain or 'ai.onnx'}": str(entry.version) for entry in model.opset_import}
    return {"IR version": str(model.ir_version), **opsets}


def _inputs(model: ModelProto) -> Mapping[str, str]:
    stored = {tensor.name for tensor in model.graph.initializer}
    found = _signature("input", [info for info in model.graph.input if info.name not in stored])
    optional = [info for info in model.graph.input if info.name in stored]
    return {**found, **{f"input {info.name}": f"{format_type(info)}, has a default" for info in optional}}


def _outputs(model: ModelProto) -> Mapping[str, str]:
    return _signature("output", list(model.graph.output))


def _signature(what: str, infos: list[ValueInfoProto]) -> Mapping[str, str]:
    types = {f"{what} {info.name}": format_type(info) for info in infos}
    return {**types, f"order of {what}s": ", ".join(info.name for info in infos)}


def renamings(matched: ModelMatching) -> Iterator[Renaming]:
    """Matched nodes, values and initializers whose names differ."""
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


def _is_initializer(wiring: GraphIndex, value: int) -> bool:
    return value in wiring.shapes and wiring.makers[value] < 0
