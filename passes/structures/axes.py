"""Follow one axis of a value back through the nodes that make it: which axis of which input was it?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Final

from onnx import NodeProto, helper

from passes.structures.view import GraphView

__all__ = ["carried_inputs", "inputs_with_axis"]

Dims = Sequence[int | str]


def carried_inputs(node: NodeProto) -> list[str]:
    """The inputs that carry data on, without those that only say how: shapes, indices, conditions, scales."""
    places = CARRIED.get(node.op_type)
    names = node.input if places is None else [node.input[at] for at in places if at < len(node.input)]
    return [name for name in names if name]


def inputs_with_axis(view: GraphView, node: NodeProto, axis: int | None) -> Iterator[tuple[str, int | None]]:
    """The inputs that carry data on, each with the axis in it that is the `axis` of what `node` makes.

    Axes are counted from the end: -1 is the last. None: it is not known, before the node or behind it.
    """
    rule = RULES.get(node.op_type)
    for name in carried_inputs(node):
        yield name, axis if axis is None or rule is None else rule(view, node, name, axis)


def _through_transpose(view: GraphView, node: NodeProto, name: str, axis: int) -> int | None:
    perm = _setting(node, "perm")
    dims = view.dims(name)
    rank = len(perm) if perm else len(dims) if dims is not None else None
    if rank is None or -axis > rank:
        return None
    order = perm or list(range(rank))[::-1]
    return order[axis] - rank


def _through_squeeze(view: GraphView, node: NodeProto, name: str, axis: int) -> int | None:
    before, after = view.dims(name), view.dims(node.output[0])
    axes = _axes(view, node)
    if before is None or after is None:
        return axis if axes and all(-axis < -one for one in axes if one < 0) and min(axes) < 0 else None
    inserted = node.op_type == "Unsqueeze"
    longer, shorter = (len(after), len(before)) if inserted else (len(before), len(after))
    gone = {one % longer for one in axes} if axes else {at for at, dim in enumerate(before) if dim == 1}
    stay = [at for at in range(longer) if at not in gone]
    if len(stay) != shorter:
        return None
    if not inserted:
        return stay[axis] - longer
    return stay.index(axis % longer) - shorter if axis % longer in stay else None


def _through_reshape(view: GraphView, node: NodeProto, name: str, axis: int) -> int | None:
    before, after = view.dims(name), view.dims(node.output[0])
    return _aligned(before, after, axis) if before is not None and after is not None else None


def _aligned(before: Dims, after: Dims, axis: int) -> int | None:
    """The axis of `before` that an `axis` of `after` is, or is a part of; the last of several that it is made of."""
    most = min(len(before), len(after))
    front = next((at for at in range(most) if before[at] != after[at] or before[at] == ""), most)
    most -= front
    back = next((at for at in range(most) if before[-1 - at] != after[-1 - at] or before[-1 - at] == ""), most)
    at = len(after) + axis
    if at < 0:
        return None
    if at < front:
        return at - len(before)
    if -axis <= back:
        return axis
    olds, news = before[front : len(before) - back], after[front : len(after) - back]
    if not olds:
        return None
    found = _in_groups(olds, news, at - front)
    return None if found is None else front + found - len(before)


def _in_groups(olds: Dims, news: Dims, at: int) -> int | None:
    """The place in `olds` that a place in `news` belongs to; sizes that are not known are taken for one group."""
    if len(olds) == 1:
        return 0
    if not all(isinstance(dim, int) for dim in (*olds, *news)):
        return len(olds) - 1 if at == len(news) - 1 else None
    sizes = [int(dim) for dim in olds]
    start = prod(int(dim) for dim in news[:at])
    end = start * int(news[at])
    reached, found = 1, None
    for place, size in enumerate(sizes):
        if size > 1 and reached < end and reached * size > start:
            found = place  # its elements are counted within this axis
        reached *= size
    return found


def _through_gather(view: GraphView, node: NodeProto, name: str, axis: int) -> int | None:
    """A Gather puts the axes of its indices in the place of the one that it gathers along."""
    data, indices, after = view.dims(name), view.dims(node.input[1]), view.dims(node.output[0])
    if data is None or indices is None or after is None:
        return axis if (_setting(node, "axis") or 0) == 0 else None
    along = (_setting(node, "axis") or 0) % len(data)
    at = len(after) + axis
    if at < along:
        return at - len(data)
    return axis if at >= along + len(indices) else along - len(data)


def _same_rank(view: GraphView, node: NodeProto, name: str, axis: int) -> int | None:
    """A broadcast input may have fewer axes."""
    dims = view.dims(name)
    return axis if dims is None or -axis <= len(dims) else None


def _axes(view: GraphView, node: NodeProto) -> list[int]:
    given = _setting(node, "axes")
    if given:
        return given
    numbers = view.numbers(node.input[1]) if len(node.input) > 1 and node.input[1] else None
    return [] if numbers is None else [int(number) for number in numbers]


def _setting(node: NodeProto, name: str):
    return next((helper.get_attribute_value(one) for one in node.attribute if one.name == name), None)


CARRIED: Final[Mapping[str, tuple[int, ...]]] = {
    **dict.fromkeys(("CastLike", "Reshape", "Expand", "Slice", "Gather", "Tile", "Squeeze", "Unsqueeze"), (0,)),
    **dict.fromkeys(("Split", "SplitToSequence", "SequenceAt", "GatherElements", "GatherND", "Pad", "Clip"), (0,)),
    **dict.fromkeys(("QuantizeLinear", "DequantizeLinear", "Dropout", "RotaryEmbedding", "PRelu", "Trilu"), (0,)),
    **dict.fromkeys((f"{name}Normalization" for name in ("Batch", "Layer", "RMS", "SimplifiedLayer")), (0,)),
    **dict.fromkeys((f"{name}Normalization" for name in ("Group", "Instance", "Lp")), (0,)),
    **dict.fromkeys(("ScatterElements", "ScatterND"), (0, 2)),
    "Where": (1, 2),
}
"""Op → the places of the inputs that carry data, where these are not all of them."""

RULES: Final[Mapping[str, Callable[[GraphView, NodeProto, str, int], int | None]]] = {
    "Transpose": _through_transpose,
    "Squeeze": _through_squeeze,
    "Unsqueeze": _through_squeeze,
    "Reshape": _through_reshape,
    "Flatten": _through_reshape,
    "Gather": _through_gather,
    **dict.fromkeys(("Add", "Sub", "Mul", "Div", "Where", "Pow", "Min", "Max", "Expand"), _same_rank),
    "SequenceAt": lambda *_: None,
}
"""Op → its rule; other ops leave the axis where it is."""
