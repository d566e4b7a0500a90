"""Claims that values of a changed model equal the values of the model before; only claimed values are computed.

Most steps change a few nodes. If these nodes still compute the same values, the operators after them run on equal
values. So each value that is computed in a new way under its old name becomes a claim. If the outputs of both models
have the same value digest under the claims, it is enough to run the changed nodes on stored values of the model before,
and to check each claim bit for bit. A claim depends only on earlier claims.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import onnx
from onnx import NodeProto, TensorProto

from passes.graph.index import GraphIndex, computed_values, copy_of, extract, values_read
from passes.graph.inference import INTEGERS, infer_types
from passes.graph.op_facts import PRODUCTS, first_output, is_opaque
from passes.model.analysis import AnalyzedModel
from passes.model.canonical import ValueDigests
from passes.proof.draws import FURTHER_SIZES
from passes.proof.prover import Measurement
from passes.proof.tables import NEW, tensor_of
from passes.weights.detached import DetachedModel

SMALL_ELEMENTS: Final = 2**14
"""Floating-point values of a known size up to this number of elements are held; integers and bools always are, as they
are mostly shapes, positions and masks."""

MOST_ROWS: Final = max(FURTHER_SIZES)
"""What an open first dim, mostly the batch, counts as."""

HEAVY: Final = PRODUCTS | {"Einsum", "Attention", "LSTM", "GRU", "Transpose"}
"""Ops that dominate the time of a run; Transpose counts because of weight matrices."""

MOST_HEAVY: Final = 4
"""The most heavy nodes of any part; a part of a large model may have a third of the model's heavy nodes."""


@dataclass(frozen=True)
class ProvenModel:
    """A model whose measurement is known, with the digests of its values; the next model is compared with it."""

    model: DetachedModel
    digests: ValueDigests
    measurement: Measurement

    @cached_property
    def first_names(self) -> Mapping[str, str]:
        """Value digest → the first value that has it."""
        return {digest: name for name, digest in reversed([*self.digests.values.items()]) if name}


@dataclass(frozen=True, slots=True)
class Claims:
    """Values of `after` claimed to be those of the same name in the proven model, with the digest that each has without
    its claim; and the digests of all values under the claims."""

    after: DetachedModel
    digests: ValueDigests
    names: Mapping[str, str]

    def cover(self, before: ProvenModel, names: Collection[str]) -> bool:
        """Whether the claims also imply that the values called `names`, where both models have them, are equal."""
        ours, theirs = self.digests.values, before.digests.values
        return all(ours[name] == theirs[name] for name in names if name in ours and name in theirs)


def make_claims(before: ProvenModel, after: AnalyzedModel, equal: Mapping[str, str]) -> Claims | None:
    """Claim that every value that is computed in a new way under its old name is still the same value.

    Args:
        before: a model that was proven.
        after: the model that a step made of it.
        equal: value digests → the digest of a value that was proven to be equal.

    Returns:
        None if the outputs differ even under the claims.
    """
    known, names = before.first_names.keys(), dict[str, str]()

    def substitute(name: str, digest: str) -> str:
        digest = equal.get(digest, digest)
        if digest in known or name not in before.model.index.producers:
            return digest
        names[name] = digest
        return before.digests.values[name]

    digests = after.canonical.value_digests(substitute)
    return Claims(after.model, digests, names) if digests.whole == before.digests.whole else None


def small_values(model: DetachedModel) -> list[str]:
    """Computed values that are cheap to hold, by their inferred types; a constant is known without a run."""
    graph = infer_types(model.proto)
    computed = computed_values(node for node in model.proto.graph.node if node.op_type != "Constant")
    return [info.name for info in graph.value_info if info.name in computed and _is_small(info)]


def _is_small(info: onnx.ValueInfoProto) -> bool:
    if info.type.WhichOneof("value") != "tensor_type":
        return False
    tensor = info.type.tensor_type
    if tensor.elem_type in INTEGERS:
        return True
    if tensor.elem_type not in FLOATS or not tensor.HasField("shape"):
        return False
    dims = tensor.shape.dim
    sizes = [dim.dim_value if dim.HasField("dim_value") else MOST_ROWS for dim in dims]
    return all(dim.HasField("dim_value") for dim in dims[1:]) and math.prod(sizes) <= SMALL_ELEMENTS


FLOATS: Final = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE})


@dataclass(frozen=True, slots=True)
class ProofPart:
    """The part of two models that decides claims, with pairs of values that have to be equal.

    `held` maps inputs to the digests of held values. A pair names two values in `model`, or a digest in `held`.
    """

    model: DetachedModel
    held: Mapping[str, str]
    pairs: tuple[tuple[str, str], ...]


def part_of(before: ProvenModel, claims: Claims, held: frozenset[str]) -> ProofPart | None:
    """The part that decides `claims`; None when it would be a large share of the model, or when a node in it cannot be
    run in pieces.

    Args:
        before: a model that was proven.
        claims: what has to be equal for the next model to be equal.
        held: the digests of values that are held.
    """
    return _PartBuilder(before, claims, held).build()


