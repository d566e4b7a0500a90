"""The pass `compounds`: several ops for which torch has one operator, as exporters write them out.

x * 1 / sqrt(mean(x²) + epsilon) * weight    aten.rms_norm
x * sigmoid(x)                               aten.silu
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.ir.graph import Graph, Op
from pipeline.lowering.fusion.op_patterns import constant_number
from pipeline.lowering.fusion.pointwise import is_float32
from pipeline.lowering.fusion.rewrite import Rewrite, only_user, producer


def join_compounds(graph: Graph) -> Graph:
    """`graph` with one op for each compound in float32; in half precision the ops would round, and one operator not."""
    rewrite = Rewrite(graph)
    for op in graph.ops:
        if not is_float32(graph, op):
            continue
        norm, gated = _find_norm(graph, op), _find_silu(graph, op)
        if norm is not None:
            over = graph.values[norm.x].spec.sizes[-1:]
            weights = [] if norm.weight is None else [norm.weight]
            attrs = {"normalized_shape": over, "eps": norm.epsilon}
            rewrite.replace(norm.last, "aten.rms_norm.default", [norm.x, *weights], norm.last.outputs, attrs)
        elif gated is not None:
            rewrite.replace(op, "aten.silu.default", [gated], op.outputs, {})
    return rewrite.build()


@dataclass(frozen=True, slots=True)
class RootMeanSquare:
    """A normalisation of the last axis of `x` by the root of its mean square."""

    x: int
    weight: int | None
    epsilon: float
    last: Op
    """The op that makes the result."""


def _find_norm(graph: Graph, op: Op) -> RootMeanSquare | None:
    """The normalisation of which `op` is the product of x and the factor of its row, or the quotient by the root."""
    for x, root in _factors(graph, op):
        epsilon = _epsilon_of(graph, x, root)
        if epsilon is not None and graph.values[op.outputs[0]].spec == graph.values[x].spec:
            after = only_user(graph, op.outputs[0])
            weight = None if after is None else _weight_of(graph, op, after)
            return RootMeanSquare(x, weight, epsilon, op if after is None or weight is None else after)
    return None


def _factors(graph: Graph, op: Op) -> Iterator[tuple[int, int]]:
    """x and s for each way to read `op` as x * 1 / sqrt(s)."""
    if op.kind == "aten.div.Tensor" and len(op.inputs) == 2:
        divisor = _only_producer(graph, op.inputs[1])
        if divisor is not None and divisor.kind == "aten.sqrt.default":
            yield op.inputs[0], divisor.inputs[0]
    if op.kind != "aten.mul.Tensor" or len(op.inputs) != 2:
        return
    for x, factor in (op.inputs, op.inputs[::-1]):
        made = _only_producer(graph, factor)
        if made is not None and made.kind == "aten.reciprocal.default":
            inner = _only_producer(graph, made.inputs[0])
            if inner is not None and inner.kind == "aten.sqrt.default":
                yield x, inner.inputs[0]
        elif made is not None and (made.kind == "aten.rsqrt.default" or _is_power(made, -0.5)):
            yield x, made.inputs[0]


def _epsilon_of(graph: Graph, x: int, vid: int) -> float | None:
    """The number that `vid` adds to the mean of the squares of `x` over the last axis; None where it is no such sum."""
    total = _only_producer(graph, vid)
    if total is None or total.kind != "aten.add.Tensor" or total.attrs.get("alpha", 1) != 1:
        return None
    averaged, epsilon = _split_number(graph, total)
    mean, spec = _only_producer(graph, averaged), graph.values[x].spec
    if mean is None or mean.kind != "aten.mean.dim" or epsilon is None or not spec.rank:
        return None
    is_of_rows = mean.attrs.get("dim") in ((-1,), (spec.rank - 1,)) and mean.attrs.get("keepdim") is True
    square = producer(graph, mean.inputs[0])
    if not spec.is_static or not is_of_rows or mean.attrs.get("dtype") is not None or square is None:
        return None
    is_square = _is_power(square, 2) or (square.kind == "aten.mul.Tensor" and len(square.inputs) == 2)
    return epsilon if is_square and set(square.inputs) == {x} else None


def _split_number(graph: Graph, total: Op) -> tuple[int, float | None]:
    """A summand, and the number that is added to it; None for a sum of two values that change."""
    if len(total.inputs) == 1:
        other = total.attrs.get("other")
        return total.inputs[0], float(other) if isinstance(other, int | float) else None
    for value, other in (total.inputs, total.inputs[::-1]):
        number = constant_number(graph, other)
        if number is not None:
            return value, float(number)
    return total.inputs[0], None


def _is_power(op: Op, exponent: float) -> bool:
    return op.kind == "aten.pow.Tensor_Scalar" and op.attrs.get("exponent") == exponent


def _weight_of(graph: Graph, op: Op, after: Op) -> int | None:
    """What `after` multiplies the result of `op` with, where it has a number for each column."""
    if after.kind != "aten.mul.Tensor" or len(after.inputs) != 2 or not is_float32(graph, after):
        return None
    (other,) = (vid for vid in after.inputs if vid != op.outputs[0])
    columns = graph.values[op.outputs[0]].spec.shape[-1:]
    return other if graph.values[other].spec.shape == columns else None


def _find_silu(graph: Graph, op: Op) -> int | None:
    """The x of which `op` is the product with its sigmoid."""
    if op.kind != "aten.mul.Tensor" or len(op.inputs) != 2:
        return None
    for x, factor in (op.inputs, op.inputs[::-1]):
        gate = _only_producer(graph, factor)
        if gate is not None and gate.kind == "aten.sigmoid.default" and gate.inputs == (x,):
            return x
    return None


def _only_producer(graph: Graph, vid: int) -> Op | None:
    """The op that makes `vid`, where one op alone reads it."""
    return producer(graph, vid) if only_user(graph, vid) is not None else None
