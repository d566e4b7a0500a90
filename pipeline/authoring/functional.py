"""What a `forward` is written with: operations on IR tensors, each of which adds ops to the graph.

They have the names and the arguments of `torch.nn.functional`, as far as they go. An operand that does not fit is
refused with the shape that was found and the one that was expected. `FUNCTIONS` is the table of all.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch

from pipeline.authoring.builder import FLOATS, IRTensor, Operand, Pair, Readable, builder_of, emit_binary, typed
from pipeline.authoring.storage import Buffer
from pipeline.ir import Attr, InputRef, TensorSpec, TorchConst
from pipeline.runtime.tensors import torch_dtype

__all__ = [
    "FUNCTIONS", "absolute", "add", "amax", "batch_norm", "cast", "concat", "conv2d", "cross_entropy", "div", "dropout",
    "embedding", "exp", "flatten", "gelu", "layer_norm", "linear", "log", "log_softmax", "matmul", "max_pool2d", "mean",
    "mse_loss", "mul", "narrow", "permute", "relu", "reshape", "sigmoid", "silu", "softmax", "sqrt", "sub", "sum",
    "tanh", "transpose",
]  # fmt: skip


@typed
def add(left: Operand, right: Operand) -> IRTensor:
    return emit_binary("aten.add.Tensor", left, right)


@typed
def sub(left: Operand, right: Operand) -> IRTensor:
    return emit_binary("aten.sub.Tensor", left, right)


@typed
def mul(left: Operand, right: Operand) -> IRTensor:
    return emit_binary("aten.mul.Tensor", left, right)


@typed
def div(left: Operand, right: Operand) -> IRTensor:
    return emit_binary("aten.div.Tensor", left, right)


def _unary(name: str) -> Callable[[IRTensor], IRTensor]:
    """The operation of torch's `name`, which computes each element from one."""

    @typed
    def emit_unary(x: IRTensor) -> IRTensor:
        return x.builder.emit_one(f"aten.{name}.default", [_floating(x)], x.spec)

    return emit_unary


relu, tanh, sigmoid, silu = (_unary(kind) for kind in ("relu", "tanh", "sigmoid", "silu"))
exp, log, sqrt, absolute = (_unary(kind) for kind in ("exp", "log", "sqrt", "abs"))


@typed
def gelu(x: IRTensor, approximate: str = "none") -> IRTensor:
    if approximate not in ("none", "tanh"):
        raise x.builder.refusal(f"gelu found approximate={approximate!r}, expected 'none' or 'tanh'")
    return x.builder.emit_one("aten.gelu.default", [_floating(x)], x.spec, {"approximate": approximate})


@typed
def cast(x: IRTensor, dtype: str) -> IRTensor:
    try:
        spec = TensorSpec(x.shape, dtype)
    except ValueError as error:
        raise x.builder.refusal(f"cast found {error}") from None
    return x.builder.emit_one("aten._to_copy.default", [x], spec, {"dtype": TorchConst("dtype", dtype)})


@typed
def softmax(x: IRTensor, dim: int = -1) -> IRTensor:
    return x.builder.emit_one("aten.softmax.int", [_floating(x)], x.spec, {"dim": _axis(x, dim)})


@typed
def log_softmax(x: IRTensor, dim: int = -1) -> IRTensor:
    return x.builder.emit_one("aten.log_softmax.int", [_floating(x)], x.spec, {"dim": _axis(x, dim)})


