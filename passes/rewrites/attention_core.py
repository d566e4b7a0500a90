"""One attention, spelled out: MatMul, scale, mask, Softmax, MatMul. What the operators have in common is here; how each
of them says it is in `attention_operators.py`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from onnx import TensorProto, helper

from passes.rewrites.graph_values import Dim
from passes.rewrites.node_writer import NodeWriter

MOST_MASK_ELEMENTS: Final = 2**24
"""A larger causal mask is computed in the model, so that the file does not grow by it."""

LOWEST: Final[Mapping[int, float]] = {
    TensorProto.FLOAT: float(np.finfo(np.float32).min),
    TensorProto.DOUBLE: float(np.finfo(np.float64).min),
    TensorProto.FLOAT16: float(np.finfo(np.float16).min),
    TensorProto.BFLOAT16: -math.ldexp(255, 120),
}
"""Float dtype → its most negative finite number. An infinity would leave a quantizer without a range."""


@dataclass(frozen=True, slots=True)
class Heads:
    """Q, K or V: `value` is [batch, length, heads · size] (`merged`), or [batch, heads, length, size]."""

    value: str
    merged: bool
    count: int
    size: int
    length: Dim


@dataclass(frozen=True, slots=True)
class Rotary:
    """Tables of cosine and sine by position; `positions` is [batch, length], or empty for positions after the past."""

    cosine: str
    sine: str
    width: int
    """How many elements of a head are rotated."""
    interleaved: bool
    positions: str


@dataclass(frozen=True, slots=True)
class AttentionCore:
    """The attention that a node computes, whatever its operator."""

    query: Heads
    key: Heads
    value: Heads
    dtype: int
    scale: float
    output: str
    merged_output: bool
    softcap: float = 0.0
    past: tuple[str, str] | None = None
    past_length: Dim = 0
    present: tuple[str, str] = ("", "")
    joined_present: str = ""
    """The output for both of them, stacked along a new first axis."""
    masks: tuple[tuple[str, float], ...] = ()
    """Bools, true where a score counts, and the number added to a score where they are false."""
    biases: tuple[str, ...] = ()
    """Values that are added to the scores."""
    causal: bool = False
    window: int = -1
    """How many keys a query sees, counted backwards from itself; -1 for all."""
    masked: float = -math.inf
    """What is added to a score that the causal mask hides."""
    zero_rows: bool = False
    """Whether a row that the masks hide whole becomes zero."""
    rotary: Rotary | None = None
    softmax_dtype: int = 0
    scores: str = ""
    """The output for scores, taken at `scores_at`: 0 scaled, 1 capped, 2 masked, 3 after Softmax."""
    scores_at: int = 0

    @property
    def total(self) -> Dim:
        """The number of keys, including the keys of the past."""
        if self.past is None:
            return self.key.length
        both = isinstance(self.past_length, int) and isinstance(self.key.length, int)
        return self.past_length + self.key.length if both else None  # pyright: ignore[reportOperatorIssue]


def write_core(core: AttentionCore, writer: NodeWriter) -> None:
    """Write the nodes of `core`; its outputs have the names that they had."""
    query = _rotate(core, _split(core.query, "query", writer), core.query, "query", writer)
    key, value = _keys_and_values(core, writer)
    if core.key.count not in (1, core.query.count):
        heads = np.arange(core.query.count) // (core.query.count // core.key.count)
        repeat = writer.constant(heads, "heads_of_query")
        value = writer.add("Gather", value, repeat, label="value_heads", axis=1)
        key = writer.add("Gather", key, repeat, label="key_heads", axis=1)
    scaled = _scores(core, query, key, writer)
    capped = _cap(core, scaled, writer)
    bias, hidden_rows = _mask(core, query, key, writer)
    masked = writer.add("Add", capped, bias, label="masked") if bias else capped
    probabilities = _softmax(core, masked, hidden_rows, writer)
    mixed = writer.add("MatMul", probabilities, value, label="mixed")
    if core.merged_output:
        transposed = writer.add("Transpose", mixed, label="merged", perm=[0, 2, 1, 3])
        shape = writer.ints([0, 0, core.query.count * core.value.size], "output_shape")
        mixed = writer.add("Reshape", transposed, shape, label="output")
    writer.give(mixed, core.output)
    if core.scores:
        writer.give((scaled, capped, masked, probabilities)[core.scores_at], core.scores)


def _keys_and_values(core: AttentionCore, writer: NodeWriter) -> tuple[str, str]:
    """The keys, ready for the product ([batch, heads, size, length]), and the values, both with their past."""
    plain = core.past is None and not any((*core.present, core.joined_present)) and core.rotary is None
    value = _split(core.value, "value", writer)
    if plain and core.key.merged:
        apart = _reshape(core.key, "key", writer)
        return writer.add("Transpose", apart, label="key_transposed", perm=[0, 2, 3, 1]), value
    key = _rotate(core, _split(core.key, "key", writer), core.key, "key", writer)
    if core.past is not None:
        key = writer.add("Concat", core.past[0], key, label="present_key", axis=2)
        value = writer.add("Concat", core.past[1], value, label="present_value", axis=2)
    if core.joined_present:
        axis = writer.ints([0], "first_axis")
        both = (
            writer.add("Unsqueeze", key, axis, label="present_keys"),
            writer.add("Unsqueeze", value, axis, label="present_values"),
        )
        writer.give(writer.add("Concat", *both, label="present", axis=0), core.joined_present)
    if core.present[0]:
        key = writer.give(key, core.present[0])
    if core.present[1]:
        value = writer.give(value, core.present[1])
    return writer.add("Transpose", key, label="key_transposed", perm=[0, 1, 3, 2]), value


def _reshape(heads: Heads, label: str, writer: NodeWriter) -> str:
    shape = writer.ints([0, 0, heads.count, heads.size], f"{label}_shape")
    return writer.add("Reshape", heads.value, shape, label=f"{label}_split")


def _split(heads: Heads, label: str, writer: NodeWriter) -> str:
    """As [batch, heads, length, size]."""
    if not heads.merged:
        return heads.value
    return writer.add("Transpose", _reshape(heads, label, writer), label=label, perm=[0, 2, 1, 3])


def _scores(core: AttentionCore, query: str, key: str, writer: NodeWriter) -> str:
    """The scaled products. In float16 both factors are scaled first, since their product could overflow."""
    if core.scale == 1.0:
        return writer.add("MatMul", query, key, label="scores")
    if core.dtype == TensorProto.FLOAT16:
        root = writer.scalar(math.sqrt(core.scale), core.dtype, "scale_root")
        query = writer.add("Mul", query, root, label="query_scaled")
        key = writer.add("Mul", key, root, label="key_scaled")
        return writer.add("MatMul", query, key, label="scores")
    scores = writer.add("MatMul", query, key, label="scores")
    return writer.add("Mul", scores, writer.scalar(core.scale, core.dtype, "scale"), label="scaled")


def _cap(core: AttentionCore, scores: str, writer: NodeWriter) -> str:
    if not core.softcap:
        return scores
    cap = writer.scalar(core.softcap, core.dtype, "cap")
    bent = writer.add("Tanh", writer.add("Div", scores, cap, label="cap_input"), label="cap_tanh")
    return writer.add("Mul", bent, cap, label="capped")


def _softmax(core: AttentionCore, scores: str, hidden_rows: str, writer: NodeWriter) -> str:
    """The probabilities; zero where `hidden_rows` is true, if it is given."""
    if core.softmax_dtype in (0, core.dtype):
        probabilities = writer.add("Softmax", scores, label="probabilities", axis=-1)
    else:
        wide = writer.add("Cast", scores, label="softmax_input", to=core.softmax_dtype)
        wide = writer.add("Softmax", wide, label="softmax", axis=-1)
        probabilities = writer.add("Cast", wide, label="probabilities", to=core.dtype)
    if not hidden_rows:
        return probabilities
    zero = writer.scalar(0.0, core.dtype, "zero_score")
    return writer.add("Where", hidden_rows, zero, probabilities, label="probabilities_or_zero")


def _mask(core: AttentionCore, query: str, key: str, writer: NodeWriter) -> tuple[str, str]:
    """The bias added to the scores, and booleans for the rows that it hides whole; "" for each that is not needed."""
    masks = list(core.masks)
    biases = list(core.biases)
    causal = _constant_causal(core) if core.causal else None
    if causal is not None and not causal.all():
        if not any(fill == core.masked for _, fill in masks):
            dtype = helper.tensor_dtype_to_np_dtype(core.dtype)
            biases.append(writer.constant(np.where(causal, 0.0, core.masked).astype(dtype), "causal_bias"))
        else:
            masks.append((writer.constant(causal, "causal"), core.masked))
    elif causal is None and core.causal:
        masks.append((_computed_causal(core, query, key, writer), core.masked))
    zero = writer.scalar(0.0, core.dtype, "zero_score") if masks else ""
    seen = ""
    for fill in dict.fromkeys(fill for _, fill in masks):
        allowed = [mask for mask, mask_fill in masks if mask_fill == fill]
        both = allowed[0]
        for condition in allowed[1:]:
            both = writer.add("And", both, condition, label="allowed")
        hidden = writer.scalar(fill, core.dtype, "hidden")
        biases.append(writer.add("Where", both, zero, hidden, label="bias"))
        seen = both if fill == core.masked else seen
    if not biases:
        return "", ""
    bias = biases[0]
    for addend in biases[1:]:
        bias = writer.add("Add", bias, addend, label="biases")
    if not core.zero_rows or not (core.masks or core.biases):
        return bias, ""
    return bias, _rows_without(seen, writer) if seen and len(biases) == 1 else _rows_at(core, bias, writer)


def _rows_without(seen: str, writer: NodeWriter) -> str:
    """The rows in which the booleans `seen` are all false. No number is read, so a pass may change the mask."""
    numbers = writer.add("Cast", seen, label="seen", to=TensorProto.INT32)
    most = writer.add("ReduceMax", numbers, writer.ints([-1], "last_axis"), label="most_seen", keepdims=1)
    return writer.add("Not", writer.add("Cast", most, label="rows_seen", to=TensorProto.BOOL), label="hidden_rows")


def _rows_at(core: AttentionCore, bias: str, writer: NodeWriter) -> str:
    """The rows in which `bias` has nothing above the number that masks."""
    highest = writer.add("ReduceMax", bias, writer.ints([-1], "last_axis"), label="highest_bias", keepdims=1)
    hidden = writer.scalar(core.masked, core.dtype, "hidden")
    return writer.add("Equal", highest, hidden, label="hidden_rows")


def _constant_causal(core: AttentionCore) -> np.ndarray | None:
    """The causal mask, [queries, keys], if its sizes are known and not too large."""
    rows, columns, past = core.query.length, core.total, core.past_length
    if rows == 1 and core.key.length == 1 and core.window < 0:
        return np.ones((1, 1), bool)  # one query sees all of the past, however much that is
    if not (isinstance(rows, int) and isinstance(columns, int) and isinstance(past, int)):
        return None
    if rows * columns > MOST_MASK_ELEMENTS:
        return None
    distance = np.arange(rows)[:, None] + past - np.arange(columns)
    return (distance >= 0) & ((distance < core.window) | (core.window < 0))


def _computed_causal(core: AttentionCore, query: str, key: str, writer: NodeWriter) -> str:
    rows = _query_positions(core, query, writer)
    rows = writer.add("Unsqueeze", rows, writer.ints([1], "axis_1"), label="row")
    columns = writer.positions(core.total, key, 3, "columns")
    seen = writer.add("GreaterOrEqual", rows, columns, label="causal")
    if core.window < 0:
        return seen
    first = writer.add("Sub", rows, writer.ints([core.window], "window"), label="window_end")
    return writer.add("And", seen, writer.add("Less", first, columns, label="near"), label="causal_window")


def _query_positions(core: AttentionCore, query: str, writer: NodeWriter) -> str:
    """The positions of the queries in the whole sequence."""
    if isinstance(core.query.length, int) and isinstance(core.past_length, int):
        return writer.constant(np.arange(core.query.length) + core.past_length, "query_positions")
    rows = writer.positions(core.query.length, query, 2, "rows")
    if core.past is None:
        return rows
    if isinstance(core.past_length, int):
        return writer.add("Add", rows, writer.ints([core.past_length], "past_length"), label="query_positions")
    length = writer.add("Shape", core.past[0], label="past_length", start=2, end=3)
    return writer.add("Add", rows, length, label="query_positions")


def _rotate(core: AttentionCore, value: str, heads: Heads, label: str, writer: NodeWriter) -> str:
    """`value` rotated by its positions, if the operator does that."""
    rotary = core.rotary
    if rotary is None:
        return value
    cosine, sine = _tables(core, rotary, value, label, writer)
    parts = [value]
    if rotary.width < heads.size:
        sizes = writer.ints([rotary.width, heads.size - rotary.width], "rotary_sizes")
        parts = writer.add_many("Split", [value, sizes], [f"{label}_turning", f"{label}_rest"], axis=-1)
    half, last = rotary.width // 2, writer.ints([-1], "last_axis")
    if rotary.interleaved:
        shape = writer.ints([0, heads.count, -1, half, 2], "pairs_shape")
        pairs = writer.add("Reshape", parts[0], shape, label=f"{label}_pairs")
        sizes = writer.ints([1, 1], "pair_sizes")
        columns = writer.add_many("Split", [pairs, sizes], [f"{label}_even", f"{label}_odd"], axis=-1)
        first = writer.add("Squeeze", columns[0], last, label=f"{label}_first")
        second = writer.add("Squeeze", columns[1], last, label=f"{label}_second")
    else:
        sizes = writer.ints([half, half], "rotary_halves")
        first, second = writer.add_many("Split", [parts[0], sizes], [f"{label}_first", f"{label}_second"], axis=-1)

    def combine(op: str, left: str, right: str, name: str) -> str:
        by_cosine = writer.add("Mul", left, cosine, label=f"{label}_{name}_cosine")
        by_sine = writer.add("Mul", right, sine, label=f"{label}_{name}_sine")
        return writer.add(op, by_cosine, by_sine, label=f"{label}_{name}_rotated")

    rotated = [combine("Sub", first, second, "first"), combine("Add", second, first, "second")]
    if rotary.interleaved:
        names = (f"{label}_even_rotated", f"{label}_odd_rotated")
        columns = [writer.add("Unsqueeze", part, last, label=name) for part, name in zip(rotated, names, strict=True)]
        pairs = writer.add("Concat", *columns, label=f"{label}_rotated_pairs", axis=-1)
        shape = writer.ints([0, heads.count, -1, rotary.width], "rotated_shape")
        rotated = [writer.add("Reshape", pairs, shape, label=f"{label}_rotated")]
    parts = [*rotated, *parts[1:]]
    return writer.add("Concat", *parts, label=f"{label}_rotary", axis=-1) if len(parts) > 1 else parts[0]


def _tables(core: AttentionCore, rotary: Rotary, value: str, label: str, writer: NodeWriter) -> tuple[str, str]:
    """Cosine and sine of the positions, to be multiplied with [batch, heads, length, half of the width]."""
    positions = rotary.positions or _query_positions(core, value, writer)
    cosine = writer.add("Gather", rotary.cosine, positions, label=f"{label}_cosine", axis=0)
    sine = writer.add("Gather", rotary.sine, positions, label=f"{label}_sine", axis=0)
    if not rotary.positions:
        return cosine, sine
    axis = writer.ints([1], "axis_1")
    return (
        writer.add("Unsqueeze", cosine, axis, label=f"{label}_cosine_of_heads"),
        writer.add("Unsqueeze", sine, axis, label=f"{label}_sine_of_heads"),
    )
