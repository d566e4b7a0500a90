"""Build instances from the candidates of a finder: names, weights, pins, and the core that the checker looks for."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from onnx import NodeProto, TensorProto, ValueInfoProto, helper

from passes.graph.index import constant_of
from passes.graph.op_facts import ARRANGING, CORRECTLY_ROUNDED, MATRIX_PRODUCTS, PASSING_OPS, attribute_of, op_of
from passes.structures.matrices import matrix_of, matrix_values
from passes.structures.types import (
    CAST_TO,
    MOST_COMPUTED,
    MOST_HOPS,
    Core,
    CoreNode,
    Instance,
    KeptWeight,
    PinSite,
    SearchResult,
)
from passes.structures.view import DEQUANTIZE, NBITS, QUANTIZE, GraphView, module_of, quantized_weight
from passes.weights.stand_ins import digest_of

PROJECTION_OPS: Final = MATRIX_PRODUCTS | {"Conv", "com.microsoft.FusedMatMul"}
"""Ops that may replace one another while the matrix is the same: optimizers put the bias into the product."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One structure as a finder sees it.

    `nodes` define the structure; the `last` node makes its value. `pins` names the values to pin. `computed` is how
    many inputs of `last` must not be constant. `allow_gaps`: other nodes may be between the core nodes.
    """

    last: NodeProto
    nodes: tuple[NodeProto, ...]
    pins: tuple[str, ...]
    name: str = ""
    computed: int = 0
    allow_gaps: bool = False
    may_be_constant: bool = False
    """Whether the structure has to stay even where it computes a constant."""

    @property
    def value(self) -> str:
        return next(name for name in self.last.output if name)


def find_fused(view: GraphView, ops: Iterable[str], inputs: int = 1) -> Iterator[Candidate]:
    """Each node of one of `ops`, which is a whole structure, with its first `inputs` and its output as pins."""
    for op in ops:
        for node in view.by_op.get(op, ()):
            yield Candidate(node, (node,), (*filter(None, node.input[:inputs]), node.output[0]))


def find_by_shape(
    view: GraphView, kind: str, what: str, candidates: Iterable[Candidate], related: Sequence[str]
) -> SearchResult:
    """The `candidates` as instances of `kind`; without any, a text that names the `related` ops of the model."""
    instances = instances_of(kind, candidates, view)
    ops = {op: len(nodes) for op, nodes in view.by_op.items()}
    counts = {op: ops[op] for op in related if op in ops} or dict(Counter(ops).most_common(5))
    instead = f"no {what}, but " + ", ".join(f"{count} {op}" for op, count in counts.items())
    return SearchResult(instances, "" if instances else instead)


def instances_of(kind: str, candidates: Iterable[Candidate], view: GraphView) -> tuple[Instance, ...]:
    """Instances of all candidates, one for each value. Those that compute a constant are left out: it may be folded."""
    lasting = (candidate for candidate in candidates if candidate.may_be_constant or candidate.value not in view.folded)
    instances = list({candidate.value: candidate for candidate in lasting}.values())
    if not instances:
        return ()
    modules = [module_of(list(candidate.nodes)) for candidate in instances]
    names = _unique_names(
        [candidate.name or module or kind for candidate, module in zip(instances, modules, strict=True)]
    )
    builder = _InstanceBuilder(view)
    return tuple(
        Instance(
            kind,
            name,
            module,
            builder.weights(candidate),
            tuple(map(PinSite.only, pins_at(candidate.pins, view))),
            core=Core(builder.core(candidate), candidate.value),
        )
        for candidate, name, module in zip(instances, names, modules, strict=True)
    )


def _unique_names(names: Sequence[str]) -> list[str]:
    """`names`, with a number after the second and later of equal names: `layers.0`, `layers.0 #2`."""
    count: Counter[str] = Counter()
    unique = []
    for name in names:
        count[name] += 1
        unique.append(name if count[name] == 1 else f"{name} #{count[name]}")
    return unique


def pins_at(names: Iterable[str], view: GraphView) -> tuple[ValueInfoProto, ...]:
    """The types of the values that can be pinned: computed ones whose type and rank are known."""
    computed = (name for name in dict.fromkeys(names) if name in view.producers and name not in view.folded)
    return tuple(view.types[name] for name in computed if view.dims(name) is not None)


class _InstanceBuilder:
    def __init__(self, view: GraphView) -> None:
        self._view = view
        self._digests: dict[tuple[str, bool], frozenset[str]] = {}

    def core(self, candidate: Candidate) -> CoreNode:
        members = {node.output[0]: node for node in candidate.nodes}
        return replace(self._core(candidate.last, members, candidate.allow_gaps), computed=candidate.computed)

    def weights(self, candidate: Candidate) -> tuple[KeptWeight, ...]:
        return tuple(dict.fromkeys(self._kept_weights(candidate.nodes)))

    def _core(
        self, node: NodeProto, members: Mapping[str, NodeProto], allow_gaps: bool, after: tuple[str, ...] = ()
    ) -> CoreNode:
        op, after = op_of(node), (*after, node.output[0])
        weights = [self._digests_of(name, op) for name in node.input if name]
        reads = self._far_members(node, members) if allow_gaps else self._near_members(node, members)
        reads = [read for read in reads if read.output[0] not in after]  # the turns of a Loop lead back to its nodes
        return CoreNode(
            PROJECTION_OPS if op in PROJECTION_OPS and any(weights) and len(members) > 1 else frozenset({op}),
            frozenset(_attributes(node)),
            tuple(digests for digests in weights if digests),
            tuple(dict.fromkeys(self._core(read, members, allow_gaps, after) for read in reads)),
            allow_gaps=allow_gaps,
        )

    def _near_members(self, node: NodeProto, members: Mapping[str, NodeProto]) -> list[NodeProto]:
        reached = (self._source_before_layout(name, members) for name in node.input if name)
        return [members[name] for name in reached if name in members]

    def _source_before_layout(self, name: str, members: Mapping[str, NodeProto]) -> str:
        producer = self._view.producers.get(name)
        while producer is not None and name not in members:
            before = producer.input[0] if producer.op_type in LAYOUT else self._view.before_pair(name)
            if before is None:
                break
            name = before
            producer = self._view.producers.get(name)
        return name

    def _far_members(self, node: NodeProto, members: Mapping[str, NodeProto]) -> list[NodeProto]:
        seen, reached, front = {node.output[0]}, [], [node]
        for _ in range(MOST_HOPS):
            names = [self._before_pairs(name, members) for consumer in front for name in consumer.input]
            front = []
            for producer in map(self._view.producers.get, names):
                if producer is None or producer.output[0] in seen:
                    continue
                seen.add(producer.output[0])
                (reached if producer.output[0] in members else front).append(producer)
        return reached

    def _before_pairs(self, name: str, members: Mapping[str, NodeProto]) -> str:
        """The value before all pairs that quantize and dequantize: between core nodes these do not count."""
        before = None if name in members else self._view.before_pair(name)
        return name if before is None else self._before_pairs(before, members)

    def _kept_weights(self, nodes: Iterable[NodeProto]) -> Iterator[KeptWeight]:
        for node in nodes:
            for name in node.input:
                tensor = self._view.find_weight(name) if name else None
                quantized = quantized_weight(self._view, name)
                if quantized is not None:
                    yield KeptWeight(node.op_type, quantized.name, self._digests_of(name, op_of(node)))
                elif tensor is not None and np.prod(tensor.dims, dtype=np.int64) > 1 and _is_weight(tensor):
                    yield KeptWeight(node.op_type, tensor.name, self._digests_of(name, op_of(node)))

    def _digests_of(self, name: str, op: str) -> frozenset[str]:
        """The digests of the weight `name`: as it is stored, as it is read, and for a product also transposed."""
        key = (name, op in PROJECTION_OPS)
        if op in QUANTIZING:  # a bias is stored in 32 bits
            tensor = self._view.tensor_at(name)
            return frozenset() if tensor is None else frozenset({self._view.model.digest(tensor)})
        if key not in self._digests:
            self._digests[key] = frozenset(self._ways(*key))
        return self._digests[key]

    def _ways(self, name: str, may_turn: bool) -> Iterator[str]:
        view, way, whole = self._view, [], name
        producer = view.producers.get(name)
        while producer is not None and producer.op_type in LAYOUT:
            way.insert(0, producer)
            name = producer.input[0]
            producer = view.producers.get(name)
        tensor = view.initializers.get(name) if producer is None else constant_of(producer)
        if tensor is None and whole in view.folded:
            yield from self._computed_digests(whole, may_turn)
            return
        ops = {node.op_type for node in way}
        if tensor is None or not _is_weight(tensor) or ops - ARRANGING:
            return
        casts = [attribute_of(node, "to") for node in way if node.op_type == "Cast"]
        yield view.model.digest(tensor) + "".join(f"{CAST_TO}{dtype}" for dtype in casts)
        if view.model.is_unread(tensor):
            if may_turn and len(tensor.dims) == 2:
                yield view.model.transposed_digest(tensor, (1, 0))
        elif "Cast" in ops or ("Transpose" in ops and not may_turn):
            array = view.model.array(tensor)
            for node in way:
                array = _rearrange(node, array)
            yield digest_of(array)
        elif may_turn and len(tensor.dims) == 2 and min(tensor.dims) > 1:
            yield view.model.transposed_digest(tensor, (1, 0))

    def _computed_digests(self, name: str, may_turn: bool) -> Iterator[str]:
        """The digest that a small computed constant, such as `1 + w`, will have once it is folded.

        A quantized weight of any size also has a digest of how it is computed. A table of cosines has none: the library
        that folds it and the library that computes the digest may round the last bit differently.
        """
        quantized = quantized_weight(self._view, name)
        if quantized is not None:
            yield quantized.digest
        matrix = matrix_of(self._view, name)
        if matrix is None or not _is_weight(matrix.stored):
            return
        is_small = all(math.prod(tensor.dims) <= MOST_COMPUTED for tensor in matrix.tensors)
        if quantized is not None or (is_small and self._is_reproducible(name)):
            values = matrix_values(self._view, matrix)
            if values is not None and values.size > 1:
                yield digest_of(values)
                if quantized is not None and may_turn and values.ndim == 2:
                    yield digest_of(values.T)

    def _is_reproducible(self, name: str) -> bool:
        """Whether the computed constant `name` has the same bits in each library that may fold it."""
        nodes = self._view.ancestors([name], within=self._view.folded)
        return all(node.op_type in CORRECTLY_ROUNDED for node in nodes)


def _rearrange(node: NodeProto, array: np.ndarray) -> np.ndarray:
    """`array` after `node`. A Reshape changes nothing, since only the bytes count."""
    if node.op_type == "Transpose" and len(attribute_of(node, "perm", array.shape)) == array.ndim:
        return array.transpose(attribute_of(node, "perm"))
    if node.op_type == "Cast":
        return array.astype(helper.tensor_dtype_to_np_dtype(attribute_of(node, "to")))
    return array


def _is_weight(tensor: TensorProto) -> bool:
    """Whether a tensor is a weight; integers of 32 or 64 bits are sizes, indices and axes, which may be rewritten."""
    return tensor.data_type not in (TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL, TensorProto.STRING)


def _attributes(node: NodeProto) -> Iterator[tuple[str, object]]:
    """The attributes that determine the result and that no optimizer rewrites."""
    for name, (default, ops) in TELLING.items():
        if op_of(node) in ops:
            yield name, attribute_of(node, name, default)


QUANTIZING: Final = frozenset(f"{domain}{op}" for op in (QUANTIZE, DEQUANTIZE) for domain in ("", "com.microsoft."))

NORMS: Final = frozenset({f"{name}Normalization" for name in ("Layer", "RMS", "Batch", "Instance", "Group")})

TELLING: Final[Mapping[str, tuple[object, frozenset[str]]]] = {
    "axis": (1, QUANTIZING),
    "block_size": (0, QUANTIZING | {NBITS}),
    "bits": (4, frozenset({NBITS})),
    "epsilon": (np.float32(1e-5).item(), NORMS),
    "approximate": (b"none", frozenset({"Gelu"})),
    "alpha": (1.0, PROJECTION_OPS),
}
"""Attribute → its default, and the ops that have it."""

LAYOUT: Final = PASSING_OPS | {"Expand"}
"""Ops that may be between two core nodes."""
