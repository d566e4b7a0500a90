"""Cut out of two models just what has to be run to see whether claims hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import onnx
from onnx import NodeProto, TensorProto

from passes.model.weights import DetachedModel
from passes.proof.base import Base, is_opaque
from passes.proof.claims import Claim, Claims
from passes.proof.moves import Distinct
from passes.proof.pieces import NEW, first_output, node_of, tensor_of

__all__ = ["Part", "part_of"]

HEAVY: Final = frozenset({"MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum", "Attention", "LSTM", "GRU", "Transpose"})
"""Ops that take the time of a run. A Transpose of a weight matrix is among them."""


@dataclass(frozen=True, slots=True)
class Part:
    """A model to run. `given` maps its inputs to held meanings, `distinct` those whose elements only have to differ; a
    pair is two values in `model`, or held meanings."""

    model: DetachedModel
    given: Mapping[str, str]
    pairs: tuple[tuple[str, str], ...]
    distinct: Mapping[str, Distinct] = field(default_factory=dict)


def part_of(base: Base, claims: Claims, held: frozenset[str], chosen: Sequence[Claim] | None = None) -> Part | None:
    """The part that decides `claims`, or those of them that are `chosen`; None when it would be much of the model, or
    cannot be run in pieces."""
    builder = _Builder(base, claims, held)
    every = claims.claims if chosen is None else chosen
    pairs = [(builder.claimed(claim), builder.old(claim.old)) for claim in every]
    whole = sum(node.op_type in HEAVY for node in base.model.proto.graph.node)
    heavy = sum(node.op_type in HEAVY for node in builder.nodes.values())
    if builder.is_opaque or heavy > max(4, whole // 3):
        return None
    return builder.part(pairs)


@dataclass(slots=True)
class _Builder:
    base: Base
    claims: Claims
    held: frozenset[str]
    nodes: dict[tuple[str, str], NodeProto] = field(default_factory=dict)
    """Side and first named output → the node as it goes into the part."""
    initializers: dict[str, TensorProto] = field(default_factory=dict)
    given: dict[str, str] = field(default_factory=dict)
    inputs: dict[str, onnx.ValueInfoProto] = field(default_factory=dict)
    is_opaque: bool = False
    makers: dict[str, NodeProto] = field(init=False)
    stored: dict[str, TensorProto] = field(init=False)

    def __post_init__(self) -> None:
        graph = self.claims.after.proto.graph
        self.makers = {name: node for node in graph.node for name in node.output if name}
        self.stored = {tensor.name: tensor for tensor in graph.initializer}

    def claimed(self, claim: Claim) -> str:
        """The value that a claim is about: computed anew, unless the base has the very same value too."""
        place = self.base.places.get(claim.digest)
        return self.new(claim.new) if place is None else self.old(place)

    def new(self, root: str) -> str:
        """The name in the part of a value that the changed model computes."""
        stack = [root]
        while stack:
            name = stack.pop()
            node = self.makers.get(name)
            if node is None:
                self._store(NEW + name, self.stored.get(name))
                continue
            if ("new", first_output(node)) in self.nodes:
                continue
            copy = self._copied("new", node)
            copy.output[:] = [NEW + output if output else "" for output in node.output]
            wanted = []
            for index, read in enumerate(node.input):
                place = self.base.places.get(self.claims.meanings.values.get(read, ""))
                if read and place is not None:
                    copy.input[index] = self._seen(place)
                elif read:
                    copy.input[index] = NEW + read
                    wanted.append(read)
            stack.extend(wanted)
        return NEW + root

    def old(self, name: str) -> str:
        """A value of the base: its meaning where it is held, else its name in the part."""
        meaning = self.base.meanings.values[name]
        return meaning if meaning in self.held else self._seen(name)

    def _seen(self, root: str) -> str:
        """The name in the part of a value of the base, with what it takes to compute it."""
        stack = [root]
        while stack:
            name = stack.pop()
            meaning = self.base.meanings.values.get(name, "")
            if name in self.base.initializers:
                self._store(name, self.base.initializers[name])
            elif name in self.base.inputs:
                self.inputs[name] = next(i for i in self.base.model.proto.graph.input if i.name == name)
            elif meaning in self.held:
                self.given[name] = meaning
            elif name in self.base.producers:
                node = self.base.producers[name]
                if ("old", first_output(node)) not in self.nodes:
                    self._copied("old", node)
                    stack.extend(read for read in node.input if read)
            else:
                self.is_opaque = True
        return root

    def _copied(self, side: str, node: NodeProto) -> NodeProto:
        self.is_opaque = self.is_opaque or is_opaque(node)
        copy = self.nodes[side, first_output(node)] = node_of(side, node)
        return copy

    def _store(self, name: str, tensor: TensorProto | None) -> None:
        if tensor is None:  # a graph input that means something else than in the base, or an outer value
            self.is_opaque = True
            return
        self.initializers[name] = tensor_of(tensor, name)

    def part(self, pairs: list[tuple[str, str]]) -> Part:
        source = self.base.model.proto
        proto = onnx.ModelProto(ir_version=source.ir_version, opset_import=source.opset_import)
        proto.functions.extend(source.functions)
        graph = proto.graph
        graph.name = "part"
        computed = {output for node in self.nodes.values() for output in node.output}
        given = {name: meaning for name, meaning in self.given.items() if name not in computed}
        graph.input.extend(self.inputs.values())
        graph.input.extend(onnx.ValueInfoProto(name=name) for name in given)
        graph.initializer.extend(self.initializers.values())
        graph.node.extend(self._in_order())
        weights = {**self.base.model.weights, **self.claims.after.weights}
        return Part(DetachedModel(proto, weights), given, tuple(pairs))

    def _in_order(self) -> list[NodeProto]:
        """Nodes of the base in their order, then those of the changed model, in theirs."""
        ordered = []
        for side, model in (("old", self.base.model), ("new", self.claims.after)):
            for node in model.proto.graph.node:
                copy = self.nodes.get((side, first_output(node)))
                if copy is not None:
                    ordered.append(copy)
        return ordered
