"""Claims about values that are only moved: what holds for one tensor of distinct elements holds for every tensor.

A Reshape, a Transpose or a Slice moves elements and does not depend on them. So where both sides of a claim apply such
ops to the same values, only the shapes of those values have to be known: both sides are run on distinct numbers, and if
the results are equal, each element came from the same place.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import onnx
from onnx import NodeProto, TensorProto

from passes.graph.op_facts import moved_inputs
from passes.proof.claims import BaseModelRun, Claim, Claims, Distinct
from passes.proof.part import NEW, ProofPart, first_output, node_of, part_model, part_of, tensor_of

__all__ = ["Mover", "can_be_distinct", "distinct_arrays", "parts_of"]


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
        """The part that decides the claims taken; None if some dtype has too few distinct numbers."""
        distinct: Mapping[str, Distinct] = {name: self._base.shapes[name] for name in sorted(self._all.cuts)}
        computed = {name for node in self._all.nodes.values() for name in node.output}
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
    """Whether each dtype has more distinct whole numbers than all arrays together have elements."""
    every = list(wanted)
    elements = sum(math.prod(one.shape) for one in every)
    return all(elements < DISTINCT.get(one.dtype, 0) for one in every)


def distinct_arrays(wanted: Mapping[str, Distinct]) -> dict[str, np.ndarray]:
    """Arrays of whole numbers, of which none occurs twice, in one array or in two."""
    arrays: dict[str, np.ndarray] = {}
    start = 1
    for name, one in wanted.items():
        stop = start + math.prod(one.shape)
        arrays[name] = np.arange(start, stop).astype(one.dtype).reshape(one.shape)
        start = stop
    return arrays


DISTINCT: Final[Mapping[str, int]] = {"float32": 2**24, "float64": 2**53, "int32": 2**31, "int64": 2**53}
"""Dtype → the limit up to which it represents every whole number."""
