"""The precision of values: the least precise floating type that each was computed in, whose tolerance applies to it;
and what a half type does to the values of a model.

A float64 computed from float32 is no more precise than float32. A type counts where a node *computes* in it, since that
is where values are rounded: an input or a weight stored in half precision is exact, and moving its elements rounds
nothing. Constants computed from constants do not count, since every program computes the same from them, nor do
integers and bools, which are equal or wrong; quantized integers (QuantizeLinear) pass on the type of their floats.

Values that depend on random values have no precision, and are `DRAWN`.
"""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto, helper

from passes.graph.index import GraphIndex, initializers_of
from passes.graph.inference import infer_types
from passes.graph.op_facts import ONNX_DOMAINS, RANDOM_OPS, SIZES, attribute_of, has_body, moved_inputs
from passes.graph.traversal import bodies_in, inline_functions, reads_of
from passes.proof.noise import draws_numbers, false_constants
from passes.proof.numbers import DRAWN, STEPS, compare, least_precise
from passes.weights.detached import DetachedModel
from passes.weights.sharing import MappedModel

Precisions = Mapping[str, str]
"""Value → the least precise floating type in its computation, by numpy's name; or `DRAWN`."""

Known = MutableMapping[str, str | None]
"""Value → the least precise type so far; empty where nothing was rounded yet, None for a constant."""


def computed_types(
    model: DetachedModel, names: Iterable[str] | None = None, computed_in: Collection[str] | None = None
) -> Precisions:
    """The least precise floating type in the computation of each of `names`; no entry where nothing is rounded.

    Args:
        model: the model, with its types as far as they are declared.
        names: values of `model`; by default all values of its graph.
        computed_in: the types that the source of `model` computes in, if they are known. A cast to another type and
            back, which an exporter added, does not count.
    """
    proto = model.proto
    if proto.functions:
        proto = inline_functions(proto)
    graph = infer_types(proto)
    index = GraphIndex(graph)
    known: Known = {**dict.fromkeys(index.initializers, None), **dict.fromkeys(index.required_inputs, "")}
    _PrecisionWalk(computed_in).through(graph, known, {})
    return {name: dtype for name in (known if names is None else names) if (dtype := known.get(name))}


class _PrecisionWalk:
    """Propagates types through graphs and their bodies; nodes are sorted, as in every model that was read."""

    def __init__(self, computed_in: Collection[str] | None) -> None:
        self._computed_in = computed_in
        self._false: set[str] = set()
        """Constants that are False, such as the `training_mode` of a Dropout."""

    def through(self, graph: GraphProto, known: Known, outer: Mapping[str, int]) -> None:
        """Add the results of `graph`'s nodes to `known`; `outer` are the element types of outer values."""
        types = {**outer, **_element_types(graph)}
        self._false.update(false_constants(graph))
        for node in graph.node:
            self._node(node, known, types)

    def _node(self, node: NodeProto, known: Known, types: Mapping[str, int]) -> None:
        if has_body(node):
            self._body_node(node, known, types)
            return
        read = [name for name in _data_of(node) if name]
        if draws_numbers(node, self._false) or (node.op_type not in SIZES and _has_drawn(known, read)):
            known.update(dict.fromkeys(node.output, DRAWN))
            return
        if all(known.get(name) is None for name in read) and node.op_type not in RANDOM_OPS:
            known.update(dict.fromkeys(node.output, None))
            return
        moved = moved_inputs(node)
        step = _step_of(node, types)
        worst = least_precise(step, *(known.get(name) for name in (moved or read)))
        is_quantized = node.op_type in QUANTIZING or any(
            known.get(name) and types.get(name) not in FLOATS for name in read
        )
        for name in node.output:
            dtype = types.get(name, 0)
            if dtype in FLOATS:
                known[name] = worst if moved else least_precise(worst, self._rounding_type(dtype))
            elif dtype:
                known[name] = worst if is_quantized and dtype != TensorProto.BOOL else ""
            else:  # the result has no known type: it is computed in those of its inputs
                known[name] = least_precise(worst, *(self._rounding_type(types.get(value, 0)) for value in read))

    def _rounding_type(self, dtype: int) -> str:
        name = FLOATS.get(dtype, "")
        return name if self._computed_in is None or name in self._computed_in else ""

    def _body_node(self, node: NodeProto, known: Known, types: Mapping[str, int]) -> None:
        """Propagate types through If, Loop or Scan. Bodies of loops are repeated until their types are stable."""
        dtypes = [""] * len(node.output)
        first, carried, result = _carried_values(node)
        for body in bodies_in(node):
            inner: Known = dict.fromkeys(initializers_of(body), None)
            fed = [known.get(name) or "" for name in node.input]
            while True:
                before = list(fed)
                for index, info in enumerate(body.input):
                    inner[info.name] = fed[index] if index < len(fed) else ""
                self.through(body, ChainMap(inner, known), types)
                results = [inner.get(info.name, known.get(info.name)) or "" for info in body.output][result:]
                for index in range(carried):
                    fed[first + index] = _worst(fed[first + index], results[index])
                if fed == before:
                    break
            dtypes = [_worst(*pair) for pair in zip(dtypes, results, strict=False)]
        # A random condition, or a random trip count, makes all results random.
        if _has_drawn(known, () if node.op_type == "Scan" else node.input[: 2 if node.op_type == "Loop" else 1]):
            dtypes = [DRAWN] * len(dtypes)
        is_constant = all(known.get(name) is None for name in reads_of(node))
        for name, dtype in zip(node.output, dtypes, strict=True):
            known[name] = None if is_constant and dtype != DRAWN else dtype


