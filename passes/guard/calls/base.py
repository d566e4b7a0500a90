"""A call that was intercepted, as every optimizer's adapter presents it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from passes.context import PassContext
from passes.model.weights import DetachedModel
from passes.policy.policy import Skip
from passes.step import Repeat, Step

__all__ = ["Call", "LetThrough", "Plan", "Skips"]

Skips = Callable[[str], Skip | None]
"""Whether the policy skips the pass of a name such as `fuse_qkv` or `onnxsim/fuse_qkv`."""


class LetThrough(Exception):  # not an error: the optimizer has the word
    """The call holds no model that a policy could speak of, or a mistake that the optimizer itself should complain of.

    Should it not complain, the caller gets what `instead` makes, if given: of a model that could not be read nobody can
    say what became of it.
    """

    def __init__(self, reason: str, instead: Callable[[], Any] | None = None) -> None:
        super().__init__(reason)
        self.instead = instead


@dataclass(frozen=True, slots=True)
class Plan:
    """The steps that do what the call asks for, less what is skipped: pass → the reason."""

    steps: tuple[Step | Repeat, ...]
    skipped: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class Call(Protocol):
    """One call of an optimizer, with its arguments understood."""

    @property
    def model(self) -> DetachedModel:
        """What the optimizer is given, and the reference for what it makes."""
        ...

    @property
    def source(self) -> str:
        """The model's path; empty for one in memory."""
        ...

    @property
    def feeds(self) -> Sequence[Mapping[str, np.ndarray]]:
        """Inputs that the caller gave to compare on."""
        ...

    @property
    def shapes(self) -> Mapping[str, Sequence[int]]:
        """Shapes that the caller gave to inputs."""
        ...

    def plan(self, skips: Skips, bench: PassContext) -> Plan:
        """The steps to run in the worker."""
        ...

    def plan_here(self, skips: Skips, bench: PassContext) -> Plan | None:
        """The steps to run in this process, for what the worker does not know (an operator that the script registered);
        None where that cannot be."""
        ...

    def unguarded(self, bench: PassContext) -> DetachedModel:
        """What the call makes without a guard.

        Raises:
            StepFailed: it raised, crashed or ran out of time.
        """
        ...

    def deliver(self, model: DetachedModel, *, proven: bool) -> Any:
        """What the caller expects back for `model`; files that it asked for are written."""
        ...
