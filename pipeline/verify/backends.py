"""Every backend that can run a model, in one table: `BACKENDS`. Each has the methods of `Backend`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from passes.load import seconds_to_run
from passes.weights.detached import DetachedModel, read_model
from passes.weights.sessions import Session, as_array
from passes.weights.split_run import names_computed_in_numpy
from pipeline.errors import OnnxlineError, Unsupported, UsageError

if TYPE_CHECKING:  # torch takes seconds to import, the IR 0.1 s; a run on onnxruntime alone needs neither
    import torch

    from pipeline.ir import Graph, Op
    from pipeline.runtime import CompiledProgram
    from pipeline.runtime.eager import Own
    from pipeline.segments import SegmentedModel

Feeds = Mapping[str, np.ndarray]
Shapes = Mapping[str, Sequence[int]]
Runner = Callable[[Feeds], dict[str, np.ndarray]]
"""Feeds by input name → outputs by output name."""

VALUES_AT_ONCE: Final = 64
"""Further outputs of one session of onnxruntime; all values of a large model would not fit into memory."""


class RunnableModel(Protocol):
    """What a backend runs."""

    @property
    def path(self) -> Path:
        """The ONNX file.

        Raises:
            UsageError: there is none.
        """
        ...

    def graph_for(self, shapes: Shapes) -> Graph:
        """The graph for inputs of these shapes.

        Raises:
            Unsupported: an operator that cannot be imported; all are listed.
        """
        ...


class OnnxFile:
    """An ONNX file, and the initializers that are parameters, by name."""

    def __init__(self, path: Path, trainable: frozenset[str] = frozenset()) -> None:
        self.path, self._trainable = path, trainable
        self._shapes: Shapes = {}
        self._graph: Graph | None = None

    def graph_for(self, shapes: Shapes) -> Graph:
        from pipeline.importers import from_onnx
        from pipeline.ops import emitter_of

        if self._graph is None or self._shapes != shapes:
            self._graph = from_onnx(
                self.path, shapes=shapes, emitter_of=emitter_of, trainable=self._trainable, fallback=True
            )
            self._shapes = shapes
        return self._graph


class GraphModel:
    """A graph with its weights."""

    def __init__(self, graph: Graph, title: str) -> None:
        self._graph, self._title = graph, title

    @property
    def path(self) -> Path:
        raise UsageError(f"onnxruntime runs ONNX files, and {self._title} is none; name the ONNX file, or two others")

    def graph_for(self, shapes: Shapes) -> Graph:
        from pipeline.ir.dims import dim_names, dims_of, fix_dims

        return fix_dims(self._graph, dims_of(self._graph, shapes)) if dim_names(self._graph) else self._graph


class Backend(ABC):
    """One model on one backend, to be run on many draws.

    `fusions` are passes on the IR, and `options` those of `compile_graph`; only `plan` has either.
    """

    def __init__(self, model: RunnableModel, fusions: Collection[str] = (), **options: Any) -> None:
        self._model, self._fusions, self._options = model, fusions, options

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """Operators that another runtime computes, each as often as the model has it; known after a run."""
        return ()

    @property
    def segments(self) -> int:
        """How many plans and steps between them there are; 0 where the model is run as a whole."""
        return 0

    @property
    def native_calls(self) -> int:
        """How many calls kernels in C++ compute; known after a run."""
        return 0

    @abstractmethod
    def run(self, feeds: Feeds) -> dict[str, np.ndarray]:
        """Outputs by name.

        Raises:
            Unsupported: the backend cannot take the model.
            StepFailed: it fails on these inputs.
        """

    def compile_whole(self, shapes: Shapes) -> tuple[Graph, CompiledProgram] | None:
        """The graph and its plan, for a backend that makes one; None where there is no plan of the whole model."""
        del shapes
        return None

    @abstractmethod
    def value_names(self, shapes: Shapes) -> tuple[str, ...]:
        """The values that `walk` can give, in the order in which they are computed."""

    @abstractmethod
    def walk(self, feeds: Feeds, wanted: Collection[str]) -> Iterator[tuple[str, np.ndarray]]:
        """The values called `wanted`, in the order of `value_names`; what is not asked for is not computed.

        Raises:
            Unsupported: the backend cannot take the model, or takes it in segments.
        """


class OnnxRuntime(Backend):
    """onnxruntime on the CPU, graph optimization off."""

    def __init__(self, model: RunnableModel, fusions: Collection[str] = (), **options: Any) -> None:
        super().__init__(model, fusions, **options)
        self._detached = read_model(model.path)
        self._runner: Runner | None = None

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """The custom operators that their references in numpy compute."""
        return names_computed_in_numpy(self._detached.proto)

    def run(self, feeds: Feeds) -> dict[str, np.ndarray]:
        self._runner = self._runner or onnxruntime_runner(self._detached)
        return self._runner(feeds)

    def value_names(self, shapes: Shapes) -> tuple[str, ...]:
        del shapes
        return tuple(name for node in self._detached.proto.graph.node for name in node.output if name)

    def walk(self, feeds: Feeds, wanted: Collection[str]) -> Iterator[tuple[str, np.ndarray]]:
        names = [name for name in self.value_names(shapes_of(feeds)) if name in wanted]
        for first in range(0, len(names), VALUES_AT_ONCE):
            group = names[first : first + VALUES_AT_ONCE]
            found = onnxruntime_runner(self._detached, group)(feeds)
            yield from ((name, found[name]) for name in group)


class Torch(Backend):
    """The graph op by op with torch's functional operators: no plan, no kernels of ours, no fusions.

    Fallbacks are the only calls that it shares with `plan`.
    """

    def __init__(self, model: RunnableModel, fusions: Collection[str] = (), **options: Any) -> None:
        super().__init__(model, fusions, **options)
        self._graph: Graph | None = None

    @property
    def fallbacks(self) -> tuple[str, ...]:
        return fallbacks_of(self._graph)

    def run(self, feeds: Feeds) -> dict[str, np.ndarray]:
        from pipeline.runtime.eager import run_eager
        from pipeline.runtime.tensors import as_tensor, to_numpy

        graph = self._graph_for(shapes_of(feeds))
        tensors = {name: as_tensor(array) for name, array in feeds.items()}
        with _torch_refusals(), _own_random_numbers():
            outputs = run_eager(graph, tensors, own=operators_of(graph)).outputs
        return {name: to_numpy(tensor) for name, tensor in outputs.items()}

    def value_names(self, shapes: Shapes) -> tuple[str, ...]:
        graph = self._graph_for(shapes)
        return tuple(graph.values[vid].name for op in graph.ops for vid in op.outputs)

    def walk(self, feeds: Feeds, wanted: Collection[str]) -> Iterator[tuple[str, np.ndarray]]:
        from pipeline.runtime.eager import walk_eager
        from pipeline.runtime.tensors import as_tensor, to_numpy

        graph = self._graph_for(shapes_of(feeds))
        tensors = {name: as_tensor(array) for name, array in feeds.items()}
        steps = walk_eager(graph, tensors, own=operators_of(graph))
        while True:
            with _torch_refusals(), _own_random_numbers():
                step = next(steps, None)
            if step is None:
                return
            op, results = step
            for vid, result in zip(op.outputs, results, strict=True):
                if (name := graph.values[vid].name) in wanted:
                    yield name, to_numpy(result)

    def _graph_for(self, shapes: Shapes) -> Graph:
        self._graph = self._model.graph_for(shapes)
        return self._graph


class Plan(Backend):
    """Our own runtime: import the file, fuse, lower and plan it. A plan is for the shapes of one feed signature.

    A model with shapes or branches that depend on the data has no plan as a whole, and runs in segments.
    """

    def __init__(self, model: RunnableModel, fusions: Collection[str] = (), **options: Any) -> None:
        super().__init__(model, fusions, **options)
        self._shapes: Shapes = {}
        self._compiled: tuple[Graph, CompiledProgram] | None = None
        self._segmented: SegmentedModel | None = None
        self._unplanned: list[Shapes] = []
        """Shapes at which no plan holds the model as a whole."""

    @property
    def fallbacks(self) -> tuple[str, ...]:
        if self._compiled is None and self._segmented is not None:
            return self._segmented.count().fallbacks
        return fallbacks_of(self._compiled[0] if self._compiled else None)

    @property
    def segments(self) -> int:
        return 0 if self._segmented is None else self._segmented.count().steps

    @property
    def native_calls(self) -> int:
        if self._compiled is None and self._segmented is not None:
            return self._segmented.count().native_calls
        return 0 if self._compiled is None else self._compiled[1].native_calls

    def compile_whole(self, shapes: Shapes) -> tuple[Graph, CompiledProgram] | None:
        """As `_compile_for`; None where the model has to run in segments at these shapes.

        Raises:
            Unsupported: it cannot run in segments either.
        """
        from pipeline.segments import SegmentedModel

        if shapes not in self._unplanned:
            try:
                return self._compile_for(shapes)
            except Unsupported:
                self._segmented = self._segmented or SegmentedModel(self._model.path, **self._options)
                self._unplanned.append(shapes)
        return None

    def run(self, feeds: Feeds) -> dict[str, np.ndarray]:
        from pipeline.runtime.tensors import to_numpy

        whole = self.compile_whole(shapes_of(feeds))
        if whole is None:
            assert self._segmented is not None
            return {name: as_array(name, result) for name, result in self._segmented.run(feeds).items()}
        return {name: to_numpy(tensor) for name, tensor in whole[1].run(feeds).items()}

    def value_names(self, shapes: Shapes) -> tuple[str, ...]:
        plan = self._compile_for(shapes)[1].plan
        read = {*plan.outputs, *plan.updates.values(), *(vid for call in plan.calls for vid in call.in_vids)}
        # A kernel may leave out a result that nothing reads.
        return tuple(plan.slots[vid].name for call in plan.calls for vid in call.out_vids if vid in read)

    def walk(self, feeds: Feeds, wanted: Collection[str]) -> Iterator[tuple[str, np.ndarray]]:
        from pipeline.runtime.tensors import to_numpy

        _, program = self._compile_for(shapes_of(feeds))
        plan = program.plan
        for index, results in program.new_context().walk(feeds):
            for vid, result in zip(plan.calls[index].out_vids, results, strict=True):
                if (name := plan.slots[vid].name) in wanted:
                    yield name, to_numpy(result)

    def _compile_for(self, shapes: Shapes) -> tuple[Graph, CompiledProgram]:
        """The graph after the fusions and the program for inputs of these shapes; made again when the shapes change.

        Raises:
            Unsupported: an operator that cannot be imported or has no emitter; all are listed.
        """
        from pipeline.lowering.fusion import fuse
        from pipeline.runtime import compile_graph

        if self._compiled is None or self._shapes != shapes:
            graph = fuse(self._model.graph_for(shapes), self._fusions)  # import
            self._compiled = None  # before the next program, to free its storage
            program = compile_graph(graph, **self._options)  # lower, plan, bind
            self._shapes, self._compiled = shapes, (graph, program)
        return self._compiled


def fallbacks_of(graph: Graph | None) -> tuple[str, ...]:
    """The operators of a graph that another runtime computes, each as often as the graph has it."""
    from pipeline.ops import Kind

    return tuple(str(op.attrs["op"]) for op in graph.ops if op.kind == Kind.OnnxNode.name) if graph else ()


def operators_of(graph: Graph) -> Own:
    """The functional forms of the kinds of `graph`; a fallback is computed by the runtime that `plan` uses for it."""
    from pipeline.ops import Kind
    from pipeline.runtime.eager import refuse_kinds
    from pipeline.runtime.kernels.fallback import KERNELS
    from pipeline.runtime.tensors import torch_dtype

    def run_elsewhere(op: Op, ins: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        import torch

        specs = [graph.values[vid].spec for vid in op.outputs]
        results = [torch.empty(spec.sizes, dtype=torch_dtype(spec.dtype)) for spec in specs]
        KERNELS[Kind.OnnxNode](ins, results, dict(op.attrs))()
        return results

    return {**refuse_kinds(graph), Kind.OnnxNode.name: run_elsewhere}


@contextmanager
def _torch_refusals() -> Iterator[None]:
    """Errors of torch's operators, such as a dtype that the CPU lacks, as `Unsupported`."""
    try:
        yield
    except OnnxlineError:
        raise
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise Unsupported(f"torch's operators cannot run the model: {error}; run it by onnxruntime") from error


@contextmanager
def _own_random_numbers() -> Iterator[None]:
    """Draw from a generator that begins anew, and leave that of the caller as it is."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


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


BACKENDS: Final[Mapping[str, type[Backend]]] = {"torch": Torch, "onnxruntime": OnnxRuntime, "plan": Plan}
"""Name in `runtime.backends` → the backend, made of a model and the fusions of the IR."""
