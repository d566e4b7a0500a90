"""Compute small nodes whose inputs are known with numpy, so that shapes, ranges and masks are constants of the graph.

Everything here is exact: integers, booleans, copies, and the operations that IEEE 754 rounds correctly. A float tensor
is folded only while it is tiny (a scale, a bound), since a larger one is a weight, and weights keep their name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np
from onnx import helper

from pipeline.importers.from_onnx.source import Attributes, wider_type

INTEGER_LIMIT = 4096
"""Elements of an integer or boolean tensor that may be folded: a mask of 64×64."""
RANGE_LIMIT = 2**26
"""Elements of a Range, which folds at every length: 512 MiB of int64."""
FLOAT_LIMIT = 16
"""Elements of a float tensor that may be folded."""

Inputs = Sequence[np.ndarray | None]
Folder = Callable[[Inputs, Attributes], np.ndarray]


def foldable(size: int, dtype: str) -> bool:
    """Whether a tensor of `size` elements is small enough to be folded, or to come out of a fold."""
    return size <= (FLOAT_LIMIT if "float" in dtype or "complex" in dtype else INTEGER_LIMIT)


def wider_dtype(dtype: np.dtype) -> str:
    """The IR's type that holds elements of `dtype`, if that is below a byte; empty for other types."""
    return wider_type(helper.np_dtype_to_tensor_dtype(dtype))


def fold(kind: str, inputs: Inputs, attributes: Attributes) -> np.ndarray | None:
    """The output of a node whose inputs are small and known (None: an optional input that is left out).

    Returns None where the kind is not folded, or the output would be large.

    Raises:
        ValueError, IndexError, ZeroDivisionError: the node cannot be computed.
    """
    folder = FOLDERS.get(kind)
    if folder is None:
        return None
    with np.errstate(all="ignore"):
        try:
            result = folder(inputs, attributes)
        except (TypeError, OverflowError) as error:  # numpy's, where the model has a scalar for a list
            raise ValueError(str(error)) from error
    # A Range has no kind in the IR, so it folds at every length.
    if kind != "Range" and not foldable(result.size, result.dtype.name):
        return None
    return np.asarray(result, order="C")


def elementwise(function: Callable[..., np.ndarray]) -> Folder:
    def folder(inputs: Inputs, _: Attributes) -> np.ndarray:
        shape = np.broadcast_shapes(*(require(array).shape for array in inputs))
        if math.prod(shape) > INTEGER_LIMIT:  # small inputs may broadcast to a huge result, which is not folded
            return np.broadcast_to(np.zeros((), require(inputs[0]).dtype), shape)
        return np.asarray(function(*inputs))

    return folder


def fold_left(function: Callable[..., np.ndarray]) -> Folder:
    """For Max, Min and Sum, which take any number of inputs."""

    def folder(inputs: Inputs, _: Attributes) -> np.ndarray:
        result = require(inputs[0])
        for array in inputs[1:]:
            result = np.asarray(function(result, array))
        return result

    return folder


def reduction(function: Callable[..., np.ndarray]) -> Folder:
    def folder(inputs: Inputs, attributes: Attributes) -> np.ndarray:
        axes = read_integers(inputs, 1, attributes, "axes")
        if not axes and attributes.flag("noop_with_empty_axes"):
            return require(inputs[0])
        result = function(inputs[0], axis=axes or None, keepdims=attributes.flag("keepdims", True))
        return np.asarray(result, require(inputs[0]).dtype)

    return folder


