"""Extract from two models the parts that have to be run to decide whether claims hold.

A Reshape, a Transpose or a Slice moves elements and does not depend on them. So where both sides of a claim apply such
ops to the same values, only the shapes of these values have to be known: both sides are run on distinct numbers, and if
the results are equal, each element came from the same place (`Mover`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import onnx
from onnx import NodeProto, TensorProto

from passes.graph.index import computed_values, extract
from passes.graph.op_facts import PRODUCTS, first_output, is_opaque, moved_inputs
from passes.proof.claims import BaseModelRun, Claim, Claims, Distinct
from passes.weights.detached import DetachedModel

NEW: Final = "onnxline.new/"
"""Prefix of the names of the changed model, which may mean other values in the base."""


def node_of(side: str, node: NodeProto) -> NodeProto:
    """A bare copy of `node`, named by its side and its first output."""
    copy = NodeProto()
    copy.CopyFrom(node)
    del copy.metadata_props[:]
    copy.name = f"{side}/{first_output(node)}"
    return copy


def tensor_of(tensor: TensorProto, name: str) -> TensorProto:
    """A copy of `tensor` called `name`."""
    copy = TensorProto()
    copy.CopyFrom(tensor)
    copy.name = name
    return copy


HEAVY: Final = PRODUCTS | {"Einsum", "Attention", "LSTM", "GRU", "Transpose"}
"""Ops that dominate the time of a run; Transpose counts because of weight matrices."""


@dataclass(frozen=True, slots=True)
class ProofPart:
    """A part of two models, with pairs of values that have to be equal.

    `given` maps inputs to held meanings; `distinct` describes inputs whose elements only have to differ. A pair names
    two values in `model`, or held meanings.
    """

    model: DetachedModel
    given: Mapping[str, str]
    pairs: tuple[tuple[str, str], ...]
    distinct: Mapping[str, Distinct] = field(default_factory=dict)


def part_of(
    base: BaseModelRun, claims: Claims, held: frozenset[str], chosen: Sequence[Claim] | None = None
) -> ProofPart | None:
    """The part that decides `claims` (or those `chosen`); None when it would be a large share of the model, or when a
    node in it cannot be run in pieces."""
    builder = _PartBuilder(base, claims, held)
    every = claims.claims if chosen is None else chosen
    pairs = [(builder.add_claimed(claim), builder.add_old(claim.old)) for claim in every]
    whole = sum(node.op_type in HEAVY for node in base.model.proto.graph.node)
    heavy = sum(node.op_type in HEAVY for node in builder.nodes.values())
    if builder.is_opaque or heavy > max(4, whole // 3):
        return None
    return builder.build(pairs)


@dataclass(slots=True)
class _PartBuilder:
    base: BaseModelRun
    claims: Claims
    held: frozenset[str]
    nodes: dict[tuple[str, str], NodeProto] = field(default_factory=dict)
    """Side and first named output → the node as it goes into the part."""
    initializers: dict[str, TensorProto] = field(default_factory=dict)
    given: dict[str, str] = field(default_factory=dict)
    inputs: dict[str, onnx.ValueInfoProto] = field(default_factory=dict)
    is_opaque: bool = False

    def add_claimed(self, claim: Claim) -> str:
        """Add the new value of `claim`: that of the base if the base computes the same, else the new computation."""
        place = self.base.places.get(claim.digest)
        return self.add_new(claim.new) if place is None else self.add_old(place)

    def add_new(self, root: str) -> str:
        """Add a value that the changed model computes, with its nodes; returns its name in the part."""
        stack = [root]
        while stack:
            name = stack.pop()
            node = self.claims.producers.get(name)
            if node is None:
                self._store(NEW + name, self.claims.initializers.get(name))
                continue
            if ("new", first_output(node)) in self.nodes:
                continue
            copy = self._copy_node("new", node)
            copy.output[:] = [NEW + output if output else "" for output in node.output]
            wanted = []
            for index, read in enumerate(node.input):
                place = self.base.places.get(self.claims.meanings.values.get(read, ""))
                if read and place is not None:
                    copy.input[index] = self._add_base_value(place)
                elif read:
                    copy.input[index] = NEW + read
                    wanted.append(read)
            stack.extend(wanted)
        return NEW + root

    def add_old(self, name: str) -> str:
        """Add a value of the base; returns its meaning where it is held, else its name in the part."""
        meaning = self.base.meanings.values[name]
        return meaning if meaning in self.held else self._add_base_value(name)

    def _add_base_value(self, root: str) -> str:
        """Add a value of the base, with the nodes that compute it; returns its name in the part."""
        stack = [root]
        while stack:
            name = stack.pop()
            meaning = self.base.meanings.values.get(name, "")
            if name in self.base.initializers:
                self._store(name, self.base.initializers[name])
            elif name in self.base.inputs:
                self.inputs[name] = self.base.inputs[name]
            elif meaning in self.held:
                self.given[name] = meaning
            elif name in self.base.producers:
                node = self.base.producers[name]
                if ("old", first_output(node)) not in self.nodes:
                    self._copy_node("old", node)
                    stack.extend(read for read in node.input if read)
            else:
                self.is_opaque = True
        return root

    def _copy_node(self, side: str, node: NodeProto) -> NodeProto:
        self.is_opaque = self.is_opaque or is_opaque(node)
        copy = self.nodes[side, first_output(node)] = node_of(side, node)
        return copy

    def _store(self, name: str, tensor: TensorProto | None) -> None:
        if tensor is None:  # a graph input that differs from the one in the base, or a value from outside
            self.is_opaque = True
            return
        self.initializers[name] = tensor_of(tensor, name)

    def build(self, pairs: list[tuple[str, str]]) -> ProofPart:
        computed = computed_values(self.nodes.values())
        fed = {name: meaning for name, meaning in self.given.items() if name not in computed}
        inputs = [*self.inputs.values(), *(onnx.ValueInfoProto(name=name) for name in fed)]
        model = part_model(self.base, self.claims, self.nodes, inputs, self.initializers)
        return ProofPart(model, fed, tuple(pairs))


def part_model(
    base: BaseModelRun,
    claims: Claims,
    nodes: Mapping[tuple[str, str], NodeProto],
    inputs: Iterable[onnx.ValueInfoProto],
    initializers: Mapping[str, TensorProto],
) -> DetachedModel:
    """A model of `nodes` (by side and first output): those of the base first, in the order of their models."""
    sides = (("old", base.model), ("new", claims.after))
    found = [nodes.get((side, first_output(node))) for side, model in sides for node in model.proto.graph.node]
    copies = [copy for copy in found if copy is not None]
    proto = extract(base.model.proto, copies, inputs=inputs, initializers=initializers.values())
    return DetachedModel(proto, {**base.model.weights, **claims.after.weights})


def parts_of(base: BaseModelRun, claims: Claims, held: frozenset[str]) -> list[ProofPart] | None:
    """The parts that decide `claims`; None when they would be a large share of the model, or cannot be run alone."""
    whole = part_of(base, claims, held)
    if whole is not None:
        return [whole]
    mover = Mover(base, claims, held)
    others = [claim for claim in claims.claims if not mover.takes(claim)]
    moved = mover.part() if len(others) < len(claims.claims) else None
    rest = part_of(base, claims, held, others) if moved is not None else None
    return None if moved is None or rest is None else [moved, rest]


@dataclass(slots=True)
class _ClaimSides:
    """The nodes on both sides of one claim, and the values that they read."""

    nodes: dict[tuple[str, str], NodeProto] = field(default_factory=dict)
    """Side and first output → the node as it goes into the part."""
    cuts: set[str] = field(default_factory=set)
    """Values of the base whose elements are moved."""
    given: dict[str, str] = field(default_factory=dict)
    stored: dict[str, TensorProto] = field(default_factory=dict)


class Mover:
    """Collects the claims on moved values, and extracts the part that decides them."""

    def __init__(self, base: BaseModelRun, claims: Claims, held: frozenset[str]) -> None:
        self._base = base
        self._claims = claims
        self._held = held
        self._all = _ClaimSides()
        self._pairs: list[tuple[str, str]] = []
        self.visits = 0
        """The number of nodes visited."""

    def takes(self, claim: Claim) -> bool:
        """Whether both sides of `claim` only move elements of the same values, of known shapes."""
        sides = _ClaimSides()
        if not self._new_side(claim.new, sides) or not self._old_side(claim.old, sides):
            return False
        if not all(name in self._base.shapes for name in sides.cuts):
            return False
        self._all.nodes |= sides.nodes
        self._all.cuts |= sides.cuts
        self._all.given |= sides.given
        self._all.stored |= sides.stored
        self._pairs.append((NEW + claim.new, claim.old))
        return True

    def part(self) -> ProofPart | None:
        """The part that decides the claims taken; None if some dtype has too few distinct integers."""
        distinct: Mapping[str, Distinct] = {name: self._base.shapes[name] for name in sorted(self._all.cuts)}
        computed = computed_values(self._all.nodes.values()).keys()
        # One claim may compute what another moves, or read it as indices; such a value cannot be any number.
        free = self._all.cuts.isdisjoint(computed | self._all.given.keys()) and computed.isdisjoint(self._all.given)
        if not free or not can_be_distinct(distinct.values()):
            return None
        inputs = (onnx.ValueInfoProto(name=name) for name in (*distinct, *self._all.given))
        model = part_model(self._base, self._claims, self._all.nodes, inputs, self._all.stored)
        return ProofPart(model, self._all.given, tuple(self._pairs), distinct)

    def _new_side(self, root: str, sides: _ClaimSides) -> bool:
        front = [root]
        while front:
            self.visits += 1
            node = self._claims.producers.get(front.pop())
            moved = moved_inputs(node) if node is not None else []
            if node is None or not moved:
                return False
            if ("new", first_output(node)) in sides.nodes:
                continue
            copy = _add("new", node, sides)
            copy.output[:] = [NEW + name if name else "" for name in node.output]
            for index, read in enumerate(node.input):
                place = self._base.places.get(self._claims.meanings.values.get(read, "")) if read else None
                copy.input[index] = place or (NEW + read if read else "")
                if index >= len(moved):
                    if read and not (
                        self._add_base_operand(place, sides) if place else self._add_new_operand(read, sides)
                    ):
                        return False
                elif place:
                    sides.cuts.add(place)
                else:
                    front.append(read)
        return True

    def _old_side(self, root: str, sides: _ClaimSides) -> bool:
        front = [root]
        while front:
            self.visits += 1
            name = front.pop()
            if name in sides.cuts:
                continue
            node = self._base.producers.get(name)
            moved = moved_inputs(node) if node is not None else []
            if node is None or not moved:
                return False
            if ("old", first_output(node)) in sides.nodes:
                continue
            _add("old", node, sides)
            front.extend(moved)
            if not all(self._add_base_operand(read, sides) for read in node.input[len(moved) :] if read):
                return False
        return True

    def _add_base_operand(self, name: str, sides: _ClaimSides) -> bool:
        """Add an operand of the base that says where elements go; False if its value is not known."""
        meaning = self._base.meanings.values.get(name, "")
        if name in self._base.initializers:
            sides.stored[name] = tensor_of(self._base.initializers[name], name)
        elif meaning in self._held:
            sides.given[name] = meaning
        else:
            return False
        return True

    def _add_new_operand(self, name: str, sides: _ClaimSides) -> bool:
        """`_add_base_operand` for a value that only the changed model has."""
        tensor = self._claims.initializers.get(name)
        if tensor is not None:
            sides.stored[NEW + name] = tensor_of(tensor, NEW + name)
            return True
        node = self._claims.producers.get(name)
        if node is None or node.op_type != "Constant":
            return False
        _add("new", node, sides).output[:] = [NEW + name]
        return True


def _add(side: str, node: NodeProto, sides: _ClaimSides) -> NodeProto:
    copy = sides.nodes[side, first_output(node)] = node_of(side, node)
    return copy


def can_be_distinct(wanted: Iterable[Distinct]) -> bool:
    """Whether each dtype represents more distinct integers than all arrays together have elements."""
    every = list(wanted)
    elements = sum(math.prod(spec.shape) for spec in every)
    return all(elements < DISTINCT.get(spec.dtype, 0) for spec in every)


def distinct_arrays(wanted: Mapping[str, Distinct]) -> dict[str, np.ndarray]:
    """Arrays of integers; no integer occurs twice, within an array or in two arrays."""
    arrays: dict[str, np.ndarray] = {}
    start = 1
    for name, spec in wanted.items():
        stop = start + math.prod(spec.shape)
        arrays[name] = np.arange(start, stop).astype(spec.dtype).reshape(spec.shape)
        start = stop
    return arrays


DISTINCT: Final[Mapping[str, int]] = {"float32": 2**24, "float64": 2**53, "int32": 2**31, "int64": 2**53}
"""Dtype → the limit up to which it represents every integer."""
