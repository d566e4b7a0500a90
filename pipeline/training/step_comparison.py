"""Compare a train step with eager torch: from the same states, on the same batch, the first value that differs."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from passes.proof.numbers import Errors, Tolerance, compare
from passes.visible import Table, TableResult
from pipeline.argument_checks import a, expects
from pipeline.ir import Op
from pipeline.runtime.capture import Snapshot
from pipeline.runtime.tensors import to_numpy
from pipeline.training.batch import Batch, BatchLayout, LossFunction
from pipeline.training.graph import OWN, describe_op, moment_name, run_again, stored_name
from pipeline.training.program import TrainProgram

NOISE = 1e-3
"""Relative difference of a first moment up to which Adam's update of the element is judged. It divides the moment by
its own size, so an element whose gradient is rounding moves by the whole learning rate, to either side."""


@dataclass(frozen=True, slots=True, repr=False)
class StepComparison(TableResult):
    """The result of comparing a step of a program with a step of eager torch.

    Args:
        step: the number of the step, from 1.
        compared: how many values: the loss, buffers, moments, parameters.
        name: the first value that differs, such as `module.fc.weight`; "" if none does.
        errors: the distance of this value from eager torch.
        op: the first op of the step whose result differs from torch's operator, if one does.
    """

    step: int
    compared: int
    name: str = ""
    errors: Errors | None = None
    op: str = ""

    def tables(self) -> Iterator[Table]:
        yield Table("step of the program and of eager torch", [(str(self),)])

    def __str__(self) -> str:
        if self.errors is None:
            return f"step {self.step}: no difference, torch and the program agree on {self.compared} values"
        first = f"; the first operator that computes something else is {self.op}" if self.op else ""
        return f"step {self.step}: {self.name} differs from eager torch: {self.errors.why}{first}"


@expects("compare_step: ", program=a(TrainProgram, "the program of record_step"))
def compare_step(
    program: TrainProgram,
    loss: LossFunction,
    batch: Batch,
    *,
    max_norm: float | None = None,
    max_value: float | None = None,
    tolerances: Mapping[str, Tolerance] | None = None,
) -> StepComparison:
    """Do the program's next step, and the same step by eager torch from the same states.

    The program is one step further after it: call it in place of `program.step(batch)`.

    Args:
        program: a program of `record_step`; the step changes its states.
        loss: the function that `record_step` got.
        batch: what the step trains on.
        max_norm: as `record_step` got it.
        max_value: as `record_step` got it.
        tolerances: by dtype, in place of the documented tolerances.

    Returns:
        The first value that differs and the operator that computes it, or how many values agree.

    Raises:
        UsageError, NotFinite: as `TrainProgram.step`.
    """
    before = program.snapshot()
    with program.device.fork_random(before.random.default):
        expected = dict(_eager_values(program, loss, batch, max_norm, max_value))
    found = {"loss": program.step(batch), **_values_of(program, program.state_dict())}
    for name, tensor in expected.items():
        left, right = (to_numpy(item.detach()) for item in (tensor, found[name]))
        moment = moment_name(name.removeprefix("module."), "exp_avg")
        if name.startswith("module.") and moment in expected:
            left, right = _without_noise(left, right, to_numpy(expected[moment]), to_numpy(found[moment]))
        errors = compare(left, right, tolerances)
        if not errors.ok:
            op = _first_different_op(program, batch, before, tolerances)
            return StepComparison(program.steps_done, len(expected), name, errors, op)
    return StepComparison(program.steps_done, len(expected))


def _eager_values(
    program: TrainProgram,
    loss: LossFunction,
    batch: Batch,
    max_norm: float | None,
    max_value: float | None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """The loss, and the values of parameters, buffers and moments after a step of torch."""
    module, optimizer = copy.deepcopy((program.module, program.optimizer))  # together, so that they share parameters
    states = program.state_dict()
    module.load_state_dict(states["module"])
    optimizer.load_state_dict(states["optimizer"])
    layout = BatchLayout.of(module, batch)
    with torch.enable_grad():
        value = layout.loss(module, loss, list(layout.tensors(batch).values()))
        optimizer.zero_grad()
        value.backward()
    if max_norm is not None:
        nn.utils.clip_grad_norm_(module.parameters(), max_norm)
    if max_value is not None:
        nn.utils.clip_grad_value_(module.parameters(), max_value)
    optimizer.step()
    yield "loss", value.reshape(())
    yield from _values_of(program, {"module": module.state_dict(), "optimizer": optimizer.state_dict()}).items()


def _values_of(program: TrainProgram, states: Mapping[str, Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """Buffers, moments and parameters by the names of their values, in this order: each follows from those before."""
    stored = {stored_name(name): tensor for name, tensor in states["module"].items()}
    params = {stored_name(name) for name, _ in program.module.named_parameters()}
    names = _names_of_parameters(program.module, program.optimizer)
    moments = {
        moment_name(names[number], sort): tensor
        for number, state in states["optimizer"]["state"].items()
        for sort, tensor in state.items()
        if isinstance(tensor, torch.Tensor) and sort != "step"
    }
    buffers = {name: tensor for name, tensor in stored.items() if name not in params}
    return {**buffers, **moments, **{name: tensor for name, tensor in stored.items() if name in params}}


def _names_of_parameters(module: nn.Module, optimizer: Optimizer) -> list[str]:
    names = {id(tensor): name for name, tensor in module.named_parameters()}
    return [names[id(tensor)] for group in optimizer.param_groups for tensor in group["params"]]


def _without_noise(
    left: np.ndarray, right: np.ndarray, moment: np.ndarray, other: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Two parameters after a step of Adam, equal where the gradient of the element is rounding."""
    wide, narrow = moment.astype(np.float64), other.astype(np.float64)
    is_noise = np.abs(wide - narrow) > NOISE * np.abs(wide)
    return left, np.where(is_noise, left, right).astype(right.dtype)


def _first_different_op(
    program: TrainProgram, batch: Batch, before: Snapshot, tolerances: Mapping[str, Tolerance] | None
) -> str:
    """The first op of the step whose result differs from what torch's operators compute, with its place."""
    after = program.snapshot()
    expected: dict[str, tuple[Op, torch.Tensor]] = {}

    def observe(op: Op, results: Sequence[torch.Tensor]) -> None:
        if op.kind not in OWN:
            names = (program.graph.values[vid].name for vid in op.outputs)
            expected.update({name: (op, result.clone()) for name, result in zip(names, results, strict=True)})

    program.restore(before)
    run_again(program.graph, program.tensors(batch), program.device, before.random, observe)
    try:
        for name, result in program.walk(batch):
            op, value = expected.get(name, (None, result))
            if op is not None and not compare(to_numpy(value), to_numpy(result), tolerances).ok:
                return describe_op(op)
    finally:
        program.restore(after)
    return ""
