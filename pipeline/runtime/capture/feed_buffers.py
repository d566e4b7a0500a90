"""What makes two captures the same, and the buffers of one: static, copied and live values of what is fed.

The key of a capture is its mode, its plan, the treatment of each role, and the signature of what is fed. The names and
defaults are those of seed document 004, "CUDA Graph path".
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from passes.suggest import nearest
from pipeline.errors import UsageError
from pipeline.ir.graph import Role
from pipeline.planning import ExecutionPlan, FeedEntry
from pipeline.runtime.capture.session import CaptureSession
from pipeline.runtime.devices import Device
from pipeline.runtime.feeding import LARGE
from pipeline.runtime.program import ProgramMemory
from pipeline.runtime.slots import Feed, accept_tensor
from pipeline.runtime.tensors import as_tensor, torch_dtype, with_strides


class Treatment(Enum):
    """What a replay does with a value that a feed can bring."""

    STATIC = "static"
    """Written into its slot once; a feed does not change it."""
    COPIED = "copied"
    """Copied from the feed at each replay."""
    LIVE = "live"
    """Copied from the feed if the feed has the value; else the value stays."""


@dataclass(frozen=True, slots=True)
class CapturePolicy:
    """A mode, and which roles are static and which are copied; a value of any other role is live.

    Roles are plain strings in alphabetical order, since their hash is part of every replay.
    """

    mode: str
    static_roles: tuple[str, ...]
    copy_roles: tuple[str, ...]

    @classmethod
    def of(
        cls, mode: str = "inference", static_roles: Iterable[str] | None = None, copy_roles: Iterable[str] | None = None
    ) -> CapturePolicy:
        """The policy of a mode, "inference" or "train", with other roles where they are given.

        Raises:
            UsageError: an unknown mode or role, or a role that is static and copied.
        """
        if mode not in STATIC_BY_MODE:
            raise UsageError(f"no capture mode {mode!r}{nearest(mode, STATIC_BY_MODE)}; modes: inference, train")
        copied = _sorted_roles("copy_roles", COPIED if copy_roles is None else copy_roles)
        default = [role for role in STATIC_BY_MODE[mode] if role not in copied]
        static = _sorted_roles("static_roles", default if static_roles is None else static_roles)
        both = [role for role in static if role in copied]
        if both:
            raise UsageError(f"role {both[0]} is in static_roles and in copy_roles; a value is static or copied")
        return cls(mode, static, copied)

    def treatment(self, role: Role) -> Treatment:
        if role.value in self.static_roles:
            return Treatment.STATIC
        return Treatment.COPIED if role.value in self.copy_roles else Treatment.LIVE


STATIC_BY_MODE = {"inference": ("const", "param"), "train": ("const", "param", "state")}

COPIED = ("input",)

ROLES = (Role.CONST, Role.INPUT, Role.PARAM, Role.STATE)


class FedTensor(NamedTuple):
    """One tensor of a feed, as far as a capture depends on it; strides are left out, since elements are copied."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class CaptureKey(NamedTuple):
    """Under this a capture is found again. What is static is part of `plan_key` and not of `feed_signature`."""

    mode: str
    plan_key: str
    """The digest of the graph: a plan follows from it. It covers names, shapes and dtypes of params and states."""
    static_roles: tuple[str, ...]
    copy_roles: tuple[str, ...]
    feed_signature: tuple[FedTensor, ...]


def signature_of(names: Iterable[str], feed: Mapping[str, object]) -> tuple[FedTensor, ...]:
    """The signature of these values of a feed.

    Raises:
        UsageError: one is missing, or is no tensor.
    """
    signature = []
    for name in names:
        fed = feed.get(name)
        if not isinstance(fed, torch.Tensor):
            found = f"{name!r} is a {type(fed).__name__}" if name in feed else f"the feed lacks {name!r}"
            raise UsageError(f"{found}; expected a torch tensor or a numpy array")
        signature.append(FedTensor(name, fed.shape, fed.dtype, fed.device))
    return tuple(signature)


def _sorted_roles(option: str, roles: Iterable[str]) -> tuple[str, ...]:
    known = [role.value for role in ROLES]
    found = sorted({str(role) for role in ([roles] if isinstance(roles, str) else roles)})
    unknown = [role for role in found if role not in known]
    if unknown:
        hint = nearest(unknown[0], known)
        raise UsageError(f"{option}: no role {unknown[0]!r}{hint}; roles of what is fed: {', '.join(known)}")
    return tuple(found)


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
            (name, self._writer(name)) for name in self._names_by_treatment(Treatment.COPIED)
        )
        self._live = frozenset(self._names_by_treatment(Treatment.LIVE))
        self._known_lengths: set[int] = set()
        """Lengths of long feeds whose names were all looked at."""

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._own)

    def names(self, treatment: Treatment) -> tuple[str, ...]:
        """The names of the values with this treatment, weights of the program among the static ones."""
        bound = [name for name, role in self._bound_roles.items() if self._policy.treatment(role) is treatment]
        return (*self._names_by_treatment(treatment), *(name for name in bound if name not in self._values))

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
        given = {name: self._accept(name, feed) for name in feed if name in self._values}
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
            copied[name](self._accept(name, feed))

    def _write_live(self, value: FedValue, feed: Feed) -> None:
        if value.is_state:
            self._session.states.give({value.name: feed[value.name]})
        else:
            self._session.states.order.enter()
            self._writer(value.name)(self._accept(value.name, feed))

    def _accept(self, name: str, feed: Feed) -> torch.Tensor:
        return accept_tensor(self._values[name].entry, feed[name], self._session.device)

    def _writer(self, name: str) -> Write:
        """The host waits for no copy to another device; `partial` costs 0.1 µs, which a replay on the CPU spares."""
        target, device = self._targets[name], self._session.device
        if device.is_host:
            return target.copy_
        if target.nbytes < LARGE:
            return partial(target.copy_, non_blocking=True)
        return partial(copy_large, target, device)

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

    def _names_by_treatment(self, treatment: Treatment) -> Iterator[str]:
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


def copy_large(target: torch.Tensor, device: Device, fed: torch.Tensor) -> None:
    """Copy `fed` into `target` on `device`, by pinned memory where that lets the host go on: there `fed` gets the
    strides of `target`, since torch copies any others by pageable memory."""
    source = fed if device.holds(fed) else device.as_source(with_strides(fed, target.stride()))
    target.copy_(source, non_blocking=True)


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
