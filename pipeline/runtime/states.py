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
from pipeline.planning import ExecutionPlan, FeedEntry
from pipeline.runtime.slots import Feed, bind_feed
from pipeline.runtime.tensors import empty_strided, torch_dtype

__all__ = ["LostStates", "States"]


class LostStates(UsageError):
    """A failed run had begun to write to the states `names`, which have no value any more."""

    def __init__(self, names: Collection[str]) -> None:
        self.names = frozenset(names)
        super().__init__(
            f"a run that failed had begun to write to the states {', '.join(sorted(names))}: give all states "
            "a value again (`reset_states`, `give_states` with what `states` gave before, or load the weights again)"
        )


class States:
    """The states that runs of one plan change, by vid in `tensors`, whose addresses never change."""

    def __init__(self, plan: ExecutionPlan, initial: Mapping[int, torch.Tensor]) -> None:
        self._plan = plan
        self._initial = {vid: tensor for vid, tensor in initial.items() if vid in plan.updates}
        slots = [plan.slots[vid] for vid in plan.updates if plan.slots[vid].role is not Role.INPUT]
        self.tensors = {
            slot.vid: empty_strided(slot.spec.sizes, plan.strides(slot.vid), torch_dtype(slot.spec.dtype))
            for slot in slots
        }
        self._vids = {slot.name: slot.vid for slot in slots}
        self._missing: set[str] = set()
        self._lost: set[str] = set()
        self.reset()

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._vids)

    @property
    def missing(self) -> frozenset[str]:
        """The names of the states that have no value yet."""
        return frozenset(self._missing)

    def reset(self) -> None:
        """Set every state back to its initial value; a state that had none has none again."""
        for vid, tensor in self._initial.items():
            self.tensors[vid].copy_(tensor)
        self._missing = {name for name, vid in self._vids.items() if vid not in self._initial}
        self._lost = set()

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
        for entry, tensor in zip(wanted, bind_feed(wanted, given), strict=True):
            self.tensors[self._vids[entry.name]].copy_(tensor)
            self._missing.discard(entry.name)
            self._lost.discard(entry.name)

    def values(self) -> dict[str, torch.Tensor]:
        """Copies of the states that have a value, by name.

        Raises:
            LostStates: some states lost their value in a run that failed.
        """
        self._refuse_lost()
        return {name: self.tensors[vid].clone() for name, vid in self._vids.items() if name not in self._missing}

    def lose(self, vids: Iterable[int]) -> None:
        """Mark states to which a failed run may have written: they have no value now."""
        self._lost |= {self._plan.slots[vid].name for vid in vids}

    def refuse_missing(self) -> None:
        """Check that every state has a value.

        Raises:
            UsageError: a state has no value yet.
            LostStates: a state has no value any more (a UsageError too).
        """
        self._refuse_lost()
        if self._missing:
            raise UsageError(
                f"states without a value: {', '.join(sorted(self._missing))}; give them when the graph is compiled "
                "(`weights`), by `give_states`, or once in the feed"
            )

    def advance(self, slots: Sequence[torch.Tensor]) -> None:
        """Store the new values after a run. Views of old states are cloned before any state is written."""
        updates = self.updates_to_copy(self._plan)
        new = [slots[after].clone() if self._plan.root(after) in self.tensors else slots[after] for _, after in updates]
        self.lose(vid for vid, _ in updates)  # until all of them are written
        for (vid, _), value in zip(updates, new, strict=True):
            self.tensors[vid].copy_(value)
        self._lost = set()

    def _refuse_lost(self) -> None:
        if self._lost:
            raise LostStates(self._lost)

    def updates_to_copy(self, plan: ExecutionPlan) -> list[tuple[int, int]]:
        """(state, value after the run) of the updates that a run of `plan` does not write over the state itself."""
        return [
            (vid, after)
            for vid, after in plan.updates.items()
            if vid in self.tensors and not (plan.root(after) == vid and plan.layout(after) == plan.layout(vid))
        ]
