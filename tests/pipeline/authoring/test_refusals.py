"""One sentence for each mistake: the layer, what was found, and what was expected."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pipeline.authoring import (
    SGD,
    Adam,
    BatchNorm2d,
    Buffer,
    Conv2d,
    CrossEntropyLoss,
    Dropout,
    Embedding,
    FitLimits,
    IRTensor,
    LayerNorm,
    Linear,
    MaxPool2d,
    Model,
    Module,
    MSELoss,
    Parameter,
    ReLU,
    Softmax,
    functional,
)
from pipeline.errors import UsageError
from pipeline.ir import TensorSpec
from tests.pipeline.authoring.authored_models import X, Y, compiled, small


def compile_with_a_scheduler(model: Model) -> None:
    optimizer = torch.optim.SGD(model.module.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model.compile(optimizer, MSELoss())


class Misplaced(Module):
    """Its parameter is in a dict, where nobody looks for it."""

    def __init__(self) -> None:
        self.held = {"weight": Parameter(torch.ones(4))}

    def forward(self, x: IRTensor) -> IRTensor:
        return x * self.held["weight"]  # type: ignore[operator]


class Forward(Module):
    """A module whose forward is `compute`."""

    def __init__(self, compute: Callable[[IRTensor], Any]) -> None:
        self.compute = compute

    def forward(self, x: IRTensor) -> IRTensor:
        return self.compute(x)


class InPlace(Module):
    def forward(self, x: IRTensor) -> IRTensor:
        return x.mul_(2)


class Added(Module):
    def forward(self, x: IRTensor) -> IRTensor:
        same = x
        x += 1
        return same + x


class Filled(Module):
    def forward(self, x: IRTensor) -> IRTensor:
        x[0] = 1
        return x


class Counter(Module):
    def __init__(self) -> None:
        self.count = Buffer(torch.zeros(1))

    def forward(self, x: IRTensor) -> IRTensor:
        self.count += 1
        return x


class Empty(Module):
    pass


MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "features": (
        lambda: Model((8, 16)).add(Linear(16, 32)).add(ReLU()).add(Linear(30, 10)),
        "layer '2', Linear(30, 10): found float32[8, 32], expected [..., 30]",
    ),
    "channels": (
        lambda: Model((8, 1, 4, 4)).add(Conv2d(3, 4, 3)),
        "layer '0', Conv2d(3, 4, 3): found float32[8, 1, 4, 4], expected [batch, 3, height, width]",
    ),
    "a kernel that is too large": (
        lambda: Model((8, 1, 4, 4)).add(Conv2d(1, 4, 5)),
        "layer '0', Conv2d(1, 4, 5): conv2d found float32[8, 1, 4, 4] and float32[4, 1, 5, 5] and float32[4]: "
        "Calculated padded input size per channel: (4 x 4). Kernel size: (5 x 5). Kernel size can't be greater than "
        "actual input size",
    ),
    "a norm of another size": (
        lambda: Model((8, 16)).add(LayerNorm(15)),
        "layer '0', LayerNorm(15): layer_norm found float32[8, 16] and float32[15] and float32[15]: Given "
        "normalized_shape=[15], expected input with shape [15], but got input of size torch.Size([8, 16])",
    ),
    "a norm of images": (
        lambda: Model((8, 16)).add(BatchNorm2d(16)),
        "layer '0', BatchNorm2d(16): found float32[8, 16], expected [batch, 16, height, width]",
    ),
    "floats as rows of a table": (
        lambda: Model((8, 16)).add(Embedding(4, 2)),
        "layer '0', Embedding(4, 2): found float32[8, 16], expected the dtype int64 or int32",
    ),
    "a dtype between layers": (
        lambda: Model((8, 16)).add(Linear(16, 4, dtype="float64")),
        "layer '0', Linear(16, 4, dtype=float64): found float32[8, 16], expected the dtype float64",
    ),
    "a dtype that is not handled": (
        lambda: Linear(16, 4, dtype="float16"),
        "Linear has the dtype float16, which is not handled; expected one of float32, float64",
    ),
    "an input of such a dtype": (
        lambda: Model(TensorSpec((8, 16), "complex64")).add(ReLU()),
        "input 'input' has the dtype complex64, which is not handled; expected one of float32, float64, int64, int32, "
        "bool",
    ),
    "pads of a pool": (
        lambda: Model((8, 1, 4, 4)).add(MaxPool2d(2, padding=2)),
        "layer '0', MaxPool2d(2, padding=2): max_pool2d found float32[8, 1, 4, 4]: pad should be at most half of "
        "effective kernel size, but got pad=2, kernel_size=2 and dilation=1",
    ),
    "padding by name": (
        lambda: Conv2d(1, 4, 3, padding="small"),
        "Conv2d: found padding='small', expected an integer of 0 or more, or a pair of them",
    ),
    "groups": (lambda: Conv2d(3, 4, 3, groups=2), "Conv2d(3, 4, 3, groups=2): in_channels must be divisible by groups"),
    "no group": (lambda: Conv2d(3, 4, 3, groups=0), "Conv2d: found groups=0, expected an integer above zero"),
    "a kernel of three sizes": (
        lambda: Conv2d(1, 4, (1, 2, 3)),
        "Conv2d: found kernel_size=(1, 2, 3), expected an integer of 1 or more, or a pair of them",
    ),
    **{
        f"{name} {value}": (
            lambda name=name, value=value: Model((8, 1, 4, 4)).add(Conv2d(1, 4, 3, **{name: value})),
            f"Conv2d: found {name}={value}, expected an integer of {least} or more, or a pair of them",
        )
        for name, value, least in (("stride", 0, 1), ("dilation", (1, 0), 1), ("padding", -1, 0), ("stride", (1,), 1))
    },
    "a pool of nothing": (
        lambda: Model((8, 1, 4, 4)).add(MaxPool2d(0)),
        "MaxPool2d: found kernel_size=0, expected an integer of 1 or more, or a pair of them",
    ),
    "a pool that stays": (
        lambda: Model((8, 1, 4, 4)).add(MaxPool2d(2, 0)),
        "MaxPool2d: found stride=0, expected an integer of 1 or more, or a pair of them",
    ),
    "a norm of no axis": (
        lambda: LayerNorm(()),
        "LayerNorm: found normalized_shape=(), expected the size of one axis at least",
    ),
    "an epsilon": (
        lambda: Model((8, 16)).add(LayerNorm(16, eps=-1.0)),
        "LayerNorm: found eps=-1.0, expected a number that is not below zero",
    ),
    "an epsilon that is none": (
        lambda: Model((8, 16)).add(LayerNorm(16, eps=math.nan)),
        "LayerNorm: found eps=nan, expected a number that is not below zero",
    ),
    "a momentum": (
        lambda: Model((8, 2, 4, 4)).add(BatchNorm2d(2, momentum=None)),
        "BatchNorm2d: found momentum=None, expected a number from 0 to 1",
    ),
    "an axis by name": (lambda: Model((8, 16)).add(Softmax("x")), "Softmax: found dim='x', expected an integer"),
    "a share by name": (lambda: Dropout("x"), "Dropout: found p='x', expected 0 ≤ p < 1"),
    "a list of numbers": (
        lambda: Model((8, 16)).add(Linear(16, 4)).predict([[1.0] * 16]),  # type: ignore[arg-type]
        "'input' is a list, expected a tensor",
    ),
    "a size": (lambda: Linear(0, 4), "Linear: found in_features=0, expected an integer above zero"),
    "a share": (lambda: Dropout(1.0), "Dropout: found p=1.0, expected 0 ≤ p < 1"),
    "a layer of torch": (
        lambda: Model((8, 16)).add(nn.Linear(15, 4)),
        "layer '0', Linear(in_features=15, out_features=4, bias=True): found float32[8, 16], expected [..., 15]",
    ),
    "a layer of torch that asks for numbers": (
        lambda: Model((8, 2)).add(nn.BatchNorm1d(2, momentum=None)).graph(training=True),
        "layer '0', BatchNorm1d(2, eps=1e-05, momentum=None, affine=True, bias=True, track_running_stats=True): an IR "
        "tensor has no elements, so Python cannot decide by it; expected a decision by shapes or settings",
    ),
    "no such argument": (
        lambda: Linear(16, 4, device="cpu"),
        "Linear: got an unexpected keyword argument 'device'; expected Linear(in_features, out_features, bias=True, "
        "dtype=None)",
    ),
    "a class": (
        lambda: Model((8, 16)).add(ReLU),  # type: ignore[arg-type]
        "found the class ReLU, which is not called, expected a layer such as Linear(64, 10), or another module",
    ),
    "no input": (Model, "Model: found no input, expected the shape of one at least: Model((64, 784))"),
    "no shape": (lambda: Model(16), "Model: found the input 16, expected sizes above zero, that of the batch first"),  # type: ignore[arg-type]
    "compile before add": (
        lambda: Model((8, 16)).compile(Adam(), MSELoss()),
        "the model has no layer; expected add(layer) before it is used",
    ),
    "fit before compile": (
        lambda: small().fit([]),
        "fit: the model is not compiled; call compile(optimizer, loss) before",
    ),
    "evaluate before compile": (
        lambda: small().evaluate([]),
        "evaluate: the model is not compiled; call compile(optimizer, loss) before",
    ),
    "add after compile": (
        lambda: compiled().add(ReLU()),
        "add: the model is compiled; expected all layers before compile()",
    ),
    "a loss of many numbers": (
        lambda: small().compile(Adam(), lambda output, target: output - target),
        "the loss is float32[8, 4], expected a single floating-point number: take its mean or its sum",
    ),
    "a loss by name": (
        lambda: small().compile(Adam(), "mse"),  # type: ignore[arg-type]
        "found 'mse' as loss, expected MSELoss(), CrossEntropyLoss(), another module, or a function of output "
        "and target",
    ),
    "an optimizer by name": (
        lambda: small().compile("adam", MSELoss()),  # type: ignore[arg-type]
        "compile: found 'adam' as optimizer, expected SGD(), Adam() or AdamW()",
    ),
    "an optimizer of other parameters": (
        lambda: small().compile(torch.optim.SGD(nn.Linear(2, 3).parameters()), MSELoss()),
        "the optimizer has a parameter of shape [3, 2] that the model has not; make its groups of the "
        "parameters of the model's layers",
    ),
    "an optimizer with a scheduler": (
        lambda: compile_with_a_scheduler(small()),
        "the optimizer has a scheduler, which does not see the train step; give it as schedule=",
    ),
    "a setting of an optimizer": (
        lambda: small().compile(SGD(lr=-1), MSELoss()),
        "SGD(lr=-1, momentum=0.0, weight_decay=0.0, nesterov=False): Invalid learning rate: -1",
    ),
    "classes of another shape": (
        lambda: small().compile(Adam(), CrossEntropyLoss(), target=TensorSpec((8, 4), "int64")),
        "layer 'loss', CrossEntropyLoss(): found int64[8, 4], expected [8] as classes of the logits [8, 4]",
    ),
    "a parameter in a dict": (
        lambda: Model((2, 4), module=Misplaced()).graph(),
        "Misplaced(): a parameter or buffer of shape [4] is read that no module of the model holds; expected it as an "
        "attribute of a Module, or in a list that is one",
    ),
    "a decision by numbers": (
        lambda: Model((2, 4), module=Forward(lambda x: x if x else -x)).graph(),
        "Forward(): an IR tensor has no elements, so Python cannot decide by it; expected a decision by shapes or "
        "settings",
    ),
    "elements printed": (
        lambda: Model((2, 4), module=Forward(lambda x: f"{x:.2f}")).graph(),
        "Forward(): forward writes an IR tensor as '.2f', and it has no elements; expected no format: dtype and shape",
    ),
    "a copy": (
        lambda: Model((2, 4), module=Forward(copy.deepcopy)).graph(),
        "Forward(): forward copies or pickles an IR tensor; expected its clone(), or the tensor itself",
    ),
    "a shape returned": (
        lambda: Model((2, 4), module=Forward(lambda x: functional.relu(x).shape)).graph(),  # type: ignore[arg-type]
        "Forward(): forward returned Size, expected an IR tensor, or a tuple of IR tensors",
    ),
    "no forward": (
        lambda: Model((2, 4), module=Empty()).graph(),
        "Empty has no forward; expected one that takes and returns IR tensors",
    ),
    "no tensor": (
        lambda: functional.add(1, 2),
        "found int, int, expected an IR tensor among them: what a Module's forward is called with",
    ),
    "a batch of one tensor": (
        lambda: compiled().fit([[torch.ones(8, 16)]]),
        "found a batch of 1 tensors, expected (input, target)",
    ),
    "a batch of another size": (
        lambda: compiled().fit([(torch.ones(3, 16), torch.ones(8, 4))], quiet=True),
        "'input' of the batch is float32[3, 16]; expected float32[8, 16], as in the example batch: all batches have "
        "the same shapes and dtypes (drop_last=True of a DataLoader leaves out the last, smaller one)",
    ),
    "no batch": (lambda: compiled().fit([], quiet=True), "fit: epoch 1 has no batch; expected one at least"),
    "an iterator for two epochs": (
        lambda: compiled().fit(iter([]), epochs=2),
        "fit: found an iterator, which gives its batches once, for 2 epochs; expected a list, a DataLoader, or a "
        "function from the number of an epoch to its batches",
    ),
    "a write": (
        lambda: Model((8, 16)).add(InPlace()),
        "layer '0', InPlace(): forward writes to a tensor in place; expected an operation that gives a new one",
    ),
    "a write by an operator of Python": (
        lambda: Model((8, 16)).add(Added()),
        "layer '0', Added(): forward writes to a tensor in place; expected an operation that gives a new one",
    ),
    "a write to elements": (
        lambda: Model((8, 16)).add(Filled()),
        "layer '0', Filled(): forward writes to elements of a tensor; expected torch.where, torch.slice_scatter or "
        "torch.index_put, which give a new tensor",
    ),
    "a loss of three tensors": (
        lambda: small().compile(Adam(), nn.CosineEmbeddingLoss()),
        "the loss CosineEmbeddingLoss takes input1, input2, target, and a loss gets the output and the target of a "
        "batch; expected a function of these two, such as `lambda output, target: loss(…)`",
    ),
    "a write at inference": (
        lambda: Model((8, 16)).add(Counter()),
        "layer '0', Counter(): forward writes to a buffer at inference; expected `if self.training:` before the write",
    ),
    "saving after no step": (
        lambda: compiled().fit([(X, Y)], path="x", save_every=0),
        "fit: found save_every=0, expected an integer above zero",
    ),
    "saving nowhere": (
        lambda: compiled().fit([(X, Y)], save_every=2),
        "fit: found save_every without a path; expected path= with a file for the states",
    ),
    "going on from nowhere": (
        lambda: compiled().fit([(X, Y)], resume=True),
        "fit: found resume without a path; expected path= with a file for the states",
    ),
    "a folder for the states": (
        lambda: compiled().fit([(X, Y)], path="tests"),
        "tests is a folder; expected the path of a file in it",
    ),
    "a folder that is missing": (
        lambda: compiled().fit([(X, Y)], path="nowhere/x"),
        "nowhere is no folder; make it before saving to x",
    ),
    "no epoch": (lambda: FitLimits(epochs=0), "fit: found epochs=0, expected an integer above zero"),
    "a sample of another shape": (
        lambda: small().predict(torch.ones(3, 15)),
        "'input' is float32[3, 15], expected float32[batch, 16]",
    ),
    "two tensors for one input": (
        lambda: small().predict(torch.ones(3, 16), torch.ones(3, 16)),
        "predict: found 2 tensors, expected 1 (input)",
    ),
    "a name of a state dict": (
        lambda: small().load_state_dict({"weight": torch.ones(4, 16)}),
        "load_state_dict: the state dict lacks '0.weight'; did you mean 'weight'?",
    ),
    "a shape of a state dict": (
        lambda: small().load_state_dict({"0.weight": torch.ones(4, 15), "0.bias": torch.ones(4)}),
        "load_state_dict: '0.weight' is float32[4, 15], expected float32[4, 16]",
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_mistake_is_one_sentence(name: str) -> None:
    make, message = MODELS[name]
    with pytest.raises(UsageError) as raised:
        make()
    assert str(raised.value) == message


def test_what_was_refused_is_not_added() -> None:
    model = small()
    with pytest.raises(UsageError):
        model.add(Linear(5, 5))
    assert model.add(ReLU()).predict(torch.ones(1, 16)).shape == (1, 4)


OPERATIONS: dict[str, tuple[Callable[[IRTensor], object], str]] = {
    "shapes": (
        lambda x: x + functional.reshape(x, (3, 2)),
        "add found float32[2, 3] and float32[3, 2]: Attempting to broadcast a dimension of length 2 at -1! Mismatching "
        "argument at index 1 had torch.Size([3, 2]); but expected shape should be broadcastable to [2, 3]",
    ),
    "dtypes": (
        lambda x: x + functional.cast(x, "float64"),
        "add found float32 and float64, expected one dtype: cast() one of them",
    ),
    "a fraction": (
        lambda x: functional.cast(x, "int64") * 0.5,
        "found the number 0.5 with int64, expected a whole one: cast() the tensor",
    ),
    "infinity": (lambda x: x * float("inf"), "found inf, expected an IR tensor, a parameter or a finite number"),
    "matmul": (
        lambda x: functional.matmul(x, x),
        "matmul found float32[2, 3] and float32[2, 3]: a and b must have same reduction dim, but got [2, 3] X [2, 3].",
    ),
    "reshape": (
        lambda x: functional.reshape(x, (4, -1)),
        "reshape found float32[2, 3]: shape '[4, -1]' is invalid for input of size 6",
    ),
    "an axis": (lambda x: functional.softmax(x, 2), "found axis 2 of float32[2, 3], expected -2 to 1"),
    "permute": (
        lambda x: functional.permute(x, (0, 0)),
        "permute found float32[2, 3]: Received an invalid permutation, [0, 0]!",
    ),
    "flatten": (
        lambda x: functional.flatten(x, 1, 0),
        "flatten found float32[2, 3]: flatten() has invalid args: start_dim cannot come after end_dim",
    ),
    "concat": (
        lambda x: functional.concat([x, functional.reshape(x, (3, 2))]),
        "cat found float32[2, 3] and float32[3, 2]: Sizes of tensors must match except in dimension 0. Expected 3 in "
        "dimension 1 but got 2 for tensor number 1 in the list",
    ),
    "narrow": (
        lambda x: functional.narrow(x, 1, 2, 2),
        "narrow found float32[2, 3]: start (2) + length (2) exceeds dimension size (3).",
    ),
    "gelu": (
        lambda x: functional.gelu(x, "fast"),
        "gelu found float32[2, 3]: approximate argument must be either none or tanh.",
    ),
    "logits": (
        lambda x: functional.cross_entropy(functional.sum(x, 0), x),
        "cross_entropy found logits float32[3], expected [batch, classes, ...]",
    ),
    "batch_norm in training": (
        lambda x: functional.batch_norm(
            functional.reshape(x, (1, 6)), Buffer(torch.ones(6)), Buffer(torch.ones(6)), x, x
        ),
        "a parameter or buffer of shape [6] is read that no module of the model holds; expected it as an attribute of "
        "a Module, or in a list that is one",
    ),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_says_what_it_found(name: str) -> None:
    use, message = OPERATIONS[name]

    class Operation(Module):
        def forward(self, x: IRTensor) -> IRTensor:
            return use(x)  # type: ignore[return-value]

    with pytest.raises(UsageError) as raised:
        Model((2, 3), module=Operation()).graph()
    assert str(raised.value) == f"Operation(): {message}"
