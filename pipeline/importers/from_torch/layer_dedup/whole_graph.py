"""Assemble the Graph of the whole model: repeated ops, inputs, stored tensors, updates and outputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from pipeline.importers.from_torch.layer_dedup.layer_runs import LayerRun, NotRepeatable
from pipeline.importers.from_torch.layer_dedup.meta_trace import Call
from pipeline.importers.from_torch.layer_dedup.proof import KeptOutput, Leaving, Proof, RepeatedOutput
from pipeline.importers.from_torch.layer_dedup.repeat import Placeholder, Repeater, blocks_of, repeat_stores
from pipeline.importers.from_torch.tensors import TensorPayload, holds_values
from pipeline.ir import Graph, Payload
from pipeline.ir.builder import GraphFacts, assemble

__all__ = ["ModuleCall", "whole_graph"]


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


class _Writer:
    def __init__(self, run: LayerRun, short: Graph, part: Call, whole: ModuleCall, proof: Proof) -> None:
        self._run = run
        self._short = short
        self._whole = whole
        self._proof = proof
        self._blocks = blocks_of(run, short)
        self._repeater = Repeater(run, short, self._blocks)
        self._vid_of = dict(zip(part.tensors(), short.inputs, strict=True))
        """{key of an input: its vid in the shortened graph}"""
        self._sources: dict[int, tuple[str, ...]] = {}
        self._payloads: dict[str, Payload] = {}

    def graph(self, leaving: Sequence[Leaving]) -> Graph:
        for one in repeat_stores(self._run, self._short):
            self._store(one)
        inputs = self._inputs()
        self._repeater.write()
        updates = dict(sorted(self._updates(inputs)))
        outputs = [self._output(one, inputs, updates) for one in leaving]
        writer = self._repeater
        facts = GraphFacts(updates, self._sources)
        return assemble(
            self._short.name, writer.stubs, writer.ops, list(inputs.values()), outputs, self._payloads, facts=facts
        )

    def _store(self, one: Placeholder) -> None:
        vid = self._repeater.store(one)
        self._sources[vid] = (one.target, *self._whole.tied.get(one.target, ()))
        payload = self._short.payloads.get(one.value.vid)
        if payload is not None and one.unit is not None:
            payload = self._own_payload(one.target, payload)
        if payload is not None:
            self._payloads[one.name] = payload

    def _own_payload(self, target: str, payload: Payload) -> Payload | None:
        """The unit's own buffer or attribute; a constant that the code makes is equal in all units."""
        path, _, name = target.rpartition(".")
        held = self._whole.constants.get(target, getattr(self._whole.module.get_submodule(path), name, None))
        if not isinstance(held, torch.Tensor):
            return payload
        return TensorPayload(held) if holds_values(held) else None

    def _inputs(self) -> dict[int, int]:
        """{key: vid in the whole graph}, in the order of the call."""
        spare, tensors = self._whole.call.spare(self._whole.module), self._whole.call.tensors()
        like = {other: key for renamed in reversed(self._proof.inputs) for key, other in renamed.items()}
        found = {}
        for key, tensor in tensors.items():
            model = key if key in self._vid_of else like[key]
            if _look(tensor) != _look(tensors[like.get(key, key)]):
                raise NotRepeatable(f"the layers' inputs differ: {_look(tensor)}, {_look(tensors[like[key]])}")
            value = self._short.values[self._vid_of[model]]
            found[key] = self._repeater.give(value, spare.get(key, value.name))
        for key, vid in self._vid_of.items():
            self._repeater.bind(vid, found[key])
        for unit, renamed in enumerate(self._proof.inputs, start=1):
            for key, other in renamed.items():
                self._repeater.bind(self._vid_of[key], found[other], unit)
        return found

    def _updates(self, inputs: Mapping[int, int]) -> Iterator[tuple[int, int]]:
        """(state or input, its value after the run): for each unit if unit 1 writes it, else once."""
        written = {vid for oid in self._blocks.second for vid in self._short.ops[oid].outputs}
        for state, after in self._short.updates.items():
            if after not in written:
                yield self._repeater.around(state), self._repeater.around(after)
                continue
            for unit in range(1, self._run.count):
                yield self._repeater.within(unit, state), self._repeater.within(unit, after)

    def _output(self, one: Leaving, inputs: Mapping[int, int], updates: Mapping[int, int]) -> int:
        match one:
            case RepeatedOutput(place, unit):
                return self._repeater.within(unit, self._short.outputs[place])
            case KeptOutput(place):
                return self._repeater.around(self._short.outputs[place])
            case ("given", int(key)):
                return updates.get(inputs[key], inputs[key])
            case ("stored", name):
                vid = next(vid for vid, names in self._sources.items() if names[0] == name)
                return updates.get(vid, vid)
        raise AssertionError(one)


def _look(tensor: torch.Tensor) -> tuple[object, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device
