"""Every backend that can run a final model, in one table: `BACKENDS`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from passes.load import seconds_to_run
from passes.weights.detached import DetachedModel, read_model
from passes.weights.sessions import Session
from pipeline.errors import Unsupported
from pipeline.ir import Graph
from pipeline.lowering import EMITTERS, Kind
from pipeline.lowering.fusion import fuse

if TYPE_CHECKING:  # torch takes seconds to import, and a run of which nothing has changed does not need it
    from pipeline.runtime import CompiledProgram
    from pipeline.segments import SegmentedModel

__all__ = ["BACKENDS", "Backend", "Feeds", "Plan", "Shapes", "onnxruntime_runner"]

Feeds = Mapping[str, np.ndarray]
Shapes = Mapping[str, Sequence[int]]
Runner = Callable[[Feeds], dict[str, np.ndarray]]
"""Feeds by input name → outputs by output name."""


class Backend(Protocol):
    """One model that can be run on many draws."""

    def run(self, feeds: Feeds) -> dict[str, np.ndarray]: ...


class OnnxRuntime:
    """onnxruntime on the CPU, graph optimization off."""

    def __init__(self, path: Path, trainable: frozenset[str], fusions: Collection[str] = ()) -> None:
        del trainable, fusions
        self._runner = onnxruntime_runner(read_model(path))

    def run(self, feeds: Feeds) -> dict[str, np.ndarray]:
        return self._runner(feeds)


class Plan:
    """Our own runtime: import the file, fuse, lower and plan it. A plan is for the shapes of one feed signature.

    A model whose shapes or course only a run tells has no plan as a whole, and runs in segments.
    """

    def __init__(self, path: Path, trainable: frozenset[str], fusions: Collection[str] = ()) -> None:
        self._path, self._trainable, self._fusions = path, trainable, fusions
        self._shapes: Shapes = {}
        self._compiled: tuple[Graph, CompiledProgram] | None = None
        self._segmented: SegmentedModel | None = None

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """Operators that another runtime computes, each as often as the model has it; known after a run."""
        if self._segmented is not None:
            return self._segmented.count().fallbacks
        ops = self._compiled[0].ops if self._compiled else ()
        return tuple(str(op.attrs["op"]) for op in ops if op.kind == Kind.OnnxNode.name)

    @property
    def segments(self) -> int:
        """How many plans and steps between them there are; 0 where the model is one plan."""
        return 0 if self._segmented is None else self._segmented.count().steps

    def compile_whole(self, shapes: Shapes) -> tuple[Graph, CompiledProgram] | None:
        """As `compile_for`; None where the model has to run in segments.

        Raises:
            Unsupported: it cannot run in segments either.
        """
        from pipeline.segments import SegmentedModel

        if self._segmented is None:
            try:
                return self.compile_for(shapes)
            except Unsupported:
                self._segmented = SegmentedModel(self._path)
        return None

    def compile_for(self, shapes: Shapes) -> tuple[Graph, CompiledProgram]:
        """The graph after the fusions and the program for inputs of these shapes; made again when the shapes change.

        Raises:
            Unsupported: an operator that cannot be imported or has no emitter; all are listed.
        """
        from pipeline.importers import from_onnx
        from pipeline.runtime import compile_graph

        if self._compiled is None or self._shapes != shapes:
            self._compiled = None  # first, to free its storage
            graph = from_onnx(  # import
                self._path, shapes=shapes, emitters=EMITTERS, trainable=self._trainable, fallback=True
            )
            graph = fuse(graph, self._fusions)
            self._shapes, self._compiled = shapes, (graph, compile_graph(graph))  # lower, plan, bind
        return self._compiled

    def run(self, feeds: Feeds) -> dict[str, np.ndarray]:
        from pipeline.runtime.tensors import to_numpy

        whole = self.compile_whole(shapes_of(feeds))
        if whole is None:
            assert self._segmented is not None
            return self._segmented.run(feeds)
        return {name: to_numpy(tensor) for name, tensor in whole[1].run(feeds).items()}


def onnxruntime_runner(model: DetachedModel, extra_outputs: Sequence[str] = ()) -> Runner:
    """A function that runs the model on onnxruntime's CPU, graph optimization off, within a time limit by its size.

    Raises:
        StepFailed: onnxruntime refuses the model. The function raises it when a run fails or exceeds its time.
    """
    session, weights = Session.of(model, extra_outputs), model.nbytes()

    def run(feeds: Feeds) -> dict[str, np.ndarray]:
        return session.run(feeds, within_s=seconds_to_run(weights + sum(array.nbytes for array in feeds.values())))

    return run


def shapes_of(feeds: Feeds) -> Shapes:
    """The shapes of the feeds. Shapes and not dims, since an ONNX file may name its dims otherwise, or not at all."""
    return {name: array.shape for name, array in feeds.items()}


BACKENDS: Final[Mapping[str, Callable[[Path, frozenset[str], Collection[str]], Backend]]] = {
    "onnxruntime": OnnxRuntime,
    "plan": Plan,
}
"""Name in `runtime.backends` → the backend, made of the final model, the names of its parameters, and the fusions of
the IR. `torch` is the reference itself, so it is not run again."""
