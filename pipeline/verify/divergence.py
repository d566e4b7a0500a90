"""Where two backends part: both walk over one model on the same inputs, and each value is compared when both have it.

The order is that of the first backend. So whatever the first divergent value was computed from agrees, and the call
that makes it is where to look.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from passes.proof.numbers import DRAWN, STEPS, Errors, Tolerance, compare, least_precise
from pipeline.ir import Graph, Op, Value
from pipeline.ops.aten import HIGHER_ORDER, is_call
from pipeline.verify.backends import Backend, Feeds, shapes_of


@dataclass(frozen=True, slots=True)
class ValueStatistics:
    """Least, largest, mean and standard deviation of the finite elements, and how many are NaN or infinite."""

    elements: int
    least: float
    largest: float
    mean: float
    deviation: float
    nan: int
    infinite: int

    @classmethod
    def of(cls, array: np.ndarray) -> ValueStatistics:
        if array.dtype.kind == "c":
            array = np.abs(array)
        numbers = array.astype(np.float64).ravel()
        finite = numbers[np.isfinite(numbers)]
        nan = int(np.isnan(numbers).sum())
        least, largest, mean, deviation = 0.0, 0.0, 0.0, 0.0
        if finite.size:
            least, largest = float(finite.min()), float(finite.max())
            scale = max(abs(least), abs(largest)) or 1.0  # sums and squares of the largest numbers are beyond float64
            mean, deviation = scale * float((finite / scale).mean()), scale * float((finite / scale).std())
        return cls(numbers.size, least, largest, mean, deviation, nan, numbers.size - finite.size - nan)


@dataclass(frozen=True, slots=True)
class InputValue:
    """A value that the divergent call reads. `largest_difference` is None for what both backends were given."""

    name: str
    role: str
    type: str
    statistics: ValueStatistics | None
    """As the first backend has it; None where it was not computed as a value of its own."""
    largest_difference: float | None = None


@dataclass(frozen=True, slots=True)
class ElementPair:
    """The element that differs most."""

    index: tuple[int, ...]
    first: str
    second: str


@dataclass(frozen=True, slots=True)
class Divergence:
    """A value that two backends compute too differently."""

    value: str
    type: str
    kind: str
    """Of the op that makes the value."""
    node: str
    """The name of the op in the source; may be empty."""
    line: str
    """The torch module and line that it came from, where they are known."""
    inputs: tuple[InputValue, ...]
    first: ValueStatistics
    second: ValueStatistics
    errors: Errors
    worst: ElementPair | None
    """None where the shapes differ, or there is no element."""


@dataclass(frozen=True, slots=True)
class BackendComparison:
    """What two walks found. `only_first` and `only_second` are values that one backend alone computes by itself."""

    compared: int
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    divergences: tuple[Divergence, ...]
    worst: tuple[str, float]
    """The value that comes nearest to its limit without reaching it, and the share of the limit."""


def compare_backends(
    first: Backend,
    second: Backend,
    graph: Graph,
    feeds: Feeds,
    tolerances: Mapping[str, Tolerance] | None = None,
    *,
    first_only: bool = False,
) -> BackendComparison:
    """Compare each value that both backends compute on `feeds`; with `first_only` stop at the first divergent one.

    Args:
        graph: of the model, for the names and the inputs of the ops.
        tolerances: by dtype, in place of the documented ones.

    Raises:
        Unsupported: a backend cannot take the model as a whole.
        StepFailed: onnxruntime fails on it.
    """
    shapes = shapes_of(feeds)
    names, others = (backend.value_names(shapes) for backend in (first, second))
    common = frozenset(names) & frozenset(others)
    ops = {graph.values[vid].name: op for op in graph.ops for vid in op.outputs}
    types = _computed_types(graph)
    seen: dict[str, tuple[ValueStatistics, float]] = {}
    divergences: list[Divergence] = []
    nearest = ("", 0.0)
    for name, left, right in _pairs(first, second, feeds, common):
        errors = compare(left, right, tolerances, types.get(name, ""))
        seen[name] = ValueStatistics.of(left), errors.max_abs
        if errors.ok:
            nearest = max(nearest, (name, errors.excess), key=lambda pair: pair[1])
            continue
        op = ops.get(name)
        inputs = _inputs(graph, op, feeds, seen) if op is not None else ()
        divergences.append(_describe(name, op, inputs, left, right, errors))
        if first_only:
            break
    return BackendComparison(
        len(seen),
        tuple(name for name in names if name not in common),
        tuple(name for name in others if name not in common),
        tuple(divergences),
        nearest,
    )


def _pairs(
    first: Backend, second: Backend, feeds: Feeds, common: Collection[str]
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Each common value with both results, in the order of `first`; what `second` has early waits for it."""
    ahead: dict[str, np.ndarray] = {}
    others = second.walk(feeds, common)
    for name, result in first.walk(feeds, common):
        while name not in ahead:
            ahead.update([next(others)])
        yield name, result, ahead.pop(name)


