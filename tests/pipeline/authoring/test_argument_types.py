"""What users of the room call, with arguments of other types: one sentence each, and nothing else."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from pipeline.authoring import (
    Adam,
    Conv2d,
    CrossEntropyLoss,
    FitLimits,
    IRTensor,
    LayerNorm,
    Linear,
    Model,
    Module,
    Parameter,
    functional,
)
from pipeline.errors import OnnxlineError, UsageError
from pipeline.ir import TensorSpec
from pipeline.planning import ExecutionPlan
from pipeline.runtime import Capture, CompiledProgram
from pipeline.runtime.entries import CompiledEntries
from pipeline.training import TrainProgram
from tests.pipeline.authoring.authored_models import X, Y, compiled, small

ODD: tuple[Any, ...] = (
    None,
    "x",
    b"x",
    2.5,
    True,
    [1.5],
    {},
    torch.ones(2),
    numpy.ones(2),
    object(),
    int,
    "a\0b",
    "\ud800",
)

DOORS: dict[str, tuple[type | Callable[..., Any], dict[str, Any]]] = {
    "Linear": (Linear, {"in_features": 2, "out_features": 2, "bias": True, "dtype": "float32"}),
    "Conv2d": (Conv2d, {"in_channels": 2, "out_channels": 2, "kernel_size": 1, "stride": 1, "padding": 0, "groups": 1}),
    "LayerNorm": (LayerNorm, {"normalized_shape": 2, "eps": 1e-5, "bias": True}),
    "Parameter": (Parameter, {"data": torch.ones(2)}),
    "Adam": (Adam, {"lr": 0.1, "betas": (0.9, 0.99), "eps": 0.1, "amsgrad": False}),
    "FitLimits": (FitLimits, {"epochs": 1, "steps": 1, "until": 0.1}),
    "CrossEntropyLoss": (CrossEntropyLoss, {"label_smoothing": 0.0}),
    "TensorSpec": (TensorSpec, {"shape": (2, 3), "dtype": "float32"}),
    "graph": (lambda **asked: small().graph(**asked), {"training": False, "batch": 1}),
    "evaluate": (lambda **asked: compiled().evaluate(**asked), {"batches": [(X, Y)]}),
    "to_torch": (lambda **asked: small().to_torch(**asked), {"training": False}),
    "load_state_dict": (lambda state: small().load_state_dict({"0.weight": state, "0.bias": state}), {"state": None}),
    "sum": (lambda **asked: Model((2, 4), module=Whole(lambda x: functional.sum(x, **asked))).graph(), {"dim": 0}),
    "concat": (
        lambda tensors, dim: Model(
            (2, 4), module=Whole(lambda x: functional.concat([x] if tensors is None else tensors, dim))
        ).graph(),
        {"tensors": None, "dim": 0},
    ),
    "cast": (
        lambda **asked: Model((2, 4), module=Whole(lambda x: functional.cast(x, **asked))).graph(),
        {"dtype": "int64"},
    ),
}
"""What users call, with arguments that it takes."""


class Whole(Module):
    def __init__(self, operation: Callable[[IRTensor], IRTensor]) -> None:
        self._operation = operation

    def forward(self, x: IRTensor) -> IRTensor:
        return self._operation(x)


@pytest.mark.parametrize("name", DOORS)
def test_arguments_of_another_type_are_refused_in_one_sentence(name: str) -> None:
    call, right = DOORS[name]
    for argument in right:
        for odd in ODD:
            try:
                call(**(right | {argument: odd}))
            except OnnxlineError as error:
                assert "\n" not in str(error)
    with pytest.raises(UsageError):
        call(**(right | {next(iter(right)): object()}))


@pytest.mark.parametrize("made", [Capture, CompiledEntries, CompiledProgram, ExecutionPlan, TrainProgram])
@pytest.mark.parametrize("odd", [None, 5, "x", [torch.ones(1)], {}])
def test_what_other_calls_make_is_not_made_of_anything_else(made: Callable[..., object], odd: object) -> None:
    taken = [own for own in inspect.signature(made).parameters.values() if own.default is own.empty]
    named = {own.name: odd for own in taken if own.kind is own.KEYWORD_ONLY}
    with pytest.raises(UsageError, match="; expected ") as caught:
        made(*(odd for own in taken if own.kind is not own.KEYWORD_ONLY), **named)
    assert "\n" not in str(caught.value)
