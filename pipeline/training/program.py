"""A train step that runs. Its states are parameters, buffers, moments, learning rates and the number of the step."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from passes.suggest import nearest, plural
from pipeline.errors import CheckFailed, UsageError
from pipeline.ir import Graph
from pipeline.runtime import CompiledProgram
from pipeline.runtime.capture import CaptureReport, Snapshot
from pipeline.training.batch import Batch, BatchLayout
from pipeline.training.blame import find_first_broken
from pipeline.training.checkpoint import read_snapshot, write_snapshot
from pipeline.training.graph import STEP, rate_name
from pipeline.training.optimizer import learning_rates, rate_state
from pipeline.training.phases import Phase
from pipeline.training.state_dict import Sources, from_state_dict, to_state_dict

__all__ = ["NotFinite", "TrainProgram"]


class NotFinite(CheckFailed):
    """The loss of a step is not finite. The step changed nothing, so `snapshot` is the last good state."""

    def __init__(self, message: str, step: int, snapshot: Snapshot) -> None:
        super().__init__(message)
        self.step, self.snapshot = step, snapshot


class TrainProgram:
    """One train step, and the states that it changes; made by `record_step`.

    The states are copies: the module and the optimizer that the step was recorded from stay as they are until
    `write_back`. The learning rates are those of the optimizer's groups, which are looked at before each step, so
    torch's schedulers work. Random numbers are torch's (`torch.manual_seed`). One thread at a time may use it.
    """

    def __init__(
        self,
        graph: Graph,
        compiled: CompiledProgram,
        layout: BatchLayout,
        sources: Sources,
        *,
        capture: CaptureReport,
        phases: Sequence[Phase] = (),
    ) -> None:
        self.graph, self.capture = graph, capture
        self._phases = tuple(phases)
        self._replays, self._replay_seconds = 0, 0.0
        self._compiled, self._layout, self._sources = compiled, layout, sources
        self._rates = learning_rates(sources.optimizer)
        """As they were last read."""
        self._loss = graph.values[graph.outputs[0]].name
        self._names = frozenset(layout.names)
        self._captures = compiled.context.captures
        self._warned: set[str] = set()
        vars(sources.optimizer)["_opt_called"] = True  # else torch's schedulers warn that no step was done

    def step(self, batch: Batch) -> torch.Tensor:
        """Do one step. Returns the loss before the update, a tensor without dimensions.

        Entries of a mapping that are called like a state are ignored, with one warning.

        Raises:
            UsageError: the batch is not like the example: another form, shape, dtype or device.
            NotFinite: the loss is not finite; nothing has changed.
        """
        start = time.perf_counter()
        feed = self._layout.tensors(batch)
        if self._layout.by_name and feed.keys() != self._names:
            feed = self._without_states(feed)
        self._follow_schedule()
        try:
            capture = self._captures.find(feed)
        except KeyError:
            loss = self._compiled.replay(feed, copy=False)[self._loss]
        else:  # without the looks and the lock of a program that others use too
            loss = capture.replay_fitting(feed, copy=False)[self._loss]
        value = loss.item()
        if not math.isfinite(value):
            raise self._not_finite(feed, value)
        self._replays += 1
        self._replay_seconds += time.perf_counter() - start
        return loss.clone()

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Trace, Compile, Warmup, Capture and Replay, the last one with all steps so far."""
        return (*self._phases, Phase("Replay", self._replay_seconds, plural(self._replays, "step")))

    def snapshot(self) -> Snapshot:
        """Copies of all states, and of the state of torch's random numbers where the step draws any."""
        return self._compiled.snapshot()

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to a snapshot: the next steps are those that came after it, bit for bit, for the same batches.

        Raises:
            UsageError: the snapshot is of another program.
        """
        self._compiled.restore(snapshot)

    def save(self, path: str | Path) -> None:
        """Write all states to a safetensors file, under a temporary name first.

        Raises:
            UsageError: the folder does not exist.
        """
        write_snapshot(Path(path), self.snapshot())

    def load(self, path: str | Path) -> None:
        """Go on from a file that `save` wrote.

        Raises:
            UsageError: there is no such file, or it is of another program.
        """
        self.restore(read_snapshot(Path(path), self._compiled.states()))

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """`{"module": …, "optimizer": …}`, each as torch's own `load_state_dict` takes it. Copies."""
        return to_state_dict(self._sources, self._compiled.states())

    def load_state_dict(self, found: Mapping[str, Mapping[str, Any]]) -> None:
        """Set states from `{"module": module.state_dict(), "optimizer": optimizer.state_dict()}`, one of them or both.

        Raises:
            UsageError: a name, a shape or a setting of the optimizer is not that of this program.
        """
        self._compiled.give_states(from_state_dict(self._sources, found, self._compiled.states()))

    def write_back(self) -> None:
        """Give the module and the optimizer that the step was recorded from the states of this program."""
        found = self.state_dict()
        self._sources.module.load_state_dict(found["module"])
        self._sources.optimizer.load_state_dict(found["optimizer"])

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer that the step was recorded from, for schedulers."""
        return self._sources.optimizer

    @property
    def module(self) -> nn.Module:
        """The module that the step was recorded from, with its numbers from before; `write_back` sets them."""
        return self._sources.module

    @property
    def steps_done(self) -> int:
        return int(self._compiled.state(STEP))

    def _without_states(self, feed: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        names = self._layout.names
        states = self._compiled.state_names
        for name in feed.keys() - set(names):
            if not states & {name, f"module.{name}", f"optimizer.{name}"}:
                raise UsageError(f"the batch has {name!r}, which the step does not read{nearest(name, names)}")
            if name not in self._warned:
                self._warned.add(name)
                said = f"the batch has {name!r}, which is a state of the step and stays as it is; restore() sets states"
                warnings.warn(said, stacklevel=3)
        return {name: feed[name] for name in names if name in feed}

    def _follow_schedule(self) -> None:
        """Take over the learning rates that somebody changed in the optimizer since they were last read."""
        for options, rate in zip(self._sources.optimizer.param_groups, self._rates, strict=True):
            if options["lr"] != rate:
                break
        else:  # at nearly every step
            return
        now = learning_rates(self._sources.optimizer)
        pairs = enumerate(zip(now, self._rates, strict=True))
        changed = {rate_name(index): rate_state(rate) for index, (rate, old) in pairs if rate != old}
        self._compiled.give_states({name: changed[name] for name in changed if name in self._compiled.state_names})
        self._rates = now

    def _not_finite(self, feed: Mapping[str, torch.Tensor], loss: float) -> NotFinite:
        snapshot = self.snapshot()
        number = int(snapshot.states[STEP]) + 1
        blamed = find_first_broken(self.graph, {**self._sources.constants, **snapshot.states, **feed})
        said = (
            f"step {number}: the loss is {loss}; {blamed}. The step changed nothing: the error's snapshot is of before"
        )
        return NotFinite(said, number, snapshot)