def _computed_types(graph: Graph) -> dict[str, str]:
    """For each value the least precise floating type in which something on its way was computed, or `DRAWN`.

    Weights and inputs that are stored in a type do not count. Integers and bools are equal or wrong, so what is
    made of them starts anew.
    """
    types: dict[str, str] = {}
    for op in graph.ops:
        before = [types.get(graph.values[vid].name, "") for vid in op.inputs]
        for vid in op.outputs:
            value = graph.values[vid]
            if DRAWN in before or _draws(op):
                types[value.name] = DRAWN
            elif "float" in value.spec.dtype or "complex" in value.spec.dtype:
                types[value.name] = least_precise(value.spec.dtype, *before)
            elif value.spec.dtype in STEPS and any(before):
                types[value.name] = least_precise(STEPS[value.spec.dtype], *before)
            elif value.spec.dtype != "bool" and not STEP_NAMES.isdisjoint(before):
                types[value.name] = least_precise(*before)
    return types


STEP_NAMES: Final = frozenset(STEPS.values())


def _draws(op: Op) -> bool:
    if not is_call(op.kind) or op.kind.startswith(HIGHER_ORDER):
        return False
    import torch

    from pipeline.runtime.operators import find_operator

    return torch.Tag.nondeterministic_seeded in find_operator(op.kind).tags


def _inputs(
    graph: Graph, op: Op, feeds: Feeds, seen: Mapping[str, tuple[ValueStatistics, float]]
) -> tuple[InputValue, ...]:
    return tuple(_input(graph, graph.values[vid], feeds, seen) for vid in dict.fromkeys(op.inputs))


def _input(graph: Graph, value: Value, feeds: Feeds, seen: Mapping[str, tuple[ValueStatistics, float]]) -> InputValue:
    dtype = f"{value.spec.dtype}{list(value.spec.shape)}"
    if value.name in seen:
        return InputValue(value.name, str(value.role), dtype, *seen[value.name])
    array = feeds.get(value.name)
    if array is None and value.vid in graph.payloads:
        array = graph.payloads[value.vid].numpy()
    return InputValue(value.name, str(value.role), dtype, None if array is None else ValueStatistics.of(array))


def _describe(
    name: str, op: Op | None, inputs: tuple[InputValue, ...], left: np.ndarray, right: np.ndarray, errors: Errors
) -> Divergence:
    line = ", ".join(filter(None, (op.origin, op.line))) if op is not None else ""
    return Divergence(
        name,
        f"{left.dtype}{list(left.shape)}",
        op.operator if op is not None else "",
        op.name if op is not None else "",
        line,
        inputs,
        ValueStatistics.of(left),
        ValueStatistics.of(right),
        errors,
        _worst_element(left, right) if left.shape == right.shape and left.size else None,
    )


def _worst_element(first: np.ndarray, second: np.ndarray) -> ElementPair:
    """Where the difference is largest; an element that is NaN or infinite on one side only comes before all others."""
    if first.dtype.kind in "iu" and second.dtype.kind in "iu":  # float64 does not tell large neighbours apart
        left, right = first.astype(object), second.astype(object)
        index = tuple(map(int, np.unravel_index(int(np.abs(left - right).argmax()), first.shape)))
        return ElementPair(index, str(first[index]), str(second[index]))
    kind = np.complex128 if "c" in (first.dtype.kind, second.dtype.kind) else np.float64
    left, right = first.astype(kind), second.astype(kind)
    with np.errstate(invalid="ignore", over="ignore"):
        difference = np.abs(left - right)
    same = (left == right) | (np.isnan(left) & np.isnan(right))
    difference = np.where(same, 0.0, np.where(np.isnan(difference), np.inf, difference))
    index = tuple(map(int, np.unravel_index(int(difference.argmax()), difference.shape)))
    return ElementPair(index, str(first[index]), str(second[index]))
