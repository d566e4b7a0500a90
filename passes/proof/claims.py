"""Claims that values of a changed model equal values of the model before it; only these are computed.

After most changes a model differs in a few places. If the values at those places are equal, the operators after them
run on equal values. So each place becomes a claim, `new is old`. Assuming the claims, the outputs of both models must
have the same digest; then it is enough to run the changed nodes, on held values of the model before, and to find each
claim true bit for bit. A claim depends only on claims that come before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import onnx
from onnx import NodeProto, TensorProto, helper

from passes.graph.index import GraphIndex, computed_values
from passes.graph.inference import infer_types
from passes.graph.op_facts import is_opaque
from passes.graph.traversal import bodies_in
from passes.model.canonical import CanonicalGraph, ValueDigests
from passes.weights.detached import DetachedModel

SMALL_ELEMENTS: Final = 2**14
"""Floating-point values of a known size up to this number of elements are held; integers and bools always are, as they
are mostly shapes, positions and masks."""


@dataclass(frozen=True, slots=True)
class Distinct:
    """A tensor in which no number occurs twice; `dtype` is numpy's name."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class BaseModelRun:
    """A model that was measured, with the digests of its values; claims refer to it."""

    model: DetachedModel
    meanings: ValueDigests

    @cached_property
    def places(self) -> Mapping[str, str]:
        """Meaning → the first value that has it."""
        claims: dict[str, str] = {}
        for name, meaning in self.meanings.values.items():
            if name:
                claims.setdefault(meaning, name)
        return claims

    @cached_property
    def index(self) -> GraphIndex:
        return GraphIndex(self.model.proto.graph)

    @property
    def producers(self) -> Mapping[str, NodeProto]:
        return self.index.producers

    @property
    def initializers(self) -> Mapping[str, TensorProto]:
        return self.index.initializers

    @property
    def inputs(self) -> Mapping[str, onnx.ValueInfoProto]:
        return self.index.inputs

    @cached_property
    def shapes(self) -> Mapping[str, Distinct]:
        """Values whose shape and dtype are known for certain."""
        return inferred_shapes(self.model)


def inferred_shapes(model: DetachedModel) -> dict[str, Distinct]:
    """Values of a known size, by inference alone: the types that a model declares for its values may be wrong."""
    proto = model.copy_proto()
    _forget_types(proto.graph)
    claims = {}
    for info in GraphIndex(infer_types(proto, data_prop=True)).types.values():
        tensor = info.type.tensor_type
        dims = [dim.dim_value for dim in tensor.shape.dim if dim.HasField("dim_value")]
        if tensor.elem_type and tensor.HasField("shape") and len(dims) == len(tensor.shape.dim):
            claims[info.name] = Distinct(tuple(dims), helper.tensor_dtype_to_np_dtype(tensor.elem_type).name)
    return claims


def _forget_types(graph: onnx.GraphProto) -> None:
    """Remove all types but those of the inputs."""
    del graph.value_info[:]
    for output in graph.output:
        output.ClearField("type")
    for node in graph.node:
        for body in bodies_in(node):
            _forget_types(body)


def small_values(model: DetachedModel) -> list[str]:
    """Computed values that are cheap to hold, by their inferred types."""
    graph = infer_types(model.proto)
    computed = computed_values(model.proto.graph.node)
    return [info.name for info in graph.value_info if info.name in computed and _is_small(info)]


def _is_small(info: onnx.ValueInfoProto) -> bool:
    if info.type.WhichOneof("value") != "tensor_type":
        return False
    tensor = info.type.tensor_type
    if tensor.elem_type in WHOLE:
        return True
    sizes = [dim.dim_value for dim in tensor.shape.dim if dim.HasField("dim_value")]
    if tensor.elem_type not in FLOATS or not tensor.HasField("shape") or len(sizes) < len(tensor.shape.dim):
        return False
    return math.prod(sizes) <= SMALL_ELEMENTS


WHOLE: Final = frozenset(
    {
        *(TensorProto.BOOL, TensorProto.INT8, TensorProto.INT16, TensorProto.INT32, TensorProto.INT64),
        *(TensorProto.UINT8, TensorProto.UINT16, TensorProto.UINT32, TensorProto.UINT64),
    }
)
FLOATS: Final = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE})


@dataclass(frozen=True, slots=True)
class Claim:
    """Value `new` of the changed model is value `old` of the base; `digest` is what `new` means without the claim."""

    new: str
    old: str
    digest: str


