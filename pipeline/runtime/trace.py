"""How long each launch of a run takes, also in Chrome's trace format (chrome://tracing, Perfetto)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter_ns
from typing import Any

import torch

from pipeline.ops import unpack
from pipeline.planning import ExecutionPlan, FeedSignature, alive_bytes, occupants
from pipeline.runtime.context import Context
from pipeline.runtime.kernels import Launch
from pipeline.runtime.program import BoundProgram, LaunchStep
from pipeline.runtime.slots import Feed
from pipeline.runtime.tensors import torch_dtype


@dataclass(frozen=True, slots=True)
class LaunchTime:
    """One launch of one run, in nanoseconds of a clock that begins anywhere."""

    run: int
    call: int
    begun: int
    ended: int


def trace_runs(bound: BoundProgram, feed: Feed, *, runs: int = 1) -> list[LaunchTime]:
    """The times of all launches of `runs` runs, after one that is not counted; no other context sees their states."""
    context = _TimedContext(bound)
    context.run(feed)
    times = []
    for number in range(runs):
        context.times.clear()
        context.run(feed)
        times += [LaunchTime(number, call, begun, ended) for call, begun, ended in context.times]
    return times


def random_feed(signature: FeedSignature, seed: int = 0) -> dict[str, torch.Tensor]:
    """Floats between -1 and 1, and ones for integers and bools: of any table with two rows a valid index."""
    draw = torch.Generator().manual_seed(seed)
    feed = {}
    for entry in signature:
        dtype = torch_dtype(entry.spec.dtype)
        if dtype.is_floating_point:
            feed[entry.name] = (torch.rand(entry.spec.sizes, generator=draw) * 2 - 1).to(dtype)
        else:
            feed[entry.name] = torch.ones(entry.spec.sizes, dtype=dtype)
    return feed


class _TimedContext(Context):
    """A context that writes down when each launch begins and ends."""

    def __init__(self, bound: BoundProgram) -> None:
        super().__init__(bound)
        self.times: list[tuple[int, int, int]] = []
        pairs = zip(self._steps, self._launches, strict=True)
        self._launches = [partial(self._time, step.index, launch) for step, launch in pairs]

    def _time(self, call: int, launch: Launch) -> None:
        begun = perf_counter_ns()
        launch()
        self._device.synchronize()
        self.times.append((call, begun, perf_counter_ns()))


def to_chrome_trace(bound: BoundProgram, times: Sequence[LaunchTime]) -> dict[str, Any]:
    """Events for each launch, and the bytes alive in the arena as a counter; times in microseconds from the first."""
    plan, steps = bound.plan, {step.index: step for step in bound.steps}
    zero = min((time.begun for time in times), default=0)
    alive = alive_bytes(list(occupants(plan).values()), len(plan.calls))
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": plan.graph_name or "plan"}},
        {"ph": "M", "pid": 1, "tid": 1, "name": "thread_name", "args": {"name": "launches"}},
    ]
    for time in times:
        begun = (time.begun - zero) / 1000
        duration = (time.ended - time.begun) / 1000
        facts = {"run": time.run, "call": time.call, **_facts(plan, steps[time.call])}
        name = _label(steps[time.call])
        events.append({"ph": "X", "pid": 1, "tid": 1, "name": name, "ts": begun, "dur": duration, "args": facts})
        events.append({"ph": "C", "pid": 1, "name": "arena", "ts": begun, "args": {"bytes": alive[time.call]}})
    return {"displayTimeUnit": "ns", "traceEvents": events}


def _label(step: LaunchStep) -> str:
    """The kind, or the operator of torch that is called by name."""
    return str(unpack(step.call.attr_schema, step.call.attr_blob).get("op", step.kind.name))


def _facts(plan: ExecutionPlan, step: LaunchStep) -> dict[str, Any]:
    def texts(vids: Sequence[int]) -> list[str]:
        return [
            f"{plan.slots[vid].name}: {plan.slots[vid].spec.dtype}{list(plan.slots[vid].spec.shape)}" for vid in vids
        ]

    return {"kind_id": step.call.kind_id, "reads": texts(step.call.in_vids), "writes": texts(step.call.out_vids)}
