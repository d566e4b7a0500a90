"""Check that the nodes of a structure are still there, by op and inputs: names, order and layout may change.

It shares no code with the finders and knows no structure, only that a node of some op, with some weights bit for bit,
must be computed from other such nodes. It checks that the model has as many of them as the instances need.

Of a part of the graph, such as a module, it checks that the part still begins and ends at the same values, by their
names and their sources: it walks back from the outputs of the part and must reach its inputs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Final

import numpy as np
from onnx import NodeProto, TensorProto

from passes.graph.index import GraphIndex, constant_of
from passes.graph.op_facts import ARRANGING, CONTRACTIONS, PASSING_OPS, SIZES, attribute_of, first_output, op_of
from passes.graph.traversal import live_nodes, reads_of, walk
from passes.structures.projection_check import computed_digest
from passes.structures.types import CAST_TO, MOST_COMPUTED, MOST_HOPS, QUANTIZED, Boundary, Core, CoreNode, Instance
from passes.weights.detached import DetachedModel


def with_copies(instances: Sequence[Instance], model: DetachedModel) -> tuple[Instance, ...]:
    """`instances` of the exported `model`, each with the number of nodes that look like its last core node."""
    if not instances:
        return ()
    index = CoreIndex(model)
    cores = {instance.core.last for instance in instances if instance.core}
    copies = {core: len(index.values_of(core)) for core in cores}
    return tuple(
        replace(instance, core=replace(instance.core, copies=copies[instance.core.last])) if instance.core else instance
        for instance in instances
    )


def find_lost_cores(instances: Sequence[Instance], model: DetachedModel) -> dict[tuple[str, str], str]:
    """(kind, name) → why the instance is lost, for the `instances` with a core.

    An instance is kept if a node like the exported node still makes its value. Instances whose values were renamed are
    kept up to the number of matching nodes that remain.
    """
    index = CoreIndex(model)
    groups: dict[tuple[str, CoreNode], list[tuple[Instance, Core]]] = defaultdict(list)
    for instance in instances:
        if instance.core is not None:
            groups[instance.kind, instance.core.last].append((instance, instance.core))
    reasons: dict[tuple[str, str], str] = {}
    for (kind, last), group in groups.items():
        unnamed = [(instance, core) for instance, core in group if not index.computes(last, core.value)]
        if not unnamed:
            continue  # the usual case; a search of the whole model is slow
        no_instances = group[0][1].copies - len(group)
        left_over = len(index.values_of(last)) - (len(group) - len(unnamed)) - no_instances
        for instance, core in unnamed[max(0, left_over) :]:
            reasons[kind, instance.name] = index.why(core)
    return reasons


class CoreIndex:
    """The live nodes of a model by number: their ops, the producers of their inputs, and the weights among these."""

    def __init__(self, model: DetachedModel) -> None:
        self._model = model
        self._whole = model.index
        self._live = GraphIndex(model.proto.graph, live_nodes(model.proto.graph, by_values=True))
        """Without dead nodes, which keep no structure."""
        self._nodes, self._producers = self._live.nodes, self._live.positions
        self._ops = [op_of(node) for node in self._nodes]
        self._inputs = [[name for name in node.input if name] for node in self._nodes]
        self._outputs = [first_output(node) for node in self._nodes]
        self._producers_of = [
            [self._producers[name] for name in names if name in self._producers] for names in self._inputs
        ]
        self._by_op: dict[str, list[int]] = defaultdict(list)
        for index, op in enumerate(self._ops):
            self._by_op[op].append(index)
        self._stored = self._live.initializers
        self._digests: dict[str, str] = {}
        self._known: dict[tuple[int, int], bool] = {}
        self._before: dict[int, dict[str, list[int]]] = {}

    def computes(self, last: CoreNode, value: str) -> bool:
        """Whether `value` is made by a node that looks like `last`, from nodes like those of `last`."""
        self._known.clear()  # its keys are identities, which hold for one call
        producer = self._producers.get(value)
        return producer is not None and self._outputs[producer] == value and self._matches(last, producer)

    def values_of(self, last: CoreNode) -> set[str]:
        """All values that are made by such a node."""
        self._known.clear()
        candidates = [index for op in last.ops for index in self._by_op.get(op, ())]
        if last.weights:  # of hundreds of products few read these weights
            reading = {index for digest in last.weights[0] for index in self._readers.get(digest, ())}
            candidates = [index for index in candidates if index in reading]
        return {self._outputs[index] for index in candidates if self._matches(last, index)}

    @cached_property
    def _readers(self) -> dict[str, list[int]]:
        """Digest of a constant → the nodes that read it."""
        readers: dict[str, list[int]] = defaultdict(list)
        for index, names in enumerate(self._inputs):
            for digest in filter(None, map(self._digest, names)):
                readers[digest].append(index)
        return readers

    def why(self, core: Core) -> str:
        """The reason for the loss: what the model has in the place of `core`."""
        chain = " → ".join(dict.fromkeys(_names_of(core.last)))
        producer = self._producers.get(core.value)
        if producer is None:
            return f"nothing makes {core.value!r} any more by {chain}"
        return f"{core.value!r} is made by {self._ops[producer]}, and no more by {chain} with the same weights"

    def _matches(self, core: CoreNode, index: int) -> bool:
        if self._ops[index] not in core.ops:
            return False
        key = (id(core), index)
        if key not in self._known:
            self._known[key] = (
                all(
                    attribute_of(self._nodes[index], name, DEFAULTS.get(name)) == value
                    for name, value in core.attributes
                )
                and self._reads_weights(core, index)
                and all(self._reads(core, wanted, index) for wanted in core.reads)
            )
        return self._known[key]

    def _reads_weights(self, core: CoreNode, index: int) -> bool:
        if not core.weights and not core.computed:
            return True
        digests = [self._digest(name) for name in self._inputs[index]]
        if digests.count("") < core.computed:
            return False
        for accepted in core.weights:
            match = next((digest for digest in digests if digest in accepted), None)
            if match is None:
                return False
            digests.remove(match)
        return True

    def _reads(self, core: CoreNode, wanted: CoreNode, index: int) -> bool:
        if core.allow_gaps:
            before = self._upstream(index)
            return any(self._matches(wanted, up) for op in wanted.ops for up in before.get(op, ()))
        producers = (producer for name in self._inputs[index] for producer in self._producers_upstream(name))
        return any(self._matches(wanted, producer) for producer in producers)

    def _upstream(self, index: int) -> dict[str, list[int]]:
        """The nodes at most `MOST_HOPS` before a node, by op, nearest first; none before a product of two values."""
        if index not in self._before:
            seen, front = {index}, [index]
            by_op: dict[str, list[int]] = defaultdict(list)
            for _ in range(MOST_HOPS):
                front = self._hop(front, seen)
                for producer in front:
                    by_op[self._ops[producer]].append(producer)
                front = [producer for producer in front if not self._is_barrier(producer)]
            self._before[index] = by_op
        return self._before[index]

    def _hop(self, front: Sequence[int], seen: set[int]) -> list[int]:
        """The nodes that make the inputs of `front` and are not in `seen`; adds them to `seen`.

        Nodes that only round a value, such as QuantizeLinear and DequantizeLinear, are no hop: their own producers are
        returned as well.
        """
        reached: list[int] = []
        while front:
            new = list({producer for consumer in front for producer in self._producers_of[consumer]} - seen)
            seen.update(new)
            reached += new
            front = [producer for producer in new if self._ops[producer] in ROUNDING]
        return reached

    def _is_barrier(self, index: int) -> bool:
        """Whether what comes before a node belongs to another structure: a product with weights may mix heads."""
        return self._ops[index] in BARRIERS and not any(map(self._digest, self._inputs[index]))

    def _producers_upstream(self, name: str) -> Iterator[int]:
        """The producer of `name`, and the producers before it through layout ops and quantization, nearest first."""
        producer = self._producers.get(name)
        while producer is not None:
            yield producer
            op = self._ops[producer]
            if op not in LAYOUT and op not in ROUNDING and not self._is_bound(producer):
                return
            producer = self._producers.get(self._inputs[producer][0])

    def _is_bound(self, index: int) -> bool:
        """Whether a node clips a value to the range of a quantized format, before its quantization."""
        uses = self._live.uses[self._outputs[index]]
        return self._ops[index] == "Clip" and all(self._ops[consumer] in QUANTIZING for consumer, _ in uses)

    def _digest(self, name: str) -> str:
        """The digest of the stored tensor that `name` is made of, up to its shape, with the types that it is cast to.

        For a computed constant, the digest of its values. Empty for a value computed from data.
        """
        if name not in self._digests:
            self._digests[name] = self._digest_of(name)
        return self._digests[name]

    def _digest_of(self, name: str) -> str:
        casts, whole = "", name
        producer = self._producers.get(name)
        while producer is not None and self._ops[producer] in ARRANGING:
            if self._ops[producer] == "Cast":  # it changes the bits, so it is part of the digest
                casts = f"{CAST_TO}{attribute_of(self._nodes[producer], 'to')}{casts}"
            name = self._inputs[producer][0]
            producer = self._producers.get(name)
        tensor = self._stored.get(name)
        if tensor is None and producer is not None and self._ops[producer] == "Constant":
            tensor = constant_of(self._nodes[producer])
        return self._computed_digest(whole) if tensor is None else self._model.digest(tensor) + casts

    @cached_property
    def _constants(self) -> set[str]:
        return self._whole.folded

    def _computed_digest(self, name: str) -> str:
        """The digest of a computed constant: of its values if the constant is small enough; of its computation if it is
        large and quantized; else `LARGE`."""
        if name not in self._constants:
            return ""
        if _most_elements(name, self._whole.producers, self._stored) > MOST_COMPUTED:
            return self._quantized_digest(name) or LARGE
        return computed_digest(self._model, name, self._whole) or LARGE

    def _quantized_digest(self, name: str) -> str:
        """The digest of the computation of a tensor that is stored quantized; empty for other tensors."""
        nodes: list[NodeProto] = []
        while (node := self._whole.producers.get(name)) is not None and node.op_type != "Constant":
            if node.op_type in ("DequantizeLinear", "QuantizeLinear"):
                nodes.insert(0, node)
            elif node.op_type not in ARRANGING or node.op_type == "Cast":
                return ""
            name = node.input[0]
        if [node.op_type for node in nodes] not in (["DequantizeLinear"], ["QuantizeLinear", "DequantizeLinear"]):
            return ""
        texts = [self._digest_of_stored(name)]
        for node in nodes:
            texts += [self._digest_of_stored(parameter) for parameter in node.input[1:3]]
            texts += [str(attribute_of(node, "axis", 1)), str(attribute_of(node, "block_size", 0))]
        return QUANTIZED + "/".join(texts)

    def _digest_of_stored(self, name: str) -> str:
        """The digest of a stored tensor, perhaps in a Constant, whatever its shape; empty if there is none."""
        tensor = self._whole.tensor_at(name)
        return "" if tensor is None else self._model.digest(tensor)


def _most_elements(name: str, producers: Mapping[str, NodeProto], stored: Mapping[str, TensorProto]) -> int:
    """The size of the largest tensor that a constant is computed from."""
    values = walk([name], lambda value: producers[value].input if value in producers else ())
    return max((math.prod(stored[value].dims) for value in values if value in stored), default=0)


def _names_of(core: CoreNode) -> Iterator[str]:
    for node in core.reads:
        yield from _names_of(node)
    yield min(core.ops)


BARRIERS: Final = CONTRACTIONS | {"Softmax"}
"""Ops at which the search for a core node stops, unless they read weights."""

QUANTIZING: Final = frozenset({"QuantizeLinear", "com.microsoft.QuantizeLinear"})

ROUNDING: Final = QUANTIZING | {"DequantizeLinear", "com.microsoft.DequantizeLinear"}
"""Ops that together only round a value."""

LARGE: Final = "constant"
"""The digest of a constant whose values are not read."""

LAYOUT: Final = PASSING_OPS | {"Expand"}
"""Ops that may be between two core nodes."""

DEFAULTS: Final[Mapping[str, object]] = {
    **{"epsilon": np.float32(1e-5).item(), "approximate": b"none", "alpha": 1.0},
    **{"axis": 1, "block_size": 0, "bits": 4},
}
"""Attribute → its default; a core may require no others."""


def with_sources(instances: Sequence[Instance], model: DetachedModel) -> tuple[Instance, ...]:
    """`instances` of the exported `model`, each with the graph inputs that bypass the inputs of its part."""
    index = model.index
    return tuple(
        replace(instance, boundary=replace(boundary, sources=frozenset(_sources(boundary, index))))
        if (boundary := instance.boundary)
        else instance
        for instance in instances
    )


def find_lost_boundaries(instances: Sequence[Instance], model: DetachedModel) -> dict[str, str]:
    """Instance name → why the instance is lost, for the `instances` with a boundary.

    A boundary is kept when the model still has its values, as they were computed or as they were read, and the outputs
    of the boundary are computed only from its inputs.
    """
    index = GraphIndex(model.proto.graph, model.index.live)
    values = {*index.producers, *index.inputs, *index.initializers}
    reasons = {}
    for instance in instances:
        if instance.boundary is None:
            continue
        crossings = (*instance.boundary.inputs, *instance.boundary.outputs)
        missing = [
            crossing.value
            for crossing in crossings
            if crossing.value not in values and not values.issuperset(crossing.read_as)
        ]
        past = _sources(instance.boundary, index) - instance.boundary.sources
        if missing:
            reasons[instance.name] = f"its boundary value {missing[0]!r} is computed no more"
        elif past:
            reasons[instance.name] = f"computed from {min(past)!r} past its boundary"
    return reasons


def _sources(boundary: Boundary, index: GraphIndex) -> set[str]:
    """The graph inputs that the outputs of `boundary` are computed from without passing through its inputs."""
    begins = {name for crossing in boundary.inputs for name in (crossing.value, *crossing.read_as)}
    ends = (
        name
        for crossing in boundary.outputs
        for name in ((crossing.value,) if crossing.value in index.producers else crossing.read_as)
    )

    def before(name: str) -> list[str]:
        producer = index.producer(name)
        reads = [] if producer is None or producer.op_type in SIZES else reads_of(producer)
        return [read for read in reads if read not in begins]

    return {name for name in walk([end for end in ends if end not in begins], before) if name in index.inputs}
