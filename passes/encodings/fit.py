"""Encodings of a file, fitted to a model: each names a float tensor that is there, and says its axis."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Final

import numpy as np
from onnx import NodeProto

from passes.encodings.aimet import UNKNOWN_AXIS
from passes.encodings.encoding import Encoding
from passes.errors import UsageError
from passes.graph.inference import FLOATS, float_shapes, float_tensors
from passes.graph.op_facts import BIAS, BIASED, find_moved_constants, weight_axes
from passes.suggest import describe_argument, nearest
from passes.weights.detached import DetachedModel

SHOWN: Final = 8
"""How many names a message lists."""


def fit_encodings(encodings: Mapping[str, Encoding], model: DetachedModel) -> dict[str, Encoding]:
    """The encodings of a file for `model`, with the axis of channels or blocks that the file does not say.

    Raises:
        UsageError: the model has no such float tensor, or its shape does not suit the scales.
    """
    if not isinstance(encodings, Mapping) or not isinstance(model, DetachedModel):
        found = describe_argument(model if isinstance(encodings, Mapping) else encodings)
        raise UsageError(f"fit_encodings: found {found}, expected a mapping of names to encodings, and a DetachedModel")
    stored = model.index.initializers.items()
    shapes = {name: tuple(tensor.dims) for name, tensor in stored if tensor.data_type in FLOATS}
    known = float_tensors(model.proto) | shapes.keys()
    unknown = [name for name in encodings if name not in known]
    if unknown:
        raise UsageError(
            f"encodings: {len(unknown)} of {len(encodings)} are for tensors that the model does not have as float "
            f"tensors: {list_with_nearest(unknown, known)}"
        )
    axes = _find_axes(model, shapes)
    nowhere = (None, None)
    return {
        name: _fit(name, encoding, shapes.get(name), axes.get(name, nowhere)) for name, encoding in encodings.items()
    }


def list_with_nearest(names: Collection[str], known: Iterable[str]) -> str:
    """The first of `names`, and the known name that is nearest to the first one."""
    listed = list(names)
    return ", ".join(map(repr, listed[:SHOWN])) + (" …" if len(listed) > SHOWN else "") + nearest(listed[0], known)


def _fit(name: str, encoding: Encoding, shape: tuple[int, ...] | None, axes: Axes) -> Encoding:
    if encoding.axis is None:
        return encoding
    if encoding.axis == UNKNOWN_AXIS and encoding.scale.ndim == 1:
        is_block = encoding.precision.granularity == "block"
        axis = axes[is_block]
        if axis is None or shape is None:
            raise UsageError(
                f"encodings: {name!r} has {encoding.scale.size} scales, and is no weight whose "
                f"{'blocks' if is_block else 'channels'} are known; AIMET's versions from 2.0.0 on say the axis"
            )
        encoding = replace(encoding, axis=axis)
        if is_block:
            encoding = _shape_blocks(name, encoding, shape, axes)
    if shape is None:
        raise UsageError(f"encodings: {name!r} has {encoding.scale.size} scales, and is no constant of the model")
    return _check_shape(name, replace(encoding, axis=(encoding.axis or 0) % len(shape)), shape)


def _shape_blocks(name: str, encoding: Encoding, shape: tuple[int, ...], axes: Axes) -> Encoding:
    """The scales of blocks, which AIMET lists channel by channel, in the shape that they have in the tensor. Along
    other axes, such as those of a kernel, they are the same."""
    channel, axis = (index or 0 for index in axes)
    wanted = _shape_of_blocks(shape, axis, encoding.precision.block)
    if encoding.scale.size != wanted[channel] * wanted[axis]:
        raise UsageError(
            f"encodings: {name!r} has {encoding.scale.size} scales, expected {wanted[channel] * wanted[axis]}: blocks "
            f"of {encoding.precision.block} along axis {axis} of {shape} for each index of axis {channel}"
        )
    placed = [size if at in (channel, axis) else 1 for at, size in enumerate(wanted)]

    def place(array: np.ndarray) -> np.ndarray:
        listed = array.reshape(wanted[channel], wanted[axis])
        return np.broadcast_to((listed if channel < axis else listed.T).reshape(placed), wanted)

    return encoding.with_arrays(place)


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


def _find_axes(model: DetachedModel, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Axes]:
    """The axes of each constant that a product reads, also in another layout."""
    graph = model.proto.graph
    moved = find_moved_constants(graph, shapes, float_shapes(model.proto))
    found: dict[str, Axes] = {}
    for node in graph.node:
        for place, name in enumerate(node.input):
            if name in moved:
                channel, summed = map(moved[name].axis_of_source, _axes(node, place, len(moved[name].axes)))
                if channel is not None:
                    found.setdefault(moved[name].source, (channel, summed))
    return found


def _axes(node: NodeProto, place: int, rank: int) -> Axes:
    axes = weight_axes(node, place, rank)
    if axes is not None:
        return axes
    return (rank - 1 if place == BIAS and rank and node.op_type in BIASED else None), None
