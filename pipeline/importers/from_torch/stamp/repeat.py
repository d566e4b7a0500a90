"""The ops of the whole graph, written from the shortened one: the second unit again and again, names counted afresh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from pipeline.importers.from_torch.operators import Names, base_name
from pipeline.importers.from_torch.stamp.blocks import Blocks
from pipeline.importers.from_torch.stamp.placeholders import Placeholder
from pipeline.importers.from_torch.stamp.run import TRACED, Run
from pipeline.ir import Graph, Op, Value
from pipeline.ir.assemble import Stub

__all__ = ["Repeater"]

Reading: TypeAlias = Callable[[int], int]
"""vid of the shortened graph → vid of the whole one."""


class Repeater:
    """Declare what is stored and given first, then `write` the ops."""

    def __init__(self, run: Run, short: Graph, blocks: Blocks) -> None:
        self.stubs: list[Stub] = []
        self.ops: list[Op] = []
        self._run = run
        self._short = short
        self._blocks = blocks
        self._around: dict[int, int] = {}
        """{vid of what is not in a unit from 1 on: its vid in the whole graph}"""
        self._own: list[dict[int, int]] = [{} for _ in range(run.count)]
        """For each unit {vid of what unit 1 makes or stores: vid of what this unit has in its place}."""
        self._given: list[dict[int, int]] = [{} for _ in range(run.count)]
        """The same for the model's inputs that unit 1 reads."""

    def store(self, one: Placeholder) -> int:
        """Declare a parameter, buffer or constant."""
        vid = self._declare(one.value, one.name)
        (self._around if one.unit is None else self._own[one.unit])[one.value.vid] = vid
        return vid

    def give(self, like: Value, name: str) -> int:
        """Declare an input that looks like this one of the shortened graph."""
        return self._declare(like, name)

    def bind(self, vid: int, given: int, unit: int | None = None) -> None:
        """Where the shortened graph reads the input `vid` the whole reads `given`: in this unit, or outside of all."""
        (self._around if unit is None else self._given[unit])[vid] = given

    def write(self) -> None:
        """Write the ops. Everything has been declared."""
        names = Names(stub.name for stub in self.stubs)
        ops, second = self._short.ops, self._blocks.second
        for op in ops[: second.start]:
            self._write(op, names, self.around, self._around)
        for unit in range(1, self._run.count):
            reading = partial(self.within, unit)
            for op in ops[second.start : second.stop]:
                self._write(self._moved(op, unit), names, reading, self._own[unit])
        for op in ops[second.stop :]:
            self._write(op, names, self._after, self._around)

    def around(self, vid: int) -> int:
        """What `vid` is before and after the units; of what unit 1 makes, the last is meant."""
        own = self._own[-1].get(vid)
        return self._around[vid] if own is None else own

    def within(self, unit: int, vid: int) -> int:
        """What `vid` of unit 1 is in this unit, 1 or later. What the first unit makes, the unit before makes here."""
        for known in (self._own[unit], self._given[unit]):
            if vid in known:
                return known[vid]
        heir = self._blocks.heirs.get(vid)
        return self._around[vid] if heir is None or unit == 1 else self._own[unit - 1][heir]

    def _after(self, vid: int) -> int:
        """What `vid` is for an op that stands after the units: what the first unit makes, the last but one makes here.

        (The proof has counted from the end: `hidden_states[-2]`. What is counted from the start it has refused.)
        """
        heir = self._blocks.heirs.get(vid)
        return self.around(vid) if heir is None or self._run.count == TRACED else self._own[-2][heir]

    def _write(self, op: Op, names: Names, reading: Reading, made: dict[int, int]) -> None:
        name = names.new(base_name(op.kind))
        for vid in op.outputs:
            value = self._short.values[vid]
            made[vid] = self._declare(value, self._result_name(op, value, name, names))
        inputs, outputs = tuple(map(reading, op.inputs)), tuple(made[vid] for vid in op.outputs)
        self.ops.append(replace(op, oid=len(self.ops), inputs=inputs, outputs=outputs, name=name))

    def _result_name(self, op: Op, value: Value, name: str, names: Names) -> str:
        """One result has the op's name; of several each has its number, after which names may have counted on."""
        rest = value.name.removeprefix(op.name)
        return names.new(f"{name}_{rest.split('_')[1]}") if rest else name

    def _moved(self, op: Op, unit: int) -> Op:
        """As it stands in this unit, its bodies too."""
        place = self._run.locate(op.origin)
        origin = op.origin if place is None or place[0] != 1 else self._run.layer(unit, *place[1:])
        bodies = [replace(body, ops=tuple(self._moved(inner, unit) for inner in body.ops)) for body in op.bodies]
        return replace(op, origin=origin, bodies=tuple(bodies))

    def _declare(self, like: Value, name: str) -> int:
        self.stubs.append(Stub(name, like.spec, like.role, like.strides))
        return len(self.stubs) - 1
