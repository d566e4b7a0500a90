"""Write the Graph of the whole model from that of the shortened one, whose second unit is repeated.

Names are numbered again, and parameters, buffers, constants and inputs keep torch's order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import TypeAlias

import torch
from torch import nn

from pipeline.importers.from_torch.layer_dedup.layer_runs import TRACED, LayerRun, NotRepeatable
from pipeline.importers.from_torch.layer_dedup.meta_trace import Call
from pipeline.importers.from_torch.layer_dedup.proof import KeptOutput, Leaving, Proof, RepeatedOutput
from pipeline.importers.from_torch.operators import Names, base_name
from pipeline.importers.from_torch.tensors import TensorPayload, holds_values
from pipeline.ir import Graph, Op, Payload, Role, Value
from pipeline.ir.builder import GraphFacts, ValueDecl, assemble


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """A module, its call, and the `tied` names and `constants` that `from_torch` takes."""

    module: nn.Module
    call: Call
    tied: Mapping[str, Sequence[str]]
    constants: Mapping[str, torch.Tensor]


def whole_graph(
    run: LayerRun, short: Graph, part: Call, whole: ModuleCall, proof: Proof, outputs: Sequence[Leaving]
) -> Graph:
    """The Graph that a trace of `whole` would give; `short` is that of the shortened module, called with `part`.

    Raises:
        NotRepeatable: torch traced something that does not follow from the proof.
    """
    return _Writer(run, short, part, whole, proof).graph(outputs)


@dataclass(frozen=True, slots=True)
class Blocks:
    """The two traced units. `second` are the oids of the repeated unit, ops between both units included."""

    second: range
    descendants: Mapping[int, int]
    """{vid that the first unit makes: the corresponding vid of the second}"""


def blocks_of(run: LayerRun, graph: Graph) -> Blocks:
    """
    Raises:
        NotRepeatable: the ops of both units are mixed, or are not the same.
    """
    if any(body.payloads for op in graph.ops for body in op.bodies):
        raise NotRepeatable("a region of autocast, of a mode of gradients or of cond holds a constant of its own")
    units = {op.oid: unit for op in graph.ops if (unit := _unit_of(run, op)) is not None}
    first, second = ([oid for oid, unit in units.items() if unit == wanted] for wanted in (0, 1))
    if not first or not second:
        raise NotRepeatable("torch does not say which ops belong to which layer")
    if first[-1] > second[0]:
        raise NotRepeatable("torch lists the ops of two layers mixed")
    block = range(first[-1] + 1, second[-1] + 1)
    if run.led and len(block) > block.start:
        raise NotRepeatable("torch lists the ops of two layers mixed")
    own = graph.ops[first[-1] + 1 - len(block) if run.led else first[0] : first[-1] + 1]
    return Blocks(block, _descendants(graph, own, graph.ops[block.stop - len(own) : block.stop]))


def _unit_of(run: LayerRun, op: Op) -> int | None:
    """The unit of an op. A region (autocast, a mode of gradients) has no module: it belongs to the unit of its ops."""
    place = run.locate(op.origin)
    inner = {_unit_of(run, inner_op) for body in op.bodies for inner_op in body.ops} - {None}
    if len(inner) > 1:
        raise NotRepeatable("several layers are in one region of autocast or of a mode of gradients")
    return place[0] if place is not None else next(iter(inner), None)


def _descendants(graph: Graph, first: tuple[Op, ...], second: tuple[Op, ...]) -> dict[int, int]:
    descendants: dict[int, int] = {}
    for op, same_op in zip(first, second, strict=True):
        if _op_facts(graph, op) != _op_facts(graph, same_op):
            raise NotRepeatable(f"the first two layers are not traced alike: {op.name!r} and {same_op.name!r} differ")
        descendants.update(zip(op.outputs, same_op.outputs, strict=True))
    return descendants


def _op_facts(graph: Graph, op: Op) -> tuple[object, ...]:
    """What equal ops of two units share: everything but names and module paths, in bodies too."""
    made = [graph.values[vid] for vid in op.outputs]
    return op.kind, op.attrs, op.line, [(value.spec, value.strides) for value in made], [*map(_inside, op.bodies)]


def _inside(body: Graph) -> tuple[object, ...]:
    ops = [(*_op_facts(body, op), op.inputs, op.outputs) for op in body.ops]
    return body.name, body.inputs, body.outputs, ops


LIFTED = re.compile(r"(?:.*\.)?lifted_tensor_(\d+)")
"""torch's name of a constant made by the code: its module, and a number that counts over the whole model."""


