"""Ops that move elements without reading their numbers. Shapes, axes and bounds are attributes, never inputs.

SplitToSequence and SequenceAt with constant places are a Split: torch exports GPT-2's q, k, v that way.
"""

from __future__ import annotations

import numpy as np

from pipeline.importers.from_onnx.attributes import Attributes
from pipeline.importers.from_onnx.node import Importer, Node, direct, read_axis
from pipeline.ir.graph import Attr, TensorSpec


def reshape(node: Node) -> None:
    """Reshape, Flatten, Squeeze and Unsqueeze: the elements stay in order, and the output's shape is known."""
    node.settle_by_shape("axis", "axes", "allowzero", "shape")
    node.emit("Reshape", node.operands(0), {"shape": node.output().sizes})


def expand(node: Node) -> None:
    node.settle_by_shape()
    node.emit("Expand", node.operands(0), {"shape": node.output().sizes})


def transpose(node: Node) -> None:
    perm = node.attributes.integers("perm") or tuple(reversed(range(node.spec(0).rank)))
    node.emit("Transpose", node.operands(0), {"perm": perm})


def split(node: Node) -> None:
    if "" in node.output_names:
        raise node.refusal("one of its outputs has no name")
    node.settle_by_shape("split", "num_outputs")
    axis = node.axis(0)
    sizes = tuple(node.output(index).sizes[axis] for index in range(len(node.output_names)))
    node.emit("Split", node.operands(0), {"axis": axis, "sizes": sizes})


def slices(node: Node) -> None:
    """Bounds are clamped. They keep ONNX's meaning: a negative one counts from the back."""
    starts, ends = node.integers(1, "starts") or (), node.integers(2, "ends") or ()
    axes = node.integers(3, "axes") or tuple(range(len(starts)))
    steps = node.integers(4, "steps") or (1,) * len(starts)
    for name, entries in (("ends", ends), ("axes", axes), ("steps", steps)):
        node.check_length(name, entries, len(starts))
    sizes = node.spec(0).sizes
    axes = tuple(axis % len(sizes) for axis in axes)
    clamped = [
        bounds(sizes[axis], start, end, step) for axis, start, end, step in zip(axes, starts, ends, steps, strict=True)
    ]
    attrs: dict[str, Attr] = {
        "starts": tuple(start for start, _ in clamped),
        "ends": tuple(end for _, end in clamped),
        "axes": axes,
        "steps": steps,
    }
    node.emit("Slice", node.operands(0), attrs)


def bounds(size: int, start: int, end: int, step: int) -> tuple[int, int]:
    """Start and end in 0..size; the end past element 0 is -size-1, since -1 would be the last element."""
    start, end, _ = slice(start, end, step).indices(size)
    if step > 0:
        return start, max(start, end)
    start = max(start, 0)  # unlike numpy, ONNX takes element 0 when the start is before it
    end = min(start, end)
    return start, end if end >= 0 else -size - 1


def tile(node: Node) -> None:
    repeats = tuple(int(count) for count in node.need_constant(1, "repeats"))
    node.emit("Tile", node.operands(0), {"repeats": repeats})


def pad(node: Node) -> None:
    """`pads` holds the begins of all axes, then the ends."""
    given, rank = node.integers(1, "pads") or (), node.spec(0).rank
    axes = node.integers(3, "axes") or tuple(range(rank))
    node.check_length("pads", given, 2 * len(axes))
    pads = [0] * (2 * rank)
    for place, axis in enumerate(axes):
        pads[axis % rank], pads[axis % rank + rank] = given[place], given[place + len(axes)]
    mode = node.attributes.text("mode", "constant")
    if mode not in ("constant", "reflect", "edge", "wrap"):
        raise node.refusal(f"it pads in the mode {mode!r}, expected constant, reflect, edge or wrap")
    crops = [min(pads[axis], 0) + min(pads[axis + rank], 0) for axis in range(rank)]
    left = [size + crop for size, crop in zip(node.spec(0).sizes, crops, strict=True)]
    if min(left, default=0) < 0:
        raise node.refusal(f"its pads {list(given)} take away more than the {list(node.spec(0).sizes)} elements")
    if mode == "constant":
        attrs: dict[str, Attr] = {"pads": tuple(pads), "mode": mode, "value": pad_value(node)}
        node.emit("Pad", node.operands(0), attrs)
        return
    node.settle_inputs(2)
    vid = crop(node, pads, left) if any(crops) else node.operand(0)
    pads = [max(pad, 0) for pad in pads]
    if any(size == 0 and (pads[axis] or pads[axis + rank]) for axis, size in enumerate(left)):
        raise node.refusal(f"it pads in the mode {mode!r} an axis without elements: {left}")
    if mode == "wrap":
        pad_around(node, vid, pads)
    else:
        node.emit("Pad", [vid], {"pads": tuple(pads), "mode": mode, "value": pad_value(node)})


