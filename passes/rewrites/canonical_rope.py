"""Write rotary embeddings with the fewest operators: Split, Concat, two products and a sum, or one operator.

torch writes x·cos + concat(-b, a)·sin with a and b the halves of x. The sign belongs to the table of sines, which all
layers share: (-b)·s and b·(-s) are equal bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from onnx import NodeProto, helper

from passes.context import PassContext
from passes.graph.op_facts import attribute_of, input_of
from passes.rewrites.rewriter import Rewriter
from passes.step import Description, PassResult, Step, structure
from passes.suggest import plural
from passes.weights.detached import DetachedModel


@dataclass(frozen=True, slots=True)
class CanonicalRope(Step):
    """Put the sign of the rotated half into the sines, and take the halves by one Split."""

    name: str = field(default="canonical-rope", init=False)
    source: str = field(default="onnxline", init=False)
    description: ClassVar[Description] = structure(
        "Write rotary embeddings as Split, Concat, two products and a sum, with the sign in the sines"
    )

    def apply(self, model: DetachedModel, context: PassContext) -> PassResult:
        if not any(node.op_type == "Neg" for node in model.proto.graph.node):
            return PassResult(model, changed=False, why="no rotary embedding negates a half")
        rewriter = Rewriter(model, context)
        found = [rotation for node in rewriter.by_op("Add") if (rotation := _read_rotation(rewriter, node)) is not None]
        tables = {rotation.sine for rotation in found if rewriter.constant(rotation.sine) is None}
        saved = sum(rotation.is_sliced + 1 for rotation in found) - len(tables)
        if saved <= 0:
            return PassResult(model, changed=False, why="no rotary embedding gets shorter")
        signed: dict[str, str] = {}
        for rotation in found:
            _write(rewriter, rotation, signed)
        return rewriter.result(f"{plural(len(found), 'rotary embedding')} with {plural(saved, 'node')} fewer")


@dataclass(frozen=True, slots=True)
class _Rotation:
    """One rotary embedding: `rotated` multiplies `joined`, made of the halves of `data`, with `sine`."""

    data: str
    sine: str
    rotated: NodeProto
    joined: NodeProto
    first: str
    second: str
    sizes: tuple[int, int]
    is_sliced: bool
    """Whether two Slices take the halves, and not one Split."""


def _read_rotation(rewriter: Rewriter, total: NodeProto) -> _Rotation | None:
    for rotated_name, straight_name in (total.input, reversed(total.input)):
        rotated, straight = rewriter.producer(rotated_name, "Mul"), rewriter.producer(straight_name, "Mul")
        if rotated is None or straight is None:
            continue
        for place, name in enumerate(rotated.input):
            joined = rewriter.producer(name, "Concat")
            rotation = None if joined is None else _read_halves(rewriter, rotated, joined, rotated.input[1 - place])
            if rotation is not None and rotation.data in straight.input:
                return rotation
    return None


def _read_halves(rewriter: Rewriter, rotated: NodeProto, joined: NodeProto, sine: str) -> _Rotation | None:
    turned = rewriter.producer(joined.input[0], "Neg")
    shape, width = rewriter.shape(joined.output[0]), (rewriter.shape(sine) or (None,))[-1]
    is_last = shape is not None and attribute_of(joined, "axis") in (-1, len(shape) - 1)
    if turned is None or len(joined.input) != 2 or not is_last or rewriter.is_shared(joined.output[0]):
        return None
    if rewriter.is_shared(turned.output[0]):
        return None
    first, second = joined.input[1], turned.input[0]
    makers = rewriter.producer(first), rewriter.producer(second)
    if makers[0] is None or makers[1] is None or rewriter.is_shared(first) or rewriter.is_shared(second):
        return None
    data, sizes = makers[0].input[0], (_size(rewriter, first), _size(rewriter, second))
    if sizes[0] is None or sizes[1] is None or makers[1].input[0] != data:
        return None
    if not sizes[0] + sizes[1] == width == _size(rewriter, data):
        return None
    is_sliced = makers[0].op_type == makers[1].op_type == "Slice"
    if is_sliced:
        if _bounds(rewriter, makers[0]) != (0, sizes[0]) or (_bounds(rewriter, makers[1]) or (0,))[0] != sizes[0]:
            return None
    elif makers[0] is not makers[1] or makers[0].op_type != "Split" or list(makers[0].output) != [first, second]:
        return None
    return _Rotation(data, sine, rotated, joined, first, second, (sizes[0], sizes[1]), is_sliced)


def _size(rewriter: Rewriter, name: str) -> int | None:
    size = (rewriter.shape(name) or (None,))[-1]
    return size if isinstance(size, int) else None


def _bounds(rewriter: Rewriter, node: NodeProto) -> tuple[int, int] | None:
    """Where a Slice along the last axis, by steps of 1, begins and ends; None for another one."""
    rank = len(rewriter.shape(node.input[0]) or ())
    numbers = [rewriter.ints(name) for name in (*node.input[1:4], input_of(node, 4)) if name]
    if len(numbers) < 3 or any(found is None or len(found) != 1 for found in numbers):
        return None
    start, end, axis, *step = (found[0] for found in numbers if found)
    return (start, end) if axis in (-1, rank - 1) and step in ([], [1]) else None


def _write(rewriter: Rewriter, rotation: _Rotation, signed: dict[str, str]) -> None:
    first, second = rotation.first, rotation.second
    if rotation.is_sliced:
        sizes = rewriter.constant_of(np.array(rotation.sizes, np.int64), "halves")
        names = [rewriter.free(f"{rotation.data}/{half}") for half in ("first", "second")]
        first, second = rewriter.add_many("Split", [rotation.data, sizes], rotation.joined, names, axis=-1).output
    joined = rewriter.add_copy(rotation.joined, [second, first], rewriter.shape(rotation.joined.output[0]))
    if rotation.sine not in signed:
        signed[rotation.sine] = _signed(rewriter, rotation)
    place = list(rotation.rotated.input).index(rotation.joined.output[0])
    rewriter.set_input(rotation.rotated, place, joined)
    rewriter.set_input(rotation.rotated, 1 - place, signed[rotation.sine])
    rewriter.drop_unread(rotation.joined.output[0])
    rewriter.drop_unread(rotation.sine)


def _signed(rewriter: Rewriter, rotation: _Rotation) -> str:
    """The sines, negative for the half that torch negates."""
    dtype = helper.tensor_dtype_to_np_dtype(rewriter.dtype(rotation.rotated.output[0]))
    sign = np.repeat(np.array([-1, 1], dtype), rotation.sizes[::-1])
    array = rewriter.constant(rotation.sine)
    if array is not None:
        return rewriter.constant_of(array * sign, f"{rotation.sine}_signed")
    name = rewriter.constant_of(sign, "signs")
    return rewriter.add("Mul", [rotation.sine, name], rotation.rotated, rewriter.shape(rotation.sine))