def _step_of(node: NodeProto, types: Mapping[str, int]) -> str:
    """The entry of `STEPS` for the type that a quantizer rounds to; empty for another node. Operators of onnxruntime
    that quantize inside have 8 bits."""
    if node.op_type in ROUNDING_TO_STEPS:
        dtype = types.get(node.output[0], 0) or TensorProto.INT8
        return STEPS.get(helper.tensor_dtype_to_np_dtype(dtype).name, "")
    return STEPS["int8"] if node.op_type.startswith(QUANTIZING_INSIDE) and node.domain not in ONNX_DOMAINS else ""


def _has_drawn(known: Known, names: Iterable[str]) -> bool:
    return any(known.get(name) == DRAWN for name in names)


def _worst(*dtypes: str) -> str:
    return DRAWN if DRAWN in dtypes else least_precise(*dtypes)


def _carried_values(node: NodeProto) -> tuple[int, int, int]:
    """The values that a Loop or Scan carries from iteration to iteration.

    Returns:
        (index of the first carried input, number of carried inputs, index of the body's first output that is a result).
    """
    if node.op_type == "Loop":
        return 2, len(node.input) - 2, 1
    if node.op_type == "Scan":
        scanned = attribute_of(node, "num_scan_inputs")
        return 0, len(node.input) - scanned, 0
    return 0, 0, 0


def _data_of(node: NodeProto) -> Iterable[str]:
    """The inputs whose elements go into the result."""
    return node.input[: 1 if node.op_type in ("CastLike", *SIZES) else None]


def _element_types(graph: GraphProto) -> dict[str, int]:
    index = GraphIndex(graph)
    types = {name: tensor.data_type for name, tensor in index.initializers.items()}
    return types | {name: info.type.tensor_type.elem_type for name, info in index.types.items()}


FLOATS: Final[Mapping[int, str]] = {
    dtype: helper.tensor_dtype_to_np_dtype(dtype).name
    for dtype in (
        *(TensorProto.DOUBLE, TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16),
        *(TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E4M3FNUZ, TensorProto.FLOAT8E5M2, TensorProto.FLOAT8E5M2FNUZ),
        *(TensorProto.FLOAT4E2M1, TensorProto.COMPLEX64, TensorProto.COMPLEX128),
    )
}
"""Without FLOAT8E8M0, which holds scales: a value that is divided by a scale is multiplied by it again."""

ROUNDING_TO_STEPS: Final = frozenset({"QuantizeLinear", "DynamicQuantizeLinear", "QLinearMatMul", "QLinearConv"})
"""Ops whose first result is rounded to the steps of a scale."""

QUANTIZING_INSIDE: Final = ("QLinear", "QAttention", "QGemm", "QEmbed", "DynamicQuantize")
"""Prefixes of the names of onnxruntime's operators that round to steps inside."""

QUANTIZING: Final = frozenset(
    {*("QuantizeLinear", "DynamicQuantizeLinear", "MatMulInteger", "ConvInteger"), *("QLinearMatMul", "QLinearConv")}
)
"""Ops whose integers are quantized floats."""


HALVES: Final = {"float16": int(TensorProto.FLOAT16), "bfloat16": int(TensorProto.BFLOAT16)}

LIMITS: Final = {"float16": (6.1e-5, 65504.0), "bfloat16": (1.2e-38, 3.38e38)}
"""The smallest normal number and the largest number of each half type."""

WIDE: Final = "_as_float32"
"""After the name of a rounded value: the same value as float32."""

AT_ONCE: Final = 64
"""Values of unknown sizes that one run returns; all of them are in memory at once."""

MOST_AT_ONCE: Final = 2**28
"""Bytes of the values that one run returns."""


