"""What is otherwise of the models as a whole: functions, what their outputs are, and what no node tells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from passes.diff.found import HeaderChange
from passes.diff.inputs import is_same_value
from passes.diff.labels import label_of
from passes.diff.matched import Matched
from passes.model.canonical import function_digests
from passes.provenance.wiring import Wiring

__all__ = ["function_changes", "output_changes", "sharing_changes"]


def function_changes(matched: Matched) -> Iterator[HeaderChange]:
    """The models' own functions that came, went, or compute something else."""
    old, new = (
        function_digests(model, reading)
        for model, reading in zip((matched.before, matched.after), matched.readings, strict=True)
    )
    for name in dict.fromkeys((*old, *new)):
        if old.get(name) != new.get(name):
            told = [f"({one[name][:SHOWN]})" if name in one else "" for one in (old, new)]
            yield HeaderChange(f"function {name}", *told)


def output_changes(matched: Matched) -> Iterator[HeaderChange]:
    """Outputs, by name, that another node makes."""
    same = matched.same
    for name, old in same.before.outputs.items():
        new = same.after.outputs.get(name)
        if new is not None and not is_same_value(matched, old, new):
            yield HeaderChange(f"what output {name} is", _maker(same.before, old), _maker(same.after, new))


def _maker(wiring: Wiring, value: int) -> str:
    maker = wiring.makers[value]
    if maker < 0:
        return wiring.names[value]
    item = wiring.items[maker]
    return f"{label_of(item.node)}" + (f", output {item.makes.index(value)}" if len(item.makes) > 1 else "")


def sharing_changes(matched: Matched) -> Iterator[HeaderChange]:
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


SHOWN: Final = 8
"""Digits of a digest."""
