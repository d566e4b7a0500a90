"""A read-only index over a graph, for finders: the producer and consumers of a value, and the constant it is made of.

A weight may be stored as integers with scales; checkers read such weights with code of their own. In ONNX's form
DequantizeLinear makes the weight, for the tensor as a whole, for each channel or for each block. In onnxruntime's form
MatMulNBits reads the packed weight.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any, Final

import numpy as np
import onnx
from onnx import GraphProto, NodeProto, TensorProto, ValueInfoProto, helper

from passes.graph.index import GraphIndex, computed_values, constant_of, copy_of
from passes.graph.inference import infer_types
from passes.graph.op_facts import ARRANGING, PASSING_OPS, SAME_OPS, attribute_of, is_opaque, op_of
from passes.graph.traversal import live_nodes
from passes.provenance.annotations import module_path_of
from passes.structures.types import PACKED, QUANTIZED
from passes.weights.detached import DetachedModel

CARRIED: Final[Mapping[str, tuple[int, ...]]] = {
    **dict.fromkeys(("CastLike", "Reshape", "Expand", "Slice", "Gather", "Tile", "Squeeze", "Unsqueeze"), (0,)),
    **dict.fromkeys(("Split", "SplitToSequence", "SequenceAt", "GatherElements", "GatherND", "Pad", "Clip"), (0,)),
    **dict.fromkeys(
        ("ReduceMax", "QuantizeLinear", "DequantizeLinear", "Dropout", "RotaryEmbedding", "PRelu", "Trilu"), (0,)
    ),
    **dict.fromkeys((f"{name}Normalization" for name in ("Batch", "Layer", "RMS", "SimplifiedLayer")), (0,)),
    **dict.fromkeys((f"{name}Normalization" for name in ("Group", "Instance", "Lp")), (0,)),
    **dict.fromkeys(("ScatterElements", "ScatterND"), (0, 2)),
    "Where": (1, 2),
}
"""Op → the positions of the inputs that carry data, where not all do."""

Stop = Callable[[NodeProto], bool]
"""Returns whether a walk stops at a node."""

QUANTIZE = "QuantizeLinear"

DEQUANTIZE = "DequantizeLinear"


class GraphView(GraphIndex):
    """The index of `model.proto.graph`, with inferred types, walks, and constants through layout operators.

    With `body`, a graph inside of a node of `outer`, the view indexes `body` together with all graphs around it: a body
    may read outer values. `entries` are nodes that stand for how the node around a body hands its inputs to it.
    """

    def __init__(
        self,
        model: DetachedModel,
        body: GraphProto | None = None,
        outer: GraphView | None = None,
        entries: Sequence[NodeProto] = (),
    ) -> None:
        super().__init__(model.proto.graph if body is None else body, outer=outer)
        self.model = model
        self.body = body
        self.noted: dict[str, Any] = {}
        """What several finders ask for, by a name of the finder that looks for it."""
        self._outer = outer
        self._entries = entries

    @cached_property
    def nodes(self) -> list[NodeProto]:
        return [*(self._outer.nodes if self._outer is not None else ()), *self._entries, *self.own]

    @cached_property
    def inferred(self) -> GraphProto:
        """This graph with all inferred types, also in the graphs inside of its nodes."""
        if self.body is not None:
            return self.body  # it was taken from an inferred graph
        return infer_types(_with_known_products(self.model.proto), data_prop=True)

    @cached_property
    def types(self) -> dict[str, ValueInfoProto]:
        """The type and shape of every value for which inference has one."""
        types = dict(self._outer.types) if self._outer is not None else {}
        graph = self.inferred
        types.update((info.name, info) for info in (*graph.value_info, *graph.output, *graph.input))
        return types

    @cached_property
    def by_op(self) -> dict[str, list[NodeProto]]:
        """Nodes in order, by `op_of`."""
        nodes: dict[str, list[NodeProto]] = defaultdict(list)
        for node in self.nodes:
            nodes[op_of(node)].append(node)
        return nodes

    @cached_property
    def folded(self) -> set[str]:
        """Values that are constant, or computed from constants alone: an optimizer may fold them."""
        fixed = {"", *self.initializers}
        for node in self.nodes:
            inputs = [name for name in node.input[:1] if name] if node.op_type == "CastLike" else node.input
            sized = node.op_type in ("Shape", "Size") and self._has_fixed_shape(node.input[0])
            if (sized or fixed.issuperset(inputs)) and not is_opaque(node):
                fixed.update(node.output)
        return fixed

    @cached_property
    def dead(self) -> frozenset[str]:
        """The values on which no output depends, or only by their shape."""
        live = computed_values(live_nodes(self.model.proto.graph, by_values=True))
        return frozenset(self.producers).difference(live)

    def _has_fixed_shape(self, name: str) -> bool:
        dims = self.dims(name)
        return dims is not None and all(isinstance(dim, int) for dim in dims)

    def dims(self, name: str) -> tuple[int | str, ...] | None:
        """Sizes, and names of dims that are not fixed (`""` where they have none); None if the rank is not known."""
        if name in self.initializers:
            return tuple(self.initializers[name].dims)
        info = self.types.get(name)
        if info is None or not info.type.tensor_type.HasField("shape"):
            return None
        dims = info.type.tensor_type.shape.dim
        return tuple(dim.dim_value if dim.HasField("dim_value") else dim.dim_param for dim in dims)

    def find_weight(self, name: str) -> TensorProto | None:
        """The initializer `name`, perhaps seen through layout ops; None if `name` is computed."""
        return self.initializers.get(self.origin_of(name, ARRANGING))

    def is_constant(self, name: str) -> bool:
        node = self.producers.get(name)
        if node is not None and node.op_type == DEQUANTIZE:
            name = node.input[0]
        return self.tensor_at(name) is not None

    def source(self, name: str) -> str:
        """The value that Identity, Cast, Dropout and pairs that quantize and dequantize turn into `name`."""
        return self.origin_of(name, SAME_OPS, pairs=True)

    def origin_of(self, name: str, ops: Collection[str], *, pairs: bool = False) -> str:
        """The first value of the chain that ends in `name` and goes through the first inputs of nodes whose type is in
        `ops`; with `pairs` also through pairs of QuantizeLinear and DequantizeLinear."""
        while True:
            node = self.producers.get(name)
            before = self.before_pair(name) if pairs else None
            if node is not None and node.op_type in ops and node.output[0] == name:
                before = node.input[0]
            if before is None:
                return name
            name = before

    def before_pair(self, name: str) -> str | None:
        """The value that a pair of QuantizeLinear and DequantizeLinear rounds to `name`, or that a Clip before the
        pair reads; None if no pair makes `name`."""
        quantizer = self.quantizer_of(self.producers.get(name))
        if quantizer is None:
            return None
        value = quantizer.input[0]
        clip = self.producers.get(value)
        return clip.input[0] if clip is not None and self._is_bound_of_pair(clip) else value

    def quantizer_of(self, node: NodeProto | None) -> NodeProto | None:
        """The QuantizeLinear with which a DequantizeLinear forms a pair, of one scale and one zero point."""
        if node is None or node.op_type != DEQUANTIZE:
            return None
        start = self.producers.get(node.input[0])
        is_pair = start is not None and start.op_type == QUANTIZE and self._encoding(start) == self._encoding(node)
        return start if is_pair else None

    def _is_bound_of_pair(self, node: NodeProto) -> bool:
        """Whether a Clip only keeps a value within the range of the format that it is quantized to."""
        consumers = self.consumers.get(node.output[0], [])
        return (
            op_of(node) == "Clip"
            and len(consumers) == 1
            and consumers[0].op_type == QUANTIZE
            and self.folded.issuperset(node.input[1:])
        )

    def _encoding(self, node: NodeProto) -> list[str]:
        """The scale and the zero point of a node, by content where they are stored."""
        digests = []
        for name in node.input[1:3]:
            tensor = self.tensor_at(name)
            digests.append(name if tensor is None else self.model.digest(tensor))
        return digests

    def other_operand(self, node: NodeProto, name: str) -> str:
        """The operand of a binary `node` that is not `name`."""
        return node.input[0] if self.source(node.input[1]) == self.source(name) else node.input[1]

    def find_producer(self, name: str, *ops: str) -> NodeProto | None:
        """The node that makes `self.source(name)`, if its op is in `ops` of the default domain."""
        node = self.producers.get(self.source(name))
        return node if node is not None and op_of(node) in ops else None

    def find_consumers(self, name: str, *ops: str) -> list[NodeProto]:
        """The nodes that read `name`, or the same value in another type; only `ops` of the default domain, if given."""
        consumers = []
        for node in self.consumers.get(name, []):
            if node.op_type in SAME_OPS or self._is_bound_of_pair(node):
                consumers.extend(self.find_consumers(node.output[0], *ops) if node.input[0] == name else ())
            elif self.quantizer_of(node) is not None or (node.op_type == QUANTIZE and self._begins_pair(node)):
                consumers.extend(self.find_consumers(node.output[0], *ops))
            elif not ops or op_of(node) in ops:
                consumers.append(node)
        return consumers

    def _begins_pair(self, node: NodeProto) -> bool:
        return any(self.quantizer_of(consumer) is node for consumer in self.consumers.get(node.output[0], []))

    def small_constant(self, name: str) -> np.ndarray | None:
        """The values of a small constant, seen through layout, casts and quantization; None if computed or large."""
        name = self.origin_of(name, PASSING_OPS, pairs=True)
        node = self.producers.get(name)
        if node is not None and node.op_type == DEQUANTIZE:
            return self._dequantize(node)
        tensor = self.initializers.get(name) if node is None else constant_of(node)
        if tensor is None or np.prod(tensor.dims, dtype=np.int64) > 16:
            return None
        return np.asarray(self.model.array(tensor)).ravel()

    def _dequantize(self, node: NodeProto) -> np.ndarray | None:
        """The values of a small constant that is quantized as a whole."""
        whole, scale = self.small_constant(node.input[0]), self.small_constant(node.input[1])
        if whole is None or scale is None or scale.size != 1:
            return None
        zero = self.small_constant(node.input[2]) if len(node.input) > 2 else np.zeros(1)
        return None if zero is None else (whole.astype(scale.dtype) - zero.astype(scale.dtype)) * scale

    def scalar(self, name: str) -> float | None:
        """The value of the constant `name`; None if it is computed, or has more than one element."""
        values = self.small_constant(name)
        if values is None or values.size != 1 or values.dtype.kind not in "fiu":
            return None
        return float(values[0])

    def upstream(self, name: str, through: frozenset[str], until: Stop = lambda _: False) -> Iterator[NodeProto]:
        """Nodes that `name` is computed from, nearest first.

        The walk passes through nodes of a type in `through`, but stops at a node where `until` is true.
        """

        def producers(value: str) -> list[NodeProto]:
            return [self.producers[value]] if value in self.producers else []

        return (node for node, _ in _reach(name, producers, carried_inputs, through, until))

    def downstream(
        self, name: str, through: frozenset[str], until: Stop = lambda _: False
    ) -> Iterator[tuple[NodeProto, str]]:
        """Nodes that depend on `name`, nearest first, each with the input through which it depends on `name`."""
        return _reach(name, lambda value: self.consumers.get(value, []), lambda node: node.output, through, until)


def _reach(
    name: str,
    nodes_at: Callable[[str], Sequence[NodeProto]],
    values_at: Callable[[NodeProto], Iterable[str]],
    through: frozenset[str],
    until: Stop,
) -> Iterator[tuple[NodeProto, str]]:
    """The nodes that are reached from a value, nearest first, each with the value at which it is."""
    seen: set[str] = set()
    front = [name]
    while front:
        reached = [(node, value) for value in front for node in nodes_at(value)]
        front = []
        for node, value in reached:
            if node.output[0] not in seen:
                seen.add(node.output[0])
                yield node, value
                front.extend(values_at(node) if node.op_type in through and not until(node) else ())


def _with_known_products(proto: onnx.ModelProto) -> onnx.ModelProto:
    """`proto` for shape inference, which knows no MatMulNBits: each is a MatMul of the same sizes."""
    positions = [at for at, node in enumerate(proto.graph.node) if op_of(node) == "com.microsoft.MatMulNBits"]
    if not positions:
        return proto
    known = copy_of(proto)
    for position in positions:
        node = known.graph.node[position]
        sizes = [int(attribute_of(node, name, 0)) for name in "KN"]
        matrix = f"{node.output[0]} of {node.input[1]}"
        known.graph.input.append(helper.make_tensor_value_info(matrix, TensorProto.FLOAT, sizes))
        node.CopyFrom(helper.make_node("MatMul", [node.input[0], matrix], node.output))
    return known


def carried_inputs(node: NodeProto) -> list[str]:
    """The inputs that carry data on, without parameters: shapes, indices, conditions, scales."""
    positions = CARRIED.get(node.op_type)
    names = node.input if positions is None else [node.input[at] for at in positions if at < len(node.input)]
    return [name for name in names if name]


def module_of(nodes: list[NodeProto]) -> str:
    """The innermost torch module that holds all of `nodes`, from the exporter's metadata; empty if it is not known."""
    parts = [(modules_of(node) or ("",))[-1].split(".") for node in nodes]
    alike = takewhile(lambda column: len(set(column)) == 1, zip(*parts, strict=False))
    return ".".join(column[0] for column in alike)