def divide(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """ONNX divides integers towards zero, numpy downwards."""
    if left.dtype.kind not in "iu":
        return np.divide(left, right)
    quotient = np.abs(left) // np.abs(right)
    return np.where((left < 0) != (right < 0), -quotient, quotient).astype(left.dtype)


def modulo(inputs: Inputs, attributes: Attributes) -> np.ndarray:
    return np.asarray((np.fmod if attributes.flag("fmod") else np.mod)(require(inputs[0]), require(inputs[1])))


def cast(inputs: Inputs, attributes: Attributes) -> np.ndarray:
    return convert(require(inputs[0]), helper.tensor_dtype_to_np_dtype(attributes.integer("to")), attributes)


def cast_like(inputs: Inputs, attributes: Attributes) -> np.ndarray:
    return convert(require(inputs[0]), require(inputs[1]).dtype, attributes)


def convert(array: np.ndarray, dtype: np.dtype, attributes: Attributes) -> np.ndarray:
    """Casts to float8 saturate, as ONNX's default asks; numpy makes NaN or infinity of values that are too large."""
    saturates = attributes.flag("saturate", True)
    attributes.settle("round_mode")
    if saturates and dtype.name.startswith("float8"):
        limit = float(ml_dtypes.finfo(dtype).max)
        array = array.clip(-limit, limit)
    return array.astype(dtype)


def reshape(inputs: Inputs, attributes: Attributes) -> np.ndarray:
    data, shape = require(inputs[0]), [int(size) for size in require(inputs[1])]
    if not attributes.flag("allowzero"):
        shape = [data.shape[axis] if size == 0 else size for axis, size in enumerate(shape)]
    return data.reshape(shape)


def squeeze(inputs: Inputs, attributes: Attributes) -> np.ndarray:
    return require(inputs[0]).squeeze(read_integers(inputs, 1, attributes, "axes"))


def unsqueeze(inputs: Inputs, attributes: Attributes) -> np.ndarray:
    return np.expand_dims(require(inputs[0]), read_integers(inputs, 1, attributes, "axes") or ())


def transpose(inputs: Inputs, attributes: Attributes) -> np.ndarray:
    return require(inputs[0]).transpose(attributes.integers("perm"))


def concat(inputs: Inputs, attributes: Attributes) -> np.ndarray:
    return np.concatenate([require(array) for array in inputs], attributes.integer("axis"))


def expand(inputs: Inputs, _: Attributes) -> np.ndarray:
    data, shape = require(inputs[0]), tuple(int(size) for size in require(inputs[1]))
    return np.broadcast_to(data, np.broadcast_shapes(data.shape, shape))


def slices(inputs: Inputs, attributes: Attributes) -> np.ndarray:
    data = require(inputs[0])
    starts, ends = (
        read_integers(inputs, 1, attributes, "starts") or (),
        read_integers(inputs, 2, attributes, "ends") or (),
    )
    axes = read_integers(inputs, 3, attributes, "axes") or tuple(range(len(starts)))
    steps = read_integers(inputs, 4, attributes, "steps") or (1,) * len(starts)
    index = [slice(None)] * data.ndim
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        # Unlike numpy, ONNX takes element 0 when a step back starts before it.
        index[axis] = slice(max(start, -data.shape[axis]), end, step)
    return data[tuple(index)]


def gather(inputs: Inputs, attributes: Attributes) -> np.ndarray:
    return np.take(require(inputs[0]), require(inputs[1]), attributes.integer("axis"))


def gather_nd(inputs: Inputs, attributes: Attributes) -> np.ndarray:
    data, indices = require(inputs[0]), require(inputs[1])
    batch = attributes.integer("batch_dims")
    lead = tuple(
        np.arange(size).reshape((1,) * axis + (-1,) + (1,) * (indices.ndim - 2 - axis))
        for axis, size in enumerate(data.shape[:batch])
    )
    return data[(*lead, *np.moveaxis(indices, -1, 0))]


def cumulative_sum(inputs: Inputs, attributes: Attributes) -> np.ndarray:
    data, axis = require(inputs[0]), int(require(inputs[1]).item())
    if attributes.flag("reverse"):
        data = np.flip(data, axis)
    result = np.cumsum(data, axis, data.dtype)
    if attributes.flag("exclusive"):
        result = result - data
    return np.flip(result, axis) if attributes.flag("reverse") else result


def make_range(inputs: Inputs, _: Attributes) -> np.ndarray:
    start, limit, step = (require(array).item() for array in inputs)
    count = max(int(np.ceil((limit - start) / step)), 0)
    if count > RANGE_LIMIT:
        raise ValueError(f"it has {count:,} elements, and {RANGE_LIMIT:,} at most can be made; is its limit wrong?")
    return (start + np.arange(count) * step).astype(require(inputs[0]).dtype)


def constant_of_shape(inputs: Inputs, attributes: Attributes) -> np.ndarray:
    value = attributes.constant()
    fill = np.zeros(1, np.float32) if value is None else value
    return np.broadcast_to(fill.reshape(()), tuple(int(size) for size in require(inputs[0])))


def triangle(inputs: Inputs, attributes: Attributes) -> np.ndarray:
    offset = 0 if len(inputs) < 2 or inputs[1] is None else int(inputs[1].item())
    return (np.triu if attributes.flag("upper", True) else np.tril)(require(inputs[0]), offset)


def nonzero(inputs: Inputs, _: Attributes) -> np.ndarray:
    return np.array(np.nonzero(require(inputs[0])), np.int64).reshape(require(inputs[0]).ndim, -1)


def require(array: np.ndarray | None) -> np.ndarray:
    """A required input.

    Raises:
        ValueError: it was left out.
    """
    if array is None:
        raise ValueError("a required input was left out")
    return array


def read_integers(inputs: Inputs, index: int, attributes: Attributes, name: str) -> tuple[int, ...] | None:
    """Integers that newer opsets give as an input and older ones as an attribute."""
    array = inputs[index] if index < len(inputs) else None
    return attributes.integers(name) if array is None else tuple(int(item) for item in array.reshape(-1))


FOLDERS: dict[str, Folder] = {
    "Abs": elementwise(np.abs),
    "Add": elementwise(np.add),
    "And": elementwise(np.logical_and),
    "Cast": cast,
    "CastLike": cast_like,
    "Ceil": elementwise(np.ceil),
    "Concat": concat,
    "ConstantOfShape": constant_of_shape,
    "CumSum": cumulative_sum,
    "Div": elementwise(divide),
    "Equal": elementwise(np.equal),
    "Expand": expand,
    "Floor": elementwise(np.floor),
    "Gather": gather,
    "GatherND": gather_nd,
    "Greater": elementwise(np.greater),
    "GreaterOrEqual": elementwise(np.greater_equal),
    "Less": elementwise(np.less),
    "LessOrEqual": elementwise(np.less_equal),
    "Max": fold_left(np.maximum),
    "Min": fold_left(np.minimum),
    "Mod": modulo,
    "Mul": elementwise(np.multiply),
    "Neg": elementwise(np.negative),
    "NonZero": nonzero,
    "Not": elementwise(np.logical_not),
    "Or": elementwise(np.logical_or),
    "Range": make_range,
    "ReduceMax": reduction(np.max),
    "ReduceMin": reduction(np.min),
    "ReduceProd": reduction(np.prod),
    "ReduceSum": reduction(np.sum),
    "Reshape": reshape,
    "Sign": elementwise(np.sign),
    "Slice": slices,
    "Squeeze": squeeze,
    "Sub": elementwise(np.subtract),
    "Sum": fold_left(np.add),
    "Transpose": transpose,
    "Trilu": triangle,
    "Unsqueeze": unsqueeze,
    "Where": elementwise(np.where),
    "Xor": elementwise(np.logical_xor),
}
