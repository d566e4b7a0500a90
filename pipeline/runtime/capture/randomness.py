"""Where replays draw random numbers from, and how to go back to a point in that sequence.

A run seeds the kernels of ONNX's random operators anew, so runs repeat; replays draw from generators that go on. The
operators of torch draw from torch's default generator, in runs and in replays, as eager torch does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pipeline.errors import UsageError
from pipeline.ops import Kind
from pipeline.ops.aten import DRAWING
from pipeline.runtime.devices import Device
from pipeline.runtime.program import LaunchStep
from pipeline.runtime.torch_args import find_operator


@dataclass(frozen=True, slots=True)
class RandomState:
    """The states of all generators that a program draws from."""

    kernels: tuple[torch.Tensor, ...] = ()
    """By the order of the calls that draw from a generator of their own."""
    default: torch.Tensor | None = None
    """That of torch's default generator, for a program that draws from it."""


class Randomness:
    """The generators that the replays of a program draw from; all captures of one sequence share them."""

    def __init__(self, steps: Sequence[LaunchStep], device: Device) -> None:
        seeds = [int(step.attrs["seed"]) for step in steps if step.kind in DRAWING]
        self._generators = [device.generator(seed) for seed in seeds]
        self._draws_from_default = any(map(_draws_from_default, steps))

    def with_generators(self, steps: Sequence[LaunchStep]) -> list[LaunchStep]:
        """`steps`, of which each that draws from a generator has its own here."""
        generators = iter(self._generators)
        return [step.with_attrs(generator=next(generators)) if step.kind in DRAWING else step for step in steps]

    @property
    def draws(self) -> bool:
        """Whether a replay may draw any number."""
        return bool(self._generators) or self._draws_from_default

    def state(self) -> RandomState:
        default = torch.get_rng_state() if self._draws_from_default else None
        return RandomState(tuple(generator.get_state() for generator in self._generators), default)

    def set_state(self, state: RandomState) -> None:
        """Go back to `state`.

        Raises:
            UsageError: it is the state of a program that draws otherwise.
        """
        if len(state.kernels) != len(self._generators) or (state.default is not None) != self._draws_from_default:
            raise UsageError("the random state of a snapshot is that of another program; take a snapshot of this one")
        for generator, saved in zip(self._generators, state.kernels, strict=True):
            generator.set_state(saved)
        if state.default is not None:
            torch.set_rng_state(state.default)


def _draws_from_default(step: LaunchStep) -> bool:
    """Whether torch's default generator may advance; what is in a body is not looked at."""
    if step.kind is not Kind.Aten:
        return step.kind is Kind.HigherOrder
    return torch.Tag.nondeterministic_seeded in find_operator(str(step.attrs["op"])).tags
