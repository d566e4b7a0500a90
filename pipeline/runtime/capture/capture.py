"""One capture: a program bound to buffers of its own, warmed up and recorded; `replay` runs the record again.

A step of a plan is bound to a launch, a call without arguments. A segment is a range of launches that can be recorded
together, or that cannot be. For each segment there is a `Recording`, which replays its launches: a graph, or a loop
where the segment cannot be recorded. After the launches of the plan come further ones, which save outputs and states.
`Treatment` says which values of a feed are static, copied or live.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from pipeline.argument_checks import MAPPING, a, expects
from pipeline.errors import OnnxlineError, UsageError
from pipeline.runtime.capture.feed_buffers import (
    CaptureKey,
    CapturePolicy,
    FedTensor,
    FeedBuffers,
    Treatment,
    as_tensors,
    signature_of,
)
from pipeline.runtime.capture.recorders import RECORDERS, CallLoop, Recorder, Recording
from pipeline.runtime.capture.segments import CaptureReport, CaptureSegment, split_steps
from pipeline.runtime.capture.session import CaptureSession, Snapshot
from pipeline.runtime.devices import GraphFailure, launch_errors
from pipeline.runtime.kernels import Launch
from pipeline.runtime.program import ProcessBound, ProgramMemory
from pipeline.runtime.slots import Feed, refuse_unreadable
from pipeline.runtime.tensors import dtype_name
from pipeline.runtime.torch_state import set_grad_enabled, without_autograd

is_grad_enabled = torch.is_grad_enabled
"""Here, since to look it up in torch is part of each replay."""


class OutputViews(Mapping[str, torch.Tensor]):
    """The outputs in the buffers of a capture: the next replay, or a run of the same context, overwrites them."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = dict(tensors)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        return f"<views of {', '.join(self)}: the next replay overwrites them>"