def tail_of(
    model: DetachedModel, digests: ValueDigests, names: Collection[str], held: frozenset[str]
) -> ProofPart | None:
    """The nodes that compute `names` from held values; None when they are a large share of the model, or when one of
    them cannot be run in pieces.

    Args:
        model: a model with values that are held, as models before it have computed them.
        digests: of its values.
        names: values of the model, which the part computes.
        held: the digests of values that are held.
    """
    index = model.index
    computed = index.producers.keys() - names
    given = {name: digests.values[name] for name in computed if digests.values.get(name) in held}
    nodes = index.ancestors(names, within=index.producers.keys() - given.keys())
    whole, heavy = _count_heavy(index.nodes), _count_heavy(nodes)
    if any(map(is_opaque, nodes)) or heavy > max(MOST_HEAVY, whole // 3) or _is_most_of(nodes, index.nodes):
        return None
    read = values_read(nodes)
    inputs = [*(info for name, info in index.required_inputs.items() if name in read), *(given.keys() & read)]
    outputs = [info for name, info in index.outputs.items() if name in names]  # onnxruntime refuses a wrong type
    part = extract(model.proto, nodes, inputs=inputs, outputs=outputs)
    return ProofPart(model.with_proto(part), {name: given[name] for name in given.keys() & read}, ())


def _count_heavy(nodes: Iterable[NodeProto]) -> int:
    return sum(node.op_type in HEAVY for node in nodes)


def _is_most_of(nodes: Sequence[NodeProto], whole: Sequence[NodeProto]) -> bool:
    return len(nodes) > len(whole) // 2 and _count_heavy(nodes) >= _count_heavy(whole) // 2


@dataclass(slots=True)
class _PartBuilder:
    """Collects the nodes that compute claimed values in the changed model, and the nodes of the model before whose
    values these read or are compared with. It stops at held values."""

    before: ProvenModel
    claims: Claims
    held: frozenset[str]
    old_nodes: dict[str, NodeProto] = field(default_factory=dict)
    """First output → the node, by the order in which they are found."""
    new_nodes: dict[str, NodeProto] = field(default_factory=dict)
    initializers: dict[str, TensorProto] = field(default_factory=dict)
    given: dict[str, str] = field(default_factory=dict)
    inputs: dict[str, onnx.ValueInfoProto] = field(default_factory=dict)
    is_opaque: bool = False
    heavy: int = 0
    """How many of the nodes dominate the time of a run."""

    def build(self) -> ProofPart | None:
        new, old = self.claims.after.index, self.before.model.index
        pairs, whole = [], _count_heavy(old.nodes)
        for name in self.claims.names:
            self._add_new(name, new)
            digest = self.before.digests.values[name]
            if digest in self.held:
                self.given[digest] = digest
            else:
                self._add_old(name)
            pairs.append((NEW + name, digest if digest in self.held else name))
            # A run of the whole model then costs at most twice as much, and is needed anyway where bits differ.
            if self.is_opaque or self.heavy > max(MOST_HEAVY, whole // 3):
                return None
        nodes = [
            found[first_output(node)]
            for graph, found in ((old, self.old_nodes), (new, self.new_nodes))
            for node in graph.nodes
            if first_output(node) in found
        ]
        if _is_most_of(nodes, old.nodes):
            return None
        computed = computed_values(nodes)
        fed = {name: digest for name, digest in self.given.items() if name not in computed}
        inputs = [*self.inputs.values(), *(name for name, digest in fed.items() if name != digest)]
        proto = extract(self.before.model.proto, nodes, inputs=inputs, initializers=self.initializers.values())
        weights = {**self.before.model.weights, **self.claims.after.weights}
        return ProofPart(DetachedModel(proto, weights), fed, tuple(pairs))

    def _add_new(self, root: str, index: GraphIndex) -> None:
        """Add the nodes of the changed model that compute `root`, down to values that the model before has too."""
        stack = [root]
        while stack:
            name = stack.pop()
            node = index.producer(name)
            if node is None:
                self._store(NEW + name, index.initializers.get(name))
            elif first_output(node) not in self.new_nodes:
                copy = self.new_nodes[first_output(node)] = self._copy(node, "new")
                copy.output[:] = [NEW + output if output else "" for output in node.output]
                for position, read in enumerate(node.input):
                    known = self.before.first_names.get(self.claims.digests.values.get(read, ""))
                    if read and known is None:
                        stack.append(read)
                    elif known is not None:
                        self._add_old(known)
                    copy.input[position] = known or (NEW + read if read else "")

    def _add_old(self, root: str) -> None:
        """Add a value of the model before, with the nodes that compute it."""
        index, stack = self.before.model.index, [root]
        while stack:
            name = stack.pop()
            digest, node = self.before.digests.values.get(name, ""), index.producer(name)
            if name in index.initializers:
                self._store(name, index.initializers[name])
            elif name in index.inputs:
                self.inputs[name] = index.inputs[name]
            elif digest in self.held:
                self.given[name] = digest
            elif node is None:
                self.is_opaque = True
            elif first_output(node) not in self.old_nodes:
                self.old_nodes[first_output(node)] = self._copy(node, "old")
                stack.extend(read for read in node.input if read)

    def _copy(self, node: NodeProto, side: str) -> NodeProto:
        self.is_opaque = self.is_opaque or is_opaque(node)
        self.heavy += node.op_type in HEAVY
        copy = copy_of(node)
        del copy.metadata_props[:]
        copy.name = f"{side}/{first_output(node)}"
        return copy

    def _store(self, name: str, tensor: TensorProto | None) -> None:
        if tensor is None:  # a graph input that differs from the input of the model before, or a value from outside
            self.is_opaque = True
        else:
            self.initializers[name] = tensor_of(tensor, name)