@dataclass(frozen=True, slots=True)
class Placeholder:
    """A placeholder of the whole graph: `value` of the shortened one, for `unit` (None: not in units 1, 2, …)."""

    value: Value
    unit: int | None
    name: str
    target: str
    """Its name in the module."""


def repeat_stores(run: LayerRun, graph: Graph) -> list[Placeholder]:
    """All placeholders except inputs; the group that belongs to unit 1 is repeated for each further unit.

    Raises:
        NotRepeatable: a name that torch made in another way than this file knows.
    """
    stores = [value for value in graph.values if value.producer is None and value.role is not Role.INPUT]
    found: list[Placeholder] = []
    for inside, group in groupby(stores, lambda value: _unit_of_value(run, graph, value) == 1):
        values = [_as_traced(graph, value) for value in group]
        found += _repeat_in_units(run, values) if inside else values
    return _renumber_constants(run, found)


def _as_traced(graph: Graph, value: Value) -> Placeholder:
    target = _target(graph, value)
    if value.name[2:] != _clean_name(target):
        raise NotRepeatable(f"torch calls {target} {value.name}, since another has its name")
    return Placeholder(value, None, value.name, target)


def _repeat_in_units(run: LayerRun, stores: Sequence[Placeholder]) -> list[Placeholder]:
    """Placeholders of each unit but the first. Names are cleaned in parts, since a large model has 70,000 of them."""
    found = []
    parts = [
        (store.value, store.name[:2], place[1], place[2]) for store in stores if (place := run.locate(store.target))
    ]
    cleaned = [_clean_name(rest) for *_, rest in parts]
    for unit in range(1, run.count):
        paths = [run.layer(unit, offset) for offset in run.offsets]
        names = [_clean_name(path) for path in paths]
        for (value, prefix, offset, rest), tail in zip(parts, cleaned, strict=True):
            found.append(Placeholder(value, unit, f"{prefix}{names[offset]}{tail}", f"{paths[offset]}{rest}"))
    return found


def _renumber_constants(run: LayerRun, stores: Sequence[Placeholder]) -> list[Placeholder]:
    """Number lifted constants as a trace of the whole model would."""
    own = sorted(number for store in stores if store.unit == 1 and (number := _number(store.target)) is not None)
    if not own:
        return list(stores)
    if own != list(range(own[0], own[0] + len(own))):
        raise NotRepeatable("the constants of a layer are not numbered one after the other")
    return [_renumber(store, len(own), own[-1], run.count) for store in stores]


def _renumber(store: Placeholder, step: int, last: int, count: int) -> Placeholder:
    number = _number(store.target)
    if number is None:
        return store
    before = store.unit - 1 if store.unit is not None else (count - TRACED) * (number > last)
    target = store.target.removesuffix(str(number)) + str(number + before * step)
    return replace(store, name=store.name[:2] + _clean_name(target), target=target)


def _number(target: str) -> int | None:
    found = LIFTED.fullmatch(target)
    return None if found is None else int(found[1])


def _clean_name(target: str) -> str:
    """Clean a name as torch does. (`self_…` and `L__self___…`, which torch also cuts, are no names of modules.)"""
    return re.sub(r"[^a-z0-9]", "_", target.lower())


def _target(graph: Graph, value: Value) -> str:
    if value.vid not in graph.sources:
        raise NotRepeatable(f"torch keeps the tensor {value.name} outside of the graph")
    return graph.sources[value.vid][0]


