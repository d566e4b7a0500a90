"""Operations for the `forward` of a module: on IR tensors each adds ops to the graph, on torch's tensors it computes.

They have the names and the arguments of `torch.nn.functional`, as far as they go, and torch's functions and methods
work as well. `FUNCTIONS` is the table of all.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import torch
from torch.nn import functional as torch_functional

from pipeline.authoring.tensors import IRTensor, Operand, Tensor, typed
from pipeline.errors import UsageError
from pipeline.ir import TensorSpec
from pipeline.runtime.tensors import torch_dtype

__all__ = [
    "FUNCTIONS", "absolute", "add", "amax", "batch_norm", "cast", "concat", "conv2d", "cross_entropy", "div", "dropout",
    "embedding", "exp", "flatten", "gelu", "layer_norm", "linear", "log", "log_softmax", "matmul", "max_pool2d", "mean",
    "mse_loss", "mul", "narrow", "permute", "relu", "reshape", "sigmoid", "silu", "softmax", "sqrt", "sub", "sum",
    "tanh", "transpose",
]  # fmt: skip


Operation: TypeAlias = Callable[..., Any]
"""A function of IR tensors or of tensors of torch, which gives one of the same sort."""


def _binary(compute: Callable[[Any, Any], Any]) -> Callable[[Operand, Operand], Any]:
    @typed
    def operation(left: Operand, right: Operand) -> Any:
        if not isinstance(left, IRTensor | torch.Tensor) and not isinstance(right, IRTensor | torch.Tensor):
            found = f"{type(left).__name__}, {type(right).__name__}"
            raise UsageError(f"found {found}, expected an IR tensor among them: what a Module's forward is called with")
        return compute(left, right)

    return operation


add, sub, mul, div = map(_binary, (operator.add, operator.sub, operator.mul, operator.truediv))
absolute: Operation = torch.abs
conv2d: Operation = torch_functional.conv2d
embedding: Operation = torch_functional.embedding
exp: Operation = torch.exp
flatten: Operation = torch.flatten
layer_norm: Operation = torch_functional.layer_norm
linear: Operation = torch_functional.linear
log: Operation = torch.log
matmul: Operation = torch.matmul
max_pool2d: Operation = torch_functional.max_pool2d
mse_loss: Operation = torch_functional.mse_loss
narrow: Operation = torch.narrow
permute: Operation = torch.permute
relu: Operation = torch_functional.relu
reshape: Operation = torch.reshape
sigmoid: Operation = torch.sigmoid
silu: Operation = torch_functional.silu
sqrt: Operation = torch.sqrt
tanh: Operation = torch.tanh
transpose: Operation = torch.transpose


@typed
def gelu(x: Tensor, approximate: str = "none") -> Any:
    return torch_functional.gelu(x, approximate=approximate)  # type: ignore[arg-type]


@typed
def cast(x: Tensor, dtype: str) -> Any:
    """`x` as `dtype`, such as "int64"."""
    try:
        TensorSpec((), dtype)
    except ValueError as error:
        raise _refusal(x, f"cast found {error}") from None
    return x.to(torch_dtype(dtype))


@typed
def softmax(x: Tensor, dim: int = -1) -> Any:
    return torch.softmax(x, dim)  # type: ignore[arg-type]


@typed
def log_softmax(x: Tensor, dim: int = -1) -> Any:
    return torch.log_softmax(x, dim)  # type: ignore[arg-type]


def _reduction(reduce: Callable[..., Any]) -> Callable[..., Any]:
    @typed
    def operation(x: Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Any:
        axes = tuple(range(len(x.shape))) if dim is None else (dim,) if isinstance(dim, int) else tuple(dim)
        return reduce(x, axes, keepdim) if axes else x

    return operation


sum, mean, amax = map(_reduction, (torch.sum, torch.mean, torch.amax))


@typed
def concat(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    return torch.cat(tensors, dim)  # type: ignore[arg-type]


@typed
def batch_norm(
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor,
    bias: Tensor,
    momentum: float = 0.1,
    eps: float = 1e-5,
    training: bool | None = None,
) -> Any:
    """Normalised by the running statistics; in training by those of the batch, which then move the running ones.

    Args:
        training: by default the mode of the graph; for a tensor of torch, False.
    """
    mode = isinstance(x, IRTensor) if training is None else training
    return torch_functional.batch_norm(x, mean, variance, weight, bias, mode, momentum, eps)  # type: ignore[arg-type]


@typed
def dropout(x: Tensor, p: float = 0.5, training: bool = True) -> Any:
    """In training a share `p` of the elements is zero, and the others are scaled up; at inference `x` as it is."""
    return torch_functional.dropout(x, p, training)  # type: ignore[arg-type]


@typed
def cross_entropy(output: Tensor, target: Tensor, label_smoothing: float = 0.0) -> Any:
    """The mean loss of logits [batch, classes, ...] for classes [batch, ...], int64 or int32."""
    return torch_functional.cross_entropy(output, target, label_smoothing=label_smoothing)  # type: ignore[arg-type]


def _refusal(x: Tensor, problem: str) -> UsageError:
    return x.builder.refusal(problem) if isinstance(x, IRTensor) else UsageError(problem)


FUNCTIONS: Final[Mapping[str, Callable[..., Any]]] = {name: globals()[name] for name in __all__ if name != "FUNCTIONS"}
"""Every operation by its name."""
