"""A train step that runs. Its states are parameters, buffers, moments, learning rates and the count of steps."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from passes.suggest import nearest, plural
from pipeline.argument_checks import MAPPING, PATH, a, expects
from pipeline.errors import CheckFailed, UsageError
from pipeline.events import Observer, Phase, Progress
from pipeline.ir import Graph
from pipeline.runtime import CompiledProgram
from pipeline.runtime.capture import CaptureReport, RandomState, Snapshot
from pipeline.runtime.devices import Device, StreamOrder
from pipeline.runtime.kernels import Launch
from pipeline.runtime.program import ProcessBound
from pipeline.runtime.tensors import dtype_name
from pipeline.training.batch import Arguments, Batch, BatchLayout, check_limit
from pipeline.training.graph import LIMIT, STEP, find_first_broken, rate_name, stored_name
from pipeline.training.optimizer import fixed_options, has_rate_in_tensor, learning_rates, rate_state, refuse_changes
from pipeline.training.state_dict import Sources, from_state_dict, read_snapshot, to_state_dict, write_snapshot
from pipeline.training.with_weights import export_program

if TYPE_CHECKING:
    from passes.run.result import PassRun
    from pipeline.result import RunResult


class NotFinite(CheckFailed):
    """The loss of a step is not finite. The step changed nothing, so `snapshot` is the last good state."""

    def __init__(self, message: str, step: int, snapshot: Snapshot) -> None:
        super().__init__(message)
        self.step, self.snapshot = step, snapshot


class TrainProgram(ProcessBound):
    """One train step, and the states that it changes; made by `record_step`.

    The states are copies: the module and the optimizer that the step was recorded from stay as they are until
    `write_back`. The learning rates are read from the optimizer's groups before each step, so torch's schedulers work.
    Random values come from torch's generator (`torch.manual_seed`) for `device`, where the states lie. Only one thread
    at a time may use a program.
    """

    instead = "`save` its states, or pickle its `snapshot()`, and record the step again where they are read"

    @expects(
        graph=a(Graph, "a Graph; record_step makes the program of a module"),
        compiled=a(CompiledProgram, "a CompiledProgram"),
        layout=a(BatchLayout, "a BatchLayout"),
        sources=a(Sources, "what the program was recorded from"),
        capture=a(CaptureReport, "a CaptureReport"),
        example=MAPPING,
    )
    def __init__(
        self,
        graph: Graph,
        compiled: CompiledProgram,
        layout: BatchLayout,
        sources: Sources,
        *,
        capture: CaptureReport,
        example: Mapping[str, torch.Tensor],
        phases: Sequence[Phase] = (),
        late: LateSum | None = None,
    ) -> None:
        self.graph, self.capture, self.device = graph, capture, compiled.device
        self._phases = tuple(phases)
        self._replays, self._replay_seconds = 0, 0.0
        self._compiled, self._layout, self._sources, self._example = compiled, layout, sources, example
        self._options: list[dict[str, Any]] = []
        self._rates = learning_rates(sources.optimizer)
        """Options and rates of the optimizer's groups as they were last read."""
        self._has_rate_in_tensor = has_rate_in_tensor(sources.optimizer)
        self._loss, *more = (graph.values[vid].name for vid in graph.outputs)
        self._names = frozenset(layout.names)
        self._captures = compiled.context.captures
        randomness = self._captures.session.randomness
        self._randomness = randomness if randomness.draws else None
        self._checked = more[0] if more else self._loss
        """The output that is finite only if the step is valid."""
        self._late = late
        self._warned: set[str] = set()
        vars(sources.optimizer)["_opt_called"] = True  # else torch's schedulers warn that no step was done

    def step(self, batch: Batch) -> torch.Tensor:
        """Do one step. Returns the loss before the update, a tensor without dimensions.

        Entries of a mapping that have the name of a state are ignored, with one warning.

        Args:
            batch: tensors of the form, shapes, dtypes and device of the example batch.

        Raises:
            UsageError: the batch is not like the example: another form, shape, dtype or device.
            NotFinite: the loss is not finite, or a gradient where these are clipped or checked; nothing has changed.
        """
        start = time.perf_counter()
        if self._late is not None:
            self._refuse_broken_step(self._late)
        feed = self._layout.tensors(batch)
        if self._layout.by_name and feed.keys() != self._names:
            feed = self._without_states(feed)
        self._follow_schedule()
        random = self._randomness and self._randomness.state()  # 1 µs, for a step that draws random values
        try:
            capture = self._captures.find(feed)
        except KeyError:
            self._refuse_other_batch(feed)
            outputs = self._compiled.replay(feed, copy=False)
        else:  # without the looks and the lock of a program that others use too
            outputs = capture.replay_fitting(feed, copy=False)
        loss = outputs[self._loss]
        if self._late is not None:
            self._late.look()
        elif not math.isfinite(outputs[self._checked].item()):
            raise self._not_finite(feed, loss.item(), random)
        self._replays += 1
        self._replay_seconds += time.perf_counter() - start
        return loss.clone()

    def __call__(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        """`step`, with the tensors of the batch in order, or by name: the loss before the update.

        Raises:
            UsageError, NotFinite: as `step`.
        """
        if args and kwargs:
            raise UsageError("found tensors in order and by name; expected the batch in one of these forms")
        return self.step(kwargs or args)

    def __repr__(self) -> str:
        example = self._example.items()
        batch = ", ".join(f"{name}: {dtype_name(tensor.dtype)}{list(tensor.shape)}" for name, tensor in example)
        states = f"{plural(len(self._compiled.state_names), 'state')}, {plural(self.steps_done, 'step')} done"
        return f"TrainProgram({batch}) -> loss: {plural(len(self.graph.ops), 'op')}, {states}"

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Trace, Compile, Warmup, Capture and Replay, the last one with all steps so far."""
        return (*self._phases, Phase("Replay", self._replay_seconds, plural(self._replays, "step")))

    def synchronize(self) -> None:
        """Wait until the device has done all steps; a step itself waits for nothing.

        Raises:
            DataError: a batch had an index out of range, which a device reports late.
            NotFinite: a step was not valid, which a device reports late too.
        """
        self._compiled.synchronize()
        if self._late is not None:
            self._refuse_broken_step(self._late)  # a look that began before the last steps
            with self.device.scope():
                self._late.look(at_once=True)
            self.device.synchronize()
            self._refuse_broken_step(self._late)

    def snapshot(self) -> Snapshot:
        """Copies of all states, and of the state of torch's generator if the step draws random values."""
        self._follow_schedule()  # which may have gone on since the last step
        return self._compiled.snapshot()

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to a snapshot: for the same batches, the next steps repeat the steps after the snapshot bit for bit.

        Raises:
            UsageError: `snapshot` is no snapshot, or a snapshot of another program.
        """
        if not isinstance(snapshot, Snapshot):
            raise UsageError(
                f"found {type(snapshot).__name__}, expected what snapshot() returned; load() reads a file, and "
                "load_state_dict() takes state dicts"
            )
        self._compiled.restore(snapshot)

    @expects(path=PATH)
    def save(self, path: str | Path) -> None:
        """Write all states to a safetensors file, under a temporary name first.

        Args:
            path: the file to write; a file there is replaced as a whole.

        Raises:
            UsageError: the folder does not exist.
        """
        write_snapshot(Path(path), self.snapshot())

    @expects(path=PATH)
    def load(self, path: str | Path) -> None:
        """Go on from a file that `save` wrote.

        Args:
            path: a file of `save`, of a program that was recorded from the same module and optimizer.

        Raises:
            UsageError: there is no such file, or another program wrote it.
        """
        self.restore(read_snapshot(Path(path), self._compiled.states()))

    def tensors(self, batch: Batch) -> dict[str, torch.Tensor]:
        """All that the next step reads, by the names of values: the batch, states and constants.

        Args:
            batch: as in `step`.
        """
        return {**self._sources.constants, **self.snapshot().states, **self._layout.tensors(batch)}

    def walk(self, batch: Batch) -> Iterator[tuple[str, torch.Tensor]]:
        """Do a step launch by launch, and yield (name, tensor) for each value that a launch computes; for debugging.

        The tensors are memory of the plan, which a later launch may overwrite.

        Args:
            batch: as in `step`.
        """
        plan = self._compiled.plan
        feed = {name: self._layout.tensors(batch)[name] for name in self._names}
        for index, results in self._compiled.context.walk(feed):
            yield from (
                (plan.slots[vid].name, result) for vid, result in zip(plan.calls[index].out_vids, results, strict=True)
            )

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """`{"module": …, "optimizer": …}`, each as torch's own `load_state_dict` takes it. Copies."""
        self._follow_schedule()
        return to_state_dict(self._sources, self._compiled.states())

    def load_state_dict(self, found: Mapping[str, Mapping[str, Any]]) -> None:
        """Set states from `{"module": module.state_dict(), "optimizer": optimizer.state_dict()}`, one of them or both.

        Args:
            found: `module` → a state dict of the module, `optimizer` → a state dict of the optimizer.

        Raises:
            UsageError: a name, a shape or a setting of the optimizer is not that of this program.
        """
        self._compiled.give_states(from_state_dict(self._sources, found, self._compiled.states()))

    def write_back(self) -> None:
        """Give the module and the optimizer that the step was recorded from the states of this program."""
        self.write_to(self._sources.module)
        self._sources.optimizer.load_state_dict(self.state_dict()["optimizer"])

    @expects(module=a(nn.Module, "an nn.Module"))
    def write_to(self, module: nn.Module) -> None:
        """Give `module`, which is that of this program or a copy, the parameters and buffers of this program."""
        states = self._compiled.states()
        with torch.no_grad():
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                if stored_name(name) in states:
                    tensor.copy_(states[stored_name(name)])

    @expects(path=PATH)
    def export(
        self,
        path: str | Path,
        *,
        args: Sequence[torch.Tensor] | None = None,
        kwargs: Mapping[str, torch.Tensor] | None = None,
        keep: Sequence[str] = (),
        **options: Any,
    ) -> RunResult | PassRun:
        """Write the trained model to an ONNX file by `onnxline.optimize`, and return its result.

        A copy of the module is exported in evaluation mode, with the inputs of the example batch or with `args` and
        `kwargs`; every pass is proven against it. A module that `as_module` made of an ONNX model goes back into that
        model first. `keep` and `options` are those of `onnxline.optimize`.

        Args:
            path: the ONNX file to write.
            args: inputs of the export; by default those of the example batch.
            kwargs: inputs of the export by name.
            keep: structures to keep, as in `onnxline.optimize`.
            options: further arguments of `onnxline.optimize`.

        Raises:
            OnnxlineError: as `onnxline.optimize`.
        """
        return export_program(self, Path(path), args, kwargs, keep, options)

    @property
    def example(self) -> Arguments:
        """The arguments that the module was called with when the step was recorded, by order and by name."""
        return self._layout.arguments(self._example)

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer that the step was recorded from, for schedulers."""
        return self._sources.optimizer

    @property
    def module(self) -> nn.Module:
        """The module that the step was recorded from, with the values from before the training; `write_back` sets
        them."""
        return self._sources.module

    @property
    def limit(self) -> float | None:
        """The limit of the gradients' norm, or of each element; None if gradients are not clipped."""
        return float(self._compiled.state(LIMIT)) if LIMIT in self._compiled.state_names else None

    @limit.setter
    def limit(self, limit: float) -> None:
        if self.limit is None:
            raise UsageError("this program clips no gradients; record the step with max_norm or max_value")
        dtype = self._compiled.state(LIMIT).dtype
        self._compiled.give_states({LIMIT: torch.tensor(check_limit("limit", limit), dtype=dtype)})

    @property
    def steps_done(self) -> int:
        return int(self._compiled.state(STEP))

    def _refuse_other_batch(self, feed: Mapping[str, torch.Tensor]) -> None:
        for name, example in self._example.items():
            forms = [
                f"{dtype_name(item.dtype)}{list(item.shape)}" if isinstance(item, torch.Tensor) else type(item).__name__
                for item in (feed.get(name), example)
            ]
            if forms[0] != forms[1]:
                raise UsageError(
                    f"{name!r} of the batch is {forms[0]}; expected {forms[1]}, as in the example batch: all batches "
                    "have the same shapes and dtypes (drop_last=True of a DataLoader leaves out the last, smaller one)"
                )

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
        """Take over learning rates that changed in the optimizer since they were last read.

        Raises:
            UsageError: an option was changed that is part of the graph.
        """
        groups = self._sources.optimizer.param_groups
        if groups == self._options and not self._has_rate_in_tensor:  # as a rule these are the same objects: 0.2 µs
            return
        refuse_changes(self._sources.options, fixed_options(self._sources.optimizer), "the optimizer")
        now = learning_rates(self._sources.optimizer)
        pairs = enumerate(zip(now, self._rates, strict=True))
        changed = {rate_name(index): rate_state(rate) for index, (rate, old) in pairs if rate != old}
        self._compiled.give_states({name: changed[name] for name in changed if name in self._compiled.state_names})
        self._options, self._rates = [dict(group) for group in groups], now
        self._has_rate_in_tensor = has_rate_in_tensor(self._sources.optimizer)

    def _refuse_broken_step(self, late: LateSum) -> None:
        """
        Raises:
            NotFinite: the host knows by now of a step that was not valid.
        """
        if late.is_finite():
            return
        number, device = self.steps_done + 1, self.device.name
        raise NotFinite(
            f"a step up to step {number}: the loss or a gradient is not finite, which {device} shows "
            "after the step. That step changed nothing, and later ones went on from the state before it",
            number,
            self.snapshot(),
        )

    def _not_finite(self, feed: Mapping[str, torch.Tensor], loss: float, random: RandomState | None) -> NotFinite:
        """The error for a step that began with the random state `random`; its draws alone cannot be taken back."""
        snapshot = self.snapshot()
        snapshot = snapshot if random is None else replace(snapshot, random=random)
        number = int(snapshot.states[STEP]) + 1
        tensors = {**self._sources.constants, **snapshot.states, **feed}
        blamed = find_first_broken(self.graph, tensors, self.device, random)
        what = "a gradient is not finite" if math.isfinite(loss) else f"the loss is {loss}"
        said = f"step {number}: {what}; {blamed}. The step changed nothing: the error's snapshot is of before"
        return NotFinite(said, number, snapshot)


class LateSum:
    """Zero times a number of each step, which is finite as long as all of them are; the host takes it late."""

    def __init__(self, device: Device, order: StreamOrder, output: str) -> None:
        """`output` is the name of that number among the outputs of the step."""
        with device.scope():
            self._sum = device.empty((), None, torch.float32).zero_()
        order.keep([self._sum])
        self._device, self._output, self._value = device, output, device.late_value(self._sum)

    def launches(self, outputs: Mapping[str, torch.Tensor]) -> list[Launch]:
        """A part of each capture: zero, or NaN where the number is not finite, so that the sum stays in its range."""
        return [partial(self._sum.add_, outputs[self._output], alpha=0)]

    def clear(self) -> None:
        """Forget the steps of a warm-up."""
        with self._device.scope():
            self._sum.zero_()

    def look(self, *, at_once: bool = False) -> None:
        self._value.start(at_once=at_once)

    def is_finite(self) -> bool:
        """Whether all numbers that the host knows are finite; False once after a number that is not finite."""
        found = self._value.poll()
        return found is None or math.isfinite(found.item())


PHASES = ("Trace", "Compile", "Warmup", "Capture", "Replay")
"""The names of `Phase`, in order."""

Result = TypeVar("Result")


class PhaseRecorder:
    """Collects phases, and sends an event when one begins and when one ends."""

    def __init__(self, observe: Observer | None = None) -> None:
        self.phases: list[Phase] = []
        self._observe = observe

    def run(self, name: str, work: Callable[[], Result], detail: Callable[[Result], str]) -> Result:
        """The result of `work`, which is the phase `name`."""
        self.begin(name)
        start = time.perf_counter()
        result = work()
        self.end(Phase(name, time.perf_counter() - start, detail(result)))
        return result

    def begin(self, name: str) -> None:
        if self._observe is not None:
            self._observe(Progress("train", name, PHASES.index(name), len(PHASES)))

    def end(self, phase: Phase) -> None:
        self.phases.append(phase)
        if self._observe is not None:
            self._observe(phase)