@dataclass(frozen=True, slots=True)
class ValueRange:
    """The largest finite magnitude of a value, and its size in bytes, over all draws."""

    largest: float
    nbytes: int = 0

    @classmethod
    def of(cls, array: np.ndarray) -> Self:
        largest = max(float(array.max(initial=0.0)), -float(array.min(initial=0.0)))
        if not math.isfinite(largest):
            largest = float(np.abs(array[np.isfinite(array)]).max(initial=0.0))
        return cls(largest, array.nbytes)

    def describe(self, half: str) -> str:
        """Why the half type cannot hold the value; empty where it can."""
        smallest, largest = LIMITS[half]
        if self.largest > largest:
            return f"reaches {self.largest:.3g}, and {half} ends at {largest:g}"
        if 0 < self.largest < smallest:
            return f"is {self.largest:.3g} at most, too small for {half}"
        return ""


def measure_ranges(
    model: MappedModel, names: Sequence[str], draws: Sequence[Mapping[str, np.ndarray]]
) -> Mapping[str, ValueRange]:
    """In the proof worker: the range of each of `names`, values of `model`, over all draws."""
    ranges: dict[str, ValueRange] = {}
    for start in range(0, len(names), AT_ONCE):
        part = names[start : start + AT_ONCE]
        session = model.session(part, may_evaluate=True)
        for feeds in draws:
            results = session.run(feeds)
            for name in part:
                found, known = ValueRange.of(results[name]), ranges.get(name, ValueRange(0.0))
                ranges[name] = ValueRange(max(known.largest, found.largest), max(known.nbytes, found.nbytes))
    return ranges


@dataclass(frozen=True, slots=True)
class HalfFindings:
    """The SQNR that rounding leaves of each value in dB, what is wrong with the outputs, and the place of the draw on
    which they are furthest over their tolerance."""

    ratios: Mapping[str, float]
    why: str
    worst: int


def measure_halves(
    before: MappedModel,
    after: MappedModel,
    sizes: Mapping[str, int],
    outputs: Sequence[str],
    half: str,
    draws: Sequence[Mapping[str, np.ndarray]],
) -> HalfFindings:
    """In the proof worker: run a model, and the same model with its results rounded.

    Args:
        before: the model in float32.
        after: the model with rounded results.
        sizes: float32 values of the model before, and their bytes; a value that is rounded has its name, or that with
            the type after it.
        outputs: the outputs to compare.
        half: the name of the narrow type.
        draws: name → array, for each draw.
    """
    made = GraphIndex(after.model().graph).producers
    halves = {name: f"{name}_{half}" if f"{name}_{half}" in made else name for name in sizes}
    now = {name: wide if (wide := f"{rounded}{WIDE}") in made else name for name, rounded in halves.items()}
    ratios: dict[str, float] = {}
    excess, worst, why = 0.0, 0, ""
    parts = _split({name: size for name, size in sizes.items() if now[name] in made})
    for part in parts:
        asked = (before, part), (after, [now[name] for name in part])
        sessions = [model.session(names, may_evaluate=True) for model, names in asked]
        for place, feeds in enumerate(draws):
            old, new = (session.run(feeds) for session in sessions)
            for name in part:
                ratios[name] = min(ratios.get(name, math.inf), _ratio(old[name], new[now[name]]))
            for name in outputs if part is parts[0] else ():
                errors = compare(old[name], new[name], computed_in=half)
                if errors.excess > excess:
                    excess, worst, why = errors.excess, place, errors.why
    return HalfFindings(ratios, why, worst)


def _split(sizes: Mapping[str, int]) -> list[list[str]]:
    """The names in parts of up to `MOST_AT_ONCE`; there is a first part, if an empty one."""
    parts, room = list[list[str]]([[]]), MOST_AT_ONCE
    for name, size in sizes.items():
        if size > room and parts[-1]:
            parts.append([])
            room = MOST_AT_ONCE
        parts[-1].append(name)
        room -= size
    return parts


def _ratio(exact: np.ndarray, rounded: np.ndarray) -> float:
    """SQNR in dB over the elements that are finite on both sides; -inf where one is finite and the other is not."""
    exact, rounded = exact.reshape(-1), rounded.reshape(-1)
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.subtract(exact, rounded, dtype=np.float64)
    finite = np.isfinite(error)
    if not finite.all():
        if not np.array_equal(np.isfinite(exact), finite):
            return -math.inf
        exact, error = exact[finite], error[finite]
    signal, noise = (float(np.einsum("i,i->", array, array, dtype=np.float64)) for array in (exact, error))
    return math.inf if not noise else -math.inf if not signal else 10 * math.log10(signal / noise)
