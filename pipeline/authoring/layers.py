"""The layers: modules with the names, arguments, state dicts and first numbers of those of `torch.nn`.

A parameter begins as `reset_parameters` of torch's layer has it (torch/nn/modules of 2.11): Linear and Conv2d uniform
by Kaiming with a = √5, their biases uniform between ±1/√fan_in, Embedding normal, norms at one and zero. Numbers are
drawn in torch's order from torch's generator, so `torch.manual_seed` gives those of the same layers of torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch.nn import init

from pipeline.authoring import functional
from pipeline.authoring.builder import FLOATS, IRTensor, Pair, check_dtype, typed
from pipeline.authoring.module import Module
from pipeline.authoring.storage import Buffer, Parameter
from pipeline.errors import UsageError
from pipeline.runtime.tensors import torch_dtype


@typed
class Linear(Module):
    def __init__(self, in_features: int, out_features: int, bias: bool = True, dtype: str = "float32") -> None:
        self._settings = (in_features, out_features)
        self.weight = Parameter(_empty("Linear", dtype, out_features, in_features))
        self.bias = Parameter(_empty("Linear", dtype, out_features)) if bias else None
        _draw_weight(self.weight, self.bias, in_features)

    def forward(self, x: IRTensor) -> IRTensor:
        return functional.linear(x, self.weight, self.bias)

    def describe(self) -> str:
        return _text(*self._settings, **({} if self.bias else {"bias": False}))


@typed
class Conv2d(Module):
    """A convolution over height and width, padded by zeros."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Pair,
        stride: Pair = 1,
        padding: Pair = 0,
        dilation: Pair = 1,
        groups: int = 1,
        bias: bool = True,
        dtype: str = "float32",
    ) -> None:
        if groups < 1 or in_channels % groups or out_channels % groups:
            raise UsageError(
                f"Conv2d: found groups={groups} for {in_channels} and {out_channels} channels, "
                "expected a divisor of both"
            )
        kernel = (kernel_size, kernel_size) if isinstance(kernel_size, int) else tuple(kernel_size)
        if len(kernel) != 2:
            raise UsageError(f"Conv2d: found kernel_size={kernel_size}, expected a whole number or a pair of them")
        self._settings = (in_channels, out_channels, kernel_size)
        self._stride, self._padding, self._dilation, self._groups = stride, padding, dilation, groups
        self.weight = Parameter(_empty("Conv2d", dtype, out_channels, in_channels // groups, *kernel))
        self.bias = Parameter(_empty("Conv2d", dtype, out_channels)) if bias else None
        _draw_weight(self.weight, self.bias, in_channels // groups * math.prod(kernel))

    def forward(self, x: IRTensor) -> IRTensor:
        settings = (self._stride, self._padding, self._dilation, self._groups)
        return functional.conv2d(x, self.weight, self.bias, *settings)

    def describe(self) -> str:
        further = {
            "stride": (self._stride, 1), "padding": (self._padding, 0), "dilation": (self._dilation, 1),
            "groups": (self._groups, 1), "bias": (self.bias is not None, True),
        }  # fmt: skip
        return _text(*self._settings, **{name: value for name, (value, usual) in further.items() if value != usual})


@typed
class Embedding(Module):
    """A table, of which whole numbers name the rows."""

    def __init__(self, num_embeddings: int, embedding_dim: int, dtype: str = "float32") -> None:
        self._settings = (num_embeddings, embedding_dim)
        self.weight = Parameter(init.normal_(_empty("Embedding", dtype, num_embeddings, embedding_dim)))

    def forward(self, ids: IRTensor) -> IRTensor:
        return functional.embedding(ids, self.weight)

    def describe(self) -> str:
        return _text(*self._settings)


@typed
class LayerNorm(Module):
    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        dtype: str = "float32",
    ) -> None:
        self._shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        if not self._shape:
            raise UsageError("LayerNorm: found normalized_shape=(), expected the size of one axis at least")
        self._eps = eps
        empty = _empty("LayerNorm", dtype, *self._shape)
        self.weight = Parameter(torch.ones_like(empty)) if elementwise_affine else None
        self.bias = Parameter(torch.zeros_like(empty)) if elementwise_affine and bias else None

    def forward(self, x: IRTensor) -> IRTensor:
        return functional.layer_norm(x, self._shape, self.weight, self.bias, self._eps)

    def describe(self) -> str:
        return _text(*self._shape)


@typed
class BatchNorm2d(Module):
    """Normalised for each channel: by the batch in training, which moves the running statistics, and by them else."""

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float = 0.1, dtype: str = "float32") -> None:
        self._features, self._eps, self._momentum = num_features, eps, momentum
        empty = _empty("BatchNorm2d", dtype, num_features)
        self.weight = Parameter(torch.ones_like(empty))
        self.bias = Parameter(torch.zeros_like(empty))
        self.running_mean = Buffer(torch.zeros_like(empty))
        self.running_var = Buffer(torch.ones_like(empty))
        self.num_batches_tracked = Buffer(torch.tensor(0))

    def forward(self, x: IRTensor) -> IRTensor:
        if x.rank != 4:
            raise x.builder.refusal(
                f"found {x.dtype}{list(x.shape)}, expected [batch, {self._features}, height, width]"
            )
        statistics = (self.running_mean, self.running_var)
        result = functional.batch_norm(x, *statistics, self.weight, self.bias, self._momentum, self._eps)
        if x.builder.training:
            count = x.builder.read(self.num_batches_tracked)
            x.builder.update_stored(self.num_batches_tracked, count + 1)
        return result

    def describe(self) -> str:
        return _text(self._features)


@typed
class MaxPool2d(Module):
    def __init__(self, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0) -> None:
        self._kernel, self._stride, self._padding = kernel_size, stride, padding

    def forward(self, x: IRTensor) -> IRTensor:
        return functional.max_pool2d(x, self._kernel, self._stride, self._padding)

    def describe(self) -> str:
        return _text(self._kernel)


@typed
class Dropout(Module):
    """In training each element is zero with the probability `p`; at inference nothing happens."""

    def __init__(self, p: float = 0.5) -> None:
        if not 0 <= p < 1:
            raise UsageError(f"Dropout: found p={p!r}, expected 0 ≤ p < 1")
        self._p = p

    def forward(self, x: IRTensor) -> IRTensor:
        return functional.dropout(x, self._p)

    def describe(self) -> str:
        return _text(self._p)


@typed
class Flatten(Module):
    def __init__(self, start_dim: int = 1, end_dim: int = -1) -> None:
        self._dims = (start_dim, end_dim)

    def forward(self, x: IRTensor) -> IRTensor:
        return functional.flatten(x, *self._dims)


@typed
class Softmax(Module):
    def __init__(self, dim: int = -1) -> None:
        self._dim = dim

    def forward(self, x: IRTensor) -> IRTensor:
        return functional.softmax(x, self._dim)

    def describe(self) -> str:
        return _text(self._dim)


@typed
class LogSoftmax(Module):
    def __init__(self, dim: int = -1) -> None:
        self._dim = dim

    def forward(self, x: IRTensor) -> IRTensor:
        return functional.log_softmax(x, self._dim)

    def describe(self) -> str:
        return _text(self._dim)


@typed
class GELU(Module):
    def __init__(self, approximate: str = "none") -> None:
        self._approximate = approximate

    def forward(self, x: IRTensor) -> IRTensor:
        return functional.gelu(x, self._approximate)


class _Activation(Module):
    """A module that is one operation of its input."""

    operation: Callable[[IRTensor], IRTensor]

    def forward(self, x: IRTensor) -> IRTensor:
        return type(self).operation(x)


class ReLU(_Activation):
    operation = functional.relu


class Tanh(_Activation):
    operation = functional.tanh


class Sigmoid(_Activation):
    operation = functional.sigmoid


class SiLU(_Activation):
    operation = functional.silu


def _empty(layer: str, dtype: str, *shape: int) -> torch.Tensor:
    check_dtype(dtype, FLOATS, layer)
    wrong = [size for size in shape if size < 1]
    if wrong:
        raise UsageError(f"{layer}: found the size {wrong[0]!r}, expected a whole number above zero")
    return torch.empty(shape, dtype=torch_dtype(dtype))


def _draw_weight(weight: Parameter, bias: Parameter | None, fan_in: int) -> None:
    init.kaiming_uniform_(weight.data, a=math.sqrt(5))
    if bias is not None:
        init.uniform_(bias.data, -1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in))


def _text(*settings: object, **named: object) -> str:
    return ", ".join([*map(str, settings), *(f"{name}={value}" for name, value in named.items())])
