"""Split a plan at the calls that cannot be captured, and report where and why.

The table of operators says on which device which kinds stand in the way (`KernelKind.obstacles`). What follows from
the arguments of a call, and what torch says of its operators by tags, is here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from passes.suggest import bytes_text, plural, shorten_lines
from pipeline.ir.graph import TensorSpec
from pipeline.ops import KINDS, Kind
from pipeline.ops.aten import READS_HOST, WAITS_ON_CUDA
from pipeline.ops.rows import HOST_SYNC
from pipeline.runtime.capture.feed_buffers import CaptureKey
from pipeline.runtime.operators import find_operator
from pipeline.runtime.program import BoundProgram, LaunchStep

DATA_SHAPE = "it makes a result whose shape depends on the data"

TAGS = {
    torch.Tag.data_dependent_output: HOST_SYNC,
    torch.Tag.dynamic_output_shape: DATA_SHAPE,
    torch.Tag.cudagraph_unsafe: "torch says that no CUDA graph can hold it",
}
"""What torch says of its operators."""


@dataclass(frozen=True, slots=True)
class CaptureSegment:
    """Launches `first` to `last`, without `last`: captured together, or a single one that runs eagerly."""

    first: int
    last: int
    place: str = ""
    """The source of an eager call, for messages."""
    reason: str = ""
    """Why it cannot be captured; empty where it is."""

    @property
    def is_captured(self) -> bool:
        return not self.reason

    def __str__(self) -> str:
        if self.is_captured:
            return f"captured: {plural(self.last - self.first, 'call')}"
        return f"eager: {self.place}: {self.reason}"


@dataclass(frozen=True, slots=True)
class CaptureReport:
    """What was captured, and what was not and why."""

    key: CaptureKey
    """The key that finds the capture again: the mode, the graph, and names, shapes and dtypes of the feed."""
    segments: tuple[CaptureSegment, ...]
    """The parts of the plan in order: each is captured, or is a call that runs eagerly."""
    static: tuple[str, ...]
    """Names of the values that stay as they were when they were bound."""
    copied: tuple[str, ...]
    """Names of the values that each replay copies from its feed."""
    live: tuple[str, ...]
    """Names of the values that a replay copies where its feed has them: states that advance by themselves."""
    buffer_bytes: int
    """Bytes that this capture holds for itself; arena, states and weights are shared with the runs of its context."""
    pool_bytes: int = 0
    """Bytes of the pool from which the graphs of all captures of the session have what their launches allocate."""
    by_python: tuple[str, ...] = ()
    """Captured calls that no graph of the recorder holds, so that Python makes each of them, with the reason."""

    @property
    def eager(self) -> tuple[CaptureSegment, ...]:
        return tuple(segment for segment in self.segments if not segment.is_captured)

    @property
    def is_whole(self) -> bool:
        """Whether the plan is one captured segment."""
        return not self.eager

    @property
    def summary(self) -> str:
        """One line: how many segments are captured, how many calls are not, and the bytes of buffers and pool."""
        captured = plural(len(self.segments) - len(self.eager), "captured segment")
        by_python = f", {plural(len(self.by_python), 'call')} by Python" if self.by_python else ""
        pool = f", {bytes_text(self.pool_bytes)} in the pool" if self.pool_bytes else ""
        return (
            f"captured for {self.key.mode}: {captured}, {plural(len(self.eager), 'eager call')}{by_python}, "
            f"{bytes_text(self.buffer_bytes)} of buffers{pool}"
        )

    def __str__(self) -> str:
        calls = (f"by Python: {call}" for call in self.by_python)
        return "\n  ".join([self.summary, *map(str, self.segments), *calls])

    def __repr__(self) -> str:
        return shorten_lines(str(self).split("\n  "))


def split_steps(program: BoundProgram, steps: Sequence[LaunchStep], further: int = 0) -> tuple[CaptureSegment, ...]:
    """The segments of `steps`, after which `further` launches follow that can be captured."""
    segments, first, device = [], 0, program.device.kind
    for at, step in enumerate(steps):
        reason = find_obstacle(program, step, device)
        if reason:
            segments += [CaptureSegment(first, at), CaptureSegment(at, at + 1, program.place_of(step), reason)]
            first = at + 1
    segments.append(CaptureSegment(first, len(steps) + further))
    return tuple(segment for segment in segments if segment.first < segment.last)


def find_obstacle(program: BoundProgram, step: LaunchStep, device: str) -> str:
    """Why `step` cannot be captured on `device`; empty where it can."""
    if step.kind is not Kind.Aten:
        return KINDS[step.kind.name].obstacles.get(device, "")
    ins = [program.plan.slots[vid].spec for vid in step.call.in_vids]
    return next(_aten_obstacles(str(step.attrs["op"]), ins, device), "")


def _aten_obstacles(operator: str, ins: Sequence[TensorSpec], device: str) -> Iterator[str]:
    if operator.startswith("aten.index_put.") and any(spec.dtype in ("bool", "uint8") for spec in ins[1:-1]):
        yield DATA_SHAPE
    namespace, name, _ = operator.split(".")
    if (namespace == "aten" and name in READS_HOST) or (device == "cuda" and operator in WAITS_ON_CUDA):
        yield HOST_SYNC
    tags = find_operator(operator).tags
    yield from (reason for tag, reason in TAGS.items() if tag in tags)
