"""Runs a plan: everything that can be decided before the first run is decided in `__init__`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from pipeline.errors import InternalError, OnnxlineError, UserMistake
from pipeline.ir.graph import Payload
from pipeline.lowering import KernelCall, Kind, unpack
from pipeline.planning import ExecutionPlan
from pipeline.runtime.kernels import KERNELS, Attrs, Kernel
from pipeline.runtime.kernels.index import KERNELS as INDEXING
from pipeline.runtime.slots import Feed, bind_arena, bind_feed, bind_weights, refuse_foreign_devices

__all__ = ["Executor"]


@dataclass(frozen=True, slots=True)
class Step:
    """One call, bound: the kernel, its decoded attributes, and the storage of its outputs."""

    index: int
    kernel: Kernel
    in_vids: tuple[int, ...]
    outs: tuple[torch.Tensor, ...]
    attrs: Attrs


class Executor:
    """Owns the arena of one plan. Not for two threads at once: they would share the arena.

    Raises:
        InternalError: a call has no kernel, or its attributes cannot be decoded.
        SourceMistake: a payload does not fit its slot.
        Unsupported: the plan asks for a device other than the CPU.
    """

    def __init__(self, plan: ExecutionPlan, payloads: Mapping[int, Payload]) -> None:
        refuse_foreign_devices(plan.slots)
        self.plan = plan
        self._unbound = torch.empty(0)
        self._slots = [self._unbound] * len(plan.slots)
        self._fill(bind_weights(plan, payloads))
        self._fill(bind_arena(plan, torch.empty(plan.arena_bytes, dtype=torch.uint8)))
        vids = {slot.name: slot.vid for slot in plan.slots}
        self._fed = [vids[entry.name] for entry in plan.feed_signature]
        # An alias of a weight or of arena storage is bound here; one that hangs on an input, at every run.
        self._late_aliases = [pair for pair in _aliases(plan) if not self._bind_alias(*pair)]
        self._steps = [self._step(index) for index, call in enumerate(plan.calls) if not _is_free(plan, call)]
        self._proved = False

    def run(self, feed: Feed, *, copy: bool = True) -> dict[str, torch.Tensor]:
        """Outputs by name for inputs by name.

        With `copy=False` an output may be a view of the arena, of a weight or of the caller's own input: the next run
        may change it.

        Raises:
            UserMistake: the feed does not fit the plan's signature, or an index in it is out of range.
            InternalError: a kernel failed.
        """
        tensors = bind_feed(self.plan.feed_signature, feed)
        try:
            self._fill(dict(zip(self._fed, tensors, strict=True)))
            for out, source in self._late_aliases:
                self._bind_alias(out, source)
            with torch.no_grad():
                self._launch()
                self._prove_shapes()
                outputs = {self.plan.slots[vid].name: self._slots[vid] for vid in self.plan.outputs}
                return {name: tensor.clone() for name, tensor in outputs.items()} if copy else outputs
        finally:
            self._fill(dict.fromkeys((*self._fed, *(out for out, _ in self._late_aliases)), self._unbound))

    def _launch(self) -> None:
        slots = self._slots
        for step in self._steps:
            try:
                step.kernel([slots[vid] for vid in step.in_vids], step.outs, step.attrs)
            except (RuntimeError, IndexError, ValueError, TypeError) as error:
                raise self._failure(step, error) from error

    def _failure(self, step: Step, error: Exception) -> OnnxlineError:
        what = f"{self._described(step.index)} failed: {error}"
        # Shapes were settled when the plan was made, so a gather that fails read an index that is too large.
        if Kind(self.plan.calls[step.index].kind_id) in INDEXING:
            return UserMistake(f"{what}; look for an index that is out of range in the feed")
        return InternalError(what)

    def _prove_shapes(self) -> None:
        """Torch resizes an out= tensor that does not fit. Shapes do not depend on data, so the first run tells."""
        if self._proved:
            return
        for step in self._steps:
            for vid, out in zip(self.plan.calls[step.index].out_vids, step.outs, strict=True):
                if tuple(out.shape) != self.plan.slots[vid].spec.sizes:
                    raise InternalError(f"{self._described(step.index)} made {list(out.shape)} for {self._named(vid)}")
        self._proved = True

    def _step(self, index: int) -> Step:
        call = self.plan.calls[index]
        kernel = KERNELS.get(Kind(call.kind_id)) if call.kind_id in Kind.__members__.values() else None
        if kernel is None:
            raise InternalError(f"call {index} has kind_id {call.kind_id}, for which this runtime has no kernel")
        outs = tuple(self._slots[vid] for vid in call.out_vids)
        return Step(index, kernel, call.in_vids, outs, unpack(call.attr_schema, call.attr_blob))

    def _fill(self, bound: Mapping[int, torch.Tensor]) -> None:
        for vid, tensor in bound.items():
            self._slots[vid] = tensor

    def _bind_alias(self, out: int, source: int) -> bool:
        """Bind `out` over the storage of `source`; False while `source` itself is unbound."""
        tensor = self._slots[source]
        if tensor is self._unbound:
            return False
        self._slots[out] = tensor.view(self.plan.slots[out].spec.sizes)
        return True

    def _described(self, index: int) -> str:
        call = self.plan.calls[index]
        ins, outs = (", ".join(map(self._named, vids)) for vids in (call.in_vids, call.out_vids))
        return f"call {index} {Kind(call.kind_id).name}({ins}) → {outs}"

    def _named(self, vid: int) -> str:
        slot = self.plan.slots[vid]
        return f"{slot.name}: {slot.spec.dtype}{list(slot.spec.shape)}"


def _aliases(plan: ExecutionPlan) -> list[tuple[int, int]]:
    """(out_vid, in_vid) in the order of the calls, so that a chain is bound from its root."""
    return [(vid, plan.alias[vid]) for call in plan.calls for vid in call.out_vids if vid in plan.alias]


def _is_free(plan: ExecutionPlan, call: KernelCall) -> bool:
    """A view that shares its operand's storage: nothing is left to do."""
    position = call.constraints.get("view")
    return isinstance(position, int) and plan.alias.get(call.out_vids[0]) == call.in_vids[position]
