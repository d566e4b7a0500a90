"""Values that live across runs: running statistics, caches. They are copies; the caller's tensors are never written.

A plan may write a new value over the old one as soon as nobody needs the old one. So a run that fails may leave states
half written. These have no value any more: reading the states, or the next run, raises LostStates with their names. All
other states keep the value from before the run that failed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch

from pipeline.errors import UsageError
from pipeline.ir.graph import Role
from pipeline.planning import ExecutionPlan, FeedEntry, Slot
from pipeline.runtime.devices import Device
from pipeline.runtime.slots import Feed, accept_feed
from pipeline.runtime.tensors import torch_dtype


class LostStates(UsageError):
    """A failed run had begun to write to the states `names`, which have no value any more."""

    def __init__(self, names: Collection[str]) -> None:
        self.names = frozenset(names)
        super().__init__(
            f"a run that failed had begun to write to the states {', '.join(sorted(names))}: give all states "
            "a value again (`reset_states`, `give_states` with what `states` gave before, or load the weights again)"
        )


class StateTable:
    """The states that some of several plans change, by name: one tensor each, which all plans that have it share.

    Raises:
        UsageError: a state that a plan has in another form, as a weight, or as a part of its feed.
    """

    def __init__(self, plans: Mapping[str, ExecutionPlan], device: Device) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.missing: set[str] = set()
        self.lost: set[str] = set()
        self.device, self.order = device, device.order()
        owners: dict[str, tuple[str, ExecutionPlan, Slot]] = {}
        for name, plan in plans.items():
            for vid in plan.updates:
                slot = plan.slots[vid]
                if slot.role in CHANGING and slot.name not in owners:
                    owners[slot.name] = name, plan, slot
        for owner, plan, slot in owners.values():
            for other, reader in plans.items():
                _refuse_other_form(slot, plan, owner, reader, other)
            strides = plan.strides(slot.vid)
            self.tensors[slot.name] = device.empty(slot.spec.sizes, strides, torch_dtype(slot.spec.dtype))


def _refuse_other_form(slot: Slot, plan: ExecutionPlan, owner: str, reader: ExecutionPlan, name: str) -> None:
    found = next((candidate for candidate in reader.slots if candidate.name == slot.name), None)
    if found is None:
        return
    if (found.spec, found.role, reader.strides(found.vid)) != (slot.spec, slot.role, plan.strides(slot.vid)):
        raise UsageError(
            f"{slot.name!r} is {_form(slot)} in {owner!r}, which changes it, and {_form(found)} in {name!r}: "
            "entry points share a state in one form"
        )
    if any(entry.name == slot.name for entry in reader.feed_signature):
        raise UsageError(
            f"{slot.name!r} is a state that {owner!r} changes, and {name!r} expects it with each feed; give it a first "
            "value when the graphs are compiled (`weights`)"
        )


def _form(slot: Slot) -> str:
    return f"{slot.role} {slot.spec.dtype}{list(slot.spec.shape)}"


class States:
    """The states of one plan, by vid in `tensors`, whose addresses never change.

    Args:
        table: the states of this plan, and of others that share them.
    """

    def __init__(self, plan: ExecutionPlan, initial: Mapping[int, torch.Tensor], table: StateTable) -> None:
        self._plan, self._table = plan, table
        self.order = table.order
        """The order of all launches that read or write these states."""
        slots = [slot for slot in plan.slots if slot.role in CHANGING and slot.name in table.tensors]
        self.tensors = {slot.vid: table.tensors[slot.name] for slot in slots}
        self._initial = {vid: tensor for vid, tensor in initial.items() if vid in self.tensors}
        self._vids = {slot.name: slot.vid for slot in slots}
        self.reset()

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._vids)

    @property
    def missing(self) -> frozenset[str]:
        """The names of the states that have no value yet."""
        return frozenset(self._table.missing & self.names)

    def reset(self) -> None:
        """Set every state back to its initial value; a state that had none has none again."""
        self.order.enter()
        for vid, tensor in self._initial.items():
            self.tensors[vid].copy_(tensor)
        self._table.missing -= self.names
        self._table.missing |= {name for name, vid in self._vids.items() if vid not in self._initial}
        self._table.lost -= self.names

    def give(self, given: Feed) -> None:
        """Set states by name.

        Raises:
            UsageError: no such state, or another shape or dtype.
        """
        wanted = tuple(
            FeedEntry(name, self._plan.slots[vid].spec, self._plan.strides(vid))
            for name, vid in self._vids.items()
            if name in given
        )
        self.order.enter()
        for entry, tensor in zip(wanted, accept_feed(wanted, given, self._table.device), strict=True):
            self.tensors[self._vids[entry.name]].copy_(tensor, non_blocking=True)
            self._table.missing.discard(entry.name)
            self._table.lost.discard(entry.name)

    def values(self) -> dict[str, torch.Tensor]:
        """Copies of the states that have a value, by name.

        Raises:
            LostStates: some states lost their value in a run that failed.
        """
        self._refuse_lost()
        self.order.enter()
        return {name: self.tensors[vid].clone() for name, vid in self._vids.items() if name not in self._table.missing}

    def value(self, name: str) -> torch.Tensor:
        """A copy of one state.

        Raises:
            LostStates: it lost its value in a run that failed.
        """
        if name in self._table.lost:
            raise LostStates([name])
        self.order.enter()
        return self.tensors[self._vids[name]].clone()

    def lose(self, vids: Iterable[int]) -> None:
        """Mark states to which a failed run may have written: they have no value now."""
        self._table.lost |= {self._plan.slots[vid].name for vid in vids}

    def refuse_missing(self) -> None:
        """Check that every state has a value.

        Raises:
            UsageError: a state has no value yet.
            LostStates: a state has no value any more (a UsageError too).
        """
        if not self._table.lost and not self._table.missing:  # at each run
            return
        self._refuse_lost()
        missing = self._table.missing & self.names
        if missing:
            raise UsageError(
                f"states without a value: {', '.join(sorted(missing))}; give them when the graph is compiled "
                "(`weights`), by `give_states`, or once in the feed"
            )

    def advance(self, plan: ExecutionPlan, slots: Sequence[torch.Tensor]) -> None:
        """Store the new values after a run of `plan`. Views of old states are cloned before any state is written."""
        changed = [vid for vid in self.tensors if vid in plan.updates]
        updates = self.updates_to_copy(plan)
        new = [slots[after].clone() if plan.root(after) in self.tensors else slots[after] for _, after in updates]
        self.lose(vid for vid, _ in updates)  # until all of them are written
        for (vid, _), value in zip(updates, new, strict=True):
            self.tensors[vid].copy_(value)
        self._table.lost -= {self._plan.slots[vid].name for vid in changed}

    def _refuse_lost(self) -> None:
        lost = self._table.lost & self.names
        if lost:
            raise LostStates(lost)

    def updates_to_copy(self, plan: ExecutionPlan) -> list[tuple[int, int]]:
        """(state, value after the run) of the updates that a run of `plan` does not write over the state itself."""
        return [
            (vid, after)
            for vid, after in plan.updates.items()
            if vid in self.tensors and not (plan.root(after) == vid and plan.layout(after) == plan.layout(vid))
        ]


CHANGING = (Role.PARAM, Role.STATE)
"""Roles of values that a plan may change and keep from run to run."""
