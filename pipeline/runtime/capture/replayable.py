"""The methods by which a program is captured and replayed, whether it has one plan or one for each set of sizes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from pipeline.argument_checks import FLAG, MAPPING, NAMES, TEXT, a, expects
from pipeline.errors import UsageError
from pipeline.runtime.capture.capture import Capture
from pipeline.runtime.capture.captures import Captures
from pipeline.runtime.capture.key import CapturePolicy
from pipeline.runtime.capture.session import Snapshot
from pipeline.runtime.process_bound import ProcessBound
from pipeline.runtime.slots import Feed

A_SNAPSHOT = a(Snapshot, "what snapshot() returned")


class Replayable(ProcessBound, ABC):
    """A program whose threads have captures of their own, or share one sequence of states and take turns on it.

    Args:
        turn: held while the shared sequence is used; None where each thread has its own, so that none waits.
    """

    def __init__(self, turn: AbstractContextManager[object] | None) -> None:
        self._shared_turn = turn
        self._policy = CapturePolicy.of()

    @property
    @abstractmethod
    def captures(self) -> Captures:
        """The captures of this thread, or those that all threads share."""

    @property
    @abstractmethod
    def signature(self) -> tuple[Sequence[str], Sequence[str]]:
        """The names of the inputs and of the outputs, in their order in the graph."""

    @abstractmethod
    def run(self, feed: Feed, *, copy: bool = True) -> dict[str, torch.Tensor]:
        """Outputs by name for inputs by name."""

    def __call__(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """`run` on inputs in order, by name, or both: the output, or a tuple of all outputs in their order.

        Weights that come with each feed are given by name.

        Raises:
            UsageError: more tensors than inputs, an input that comes twice, or as `run`.
        """
        inputs, outputs = self.signature
        if len(args) > len(inputs):
            raise UsageError(f"found {len(args)} tensors in order; inputs: {', '.join(inputs) or 'none'}")
        feed = dict(zip(inputs, args, strict=False))
        if twice := feed.keys() & kwargs.keys():
            raise UsageError(f"the input {min(twice)!r} comes in order and by name; give it once")
        found = self.run({**feed, **kwargs})
        results = tuple(found[name] for name in outputs)
        return results[0] if len(results) == 1 else results

    def __repr__(self) -> str:
        inputs, outputs = self.signature
        return f"{type(self).__name__}({', '.join(inputs)}) -> {', '.join(outputs)}: {self.describe()}"

    def describe(self) -> str:
        """What the program is, in a few words."""
        return "to be captured and replayed"

    @expects(feed=MAPPING, mode=TEXT, static_roles=NAMES.or_none(), copy_roles=NAMES.or_none())
    def capture(
        self,
        feed: Feed,
        *,
        mode: str = "inference",
        static_roles: Iterable[str] | None = None,
        copy_roles: Iterable[str] | None = None,
    ) -> Capture:
        """Record the launches for feeds with this signature, or give the record that there is.

        No step is taken: states and random numbers are afterwards what they were. Later calls of `replay` have the mode
        and the roles of the last `capture`. A value of a static role stays as it was first given, one of a copied role
        comes with every feed, one of another role comes where the feed has it.

        `mode`: "inference" (params and constants are static), or "train" (states too: what a feed has for them is
        ignored). Inputs are copied in both. `static_roles` and `copy_roles` are in place of these.

        Raises:
            UsageError: the feed does not fit the plan, or no plan fits it; a state has no value; a weight was given
                other memory since it was bound; or there is no such mode or role.
            DataError: an index in the feed is out of range (a UsageError too).
            Unsupported: ops without a kernel, in a plan that is made for the sizes of this feed.
            InternalError: a kernel failed.
        """
        self._policy = CapturePolicy.of(mode, static_roles, copy_roles)
        with self._turn():
            return self.captures.capture(feed, self._policy)

    @expects(feed=MAPPING, copy=FLAG, changed=NAMES.or_none(), restore=A_SNAPSHOT.or_none())
    def replay(
        self,
        feed: Feed,
        *,
        copy: bool = True,
        changed: Collection[str] | None = None,
        restore: Snapshot | None = None,
    ) -> Mapping[str, torch.Tensor]:
        """Outputs by name as from `run`, by a captured record; a new signature is captured first.

        Each replay advances states and random numbers. With `restore`, these are put back to a snapshot first, so that
        equal feeds give equal outputs. With `copy=False` the outputs are views that the next replay overwrites.
        `changed` names the inputs to copy; the others stay as they are, and the feed may leave them out.

        Raises:
            UsageError: as `capture`.
            DataError: an index in the feed is out of range (a UsageError too).
            InternalError: a kernel failed.
        """
        if self._shared_turn is None:
            return self.captures.replay(feed, self._policy, copy=copy, changed=changed, restore=restore)
        with self._shared_turn:
            return self.captures.replay(feed, self._policy, copy=copy, changed=changed, restore=restore)

    def snapshot(self) -> Snapshot:
        """Copies of states and random generators as they are; further replays do not change them.

        Raises:
            UsageError: a run failed while it wrote to some states (see `pipeline.runtime.states`), or the sizes of
                a graph with named dims are not known yet.
        """
        with self._turn():
            return self.captures.snapshot()

    @expects(snapshot=A_SNAPSHOT)
    def restore(self, snapshot: Snapshot) -> None:
        """Go back to `snapshot`.

        Raises:
            UsageError: it is a snapshot of another program.
        """
        with self._turn():
            self.captures.restore(snapshot)

    def drop_captures(self) -> None:
        """Give back what the captures of this thread hold; states keep their values."""
        with self._turn():
            self.captures.clear()

    def _turn(self) -> AbstractContextManager[object]:
        return self._shared_turn or nullcontext()
