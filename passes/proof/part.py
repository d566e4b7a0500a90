"""Extract from two models the part that has to be run to decide whether claims hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import onnx
from onnx import NodeProto, TensorProto

from passes.graph.op_facts import is_opaque
from passes.proof.claims import BaseModelRun, Claim, Claims, Distinct
from passes.weights.detached import DetachedModel

__all__ = ["NEW", "ProofPart", "first_output", "node_of", "part_model", "part_of", "tensor_of"]

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


def first_output(node: NodeProto) -> str:
    """The first named output of a node, which identifies it."""
    return next(output for output in node.output if output)


HEAVY: Final = frozenset({"MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum", "Attention", "LSTM", "GRU", "Transpose"})
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
                self.inputs[name] = next(i for i in self.base.model.proto.graph.input if i.name == name)
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
        computed = {output for node in self.nodes.values() for output in node.output}
        given = {name: meaning for name, meaning in self.given.items() if name not in computed}
        inputs = [*self.inputs.values(), *(onnx.ValueInfoProto(name=name) for name in given)]
        return ProofPart(part_model(self.base, self.claims, self.nodes, inputs, self.initializers), given, tuple(pairs))


def part_model(
    base: BaseModelRun,
    claims: Claims,
    nodes: Mapping[tuple[str, str], NodeProto],
    inputs: Iterable[onnx.ValueInfoProto],
    initializers: Mapping[str, TensorProto],
) -> DetachedModel:
    """A model of `nodes` (by side and first output): those of the base first, in the order of their models."""
    source = base.model.proto
    proto = onnx.ModelProto(ir_version=source.ir_version, opset_import=source.opset_import)
    proto.functions.extend(source.functions)
    proto.graph.name = "part"
    proto.graph.input.extend(inputs)
    proto.graph.initializer.extend(initializers.values())
    for side, model in (("old", base.model), ("new", claims.after)):
        copies = (nodes.get((side, first_output(node))) for node in model.proto.graph.node)
        proto.graph.node.extend(copy for copy in copies if copy is not None)
    return DetachedModel(proto, {**base.model.weights, **claims.after.weights})