def crop(node: Node, pads: list[int], left: list[int]) -> int:
    """Input 0 without what negative pads take away; the standard does not say so, but onnxruntime pads what is left."""
    starts = tuple(max(-begin, 0) for begin in pads[: len(left)])
    attrs: dict[str, Attr] = {
        "starts": starts,
        "ends": tuple(start + size for start, size in zip(starts, left, strict=True)),
        "axes": tuple(range(len(left))),
        "steps": (1,) * len(left),
    }
    return node.step("Slice", node.operands(0), TensorSpec(tuple(left), node.spec(0).dtype), attrs)


def pad_around(node: Node, vid: int, pads: list[int]) -> None:
    """Each axis goes on from its other end: it is gathered at places modulo its size."""
    spec = node.vid_spec(vid)
    sizes = list(spec.sizes)
    for axis, size in enumerate(spec.sizes):
        begin, end = pads[axis], pads[axis + spec.rank]
        if begin or end:
            places = np.arange(-begin, size + end) % size
            sizes[axis] = len(places)
            indices = node.constant_operand(places)
            vid = node.step("Gather", [vid, indices], TensorSpec(tuple(sizes), spec.dtype), {"axis": axis})
    node.emit("Identity", [vid])


def pad_value(node: Node) -> float | int | bool:
    """The fill as an exact number of the tensor's type."""
    if node.has(2):
        return node.need_constant(2, "the value to pad with").item()
    dtype = node.spec(0).dtype
    if "float" in dtype:
        return node.attributes.number("value", 0.0)
    return False if dtype == "bool" else 0


def depth_to_space(node: Node) -> None:
    read = node.attributes
    batch, channels, height, width = node.spec(0).sizes
    size = read.integer("blocksize")
    inner = channels // (size * size)
    by_column = read.text("mode", "DCR") == "CRD"
    apart = (batch, inner, size, size, height, width) if by_column else (batch, size, size, inner, height, width)
    perm = (0, 1, 4, 2, 5, 3) if by_column else (0, 3, 4, 1, 5, 2)
    reshape_and_transpose(node, apart, perm)


def space_to_depth(node: Node) -> None:
    batch, channels, height, width = node.spec(0).sizes
    size = node.attributes.integer("blocksize")
    reshape_and_transpose(node, (batch, channels, height // size, size, width // size, size), (0, 3, 5, 1, 2, 4))


def reshape_and_transpose(node: Node, apart: tuple[int, ...], perm: tuple[int, ...]) -> None:
    """Reshape input 0 to `apart`, transpose it by `perm`, and reshape it to the output."""
    dtype = node.spec(0).dtype
    vid = node.step("Reshape", node.operands(0), TensorSpec(apart, dtype), {"shape": apart})
    turned = TensorSpec(tuple(apart[axis] for axis in perm), dtype)
    vid = node.step("Transpose", [vid], turned, {"perm": perm})
    node.emit("Reshape", [vid], {"shape": node.output().sizes})


def triangle(node: Node) -> None:
    offset = int(node.need_constant(1, "the diagonal").item()) if node.has(1) else 0
    rows, columns = node.spec(0).sizes[-2:]
    upper = node.attributes.flag("upper", True)
    kept = node.constant_operand((np.triu if upper else np.tril)(np.ones((rows, columns), bool), offset))
    zero = node.constant_operand(np.zeros((), node.spec(0).dtype))
    node.emit("aten.where.self", [kept, node.operand(0), zero])


def constant_of_shape(node: Node) -> None:
    """An expanded element, which takes no memory in the model; small tensors were folded before."""
    node.settle_inputs(0)
    node.emit("Expand", [node.constant_operand(fill(node.attributes))], {"shape": node.output().sizes})


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
    outputs = [(node.fresh(name) if squeezed else name, part) for name, part in zip(names, pieces.parts, strict=True)]
    made = node.make("Split", [node.operand(0)], outputs, {"axis": pieces.axis, "sizes": pieces.sizes})
    for name, item, vid in zip(names, pieces.items, made, strict=True):
        if squeezed:
            (vid,) = node.make("Reshape", [vid], [(name, item)], {"shape": item.sizes})
        node.scope.bind(name, vid)


def sequence_at(node: Node) -> None:
    pieces = node.scope.resolved.sequences[node.input_names[0]]
    node.settle_inputs(0)
    index = range(len(pieces.items))[int(node.need_constant(1, "the place").item())]
    first = pieces.names[index]
    if first != node.output_names[0]:
        node.alias(node.scope.vid(first))


IMPORTERS: dict[str, Importer] = {
    "Concat": direct(axis=read_axis(0)),
    "ConstantOfShape": constant_of_shape,
    "DepthToSpace": depth_to_space,
    "Expand": expand,
    "Flatten": reshape,
    "Pad": pad,
    "Reshape": reshape,
    "Slice": slices,
    "SequenceAt": sequence_at,
    "SpaceToDepth": space_to_depth,
    "Split": split,
    "SplitToSequence": split_to_sequence,
    "Squeeze": reshape,
    "Tile": tile,
    "Transpose": transpose,
    "Trilu": triangle,
    "Unsqueeze": reshape,
}
