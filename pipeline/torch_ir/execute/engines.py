"""The two that run an IR, and what passes from one to the other: the states."""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeVar

import torch

from pipeline.errors import Unsupported
from pipeline.ir import Graph
from pipeline.runtime.eager import Own
from pipeline.torch_ir.execute.planned import Planned
from pipeline.torch_ir.execute.reference import Reference, Tensors
from pipeline.torch_ir.execute.strided import counts_from_storage
from pipeline.torch_ir.weights.stored import sized

__all__ = ["Engines"]

Engine = TypeVar("Engine", Planned, Reference)


class Engines:
    """The planned runtime where it can be had, and the plain reference, which always can; each takes over the states.

    `not_planned` says why the runtime is not asked although it was to be, "" as far as it is.
    """

    def __init__(self, graph: Graph, own: Own, *, planned: bool) -> None:
        self._graph = graph
        self._own = own
        self._inputs = [graph.values[vid] for vid in graph.inputs]
        self._from_storage = counts_from_storage(graph)
        self._reference = Reference(graph)
        self._engine: Planned | None = None
        self._holder: Planned | Reference = self._reference
        """What ran last: it has the states."""
        self.updated: dict[str, torch.Tensor] = {}
        """After a run: the values of the inputs that the model writes to."""
        self.not_planned = _never(own, writes=self.writes) if planned else ""
        self._planned = planned and not self.not_planned

    @property
    def writes(self) -> bool:
        """Whether ops of the graph write to their arguments, as they do without functionalization."""
        return self._reference.writes

    def run(self, stored: Tensors, inputs: Tensors, *, strict_sizes: bool) -> Tensors:
        """Outputs by name, on the planned runtime if it can."""
        if self._fits(inputs, strict_sizes=strict_sizes):
            if self._engine is None:
                self._engine = Planned(self._graph, stored)
            try:
                outputs, self.updated = self._holding(self._engine).run(inputs)
                return outputs
            except Unsupported as error:  # it says so before it runs, and is not asked again
                self._holding(self._reference)
                self.not_planned, self._planned, self._engine = str(error), False, None
        return self.refer(stored, inputs)

    def refer(self, stored: Tensors, inputs: Tensors, own: Own | None = None, given: Collection[str] = ()) -> Tensors:
        """Outputs by name, on the reference; `own` and `given` are its own."""
        own = self._own if own is None else own
        outputs, self.updated = self._holding(self._reference).run(stored, inputs, own, given)
        return outputs

    def states(self) -> dict[str, torch.Tensor]:
        """
        Raises:
            LostStates: a run that failed had begun to write to some.
        """
        return self._holder.states()

    def give_states(self, states: Tensors) -> None:
        self._holder.give_states(states)

    def _holding(self, engine: Engine) -> Engine:
        """`engine`, which is to run next, with the states as they are."""
        if self._holder is not engine:
            engine.give_states(self._holder.states())
            self._holder = engine
        return engine

    def _fits(self, inputs: Tensors, *, strict_sizes: bool) -> bool:
        """Whether the planned runtime may be asked: it wants the very sizes, the CPU, and for an `as_strided` that
        counts from the storage inputs that begin theirs.
        """
        if not self._planned or any(not tensor.is_cpu for tensor in inputs.values()):
            return False
        if self._from_storage and any(tensor.storage_offset() for tensor in inputs.values()):
            return False
        return strict_sizes or all(sized(inputs[value.name], value.spec.shape) for value in self._inputs)


def _never(own: Own, *, writes: bool) -> str:
    if own:
        return f"executors of your own run {', '.join(sorted(own))} (register_executor), which a plan cannot call"
    if writes:
        return "ops of the IR write to their arguments, as functionalize=False leaves them"
    return ""
