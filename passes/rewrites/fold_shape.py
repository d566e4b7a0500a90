"""Fold the arithmetic of shapes, as far as sizes are fixed: Shape, Gather, Slice, Concat, and sums and products.

Each small value of integers is followed element by element: an element is a number, or the size of an axis of a value.
So a shape of which one size alone is not fixed becomes a constant with a -1, although no tool can fold the node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from math import prod
from typing import Final

import numpy as np
from onnx import NodeProto, TensorProto

from passes.graph.op_facts import attribute_of, domain_of, first_output
from passes.rewrites.rewriter import Array, Rewriter, RewriteStep
from passes.step import PassResult
from passes.suggest import say_count


@dataclass(frozen=True, slots=True)
class FoldShape(RewriteStep, name="fold-shape", reads="structure"):
    """Fold the arithmetic of shapes over the sizes that are fixed. Shapes that are computed from fixed sizes become
    constants; the shape of a Reshape that has one open size becomes a constant with a -1 or a 0."""

    def why_not(self, ops: Set[str]) -> str:
        return "" if ops & {"Shape", "Size"} else "no shape is computed"

    def rewrite(self, rewriter: Rewriter) -> PassResult:
        folder = _ShapeFolder(rewriter)
        folder.fold()
        left = sum(1 for _ in rewriter.by_op("Shape", "Size"))
        said = say_count(folder.folded, "shape", "folded")
        return rewriter.result(said, say_count(left, "shape", "of sizes that are not fixed"))


@dataclass(frozen=True, slots=True)
class OpenSize:
    """A size that is not fixed: a named dim, or else an axis of one value."""

    name: str
    value: str = ""
    axis: int = -1


Element = int | OpenSize
Elements = list[Element]
"""The elements of a value of integers of rank 0 or 1."""

MOST_ELEMENTS: Final = 64


class _ShapeFolder:
    """Follows the values of shapes in one graph, and folds them."""

    def __init__(self, rewriter: Rewriter) -> None:
        self._rewriter = rewriter
        self._known: dict[str, Elements | None] = {}
        self.folded = 0

    def fold(self) -> None:
        for node in self._rewriter.by_op("Reshape"):
            self._fold_reshape(node)
        for node in self._rewriter.nodes:
            if first_output(node) in self._rewriter.producers and self._elements(first_output(node)) is None:
                for name in dict.fromkeys(node.input):
                    self._fold_value(node, name)

    def _fold_value(self, node: NodeProto, name: str) -> None:
        """Let a node that is no shape arithmetic itself read a constant in place of a computed shape."""
        rewriter = self._rewriter
        producer, shape = rewriter.producer(name), rewriter.shape(name)
        elements = self._elements(name) if producer is not None and producer.op_type != "Constant" else None
        if elements is None or shape is None or not all(isinstance(element, int) for element in elements):
            return
        dtype = np.int32 if rewriter.dtype(name) == TensorProto.INT32 else np.int64
        self._read_constant(node, name, np.array(elements if shape else elements[0], dtype))

    def _read_constant(self, node: NodeProto, name: str, array: Array) -> None:
        constant = self._rewriter.constant_of(array, f"{name}/folded")
        for place, read in enumerate(node.input):
            if read == name:
                self._rewriter.set_input(node, place, constant)
        self._rewriter.drop_unread(name)
        self.folded += 1

    def _fold_reshape(self, node: NodeProto) -> None:
        """Write a constant for the computed shape of a Reshape of which one size alone is not known."""
        rewriter = self._rewriter
        name, result = node.input[1], rewriter.shape(node.output[0])
        if name not in rewriter.producers or rewriter.constant(name) is not None or attribute_of(node, "allowzero"):
            return
        elements, own = self._elements(name), self._sizes_of(node.input[0])
        if elements is None:
            elements = None if result is None else self._sizes_of(node.output[0])
        if elements is None:
            return
        shape: list[int] = []
        for axis, element in enumerate(elements):
            known = result[axis] if result is not None and len(result) == len(elements) else None
            if isinstance(element, int):
                shape.append(element)
            elif isinstance(known, int):
                shape.append(known)
            elif own is not None and axis < len(own) and own[axis] == element:
                shape.append(0)
            elif -1 not in elements and -1 not in shape:
                shape.append(-1)
            else:
                return
        self._read_constant(node, name, np.array(shape, np.int64))

    def _elements(self, name: str) -> Elements | None:
        """The elements of a value of integers; None where they are not followed."""
        if name not in self._known:
            self._known[name] = None
            self._known[name] = self._find_elements(name)
        return self._known[name]

    def _find_elements(self, name: str) -> Elements | None:
        rewriter = self._rewriter
        array = rewriter.ints(name)
        if array is not None:
            return list(array) if len(array) <= MOST_ELEMENTS else None
        node = rewriter.producer(name)
        if node is None or domain_of(node) or node.op_type not in FOLLOWED:
            return None
        if node.op_type == "Shape":
            sizes = self._sizes_of(node.input[0])
            bounds = slice(attribute_of(node, "start", 0), attribute_of(node, "end"))
            return None if sizes is None else sizes[bounds]
        if node.op_type == "Size":
            sizes = self._sizes_of(node.input[0])
            fixed = [size for size in sizes or () if isinstance(size, int)]
            return [prod(fixed)] if sizes is not None and len(fixed) == len(sizes) else None
        if node.op_type == "Cast" and attribute_of(node, "to") not in (TensorProto.INT64, TensorProto.INT32):
            return None
        shape = rewriter.shape(name)
        if shape is None or len(shape) > 1:
            return None
        inputs = [self._elements(read) if read else None for read in node.input]
        if inputs[0] is None:
            return None
        return FOLLOWED[node.op_type](node, inputs)

    def _sizes_of(self, name: str) -> Elements | None:
        shape = self._rewriter.shape(name)
        if shape is None:
            return None
        return [
            dim if isinstance(dim, int) else OpenSize(dim) if dim else OpenSize("", name, axis)
            for axis, dim in enumerate(shape)
        ]


Inputs = Sequence[Elements | None]


def _same(node: NodeProto, inputs: Inputs) -> Elements | None:
    return inputs[0]


def _gather(node: NodeProto, inputs: Inputs) -> Elements | None:
    data, places = inputs
    chosen = [place for place in places or () if isinstance(place, int)]
    if data is None or places is None or len(chosen) < len(places):
        return None
    return [data[place] for place in chosen] if all(-len(data) <= place < len(data) for place in chosen) else None


def _concat(node: NodeProto, inputs: Inputs) -> Elements | None:
    return None if None in inputs else [element for part in inputs for element in part or ()]


def _slice(node: NodeProto, inputs: Inputs) -> Elements | None:
    data = inputs[0]
    if len(inputs) < 3:  # before opset 10 the bounds are attributes
        return None
    bounds = [part[0] if part else None for part in (inputs[1], inputs[2], inputs[4] if len(inputs) > 4 else [1])]
    if data is None or not all(isinstance(bound, int) for bound in bounds):
        return None
    start, end, step = (bound for bound in bounds if isinstance(bound, int))
    return data[slice(start, end, step)] if step > 0 else None


def _calculate(function: Callable[[int, int], int]) -> Callable[[NodeProto, Inputs], Elements | None]:
    def apply(node: NodeProto, inputs: Inputs) -> Elements | None:
        left, right = inputs
        if not left or not right or (len(left) != len(right) and min(len(left), len(right)) > 1):
            return None
        count = max(len(left), len(right))
        results: Elements = []
        for first, second in zip(left * (count // len(left)), right * (count // len(right)), strict=True):
            if isinstance(first, int) and isinstance(second, int):
                if node.op_type == "Div" and (second <= 0 or first < 0):
                    return None
                results.append(function(first, second))
            elif second == NEUTRAL[node.op_type]:
                results.append(first)
            else:
                return None
        return results

    return apply


NEUTRAL: Final = {"Add": 0, "Sub": 0, "Mul": 1, "Div": 1}
"""Operator → the right operand that leaves the left one as it is."""

FOLLOWED: Final[Mapping[str, Callable[[NodeProto, Inputs], Elements | None]]] = {
    **dict.fromkeys(("Shape", "Size", "Identity", "Cast", "Squeeze", "Unsqueeze", "Reshape"), _same),
    "Gather": _gather,
    "Concat": _concat,
    "Slice": _slice,
    "Add": _calculate(lambda left, right: left + right),
    "Sub": _calculate(lambda left, right: left - right),
    "Mul": _calculate(lambda left, right: left * right),
    "Div": _calculate(lambda left, right: left // right),
}
"""Operator of shape arithmetic → the elements of its result from those of its inputs."""
