"""Trace an axis of a value back to the inputs of its node: through products of two operands, and other nodes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod
from string import ascii_letters
from typing import Final, Literal

from onnx import NodeProto

from passes.graph.op_facts import CONTRIB_FACTORS, FACTORS, attribute_of, op_of
from passes.structures.view import GraphView, carried_inputs

Side = Literal[0, 1]
"""The left or the right operand."""


@dataclass(frozen=True, slots=True)
class Product:
    """`node` multiplies two operands; each axis has a letter, as in Einsum.

    Axes that a term does not list come before its letters, and are the same in all terms. Axes are counted from the
    end: -1 is the last.
    """

    node: NodeProto
    operands: tuple[str, str]
    terms: tuple[str, str]
    out: str

    @property
    def value(self) -> str:
        return self.node.output[0]

    def contracted_axis(self, side: Side) -> int | None:
        """The axis of an operand that is summed over."""
        both = [letter for letter in self.terms[0] if letter in self.terms[1] and letter not in self.out]
        return _axis_of(self.terms[side], both[-1]) if both else None

    def free_axis(self, side: Side) -> int | None:
        """The axis of an operand that the result has and the other operand has not; the last of several."""
        other = self.terms[1 - side]
        alone = [letter for letter in self.terms[side] if letter not in other and letter in self.out]
        return _axis_of(self.terms[side], alone[-1]) if alone else None

    def sources(self, axis: int | None) -> tuple[tuple[Side, int | None], ...]:
        """The operands that have the `axis` of the result, each with its axis there; both if that is not known.

        An axis of both operands is a batch axis.
        """
        if axis is None:
            return ((0, None), (1, None))
        if -axis > len(self.out):
            return ((0, axis), (1, axis))
        letter = self.out[axis]
        found: list[tuple[Side, int | None]] = []
        for side in SIDES:
            if letter in self.terms[side]:
                found.append((side, _axis_of(self.terms[side], letter)))
        return tuple(found)


def product_of(view: GraphView, node: NodeProto) -> Product | None:
    """`node` as a product of two operands; None if it is something else, or sums over the axes of more of them."""
    positions = OPERAND_POSITIONS.get(op_of(node))
    if positions is None or len(node.input) <= max(positions):
        return None
    operands = (node.input[positions[0]], node.input[positions[1]])
    if not all(operands):
        return None
    if node.op_type == "Einsum":
        return _einsum(node)
    if "Conv" in node.op_type:
        dims = view.dims(operands[1])
        if dims is None or not 3 <= len(dims) <= 5:
            return None
        positions_out = "xyz"[: len(dims) - 2]
        return Product(node, operands, (f"bc{positions_out}", f"oc{'uvw'[: len(positions_out)]}"), f"bo{positions_out}")
    left = "km" if attribute_of(node, "transA") else "mk"
    right = "nk" if attribute_of(node, "transB") else "kn"
    return Product(node, operands, (left, "nkz" if node.op_type == "MatMulNBits" else right), "mn")


def is_join(view: GraphView, product: Product) -> bool:
    """Whether both operands are computed. A product with a constant is a projection, or mixes heads."""
    return view.folded.isdisjoint(product.operands)


def join_of(view: GraphView, node: NodeProto) -> Product | None:
    """`node` as a product of two computed operands.

    It may also be a Mul with a sum after it, or a Mul of a column and a row, as a recurrence adds to its state.
    """
    product = product_of(view, node) or _summed_mul(view, node) or _outer_mul(view, node)
    return product if product is not None and is_join(view, product) else None


def _summed_mul(view: GraphView, node: NodeProto) -> Product | None:
    mul = view.find_producer(node.input[0], "Mul") if node.op_type == "ReduceSum" else None
    terms, axes = (None, []) if mul is None else (_broadcast_terms(view, mul), axes_of(view, node))
    if mul is None or terms is None or not axes:
        return None
    summed = {axis % len(terms[2]) for axis in axes}
    gap = "=" if attribute_of(node, "keepdims", 1) else ""
    out = "".join(gap if at in summed else letter for at, letter in enumerate(terms[2]))
    return Product(node, (mul.input[0], mul.input[1]), terms[:2], out)


def _outer_mul(view: GraphView, node: NodeProto) -> Product | None:
    terms = _broadcast_terms(view, node) if op_of(node) == "Mul" else None
    if terms is None or "+" not in terms[0] or "-" not in terms[1] or view.find_consumers(node.output[0], "ReduceSum"):
        return None  # a sum after it is the product
    return Product(node, (node.input[0], node.input[1]), terms[:2], terms[2])


def _broadcast_terms(view: GraphView, mul: NodeProto) -> tuple[str, str, str] | None:
    """A letter for each axis of two operands of one rank and of their product; `+` or `-` for an axis of an operand
    that is broadcast."""
    left, right = (view.dims(name) for name in mul.input)
    if left is None or right is None or len(left) != len(right) or mul.input[0] == mul.input[1]:
        return None
    letters = ascii_letters[: len(left)]
    pairs = list(zip(letters, left, right, strict=True))
    first = "".join("+" if size == 1 != second_size else letter for letter, size, second_size in pairs)
    second = "".join("-" if second_size == 1 != size else letter for letter, size, second_size in pairs)
    return first, second, letters


def _einsum(node: NodeProto) -> Product | None:
    """The two operands of an Einsum that share an axis which is summed over; others are factors (linear attention)."""
    sides, arrow, out = re.sub(r"\s", "", attribute_of(node, "equation").decode()).partition("->")
    if not arrow:
        letters = sides.replace(".", "").replace(",", "")
        out = "".join(sorted(letter for letter in letters if letters.count(letter) == 1))
    # Letters before an ellipsis have unknown positions; products of heads have none.
    *terms, result = (term.rpartition("...")[2] for term in (*sides.split(","), out))
    pairs = [
        (left, right)
        for left, right in combinations(range(len(terms)), 2)
        if len(terms) == 2 or set(terms[left]).intersection(terms[right]).difference(result)
    ]
    if len(pairs) != 1 or len(terms) != len(node.input):
        return None
    (left, right) = pairs[0]
    return Product(node, (node.input[left], node.input[right]), (terms[left], terms[right]), result)


def _axis_of(term: str, letter: str) -> int:
    return term.rindex(letter) - len(term)


SIDES: Final[tuple[Side, Side]] = (0, 1)

OPERAND_POSITIONS: Final = {**FACTORS, **{f"com.microsoft.{name}": pair for name, pair in CONTRIB_FACTORS.items()}}
"""Op → the positions of its two operands among its inputs."""


Dims = Sequence[int | str]


def inputs_with_axis(view: GraphView, node: NodeProto, axis: int | None) -> Iterator[tuple[str, int | None]]:
    """The inputs that carry data on, each with the axis there that becomes the `axis` of the output of `node`.

    Axes are counted from the end: -1 is the last. None: the axis is not known, in the output or in the input.
    """
    rule = RULES.get(node.op_type)
    for name in carried_inputs(node):
        if axis is None or rule is None:
            yield name, axis
        elif rule is not _same_rank or not _is_broadcast(view, node, name, axis):
            yield name, rule(view, node, name, axis)


def _is_broadcast(view: GraphView, node: NodeProto, name: str, axis: int) -> bool:
    """Whether an operand has a single element along the `axis` of the result, as the gate of a head has: it does not
    make that axis."""
    before, after = view.dims(name), view.dims(node.output[0])
    if before is None or after is None or -axis > len(after) or after[axis] == 1:
        return False
    return -axis > len(before) or before[axis] == 1


def _through_transpose(view: GraphView, node: NodeProto, name: str, axis: int) -> int | None:
    perm = attribute_of(node, "perm")
    dims = view.dims(name)
    rank = len(perm) if perm else len(dims) if dims is not None else None
    if rank is None or -axis > rank:
        return None
    order = perm or list(range(rank))[::-1]
    return order[axis] - rank


def _through_squeeze(view: GraphView, node: NodeProto, name: str, axis: int) -> int | None:
    before, after = view.dims(name), view.dims(node.output[0])
    axes = axes_of(view, node)
    if before is None or after is None:
        return axis if axes and all(-axis < -own for own in axes if own < 0) and min(axes) < 0 else None
    if -axis > len(after):  # of a value with more axes, whose rank was not known on the way
        return None
    inserted = node.op_type == "Unsqueeze"
    longer, shorter = (len(after), len(before)) if inserted else (len(before), len(after))
    gone = {own % longer for own in axes} if axes else {at for at, dim in enumerate(before) if dim == 1}
    stay = [at for at in range(longer) if at not in gone]
    if len(stay) != shorter:
        return None
    if not inserted:
        return stay[axis] - longer
    return stay.index(axis % longer) - shorter if axis % longer in stay else None


def _through_reshape(view: GraphView, node: NodeProto, name: str, axis: int) -> int | None:
    before, after = view.dims(name), view.dims(node.output[0])
    return _align(before, after, axis) if before is not None and after is not None else None


def _align(before: Dims, after: Dims, axis: int) -> int | None:
    """The axis of `before` that an `axis` of `after` equals or is a part of; the last of several that it merges."""
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
    """The position in `olds` that a position in `news` belongs to; with unknown sizes all are one group."""
    if len(olds) == 1:
        return 0
    if not all(isinstance(dim, int) for dim in (*olds, *news)):
        return len(olds) - 1 if at == len(news) - 1 else None
    sizes = [int(dim) for dim in olds]
    start = prod(int(dim) for dim in news[:at])
    end = start * int(news[at])
    reached, found = 1, None
    for old, size in enumerate(sizes):
        if reached < end and reached * size > start:
            found = old  # the elements of this axis vary within the new one
        reached *= size
    return found


def _through_gather(view: GraphView, node: NodeProto, name: str, axis: int) -> int | None:
    """A Gather repositions the axis that it gathers along by the axes of its indices."""
    data, indices, after = view.dims(name), view.dims(node.input[1]), view.dims(node.output[0])
    if data is None or indices is None or after is None:
        return axis if (attribute_of(node, "axis") or 0) == 0 else None
    along = (attribute_of(node, "axis") or 0) % len(data)
    at = len(after) + axis
    if at < along:
        return at - len(data)
    return axis if at >= along + len(indices) else along - len(data)


def _through_gather_nd(view: GraphView, node: NodeProto, name: str, axis: int) -> int | None:
    """A GatherND keeps the last axes; what its indices choose is not followed."""
    data, indices = view.dims(name), view.dims(node.input[1])
    if data is None or indices is None or not isinstance(indices[-1], int):
        return None
    kept = len(data) - indices[-1] - attribute_of(node, "batch_dims", 0)
    return axis if -axis <= kept else None


def _through_reduction(view: GraphView, node: NodeProto, name: str, axis: int) -> int | None:
    """A reduction keeps the other axes; over positions it pools, as Hiera does with those of Q."""
    dims, axes = view.dims(name), axes_of(view, node)
    if dims is None or not axes:
        return None
    if attribute_of(node, "keepdims", 1):
        return axis
    stay = [at for at in range(len(dims)) if at not in {own % len(dims) for own in axes}]
    return stay[axis] - len(dims) if -axis <= len(stay) else None


def _same_rank(view: GraphView, node: NodeProto, name: str, axis: int) -> int | None:
    """A broadcast input may have fewer axes."""
    dims = view.dims(name)
    return axis if dims is None or -axis <= len(dims) else None


def axes_of(view: GraphView, node: NodeProto) -> list[int]:
    """The attribute or the constant input `axes` of a node; empty if there is none."""
    given = attribute_of(node, "axes")
    if given:
        return list(given)
    axes = view.small_constant(node.input[1]) if len(node.input) > 1 and node.input[1] else None
    return [] if axes is None else [int(axis) for axis in axes]


RULES: Final[Mapping[str, Callable[[GraphView, NodeProto, str, int], int | None]]] = {
    "Transpose": _through_transpose,
    "Squeeze": _through_squeeze,
    "Unsqueeze": _through_squeeze,
    "Reshape": _through_reshape,
    "Flatten": _through_reshape,
    "Gather": _through_gather,
    "GatherND": _through_gather_nd,
    "ReduceMax": _through_reduction,
    **dict.fromkeys(("Add", "Sub", "Mul", "Div", "Where", "Pow", "Min", "Max", "Expand"), _same_rank),
    "SequenceAt": lambda *_: None,
}
"""Op → its rule; other ops keep the axis."""
