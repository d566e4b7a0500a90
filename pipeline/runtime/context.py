"""Run a program: a context decides all that can be decided before the first run; a run is a loop over launches."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from pipeline.ir.graph import TensorSpec
from pipeline.planning import ExecutionPlan, FeedEntry
from pipeline.runtime.capture import Captures
from pipeline.runtime.devices import Device, launch_errors
from pipeline.runtime.feeding import (
    LARGE,
    CopiedSlot,
    FedSlot,
    PointedSlot,
    SlotPointer,
    operands,
    tensors_by_storage,
)
from pipeline.runtime.kernels import has_native
from pipeline.runtime.kernels.aten.indices import IndexFlags
from pipeline.runtime.program import BoundProgram, FlagTable, ProcessBound, ProgramMemory
from pipeline.runtime.slots import Feed, bind_arena, new_memory, placeholders, refuse_names, refuse_unreadable
from pipeline.runtime.states import States, StateTable
from pipeline.runtime.tensors import storage_id, torch_dtype
from pipeline.runtime.torch_state import plain_state

Tensors = dict[str, torch.Tensor]


class Context(ProcessBound):
    """One sequence of runs of a program: its arena, slots, launches and states. Threads must not share one.

    Every step is bound to its operands here, once. What a run brings (the feed, memory for large outputs) is copied
    into slots, or slots are pointed at it.

    Args:
        table: states that are shared with contexts of other programs; without it the context has its own.
        arena: bytes that are shared with contexts that run by turns, at least `plan.arena_bytes`.
        states: those of another plan of the same graph, at other sizes; they keep their values.
        flag_table: that of the sequence in which this is a context of a body.

    Raises:
        UsageError: this machine has not enough memory.
        InternalError: the shapes of a call do not fit its kernel.
    """

    def __init__(
        self,
        bound: BoundProgram,
        *,
        table: StateTable | None = None,
        arena: torch.Tensor | None = None,
        states: States | None = None,
        flag_table: FlagTable | None = None,
    ) -> None:
        self.bound = bound
        self.plan, self._device = plan, device = bound.plan, bound.device
        # Slots are written to in every mode, so they must not become inference tensors of a caller in that mode.
        with plain_state(), torch.inference_mode(mode=False), torch.no_grad(), device.scope():
            table = table or StateTable({plan.graph_name: plan}, device)
            self.states = States(plan, bound.weights, table) if states is None else states
            fed = _fed_entries(plan)
            pointed = [vid for vid, entry in fed.items() if not _is_copied(plan, vid, entry)]
            buffers = {
                vid: device.empty(entry.spec.sizes, entry.strides, torch_dtype(entry.spec.dtype))
                for vid, entry in fed.items()
                if vid not in pointed
            }
            homes = placeholders(plan, {vid: fed[vid] for vid in pointed}, device)
            self._arena = new_memory(plan, plan.arena_bytes, device) if arena is None else arena
            self.states.order.keep([self._arena])
            places = bind_arena(plan, self._arena, device)
            flag_table = {} if flag_table is None else flag_table
            flags = flag_table[id(bound)][1] if id(bound) in flag_table else _new_flags(bound)
            runner_of = partial(Context, flag_table=flag_table)
            self.memory = ProgramMemory(bound, self.states, places, runner_of, flags, flag_table)
            self._slots = self.memory.bind_slots({**buffers, **homes})
            self._steps = bound.steps
            self._launches = [self.memory.bind_step(step, self._slots) for step in bound.steps]
            self._flags = flags if flags is not None and flags.owners else None
            self.memory = replace(self.memory, flags=self._flags)
            if self._flags is not None:
                flag_table[id(bound)] = bound, self._flags
            self.memory.keep(self._launches)
            pointers = self._pointers([*pointed, *_large_outputs(plan)])
        self._fed: list[FedSlot] = [
            CopiedSlot(entry, device, buffers[vid])
            if vid in buffers
            else PointedSlot(entry, device, pointers[vid], stays=vid not in plan.inputs)
            for vid, entry in fed.items()
        ]
        self._large = {vid: pointers[vid] for vid in _large_outputs(plan)}
        self._moving = {*self._large, *pointed}
        """Roots of the values whose slots are pointed at other memory."""
        self.captures = Captures(self.memory)
        """Replays continue the sequence of the runs: they have the same states, and the same arena."""
        self._inference = torch.inference_mode()
        self._shapes_checked = False
        self._reached = 0
        """How many steps of the last run began, and so may have written."""

    @property
    def native_calls(self) -> int:
        """How many launches call a kernel in C++."""
        return sum(map(has_native, self._launches))

    def run(self, feed: Feed, *, copy: bool = True) -> Tensors:
        """Outputs by name for inputs by name.

        With `copy=False` an output may be a view of the arena, of a weight or of the caller's input, with any strides,
        and the next run may change it.

        Raises:
            UsageError: the feed does not fit the plan's signature.
            DataError: an index in it is out of range (a UsageError too).
            SourceError: an op made another dtype or shape than the graph says.
            InternalError: a kernel failed.
        """
        with plain_state(), self._device.scope():
            found = self._run(feed, self.plan.outputs, copy=copy)
        return {self.plan.slots[vid].name: tensor for vid, tensor in found.items()}

    def run_updating(self, feed: Feed, *, copy: bool = True) -> tuple[Tensors, Tensors]:
        """Outputs, and the values after the run of the inputs that the graph updates; see `run`."""
        plan, slots = self.plan, self.plan.slots
        updated = {vid: after for vid, after in plan.updates.items() if vid not in self.states.tensors}
        with plain_state(), self._device.scope():
            found = self._run(feed, (*plan.outputs, *updated.values()), copy=copy)
        outputs = {slots[vid].name: found[vid] for vid in plan.outputs}
        return outputs, {slots[vid].name: found[after] for vid, after in updated.items()}

    def walk(self, feed: Feed) -> Generator[tuple[int, list[torch.Tensor]], None, None]:
        """One run, call by call: the index of each call of the plan, and copies of what it computed.

        Raises:
            UsageError, DataError, InternalError: as `run`.
        """
        steps = {step.index: at for at, step in enumerate(self._steps)}
        self.states.order.enter()
        given = self._accept(feed)
        begun = 0  # the steps that began, and may have written to states
        try:
            for slot, tensor in zip(self._fed, given, strict=True):
                slot.write(tensor)
            for index, call in enumerate(self.plan.calls):
                if index in steps:  # a call that only makes views has no launch
                    begun = steps[index] + 1
                    self._launch_one(steps[index])
                yield index, [self._slots[vid].clone() for vid in call.out_vids]
            if self.states.tensors:
                self.states.advance(self.plan, self._slots)
        except BaseException:
            self.states.lose(self.memory.written_states(self._steps[:begun]))
            refuse_unreadable(feed)
            raise
        finally:
            for slot in self._fed:
                slot.release()

    def apply(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Outputs for inputs, both in order, of a plan without fed weights; the next call may change them.

        This runs a body, so autocast stays on where the operator around the body switched it on.
        """
        names = [self.plan.slots[vid].name for vid in self.plan.inputs]
        found = self._run(dict(zip(names, tensors, strict=True)), self.plan.outputs, copy=False)
        return [found[vid] for vid in self.plan.outputs]

    def _run(self, feed: Feed, wanted: Sequence[int], *, copy: bool) -> dict[int, torch.Tensor]:
        new: dict[int, torch.Tensor] = {}
        self._reached = 0
        self.states.order.enter()
        if self._flags is not None:
            self.bound.refuse_wrong_indices(self._flags)
        try:
            for slot, tensor in zip(self._fed, self._accept(feed), strict=True):
                slot.write(tensor)
            if copy and self._large:
                new = self._point_at_new()
            self._launch()
            if self._flags is not None:
                self._flags.start()
            if not self._shapes_checked:
                self.memory.check_shapes(self._slots)
                self._shapes_checked = True
            outputs = {vid: self._leaving(vid, new, copy=copy) for vid in wanted}
            if self.states.tensors:
                self.states.advance(self.plan, self._slots)
            if self.bound.debug:
                self.memory.synchronize()
            return outputs
        except BaseException:
            self.states.lose(self.memory.written_states(self._steps[: self._reached]))
            refuse_unreadable(feed)
            raise
        finally:
            for slot in self._fed:
                slot.release()
            for vid in new:
                self._large[vid].point_home()

    def _accept(self, feed: Feed) -> list[torch.Tensor]:
        """The caller's tensors in the order of the signature; states that come with them are taken over."""
        if len(feed) != len(self._fed):
            return self._accept_with_states(feed)
        try:
            given = [slot.accept(feed[slot.name]) for slot in self._fed]
        except KeyError:  # a name is missing, so another one is there
            return self._accept_with_states(feed)
        self.states.refuse_missing()
        return given

    def _accept_with_states(self, feed: Feed) -> list[torch.Tensor]:
        states = {name: feed[name] for name in feed if name in self.states.names}
        rest = {name: tensor for name, tensor in feed.items() if name not in states}
        refuse_names(self.plan.feed_signature, rest)
        given = [slot.accept(rest[slot.name]) for slot in self._fed]
        self.states.give(states)
        self.states.refuse_missing()
        return given

    def _leaving(self, vid: int, new: Mapping[int, torch.Tensor], *, copy: bool) -> torch.Tensor:
        """An output for the caller: new memory, a copy, or a view; a copy also if it is a view of a state."""
        slot, root = self._slots[vid], self.plan.root(vid)
        if root in new:
            return new[root].view(slot.shape)
        if copy or root in self.states.tensors:
            return slot.clone(memory_format=torch.contiguous_format)
        return slot.detach() if root in self._moving else slot  # the slot itself may be pointed elsewhere

    def _launch(self) -> None:
        at = -1
        try:
            # No tensor that is created here outlives the loop, so no inference tensor reaches the caller.
            with self._inference:
                for at, launch in enumerate(self._launches):  # noqa: B007 - read where a launch fails
                    launch()
        except launch_errors() as error:
            raise self.bound.failure(self._steps[at], error) from error
        finally:
            self._reached = at + 1

    def _launch_one(self, at: int) -> None:
        try:
            with self._inference, self._device.scope():
                self._launches[at]()
        except launch_errors() as error:
            raise self.bound.failure(self._steps[at], error) from error

    def _point_at_new(self) -> dict[int, torch.Tensor]:
        """New memory for the caller by root, to which the large outputs are written."""
        new = {vid: _empty(self._device, self.plan.slots[vid].spec) for vid in self._large}
        for vid, tensor in new.items():
            self._large[vid].point_at(tensor)
        return new

    def _pointers(self, vids: Iterable[int]) -> dict[int, SlotPointer]:
        """For each of these values, which own their storage, all tensors that show it."""
        storages = {vid: storage_id(self._slots[vid]) for vid in vids}
        held = [*self._slots, *operands(self._launches)] if storages else []
        shown = tensors_by_storage(held, storages.values())
        return {vid: SlotPointer(self._slots[vid].detach(), shown[storage]) for vid, storage in storages.items()}