class Capture(ProcessBound):
    """A program that was recorded once, for one key.

    What a replay reads and writes belongs to the capture or its context: buffers, states, storage in the arena, and the
    weights that were bound when the graph was compiled. Use it from one thread at a time.
    """

    @expects(
        memory=a(ProgramMemory, "the memory of a Context; CompiledProgram.capture makes a capture"),
        session=a(CaptureSession, "a CaptureSession"),
        key=a(CaptureKey, "a CaptureKey"),
        feed=MAPPING,
    )
    def __init__(self, memory: ProgramMemory, session: CaptureSession, key: CaptureKey, feed: Feed) -> None:
        """Warm up and record. States and generators are afterwards what they were before.

        Raises:
            UsageError: the feed does not fit, or a state has no value.
            DataError: an index in the feed is out of range (a UsageError too).
            InternalError: a kernel failed.
        """
        self.memory, self._session = memory, session
        self._plan = memory.bound.plan
        # A caller may be in inference mode; buffers made in that mode could not be written to outside of it.
        with torch.inference_mode(mode=False), torch.no_grad(), session.device.scope():
            session.states.order.enter()  # the first values may go where an earlier capture reads
            self._feed = FeedBuffers(memory, session, CapturePolicy(key.mode, key.static_roles, key.copy_roles))
            self._feed.fill(feed)
            memory.bound.refuse_moved_weights()
            for vid, weight in memory.bound.weights.items():
                if vid not in session.states.tensors:  # a weight that runs change is copied to its state
                    session.device.pin(weight)
            self._slots = memory.bind_slots(self._feed.tensors)
            steps = session.randomness.with_generators(memory.bound.steps)
            launches = [memory.bind_step(step, self._slots) for step in steps]
            self.flags = memory.flags
            outputs, save_outputs = self._bind_outputs()
            further = [*save_outputs, *self._bind_updates(), *session.further(outputs)]
            memory.keep([*launches, *further])
        # A caller may point an output at other memory, so outputs are tensors of their own and no operand of a launch.
        self._views = OutputViews({name: tensor.detach() for name, tensor in outputs.items()})
        self._clones = [(name, _clone_of(tensor)) for name, tensor in outputs.items()]
        self._copied = self._feed.copied
        self._guards = [session.device.guard(session.states.order)]
        """Guards that no replay holds. A replay within a replay takes another one, or makes it."""
        self._has_states = bool(session.states.tensors)
        segments = split_steps(memory.bound, memory.bound.steps, len(further))
        before = session.snapshot()
        with session.device.scope():
            self.warm_up_seconds = self._warm_up([*launches, *further], segments, before)
            """Seconds of the warm-up, including those in which states were put back."""
            self._record([*launches, *further], segments, before)
        self.report = self._describe(key, segments)

    def __repr__(self) -> str:
        return f"Capture: {self.report!r}"

    @property
    def key(self) -> CaptureKey:
        return self.report.key

    def replay(
        self, feed: Feed, *, copy: bool = True, changed: Collection[str] | None = None, restore: Snapshot | None = None
    ) -> Mapping[str, torch.Tensor]:
        """Outputs by name for a feed with the signature of the capture; states and generators advance.

        With `copy=False` the outputs are views that the next replay overwrites. `changed` names the inputs to copy;
        the others keep what they have, and the feed may leave them out. States and generators are first put back to
        `restore`, if it is given.

        Args:
            feed: input → tensor of the shape, dtype and device that the capture recorded.
            copy: whether outputs are copies; if not, they are views that the next replay overwrites.
            changed: the inputs to copy; the others keep their values, and the feed may leave them out.
            restore: a snapshot that states and generators are put back to first.

        Raises:
            UsageError: the feed does not fit the signature, or a state has no value.
            DataError: an index in the feed is out of range (a UsageError too).
            InternalError: a kernel failed.
        """
        if changed is None:
            feed = self._fit(feed)
        return self.replay_fitting(feed, copy=copy, changed=changed, restore=restore)

    def replay_fitting(
        self, feed: Feed, *, copy: bool, changed: Collection[str] | None = None, restore: Snapshot | None = None
    ) -> Mapping[str, torch.Tensor]:
        """`replay` of a feed that is known to fit, since this capture was found by the feed's signature.

        Args:
            feed: as in `replay`.
            copy: as in `replay`.
            changed: as in `replay`.
            restore: as in `replay`.
        """
        if restore is not None:
            self._session.restore(restore)
        if changed is None and len(feed) != len(self._copied):  # a feed that fits has all copied values
            self.take_others(feed)
        if self._has_states:
            self._session.states.refuse_missing()
        if self.flags is not None:
            self.memory.bound.refuse_wrong_indices(self.flags)
        try:
            guard = self._guards.pop()
        except IndexError:  # all are held: this is a replay within a replay
            guard = self._session.device.guard(self._session.states.order)
        grad, part, has_launched = is_grad_enabled(), None, False
        try:  # all of a replay is written out in this function, since a call of a Python function costs 0.1 µs
            with guard:
                if grad:
                    set_grad_enabled(False)
                if changed is None:
                    for name, write in self._copied:
                        write(feed[name])  # type: ignore[arg-type]
                else:
                    self._feed.write_named(changed, feed)
                for part in self._parts:
                    part.replay()
                has_launched = True
                if self.flags is not None:
                    self.flags.start()
                if not copy:
                    return self._views
                outputs: dict[str, torch.Tensor] = {}
                for name, clone in self._clones:
                    outputs[name] = clone()
                return outputs
        except BaseException as error:
            if part is None and not has_launched:  # while it copied from the feed
                refuse_unreadable(feed)
            failure = error if has_launched else self._explain_failure(part, error)
            if failure is error:
                raise
            raise failure from error
        finally:
            if grad:
                set_grad_enabled(True)
            self._guards.append(guard)

    def take_others(self, feed: Feed) -> None:
        """Take what a feed has in addition to the copied values: live ones are written, static ones are ignored.

        Args:
            feed: name → tensor; the copied values among them are passed over.

        Raises:
            UsageError: a name that the plan does not have, or a live value that does not fit.
        """
        self._feed.write_others(feed)

    def updated_inputs(self) -> dict[str, torch.Tensor]:
        """Copies of the values that the last replay gave to inputs that the graph updates, by the input's name."""
        updates = ((vid, after) for vid, after in self._plan.updates.items() if vid not in self._session.states.tensors)
        return {self._plan.slots[vid].name: self._slots[after].clone() for vid, after in updates}

    def snapshot(self) -> Snapshot:
        """Copies of the states and generators that replays of this context change."""
        return self._session.snapshot()

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to `snapshot`."""
        self._session.restore(snapshot)

    def _fit(self, feed: Feed) -> Feed:
        feed = as_tensors(feed)
        signature = self.key.feed_signature
        found = signature_of([name for name, *_ in signature], feed)
        for given, wanted in zip(found, signature, strict=True):
            if given != wanted:
                raise UsageError(
                    f"input {given.name!r} is {_describe_fed(given)}; this capture is for {_describe_fed(wanted)}: "
                    "replay by the program, which captures each signature"
                )
        return feed

    def _warm_up(self, launches: Sequence[Launch], segments: Sequence[CaptureSegment], before: Snapshot) -> float:
        """Run the launches as loops until the recorder has seen enough runs; states are put back to `before`.

        Returns the seconds that this took.
        """
        begun = time.perf_counter()
        recorder = "loop" if self.memory.bound.debug else self._session.device.recorder
        self._recorder: Recorder = RECORDERS[recorder](self._session)
        self._segments = segments
        self._parts: tuple[Recording, ...] = tuple(
            CallLoop(launches[segment.first : segment.last]) for segment in segments
        )
        self._recorder.warm_up(partial(self._replay_and_go_back, before))
        self.memory.check_shapes(self._slots)
        return time.perf_counter() - begun

    def _record(self, launches: Sequence[Launch], segments: Sequence[CaptureSegment], before: Snapshot) -> None:
        """Record each segment that can be recorded, then put states back to `before`; other segments stay loops."""
        with self._going_back_to(before):
            with without_autograd():
                self._parts = tuple(
                    self._record_segment(launches, segment) if segment.is_captured else part
                    for segment, part in zip(segments, self._parts, strict=True)
                )
            self._recorder.settle(partial(self._replay_and_go_back, before))

    def _record_segment(self, launches: Sequence[Launch], segment: CaptureSegment) -> Recording:
        try:
            return self._recorder.record(launches[segment.first : segment.last])
        except GraphFailure as error:
            steps, at = self.memory.bound.steps, segment.first + error.at
            failed = steps[min(at, len(steps) - 1)]
            raise self.memory.bound.failure(failed, error) from error

    def _replay_and_go_back(self, before: Snapshot) -> None:
        """One replay from `before`: a position counter that advances twice could pass the end of its cache."""
        with self._going_back_to(before):
            self._replay_parts()

    @contextmanager
    def _going_back_to(self, before: Snapshot) -> Iterator[None]:
        """States and generators are afterwards those of `before`, also where the work fails."""
        try:
            yield
        finally:
            self._session.restore(before)

    def _replay_parts(self) -> None:
        part: Recording | None = None
        try:
            with without_autograd():
                for part in self._parts:
                    part.replay()
        except launch_errors() as error:
            raise self._explain_failure(part, error) from error

    def _explain_failure(self, part: Recording | None, error: BaseException) -> BaseException:
        """The error to raise for a replay that failed in `part`. States that it may have written lose their value.

        `part.begun` launches were begun, the failed one included; those after the steps save outputs and states.
        """
        if part is None:
            return (
                UsageError(f"a tensor of the feed cannot be copied: {error}") if type(error) is RuntimeError else error
            )
        steps, states = self.memory.bound.steps, self._session.states
        begun = self._segments[self._parts.index(part)].first + part.begun
        states.lose(self.memory.written_states(steps[:begun]))
        if begun > len(steps):
            states.lose(vid for vid, _ in states.updates_to_copy(self._plan))
        if begun > len(steps) or not isinstance(error, launch_errors()):
            return error
        failure: OnnxlineError = self.memory.bound.failure(steps[begun - 1], error)
        return failure

    def _bind_outputs(self) -> tuple[dict[str, torch.Tensor], list[Launch]]:
        """Outputs by name, and launches that save those which are views of an input, a weight or a state."""
        outputs, launches = {}, []
        for vid in self._plan.outputs:
            tensor = self._slots[vid]
            if self._plan.root(vid) not in self._plan.offsets:
                saved = torch.empty_like(tensor, memory_format=torch.contiguous_format)
                launches.append(partial(saved.copy_, tensor))
                tensor = saved
            outputs[self._plan.slots[vid].name] = tensor
        return outputs, launches

    def _bind_updates(self) -> list[Launch]:
        """Launches that store the new values of states; views of old states are saved before any state is written."""
        states = self._session.states.tensors
        saves, writes = [], []
        for vid, after in self._session.states.updates_to_copy(self._plan):
            value = self._slots[after]
            if self._plan.root(after) in states:
                saved = torch.empty_like(value, memory_format=torch.contiguous_format)
                saves.append(partial(saved.copy_, value))
                value = saved
            writes.append(partial(states[vid].copy_, value))
        return [*saves, *writes]

    def _describe(self, key: CaptureKey, segments: tuple[CaptureSegment, ...]) -> CaptureReport:
        static, copied, live = map(self._feed.names, (Treatment.STATIC, Treatment.COPIED, Treatment.LIVE))
        by_python = tuple(
            f"{self._place_of(segment.first + at)}: {reason}"
            for segment, part in zip(segments, self._parts, strict=True)
            for at, reason in sorted(part.reasons.items())
        )
        pool_bytes = self._session.pool_bytes
        return CaptureReport(key, segments, static, copied, live, self._feed.nbytes, pool_bytes, by_python)

    def _place_of(self, launch: int) -> str:
        bound = self.memory.bound
        return bound.place_of(bound.steps[launch]) if launch < len(bound.steps) else "an output or a state"


def _describe_fed(fed: FedTensor) -> str:
    return f"{dtype_name(fed.dtype)}{list(fed.shape)} on {fed.device}"


def _clone_of(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    if tensor.is_contiguous():
        return tensor.clone
    return partial(tensor.clone, memory_format=torch.contiguous_format)