def _unit_of_value(run: LayerRun, graph: Graph, value: Value) -> int | None:
    place = run.locate(_target(graph, value))
    return None if place is None else place[0]


Reading: TypeAlias = Callable[[int], int]
"""vid of the shortened graph → vid of the whole one."""


class _Writer:
    """Declares stored tensors, then inputs, then writes the ops of the whole graph."""

    def __init__(self, run: LayerRun, short: Graph, part: Call, whole: ModuleCall, proof: Proof) -> None:
        self._run = run
        self._short = short
        self._whole = whole
        self._proof = proof
        self._blocks = blocks_of(run, short)
        self._vid_of = dict(zip(part.tensors(), short.inputs, strict=True))
        """{key of an input: its vid in the shortened graph}"""
        self._stubs: list[ValueDecl] = []
        self._ops: list[Op] = []
        self._sources: dict[int, tuple[str, ...]] = {}
        self._payloads: dict[str, Payload] = {}
        self._around: dict[int, int] = {}
        """{vid outside of units 1 and later: its vid in the whole graph}"""
        self._own: list[dict[int, int]] = [{} for _ in range(run.count)]
        """For each unit {vid that unit 1 makes or stores: the corresponding vid of this unit}."""
        self._given: list[dict[int, int]] = [{} for _ in range(run.count)]
        """The same for the model's inputs that unit 1 reads."""

    def graph(self, leaving: Sequence[Leaving]) -> Graph:
        for item in repeat_stores(self._run, self._short):
            self._store(item)
        inputs = self._declare_inputs()
        self._write_ops()
        updates = dict(sorted(self._updates()))
        outputs = [self._output(item, inputs, updates) for item in leaving]
        facts = GraphFacts(updates, self._sources)
        return assemble(
            self._short.name, self._stubs, self._ops, list(inputs.values()), outputs, self._payloads, facts=facts
        )

    def _store(self, item: Placeholder) -> None:
        """Declare a parameter, buffer or constant."""
        vid = self._declare(item.value, item.name)
        (self._around if item.unit is None else self._own[item.unit])[item.value.vid] = vid
        self._sources[vid] = (item.target, *self._whole.tied.get(item.target, ()))
        payload = self._short.payloads.get(item.value.vid)
        if payload is not None and item.unit is not None:
            payload = self._own_payload(item.target, payload)
        if payload is not None:
            self._payloads[item.name] = payload

    def _own_payload(self, target: str, payload: Payload) -> Payload | None:
        """The unit's own buffer or attribute; a constant that the code makes is equal in all units."""
        path, _, name = target.rpartition(".")
        held = self._whole.constants.get(target, getattr(self._whole.module.get_submodule(path), name, None))
        if not isinstance(held, torch.Tensor):
            return payload
        return TensorPayload(held) if holds_values(held) else None

    def _declare_inputs(self) -> dict[int, int]:
        """{key: vid in the whole graph}, in the order of the call."""
        spare, tensors = self._whole.call.spare(self._whole.module), self._whole.call.tensors()
        like = {other: key for renamed in reversed(self._proof.inputs) for key, other in renamed.items()}
        found = {}
        for key, tensor in tensors.items():
            model = key if key in self._vid_of else like[key]
            if _look(tensor) != _look(tensors[like.get(key, key)]):
                raise NotRepeatable(f"the layers' inputs differ: {_look(tensor)}, {_look(tensors[like[key]])}")
            value = self._short.values[self._vid_of[model]]
            found[key] = self._declare(value, spare.get(key, value.name))
        for key, vid in self._vid_of.items():
            self._around[vid] = found[key]
        for unit, renamed in enumerate(self._proof.inputs, start=1):
            for key, other in renamed.items():
                self._given[unit][self._vid_of[key]] = found[other]
        return found

    def _updates(self) -> Iterator[tuple[int, int]]:
        """(state or input, its value after the run): for each unit if unit 1 writes it, else once."""
        written = {vid for oid in self._blocks.second for vid in self._short.ops[oid].outputs}
        for state, after in self._short.updates.items():
            if after not in written:
                yield self._read_around(state), self._read_around(after)
                continue
            for unit in range(1, self._run.count):
                yield self._read_within(unit, state), self._read_within(unit, after)

    def _write_ops(self) -> None:
        names = Names(stub.name for stub in self._stubs)
        ops, second = self._short.ops, self._blocks.second
        for op in ops[: second.start]:
            self._write(op, names, self._read_around, self._around)
        for unit in range(1, self._run.count):
            reading = partial(self._read_within, unit)
            for op in ops[second.start : second.stop]:
                self._write(self._move_to_unit(op, unit), names, reading, self._own[unit])
        for op in ops[second.stop :]:
            self._write(op, names, self._read_after, self._around)

    def _read_around(self, vid: int) -> int:
        """The vid that ops outside of the units read for `vid`; for a value of unit 1, that of the last unit."""
        own = self._own[-1].get(vid)
        return self._around[vid] if own is None else own

    def _read_within(self, unit: int, vid: int) -> int:
        """The vid that `unit`, 1 or later, reads for `vid` of unit 1; a value of unit 0 is that of the unit before."""
        for known in (self._own[unit], self._given[unit]):
            if vid in known:
                return known[vid]
        descendant = self._blocks.descendants.get(vid)
        return self._around[vid] if descendant is None or unit == 1 else self._own[unit - 1][descendant]

    def _read_after(self, vid: int) -> int:
        """The vid that ops after the units read for `vid`; for a value of unit 0, that of the last but one unit.

        (The proof accepts values counted from the end, as `hidden_states[-2]`, and refuses those from the start.)
        """
        descendant = self._blocks.descendants.get(vid)
        return self._read_around(vid) if descendant is None or self._run.count == TRACED else self._own[-2][descendant]

    def _write(self, op: Op, names: Names, reading: Reading, made: dict[int, int]) -> None:
        name = names.new(base_name(op.kind))
        for vid in op.outputs:
            value = self._short.values[vid]
            made[vid] = self._declare(value, self._result_name(op, value, name, names))
        inputs, outputs = tuple(map(reading, op.inputs)), tuple(made[vid] for vid in op.outputs)
        self._ops.append(replace(op, oid=len(self._ops), inputs=inputs, outputs=outputs, name=name))

    def _result_name(self, op: Op, value: Value, name: str, names: Names) -> str:
        """A single result has the op's name; several have the name and their index, made unique."""
        rest = value.name.removeprefix(op.name)
        return names.new(f"{name}_{rest.split('_')[1]}") if rest else name

    def _move_to_unit(self, op: Op, unit: int) -> Op:
        """`op` with the module paths of this unit, in its bodies too."""
        place = self._run.locate(op.origin)
        origin = op.origin if place is None or place[0] != 1 else self._run.layer(unit, *place[1:])
        bodies = [replace(body, ops=tuple(self._move_to_unit(inner, unit) for inner in body.ops)) for body in op.bodies]
        return replace(op, origin=origin, bodies=tuple(bodies))

    def _declare(self, like: Value, name: str) -> int:
        self._stubs.append(ValueDecl(name, like.spec, like.role, like.strides))
        return len(self._stubs) - 1

    def _output(self, item: Leaving, inputs: Mapping[int, int], updates: Mapping[int, int]) -> int:
        match item:
            case RepeatedOutput(place, unit):
                return self._read_within(unit, self._short.outputs[place])
            case KeptOutput(place):
                return self._read_around(self._short.outputs[place])
            case ("given", int(key)):
                return updates.get(inputs[key], inputs[key])
            case ("stored", name):
                vid = next(vid for vid, names in self._sources.items() if names[0] == name)
                return updates.get(vid, vid)
        raise AssertionError(item)


def _look(tensor: torch.Tensor) -> tuple[object, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device