@typed
def sum(x: IRTensor, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> IRTensor:
    return _reduce("aten.sum.dim_IntList", x, dim, keepdim)


@typed
def mean(x: IRTensor, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> IRTensor:
    return _reduce("aten.mean.dim", _floating(x), dim, keepdim)


@typed
def amax(x: IRTensor, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> IRTensor:
    return _reduce("aten.amax.default", x, dim, keepdim)


def _reduce(kind: str, x: IRTensor, dim: int | Sequence[int] | None, keepdim: bool) -> IRTensor:
    asked = range(x.rank) if dim is None else [dim] if isinstance(dim, int) else dim
    axes = tuple(sorted({_axis(x, axis) for axis in asked}))
    if not axes:
        return x
    kept = [(1 if axis in axes else size) for axis, size in enumerate(x.shape) if keepdim or axis not in axes]
    return x.builder.emit_one(kind, [x], TensorSpec(tuple(kept), x.dtype), {"dim": axes, "keepdim": keepdim})


@typed
def reshape(x: IRTensor, shape: Sequence[int]) -> IRTensor:
    """`x` in another shape, of which one size may be -1."""
    sizes, free = list(shape), [place for place, size in enumerate(shape) if size == -1]
    known = math.prod(size for size in sizes if size != -1)
    if len(free) == 1 and known:
        sizes[free[0]] = x.spec.numel // known
    if len(free) > 1 or math.prod(sizes) != x.spec.numel or min(sizes, default=0) < 0:
        raise x.builder.refusal(
            f"reshape found {list(x.shape)}, of {x.spec.numel} elements, expected those of {list(shape)}"
        )
    return x.builder.emit_one("aten.reshape.default", [x], TensorSpec(tuple(sizes), x.dtype), {"shape": tuple(sizes)})


@typed
def flatten(x: IRTensor, start_dim: int = 0, end_dim: int = -1) -> IRTensor:
    """The axes from `start_dim` to `end_dim` as one."""
    if not x.rank:
        return reshape(x, [1])
    start, end = _axis(x, start_dim), _axis(x, end_dim)
    if start > end:
        raise x.builder.refusal(f"flatten found start_dim={start_dim} behind end_dim={end_dim} in {list(x.shape)}")
    return reshape(x, [*x.shape[:start], math.prod(x.shape[start : end + 1]), *x.shape[end + 1 :]])


@typed
def permute(x: IRTensor, dims: Sequence[int]) -> IRTensor:
    perm = tuple(_axis(x, dim) for dim in dims)
    if sorted(perm) != list(range(x.rank)):
        raise x.builder.refusal(f"permute found dims={list(dims)}, expected each axis of {list(x.shape)} once")
    return x.builder.emit_one(
        "aten.permute.default", [x], TensorSpec(tuple(x.shape[axis] for axis in perm), x.dtype), {"dims": perm}
    )


@typed
def transpose(x: IRTensor, dim0: int, dim1: int) -> IRTensor:
    first, second = _axis(x, dim0), _axis(x, dim1)
    dims = list(range(x.rank))
    dims[first], dims[second] = second, first
    return permute(x, dims)


@typed
def concat(tensors: Sequence[Readable], dim: int = 0) -> IRTensor:
    read = _read(*tensors)
    axis, like = _axis(read[0], dim), read[0]
    rest = [[size for place, size in enumerate(x.shape) if place != axis] for x in read]
    if any(x.dtype != like.dtype or x.rank != like.rank for x in read) or any(sizes != rest[0] for sizes in rest):
        found = ", ".join(_text(x) for x in read)
        raise like.builder.refusal(
            f"concat found {found}, expected one dtype, and sizes that differ along axis {axis} alone"
        )
    sizes = [*like.shape[:axis], builtins.sum(x.shape[axis] for x in read), *like.shape[axis + 1 :]]
    return like.builder.emit_one("aten.cat.default", read, TensorSpec(tuple(sizes), like.dtype), {"dim": axis})


@typed
def narrow(x: Readable, dim: int, start: int, length: int) -> IRTensor:
    """`length` elements along an axis, from `start` on."""
    (x,) = _read(x)
    axis = _axis(x, dim)
    if start < 0 or length < 0 or start + length > x.shape[axis]:
        raise x.builder.refusal(f"narrow found {start} to {start + length} along axis {axis} of {list(x.shape)}")
    call: dict[str, Attr] = {"dim": axis, "start": start, "end": start + length}
    sizes = (*x.shape[:axis], length, *x.shape[axis + 1 :])
    return x.builder.emit_one("aten.slice.Tensor", [x], TensorSpec(sizes, x.dtype), call)


@typed
def matmul(left: Readable, right: Readable) -> IRTensor:
    """The product of the last two axes; those before them are broadcast."""
    a, b = _read(left, right)
    if a.rank < 2 or b.rank < 2 or a.shape[-1] != b.shape[-2] or a.dtype != b.dtype:
        raise a.builder.refusal(
            f"matmul found {_text(a)} and {_text(b)}, expected [..., m, k] and [..., k, n] of one dtype"
        )
    try:
        batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except RuntimeError:
        raise a.builder.refusal(f"matmul found {_text(a)} and {_text(b)}, whose first axes do not broadcast") from None
    return a.builder.emit_one("aten.matmul.default", [a, b], TensorSpec((*batch, a.shape[-2], b.shape[-1]), a.dtype))


@typed
def linear(x: IRTensor, weight: Readable, bias: Readable | None = None) -> IRTensor:
    """`x` times the transposed `weight`, [out, in], plus `bias`."""
    operands = _read(x, weight, *([] if bias is None else [bias]))
    features, out = operands[1].shape[1], operands[1].shape[0]
    _expect(x, x.rank >= 1 and x.shape[-1] == features, f"[..., {features}]", operands[1].dtype)
    return x.builder.emit_one("aten.linear.default", operands, TensorSpec((*x.shape[:-1], out), x.dtype))


@typed
def embedding(ids: IRTensor, weight: Readable) -> IRTensor:
    """The rows of `weight` that `ids` names."""
    (table,) = _read_with(ids, weight)
    _expect(ids, True, "any shape", "int64", "int32")
    spec = TensorSpec((*ids.shape, table.shape[1]), table.dtype)
    return ids.builder.emit_one("aten.embedding.default", [table, ids], spec)


@typed
def conv2d(
    x: IRTensor,
    weight: Readable,
    bias: Readable | None = None,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    groups: int = 1,
) -> IRTensor:
    operands = _read_with(x, weight, *([] if bias is None else [bias]))
    out, channels, *kernel = operands[0].shape
    channels *= groups
    _expect(x, x.rank == 4 and x.shape[1] == channels, f"[batch, {channels}, height, width]", operands[0].dtype)
    strides, dilations = _pair(x, "stride", stride), _pair(x, "dilation", dilation)
    pads = _pair(x, "padding", padding, 0)
    sizes = _windows(x, kernel, strides, pads, dilations)
    attrs: dict[str, Attr] = {"stride": strides, "padding": pads, "dilation": dilations, "groups": groups}
    spec = TensorSpec((x.shape[0], out, *sizes), x.dtype)
    return x.builder.emit_one("aten.conv2d.default", [x, *operands], spec, attrs)


@typed
def max_pool2d(x: IRTensor, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0) -> IRTensor:
    kernel, pads = _pair(x, "kernel_size", kernel_size), _pair(x, "padding", padding, 0)
    strides = kernel if stride is None else _pair(x, "stride", stride)
    _expect(x, x.rank == 4, "[batch, channels, height, width]", *FLOATS)
    if any(2 * pad > size for pad, size in zip(pads, kernel, strict=True)):
        raise x.builder.refusal(
            f"max_pool2d found padding={padding}, expected at most half of kernel_size={kernel_size}"
        )
    sizes = _windows(x, kernel, strides, pads, (1, 1))
    attrs: dict[str, Attr] = {"kernel_size": kernel, "stride": strides, "padding": pads}
    spec = TensorSpec((*x.shape[:2], *sizes), x.dtype)
    return x.builder.emit_one("aten.max_pool2d.default", [x], spec, attrs)


@typed
def layer_norm(
    x: IRTensor, shape: Sequence[int], weight: Readable | None = None, bias: Readable | None = None, eps: float = 1e-5
) -> IRTensor:
    """Normalised over the last axes, which have the sizes `shape`."""
    sizes = tuple(shape)
    _expect(x, bool(sizes) and x.shape[-len(sizes) :] == sizes, f"[..., {', '.join(map(str, sizes))}]", *FLOATS)
    ones = x.builder.constant(torch.ones(sizes, dtype=torch_dtype(x.dtype))) if weight is None else weight
    operands = _read(x, ones, *([] if bias is None else [bias]))
    attrs: dict[str, Attr] = {"normalized_shape": sizes, "eps": _number(x, "eps", eps)}
    return x.builder.emit_one("aten.layer_norm.default", operands, x.spec, attrs)


@typed
def batch_norm(
    x: IRTensor,
    mean: Buffer,
    variance: Buffer,
    weight: Readable,
    bias: Readable,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> IRTensor:
    """Normalised by the running statistics; in training by those of the batch, which then move the running ones."""
    channels = mean.data.shape[0]
    _expect(x, x.rank >= 2 and x.shape[1] == channels, f"[batch, {channels}, ...]", *FLOATS)
    builder, eps, momentum = x.builder, _number(x, "eps", eps), _number(x, "momentum", momentum, most=1)
    operands = [x, *_read_with(x, weight, bias, mean, variance)]
    if not builder.training:
        stored: dict[str, Attr] = {"training": False, "momentum": momentum, "eps": eps, "cudnn_enabled": False}
        return builder.emit_one("aten.batch_norm.default", operands, x.spec, stored)
    # Copies, since torch refuses to differentiate through statistics that are written to before the backward pass.
    operands[3:] = [builder.emit_one("aten.clone.default", [running], running.spec) for running in operands[3:]]
    if x.spec.numel == channels:
        raise builder.refusal(f"found {_text(x)} in training, expected more than one number for each channel")
    attrs: Mapping[str, Attr] = {
        **{name: InputRef(place) for place, name in enumerate(BATCH_NORM_OPERANDS)},
        "training": True, "momentum": momentum, "eps": eps
    }  # fmt: skip
    statistics = ("saved_mean", "saved_scale", "new_mean", "new_var")
    outputs = {"batchnormalization": x.spec, **dict.fromkeys(statistics, TensorSpec((channels,), x.dtype))}
    kind = "aten._native_batch_norm_legit_functional.default"
    result, _, _, *after = builder.emit_several(kind, operands, outputs, attrs)
    for buffer, value in zip((mean, variance), after, strict=True):
        builder.update_stored(buffer, value)
    return result


BATCH_NORM_OPERANDS: Final = ("input", "weight", "bias", "running_mean", "running_var")


@typed
def dropout(x: IRTensor, p: float = 0.5) -> IRTensor:
    """In training a share `p` of the elements is zero, and the others are scaled up; at inference `x` as it is."""
    if not 0 <= p < 1:
        raise x.builder.refusal(f"dropout found p={p!r}, expected 0 ≤ p < 1")
    if not x.builder.training or not p:
        return x
    attrs: dict[str, Attr] = {"ratio": float(p), "seed": 0}
    outputs = {"dropout": x.spec, "kept": TensorSpec(x.shape, "bool")}
    return x.builder.emit_several("onnxline.dropout.default", [_floating(x)], outputs, attrs)[0]


@typed
def mse_loss(output: IRTensor, target: IRTensor) -> IRTensor:
    """The mean of the squared differences."""
    _expect(target, target.shape == output.shape, f"{list(output.shape)} as the output", output.dtype)
    difference = output - target
    return mean(difference * difference)


@typed
def cross_entropy(output: IRTensor, target: IRTensor, label_smoothing: float = 0.0) -> IRTensor:
    """The mean loss of logits [batch, classes, ...] for classes [batch, ...], whole numbers."""
    if output.rank < 2:
        raise output.builder.refusal(f"cross_entropy found logits {_text(output)}, expected [batch, classes, ...]")
    sizes = (output.shape[0], *output.shape[2:])
    _expect(target, target.shape == sizes, f"{list(sizes)} beside the logits {list(output.shape)}", "int64", "int32")
    scores = log_softmax(output, 1)
    column = reshape(target if target.dtype == "int64" else cast(target, "int64"), [sizes[0], 1, *sizes[1:]])
    chosen = output.builder.emit_one(
        "aten.gather.default", [scores, column], TensorSpec(column.shape, output.dtype), {"dim": 1}
    )
    loss = -mean(chosen)
    if not label_smoothing:
        return loss
    return loss * (1 - label_smoothing) - mean(scores) * label_smoothing


def _read(*operands: Readable) -> list[IRTensor]:
    builder = builder_of(*operands)
    return [operand if isinstance(operand, IRTensor) else builder.read(operand) for operand in operands]


def _read_with(x: IRTensor, *operands: Readable) -> list[IRTensor]:
    return _read(x, *operands)[1:]


def _floating(x: IRTensor) -> IRTensor:
    _expect(x, True, "any shape", *FLOATS)
    return x


def _expect(x: IRTensor, fits: bool, shape: str, *dtypes: str) -> None:
    """Refuse a tensor of another shape or dtype."""
    if not fits:
        raise x.builder.refusal(f"found {_text(x)}, expected {shape}")
    if x.dtype not in dtypes:
        raise x.builder.refusal(f"found {_text(x)}, expected the dtype {' or '.join(dtypes)}")


def _text(x: IRTensor) -> str:
    return f"{x.dtype}{list(x.shape)}"


def _axis(x: IRTensor, dim: int) -> int:
    if not -x.rank <= dim < x.rank:
        raise x.builder.refusal(f"found axis {dim!r} of {_text(x)}, expected {-x.rank} to {x.rank - 1}")
    return dim % x.rank


def _pair(x: IRTensor, name: str, value: Pair, least: int = 1) -> tuple[int, int]:
    pair = (value, value) if isinstance(value, int) else tuple(value)
    if len(pair) != 2 or min(pair) < least:
        raise x.builder.refusal(f"found {name}={value!r}, expected a whole number from {least} on, or a pair of them")
    return pair


def _number(x: IRTensor, name: str, value: float, *, most: float = math.inf) -> float:
    if not 0 <= value <= most or math.isinf(value):
        limit = "that is not below zero" if math.isinf(most) else f"from 0 to {most:g}"
        raise x.builder.refusal(f"found {name}={value!r}, expected a number {limit}")
    return float(value)


def _windows(
    x: IRTensor, kernel: Sequence[int], steps: tuple[int, int], pads: tuple[int, int], dilations: tuple[int, int]
) -> tuple[int, ...]:
    """The sizes of height and width after a kernel has moved over them."""
    spans = [dilation * (size - 1) + 1 for size, dilation in zip(kernel, dilations, strict=True)]
    room = [size + 2 * pad - span for size, pad, span in zip(x.shape[2:], pads, spans, strict=True)]
    if min(room) < 0:
        raise x.builder.refusal(f"found {_text(x)}, expected at least {spans} of height and width with the padding")
    return tuple(left // step + 1 for left, step in zip(room, steps, strict=True))


FUNCTIONS: Final[Mapping[str, Callable[..., IRTensor]]] = {
    name: globals()[name] for name in __all__ if name != "FUNCTIONS"
}
"""Every operation by its name."""
