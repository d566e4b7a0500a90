"""Graph → a program that runs: fold constants, lower, plan, check the plan, bind.

What depends on constants only (positions, masks, tables of angles) is computed at compile time. Passes of the caller's
own run over the graph before it is lowered, and over the plan before it is bound.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch

from passes.suggest import bytes_text, nearest, plural
from pipeline.argument_checks import FLAG, MAPPING, TEXT, a, expects
from pipeline.errors import Unsupported, UsageError
from pipeline.importers.from_torch.tensors import TensorPayload
from pipeline.ir import Op, Role
from pipeline.ir.builder import declarations, rebuild
from pipeline.ir.graph import Graph, to_device
from pipeline.lowering import lower, with_kernels
from pipeline.lowering.memory_order import in_traced_order, memory_order
from pipeline.ops.aten import is_call
from pipeline.ops.aten.typed import HIGHER_ORDER
from pipeline.ops.layout import traced_strides
from pipeline.planning import ExecutionPlan, FeedSignature, check_against, check_plan, make_plan, refuse_named_dims
from pipeline.runtime.call_check import refuse_sizes_of_data, refuse_wrong_calls, refuse_wrong_graph
from pipeline.runtime.capture import Captures, Replayable
from pipeline.runtime.context import Context
from pipeline.runtime.devices import CPU, Device, device_of, find_device
from pipeline.runtime.eager import apply, with_strides_of_trace
from pipeline.runtime.kernels import PackedMemory, load_library
from pipeline.runtime.kernels.aten.call import pure_operator
from pipeline.runtime.kernels.attention import write_attention_backends
from pipeline.runtime.program import BoundProgram
from pipeline.runtime.slots import Feed, Weights, stored_tensor, with_weights
from pipeline.runtime.tensors import dtype_name
from pipeline.runtime.torch_state import plain_state
from pipeline.runtime.user_passes import GraphPass, PlanPass, run_graph_passes, run_plan_passes

LARGEST = 2**24
"""The most bytes of a folded result; a larger one costs more memory than it saves time."""


def fold_constants(graph: Graph) -> Graph:
    """`graph` without torch's operators on constants only; their results become constants with the same vids.

    Random numbers are drawn at each run. Weights are not folded: the results would double their memory.

    Raises:
        SourceError: an operator that torch does not know.
        Unsupported: an operator that writes to its arguments.
    """
    known: dict[int, torch.Tensor] = {}
    ops: list[Op] = []
    for op in graph.ops:
        operator = pure_operator(op.kind) if is_call(op.kind) and not op.kind.startswith(HIGHER_ORDER) else None
        if operator is None or not _is_constant(graph, op, operator, known):
            ops.append(replace(op, oid=len(ops)))
            continue
        ins = [known[vid] if vid in known else _read_stored(graph, vid) for vid in op.inputs]
        made = _fold(graph, op, ins)
        if made is None:
            ops.append(replace(op, oid=len(ops)))
        else:
            known.update(zip(op.outputs, made, strict=True))
    return _with_constants(graph, ops, known) if known else graph


def _fold(graph: Graph, op: Op, ins: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
    """The results of `op`; None if torch refuses the op or its results have other shapes or dtypes than declared.

    Such an op stays in the graph, where its launch reports the error.
    """
    try:
        with torch.no_grad():
            made = [_with_memory(tensor) for tensor in apply(op, with_strides_of_trace(graph, op, ins), {})]
    except Exception:  # the call was checked, so the data is at fault
        return None
    declared = [(spec.shape, spec.dtype) for spec in (graph.values[vid].spec for vid in op.outputs)]
    return made if [(tuple(tensor.shape), dtype_name(tensor.dtype)) for tensor in made] == declared else None


def _with_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy of torch's zeros without memory, which are the gradient of a step function such as sgn."""
    return tensor.clone() if tensor._is_zerotensor() else tensor


def _is_constant(graph: Graph, op: Op, operator: torch._ops.OpOverload, known: dict[int, torch.Tensor]) -> bool:
    """Whether all results of `op` are small and depend on constants alone; `known` are folded results by vid."""
    specs = [graph.values[vid].spec for vid in op.outputs]
    if any(not spec.is_static or spec.nbytes > LARGEST for spec in specs):
        return False
    if any(vid not in known and not _is_stored(graph, vid) for vid in op.inputs):
        return False
    return torch.Tag.nondeterministic_seeded not in operator.tags


def _is_stored(graph: Graph, vid: int) -> bool:
    """Whether `vid` is a constant with a payload, without gaps or overlaps in its memory, which no payload can have."""
    value = graph.values[vid]
    dense = value.strides is None or memory_order(value) is not None
    return value.role is Role.CONST and vid in graph.payloads and dense


def _read_stored(graph: Graph, vid: int) -> torch.Tensor:
    return stored_tensor(graph.payloads[vid], traced_strides(graph.values[vid]))


