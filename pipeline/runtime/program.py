"""What all runs of a plan share and none changes, and the memory that binds it: slots, and a launch for each step.

A program is its resolved kernels with the weights. A context and its captures share one `ProgramMemory`; each binds the
program to slots of its own. What has launches holds memory of its process, so Python may neither copy nor pickle it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, Final, NoReturn, Protocol, SupportsIndex

import torch

from passes.suggest import with_article
from pipeline.errors import InternalError, OnnxlineError, SourceError, Unsupported, UsageError
from pipeline.ir.graph import Graph, Role, TensorSpec
from pipeline.lowering import KernelCall
from pipeline.ops import Kind, Layout, unpack
from pipeline.ops.aten import TYPED, is_call, takes_any_order, untyped_call
from pipeline.planning import ExecutionPlan
from pipeline.runtime.call_check import why_refused
from pipeline.runtime.devices import CPU, TARGET, Device, device_of, launch_errors
from pipeline.runtime.feeding import operands
from pipeline.runtime.kernels import (
    KERNELS,
    PACKERS,
    Attrs,
    Bind,
    Launch,
    NativeLibrary,
    PackedMemory,
    ProductWeight,
    prepare_kernel,
)
from pipeline.runtime.kernels.aten.call import Strides, strides_in_trace
from pipeline.runtime.kernels.aten.indices import CURRENT, CheckedCall, IndexFlags
from pipeline.runtime.kernels.base import (
    ResultMismatch,
    data_error,
    is_data_error,
    is_out_of_memory,
    kernels_for_threads,
    place_of,
)
from pipeline.runtime.slots import Lenders, bind_weights, lenders_of, refuse_moved
from pipeline.runtime.states import States

AUTOCAST = "higher_order.wrap_with_autocast"


@dataclass(frozen=True, slots=True)
class LaunchStep:
    """A call that does work: its kernel with decoded attributes. Bound to operands it becomes a launch."""

    index: int
    call: KernelCall
    kind: Kind
    attrs: Attrs
    bind: Bind

    def with_attrs(self, **further: object) -> LaunchStep:
        """The step with further attributes, which the plan does not hold: packed weights, bodies."""
        attrs = {**self.attrs, **further}
        return replace(self, attrs=attrs, bind=prepare_kernel(self.kind, attrs))


@dataclass(frozen=True, slots=True)
class View:
    """An alias, and its layout in the storage of its root."""

    vid: int
    root: int
    layout: Layout


@dataclass(frozen=True, slots=True)
class BoundProgram:
    """A plan with its kernels and its weights; contexts run it, any number of them at the same time."""

    plan: ExecutionPlan
    steps: tuple[LaunchStep, ...]
    """With packed weights where a kernel takes them."""
    views: tuple[View, ...]
    """The aliases of the plan, in the order of the calls."""
    weights: Mapping[int, torch.Tensor]
    """By vid, over the model's own bytes; what a run changes is an initial value, which may lie on another device."""
    bodies: Mapping[int, tuple[BoundProgram, ...]] = field(default_factory=dict)
    """The bodies of higher-order calls, by the index of the call."""
    lenders: Lenders = field(default_factory=dict)
    places: Sequence[str] = ()
    """The source of each call, for messages."""
    device: Device = CPU
    debug: bool = False
    """Whether each launch waits for the device, so that an error is that of the launch which caused it."""
    threads: int = field(default_factory=torch.get_num_threads)
    """Threads of torch when it was compiled. Kernels are chosen for them, also where a context is made later."""

    @classmethod
    def bind(
        cls,
        plan: ExecutionPlan,
        graph: Graph,
        memory: PackedMemory | None = None,
        *,
        functional: bool = False,
        native: NativeLibrary | None = None,
        device: Device | None = None,
        debug: bool = False,
    ) -> BoundProgram:
        """The program of `plan`, which was made of `graph`, with the payloads of `graph` and its bodies as weights.

        `memory` has the packed weights of other programs over these weights.
        `functional`: operators of torch allocate their results, as autocast requires, and these are copied.
        `native`: kernels in C++, which compute what they can.
        `device`: where the program runs; that of the values of `graph` where it is not given.

        Raises:
            InternalError: a call has no kernel, or its attributes cannot be decoded.
            Unsupported: the device is not there.
            SourceError: a payload does not fit its slot, or a weight that is read has neither a payload nor a place in
                the feed.
        """
        device = device or device_of(graph)
        token = TARGET.set(device)
        try:
            bound = cls._bind(plan, graph, memory or PackedMemory(), device, functional, native)
            return replace(bound, debug=debug)
        finally:
            TARGET.reset(token)

    @classmethod
    def _bind(
        cls,
        plan: ExecutionPlan,
        graph: Graph,
        memory: PackedMemory,
        device: Device,
        functional: bool,
        native: NativeLibrary | None,
    ) -> BoundProgram:
        read = {*plan.outputs, *plan.updates.values(), *(vid for call in plan.calls for vid in call.in_vids)}
        steps = [
            _resolve_step(
                index,
                call,
                unread=[at for at, vid in enumerate(call.out_vids) if vid not in read],
                traced=_traced_strides(graph, index),
                functional=functional,
                native=native,
            )
            for index, call in enumerate(plan.calls)
            if not _is_free(plan, call)
        ]
        weights, views = bind_weights(plan, graph.payloads, device), _views_of(plan)
        bodies = {
            at: tuple(
                cls._bind(inner, body, memory, device, functional or graph.ops[at].kind == AUTOCAST, native)
                for inner, body in zip(plans, graph.ops[at].bodies, strict=True)
            )
            for at, plans in plan.bodies.items()
        }
        stored = _fixed_tensors(plan, views, weights)
        packed = tuple(_pack(plan, step, stored, memory) for step in steps) if device.is_host else tuple(steps)
        lenders = lenders_of(graph.payloads, weights)
        device.synchronize()  # contexts on other streams read the weights
        return cls(plan, packed, views, weights, bodies, lenders, tuple(map(place_of, graph.ops)), device)

    def describe(self, step: LaunchStep) -> str:
        """`call 3 MatMul(x: float32[2, 3], …) → y: …`"""
        ins, outs = (", ".join(map(self.describe_value, vids)) for vids in (step.call.in_vids, step.call.out_vids))
        return f"call {step.index} {step.kind.name}({ins}) → {outs}"

    def describe_value(self, vid: int) -> str:
        slot = self.plan.slots[vid]
        return f"{slot.name}: {slot.spec.dtype}{list(slot.spec.shape)}"

    def place_of(self, step: LaunchStep) -> str:
        """The source of `step`, or the call itself where the source is not known."""
        return self.places[step.index] if self.places else self.describe(step)

    def failure(self, step: LaunchStep, error: Exception) -> OnnxlineError:
        """The error to raise where `step` could not be bound or launched."""
        described, place = self.describe(step), self.place_of(step)
        if isinstance(error, ResultMismatch):
            return SourceError(f"{place}: {error}")
        if "not implemented for" in str(error):
            return Unsupported(
                f"{place}: torch has no such operator for these dtypes on {self.device.name} ({described}: {error}); "
                "cast to another dtype around it, or run the model by onnxruntime"
            )
        if is_out_of_memory(error):
            return UsageError(f"{described} failed: {error}; take smaller inputs, or a machine with more memory")
        # Shapes were settled when the plan was made, so a gather fails only for an index out of range.
        if is_data_error(error):
            slots = [self.plan.slots[vid] for vid in step.call.in_vids]
            return data_error(place, [(slot.name, slot.spec) for slot in slots], error)
        if refused := _why_torch_refuses(step, [self.plan.slots[vid].spec for vid in step.call.in_vids]):
            return SourceError(f"{place}: {refused}; correct the op, or the pass that made it")
        if any(words in str(error) for words in LATE_ERRORS) and not self.debug:
            return InternalError(
                f"{described} failed: {error}; CUDA reports an error at a launch after its cause: "
                "compile the graph with debug=True, which waits after each launch"
            )
        return InternalError(f"{described} failed: {error}")

    def refuse_wrong_indices(self, flags: IndexFlags) -> None:
        """
        Raises:
            DataError: a run that has ended by now had an index out of range.
        """
        wrong = flags.poll()
        if wrong is not None:
            (step,) = (step for step in self.steps if step.index == wrong)
            error = IndexError("an index is out of range, in this run or an earlier one, whose outputs are wrong")
            raise self.failure(step, error)

    def refuse_moved_weights(self) -> None:
        """Check that the caller's tensors still have the memory that was bound; about 1 µs for each.

        Raises:
            UsageError: one was given other memory since.
        """
        refuse_moved(self.lenders, self.weights, {vid: self.plan.slots[vid].name for vid in self.lenders})

    @property
    def packed_bytes(self) -> int:
        """Memory of the packed weights, which the weights themselves do not share."""
        packed: list[ProductWeight] = [step.attrs["packed"] for step in self.steps if "packed" in step.attrs]
        own = sum(weight.nbytes for weight in packed)
        return own + sum(body.packed_bytes for several in self.bodies.values() for body in several)