@dataclass(frozen=True)
class Claims:
    """The claims under which `after` computes what the base does, and the digests of its values under them."""

    after: DetachedModel
    reading: CanonicalGraph
    meanings: ValueDigests
    claims: tuple[Claim, ...]

    @cached_property
    def index(self) -> GraphIndex:
        return GraphIndex(self.after.proto.graph)

    @property
    def producers(self) -> Mapping[str, NodeProto]:
        return self.index.producers

    @property
    def initializers(self) -> Mapping[str, TensorProto]:
        return self.index.initializers

    def resolve_meanings(self, base: BaseModelRun, equal: dict[str, str]) -> ValueDigests:
        """The digests of the values of `after`, now that the claims are proven; adds the equalities to `equal`.

        Digests of the base do not change, even where two of them turned out to be equal.
        """
        known = frozenset(base.meanings.values.values())

        def substitute(name: str, digest: str) -> str:
            digest = equal.get(digest, digest)
            substituted = self.meanings.values.get(name, digest)
            if digest in known or substituted not in known:
                return digest
            equal[digest] = substituted
            return substituted

        return self.reading.meanings(substitute)

    def cover(self, base: BaseModelRun, names: Iterable[str]) -> bool:
        """Whether the claims also imply that the values called `names`, where both models have them, are equal."""
        before = {claim.new: claim.digest for claim in self.claims}
        for name in names:
            now, then = self.meanings.values.get(name), base.meanings.values.get(name)
            if now is not None and then is not None and then not in (now, before.get(name)):
                return False
        return True


def claims_by_name(
    base: BaseModelRun, after: DetachedModel, reading: CanonicalGraph, equal: Mapping[str, str]
) -> Claims | None:
    """Claim that every value which kept its name, and is computed in a new way, is still the same value.

    None when the outputs differ even then.
    """
    known = frozenset(base.meanings.values.values())

    def old_name(name: str, digest: str) -> str | None:
        return name if digest not in known and name in base.producers else None

    return _make_claims(base, after, reading, equal, old_name)


def refine_claims(base: BaseModelRun, claims: Claims, equal: Mapping[str, str]) -> Claims | None:
    """Push each claim back through nodes that are the same on both sides: `Reshape(x, a)` is `Reshape(x, b)` if a is b.

    This finds smaller values to look at. None when there is nothing to refine, or the outputs then differ.
    """
    pairs = Refinement(base, claims).smallest_pairs()
    if all(claim.new in pairs for claim in claims.claims):
        return None
    return _make_claims(base, claims.after, claims.reading, equal, lambda name, _: pairs.get(name))


def _make_claims(
    base: BaseModelRun,
    after: DetachedModel,
    reading: CanonicalGraph,
    equal: Mapping[str, str],
    old_name: Callable[[str, str], str | None],
) -> Claims | None:
    claims: list[Claim] = []

    def substitute(name: str, digest: str) -> str:
        digest = equal.get(digest, digest)
        old = old_name(name, digest)
        if old is None or base.meanings.values[old] == digest:
            return digest
        claims.append(Claim(name, old, digest))
        return base.meanings.values[old]

    meanings = reading.meanings(substitute)
    if meanings.whole != base.meanings.whole:
        return None
    return Claims(after, reading, meanings, tuple(claims))


@dataclass(slots=True)
class Refinement:
    """Finds the smallest values that have to be equal for `claims` to hold.

    A residual stream has a path for every subset of its layers, so each pair of values is looked at once; `visits`
    counts them.
    """

    base: BaseModelRun
    claims: Claims
    visits: int = 0

    def smallest_pairs(self) -> dict[str, str]:
        """New value → the old value that it has to equal."""
        pairs: dict[str, str] = {}
        visited: set[tuple[str, str]] = set()
        stack = [(claim.new, claim.old) for claim in reversed(self.claims.claims)]
        while stack:
            pair = stack.pop()
            if pair in visited:
                continue
            visited.add(pair)
            self.visits += 1
            operands = self._differing_operands(*pair)
            if operands:
                stack.extend(reversed(operands))
            else:
                new, old = pair
                pairs[new] = old
        return pairs

    def _differing_operands(self, new: str, old: str) -> list[tuple[str, str]]:
        """The pairs of operands that make two results of one operation differ; empty if some are not computed."""
        left, right = self.claims.producers.get(new), self.base.producers.get(old)
        if (
            left is None
            or right is None
            or not _same_operation(left, right)
            or _places(left, new) != _places(right, old)
        ):
            return []
        meaning = self.claims.meanings.values
        differing = [
            (name, other)
            for name, other in zip(left.input, right.input, strict=True)
            if meaning.get(name) != self.base.meanings.values.get(other)
        ]
        computed = all(name in self.claims.producers and other in self.base.producers for name, other in differing)
        return differing if computed else []


def _same_operation(left: NodeProto, right: NodeProto) -> bool:
    if (left.domain, left.op_type, len(left.input)) != (right.domain, right.op_type, len(right.input)):
        return False
    return not is_opaque(left) and _attributes(left.attribute) == _attributes(right.attribute)


def _attributes(attributes: Iterable) -> list[bytes]:
    return sorted(attribute.SerializeToString(deterministic=True) for attribute in attributes)


def _places(node: NodeProto, name: str) -> list[int]:
    return [index for index, output in enumerate(node.output) if output == name]
