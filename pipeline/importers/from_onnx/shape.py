"""Ops that only move elements, as calls of torch. Shapes, axes and bounds are known.

The first functions are moves that other families use too: `reshape` and the like add an op and return its result,
`emit_reshape` and the like make output 0. Axes count from the front.

SplitToSequence and SequenceAt with constant places are a split: torch exports GPT-2's q, k, v that way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from pipeline.importers.from_onnx.node import Importer, Node
from pipeline.importers.from_onnx.source import Attributes
from pipeline.ir.graph import Attr, InputRef, TensorSpec

RESHAPE, EXPAND, PERMUTE = (f"aten.{name}.default" for name in ("reshape", "expand", "permute"))

SPLIT, INDEX = "aten.split_with_sizes.default", "aten.index.Tensor"

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
    """Take the positions of a range along an axis. Torch has no negative steps: the range is taken forwards, then
    flipped."""
    if taken == range(sizes[axis]):
        return []
    forwards = (taken if taken.step > 0 else taken[::-1]) or range(0)
    result = (*sizes[:axis], len(taken), *sizes[axis + 1 :])
    call: dict[str, Attr] = {"dim": axis, "start": forwards.start, "end": forwards.stop, "step": forwards.step}
    flip: Move = ("aten.flip.default", (), result, {"dims": (axis,)})
    return [("aten.slice.Tensor", (), result, call), *([flip] if taken.step < 0 and len(taken) > 1 else [])]


def by_places(node: Node, sizes: Sequence[int], axis: int, places: np.ndarray) -> Move:
    """Take constant positions of an axis; the shape of `places` replaces the axis."""
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


def keep_order(node: Node) -> None:
    """Reshape, Flatten, Squeeze and Unsqueeze: the elements stay in order, and the output's shape is known."""
    node.settle_by_shape("axis", "axes", "allowzero", "shape")
    emit_reshape(node, node.operand(0))


def broadcast(node: Node) -> None:
    node.settle_by_shape()
    emit_expand(node, node.operand(0))


def transpose(node: Node) -> None:
    perm = node.attributes.integers("perm") or tuple(reversed(range(node.spec(0).rank)))
    node.emit(PERMUTE, node.operands(0), {"dims": perm})


def split_axis(node: Node) -> None:
    if "" in node.output_names:
        raise node.refusal("one of its outputs has no name")
    node.settle_by_shape("split", "num_outputs")
    axis = node.axis(0)
    sizes = tuple(node.output(index).sizes[axis] for index in range(len(node.output_names)))
    node.emit(SPLIT, node.operands(0), {"split_sizes": sizes, "dim": axis})


def slices(node: Node) -> None:
    """Bounds count from the back where they are negative, and are clamped."""
    starts, ends = node.integers(1, "starts") or (), node.integers(2, "ends") or ()
    axes = node.integers(3, "axes") or tuple(range(len(starts)))
    steps = node.integers(4, "steps") or (1,) * len(starts)
    for name, entries in (("ends", ends), ("axes", axes), ("steps", steps)):
        node.check_length(name, entries, len(starts))
    sizes, moves = list(node.spec(0).sizes), list[Move]()
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        axis %= len(sizes)
        # Unlike numpy, ONNX takes element 0 where a step back starts before it.
        taken = range(sizes[axis])[max(start, -sizes[axis]) : end : step]
        moves += by_range(sizes, axis, taken)
        sizes[axis] = len(taken)
    emit_moves(node, node.operand(0), moves)


def tile(node: Node) -> None:
    repeats = tuple(int(count) for count in node.need_constant(1, "repeats"))
    node.emit("aten.repeat.default", node.operands(0), {"repeats": repeats})


def pad(node: Node, *, mode: str = "constant") -> None:
    """`pads` holds the begins of all axes, then the ends."""
    given, rank = node.integers(1, "pads") or (), node.spec(0).rank
    axes = node.integers(3, "axes") or tuple(range(rank))
    node.check_length("pads", given, 2 * len(axes))
    pads = [0] * (2 * rank)
    for place, axis in enumerate(axes):
        pads[axis % rank], pads[axis % rank + rank] = given[place], given[place + len(axes)]
    if mode not in ("constant", "reflect", "edge", "wrap"):
        raise node.refusal(f"it pads in the mode {mode!r}, expected constant, reflect, edge or wrap")
    sizes = list(node.spec(0).sizes)
    crops = [min(pad, 0) for pad in pads]
    left = [size + begin + end for size, begin, end in zip(sizes, crops, crops[rank:], strict=False)]
    if min(left, default=0) < 0:
        raise node.refusal(f"its pads {list(given)} take away more than the {sizes} elements")
    if mode == "constant":
        emit_moves(node, node.operand(0), [with_constant(sizes, pads, pad_value(node))])
        return
    node.settle_inputs(2)
    node.attributes.settle("value")
    moves = []
    for axis, size in enumerate(left):
        begin, end = max(pads[axis], 0), max(pads[axis + rank], 0)
        if not size and (begin or end):
            raise node.refusal(f"it pads in the mode {mode!r} an axis without elements: {left}")
        if pads[axis] or pads[axis + rank]:
            # The standard does not say so, but onnxruntime pads what negative pads leave.
            places = SOURCES[mode](np.arange(-begin, size + end), size) - crops[axis]
            moves.append(by_places(node, sizes, axis, places))
            sizes[axis] = len(places)
    emit_moves(node, node.operand(0), moves)


