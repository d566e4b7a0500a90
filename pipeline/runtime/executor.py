"""Run a plan: `__init__` decides all that can be decided before the first run; a run is a loop over launches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from threading import RLock

import torch

from pipeline.errors import InternalError, OnnxlineError, SourceError, Unsupported
from pipeline.ir.graph import Payload, TensorSpec
from pipeline.lowering import KernelCall, Kind, Layout, unpack
from pipeline.planning import ExecutionPlan
from pipeline.runtime.kernels import KERNELS, Attrs, Bind, Launch, bind_attrs
from pipeline.runtime.kernels.index import KERNELS as INDEXING
from pipeline.runtime.run_errors import ResultMismatch, data_error, is_data_error
from pipeline.runtime.slots import Feed, bind_arena, bind_feed, bind_weights, refuse_foreign_devices
from pipeline.runtime.states import States
from pipeline.runtime.tensors import torch_dtype

__all__ = ["Executor"]

LARGE = 2**16
"""Bytes of an output from which a copy costs more than rebinding the steps that write it."""

LAUNCH_ERRORS = (RuntimeError, IndexError, ValueError, TypeError)


@dataclass(frozen=True, slots=True)
class LaunchStep:
    """A call that does work: its kernel with decoded attributes. Bound to slots it becomes a launch."""

    index: int
    bind: Bind
    call: KernelCall
    attrs: Attrs


@dataclass(frozen=True, slots=True)
class View:
    """An alias, and its layout in the storage of its root."""

    vid: int
    root: int
    layout: Layout


@dataclass(frozen=True, slots=True)
class Rebinding:
    """Views and steps to rebind when the tensors of some values change."""

    vids: tuple[int, ...]
    views: tuple[View, ...]
    """Views of these values, in the order of the calls."""
    steps: tuple[int, ...]
    """Positions of the calls that read or write these values or views."""


class Executor:
    """Owns the arena of one plan. Threads that share it wait for one another, since a run fills the arena.

    A step becomes a launch, a callable without arguments, when the storage of its operands is known: nearly all of them
    here. Steps that read the caller's inputs are bound at each run and released afterwards, since a copy into buffers
    of our own would cost a second KV cache where one is fed. Fed weights stay bound until other tensors are fed.

    `bodies` are the executors of the bodies of higher-order calls, by the index of the call. `functional`: operators of
    torch allocate their results, as autocast requires, and these are copied into the slots. `places` describe the
    source of each call, for messages.

    Raises:
        InternalError: a call has no kernel, its attributes cannot be decoded, or its shapes do not fit.
        SourceError: a payload does not fit its slot.
        Unsupported: the plan asks for a device other than the CPU.
    """

    def __init__(
        self,
        plan: ExecutionPlan,
        payloads: Mapping[int, Payload],
        bodies: Mapping[int, Sequence[Executor]] | None = None,
        *,
        functional: bool = False,
        places: Sequence[str] = (),
    ) -> None:
        refuse_foreign_devices(plan.slots)
        self.plan = plan
        self._bodies = {at: tuple(body.apply for body in several) for at, several in (bodies or {}).items()}
        self._functional = functional
        self._places = places
        self._slots = [torch.empty(0)] * len(plan.slots)
        weights = bind_weights(plan, payloads)
        self.states = States(plan, weights)
        self._fill({**weights, **self.states.tensors})
        self._fill(bind_arena(plan, torch.empty(plan.arena_bytes, dtype=torch.uint8)))
        self._read = {*plan.outputs, *plan.updates.values(), *(vid for call in plan.calls for vid in call.in_vids)}
        self._steps = [self._step(index) for index, call in enumerate(plan.calls) if not _is_free(plan, call)]
        self._launches: list[Launch] = [_unbound] * len(self._steps)
        inputs = set(plan.inputs)
        self._signature = _fed_vids(plan)
        weights = set(self._signature) - inputs
        calls = [step.call for step in self._steps]
        self._inputs = _find_rebinding(plan, calls, inputs)
        self._large = _find_rebinding(plan, calls, _large_outputs(plan), self._inputs.steps)
        self._weights = _find_rebinding(plan, calls, weights, {*self._inputs.steps, *self._large.steps})
        self._in_arena = {vid: self._slots[vid] for vid in self._large.vids}
        self._weight_addresses: list[int] = []
        """`data_ptr` of each weight of the last feed."""
        later = {*self._inputs.steps, *self._weights.steps, *self._large.steps}
        self._bind(
            [view for view in _views_of(plan) if view.root not in inputs | weights],
            [at for at in range(len(self._steps)) if at not in later],
        )
        self._large_in_arena = False
        """Whether the steps that write and read large outputs are bound to the arena."""
        self._shapes_checked = False
        self._lock = RLock()
        self._reached = 0
        """How many steps of the last run began, and so may have written."""

    def run(self, feed: Feed, *, copy: bool = True) -> dict[str, torch.Tensor]:
        """Outputs by name for inputs by name.

        With `copy=False` an output may be a view of the arena, of a weight or of the caller's input, with any strides,
        and the next run may change it.

        Raises:
            UsageError: the feed does not fit the plan's signature.
            DataError: an index in it is out of range (a UsageError too).
            SourceError: an op made another dtype or shape than the graph says.
            InternalError: a kernel failed.
        """
        return self._run(feed, self.plan.outputs, copy=copy)

    def run_updating(self, feed: Feed, *, copy: bool = True) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Outputs, and the values after the run of the inputs that the graph updates; see `run`."""
        updated = {vid: after for vid, after in self.plan.updates.items() if vid not in self.states.tensors}
        found = self._run(feed, (*self.plan.outputs, *updated.values()), copy=copy)
        slots = self.plan.slots
        return (
            {slots[vid].name: found[slots[vid].name] for vid in self.plan.outputs},
            {slots[vid].name: found[slots[after].name] for vid, after in updated.items()},
        )

    def apply(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Outputs for inputs, both in order, of a plan without fed weights; the next call may change them."""
        names = [self.plan.slots[vid].name for vid in self.plan.inputs]
        found = self._run(dict(zip(names, tensors, strict=True)), self.plan.outputs, copy=False)
        return [found[self.plan.slots[vid].name] for vid in self.plan.outputs]

    def _run(self, feed: Feed, wanted: Sequence[int], *, copy: bool) -> dict[str, torch.Tensor]:
        with self._lock:
            return self._run_locked(feed, wanted, copy=copy)

    def _run_locked(self, feed: Feed, wanted: Sequence[int], *, copy: bool) -> dict[str, torch.Tensor]:
        states = {name: tensor for name, tensor in feed.items() if name in self.states.names}
        rest = {name: tensor for name, tensor in feed.items() if name not in states}
        given = dict(zip(self._signature, bind_feed(self.plan.feed_signature, rest), strict=True))
        self.states.give(states)
        self.states.refuse_missing()
        self._reached = 0
        try:
            with torch.no_grad():
                self._bind_weights({vid: given[vid] for vid in self._weights.vids})
                self._fill({vid: given[vid] for vid in self._inputs.vids})
                self._bind_large(new=copy)
                self._bind(self._inputs.views, self._inputs.steps)
                self._launch()
                self._check_shapes()
                outputs = {self.plan.slots[vid].name: self._leaving(vid, copy=copy) for vid in wanted}
                self.states.advance(self._slots)
                return outputs
        except BaseException:
            self.states.lose(self._written_states())
            raise
        finally:
            self._release()

    def _leaving(self, vid: int, *, copy: bool) -> torch.Tensor:
        """An output for the caller: a copy if it is a view of a state, none if it was allocated for the caller."""
        root = self.plan.root(vid)
        copy = (copy and root not in self._in_arena) or root in self.states.tensors
        return _copy(self._slots[vid]) if copy else self._slots[vid]

    def _launch(self) -> None:
        at, launches = -1, self._launches
        try:
            # No tensor that is created here outlives the loop, so no inference tensor reaches the caller.
            with torch.inference_mode():
                for at in range(len(launches)):
                    launches[at]()
        except LAUNCH_ERRORS as error:
            raise self._failure(self._steps[at], error) from error
        finally:
            self._reached = at + 1

    def _written_states(self) -> set[int]:
        """The states that a step of the last run wrote, or began to write."""
        begun = [self.plan.root(vid) for step in self._steps[: self._reached] for vid in step.call.out_vids]
        return {root for root in begun if root in self.states.tensors}

    def _bind(self, views: Iterable[View], steps: Iterable[int]) -> None:
        """Bind views of bound slots, then the steps that read or write them."""
        slots = self._slots
        for view in views:
            root, layout = slots[view.root], view.layout
            slots[view.vid] = root.as_strided(layout.sizes, layout.strides, int(root.storage_offset()) + layout.offset)
        for at in steps:
            step = self._steps[at]
            ins, outs = ([slots[vid] for vid in vids] for vids in (step.call.in_vids, step.call.out_vids))
            try:
                self._launches[at] = step.bind(ins, outs)
            except LAUNCH_ERRORS as error:
                raise self._failure(step, error) from error

    def _bind_weights(self, given: Mapping[int, torch.Tensor]) -> None:
        """Rebind fed weights if they changed. `data_ptr` identifies a tensor while the slots hold it."""
        addresses = [tensor.data_ptr() for tensor in given.values()]
        if not given or addresses == self._weight_addresses:
            return
        self._weight_addresses, self._large_in_arena = [], False
        self._fill(given)
        self._bind(self._weights.views, self._weights.steps)
        self._weight_addresses = addresses

    def _bind_large(self, *, new: bool) -> None:
        """Bind large outputs to new tensors for the caller or, without `new`, to the arena."""
        if not new and self._large_in_arena:
            return
        slots = self.plan.slots
        self._large_in_arena = not new
        self._fill({vid: _empty(slots[vid].spec) for vid in self._in_arena} if new else self._in_arena)
        self._bind(self._large.views, self._large.steps)

    def _release(self) -> None:
        """Drop the caller's inputs and large outputs, and the views and launches that were bound to them."""
        for released in (self._inputs,) if self._large_in_arena else (self._inputs, self._large):
            self._fill(dict.fromkeys((*released.vids, *(view.vid for view in released.views)), torch.empty(0)))
            for at in released.steps:
                self._launches[at] = _unbound

    def _failure(self, step: LaunchStep, error: Exception) -> OnnxlineError:
        described = self._describe(step.index)
        place = self._places[step.index] if self._places else described
        if isinstance(error, ResultMismatch):
            return SourceError(f"{place}: {error}")
        if "not implemented for" in str(error):
            return Unsupported(
                f"{place}: torch's CPU has no such operator for these dtypes ({described}: {error}); "
                "cast to another dtype around it, or run the model by onnxruntime"
            )
        # Shapes were settled when the plan was made, so a gather fails only for an index out of range.
        if is_data_error(error) or Kind(step.call.kind_id) in INDEXING:
            slots = [self.plan.slots[vid] for vid in step.call.in_vids]
            return data_error(place, [(slot.name, slot.spec) for slot in slots], error)
        return InternalError(f"{described} failed: {error}")

    def _check_shapes(self) -> None:
        """Check that torch resized no out= tensor. Shapes do not depend on data, so the first run is enough."""
        if self._shapes_checked:
            return
        for step in self._steps:
            for vid in step.call.out_vids:
                out = self._slots[vid]
                if tuple(out.shape) != self.plan.slots[vid].spec.sizes:
                    raise InternalError(
                        f"{self._describe(step.index)} made {list(out.shape)} for {self._describe_value(vid)}"
                    )
        self._shapes_checked = True

    def _step(self, index: int) -> LaunchStep:
        call = self.plan.calls[index]
        kind = Kind(call.kind_id) if call.kind_id in Kind.__members__.values() else None
        if kind is None or kind not in KERNELS:
            raise InternalError(f"call {index} has kind_id {call.kind_id}, for which this runtime has no kernel")
        attrs = unpack(call.attr_schema, call.attr_blob)
        unread = [at for at, vid in enumerate(call.out_vids) if vid not in self._read]
        attrs |= {"functional": self._functional, "bodies": self._bodies.get(index, ()), "unread": unread}
        return LaunchStep(index, bind_attrs(kind, attrs), call, attrs)

    def _fill(self, bound: Mapping[int, torch.Tensor]) -> None:
        for vid, tensor in bound.items():
            self._slots[vid] = tensor

    def _describe(self, index: int) -> str:
        call = self.plan.calls[index]
        ins, outs = (", ".join(map(self._describe_value, vids)) for vids in (call.in_vids, call.out_vids))
        return f"call {index} {Kind(call.kind_id).name}({ins}) → {outs}"

    def _describe_value(self, vid: int) -> str:
        slot = self.plan.slots[vid]
        return f"{slot.name}: {slot.spec.dtype}{list(slot.spec.shape)}"


def _find_rebinding(
    plan: ExecutionPlan, calls: Sequence[KernelCall], vids: set[int], but: Iterable[int] = ()
) -> Rebinding:
    """Views and steps to rebind when the tensors of `vids` change; `calls` are the steps, `but` positions of others."""
    touched = [
        at for at, call in enumerate(calls) if any(plan.root(vid) in vids for vid in (*call.in_vids, *call.out_vids))
    ]
    steps = tuple(at for at in touched if at not in set(but))
    return Rebinding(tuple(sorted(vids)), tuple(view for view in _views_of(plan) if view.root in vids), steps)


def _views_of(plan: ExecutionPlan) -> list[View]:
    """The aliases of a plan, in the order of the calls."""
    vids = [vid for call in plan.calls for vid in call.out_vids if vid in plan.alias]
    return [View(vid, plan.root(vid), plan.layout(vid)) for vid in vids]


def _large_outputs(plan: ExecutionPlan) -> set[int]:
    """Values in the arena that a run may write into a new tensor for the caller: large ones that are whole outputs."""
    leaving = (*plan.outputs, *(after for vid, after in plan.updates.items() if vid in plan.inputs))
    return {
        plan.root(vid)
        for vid in leaving
        if plan.root(vid) in plan.offsets
        and plan.strides(vid) is None
        and plan.slots[vid].spec.nbytes == plan.slots[plan.root(vid)].spec.nbytes >= LARGE
    }


def _fed_vids(plan: ExecutionPlan) -> list[int]:
    vids = {slot.name: slot.vid for slot in plan.slots}
    return [vids[entry.name] for entry in plan.feed_signature]


def _is_free(plan: ExecutionPlan, call: KernelCall) -> bool:
    """Whether all outputs of the call are views on their operand's storage, so that nothing is left to do."""
    position = call.constraints.get("view")
    return isinstance(position, int) and plan.alias.get(call.out_vids[0]) == call.in_vids[position]


def _empty(spec: TensorSpec) -> torch.Tensor:
    return torch.empty(spec.sizes, dtype=torch_dtype(spec.dtype))


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy, also of a view with other strides."""
    return tensor.clone(memory_format=torch.contiguous_format)


def _unbound() -> None:
    raise RuntimeError("a step was launched before its operands were bound")