LATE_ERRORS: Final = ("CUDA error", "Triton Error [CUDA]", "cuDNN error")
"""In messages of errors that an earlier launch may have caused: of torch, of a launch by Triton, of cuDNN."""


def _why_torch_refuses(step: LaunchStep, ins: Sequence[TensorSpec]) -> str:
    """Why torch itself refuses the call of `step`; "" where it computes, so that the fault is ours."""
    if step.kind in (Kind.Aten, *TYPED):
        call = untyped_call(step.kind, step.attrs) if step.kind in TYPED else step.attrs
        return why_refused(call["op"], call["call"], ins)
    return ""


def _fixed_tensors(
    plan: ExecutionPlan, views: Sequence[View], weights: Mapping[int, torch.Tensor]
) -> dict[int, torch.Tensor]:
    """vid → tensor for the weights that no run can change, and for views of them."""
    fixed = {
        vid: tensor
        for vid, tensor in weights.items()
        if plan.slots[vid].role in (Role.PARAM, Role.CONST) and vid not in plan.updates
    }
    return {**fixed, **{view.vid: _show(fixed[view.root], view.layout) for view in views if view.root in fixed}}


def _pack(
    plan: ExecutionPlan, step: LaunchStep, stored: Mapping[int, torch.Tensor], memory: PackedMemory
) -> LaunchStep:
    """`step` with packed weights, where its kernel takes them and this pays."""
    ins = step.call.in_vids
    operands = {at: stored[vid] for at, vid in enumerate(ins) if vid in stored}
    if step.kind not in PACKERS or not operands:
        return step
    packed = PACKERS[step.kind](step.attrs, [plan.slots[vid].spec for vid in ins], operands)
    return step if packed is None else step.with_attrs(packed=packed.in_memory(memory))


