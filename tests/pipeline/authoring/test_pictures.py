"""What layers emit, as IR text: at inference, in training, and with the loss after them."""

from __future__ import annotations

import inspect
import re
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
    MSELoss,
    Parameter,
    ReLU,
    functional,
)
from pipeline.errors import OnnxlineError, UsageError
from pipeline.ir import Graph, TensorSpec, from_text, to_text
from pipeline.planning import ExecutionPlan
from pipeline.runtime import Capture, CompiledEntries, CompiledProgram
from pipeline.training import TrainProgram
from tests.pipeline.authoring.authored_models import TWINS, X, Y, compiled, small


def picture(graph: Graph) -> str:
    """The text without kernels: that emitters pack attributes has tests of its own."""
    return re.sub(r' (node|kernel \d+) "[^"]*"( 0x\w*)?', "", to_text(graph))


def test_a_linear_layer_is_one_product() -> None:
    model = Model((8, 16), name="mlp").add(Linear(16, 32)).add(ReLU()).add(Linear(32, 10, bias=False))
    assert (
        picture(model.graph())
        == """\
graph "mlp" (%0 "input": float32[8, 16]) {
  param %1 "0.weight": float32[32, 16]
  param %2 "0.bias": float32[32]
  param %5 "2.weight": float32[10, 32]

  %3 "0.linear": float32[8, 32] = aten.linear.default(%0, %1, %2) {input: $0, weight: $1, bias: $2} @"0"
  %4 "1.relu": float32[8, 32] = aten.relu.default(%3) {self: $0} @"1"
  %6 "2.linear": float32[8, 10] = aten.linear.default(%4, %5) {input: $0, weight: $1} @"2"

  return %6
}
"""
    )


def test_text_is_multiplied_as_it_is() -> None:
    text = picture(Model((4, 7, 16), name="text").add(Linear(16, 3)).graph())
    assert (
        text
        == """\
graph "text" (%0 "input": float32[4, 7, 16]) {
  param %1 "0.weight": float32[3, 16]
  param %2 "0.bias": float32[3]

  %3 "0.linear": float32[4, 7, 3] = aten.linear.default(%0, %1, %2) {input: $0, weight: $1, bias: $2} @"0"

  return %3
}
"""
    )


class Rows(Module):
    def forward(self, x: IRTensor) -> IRTensor:
        first, second = x
        return first + second


def test_an_ir_tensor_gives_its_rows() -> None:
    assert (
        picture(Model((2, 4), name="rows").add(Rows()).graph())
        == """\
graph "rows" (%0 "input": float32[2, 4]) {
  %1 "0.unbind_0": float32[4], %2 "0.unbind_1": float32[4] = aten.unbind.int(%0) {self: $0} @"0"
  %3 "0.add": float32[4] = aten.add.Tensor(%1, %2) {self: $0, other: $1} @"0"

  return %3
}
"""
    )


class Residual(Module):
    def __init__(self, width: int) -> None:
        self.up = Linear(width, 2 * width, bias=False)
        self.down = Linear(2 * width, width, bias=False)

    def forward(self, x: IRTensor) -> IRTensor:
        return x + 0.5 * self.down(functional.gelu(self.up(x)))


def test_a_module_of_the_user_gives_its_path_to_what_it_emits() -> None:
    assert (
        picture(Model((2, 4), module=Residual(4), name="block").graph())
        == """\
graph "block" (%0 "input": float32[2, 4]) {
  param %1 "up.weight": float32[8, 4]
  param %4 "down.weight": float32[4, 8]

  %2 "up.linear": float32[2, 8] = aten.linear.default(%0, %1) {input: $0, weight: $1} @"up"
  %3 "gelu": float32[2, 8] = aten.gelu.default(%2) {self: $0}
  %5 "down.linear": float32[2, 4] = aten.linear.default(%3, %4) {input: $0, weight: $1} @"down"
  %6 "mul": float32[2, 4] = aten.mul.Tensor(%5) {self: $0, other: 0.5}
  %7 "add": float32[2, 4] = aten.add.Tensor(%0, %6) {self: $0, other: $1}

  return %7
}
"""
    )


NORM = "1._native_batch_norm_legit_functional"


def test_statistics_move_in_training_alone() -> None:
    twin = TWINS["cnn"]
    model = Model(twin.spec, module=twin.make(), name="cnn")
    assert "update" not in picture(model.graph())
    training = picture(model.graph(training=True))
    assert [line for line in training.splitlines() if '@"1"' in line or "update" in line or "state" in line] == [
        '  state %3 "1.num_batches_tracked": int64[]',
        '  state %5 "1.running_mean": float32[8]',
        '  state %7 "1.running_var": float32[8]',
        '  %4 "1.add": int64[] = aten.add.Tensor(%3) {self: $0, other: 1} @"1"',
        '  %6 "1.clone": float32[8] = aten.clone.default(%5) {self: $0} @"1"',
        '  %8 "1.clone_1": float32[8] = aten.clone.default(%7) {self: $0} @"1"',
        f'  %11 "{NORM}_0": float32[8, 8, 8, 8], %12 "{NORM}_1": float32[8], %13 "{NORM}_2": float32[8], '
        f'%14 "{NORM}_3": float32[8], %15 "{NORM}_4": float32[8] = '
        "aten._native_batch_norm_legit_functional.default(%2, %9, %10, %6, %8) "
        "{input: $0, weight: $1, bias: $2, running_mean: $3, running_var: $4, training: true, momentum: 0.1, "
        'eps: 1e-05} @"1"',
        "  update %3 = %4",
        "  update %5 = %14",
        "  update %7 = %15",
    ]


def test_a_loss_is_part_of_the_graph() -> None:
    model = Model((2, 3), name="loss").add(ReLU())
    assert (
        picture(model.step_graph(CrossEntropyLoss()))
        == """\
graph "loss" (%0 "input": float32[2, 3], %2 "target": int64[2]) {
  %1 "0.relu": float32[2, 3] = aten.relu.default(%0) {self: $0} @"0"
  %3 "loss.cross_entropy_loss": float32[] = aten.cross_entropy_loss.default(%1, %2) {self: $0, target: $1} @"loss"

  return %3
}
"""
    )
    assert picture(model.step_graph(MSELoss())).splitlines()[2:5] == [
        '  %3 "loss.sub": float32[2, 3] = aten.sub.Tensor(%1, %2) {self: $0, other: $1} @"loss"',
        '  %4 "loss.mul": float32[2, 3] = aten.mul.Tensor(%3, %3) {self: $0, other: $1} @"loss"',
        '  %5 "loss.mean": float32[] = aten.mean.dim(%4) {self: $0, dim: [0, 1]} @"loss"',
    ]


def test_the_text_of_an_authored_graph_is_read_back() -> None:
    twin = TWINS["cnn"]
    graph = Model(twin.spec, module=twin.make()).graph(training=True)
    assert to_text(from_text(to_text(graph))) == to_text(graph)


# What users of the room call, with arguments of other types: one sentence each, and nothing else.

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