def _new_flags(bound: BoundProgram) -> IndexFlags | None:
    """Flags for the indices of launches, where kernels do not check them; None where no call may read any."""
    slots = bound.plan.slots
    indices = sum("int" in slots[vid].spec.dtype for step in bound.steps for vid in step.call.in_vids)
    return None if bound.device.is_host or not indices else IndexFlags(bound.device, indices)


def _fed_entries(plan: ExecutionPlan) -> dict[int, FeedEntry]:
    """The entries of the feed signature by vid, in order."""
    vids = {slot.name: slot.vid for slot in plan.slots}
    return {vids[entry.name]: entry for entry in plan.feed_signature}


def _is_copied(plan: ExecutionPlan, vid: int, entry: FeedEntry) -> bool:
    """Whether a fed value is copied at each run; weights are pointed at, since they stay."""
    return vid in plan.inputs and entry.spec.nbytes < LARGE


def _large_outputs(plan: ExecutionPlan) -> list[int]:
    """Values in the arena that a run may write into new memory for the caller: large ones that are whole outputs."""
    leaving = (*plan.outputs, *(after for vid, after in plan.updates.items() if vid in plan.inputs))
    roots = [
        plan.root(vid)
        for vid in leaving
        if plan.root(vid) in plan.offsets
        and plan.strides(vid) is None
        and plan.slots[vid].spec.nbytes == plan.slots[plan.root(vid)].spec.nbytes >= LARGE
    ]
    return list(dict.fromkeys(roots))


def _empty(device: Device, spec: TensorSpec) -> torch.Tensor:
    return device.empty(spec.sizes, None, torch_dtype(spec.dtype))