def modules_of(node: NodeProto) -> tuple[str, ...]:
    """The paths of all torch modules around `node`, outermost first, without the root; empty if it is not known."""
    module = module_path_of(node)
    return tuple(filter(None, module.paths)) if module else ()


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A constant that DequantizeLinear makes of `stored`: of integers, or of floats that are quantized first."""

    name: str
    stored: TensorProto
    digest: str
    """Digest of how the constant is computed, `types.QUANTIZED`, and not of its values."""


def quantized_weight(view: GraphView, name: str) -> QuantizedWeight | None:
    """The quantized weight `name`, seen through layout ops but no casts; None if it is something else."""
    last = view.producers.get(view.origin_of(name, ARRANGING - {"Cast"}))
    if last is None or last.op_type != DEQUANTIZE or last.output[0] not in view.folded:
        return None
    first = view.producers.get(last.input[0])
    chain = [last] if first is None or first.op_type != QUANTIZE else [first, last]
    stored = view.tensor_at(chain[0].input[0])
    if stored is None:
        return None
    texts = [view.model.digest(stored)]
    for node in chain:
        texts += [_digest_at(view, name) for name in node.input[1:3]]
        texts += [str(attribute_of(node, "axis", 1)), str(attribute_of(node, "block_size", 0))]
    return QuantizedWeight(view.origin_of(chain[0].input[0], ARRANGING), stored, QUANTIZED + "/".join(texts))


def packing_of(view: GraphView, node: NodeProto) -> str:
    """What follows the digest of the matrix that MatMulNBits reads: its scales, and how it is packed. Else empty."""
    if op_of(node) != NBITS:
        return ""
    tensors = [_digest_at(view, name) for name in node.input[2:5]]
    return PACKED + "/".join((*tensors, str(attribute_of(node, "bits", 4)), str(attribute_of(node, "block_size", 0))))


def _digest_at(view: GraphView, name: str) -> str:
    tensor = view.tensor_at(name) if name else None
    return "" if tensor is None else view.model.digest(tensor)


NBITS: Final = "com.microsoft.MatMulNBits"
