"""Know a structure by the values that it computes, whichever operators compute them.

A sample has a few elements for one or two values of a graph. What the graph makes of these values is computed by numpy
and compared with what a structure would make of them: `x / √(mean(x²) + ε)` in any spelling has the same elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from onnx import NodeProto

from passes.graph.op_facts import RESHAPES, SAME_OPS, SIZES, op_of
from passes.structures.view import GraphView
from passes.weights.stand_ins import Array

Axes = Callable[[NodeProto], bool]
"""Returns whether a reduction is over the axes that the last axis of a sample stands for."""


@dataclass(slots=True)
class Sample:
    """Elements of the values that are computed from the values in `known` and from numbers alone.

    Args:
        view: the index of the graph.
        known: value → its elements; all of these arrays can be broadcast to one shape.
        through: operators that the computation passes over, since each element stays what it is.
        reduces: for a sample whose last axis stands for the `size` elements that a norm reduces. A sum is then `size`
            times the mean, and a stored weight is a one.
        size: of the reduced axes; also what the graph itself computes from sizes.
    """

    view: GraphView
    known: Mapping[str, Array]
    through: frozenset[str] = SAME_OPS
    reduces: Axes | None = None
    size: int = 1
    missing: dict[str, None] = field(default_factory=dict)
    """The values at which the computation stopped: not known, and made by an operator that is not in `FUNCTIONS`, or
    with a stored weight."""
    _values: dict[str, Array | None] = field(default_factory=dict)
    _reads: dict[str, list[str]] = field(default_factory=dict)

    def of(self, name: str) -> Array | None:
        """The elements of a value; None if it depends on a value that is not known."""
        name = self._origin(name)
        if name in self.known:
            return self.known[name]
        if name not in self._values:
            self._values[name] = None  # until it is computed
            if len(self._values) < MOST_VALUES:
                with np.errstate(all="ignore"):
                    self._values[name] = self._compute(name)
        return self._values[name]

    def nodes_of(self, name: str) -> tuple[NodeProto, ...]:
        """The nodes that make a value of the known values, in the order of the computation, without those of
        `through`."""
        found: dict[str, None] = {}

        def visit(value: str) -> None:
            if value in self._reads and value not in found:
                for read in self._reads[value]:
                    visit(read)
                found[value] = None

        visit(self._origin(name))
        return tuple(self.view.producers[value] for value in found)

    def _origin(self, name: str) -> str:
        while name not in self.known:
            node, before = self.view.producers.get(name), self.view.before_pair(name)
            if node is not None and node.op_type in self.through and node.output[0] == name:
                before = node.input[0]
            if before is None:
                break
            name = before
        return name

    def _compute(self, name: str) -> Array | None:
        view, is_norm = self.view, self.reduces is not None
        number = view.scalar(name)
        if number is not None:
            return np.array(number)
        if is_norm and _is_size(view, name):
            return np.array(float(self.size))
        if is_norm and name in view.folded and not _is_single(view, name):
            return np.array(_factor_of(view, name))
        node = view.producers.get(name)
        op = "" if node is None else op_of(node)
        is_reduction = self.reduces is not None and node is not None and op in REDUCTIONS and self.reduces(node)
        if name in view.folded and op not in FUNCTIONS:
            return None
        reads = [] if node is None else [self._origin(read) for read in node.input[: 1 if is_reduction else None]]
        fixed = [read for read in reads if read in view.folded and read not in self.known]
        if not (op in FUNCTIONS or is_reduction) or any(read and self.of(read) is None for read in fixed):
            self.missing[name] = None
            return None
        arrays = [self.of(read) if read else None for read in reads]
        if any(array is None and read for array, read in zip(arrays, reads, strict=True)):
            return None
        if any(read in self.known or read in self._reads for read in reads):
            self._reads[name] = reads
        return REDUCTIONS[op](arrays[0], self.size) if is_reduction else FUNCTIONS[op](*arrays)


def candidates_before(view: GraphView, name: str, through: frozenset[str]) -> Iterator[str]:
    """The computed values that `name` may be a function of, nearest first, `name` itself among them."""
    names = [name, *(read for node in view.upstream(name, through) for read in node.input if read)]
    return (value for value in dict.fromkeys(map(view.source, names)) if value not in view.folded)


def _is_size(view: GraphView, name: str) -> bool:
    """Whether a value is computed from sizes alone."""
    ops = {node.op_type for node in view.upstream(name, COUNTING)}
    return bool(ops & SIZES) and ops <= COUNTING | SIZES


def _is_single(view: GraphView, name: str) -> bool:
    dims = view.dims(name)
    return dims is not None and math.prod(size if isinstance(size, int) else 0 for size in dims) == 1


def _factor_of(view: GraphView, name: str) -> float:
    """The number that a stored weight is multiplied by before data meets it."""
    node = view.producers.get(view.source(name))
    for read in node.input if node is not None and node.op_type in ("Mul", "Div") else ():
        number = view.scalar(read)
        if node is not None and number:
            factor = _factor_of(view, view.other_operand(node, view.source(read)))
            return factor * number if node.op_type == "Mul" else factor / number
    return 1.0


def _mean(x: Array) -> Array:
    return x.mean(-1, keepdims=True)


def _erf(x: Array) -> Array:
    return np.vectorize(math.erf, otypes=[np.float64])(x)


def gelu(x: Array) -> Array:
    """GELU of floats, by Erf."""
    return x * (1 + _erf(x / math.sqrt(2))) / 2


def quick_gelu(x: Array) -> Array:
    """The approximation of GELU by Sigmoid, of floats."""
    return x * _sigmoid(1.702 * x)


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def _clip(x: Array, low: Array | None = None, high: Array | None = None) -> Array:
    return np.clip(x, -math.inf if low is None else low, math.inf if high is None else high)


FUNCTIONS: Final[Mapping[str, Callable[..., Array]]] = {
    **{"Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": np.divide, "Pow": np.power, "Neg": np.negative},
    **{
        "Max": np.maximum,
        "Min": np.minimum,
        "Clip": _clip,
        "Abs": np.abs,
        "Sqrt": np.sqrt,
        "Reciprocal": np.reciprocal,
    },
    **{"Exp": np.exp, "Tanh": np.tanh, "Erf": _erf, "Sigmoid": _sigmoid},
    **dict.fromkeys(("Gelu", "com.microsoft.Gelu", "com.microsoft.FastGelu"), gelu),
    **{"Swish": lambda x: x * _sigmoid(x), "com.microsoft.QuickGelu": quick_gelu},
}
"""Operator → what it computes, element by element."""

REDUCTIONS: Final[Mapping[str, Callable[..., Array]]] = {
    "ReduceMean": lambda x, _: _mean(x),
    "ReduceSum": lambda x, size: _mean(x) * size,
    "ReduceSumSquare": lambda x, size: _mean(x * x) * size,
    "ReduceL2": lambda x, size: np.sqrt(_mean(x * x) * size),
}
"""Operator → what it computes of the last axis of a sample, which stands for `size` elements."""

COUNTING: Final = SAME_OPS | RESHAPES | {"Gather", "Slice", "ReduceProd", "Mul", "Concat", "Constant"}
"""Operators that may be between the Shape of a value and the number of elements that a mean divides by."""

MOST_VALUES: Final = 40
"""The most values that one sample computes."""
