"""The captures of one sequence of replays, found by their key and bounded in number.

The methods by which a program is captured and replayed, whether it has one plan or one for each set of sizes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from pipeline.argument_checks import FLAG, MAPPING, NAMES, TEXT, a, expects
from pipeline.errors import UsageError
from pipeline.runtime.capture.capture import Capture
from pipeline.runtime.capture.feed_buffers import CaptureKey, CapturePolicy, as_tensors, copied_names, signature_of
from pipeline.runtime.capture.session import CaptureSession, Snapshot
from pipeline.runtime.program import ProcessBound, ProgramMemory
from pipeline.runtime.slots import Feed, refuse_unreadable
from pipeline.runtime.torch_state import has_plain_defaults, plain_state

MOST_CAPTURES = 16
"""How many captures are kept by default; each has buffers of its own."""


class MemorySource(Protocol):
    """Where captures get their program and memory from; all of one source have the same states, weights and names."""

    @property
    def plan_key(self) -> str:
        """The digest of the graph, of which the source has the plan, or makes all plans."""
        ...

    def memory_for(self, feed: Feed) -> ProgramMemory:
        """The memory of the program whose plan fits the feed.

        Raises:
            UsageError: no plan fits it.
        """
        ...

    def latest_memory(self) -> ProgramMemory:
        """The one that was asked for last.

        Raises:
            UsageError: none was.
        """
        ...

    @property
    def memories(self) -> Sequence[ProgramMemory]:
        """Those that it keeps."""
        ...


class Captures:
    """Captures by key. The one that was replayed longest ago is dropped, with its buffers, where there are too many.

    Params and states are part of the plan, so a feed is looked up by its copied values alone, however many weights
    the program has.
    """

    def __init__(self, source: MemorySource, *, limit: int = MOST_CAPTURES) -> None:
        if limit < 1:
            raise UsageError(f"a limit of {limit} captures; expected at least 1")
        self._source, self._limit = source, limit
        self._captures: OrderedDict[Any, Capture] = OrderedDict()
        """By CaptureKey; the capture that was replayed last is at the end."""
        self._session: CaptureSession | None = None
        self._last: Capture | None = None
        """The capture that was replayed last, and its signature while the policy is the same."""
        self._last_signature: tuple[tuple[str, tuple[int, ...], torch.dtype, torch.device], ...] | None = None
        self._policy: CapturePolicy | None = None
        self._names: tuple[str, ...] = ()
        self._prefix: tuple[object, ...] = ()
        """The key of the policy in use, without the signature."""

    def __len__(self) -> int:
        return len(self._captures)

    @property
    def keys(self) -> tuple[CaptureKey, ...]:
        """The keys of all captures; that of the last replay is at the end."""
        return tuple(capture.key for capture in self._captures.values())

    @property
    def session(self) -> CaptureSession:
        """What the captures share."""
        if self._session is None:
            self._session = CaptureSession(self._source.latest_memory())
        return self._session

    def capture(self, feed: Feed, policy: CapturePolicy) -> Capture:
        """The capture for this feed and policy; made if there is none.

        Raises:
            UsageError: the feed does not fit the plan, or a state has no value.
            DataError: an index in it is out of range (a UsageError too).
            InternalError: a kernel failed.
        """
        with plain_state():
            return self._capture(as_tensors(feed), policy)

    def _capture(self, feed: Feed, policy: CapturePolicy) -> Capture:
        self._use(policy, feed)
        capture = self._find_or_none(feed)
        if capture is None:
            return self._add(feed)
        if len(feed) != len(self._names):
            capture.take_others(feed)
        return capture

    def find(self, feed: Feed) -> Capture:
        """The capture under the signature of `feed`, for the policy that was used last.

        Raises:
            KeyError: there is none.
            UsageError: a tensor has no shape.
        """
        try:
            if self._last_signature is not None:
                for name, shape, dtype, device in self._last_signature:  # half as long as to make a signature
                    fed = feed[name]
                    if fed.shape != shape or fed.dtype is not dtype or fed.device != device:  # type: ignore[union-attr]
                        break
                else:
                    return self._last  # type: ignore[return-value]
            # Plain tuples are equal to a CaptureKey of FedTensors, and are made in half the time.
            signature = tuple([(name, (fed := feed[name]).shape, fed.dtype, fed.device) for name in self._names])  # type: ignore[union-attr]
        except AttributeError as error:  # no tensor
            raise KeyError from error
        except RuntimeError:  # a nested tensor, which has no shape
            refuse_unreadable(feed)
            raise
        capture = self._captures[(*self._prefix, signature)]
        self._captures.move_to_end(capture.key)
        self._last, self._last_signature = capture, signature  # type: ignore[assignment]
        return capture

    def replay(
        self,
        feed: Feed,
        policy: CapturePolicy,
        *,
        copy: bool = True,
        changed: Collection[str] | None = None,
        restore: Snapshot | None = None,
    ) -> Mapping[str, torch.Tensor]:
        """Replay the capture of this feed and policy; capture first if there is none. See `Capture.replay`.

        With `changed`, the capture that was replayed last is replayed again.
        """
        if changed is not None or policy is not self._policy or not has_plain_defaults():
            with plain_state():
                return self._replay_rarely(feed, policy, copy, changed, restore)
        try:
            capture = self.find(feed)
        except KeyError:  # a new signature, or something that is no tensor
            return self._replay_new(feed, copy=copy, restore=restore)
        return capture.replay_fitting(feed, copy=copy, restore=restore)

    def _replay_rarely(
        self, feed: Feed, policy: CapturePolicy, copy: bool, changed: Collection[str] | None, restore: Snapshot | None
    ) -> Mapping[str, torch.Tensor]:
        if changed is not None:
            return self._last_capture().replay(feed, copy=copy, changed=changed, restore=restore)
        self._use(policy, feed)
        return self._replay_new(feed, copy=copy, restore=restore)

    def snapshot(self) -> Snapshot:
        """Copies of the states and generators that replays change.

        Raises:
            LostStates: some states lost their value in a run that failed.
        """
        return self.session.snapshot()

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to `snapshot`.

        Raises:
            UsageError: it is no snapshot of this program.
        """
        self.session.restore(snapshot)

    def synchronize(self) -> None:
        """Wait until the device has done all runs and replays.

        Raises:
            DataError: one of them had an index out of range.
        """
        every = [*self._source.memories, *(capture.memory for capture in self._captures.values())]
        for memory in {id(memory): memory for memory in every}.values():
            memory.synchronize()

    def clear(self) -> None:
        """Drop all captures, and the weights that they took from a feed; states keep their values."""
        self._captures.clear()
        self._last = self._last_signature = None
        if self._session is not None:
            self._session.drop_weights()

    def _replay_new(self, feed: Feed, *, copy: bool, restore: Snapshot | None) -> Mapping[str, torch.Tensor]:
        feed = as_tensors(feed)
        capture = self._find_or_none(feed)
        if capture is None:
            with plain_state():
                capture = self._add(feed)
            feed = {name: feed[name] for name in self._names}  # the capture took the others
        return capture.replay_fitting(feed, copy=copy, restore=restore)

    def _find_or_none(self, feed: Feed) -> Capture | None:
        try:
            return self.find(feed)
        except KeyError:
            return None

    def _use(self, policy: CapturePolicy, feed: Feed) -> None:
        if policy != self._policy:
            memory = self._source.memory_for(feed)
            self._names = copied_names(memory.bound.plan, memory.states.tensors, policy)
            self._prefix = (policy.mode, self._source.plan_key, policy.static_roles, policy.copy_roles)
            self._last_signature = None
        self._policy = policy

    def _add(self, feed: Feed) -> Capture:
        memory = self._source.memory_for(feed)
        key = CaptureKey(*self._prefix, signature_of(self._names, feed))  # type: ignore[arg-type]
        capture = Capture(memory, self.session, key, feed)
        self._captures[key] = self._last = capture
        self._last_signature = key.feed_signature
        if len(self._captures) > self._limit:
            _, dropped = self._captures.popitem(last=False)
            dropped.memory.synchronize()  # raises what its last replays saw; the record has waited for the device too
            self.session.warn(
                "limit",
                f"the feed has had more than {self._limit} signatures: for each new one the capture that was replayed "
                "longest ago is dropped; feed fewer sizes, or raise the limit",
            )
        return capture

    def _last_capture(self) -> Capture:
        if self._last is None:
            raise UsageError("changed: there is no capture yet, whose other inputs could stay; feed all of them first")
        return self._last


A_SNAPSHOT = a(Snapshot, "what snapshot() returned")


@expects(feed=MAPPING, copy=FLAG, changed=NAMES.or_none(), restore=A_SNAPSHOT.or_none())
def check_replay(feed: object, copy: object, changed: object, restore: object) -> None:
    """Refuse wrong arguments of a replay. `expects` costs 1.1 µs, so a replay of a dict alone does without it."""


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

    def replay(
        self, feed: Feed, *, copy: bool = True, changed: Collection[str] | None = None, restore: Snapshot | None = None
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
        if type(feed) is not dict or type(copy) is not bool or changed is not None or restore is not None:
            check_replay(feed, copy, changed, restore)
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

    def synchronize(self) -> None:
        """Wait until the device has done all runs and replays; a run itself waits for nothing.

        Raises:
            DataError: a run had an index out of range, which a device reports late.
        """
        with self._turn():
            self.captures.synchronize()

    def drop_captures(self) -> None:
        """Give back what the captures of this thread hold; states keep their values."""
        with self._turn():
            self.captures.clear()

    def _turn(self) -> AbstractContextManager[object]:
        return self._shared_turn or nullcontext()
