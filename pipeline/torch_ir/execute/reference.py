"""An IR op by op, with torch's operators: the plain way that is always there, beside the planned one."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from pipeline.ir import Graph, Role
from pipeline.runtime.eager import Own, as_traced, run_eager
from pipeline.runtime.states import LostStates
from pipeline.torch_ir.execute.shared import unshared
from pipeline.torch_ir.execute.states import versions, writes
from pipeline.torch_ir.nodes import stored

__all__ = ["Reference", "Results", "Tensors"]

Tensors = Mapping[str, torch.Tensor]
Results = tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]
"""Outputs by name, and the values after the run of the inputs that the model writes to."""


class Reference:
    """Keeps what runs have written to states, and tensors of the caller are never written to.

    `writes` tells whether ops of the graph write to their arguments, as they do without functionalization: then
    whatever is stored may be written to, and is copied before the first run.
    """

    def __init__(self, graph: Graph) -> None:
        self.writes = writes(graph)
        self._graph = graph
        self._names = {value.name for value in graph.with_role(Role.STATE)}
        self._values = {value.name: value for value in stored(graph)}
        self._states: dict[str, torch.Tensor] = {}
        self._lost: set[str] = set()
        """States on which ops had begun to write when a run failed."""

    def run(self, stored: Tensors, inputs: Tensors, own: Own, given: Collection[str] = ()) -> Results:
        """
        `stored` are weights, constants and states as they were at first; those in `given` are taken for this run as
        they come. `own` are executors of single ops.

        Raises:
            DataError: an index in the inputs is out of range.
            LostStates: an earlier run that failed had begun to write to some states.
        """
        self._refuse_lost()
        tensors = {**self._kept(stored, given), **(_copies(inputs) if self.writes else inputs)}
        before = versions(self._states)
        try:
            with torch.no_grad():
                result = run_eager(self._graph, tensors, check=False, own=own)
        except BaseException:
            after = versions(self._states)
            self._lost = {name for name in after if after[name] != before[name]}
            raise
        updates = unshared(result.updates, tensors.values())
        self._states |= {name: tensor for name, tensor in updates.items() if name in self._names}
        updated = {name: tensor for name, tensor in updates.items() if name not in self._names}
        return unshared(result.outputs, [*tensors.values(), *self._states.values(), *updated.values()]), updated

    def states(self) -> dict[str, torch.Tensor]:
        """Copies of the states that were written or given.

        Raises:
            LostStates: a run that failed had begun to write to some.
        """
        self._refuse_lost()
        return _copies(self._states)

    def give_states(self, states: Tensors) -> None:
        self._states |= self._laid(states)
        self._lost -= states.keys()

    def _refuse_lost(self) -> None:
        if self._lost:
            raise LostStates(self._lost)

    def _kept(self, stored: Tensors, given: Collection[str]) -> Tensors:
        if self.writes:
            missing = {name: one for name, one in stored.items() if name not in self._states}
            self._states |= self._laid(_copies(missing))
        return {**stored, **{name: one for name, one in self._states.items() if name not in given}}

    def _laid(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        """In the order in memory that a run wants: else it would copy them, and write to the copies."""
        return {name: as_traced(tensor, self._values[name]) for name, tensor in tensors.items()}


def _copies(tensors: Tensors) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}
