"""Moves of elements as calls of torch. Sizes and places are known, and axes count from the front."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np

from pipeline.importers.from_onnx.node import Node
from pipeline.ir.graph import Attr, InputRef, TensorSpec

Move: TypeAlias = tuple[str, Sequence[int], Sequence[int], Mapping[str, Attr]]
"""An operator, its operands after the first one, the sizes of its result, and its other arguments."""


def move(node: Node, vid: int, *moves: Move) -> int:
    """Add the ops one after the other, and return the vid of the last result."""
    for operator, operands, sizes, attrs in moves:
        vid = node.step(operator, [vid, *operands], TensorSpec(tuple(sizes), node.vid_spec(vid).dtype), attrs)
    return vid


def emit_moves(node: Node, vid: int, moves: Sequence[Move]) -> None:
    """Add the ops one after the other, so that the last one makes output 0."""
    if not moves:
        node.alias(vid)
        return
    *steps, (operator, operands, _, attrs) = moves
    node.emit(operator, [move(node, vid, *steps), *operands], attrs)


def reshape(node: Node, vid: int, sizes: Sequence[int]) -> int:
    """The elements in their order, in another shape."""
    return move(node, vid, (RESHAPE, (), sizes, {"shape": tuple(sizes)}))


def emit_reshape(node: Node, vid: int) -> None:
    """Add the op that makes output 0 of the elements in their order."""
    node.emit(RESHAPE, [vid], {"shape": node.output().sizes})


def expand(node: Node, vid: int, sizes: Sequence[int]) -> int:
    return move(node, vid, (EXPAND, (), sizes, {"size": tuple(sizes)}))


def emit_expand(node: Node, vid: int) -> None:
    """Add the op that makes output 0 by broadcasting."""
    node.emit(EXPAND, [vid], {"size": node.output().sizes})


def permute(node: Node, vid: int, dims: Sequence[int]) -> int:
    """Axis `at` of the result is axis `dims[at]`."""
    sizes = node.vid_spec(vid).sizes
    return move(node, vid, (PERMUTE, (), [sizes[axis] for axis in dims], {"dims": tuple(dims)}))


def split(node: Node, vid: int, axis: int, sizes: Sequence[int], names: Sequence[str]) -> tuple[int, ...]:
    """Neighbouring parts of an axis, of these sizes and names."""
    spec = node.vid_spec(vid)
    outputs = [
        (name, TensorSpec((*spec.shape[:axis], size, *spec.shape[axis + 1 :]), spec.dtype))
        for name, size in zip(names, sizes, strict=True)
    ]
    return node.make(SPLIT, [vid], outputs, {"split_sizes": tuple(sizes), "dim": axis})


def by_range(sizes: Sequence[int], axis: int, taken: range) -> list[Move]:
    """Take the places of a range along an axis. Torch has no negative steps: it takes them forwards, and flips."""
    if taken == range(sizes[axis]):
        return []
    forwards = (taken if taken.step > 0 else taken[::-1]) or range(0)
    result = (*sizes[:axis], len(taken), *sizes[axis + 1 :])
    call: dict[str, Attr] = {"dim": axis, "start": forwards.start, "end": forwards.stop, "step": forwards.step}
    flip: Move = ("aten.flip.default", (), result, {"dims": (axis,)})
    return [("aten.slice.Tensor", (), result, call), *([flip] if taken.step < 0 and len(taken) > 1 else [])]


def by_places(node: Node, sizes: Sequence[int], axis: int, places: np.ndarray) -> Move:
    """Take constant places of an axis, which has the shape of `places` then."""
    result = (*sizes[:axis], *places.shape, *sizes[axis + 1 :])
    return (INDEX, (node.constant_operand(places),), result, index_attrs(axis))


def index_attrs(axis: int) -> dict[str, Attr]:
    """Arguments of `index.Tensor` where operand 1 holds places of an axis."""
    return {"self": InputRef(0), "indices": (*(None,) * axis, InputRef(1))}


def with_constant(sizes: Sequence[int], pads: Sequence[int], value: float) -> Move:
    """Put constant elements around; `pads` holds the begins of all axes, then the ends, and a negative one crops."""
    begins, ends = pads[: len(sizes)], pads[len(sizes) :]
    result = [size + begin + end for size, begin, end in zip(sizes, begins, ends, strict=True)]
    last_first = tuple(pads[side + axis] for axis in reversed(range(len(sizes))) for side in (0, len(sizes)))
    return ("aten.constant_pad_nd.default", (), result, {"pad": last_first, "value": value})


RESHAPE, EXPAND, PERMUTE = (f"aten.{name}.default" for name in ("reshape", "expand", "permute"))

SPLIT, INDEX = "aten.split_with_sizes.default", "aten.index.Tensor"
