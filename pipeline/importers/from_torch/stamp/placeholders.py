"""Parameters, buffers, constants and inputs of the whole graph, in torch's order, from those of the shortened one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from pipeline.importers.from_torch.stamp.run import TRACED, Run
from pipeline.importers.from_torch.stamp.unsuited import Unsuited
from pipeline.ir import Graph, Role, Value

__all__ = ["Placeholder", "repeated_stores"]

LIFTED = re.compile(r"(?:.*\.)?lifted_tensor_(\d+)")
"""What torch calls a constant that the code made: its module, and a number that goes through the whole model."""


@dataclass(frozen=True, slots=True)
class Placeholder:
    """`value` of the shortened graph as it stands in `unit`, or None where it is outside of the units from 1 on."""

    value: Value
    unit: int | None
    name: str
    target: str
    """Its name in the module."""


def repeated_stores(run: Run, graph: Graph) -> list[Placeholder]:
    """All but inputs. What belongs to unit 1 stands together there, and again for each further unit.

    Raises:
        Unsuited: a name that torch made in another way than this file knows.
    """
    stores = [value for value in graph.values if value.producer is None and value.role is not Role.INPUT]
    found: list[Placeholder] = []
    for inside, group in groupby(stores, lambda value: _unit_of(run, graph, value) == 1):
        values = [_as_traced(graph, value) for value in group]
        found += _repeated(run, values) if inside else values
    return _renumbered(run, found)


def _as_traced(graph: Graph, value: Value) -> Placeholder:
    target = _target(graph, value)
    if value.name[2:] != _cleaned(target):
        raise Unsuited(f"torch calls {target} {value.name}, since another has its name")
    return Placeholder(value, None, value.name, target)


def _repeated(run: Run, ones: Sequence[Placeholder]) -> list[Placeholder]:
    """For each unit from 1 on. Names are cleaned in parts, since a large model has 70,000 of them."""
    found = []
    parts = [(one.value, one.name[:2], place[1], place[2]) for one in ones if (place := run.locate(one.target))]
    cleaned = [_cleaned(rest) for *_, rest in parts]
    for unit in range(1, run.count):
        paths = [run.layer(unit, offset) for offset in run.offsets]
        names = [_cleaned(path) for path in paths]
        for (value, prefix, offset, rest), tail in zip(parts, cleaned, strict=True):
            found.append(Placeholder(value, unit, f"{prefix}{names[offset]}{tail}", f"{paths[offset]}{rest}"))
    return found


def _renumbered(run: Run, stores: Sequence[Placeholder]) -> list[Placeholder]:
    """With the numbers of lifted constants as a trace of the whole would give them."""
    own = sorted(number for one in stores if one.unit == 1 and (number := _number(one.target)) is not None)
    if not own:
        return list(stores)
    if own != list(range(own[0], own[0] + len(own))):
        raise Unsuited("the constants of a layer are not numbered one after the other")
    return [_shifted(one, len(own), own[-1], run.count) for one in stores]


def _shifted(one: Placeholder, each: int, last: int, count: int) -> Placeholder:
    number = _number(one.target)
    if number is None:
        return one
    before = one.unit - 1 if one.unit is not None else (count - TRACED) * (number > last)
    target = one.target.removesuffix(str(number)) + str(number + before * each)
    return replace(one, name=one.name[:2] + _cleaned(target), target=target)


def _number(target: str) -> int | None:
    found = LIFTED.fullmatch(target)
    return None if found is None else int(found[1])


def _cleaned(target: str) -> str:
    """As torch cleans a name. (`self_…` and `L__self___…`, which it also cuts, are no names that a module gets.)"""
    return re.sub(r"[^a-z0-9]", "_", target.lower())


def _target(graph: Graph, value: Value) -> str:
    if value.vid not in graph.sources:
        raise Unsuited(f"torch keeps the tensor {value.name} beside the graph")
    return graph.sources[value.vid][0]


def _unit_of(run: Run, graph: Graph, value: Value) -> int | None:
    place = run.locate(_target(graph, value))
    return None if place is None else place[0]
