"""The states, random generators and fed weights that all captures of one sequence of replays share; snapshots of them.

A run seeds the kernels of ONNX's random operators anew, so runs repeat; replays draw from generators that go on. The
operators of torch draw from torch's default generator, in runs and in replays, as eager torch does.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from weakref import WeakSet

import torch

from passes.suggest import bytes_text, plural
from pipeline.errors import UsageError
from pipeline.ops import Kind
from pipeline.ops.aten import DRAWING
from pipeline.planning import FeedEntry
from pipeline.runtime.devices import Device, RecordedGraph
from pipeline.runtime.kernels import Launch
from pipeline.runtime.operators import find_operator
from pipeline.runtime.program import LaunchStep, ProgramMemory
from pipeline.runtime.tensors import torch_dtype


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
        self.generators = [device.generator(seed) for seed in seeds]
        self._device = device
        self.draws_from_default = any(map(_draws_from_default, steps))

    def with_generators(self, steps: Sequence[LaunchStep]) -> list[LaunchStep]:
        """`steps`, of which each that draws from a generator has its own here."""
        generators = iter(self.generators)
        return [step.with_attrs(generator=next(generators)) if step.kind in DRAWING else step for step in steps]

    @property
    def draws(self) -> bool:
        """Whether a replay may draw any number."""
        return bool(self.generators) or self.draws_from_default

    def state(self) -> RandomState:
        default = self._device.default_generator.get_state() if self.draws_from_default else None
        return RandomState(tuple(generator.get_state() for generator in self.generators), default)

    def set_state(self, state: RandomState) -> None:
        """Go back to `state`.

        Raises:
            UsageError: it is the state of a program that draws otherwise, or no state that torch takes.
        """
        if len(state.kernels) != len(self.generators) or (state.default is not None) != self.draws_from_default:
            raise UsageError("the random state of a snapshot is that of another program; take a snapshot of this one")
        try:
            for generator, saved in zip(self.generators, state.kernels, strict=True):
                generator.set_state(saved)
            if state.default is not None:
                self._device.default_generator.set_state(state.default)
        except (RuntimeError, TypeError) as error:
            raise UsageError(f"torch refuses the random state of a snapshot; it is damaged: {error}") from error


def _draws_from_default(step: LaunchStep) -> bool:
    """Whether torch's default generator may advance; what is in a body is not looked at."""
    if step.kind is not Kind.Aten:
        return step.kind is Kind.HigherOrder
    return torch.Tag.nondeterministic_seeded in find_operator(str(step.attrs["op"])).tags


SHOWN = 3
"""How many names a warning lists."""


class CaptureWarning(UserWarning):
    """A replay does something that its caller may not expect; each text is given once."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Copies of everything that a replay changes and a later one reads."""

    states: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """The states by name, each a tensor with the state's dtype and shape."""
    random: RandomState = field(default_factory=RandomState)
    """The states of the generators that the program draws from."""

    def __repr__(self) -> str:
        nbytes = sum(state.nbytes for state in self.states.values())
        return f"Snapshot({plural(len(self.states), 'state')}, {bytes_text(nbytes)})"


class CaptureSession:
    """The states, generators and fed weights of one sequence of replays.

    A weight that comes with the feed is copied once, and never again; a replay does not point at the caller's memory.
    """

    def __init__(self, memory: ProgramMemory) -> None:
        self.states, self.device = memory.states, memory.bound.device
        self.randomness = Randomness(memory.bound.steps, self.device)
        self._weights: dict[str, torch.Tensor] = {}
        self.filled: set[str] = set()
        """Names of the weights and inputs that a capture has taken from its feed."""
        self._warned: set[str] = set()
        self.further: Callable[[Mapping[str, torch.Tensor]], list[Launch]] = lambda _: []
        """Launches on the outputs by name that each capture has after those of the plan; they may write to memory that
        is no state, which no capture puts back after its warm-up."""
        self._pool: object = None
        self._graphs = WeakSet[RecordedGraph]()

    def record(self, launches: Sequence[Launch]) -> RecordedGraph:
        """The launches as a graph. All graphs of a session share a pool of memory, which ends with the last of them.

        Raises:
            GraphFailure: the device cannot record a launch.
        """
        if not self._graphs:
            self._pool = self.device.new_pool()
        draws = self.randomness.draws_from_default
        graph = self.device.record(launches, self._pool, self.randomness.generators, draws=draws)
        self._graphs.add(graph)
        return graph

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pool of all graphs; 0 where there are none."""
        return self.device.pool_bytes(self._pool) if self._graphs else 0

    def snapshot(self) -> Snapshot:
        """Copies of states and generators as they are.

        Raises:
            LostStates: some states lost their value in a run that failed.
        """
        return Snapshot(self.states.values(), self.randomness.state())

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to `snapshot`.

        Raises:
            UsageError: it is no snapshot of this program.
        """
        missing = sorted(self.states.names - snapshot.states.keys())
        if missing:
            raise UsageError(f"the snapshot lacks the state {missing[0]!r}; take a snapshot of this program")
        self.randomness.set_state(snapshot.random)
        self.states.give(snapshot.states)

    def weight_buffer(self, entry: FeedEntry) -> torch.Tensor:
        """The buffer of a weight that comes with the feed, made when it is first asked for."""
        if entry.name not in self._weights:
            spec = entry.spec
            self._weights[entry.name] = self.device.empty(spec.sizes, entry.strides, torch_dtype(spec.dtype))
        return self._weights[entry.name]

    def drop_weights(self) -> None:
        """Forget fed weights; the next capture takes them from its feed."""
        self._weights.clear()
        self.filled.clear()

    def warn_ignored(self, names: Collection[str]) -> None:
        """Say once that a feed has values that stay as they are."""
        listed = ", ".join([*map(repr, sorted(names)[:SHOWN]), *(["…"] if len(names) > SHOWN else [])])
        self.warn(
            "ignored",
            f"the feed has {listed}, whose roles are static: a replay keeps them as they are (give_states sets a "
            "state, drop_captures lets the next capture take weights from its feed)",
        )

    def warn(self, topic: str, text: str) -> None:
        """Give `text` as a warning, once for each topic."""
        if topic not in self._warned:
            self._warned.add(topic)
            warnings.warn(text, CaptureWarning, stacklevel=2)
