"""Separate Q, K and V projections: three products with a matrix of their own each, in front of one attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import permutations, product
from typing import ClassVar, Final

import numpy as np
from onnx import TensorProto, helper

from passes.model.digests import digest_of
from passes.model.weights import DetachedModel
from passes.structures.attention_shape import Operands, attention_operands
from passes.structures.base import Found, Instance, KeptWeight
from passes.structures.projection import Projection, computed_from, projections_behind
from passes.structures.qkv_check import lost_projections
from passes.structures.view import GraphView, module_of
from passes.structures.wiring_check import bypassed_projections, with_wiring

__all__ = ["SeparateQKV"]

Triple = tuple[Projection, Projection, Projection]


@dataclass(frozen=True, slots=True)
class Merged:
    """One product where there should be several: `whole` if it makes all of Q, K and V, and not two of them."""

    projection: Projection
    whole: bool

    def __str__(self) -> str:
        weight = self.projection.weight
        return f"{weight.name} ({'×'.join(str(dim) for dim in weight.dims)})"


class SeparateQKV:
    """Three projections with a weight of their own each, feeding one attention (MHA, GQA, MQA, cross-attention)."""

    kind: ClassVar[str] = "qkv"
    what: ClassVar[str] = "separate Q, K and V projections"

    def find(self, model: DetachedModel) -> Found:
        view = GraphView(model)
        triples: list[Triple] = []
        merged: list[Merged] = []
        others = 0
        taken: set[frozenset[str]] = set()
        for readings in attention_operands(view):
            read = _read(view, readings)
            if isinstance(read, Merged):
                merged.append(read)
            elif read is None:
                others += 1
            else:
                _, key, value = read
                # Two softmaxes may weigh the same V (DiffLlama); a later layer may use an earlier one's K and V
                # (Gemma 3n).
                pair = frozenset({key.value, value.value})
                if pair not in taken:
                    taken.add(pair)
                    triples.append(read)
        instances = with_wiring(_instances(view, triples), model)
        return Found(instances, _instead(merged, others) if merged or others or not instances else "")

    def lost(self, instances: Sequence[Instance], model: DetachedModel) -> dict[str, str]:
        lost = lost_projections(instances, model)
        return lost | bypassed_projections(instances, model, lost)


def _read(view: GraphView, readings: Sequence[Operands]) -> Triple | Merged | None:
    """The triple that one attention reads; or the product that stands for several of the three; or None.

    Where scores are a sum, K is the one that is made from what V is made from; Q, if it can be, too. The others are
    projections of positions (DeBERTa, XLNet), or of what an adapter has made already.
    """
    triples: list[tuple[int, Triple]] = []
    merged: Merged | None = None
    for reading in readings:
        roles = [projections_behind(view, name) for name in (reading.query, reading.key, reading.value)]
        for query, key, value in product(*roles):
            values = [query.value, key.value, value.value]
            if len(set(values)) < 3:
                merged = merged or Merged(key if values.count(key.value) > 1 else query, len(set(values)) == 1)
            elif not _in_turn(view, (query, key, value)):
                sources = [_source(view, one.data) for one in (query, key, value)]
                agreement = 2 * (sources[1] == sources[2]) + (sources[0] in sources[1:])
                triples.append((agreement, (query, key, value)))
    return max(triples, key=lambda one: one[0])[1] if triples else merged


def _in_turn(view: GraphView, triple: Triple) -> bool:
    """Whether one of the three is computed from another: then it does not stand beside it, but behind."""
    return any(computed_from(view, a.node, b.node) for a in triple for b in triple if a is not b)


def _source(view: GraphView, name: str) -> str:
    """The value that `name` is but for its layout and its type."""
    node = view.producers.get(name)
    while node is not None and node.op_type in LAYOUT_OPS:
        name = node.input[0]
        node = view.producers.get(name)
    return name


def _instances(view: GraphView, triples: Sequence[Triple]) -> tuple[Instance, ...]:
    # Matrices are hashed in each layout that they may be left in, which leaves the interpreter free.
    with ThreadPoolExecutor() as pool:
        found = pool.map(lambda one: frozenset(_digests(view, one)), [one for triple in triples for one in triple])
        digests = list(found)
    return tuple(
        _instance(view, triple, digests[3 * index : 3 * index + 3], index) for index, triple in enumerate(triples)
    )


def _instance(view: GraphView, triple: Triple, digests: Sequence[frozenset[str]], index: int) -> Instance:
    module = module_of([projection.node for projection in triple])
    weights = tuple(
        KeptWeight(role, one.weight.name, known) for role, one, known in zip("QKV", triple, digests, strict=True)
    )
    outputs = [projection.value for projection in triple]
    sums = [_behind_bias(view, name) for name in outputs]
    heads = [_behind_reshape(view, name) for name in sums]
    # A pin needs a type; where inference gives none, the checker alone stands guard.
    known = all(name in view.types for name in (*outputs, *sums, *heads))
    pins, loose, wide = (tuple(view.types[name] for name in names if known) for names in (outputs, sums, heads))
    return Instance("qkv", module or f"attention {index}", module, weights, pins, loose, wide)


def _digests(view: GraphView, projection: Projection) -> Iterator[str]:
    """Of the matrix in each type and layout that an optimizer may leave it in."""
    yield view.model.digest(projection.weight)
    if view.model.is_unread(projection.weight):  # what it would be in another type cannot be said without a look at it
        yield from (view.model.turned_digest(projection.weight, axes) for axes in _turns(projection.weight))
        return
    array = view.model.array(projection.weight)
    yield from map(digest_of, _transposed(array))
    for cast in _cast(view, projection, array):
        yield from map(digest_of, (cast, *_transposed(cast)))


def _turns(weight: TensorProto) -> Iterator[tuple[int, ...]]:
    """The other orders of its axes."""
    rank = len(weight.dims)
    yield from (axes for axes in permutations(range(rank)) if rank <= 3 and axes != tuple(range(rank)))


def _transposed(array: np.ndarray) -> list[np.ndarray]:
    if array.ndim == 3:
        return [array.transpose(axes) for axes in permutations(range(3)) if axes != (0, 1, 2)]
    return [array.reshape(array.shape[0], -1).T]


def _cast(view: GraphView, projection: Projection, array: np.ndarray) -> list[np.ndarray]:
    """The matrix in the type that the product reads it in, if it is stored in another."""
    info = view.types.get(projection.matrix)
    if info is None or info.type.tensor_type.elem_type in (0, projection.weight.data_type):
        return []
    return [array.astype(helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type))]


def _behind_bias(view: GraphView, name: str) -> str:
    """The sum with a constant that alone reads `name`, or `name` itself: product and sum may become a Gemm."""
    readers = view.consumers.get(name, [])
    if len(readers) == 1 and readers[0].op_type == "Add" and any(map(view.is_constant, readers[0].input)):
        return readers[0].output[0]
    return name


def _behind_reshape(view: GraphView, name: str) -> str:
    """What the Reshape makes that alone reads `name`, or `name` itself.

    A Gemm takes matrices. Of others it is made between two reshapes, and this one may take in the second.
    """
    readers = view.consumers.get(name, [])
    if len(readers) == 1 and readers[0].op_type == "Reshape" and view.dims(readers[0].output[0]) is not None:
        return readers[0].output[0]
    return name


def _instead(merged: Sequence[Merged], others: int) -> str:
    """What the attention blocks without a triple have in its place."""
    if merged:
        plural = "s" if len(merged) > 1 else ""
        which = "Q, K and V" if all(one.whole for one in merged) else "Q, K and V, or two of them,"
        names = ", ".join(map(str, merged[:3])) + (" …" if len(merged) > 3 else "")
        return f"{len(merged)} attention block{plural} whose {which} are one matrix in the source already: {names}"
    if others:
        return f"{others} attention block(s) whose Q, K and V do not come from three matrices"
    return "no attention (no softmax between two matrix products)"


LAYOUT_OPS: Final = frozenset(
    {"Identity", "Cast", "CastLike", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten"}
)
