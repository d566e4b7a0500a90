"""An IR on the planned runtime: a program for each set of sizes, all on the same weights."""

from __future__ import annotations

import torch

from pipeline.ir import Graph, Role
from pipeline.ir.bind import bind_dims, dim_names, dims_of
from pipeline.runtime import CompiledProgram, compile_graph
from pipeline.runtime.weights import with_stored
from pipeline.torch_ir.execute.declared import refuse_other_moves
from pipeline.torch_ir.execute.reference import Results, Tensors

__all__ = ["Planned"]


class Planned:
    """Compiles when sizes come that it has not met. What is written to states goes from program to program."""

    def __init__(self, graph: Graph, weights: Tensors) -> None:
        self._graph = graph
        self._weights = weights
        self._dynamic = bool(dim_names(graph))
        self._stateful = bool(graph.with_role(Role.STATE))
        self._programs: dict[tuple[tuple[str, int], ...], CompiledProgram] = {}
        self._current: CompiledProgram | None = None

    def run(self, inputs: Tensors) -> Results:
        """
        Raises:
            Unsupported: the runtime cannot run this graph; the message says what it lacks.
            UsageError: sizes that the graph does not hold for.
            ExecutionError: a node has other results than the graph says.
            DataError: an index in the inputs is out of range.
            LostStates: an earlier run that failed had begun to write to some states.
        """
        program = self._program(inputs)
        if self._stateful and self._current not in (None, program):
            program.give_states(self._current.states())  # type: ignore[union-attr]
        self._current = program
        return program.run_updating(inputs)

    def states(self) -> dict[str, torch.Tensor]:
        """Copies of the states as they are; empty before the first run.

        Raises:
            LostStates: a run that failed had begun to write to some.
        """
        return {} if self._current is None else self._current.states()

    def give_states(self, states: Tensors) -> None:
        if self._current is not None:
            self._current.give_states(states)
        else:
            self._weights = {**self._weights, **states}

    def _program(self, inputs: Tensors) -> CompiledProgram:
        shapes = {name: tuple(tensor.shape) for name, tensor in inputs.items()}
        dims = dims_of(self._graph, shapes) if self._dynamic else {}
        key = tuple(sorted(dims.items()))
        if key not in self._programs:
            graph = bind_dims(self._graph, dims) if dims else self._graph
            refuse_other_moves(graph)
            self._programs[key] = compile_graph(with_stored(graph, self._weights))
        return self._programs[key]
