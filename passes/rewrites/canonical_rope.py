"""Write rotary embeddings with the fewest operators: the rotated half, two products and a sum, or one operator.

torch writes x·cos + rotated(x)·sin, where rotated(x) is concat(-b, a) of the halves a and b of x, or of its pairs of
neighbours (-b₀, a₀, -b₁, a₁, …). The sign belongs to the table of sines, which all layers share: (-b)·s and b·(-s) are
equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Final

import numpy as np
from onnx import NodeProto, helper

from passes.graph.op_facts import attribute_of, input_of
from passes.rewrites.rewriter import Array, Rewriter, RewriteStep
from passes.step import PassResult
from passes.suggest import plural, say_count, say_left

SINCE: Final = 23
"""The opset that has RotaryEmbedding."""


@dataclass(frozen=True, slots=True)
class CanonicalRope(RewriteStep, name="canonical-rope", reads="structure"):
    """Write rotary embeddings as Split, Concat, two products and a sum, with the sign in the sines. Halves are taken
    by one Split, pairs by one Gather.

    Args:
        newer: whether RotaryEmbedding, which opset 23 has brought, is written where the model has that opset.
    """

    newer: bool = False

    def why_not(self, ops: Set[str]) -> str:
        return "" if self.newer or "Neg" in ops else "no rotary embedding negates a half"

    def rewrite(self, rewriter: Rewriter) -> PassResult:
        found = [rotation for node in rewriter.by_op("Add") if (rotation := _read_rotation(rewriter, node)) is not None]
        if self.newer:
            return _write_operators(rewriter, found)
        found = [rotation for rotation in found if rotation.turned.negates]
        tables = {rotation.sine for rotation in found if rewriter.constant(rotation.sine) is None}
        saved = sum(rotation.turned.saves for rotation in found) - len(tables)
        if saved <= 0:
            return rewriter.result("no rotary embedding gets shorter")
        signed: dict[str, str] = {}
        for rotation in found:
            _write(rewriter, rotation, signed)
        return rewriter.result(f"{plural(len(found), 'rotary embedding')} with {plural(saved, 'node')} fewer")


@dataclass(frozen=True, slots=True)
class _Turned:
    """The value `name`, which is `data` with its halves, or with the neighbours of each pair, exchanged.

    `sizes` are those of the halves; empty for pairs. `negates`: whether the first of the two, or of each pair, is
    negated. `parts` are the halves where they are there, and `saves` the nodes that go once the sines have the sign.
    """

    name: str
    data: str
    sizes: tuple[int, ...]
    negates: bool
    saves: int
    parts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Rotation:
    """One rotary embedding: `total` is the data times `cosine` and, in the product `rotated`, the turned data times
    `sine`."""

    turned: _Turned
    cosine: str
    sine: str
    rotated: NodeProto
    total: NodeProto


def _read_rotation(rewriter: Rewriter, total: NodeProto) -> _Rotation | None:
    for rotated_name, straight_name in (total.input, reversed(total.input)):
        rotated, straight = rewriter.producer(rotated_name, "Mul"), rewriter.producer(straight_name, "Mul")
        if rotated is None or straight is None:
            continue
        for position, name in enumerate(rotated.input):
            sine = rotated.input[1 - position]
            turned = _read_halves(rewriter, name) or _read_pairs(rewriter, name) or _read_gather(rewriter, name)
            if turned is None or turned.data not in straight.input or _size(rewriter, sine) != _size(rewriter, name):
                continue
            cosine = next((read for read in straight.input if read != turned.data), "")
            return _Rotation(turned, cosine, sine, rotated, total)
    return None


def _read_negation(rewriter: Rewriter, name: str) -> tuple[str, bool]:
    """The value that a Neg negates, and whether there is one."""
    node = rewriter.own_producer(name, "Neg")
    return (name, False) if node is None else (node.input[0], True)


def _read_halves(rewriter: Rewriter, name: str) -> _Turned | None:
    joined, shape = rewriter.own_producer(name, "Concat"), rewriter.shape(name)
    if joined is None or len(joined.input) != 2 or shape is None:
        return None
    (second, negates), first = _read_negation(rewriter, joined.input[0]), joined.input[1]
    producers = rewriter.producer(first), rewriter.producer(second)
    if attribute_of(joined, "axis") not in (-1, len(shape) - 1) or producers[0] is None or producers[1] is None:
        return None
    data, sizes = producers[0].input[0], (_size(rewriter, first), _size(rewriter, second))
    if rewriter.is_shared(first) or rewriter.is_shared(second) or producers[1].input[0] != data:
        return None
    if sizes[0] is None or sizes[1] is None or sizes[0] + sizes[1] != _size(rewriter, data):
        return None
    is_sliced = producers[0].op_type == producers[1].op_type == "Slice"
    if is_sliced:
        bounds = [_bounds(rewriter, producer) for producer in producers if producer is not None]
        if bounds[0] != (0, sizes[0], 1) or bounds[1] is None or (bounds[1][0], bounds[1][2]) != (sizes[0], 1):
            return None
    elif producers[0] is not producers[1] or list(producers[0].output) != [first, second]:
        return None
    parts = () if is_sliced else (first, second)
    return _Turned(name, data, (sizes[0], sizes[1]), negates, is_sliced + negates, parts)


def _read_pairs(rewriter: Rewriter, name: str) -> _Turned | None:
    """Read a Reshape of two stacked Slices: `stack((-x[…, 1::2], x[…, ::2]), -1).flatten(-2)` in torch."""
    flat = rewriter.own_producer(name, "Reshape", "Flatten")
    stacked = None if flat is None else rewriter.own_producer(flat.input[0], "Concat")
    shape = None if stacked is None else rewriter.shape(stacked.output[0])
    if stacked is None or shape is None or len(stacked.input) != 2 or shape[-1] != 2:
        return None
    left, right = (rewriter.own_producer(column, "Unsqueeze", "Reshape") for column in stacked.input)
    if left is None or right is None or rewriter.shape(stacked.input[0]) != (*shape[:-1], 1):
        return None
    (odd, negates), even = _read_negation(rewriter, left.input[0]), right.input[0]
    slices = [rewriter.own_producer(half, "Slice") for half in (odd, even)]
    bounds = [None if node is None else _bounds(rewriter, node) for node in slices]
    starts = [None if bound is None or bound[2] != 2 else bound[0] for bound in bounds]
    data = "" if slices[0] is None else slices[0].input[0]
    if starts != [1, 0] or slices[1] is None or slices[1].input[0] != data:
        return None
    same = rewriter.shape(data) is not None and rewriter.shape(data) == rewriter.shape(name)
    return _Turned(name, data, (), negates, 5 + negates) if same else None


def _read_gather(rewriter: Rewriter, name: str) -> _Turned | None:
    """Read the Gather that is written for pairs."""
    node, width = rewriter.own_producer(name, "Gather"), _size(rewriter, name)
    if node is None or width is None or width % 2:
        return None
    is_last = attribute_of(node, "axis", 0) in (-1, len(rewriter.shape(name) or ()) - 1)
    is_turned = is_last and rewriter.ints(node.input[1]) == _neighbours(width).tolist()
    return _Turned(name, node.input[0], (), negates=False, saves=0) if is_turned else None


def _neighbours(width: int) -> Array:
    return np.arange(width).reshape(-1, 2)[:, ::-1].reshape(-1)


def _size(rewriter: Rewriter, name: str) -> int | None:
    size = (rewriter.shape(name) or (None,))[-1]
    return size if isinstance(size, int) else None


def _bounds(rewriter: Rewriter, node: NodeProto) -> tuple[int, int, int] | None:
    """Where a Slice along the last axis begins and ends, and its step; None for another one."""
    rank = len(rewriter.shape(node.input[0]) or ())
    numbers = [rewriter.ints(name) for name in (*node.input[1:4], input_of(node, 4)) if name]
    if len(numbers) < 3 or any(found is None or len(found) != 1 for found in numbers):
        return None
    start, end, axis, *step = (found[0] for found in numbers if found)
    return (start, end, (step or [1])[0]) if axis in (-1, rank - 1) else None


def _write(rewriter: Rewriter, rotation: _Rotation, signed: dict[str, str]) -> None:
    like, shape = rewriter.producers[rotation.turned.name], rewriter.shape(rotation.turned.name)
    if rotation.turned.sizes:
        parts = rotation.turned.parts
        if not parts:
            sizes = rewriter.constant_ints(rotation.turned.sizes, "halves")
            names = [rewriter.free(f"{rotation.turned.data}/{half}") for half in ("first", "second")]
            parts = rewriter.add_many("Split", [rotation.turned.data, sizes], like, names, axis=-1).output
        turned = rewriter.add_copy(like, [parts[1], parts[0]], shape)
    else:
        order = rewriter.constant_of(_neighbours(_size(rewriter, rotation.turned.data) or 0), "neighbours")
        turned = rewriter.add("Gather", [rotation.turned.data, order], like, shape, axis=len(shape or ()) - 1)
    if rotation.sine not in signed:
        signed[rotation.sine] = _sign_sines(rewriter, rotation)
    position = list(rotation.rotated.input).index(rotation.turned.name)
    rewriter.set_input(rotation.rotated, position, turned)
    rewriter.set_input(rotation.rotated, 1 - position, signed[rotation.sine])
    rewriter.drop_unread(rotation.turned.name)
    rewriter.drop_unread(rotation.sine)


def _signs(rewriter: Rewriter, rotation: _Rotation) -> Array:
    """-1 for the elements that torch negates, and 1 for the others."""
    dtype = helper.tensor_dtype_to_np_dtype(rewriter.dtype(rotation.rotated.output[0]))
    sizes = rotation.turned.sizes[::-1] or (1, 1)
    signs = np.repeat(np.array([-1, 1], dtype), sizes)
    return np.tile(signs, (_size(rewriter, rotation.turned.data) or 0) // len(signs))


def _sign_sines(rewriter: Rewriter, rotation: _Rotation) -> str:
    """The sines, negative where torch negates the elements."""
    signs, array = _signs(rewriter, rotation), rewriter.constant(rotation.sine)
    if array is not None:
        return rewriter.constant_of(array * signs, f"{rotation.sine}_signed")
    name = rewriter.constant_of(signs, "signs")
    return rewriter.add("Mul", [rotation.sine, name], rotation.rotated, rewriter.shape(rotation.sine))


def _write_operators(rewriter: Rewriter, found: list[_Rotation]) -> PassResult:
    """Write RotaryEmbedding for each rotation whose tables are constants of equal halves."""
    if rewriter.opset < SINCE:
        return rewriter.result(f"opset {rewriter.opset} has no RotaryEmbedding, opset {SINCE} has")
    reasons = [why for rotation in found if (why := _write_operator(rewriter, rotation))]
    written = len(found) - len(reasons)
    said = say_count(written, "rotary embedding", "as one operator")
    return rewriter.result(said, say_left(reasons, "rotary embedding"), default="no rotary embedding is in parts")


def _write_operator(rewriter: Rewriter, rotation: _Rotation) -> str:
    """Write one RotaryEmbedding; why not, or nothing where it is written."""
    label, shape = rotation.total.name or rotation.total.output[0], rewriter.fixed_shape(rotation.turned.data)
    if shape is None or len(shape) != 4:
        return f"{label}: its data has no four fixed sizes"
    if len(set(rotation.turned.sizes)) > 1:
        return f"{label}: its halves are not equal"
    cosine, sine = rewriter.constant(rotation.cosine), rewriter.constant(rotation.sine)
    if cosine is None or sine is None:
        return f"{label}: its tables are computed"
    if not rotation.turned.negates:
        sine = (sine * _signs(rewriter, rotation)).astype(sine.dtype)
    halves = [_halve(table, shape, rotation.turned.sizes) for table in (cosine, sine)]
    if any(half is None for half in halves):
        return f"{label}: its tables differ by head, or their halves differ"
    names = [
        rewriter.constant_of(half, f"{rotation.turned.data}/{part}")
        for half, part in zip(halves, ("cosine", "sine"), strict=True)
        if half is not None
    ]
    inputs, interleaved = [rotation.turned.data, *names], int(not rotation.turned.sizes)
    made = rewriter.add("RotaryEmbedding", inputs, rotation.total, shape, interleaved=interleaved)
    rewriter.replace(rotation.total.output[0], made)
    return ""


def _halve(table: Array, shape: tuple[int, ...], sizes: tuple[int, ...]) -> Array | None:
    """The table of RotaryEmbedding, [batch, length, half of the width], for data of `shape`; None where halves, or the
    elements of pairs, are not equal, or heads have angles of their own."""
    table = table.reshape(*[1] * (4 - table.ndim), *table.shape)
    width = shape[3] // 2
    first, second = (table[..., :width], table[..., width:]) if sizes else (table[..., ::2], table[..., 1::2])
    if table.shape[1] != 1 or not np.array_equal(first, second):
        return None
    return np.ascontiguousarray(np.broadcast_to(first[:, 0], (shape[0], shape[2], width)))
