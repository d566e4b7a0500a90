"""What a `forward` is written with: operations on IR tensors, each of which adds ops to the graph, or on torch's.

They have the names and the arguments of `torch.nn.functional`, as far as they go, and torch's functions and methods
work as well. `FUNCTIONS` is the table of all. `FORMS` has torch's functions that IR tensors take in another way than
by the operators that torch calls: those whose operands are checked first, and those that depend on the mode.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

import torch
from torch.nn import functional as torch_functional

from pipeline.authoring.builder import (
    FLOATS,
    IRTensor,
    ModelBuilder,
    Operand,
    Tensor,
    is_finite_number,
    name_of,
    text_of,
    typed,
)
from pipeline.errors import UsageError
from pipeline.ir import Attr, TensorSpec
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


def _emit_elementwise(compute: Callable[..., Any], builder: ModelBuilder, *operands: Any, **named: Any) -> Any:
    """Two tensors of one dtype, or a tensor and a number of its dtype: the graph converts no operand unasked."""
    dtypes = {_spec(operand).dtype for operand in operands if isinstance(operand, IRTensor | torch.Tensor)}
    if len(dtypes) > 1:
        found = " and ".join(_spec(operand).dtype for operand in operands)
        raise builder.refusal(f"{name_of(compute)} found {found}, expected one dtype: cast() one of them")
    for operand in operands:
        if isinstance(operand, IRTensor | torch.Tensor):
            continue
        if not is_finite_number(operand):
            raise builder.refusal(f"found {operand!r}, expected an IR tensor, a parameter or a finite number")
        if isinstance(operand, float) and dtypes.isdisjoint(FLOATS):
            raise builder.refusal(
                f"found the number {operand} with {dtypes.pop()}, expected a whole one: cast() the tensor"
            )
    return builder.call(compute, operands, named)


def _emit_linear(builder: ModelBuilder, x: IRTensor, weight: Tensor, *rest: Any, **named: Any) -> Any:
    return _emit_product(torch_functional.linear, builder, (x, weight, *rest), named, -1, f"[..., {weight.shape[1]}]")


def _emit_conv2d(builder: ModelBuilder, x: IRTensor, weight: Tensor, *rest: Any, **named: Any) -> Any:
    groups = named.get("groups", rest[4] if len(rest) > 4 else 1)
    channels = weight.shape[1] * groups
    if x.rank != 4:
        raise builder.refusal(f"found {text_of(x)}, expected [batch, {channels}, height, width]")
    expected = f"[batch, {channels}, height, width]"
    return _emit_product(torch.conv2d, builder, (x, weight, *rest), named, 1, expected, groups)


def _emit_product(
    compute: Callable[..., Any],
    builder: ModelBuilder,
    operands: Sequence[Any],
    named: Mapping[str, Any],
    axis: int,
    expected: str,
    groups: int = 1,
) -> Any:
    """A product of x, along an axis, with a weight [out, in, ...], of one dtype."""
    x, weight = (_spec(operand) for operand in operands[:2])
    if not x.rank or x.shape[axis] != int(weight.sizes[1]) * groups:
        raise builder.refusal(f"found {text_of(operands[0])}, expected {expected}")
    if x.dtype != weight.dtype:
        raise builder.refusal(f"found {text_of(operands[0])}, expected the dtype {weight.dtype}")
    return builder.call(compute, operands, named)


def _emit_embedding(builder: ModelBuilder, ids: IRTensor, *rest: Any, **named: Any) -> Any:
    if ids.dtype not in ("int64", "int32"):
        raise builder.refusal(f"found {text_of(ids)}, expected the dtype int64 or int32")
    return builder.call(torch_functional.embedding, (ids, *rest), named)


def _emit_cross_entropy(builder: ModelBuilder, output: IRTensor, target: IRTensor, *rest: Any, **named: Any) -> Any:
    if output.rank < 2:
        raise builder.refusal(f"cross_entropy found logits {text_of(output)}, expected [batch, classes, ...]")
    sizes = (output.shape[0], *output.shape[2:])
    if target.dtype not in FLOATS and tuple(target.shape) != sizes:
        raise builder.refusal(
            f"found {text_of(target)}, expected {list(sizes)} as classes of the logits {list(output.shape)}"
        )
    target = target.long() if target.dtype == "int32" else target
    return builder.call(torch_functional.cross_entropy, (output, target, *rest), named)


def _emit_mse_loss(builder: ModelBuilder, output: IRTensor, target: IRTensor, *rest: Any, **named: Any) -> Any:
    if target.spec != output.spec:
        raise builder.refusal(f"found {text_of(target)}, expected {text_of(output)} as the output")
    if rest or named.get("weight") is not None or named.get("reduction", "mean") != "mean":
        return builder.call(torch_functional.mse_loss, (output, target, *rest), named)
    difference = output - target
    return mean(difference * difference)


def _emit_batch_norm(
    builder: ModelBuilder,
    x: IRTensor,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    operands = (x, running_mean, running_var, weight, bias)
    if not (training and builder.training) or running_mean is None:
        return builder.call(torch_functional.batch_norm, (*operands, training and builder.training, momentum, eps), {})
    if x.spec.numel == x.shape[1]:
        raise builder.refusal(f"found {text_of(x)} in training, expected more than one number for each channel")
    # Copies, since torch refuses to differentiate through statistics that are written to before the backward pass.
    before = [running.clone() for running in (running_mean, running_var)]
    call = torch.ops.aten._native_batch_norm_legit_functional.default
    result, _, _, *after = builder.call(call, (x, weight, bias, *before, True, momentum, eps), {})
    for running, value in zip((running_mean, running_var), after, strict=True):
        running.copy_(value)
    return result


def _emit_dropout(
    builder: ModelBuilder, x: IRTensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Any:
    if not 0 <= p < 1:
        raise builder.refusal(f"dropout found p={p!r}, expected 0 ≤ p < 1")
    if not (training and builder.training) or not p:
        return x
    if x.dtype not in FLOATS:
        raise builder.refusal(f"found {text_of(x)}, expected the dtype {' or '.join(FLOATS)}")
    attrs: dict[str, Attr] = {"ratio": float(p), "seed": 0}
    outputs = {"dropout": x.spec, "kept": TensorSpec(x.spec.shape, "bool")}
    return builder.emit_several("onnxline.dropout.default", [x], outputs, attrs)[0]


def _spec(operand: Any) -> TensorSpec:
    if isinstance(operand, IRTensor):
        return operand.spec
    return TensorSpec(tuple(operand.shape), str(operand.dtype).removeprefix("torch."))


FORMS: Final[Mapping[Any, Callable[..., Any]]] = {
    **{
        compute: partial(_emit_elementwise, compute)
        for name in ("add", "sub", "mul", "div", "true_divide", "__radd__", "__rsub__", "__rmul__", "__rtruediv__")
        for compute in (getattr(torch.Tensor, name), getattr(torch, name, None))
        if compute is not None
    },
    **{
        getattr(torch.Tensor, f"__{name}__"): partial(_emit_elementwise, getattr(torch.Tensor, f"__{name}__"))
        for name in ("add", "sub", "mul", "truediv")
    },
    torch_functional.linear: _emit_linear,
    torch.conv2d: _emit_conv2d,
    torch_functional.embedding: _emit_embedding,
    torch_functional.cross_entropy: _emit_cross_entropy,
    torch_functional.mse_loss: _emit_mse_loss,
    torch_functional.batch_norm: _emit_batch_norm,
    torch_functional.dropout: _emit_dropout,
}
"""torch's function → its form on IR tensors: (builder, and the operands of the call) → the result."""

FUNCTIONS: Final[Mapping[str, Callable[..., Any]]] = {name: globals()[name] for name in __all__ if name != "FUNCTIONS"}
"""Every operation by its name."""