def _with_constants(graph: Graph, ops: list[Op], known: dict[int, torch.Tensor]) -> Graph:
    decls = [replace(decl, role=Role.CONST) if vid in known else decl for vid, decl in enumerate(declarations(graph))]
    return rebuild(graph, decls, ops, {decls[vid].name: TensorPayload(tensor) for vid, tensor in known.items()})


A_GRAPH = a(Graph, "a Graph, as from_onnx makes; an IR of extract_ir has it as .graph")


@expects(feed=MAPPING, copy=FLAG)
def check_run(feed: object, copy: object) -> None:
    """Refuse wrong arguments of a run. `expects` costs 0.7 µs, so a run of a dict does without it."""


class CompiledProgram(Replayable):
    """A plan with its weights, ready to run from any thread.

    Threads share plan and weights. Without states each thread has a context of its own, so threads do not wait for one
    another. A program with states is one sequence of runs: its threads share one context, and take turns.
    """

    instead = f"take `new_context()` for states of its own, or {Replayable.instead}"

    @expects(bound=a(BoundProgram, "a BoundProgram; compile_graph makes the program of a Graph"))
    def __init__(self, bound: BoundProgram) -> None:
        self._bound = bound
        self._first: list[Context] = [Context(bound)]
        """The context that was made to compile, until a thread takes it."""
        self._own = threading.local()
        self._shared = self._first[0] if self._first[0].states.tensors else None
        super().__init__(threading.RLock() if self._shared else None)

    @property
    def signature(self) -> tuple[Sequence[str], Sequence[str]]:
        inputs, outputs = (
            [self.plan.slots[vid].name for vid in vids] for vids in (self.plan.inputs, self.plan.outputs)
        )
        return inputs, outputs

    def describe(self) -> str:
        plan = self.plan
        states = f", {plural(len(self.state_names), 'state')}" if self.state_names else ""
        return f"{plural(len(plan.calls), 'call')}, arena of {bytes_text(plan.arena_bytes)}{states}"

    @property
    def device(self) -> Device:
        """Where the program runs."""
        return self._bound.device

    @property
    def plan(self) -> ExecutionPlan:
        return self._bound.plan

    @property
    def feed_signature(self) -> FeedSignature:
        """Name and spec of every tensor that `run` expects."""
        return self.plan.feed_signature

    @property
    def packed_bytes(self) -> int:
        """Memory of weights that are packed for their kernels, one copy for all threads."""
        return self._bound.packed_bytes

    @property
    def native_calls(self) -> int:
        """How many calls are computed by kernels in C++; 0 without `native`."""
        return self.context.native_calls

    def run(self, feed: Feed, *, copy: bool = True) -> dict[str, torch.Tensor]:
        """Run the program.

        Args:
            feed: a tensor for each name of `feed_signature`, of its shape and dtype.
            copy: return tensors of the caller's own. With False the outputs are views that the thread's next run may
                overwrite.

        Returns:
            Output name → tensor.

        Raises:
            UsageError: the feed does not fit `feed_signature`, or a state has no value yet.
            DataError: an index in the feed is out of range (a UsageError too).
            InternalError: a kernel failed.
        """
        if type(feed) is not dict or type(copy) is not bool:
            check_run(feed, copy)
        with self._turn():
            return self.context.run(feed, copy=copy)

    @expects(feed=MAPPING, copy=FLAG)
    def run_updating(self, feed: Feed, *, copy: bool = True) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Outputs as from `run`, and {updated input: its value after the run}; the caller's tensors are not changed.

        Args:
            feed: as in `run`.
            copy: as in `run`.
        """
        with self._turn():
            return self.context.run_updating(feed, copy=copy)

    @property
    def captures(self) -> Captures:
        try:
            return self._own.captures  # at each replay
        except AttributeError:
            captures = self.context.captures
            if self._shared is None:
                self._own.captures = captures
            return captures

    def check_weights(self) -> None:
        """Check that the tensors given as weights still have the memory that was bound when the graph was compiled.

        Each capture does. A run or a replay does not, since that would cost about 1 µs for each weight: it computes
        with the memory that was bound, which torch refuses to free or to resize once there is a capture.

        Raises:
            UsageError: a tensor has other memory now, as after `.data = …` or `module.to(…)`.
        """
        self._bound.refuse_moved_weights()

    @property
    def context(self) -> Context:
        """The context of this thread, or the context that all threads share."""
        if self._shared is not None:
            return self._shared
        try:
            return self._own.context
        except AttributeError:
            self._own.context = self._take_first() or self.new_context()
            return self._own.context

    def new_context(self) -> Context:
        """A further sequence of runs, with states of its own; use it from one thread at a time."""
        return Context(self._bound)

    def states(self) -> dict[str, torch.Tensor]:
        """Copies of the states that runs change, by name, as they are now.

        Raises:
            UsageError: a run failed while it wrote to some; see `pipeline.runtime.states`.
        """
        with self._turn():
            return self.context.states.values()

    @property
    def state_names(self) -> frozenset[str]:
        """The names of the states that runs change."""
        return self.context.states.names

    @expects(name=TEXT)
    def state(self, name: str) -> torch.Tensor:
        """A copy of the state `name`, as it is now.

        Raises:
            UsageError: there is no such state, or a run failed while it wrote to the state.
        """
        if name not in self.state_names:
            raise UsageError(f"no state {name!r}{nearest(name, self.state_names)}")
        with self._turn():
            return self.context.states.value(name)

    @expects(states=MAPPING)
    def give_states(self, states: Feed) -> None:
        """Set states by name; the others are not changed.

        Args:
            states: name of a state → tensor of its shape and dtype.

        Raises:
            UsageError: there is no such state, or the tensor has another shape or dtype.
        """
        with self._turn():
            self.context.states.give(states)

    def reset_states(self) -> None:
        """Set every state back to its value when the graph was compiled."""
        with self._turn():
            self.context.states.reset()

    def _take_first(self) -> Context | None:
        try:
            return self._first.pop()
        except IndexError:
            return None


@expects(graph=A_GRAPH, weights=MAPPING.or_none(), native=FLAG, debug=FLAG)
def compile_graph(
    graph: Graph,
    weights: Weights | None = None,
    *,
    device: Device | torch.device | str | None = None,
    debug: bool = False,
    native: bool = False,
    optimize_ir: Sequence[GraphPass] = (),
    optimize_plan: Sequence[PlanPass] = (),
) -> CompiledProgram:
    """Lower, plan, check and bind `graph`: everything before the first run.

    Args:
        graph: every dim is a number; see `as_states` for caches that stay from run to run.
        weights: tensors by value name or by name in a checkpoint, of the declared shape and dtype. They are bound once,
            without a copy. Weights that are neither among them nor in the graph's payloads are part of each feed.
        device: where the program runs: `cpu`, `cuda` or `cuda:1`; None for where the values of the graph are. Weights
            that are there already are not copied. CUDA is untested on a GPU.
        debug: wait for the device after each launch, so that an error of CUDA names the launch that caused it; replays
            are loops then.
        native: kernels in C++ compute what they can, in float32; the compiler of this machine builds them once. Their
            results differ from torch's by roundings.
        optimize_ir: the caller's own passes over the graph, before it is lowered; each result is checked.
        optimize_plan: the caller's own passes over the plan, before it is bound; each result is checked.

    Returns:
        A CompiledProgram: `run(feed)` and `capture(feed)`; feed and outputs are tensors by name.

    Raises:
        Unsupported: ops without a kernel (all are listed), or a device that is not there.
        UsageError: a graph that breaks a rule of the IR, an op that does not fit its operator, a pass that returns
            something wrong, dimensions that are still names, weights that the graph does not have, too little memory,
            or no compiler for `native`.
        SourceError: a weight does not fit its declaration.
        InternalError: the plan did not pass its checker.

    Example:
        >>> import onnxline, torch
        >>> program = onnxline.compile_graph(onnxline.from_onnx("model.onnx"))
        >>> [tuple(output.shape) for output in program.run({"x": torch.zeros(2, 8, 32)}).values()]
        [(2, 8, 32)]
    """
    graph = run_graph_passes(graph, optimize_ir)
    options = BindOptions(device, debug, native)
    return CompiledProgram(bind_graph(graph, weights, options=options, optimize_plan=optimize_plan))


@dataclass(frozen=True, slots=True)
class BindOptions:
    """How graphs become programs; see `compile_graph`."""

    device: Device | torch.device | str | None = None
    debug: bool = False
    native: bool = False

    def find_device(self, graph: Graph) -> Device:
        """
        Raises:
            Unsupported: the device is not there, or has no kernels in C++.
        """
        device = device_of(graph) if self.device is None else find_device(self.device)
        if self.native and not device.is_host:
            raise Unsupported(f"native: its kernels in C++ are for the CPU; leave it out for {device.name}")
        return device


DEFAULT_OPTIONS: Final = BindOptions()


def bind_graph(
    graph: Graph,
    weights: Weights | None = None,
    memory: PackedMemory | None = None,
    *,
    options: BindOptions = DEFAULT_OPTIONS,
    optimize_plan: Sequence[PlanPass] = (),
) -> BoundProgram:
    """The program of `graph` with its weights; see `compile_graph`. `memory` has packed weights of other programs."""
    refuse_wrong_graph(graph)  # binding names bytes that do not fit
    refuse_named_dims(graph)
    device = options.find_device(graph)
    with plain_state():
        # What is constant is computed on the CPU, wherever the graph was traced, and where the program runs.
        refuse_wrong_calls(graph)
        folded = fold_constants(to_device(with_weights(graph, weights or {}), CPU.name))
        refuse_sizes_of_data(folded)
        if not device.is_host:
            folded = write_attention_backends(folded, device)
        graph = with_kernels(to_device(in_traced_order(folded), device.name))
        plan = make_plan(graph, lower(graph), device.alignment)
        check_plan(plan)
        check_against(graph, plan)
        plan = run_plan_passes(graph, plan, optimize_plan)
        library = load_library() if options.native else None
        return BoundProgram.bind(plan, graph, memory, native=library, device=device, debug=options.debug)
