"""What makes two captures the same: mode, plan, the treatment of each role, and the signature of what is fed.

The names and defaults are those of seed document 004, "CUDA Graph path".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch

from passes.suggest import nearest
from pipeline.errors import UsageError
from pipeline.ir.graph import Role


class Treatment(Enum):
    """What a replay does with a value that a feed can bring."""

    STATIC = "static"
    """Written into its slot once; a feed does not change it."""
    COPIED = "copied"
    """Copied from the feed at each replay."""
    LIVE = "live"
    """Copied from the feed where that has it; else it stays as it is."""


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
        cls,
        mode: str = "inference",
        static_roles: Iterable[str] | None = None,
        copy_roles: Iterable[str] | None = None,
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
