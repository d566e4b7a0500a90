"""The captures of one sequence of replays, found by their key and bounded in number."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Any, Protocol

import torch

from pipeline.errors import UsageError
from pipeline.runtime.binding import ProgramMemory
from pipeline.runtime.capture.capture import Capture
from pipeline.runtime.capture.feed_buffers import as_tensors, copied_names
from pipeline.runtime.capture.key import CaptureKey, CapturePolicy, signature_of
from pipeline.runtime.capture.session import CaptureSession, Snapshot
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


class OneMemory:
    """The memory of a plan with concrete sizes."""

    def __init__(self, memory: ProgramMemory) -> None:
        self._memory = memory

    @property
    def plan_key(self) -> str:
        return self._memory.bound.plan.graph_digest

    def memory_for(self, feed: Feed) -> ProgramMemory:
        return self._memory

    def latest_memory(self) -> ProgramMemory:
        return self._memory


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
        """By CaptureKey, the one that was replayed last at the end."""
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
        """The keys of all captures, the one that was replayed last at the end."""
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
        capture = self._known(feed)
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

    def clear(self) -> None:
        """Drop all captures, and the weights that they took from a feed; states keep their values."""
        self._captures.clear()
        self._last = self._last_signature = None
        if self._session is not None:
            self._session.drop_weights()

    def _replay_new(self, feed: Feed, *, copy: bool, restore: Snapshot | None) -> Mapping[str, torch.Tensor]:
        feed = as_tensors(feed)
        capture = self._known(feed)
        if capture is None:
            with plain_state():
                capture = self._add(feed)
            feed = {name: feed[name] for name in self._names}  # the capture took the others
        return capture.replay_fitting(feed, copy=copy, restore=restore)

    def _known(self, feed: Feed) -> Capture | None:
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
            self._captures.popitem(last=False)
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
