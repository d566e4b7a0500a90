"""A graph with named dims: a plan for each set of sizes, of which the last are kept, over one set of weights."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import torch

from passes.suggest import nearest
from pipeline.errors import UsageError
from pipeline.ir.bind import bind_dims, dim_names, dims_of
from pipeline.ir.expression import evaluate, names_in
from pipeline.ir.graph import Dim, Graph
from pipeline.runtime.compile import CompiledProgram, compile_graph
from pipeline.runtime.slots import Feed
from pipeline.runtime.tensors import as_tensor
from pipeline.runtime.weights import Weights, with_weights

__all__ = ["MOST_PROGRAMS", "ProgramCache", "compile_open_graph"]

MOST_PROGRAMS = 8
"""Programs that are kept, unless the caller says otherwise."""

Buckets = Mapping[str, Sequence[int]]


class ProgramCache:
    """Programs by the sizes of the named dims; the one that was used longest ago makes room. Any thread may run it."""

    def __init__(self, graph: Graph, limit: int, buckets: Buckets) -> None:
        self._graph, self._limit = graph, limit
        self._buckets = MappingProxyType({name: tuple(sorted(sizes)) for name, sizes in buckets.items()})
        self._programs: OrderedDict[tuple[tuple[str, int], ...], CompiledProgram] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def sizes(self) -> list[dict[str, int]]:
        """The sizes for which a program is kept, that of the last run last."""
        with self._lock:
            return [dict(key) for key in self._programs]

    def run(self, feed: Feed, *, copy: bool = True) -> dict[str, torch.Tensor]:
        """Outputs by name. With buckets the inputs are filled up with zeros, and the outputs cut again.

        Raises:
            UsageError: shapes for which the graph does not hold, sizes above every bucket, or as `CompiledProgram.run`.
        """
        tensors = {name: as_tensor(one) if isinstance(one, np.ndarray) else one for name, one in feed.items()}
        dims = dims_of(self._graph, {name: tuple(one.shape) for name, one in tensors.items()})
        planned = {name: self._bucket(name, size) for name, size in dims.items()}
        program = self._program(planned)
        if planned == dims:
            return program.run(tensors, copy=copy)
        outputs = program.run({name: self._fill(name, one, planned) for name, one in tensors.items()}, copy=copy)
        return {name: self._cut(name, one, dims) for name, one in outputs.items()}

    def _bucket(self, name: str, size: int) -> int:
        """The size to plan for: the least bucket that holds `size`, or `size` itself where the dim has no buckets."""
        if name not in self._buckets:
            return size
        fits = [bucket for bucket in self._buckets[name] if bucket >= size]
        if not fits:
            raise UsageError(f"{name} = {size} is above every bucket: {', '.join(map(str, self._buckets[name]))}")
        return fits[0]

    def _program(self, dims: Mapping[str, int]) -> CompiledProgram:
        key = tuple(sorted(dims.items()))
        with self._lock:  # two threads that meet a new size make one plan
            program = self._programs.pop(key, None)
            if program is None:
                while len(self._programs) >= self._limit:
                    self._programs.popitem(last=False)
                program = compile_graph(bind_dims(self._graph, dims))
            self._programs[key] = program
            return program

    def _fill(self, name: str, tensor: torch.Tensor, dims: Mapping[str, int]) -> torch.Tensor:
        """An input with zeros behind its elements, up to the planned sizes."""
        wanted = _sizes(self._graph.value(name).spec.shape, dims)
        if tuple(tensor.shape) == wanted:
            return tensor
        filled = tensor.new_zeros(wanted)
        filled[tuple(slice(size) for size in tensor.shape)] = tensor
        return filled

    def _cut(self, name: str, tensor: torch.Tensor, dims: Mapping[str, int]) -> torch.Tensor:
        return tensor[tuple(slice(size) for size in _sizes(self._graph.value(name).spec.shape, dims))]


def compile_open_graph(
    graph: Graph, weights: Weights | None = None, *, limit: int = MOST_PROGRAMS, buckets: Buckets | None = None
) -> ProgramCache:
    """Programs for `graph`, made when sizes are fed for the first time; at most `limit` are kept.

    `weights` are bound to all programs without a copy. `buckets` are sizes by the name of a dim, to one of which a fed
    size is rounded up. That is right only where elements behind the fed ones do not change the others, which nothing
    checks: rows of a batch do not, positions of a sequence do without a mask.

    Raises:
        UsageError: a graph with states, buckets of a dim that it does not have or that follows from others.
        SourceError: a weight does not fit its declaration.
    """
    if graph.updates:
        raise UsageError(
            f"graph {graph.name!r} has states, and each size would have its own; compile it for one size, or run it by "
            "`onnxline.execute_ir`"
        )
    if limit < 1:
        raise UsageError(f"limit={limit}; expected 1 or more programs to keep")
    names = dim_names(graph)
    for name, sizes in (buckets or {}).items():
        if name not in names:
            raise UsageError(f"graph {graph.name!r} has no dim {name!r}{nearest(name, names)}")
        if not sizes or min(sizes) < 1:
            raise UsageError(f"buckets of {name!r}: found {list(sizes)}, expected sizes of 1 or more")
    for vid in (*graph.inputs, *graph.outputs):
        for dim in graph.values[vid].spec.shape:
            mixed = names_in(dim) & (buckets or {}).keys() if isinstance(dim, str) and not dim.isidentifier() else ()
            if mixed:
                raise UsageError(
                    f"{graph.values[vid].name!r} has the size {dim!r}, in which elements behind those of "
                    f"{', '.join(mixed)} are not at the end: leave out its buckets"
                )
    return ProgramCache(with_weights(graph, weights or {}), limit, buckets or {})


def _sizes(shape: Sequence[Dim], dims: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(int(evaluate(dim, dims)) if isinstance(dim, str) else dim for dim in shape)