def _show(root: torch.Tensor, layout: Layout) -> torch.Tensor:
    return root.as_strided(layout.sizes, layout.strides, int(root.storage_offset()) + layout.offset)


def _resolve_step(index: int, call: KernelCall, **further: object) -> LaunchStep:
    kind = Kind(call.kind_id) if call.kind_id in Kind.__members__.values() else None
    if kind is None or kind not in KERNELS:
        raise InternalError(f"call {index} has kind_id {call.kind_id}, for which this runtime has no kernel")
    attrs = {**unpack(call.attr_schema, call.attr_blob), "bodies": (), **further}
    return LaunchStep(index, call, kind, attrs, prepare_kernel(kind, attrs))


def _traced_strides(graph: Graph, index: int) -> list[Strides] | None:
    """The strides that the operands of this op had in the trace; None where they do not matter."""
    op = graph.ops[index]
    if not is_call(op.kind) or takes_any_order(op.kind):
        return None
    return [strides_in_trace(graph.values[vid]) for vid in op.inputs]


def _views_of(plan: ExecutionPlan) -> tuple[View, ...]:
    vids = [vid for call in plan.calls for vid in call.out_vids if vid in plan.alias]
    return tuple(View(vid, plan.root(vid), plan.layout(vid)) for vid in vids)


def _is_free(plan: ExecutionPlan, call: KernelCall) -> bool:
    """Whether all outputs of the call are views on their operand's storage, so that nothing is left to do."""
    position = call.constraints.get("view")
    if not isinstance(position, int):
        return False
    return all(plan.alias.get(vid) == call.in_vids[position] for vid in call.out_vids)


class ProcessBound:
    """Something that can be neither copied nor pickled."""

    instead: ClassVar[str] = "pickle the graph and its weights, and compile them again where they are read"
    """What to do in place of it, for the message."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """What `copy.copy`, `copy.deepcopy`, `pickle`, `torch.save` and a spawned process ask first.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            f"{with_article(type(self).__name__)} can be neither copied nor pickled, since its launches hold memory "
            f"of this process; {self.instead}"
        )


Slots = Sequence[torch.Tensor]


FlagTable = dict[int, tuple[BoundProgram, IndexFlags]]
"""By its id, each program of a sequence of runs whose launches read indices, bodies among them, and its flags. A body
has one set of flags for all of its runners, so that nothing is lost with the capture that a runner belongs to."""


