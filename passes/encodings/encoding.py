"""How a float tensor becomes integers: their format, and the scales and zero points.

`fit_encodings` fits the encodings of a file to a model: each names a float tensor that is there, and says its axis.

An encoding also holds for a tensor that only has elements of another one, such as after a Reshape. One scale for a
whole tensor does not depend on where its elements are. Scales of channels and blocks do, so these are not passed on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np
from onnx import GraphProto, NodeProto

from passes.errors import UsageError
from passes.graph.inference import FLOATS, float_shapes, float_tensors
from passes.graph.op_facts import BIAS as BIAS_POSITION
from passes.graph.op_facts import BIASED, LAYOUT_OPS, ONNX_DOMAINS, find_moved_constants, moved_inputs, weight_axes
from passes.suggest import ELLIPSIS, describe_argument, join_first, nearest
from passes.weights.detached import DetachedModel

Granularity = Literal["tensor", "channel", "block"]

FloatType = Literal["FLOAT8E4M3FN", "FLOAT8E5M2", "FLOAT4E2M1"]

GREATEST: Final[Mapping[FloatType, int]] = {"FLOAT8E4M3FN": 448, "FLOAT8E5M2": 57344, "FLOAT4E2M1": 6}
"""The greatest finite number of each type of floats."""

FLOAT_NAMES: Final[Mapping[FloatType, str]] = {
    "FLOAT8E4M3FN": "fp8e4m3",
    "FLOAT8E5M2": "fp8e5m2",
    "FLOAT4E2M1": "fp4e2m1",
}
"""How a configuration calls it."""

ScaleType = Literal["FLOAT8E8M0", "FLOAT8E4M3FN", "UINT8"]
"""The ONNX dtype of scales: powers of 2; floats of 8 bits, which a scale of the whole tensor scales in turn; or
integers, which a scale of each channel scales (AIMET's LPBQ)."""


class NoEncoding(Exception):
    """Why the encodings of its sources give a tensor none."""


@dataclass(frozen=True, slots=True)
class Precision:
    """A format of integers, or of floats of 8 bits.

    A symmetric one has its zero point in the middle; then a signed format leaves its lowest number unused, as
    onnxruntime does, so that -x and x are equally exact. Floats are symmetric.
    """

    bits: int
    signed: bool
    symmetric: bool
    granularity: Granularity = "tensor"
    block: int = 0
    """Elements that share a scale, where `granularity` is "block"."""
    float_type: FloatType | None = None
    """The ONNX dtype of floats; None for integers."""
    scale_type: ScaleType | None = None
    """The ONNX dtype of the scales of blocks; None for that of the tensor."""

    @property
    def lowest(self) -> int:
        if self.float_type:
            return -self.highest
        leaves_lowest = self.symmetric and self.scale_type is None  # LPBQ takes it, as scales are rounded down too
        return -(2 ** (self.bits - 1)) + leaves_lowest if self.signed else 0

    @property
    def highest(self) -> int:
        if self.float_type:
            return GREATEST[self.float_type]
        return 2 ** (self.bits - 1) - 1 if self.signed else 2**self.bits - 1

    @property
    def stored_bits(self) -> int:
        """The bits of the narrowest ONNX type that holds the values of the format."""
        return next(bits for bits in (4, 8, 16, 32) if bits >= self.bits)

    @property
    def onnx_name(self) -> str:
        """The ONNX dtype that holds the values of the format, by its name in `TensorProto.DataType`."""
        return self.float_type or f"{'' if self.signed else 'U'}INT{self.stored_bits}"

    @property
    def fills_its_type(self) -> bool:
        """Whether the ONNX dtype has no other values, apart from an unused lowest value."""
        return self.bits == self.stored_bits

    def per_tensor(self) -> Precision:
        """The same values with one scale for the whole tensor."""
        return replace(self, granularity="tensor", block=0, scale_type=None)

    def __str__(self) -> str:
        size = {"tensor": "", "channel": "/channel", "block": f"/block{self.block}"}[self.granularity]
        usual = self.symmetric == self.signed
        if self.scale_type == "UINT8":
            return f"lpbq{self.block}"
        if self.scale_type:
            return next(name for name, precision in BLOCK_FLOATS.items() if precision == self)
        if self.float_type:
            return f"{FLOAT_NAMES[self.float_type]}{size}"
        return f"{'' if self.signed else 'u'}int{self.bits}{size}" + (
            "" if usual else "/symmetric" if self.symmetric else "/asymmetric"
        )


BLOCK_FLOATS: Final[Mapping[str, Precision]] = {
    "mxfp4": Precision(4, True, True, "block", 32, "FLOAT4E2M1", "FLOAT8E8M0"),
    "mxfp8": Precision(8, True, True, "block", 32, "FLOAT8E4M3FN", "FLOAT8E8M0"),
    "mxfp8e5m2": Precision(8, True, True, "block", 32, "FLOAT8E5M2", "FLOAT8E8M0"),
    "nvfp4": Precision(4, True, True, "block", 16, "FLOAT4E2M1", "FLOAT8E4M3FN"),
}
"""Floats of few bits in blocks whose scales have few bits, too: OCP's Microscaling Formats 1.0, and NVIDIA's NVFP4."""

LPBQ_SCALES: Final = 16
"""The greatest integer that scales a block of LPBQ: 2 to the number of bits that 4 bits lack of 8."""

BIAS: Final = Precision(32, signed=True, symmetric=True)
"""A bias is added to a sum of products in 32 bits."""


MATRIX: Final = 2
"""Axes of the weight of a MatMul or Gemm, whose blocks AIMET lists otherwise than those of a convolution."""

UNKNOWN_AXIS: Final = -(2**31)
"""The axis of an encoding whose file does not say it; no axis of a tensor, which may be counted from the end."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """scale: float32, of shape [] for one scale, [channels], or the tensor's shape with `axis` divided into blocks.
    zero_point: int64, of the same shape.
    axis: of the channels or blocks; None for one scale.
    global_scale: float32, of shape [], or [1 …, channels, 1 …]: what scales the scales of 8 bits; `scale` has the
        products.
    """

    precision: Precision
    scale: np.ndarray
    zero_point: np.ndarray
    axis: int | None = None
    global_scale: np.ndarray | None = None

    def inner_scale(self) -> np.ndarray:
        """What `global_scale` scales, as float32: floats of 8 bits up to a rounding error, or integers."""
        assert self.global_scale is not None
        inner = self.scale / self.global_scale
        return np.rint(inner) if self.precision.scale_type == "UINT8" else inner

    def with_arrays(self, change: Callable[[np.ndarray], np.ndarray]) -> Encoding:
        """The encoding with its scales and its zero points moved in the same way."""
        return replace(self, scale=change(self.scale), zero_point=change(self.zero_point))

    def spread(self, array: np.ndarray, values: np.ndarray) -> np.ndarray:
        """`values`, which are of the shape of the scale, as numpy can combine them with `array`."""
        if self.axis is None:
            return values
        if self.precision.granularity == "block":
            repeated = np.repeat(values, self.precision.block, axis=self.axis)
            return np.take(repeated, range(array.shape[self.axis]), axis=self.axis)
        shape = [1] * array.ndim
        shape[self.axis] = -1
        return values.reshape(shape)


def encode_bias(data: Encoding, weight: Encoding, rank: int = 1) -> Encoding:
    """The encoding of a bias of `rank` dims: the scale of the products that it is added to, whose factors have these.

    Args:
        data: the encoding of the activation that the product reads.
        weight: the encoding of the weight that the product reads.
        rank: a Gemm takes a row, [1, channels], too.
    """
    scale = (data.scale.astype(np.float64) * weight.scale).astype(np.float32)
    return Encoding(BIAS, scale, np.zeros_like(scale, np.int64), rank - 1 if scale.ndim else None)


def share_by_moves(graph: GraphProto, encodings: Mapping[str, Encoding]) -> dict[str, Encoding]:
    """`encodings`, and the encodings that other tensors of `graph` share with them through layout operators."""
    known = dict(encodings)
    count = -1
    while count < len(known):
        count = len(known)
        for node in graph.node:
            sources = [known.get(name) for name in moved_inputs(node)]
            first = sources[0] if sources else None
            if (
                first is None
                or first.axis is not None
                or any(not is_same_encoding(first, encoding) for encoding in sources)
            ):
                continue
            for name in filter(None, node.output):
                known.setdefault(name, first)
        for node in reversed(graph.node):
            if node.op_type in LAYOUT_OPS and node.domain in ONNX_DOMAINS:  # every number of the input is in the output
                result = known.get(node.output[0])
                if result is not None and result.axis is None:
                    known.setdefault(node.input[0], result)
    return known


def is_same_encoding(first: Encoding, second: Encoding | None) -> bool:
    """Whether both encodings turn the same floats into the same integers."""
    return (
        second is not None
        and first.precision == second.precision
        and first.axis == second.axis
        and np.array_equal(first.scale, second.scale)
        and np.array_equal(first.zero_point, second.zero_point)
    )


SHOWN: Final = 8
"""How many names a message lists."""


def fit_encodings(encodings: Mapping[str, Encoding], model: DetachedModel) -> dict[str, Encoding]:
    """The encodings of a file for one model, with the axis of channels or blocks that the file does not say.

    Args:
        encodings: name of the tensor → its encoding, as `from_aimet` or `from_qdq` read it.
        model: the model whose float tensors they quantize.

    Returns:
        The same encodings, each with its axis.

    Raises:
        UsageError: the model has no such float tensor, or its shape does not suit the scales.
    """
    if not isinstance(encodings, Mapping) or not isinstance(model, DetachedModel):
        found = describe_argument(model if isinstance(encodings, Mapping) else encodings)
        raise UsageError(f"fit_encodings: found {found}, expected a mapping of names to encodings, and a DetachedModel")
    shapes = stored_shapes(model)
    known = float_tensors(model.proto) | shapes.keys()
    unknown = [name for name in encodings if name not in known]
    if unknown:
        raise UsageError(
            f"encodings: {len(unknown)} of {len(encodings)} are for tensors that the model does not have as float "
            f"tensors: {list_with_nearest(unknown, known)}"
        )
    axes = find_axes(model, shapes)
    return {
        name: _fit(name, encoding, shapes.get(name), axes.get(name, NOWHERE)) for name, encoding in encodings.items()
    }


def list_with_nearest(names: Collection[str], known: Iterable[str]) -> str:
    """The first of `names`, and the known name that is nearest to the first one."""
    listed = list(names)
    return join_first(list(map(repr, listed)), SHOWN, ELLIPSIS) + nearest(listed[0], known)


def refuse_unfitted(encodings: Mapping[str, Encoding], taker: str) -> None:
    """Refuse encodings whose axes are not known, as AIMET's files up to 1.0.0 give them.

    Args:
        encodings: name of the tensor → its encoding.
        taker: the function that takes them, for the message.

    Raises:
        UsageError: scales lie along an axis that their file does not say.
    """
    unfitted = next((name for name, encoding in encodings.items() if encoding.axis == UNKNOWN_AXIS), None)
    if unfitted is not None:
        raise UsageError(
            f"encodings: {unfitted!r} has scales along an axis that its file does not say; "
            f"give {taker} what fit_encodings(encodings, model) gives"
        )


def _fit(name: str, encoding: Encoding, shape: tuple[int, ...] | None, axes: Axes) -> Encoding:
    if encoding.axis is None:
        return encoding
    if encoding.axis == UNKNOWN_AXIS and encoding.scale.ndim == 1:
        is_block = encoding.precision.granularity == "block"
        axis = axes[is_block]
        if axis is None or shape is None:
            raise UsageError(
                f"encodings: {name!r} has {encoding.scale.size} scales, and is no weight whose "
                f"{'blocks' if is_block else 'channels'} are known; AIMET's formats 2.0.0 and later say the axis"
            )
        encoding = replace(encoding, axis=axis)
        if is_block:
            encoding = _shape_blocks(name, encoding, shape, axes)
    if shape is None:
        raise UsageError(f"encodings: {name!r} has {encoding.scale.size} scales, and is no constant of the model")
    return _check_shape(name, replace(encoding, axis=(encoding.axis or 0) % len(shape)), shape)


def _shape_blocks(name: str, encoding: Encoding, shape: tuple[int, ...], axes: Axes) -> Encoding:
    """The scales of blocks in the shape that they have in the tensor: AIMET lists those of a matrix channel by channel,
    and others in the order of the axes. Along other axes, such as those of a kernel, they are the same. Scales of LPBQ
    are still integers."""
    channel, axis = (index or 0 for index in axes)
    wanted = _shape_of_blocks(shape, axis, encoding.precision.block)
    if encoding.scale.size != wanted[channel] * wanted[axis]:
        raise UsageError(
            f"encodings: {name!r} has {encoding.scale.size} scales, expected {wanted[channel] * wanted[axis]}: blocks "
            f"of {encoding.precision.block} along axis {axis} of {shape} for each index of axis {channel}"
        )
    sizes = [size if at in (channel, axis) else 1 for at, size in enumerate(wanted)]

    def spread(array: np.ndarray) -> np.ndarray:
        is_turned = channel > axis and len(wanted) == MATRIX
        listed = array.reshape(wanted[channel], wanted[axis]).T if is_turned else array
        return np.broadcast_to(listed.reshape(sizes), wanted)

    found = encoding.with_arrays(spread)
    if encoding.global_scale is None:
        return found
    outer = encoding.global_scale.reshape([-1 if at == channel else 1 for at in range(len(wanted))])
    return replace(found, scale=found.scale * outer, global_scale=outer)


def _shape_of_blocks(shape: tuple[int, ...], axis: int, block: int) -> tuple[int, ...]:
    return tuple(-(-size // block) if at == axis else size for at, size in enumerate(shape))


def _check_shape(name: str, encoding: Encoding, shape: tuple[int, ...]) -> Encoding:
    axis, block = encoding.axis or 0, encoding.precision.block
    if not block:
        if encoding.scale.shape != (shape[axis],):
            raise UsageError(
                f"encodings: {name!r} has {encoding.scale.size} scales, expected {shape[axis]}, one for each channel"
            )
        return encoding
    wanted = _shape_of_blocks(shape, axis, block)
    if len(wanted) == encoding.scale.ndim and all(
        size in (1, full) for size, full in zip(encoding.scale.shape, wanted, strict=True)
    ):
        return encoding.with_arrays(lambda array: np.broadcast_to(array, wanted))
    if encoding.scale.shape != wanted:
        raise UsageError(
            f"encodings: {name!r} has scales of shape {encoding.scale.shape}, expected {wanted}: blocks of {block} "
            f"along axis {axis} of {shape}"
        )
    return encoding


Axes = tuple[int | None, int | None]
"""The axis of channels and the axis that products sum over, which blocks divide."""

NOWHERE: Final[Axes] = (None, None)
"""The axes of what is no weight."""


def stored_shapes(model: DetachedModel) -> dict[str, tuple[int, ...]]:
    """The stored float tensors with their shapes."""
    stored = model.index.initializers.items()
    return {name: tuple(tensor.dims) for name, tensor in stored if tensor.data_type in FLOATS}


def find_axes(model: DetachedModel, constants: Mapping[str, tuple[int, ...]]) -> dict[str, Axes]:
    """The axes of each of `constants`, values with their shapes, that a product reads, also in another layout."""
    graph = model.proto.graph
    moved = find_moved_constants(graph, constants, float_shapes(model.proto))
    found: dict[str, Axes] = {}
    for node in graph.node:
        for position, name in enumerate(node.input):
            if name in moved:
                channel, summed = map(moved[name].axis_of_source, _axes(node, position, len(moved[name].axes)))
                if channel is not None:
                    found.setdefault(moved[name].source, (channel, summed))
    return found


def _axes(node: NodeProto, position: int, rank: int) -> Axes:
    axes = weight_axes(node, position, rank)
    if axes is not None:
        return axes
    return (rank - 1 if position == BIAS_POSITION and rank and node.op_type in BIASED else None), None
