"""The buffers of one capture, and what of a feed goes into them: static, copied and live values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from passes.suggest import nearest
from pipeline.errors import UsageError
from pipeline.ir.graph import Role
from pipeline.planning import ExecutionPlan, FeedEntry
from pipeline.runtime.binding import ProgramMemory
from pipeline.runtime.capture.key import CapturePolicy, Treatment
from pipeline.runtime.capture.session import CaptureSession
from pipeline.runtime.slots import Feed, accept_tensor
from pipeline.runtime.tensors import as_tensor, torch_dtype

FEW = 16
"""The most names, in addition to the copied ones, that are looked at in every feed."""

Write = Callable[[torch.Tensor], object]


@dataclass(frozen=True, slots=True)
class FedValue:
    """A value that a feed can bring."""

    vid: int
    entry: FeedEntry
    role: Role
    treatment: Treatment
    is_state: bool
    """Whether runs change it, so that it lives in the states of the program."""

    @property
    def name(self) -> str:
        return self.entry.name


class FeedBuffers:
    """Where the elements of a feed go.

    Each capture has buffers for inputs, and for what it copies at every replay. Weights that come with the feed have
    theirs in the session, and states in the states of the program. No buffer is the caller's memory.
    """

    def __init__(self, memory: ProgramMemory, session: CaptureSession, policy: CapturePolicy) -> None:
        plan = memory.bound.plan
        self._session = session
        self._values = {value.name: value for value in _fed_values(plan, session.states.tensors, policy)}
        self._bound_roles = {plan.slots[vid].name: plan.slots[vid].role for vid in memory.bound.weights}
        self._policy = policy
        self._refuse_bound(policy)
        self.tensors: dict[int, torch.Tensor] = {}
        """By vid, what `ProgramMemory.bind_slots` takes."""
        self._own: list[torch.Tensor] = []
        self._targets = {value.name: self._target_of(value) for value in self._values.values()}
        self.copied: tuple[tuple[str, Write], ...] = tuple(
            (name, self._targets[name].copy_) for name in self._named(Treatment.COPIED)
        )
        self._live = frozenset(self._named(Treatment.LIVE))
        self._known_lengths: set[int] = set()
        """Lengths of long feeds whose names were all looked at."""

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._own)

    def names(self, treatment: Treatment) -> tuple[str, ...]:
        """The names of the values with this treatment, weights of the program among the static ones."""
        bound = [name for name, role in self._bound_roles.items() if self._policy.treatment(role) is treatment]
        return (*self._named(treatment), *(name for name in bound if name not in self._values))

    def fill(self, feed: Feed) -> None:
        """The first values, from the feed of the capture. What already has a value and is static keeps it.

        Raises:
            UsageError: the feed does not fit the signature, or a value has none yet.
        """
        self._refuse_unknown(feed)
        missing = [value.name for value in self._values.values() if self._needs_value(value) and value.name not in feed]
        if missing:
            raise UsageError(
                f"the feed lacks {', '.join(map(repr, missing))}; a capture needs every input, and each weight once"
            )
        given = {name: accept_tensor(self._values[name].entry, feed[name]) for name in feed if name in self._values}
        ignored = [name for name in feed if name not in given]
        for name, tensor in given.items():
            value = self._values[name]
            if value.treatment is Treatment.STATIC and not self._needs_value(value):
                ignored.append(name)
            elif value.is_state:
                self._session.states.give({name: tensor})
            else:
                self._targets[name].copy_(tensor)
        self._session.filled.update(given)
        if ignored:
            self._session.warn_ignored(ignored)

    def write_others(self, feed: Feed) -> None:
        """Take the live values of a feed that has more names than the copied ones; static ones are ignored.

        Raises:
            UsageError: a name that the plan does not have, or a live value that does not fit.
        """
        for name in self._live:
            if name in feed:
                self._write_live(self._values[name], feed)
        if len(feed) in self._known_lengths:
            return
        self._refuse_unknown(feed)
        copied = {name for name, _ in self.copied}
        ignored = [name for name in feed if name not in copied and name not in self._live]
        if len(ignored) > FEW:
            self._known_lengths.add(len(feed))
        if ignored:
            self._session.warn_ignored(ignored)

    def write_named(self, names: Collection[str], feed: Feed) -> None:
        """Copy these values only; the other ones keep the elements that they have.

        Raises:
            UsageError: a name that is not copied, that the feed lacks, or whose tensor does not fit.
        """
        copied = dict(self.copied)
        for name in names:
            if name not in copied:
                raise UsageError(f"changed: {name!r} is not copied at a replay{nearest(name, copied)}")
            if name not in feed:
                raise UsageError(f"changed: the feed lacks {name!r}")
            copied[name](accept_tensor(self._values[name].entry, feed[name]))

    def _write_live(self, value: FedValue, feed: Feed) -> None:
        if value.is_state:
            self._session.states.give({value.name: feed[value.name]})
        else:
            self._targets[value.name].copy_(accept_tensor(value.entry, feed[value.name]))

    def _target_of(self, value: FedValue) -> torch.Tensor:
        if value.is_state:
            return self._session.states.tensors[value.vid]
        if value.role is Role.INPUT or value.treatment is Treatment.COPIED:
            spec = value.entry.spec
            buffer = self._session.device.empty(spec.sizes, value.entry.strides, torch_dtype(spec.dtype))
            self._own.append(buffer)
        else:
            buffer = self._session.weight_buffer(value.entry)
        self.tensors[value.vid] = buffer
        return buffer

    def _needs_value(self, value: FedValue) -> bool:
        """Whether a capture cannot do without this value in its feed."""
        if value.treatment is Treatment.COPIED:
            return True
        if value.is_state:
            return value.name in self._session.states.missing
        return value.role is Role.INPUT or value.name not in self._session.filled

    def _named(self, treatment: Treatment) -> Iterator[str]:
        return (value.name for value in self._values.values() if value.treatment is treatment)

    def _refuse_bound(self, policy: CapturePolicy) -> None:
        """Refuse to copy into weights of the program, which other threads read too."""
        bound = [
            name
            for name, role in self._bound_roles.items()
            if policy.treatment(role) is Treatment.COPIED and name not in self._values
        ]
        if bound:
            raise UsageError(
                f"copy_roles: {self._bound_roles[bound[0]]} {bound[0]!r} was bound when the graph was compiled, and is "
                "shared; compile the graph without it, so that it comes with the feed"
            )

    def _refuse_unknown(self, feed: Feed) -> None:
        for name in feed:
            role = self._bound_roles.get(name)
            if name in self._values or (role is not None and self._policy.treatment(role) is Treatment.STATIC):
                continue
            known = ", ".join(self._values)
            raise UsageError(f"the feed has {name!r}, which is no input; inputs: {known}{nearest(name, self._values)}")


def as_tensors(feed: Feed) -> dict[str, torch.Tensor]:
    """`feed` with tensors in place of numpy arrays."""
    return {name: as_tensor(fed) if isinstance(fed, np.ndarray) else fed for name, fed in feed.items()}


def copied_names(plan: ExecutionPlan, states: Collection[int], policy: CapturePolicy) -> tuple[str, ...]:
    """The names of the values that a replay copies, in the order of the signature."""
    return tuple(value.name for value in _fed_values(plan, states, policy) if value.treatment is Treatment.COPIED)


def _fed_values(plan: ExecutionPlan, states: Collection[int], policy: CapturePolicy) -> Iterator[FedValue]:
    """What comes with a feed, then the states that runs change."""
    vids = {slot.name: slot.vid for slot in plan.slots}
    for entry in plan.feed_signature:
        role = plan.slots[vids[entry.name]].role
        yield FedValue(vids[entry.name], entry, role, policy.treatment(role), is_state=False)
    for vid in states:
        slot = plan.slots[vid]
        entry = FeedEntry(slot.name, slot.spec, plan.strides(vid))
        yield FedValue(vid, entry, slot.role, policy.treatment(slot.role), is_state=True)