class BodyRunner(Protocol):
    """Runs of a body of a higher-order call, on storage of its own."""

    def apply(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]: ...


@dataclass(frozen=True, slots=True)
class ProgramMemory:
    """What the runs and replays of one sequence share: a program with its weights, states, and storage in the arena."""

    bound: BoundProgram
    states: States
    arena: Mapping[int, torch.Tensor]
    """By vid, for every value that owns storage in the arena."""
    runner_of: Callable[[BoundProgram], BodyRunner]
    """Makes a runner for a body; each has an arena of its own."""
    flags: IndexFlags | None
    """Those of all launches, of runs and replays; None where no launch sets any."""
    flag_table: FlagTable

    @property
    def plan_key(self) -> str:
        return self.bound.plan.graph_digest

    def memory_for(self, feed: object) -> ProgramMemory:
        """This memory, as a `MemorySource` of one plan with concrete sizes."""
        return self

    def latest_memory(self) -> ProgramMemory:
        return self

    @property
    def memories(self) -> Sequence[ProgramMemory]:
        return (self,)

    def bind_slots(self, fed: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
        """The slot table, with `fed` as the storage of what the caller brings: owners of storage, and views of them."""
        owners = {**self.bound.weights, **self.states.tensors, **fed, **self.arena}
        read = (*self.bound.weights.values(), *owners.values())  # initial values of states too
        self.states.order.keep(tensor for tensor in read if self.bound.device.holds(tensor))
        # A slot may be pointed at other memory, so each table has tensors of its own.
        slots = [owners[vid].detach() if vid in owners else UNUSED for vid in range(len(self.bound.plan.slots))]
        for view in self.bound.views:
            root, layout = slots[view.root], view.layout
            slots[view.vid] = root.as_strided(layout.sizes, layout.strides, int(root.storage_offset()) + layout.offset)
        return slots

    def keep(self, launches: Sequence[Launch]) -> None:
        """Keep the memory that these launches read and write allocated until they are done, on any stream."""
        self.states.order.keep(operands(launches))

    def synchronize(self) -> None:
        """Wait until the device has done all runs and replays.

        Raises:
            DataError: one of them had an index out of range.
        """
        if not self.flag_table:
            self.bound.device.synchronize()
        for program, flags in self.flag_table.values():
            flags.wait()
            program.refuse_wrong_indices(flags)

    def bind_step(self, step: LaunchStep, slots: Slots) -> Launch:
        """The launch of `step` on these slots.

        Raises:
            InternalError: the shapes of the call do not fit its kernel.
        """
        bodies = self.bound.bodies.get(step.index)
        if bodies:
            step = step.with_attrs(bodies=tuple(self.runner_of(body).apply for body in bodies))
        ins, outs = ([slots[vid] for vid in vids] for vids in (step.call.in_vids, step.call.out_vids))
        constants = [at for at, vid in enumerate(step.call.in_vids) if self._is_constant(vid)]
        token = CURRENT.set(self.flags and CheckedCall(self.flags, step.index, constants))
        try:
            with kernels_for_threads(self.bound.threads, self.bound.device):
                launch = step.bind(ins, outs)
        except launch_errors() as error:
            raise self.bound.failure(step, error) from error
        finally:
            CURRENT.reset(token)
        return partial(_launch_and_wait, launch, self.bound.device) if self.bound.debug else launch

    def _is_constant(self, vid: int) -> bool:
        root = self.bound.plan.root(vid)
        return root in self.bound.weights and self.bound.plan.slots[root].role is Role.CONST

    def check_shapes(self, slots: Slots) -> None:
        """Check that torch resized no out= tensor. Shapes do not depend on data, so the first run is enough.

        Raises:
            InternalError: an operator resized its result.
        """
        program, plan = self.bound, self.bound.plan
        for step in self.bound.steps:
            for vid in step.call.out_vids:
                if tuple(slots[vid].shape) != plan.slots[vid].spec.sizes:
                    made = list(slots[vid].shape)
                    raise InternalError(f"{program.describe(step)} made {made} for {program.describe_value(vid)}")

    def written_states(self, steps: Iterable[LaunchStep]) -> set[int]:
        """The states that lie where one of `steps` writes."""
        roots = {self.bound.plan.root(vid) for step in steps for vid in step.call.out_vids}
        return roots & self.states.tensors.keys()


def _launch_and_wait(launch: Launch, device: Device) -> None:
    launch()
    device.synchronize()


UNUSED = torch.empty(0)
"""Stands in the slots of values that nothing reads."""
