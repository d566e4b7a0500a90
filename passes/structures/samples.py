"""Recognize a structure by the values that it computes, whatever operators compute them.

A sample has a few elements for one or two values of a graph. What the graph makes of these values is computed by numpy
and compared with what a structure would make of them: `x / √(mean(x²) + ε)` in any spelling has the same elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from itertools import chain
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
        layout: operators that may move what a reduction has left, and weights, but not the known elements.
        reduces: for a sample whose last axis stands for the `size` elements that a norm reduces. A sum is then `size`
            times the mean, and a stored weight has `weigh` of its name for elements.
        size: of the reduced axes; also what the graph itself computes from sizes.
        weigh: name of a stored weight → its elements.
    """

    view: GraphView
    known: Mapping[str, Array]
    layout: frozenset[str] = frozenset()
    reduces: Axes | None = None
    size: int = 1
    weigh: Callable[[str], Array] = lambda _: np.ones(())
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
        `layout`."""
        found: dict[str, None] = {}

        def visit(value: str) -> None:
            if value in self._reads and value not in found:
                for read in self._reads[value]:
                    visit(read)
                found[value] = None

        visit(self._origin(name))
        nodes = (self.view.producers[value] for value in found)
        return tuple(node for node in nodes if node.op_type not in self.layout)

    def _origin(self, name: str) -> str:
        while name not in self.known:
            node, before = self.view.producers.get(name), self.view.before_pair(name)
            ops = SAME_OPS | self.layout if name in self.view.folded else SAME_OPS
            if node is not None and node.op_type in ops and node.output[0] == name:
                before = node.input[0]
            if before is None:
                break
            name = before
        return name

    def _compute(self, name: str) -> Array | None:
        view, is_norm = self.view, self.reduces is not None
        if is_norm and name not in view.folded and self._is_before(name):
            return np.array(float(self.size)) if is_size(view, name) else None
        number = view.scalar(name)
        if number is not None:
            return np.array(number)
        if is_norm and is_size(view, name):
            return np.array(float(self.size))
        if is_norm and name in view.folded and not _is_single(view, name):
            return self._weight(name)
        node = view.producers.get(name)
        op = "" if node is None else op_of(node)
        is_reduction = self.reduces is not None and node is not None and op in REDUCTIONS and self.reduces(node)
        if name in view.folded and op not in FUNCTIONS:
            return None
        is_layout = op in self.layout
        read_first = is_reduction or is_layout or op in BIASED_CURVES
        reads = [] if node is None else [self._origin(read) for read in node.input[: 1 if read_first else None]]
        fixed = [read for read in reads if read in view.folded and read not in self.known]
        if not (op in FUNCTIONS or is_reduction or is_layout) or any(read and self.of(read) is None for read in fixed):
            self.missing[name] = None
            return None
        arrays = [self.of(read) if read else None for read in reads]
        if any(array is None and read for array, read in zip(arrays, reads, strict=True)):
            return None
        first = arrays[0]
        if is_layout and (first is None or (first.ndim and first.shape[-1] != 1)):
            return None
        if any(read in self.known or read in self._reads for read in reads):
            self._reads[name] = reads
        if is_layout:
            return first
        return REDUCTIONS[op](first, self.size) if is_reduction else FUNCTIONS[op](*arrays)

    def _is_before(self, name: str) -> bool:
        """Whether a value is computed before all that is known, and so from none of it."""
        return self.view.positions.get(name, -1) < min(self.view.positions.get(known, -1) for known in self.known)

    def _weight(self, name: str) -> Array:
        """The elements of a stored weight, times the number that it is multiplied by before data meets it. A count of
        the reduced elements is no weight, though it may be stored for each channel."""
        values = self.view.small_constant(name)
        if (
            values is not None
            and values.size
            and (values == values[0]).all()
            and values[0] in (self.size, self.size - 1)
        ):
            return np.array(float(values[0]))
        node = self.view.producers.get(name)
        for read in node.input if node is not None and node.op_type in ("Mul", "Div") else ():
            number = self.view.scalar(read)
            if node is not None and number:
                other = self._weight(self._origin(self.view.other_operand(node, read)))
                return other * number if node.op_type == "Mul" else other / number
        return self.weigh(name)


def candidates_before(view: GraphView, name: str, through: frozenset[str]) -> Iterator[str]:
    """The computed values that `name` may be a function of, nearest first, `name` itself among them."""
    seen: set[str] = set()
    for read in chain([name], (read for node in view.upstream(name, through) for read in node.input if read)):
        value = view.source(read)
        if value not in seen and value not in view.folded:
            seen.add(value)
            yield value


def is_size(view: GraphView, name: str) -> bool:
    """Whether a value is computed from sizes alone."""
    node = view.producers.get(name)
    if node is None or node.op_type not in COUNTING | SIZES:
        return False
    ops = {node.op_type for node in view.upstream(name, COUNTING)}
    return bool(ops & SIZES) and ops <= COUNTING | SIZES


def _is_single(view: GraphView, name: str) -> bool:
    """Whether a value is known to have one element."""
    dims = view.dims(name)
    return dims is not None and math.prod(size if isinstance(size, int) else 0 for size in dims) == 1


def _mean(x: Array) -> Array:
    return x.mean(-1, keepdims=True) if x.ndim else x


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
    least, most = (-math.inf if low is None else low), (math.inf if high is None else high)
    return np.clip(x, least, np.where(most < LARGEST_HALF, most, math.inf))


FUNCTIONS: Final[Mapping[str, Callable[..., Array]]] = {
    **{"Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": np.divide, "Pow": np.power, "Neg": np.negative},
    **{
        "Max": lambda *arrays: reduce(np.maximum, arrays),
        "Min": lambda *arrays: reduce(np.minimum, arrays),
        "Clip": _clip,
        "Abs": np.abs,
        "Sqrt": np.sqrt,
        "Reciprocal": np.reciprocal,
    },
    **{"Exp": np.exp, "Tanh": np.tanh, "Erf": _erf, "Sigmoid": _sigmoid},
    **dict.fromkeys(("Gelu", *(f"com.microsoft.{name}" for name in ("Gelu", "FastGelu", "BiasGelu"))), gelu),
    **{"Swish": lambda x: x * _sigmoid(x), "com.microsoft.QuickGelu": quick_gelu},
}
"""Operator → what it computes, element by element."""

LARGEST_HALF: Final = 65504.0
"""The largest number of float16: as a bound it only prevents infinity, which float64 has no need of."""

BIASED_CURVES: Final = frozenset({"com.microsoft.BiasGelu", "com.microsoft.FastGelu"})
"""Curves of the sum of their first input and a bias: for a sample, their first input is that sum."""

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
