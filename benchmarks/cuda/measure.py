"""Times of calls on a device, and where they are run: a CUDA device, or the recording device for a dry run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from pipeline.importers.from_torch import from_torch
from pipeline.importers.from_torch.functionalize import functionalize_program
from pipeline.ir import Graph
from pipeline.runtime.devices import Device, find_device
from pipeline.runtime.recording import RecordingDevice

WARM_ROUNDS: Final = 3

ROUNDS: Final = 15


@dataclass(frozen=True, slots=True)
class Bench:
    """Where rows run. `dry`: on CPU memory, at tiny sizes, to see that every line of a row works."""

    dry: bool
    device: Device
    show: Callable[[Mapping[str, Any]], None]
    """Takes the figures of a row that goes on."""
    warms: bool = False
    """Whether a row only lets the peers' compiler fill its caches, and measures nothing."""

    @classmethod
    def open(cls, *, dry: bool, show: Callable[[Mapping[str, Any]], None] = lambda _: None) -> Bench:
        return cls(dry, RecordingDevice(2**28) if dry else find_device("cuda"), show)

    @property
    def place(self) -> torch.device:
        """Where torch's own side of a row has its tensors."""
        return torch.device("cpu") if self.dry else self.device.place

    def pick(self, real: Any, tiny: Any) -> Any:
        return tiny if self.dry else real

    def compile(self, module: Callable[..., Any], mode: str | None) -> Callable[..., Any]:
        """`torch.compile`; a dry run takes the backend that compiles nothing."""
        return torch.compile(module, backend="eager") if self.dry else torch.compile(module, mode=mode)

    def time(self, call: Callable[[], object], seconds: float = 1.5) -> Timing:
        """Medians over calls for about `seconds`, after some that are not counted."""
        for _ in range(1 if self.warms else self.pick(5, 1)):
            call()
        if self.dry or self.warms:
            begun = time.perf_counter()
            call()
            spent = time.perf_counter() - begun
            return Timing(spent * 1e3, spent * 1e6)
        device, host, ends = list[float](), list[float](), time.perf_counter() + seconds
        torch.cuda.synchronize()
        while time.perf_counter() < ends or len(device) < 5:
            before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            before.record()
            begun = time.perf_counter()
            call()
            host.append(time.perf_counter() - begun)
            after.record()
            after.synchronize()
            device.append(before.elapsed_time(after))
        return Timing(statistics.median(device), statistics.median(host) * 1e6)

    def in_turns(self, calls: Mapping[str, Callable[[], object]], in_a_row: int = 20) -> dict[str, float]:
        """Milliseconds of one of `in_a_row` calls between which nobody waits, by CUDA events.

        They are medians of rounds in which each of `calls` has its turn, so that all have the same clocks and heat.
        """
        found = {name: list[float]() for name in calls}
        for at in range(self.pick(WARM_ROUNDS + ROUNDS, 2)):
            for name, call in calls.items():
                spent = self._spend(call, self.pick(in_a_row, 2))
                if at >= self.pick(WARM_ROUNDS, 1):
                    found[name].append(spent)
        return {name: statistics.median(spent) for name, spent in found.items()}

    def _spend(self, call: Callable[[], object], in_a_row: int) -> float:
        """Milliseconds of one call of some."""
        if self.dry:
            begun = time.perf_counter()
            for _ in range(in_a_row):
                call()
            return (time.perf_counter() - begun) / in_a_row * 1e3
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        before.record()
        for _ in range(in_a_row):
            call()
        after.record()
        after.synchronize()
        return before.elapsed_time(after) / in_a_row


@dataclass(frozen=True, slots=True)
class Timing:
    device_ms: float
    """Between CUDA events around a call; of a dry run the time of the host."""
    host_us: float


def graph_of(module: nn.Module, inputs: Sequence[torch.Tensor]) -> Graph:
    """The forward pass as a graph, exported from the CPU."""
    return from_torch(functionalize_program(torch.export.export(module.eval(), tuple(inputs), strict=False)))


def feed_of(graph: Graph, inputs: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {graph.values[vid].name: tensor for vid, tensor in zip(graph.inputs, inputs, strict=True)}


def weights_of(graph: Graph, module: nn.Module) -> dict[str, torch.Tensor]:
    known = {key for keys in graph.sources.values() for key in keys}
    return {name: tensor.detach() for name, tensor in module.state_dict().items() if name in known}
