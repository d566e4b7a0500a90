"""Remove the guard that torch writes after a softmax, `Where(IsNaN(p), 0, p)`, where no row can be NaN.

Softmax makes NaN of a row that is masked whole: a row of -inf alone. Whether there can be one follows from how the mask
is computed: a causal mask lets each query see the first key, a mask of finite numbers hides nothing whole, and a mask
that is an input of the model may hide anything.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np
from onnx import NodeProto, TensorProto

from passes.graph.op_facts import LAYOUT_OPS, PRODUCTS, SAME_OPS, attribute_of, input_of, op_of
from passes.rewrites.rewriter import Array, Rewriter, RewriteStep, is_float
from passes.step import PassResult
from passes.suggest import say_count, say_left


@dataclass(frozen=True, slots=True)
class DropSoftmaxGuard(RewriteStep, name="drop-softmax-guard", reads="values"):
    """Remove IsNaN and Where after a Softmax where no row can be masked whole."""

    def why_not(self, ops: Set[str]) -> str:
        return "" if "IsNaN" in ops else "no guard follows a softmax"

    def rewrite(self, rewriter: Rewriter) -> PassResult:
        scores, dropped, left = ScoreRanges(rewriter), 0, list[str]()
        for node in rewriter.by_op("Where"):
            softmax = _guarded_softmax(rewriter, node)
            if softmax is None:
                continue
            reason = scores.why_masked_whole(softmax)
            if reason:
                left.append(f"{softmax.name or softmax.output[0]}: {reason}")
            else:
                rewriter.replace(node.output[0], node.input[2])
                dropped += 1
        said = say_count(dropped, "guard", "removed")
        return rewriter.result(said, say_left(left, "guard"), default="no guard follows a softmax")


def _guarded_softmax(rewriter: Rewriter, guard: NodeProto) -> NodeProto | None:
    """The Softmax whose NaN a Where replaces by a constant, perhaps with a Cast or a Dropout between."""
    test = rewriter.producer(guard.input[0], "IsNaN")
    if test is None or test.input[0] != guard.input[2] or rewriter.constant(guard.input[1]) is None:
        return None
    name = guard.input[2]
    while (node := rewriter.producer(name, *SAME_OPS)) is not None and node.output[0] == name:
        name = node.input[0]
    return rewriter.producer(name, "Softmax")


class Range(IntEnum):
    """What a row of a value may contain, along its last axis; a sum has the larger one of two."""

    FINITE = 0
    LARGE = 1
    """Finite numbers that mask, such as the lowest of the dtype: the sum of two of them may be -inf."""
    OPEN = 2
    """-inf, but not in all places of a row."""
    ANY = 3


Found = tuple[Range, str]
"""The range, and for `ANY` the reason."""


class ScoreRanges:
    """What the operands of Softmaxes may contain, judged by the operators that compute them."""

    def __init__(self, rewriter: Rewriter, largest: float | None = None) -> None:
        """`largest` takes the place of `TO_LARGE`, where a narrower dtype follows."""
        self._rewriter, self._largest = rewriter, largest
        self._known: dict[str, Found] = {}

    def why_masked_whole(self, softmax: NodeProto) -> str:
        """Why a row may be masked whole; empty if none can be."""
        rank = len(self._rewriter.shape(softmax.input[0]) or ())
        kind, reason = self._range_of(softmax.input[0])
        is_last = self._rewriter.opset < 13 or attribute_of(softmax, "axis", -1) in (-1, rank - 1)
        if kind is Range.OPEN and not is_last:
            return "its rows are not along the last axis"
        return reason

    def _range_of(self, name: str) -> Found:
        if name not in self._known:
            self._known[name] = Range.ANY, f"{name} depends on itself"
            self._known[name] = self._find_range(name)
        return self._known[name]

    def _find_range(self, name: str) -> Found:
        array = self._rewriter.constant(name)
        if array is not None:
            return _range_of_constant(array, name, self._largest)
        node = self._rewriter.producer(name)
        if node is None:
            return Range.ANY, f"what it is masked with comes from {name}, which may mask a row whole"
        op = op_of(node)
        if op == "Clip":
            return self._of_bounded(node)
        if op in BOUNDED:
            return Range.FINITE, ""
        if op in KEEPING:
            return self._of_moved(node)
        if op == "Where":
            return self._of_choice(node)
        if op in SUMS:
            return self._of_sum(node)
        if op in FINITE_OF_FINITE and all(self._range_of(read)[0] is Range.FINITE for read in node.input if read):
            divisor = self._rewriter.constant(node.input[1]) if op == "Div" else np.ones(1)
            if divisor is not None and divisor.all():
                return Range.FINITE, ""
        if op == "Trilu":
            return self._of_triangle(node)
        return Range.ANY, f"{op} {name} may make a row of -inf"

    def _of_bounded(self, node: NodeProto) -> Found:
        """Of a Clip: its least value, where that is finite; else what it reads."""
        low = self._rewriter.constant(input_of(node, 1))
        given = np.array(attribute_of(node, "min", -np.inf), np.float32) if low is None else low
        kind, reason = _range_of_constant(given, node.output[0])
        return self._range_of(node.input[0]) if kind > Range.LARGE else (kind, reason)

    def _of_sum(self, node: NodeProto) -> Found:
        found = [self._range_of(name) for name in node.input]
        if op_of(node) == "Sub" and found[1][0] > Range.LARGE:
            return Range.ANY, f"{node.output[0]} subtracts an infinite mask"
        worst = max(found)
        is_narrow = self._rewriter.dtype(node.output[0]) == TensorProto.FLOAT16
        masks = sum(kind is not Range.FINITE for kind, _ in found)
        if worst[0] is Range.ANY or masks == 0 or (masks == 1 and not (is_narrow and worst[0] is Range.LARGE)):
            return worst
        return (
            Range.ANY,
            f"{node.output[0]} adds {'masks that together' if masks > 1 else 'a mask that'} may reach -inf",
        )

    def _of_moved(self, node: NodeProto) -> Found:
        """What a node moves or converts: finite elements stay finite, and rows stay rows if the last axis does."""
        sources = node.input if node.op_type == "Concat" else node.input[:1]
        narrows = self._rewriter.dtype(node.input[0]) != self._rewriter.dtype(node.output[0]) == TensorProto.FLOAT16
        ranges = ScoreRanges(self._rewriter, LARGE_IN_HALF) if narrows else self
        worst = max(ranges._range_of(name) for name in sources)
        if worst[0] is Range.FINITE or worst[0] is Range.ANY:
            return worst
        if worst[0] is Range.LARGE:
            fits = node.op_type not in ("Cast", "CastLike") or self._rewriter.dtype(node.output[0]) in WIDE
            return worst if fits else (Range.ANY, f"{node.output[0]} rounds a mask to -inf")
        if _keeps_rows(self._rewriter, node):
            return worst
        return Range.ANY, f"{op_of(node)} {node.output[0]} cuts the rows of a mask"

    def _of_choice(self, node: NodeProto) -> Found:
        """Of a Where: finite in one place of each row is enough, if the condition chooses that place."""
        chosen = [self._range_of(name) for name in node.input[1:]]
        if max(chosen)[0] is not Range.ANY:
            return max(chosen)
        for truth, (kind, _), other in ((True, chosen[0], node.input[2]), (False, chosen[1], node.input[1])):
            array = self._rewriter.constant(other)
            if kind > Range.LARGE or array is None or not _is_mask(array):
                continue
            if self._has_in_every_row(node.input[0], truth):
                return Range.OPEN, ""
            return Range.ANY, f"its mask is chosen by {node.input[0]}, which may mask a row whole"
        return max(chosen)

    def _of_triangle(self, node: NodeProto) -> Found:
        """Of the upper triangle above the diagonal alone: the first column is zero."""
        array, offset = self._rewriter.constant(node.input[0]), self._offset_of(node)
        if array is not None and _is_mask(array) and attribute_of(node, "upper", 1) and (offset or 0) >= 1:
            return Range.OPEN, ""
        kind, reason = self._range_of(node.input[0])
        return (kind, reason) if kind <= Range.LARGE else (Range.ANY, reason or f"Trilu {node.output[0]} cuts its rows")

    def _offset_of(self, node: NodeProto) -> int | None:
        """Which diagonal a Trilu begins at; None if that is computed."""
        name = input_of(node, 1)
        found = self._rewriter.ints(name) if name else [0]
        return found[0] if found else None

    def _has_in_every_row(self, condition: str, truth: bool) -> bool:
        """Whether every row of a boolean has an element that is `truth`."""
        array = self._rewriter.constant(condition)
        if array is not None:
            return array.ndim > 0 and bool((array.astype(bool) == truth).any(axis=-1).all())
        node = self._rewriter.producer(condition)
        if node is None:
            return False
        op = op_of(node)
        if op == "Not":
            return self._has_in_every_row(node.input[0], not truth)
        if op in KEEPING and op != "Concat" and _keeps_rows(self._rewriter, node):
            return self._has_in_every_row(node.input[0], truth)
        if op in ("Or" if truth else "And"):
            return any(self._has_in_every_row(name, truth) for name in node.input)
        if op == "Trilu" and truth and not attribute_of(node, "upper", 1):
            ones = self._rewriter.constant(node.input[0])
            offset = self._offset_of(node)
            return ones is not None and bool(ones.all()) and offset is not None and offset >= 0
        return op in COMPARISONS and truth and self._is_causal(*(node.input[place] for place in COMPARISONS[op]))

    def _is_causal(self, keys: str, queries: str) -> bool:
        """Whether positions of keys along the last axis begin with 0, and no position of a query is below 0."""
        across, down = self._rewriter.shape(keys), self._rewriter.shape(queries)
        if not across or not down or down[-1] != 1 or any(size != 1 for size in across[:-1]):
            return False
        first = self._first_position(queries)
        return self._first_position(keys) == 0 and first is not None and first >= 0

    def _first_position(self, name: str) -> float | None:
        """The least of positions that a Range with a known start counts; None for other values."""
        array = self._rewriter.constant(name)
        if array is not None:
            return float(array.min()) if array.size else None
        while (node := self._rewriter.producer(name, *LAYOUT_OPS, "Cast", "Expand")) is not None:
            name = node.input[0]
        node = self._rewriter.producer(name, "Range")
        start = None if node is None else self._rewriter.constant(node.input[0])
        step = None if node is None else self._rewriter.constant(node.input[2])
        return float(start) if start is not None and step is not None and step > 0 else None


def _keeps_rows(rewriter: Rewriter, node: NodeProto) -> bool:
    """Whether each row of the result, along the last axis, is a row of the first input."""
    before, after = rewriter.shape(node.input[0]), rewriter.shape(node.output[0])
    if not before or not after or before[-1] != after[-1] or before[-1] in (None, 1):
        return False
    if node.op_type == "Transpose":
        return list(attribute_of(node, "perm", ()))[-1:] == [len(before) - 1]
    if node.op_type == "Gather":
        return attribute_of(node, "axis", 0) not in (-1, len(before) - 1)
    return True


def _range_of_constant(array: Array, name: str, largest: float | None = None) -> Found:
    if not is_float(array):
        return Range.FINITE, ""
    wide = array.astype(np.float64)
    if np.isnan(wide).any() or (wide == np.inf).any():
        return Range.ANY, f"{name} has elements that are NaN or +inf"
    if np.isinf(wide).any():
        has_open_rows = wide.ndim > 0 and np.isfinite(wide).any(axis=-1).all()
        return (Range.OPEN, "") if has_open_rows else (Range.ANY, f"{name} masks a row whole")
    largest = largest or TO_LARGE.get(array.dtype.name, 1e18)
    if not wide.size or np.abs(wide).max() <= largest:
        return Range.FINITE, ""
    # In half precision a sum with a large number may be -inf, but not the sum with its neighbour.
    is_open = largest == LARGE_IN_HALF and wide.ndim and wide.max() <= largest
    return (Range.OPEN if is_open and (wide >= -largest).any(axis=-1).all() else Range.LARGE), ""


def _is_mask(array: Array) -> bool:
    """Whether the elements are finite or -inf."""
    wide = array.astype(np.float64) if is_float(array) else np.zeros(1)
    return not np.isnan(wide).any() and not (wide == np.inf).any()


LARGE_IN_HALF: Final = 1e4

TO_LARGE: Final = {"float16": LARGE_IN_HALF}
"""The absolute value above which a number masks; 1e18 in the other dtypes, whose product with itself is finite."""

WIDE: Final = (TensorProto.DOUBLE,)
"""Dtypes that have every finite number of the others: the lowest float32 is -inf as bfloat16."""

BOUNDED: Final = PRODUCTS | {
    *("Einsum", "Softmax", "Tanh", "Sigmoid", "Erf", "Sin", "Cos", "HardSigmoid", "Shape", "Size"),
    *("LayerNormalization", "RMSNormalization", "GroupNormalization", "InstanceNormalization", "BatchNormalization"),
}
"""Operators whose results are no masks: products and norms of hidden states, and curves with bounds."""

FINITE_OF_FINITE: Final = frozenset({"Mul", "Neg", "Relu", "Max", "Min", "Abs", "Gelu", "Div"})

SUMS: Final = ("Add", "Sub")

KEEPING: Final = LAYOUT_OPS | SAME_OPS | {"Expand", "Slice", "Gather", "Concat", "Tile"}

COMPARISONS: Final = {"LessOrEqual": (0, 1), "GreaterOrEqual": (1, 0)}
"""A comparison that is true where a key is no later than a query → the positions of keys and queries."""