def reflect(places: np.ndarray, size: int) -> np.ndarray:
    """A walk back and forth between the first and the last element."""
    places = places % max(2 * (size - 1), 1)
    return np.minimum(places, 2 * (size - 1) - places) if size > 1 else places


def pad_value(node: Node) -> float | int | bool:
    """The fill as an exact number of the tensor's type."""
    if node.has(2):
        return node.need_constant(2, "the value to pad with").item()
    dtype = node.spec(0).dtype
    if "float" in dtype:
        return node.attributes.number("value", 0.0)
    return False if dtype == "bool" else 0


def depth_to_space(node: Node, *, blocksize: int = 0, mode: str = "DCR") -> None:
    (batch, channels, height, width), size = node.spec(0).sizes, blocksize
    inner = channels // (size * size)
    by_column = mode == "CRD"
    apart = (batch, inner, size, size, height, width) if by_column else (batch, size, size, inner, height, width)
    perm = (0, 1, 4, 2, 5, 3) if by_column else (0, 3, 4, 1, 5, 2)
    reshape_and_transpose(node, apart, perm)


def space_to_depth(node: Node, *, blocksize: int = 0) -> None:
    (batch, channels, height, width), size = node.spec(0).sizes, blocksize
    reshape_and_transpose(node, (batch, channels, height // size, size, width // size, size), (0, 3, 5, 1, 2, 4))


def reshape_and_transpose(node: Node, apart: tuple[int, ...], perm: tuple[int, ...]) -> None:
    """Reshape input 0 to `apart`, transpose it by `perm`, and reshape it to the output."""
    emit_reshape(node, permute(node, reshape(node, node.operand(0), apart), perm))


def triangle(node: Node, *, upper: bool = True) -> None:
    offset = int(node.need_constant(1, "the diagonal").item()) if node.has(1) else 0
    rows, columns = node.spec(0).sizes[-2:]
    kept = node.constant_operand((np.triu if upper else np.tril)(np.ones((rows, columns), bool), offset))
    zero = node.constant_operand(np.zeros((), node.spec(0).dtype))
    node.emit("aten.where.self", [kept, node.operand(0), zero])


def constant_of_shape(node: Node) -> None:
    """An expanded element, which takes no memory in the model; small tensors were folded before."""
    node.settle_inputs(0)
    emit_expand(node, node.constant_operand(fill(node.attributes)))


def fill(attributes: Attributes) -> np.ndarray:
    value = attributes.constant()
    return np.zeros((), np.float32) if value is None else value.reshape(())


def split_to_sequence(node: Node) -> None:
    sequence = node.output_names[0]
    node.attributes.settle("axis", "keepdims")  # resolved in `pieces`
    node.settle_inputs(1)
    pieces = node.scope.resolved.sequences[sequence]
    names = [pieces.names.get(place) or node.fresh(f"{sequence}.{place}") for place in range(len(pieces.sizes))]
    squeezed = pieces.parts != pieces.items
    made = split(
        node, node.operand(0), pieces.axis, pieces.sizes, [node.fresh(name) if squeezed else name for name in names]
    )
    for name, item, vid in zip(names, pieces.items, made, strict=True):
        if squeezed:
            (vid,) = node.make(RESHAPE, [vid], [(name, item)], {"shape": item.sizes})
        node.scope.name_value(name, vid)


def sequence_at(node: Node) -> None:
    pieces = node.scope.resolved.sequences[node.input_names[0]]
    node.settle_inputs(0)
    index = range(len(pieces.items))[int(node.need_constant(1, "the place").item())]
    first = pieces.names[index]
    if first != node.output_names[0]:
        node.alias(node.scope.vid(first))


SOURCES: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "reflect": reflect,
    "edge": lambda places, size: places.clip(0, size - 1),
    "wrap": lambda places, size: places % size,
}
"""Mode of Pad -> the place that each element comes from, where the places of the axis go from 0 to the size."""

IMPORTERS: dict[str, Importer] = {
    "Concat": lambda node: node.emit("aten.cat.default", node.operands(), {"dim": node.axis(0)}),
    "ConstantOfShape": constant_of_shape,
    "DepthToSpace": depth_to_space,
    "Expand": broadcast,
    "Flatten": keep_order,
    "Pad": pad,
    "Reshape": keep_order,
    "Slice": slices,
    "SequenceAt": sequence_at,
    "SpaceToDepth": space_to_depth,
    "Split": split_axis,
    "SplitToSequence": split_to_sequence,
    "Squeeze": keep_order,
    "Tile": tile,
    "Transpose": transpose,
    "Trilu": triangle,
    "Unsqueeze": keep_order,
}
