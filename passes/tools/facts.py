"""What a model is: its inputs and outputs, operators, parameters, MACs, memory of activations, and structures."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import onnx
from onnx import NodeProto, TensorProto

from passes.graph.formatting import format_type
from passes.graph.index import GraphIndex, constant_of, copy_of
from passes.graph.inference import dims_of
from passes.graph.op_facts import CONVOLUTIONS, ONNX_DOMAINS, attribute_of, op_name
from passes.graph.sizes import infer_at_sizes
from passes.graph.traversal import bodies_in, every_graph, every_node, reads_of
from passes.load import byte_count
from passes.structures import STRUCTURES, structure_of
from passes.structures.view import GraphView
from passes.suggest import bytes_text, plural
from passes.visible import Table, TableResult
from passes.weights.detached import DetachedModel, open_model


@dataclass(frozen=True, slots=True, repr=False)
class ModelFacts(TableResult):
    """What `inspect_model` finds. `sizes` are the sizes of open dims; counts are for one run at these sizes.

    `macs` counts multiplications by operator: for an If, those of the branch with more, and for operators in
    `repeated`, such as Loop, those of one turn. `uncounted` are operators without a rule, or with unknown shapes.
    `peak` is the largest number of bytes that are alive at once, in the order of the nodes; None where a shape is
    unknown. `tensors` and `activations` are the largest ones, name → type and bytes.
    """

    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    opsets: Mapping[str, int]
    ir_version: int
    producer: str
    nodes: int
    operators: Mapping[str, int]
    parameters: int
    parameter_bytes: int
    dtypes: Mapping[str, int]
    sizes: Mapping[str, int]
    macs: Mapping[str, int]
    uncounted: Sequence[str]
    repeated: Sequence[str]
    peak: int | None
    tensors: Mapping[str, tuple[str, int]]
    activations: Mapping[str, tuple[str, int]]
    structures: Mapping[str, int]

    def as_data(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {**asdict(self), "total_macs": sum(self.macs.values())}

    def tables(self) -> Iterator[Table]:
        at = f" at {', '.join(f'{name}={size}' for name, size in self.sizes.items())}" if self.sizes else ""
        opsets = ", ".join(f"{domain or 'ai.onnx'} {version}" for domain, version in self.opsets.items())
        macs = f"{sum(self.macs.values()):,}{at}"
        if self.repeated:
            macs += f", with one turn of each {', '.join(self.repeated)}"
        if self.uncounted:
            macs += f", without {', '.join(self.uncounted)}, which have no rule or no known shapes"
        yield Table(
            "model",
            [
                ("opset", f"{opsets} (IR version {self.ir_version})"),
                *([("made by", self.producer)] if self.producer else []),
                ("nodes", f"{self.nodes:,}"),
                ("parameters", f"{self.parameters:,} ({bytes_text(self.parameter_bytes)})"),
                ("MACs", macs),
                (
                    "activations",
                    "unknown, for want of shapes"
                    if self.peak is None
                    else f"{bytes_text(self.peak)} at most at once{at}",
                ),
                ("dtypes", ", ".join(f"{dtype} ({plural(count, 'value')})" for dtype, count in self.dtypes.items())),
                (
                    "structures",
                    ", ".join(f"{count} {kind}" for kind, count in self.structures.items()) or "none that has a name",
                ),
            ],
        )
        for title, values in (("inputs", self.inputs), ("outputs", self.outputs)):
            yield Table(title, [(name, kind, UNRANKED if "[]" in kind else "") for name, kind in values.items()])
        yield Table(
            "operators",
            [(name, f"{count:,}", _share(self.macs.get(name, 0), self.macs)) for name, count in self.operators.items()],
        )
        for title, found in (("largest tensors", self.tensors), ("largest activations", self.activations)):
            yield Table(title, [(name, kind, bytes_text(size)) for name, (kind, size) in found.items()])


def _share(count: int, macs: Mapping[str, int]) -> str:
    return f"{100 * count / sum(macs.values()):.1f} % of MACs" if count else ""


def inspect_model(
    model: onnx.ModelProto | str | Path | DetachedModel, shapes: Mapping[str, Sequence[int]] | None = None
) -> ModelFacts:
    """Facts about a model; nothing is run, and external weights are not read.

    Args:
        model: a path, a message or a DetachedModel.
        shapes: input → sizes at which to count; an open dim that is not given counts as 1.

    Returns:
        A ModelFacts, of which `print` shows tables.

    Raises:
        ModelError: the model cannot be read. PolicyError: `shapes` do not fit its inputs.

    Example:
        >>> import onnxline
        >>> onnxline.inspect_model("model.onnx").operators["MatMul"]
        6
    """
    opened = open_model(model)
    proto = opened.without_functions().proto
    if shapes:
        from passes.run.apply_step import with_input_shapes  # it loads every step

        proto = with_input_shapes({name: ("inspect", shape) for name, shape in shapes.items()}, proto)
    proto, sizes = _with_sizes(proto)
    inferred = GraphIndex(infer_at_sizes(proto))
    sparse = (_type_of_sparse(tensor) for graph in every_graph(proto.graph) for tensor in graph.sparse_initializer)
    types, index = {**inferred.types, **{info.name: info for info in sparse}}, GraphIndex(proto.graph)
    counter = _Counter(index, types)
    stored = [tensor for graph in every_graph(proto.graph) for tensor in _tensors_of(graph)]
    weights = {tensor.name: (_kind(tensor), _bytes(tensor.data_type, tensor.dims)) for tensor in stored}
    values = {
        name: (format_type(info), size)
        for name, info in types.items()
        if name in index.producers and name not in index.constants and (size := counter.bytes_of(name)) is not None
    }
    kinds = Counter(_dtype(tensor.data_type) for tensor in stored)
    made = (name for name in index.producers if name in types and name not in index.constants)
    kinds.update(_dtype(types[name].type.tensor_type.elem_type) for name in made)
    view = GraphView(opened.without_functions())
    found = {kind: len(structure.search(view).instances) for kind in STRUCTURES if (structure := structure_of(kind))}
    products = count_products(inferred, types)
    return ModelFacts(
        inputs={name: format_type(info) for name, info in opened.index.required_inputs.items()},
        outputs={name: format_type(info) for name, info in opened.index.outputs.items()},
        opsets={entry.domain: entry.version for entry in opened.proto.opset_import},
        ir_version=opened.proto.ir_version,
        producer=" ".join(filter(None, (opened.proto.producer_name, opened.proto.producer_version))),
        nodes=sum(1 for _ in every_node(opened.proto.graph)),
        operators=dict(Counter(map(op_name, every_node(proto.graph))).most_common()),
        parameters=sum(math.prod(tensor.dims) for tensor in stored),
        parameter_bytes=sum(size for _, size in weights.values()),
        dtypes={dtype: count for dtype, count in kinds.most_common() if dtype},
        sizes=sizes,
        macs=dict(products.macs.most_common()),
        uncounted=tuple(products.uncounted),
        repeated=tuple(products.repeated),
        peak=counter.peak(),
        tensors=_largest(weights),
        activations=_largest(values),
        structures={kind: count for kind, count in found.items() if count},
    )


def _with_sizes(proto: onnx.ModelProto) -> tuple[onnx.ModelProto, dict[str, int]]:
    """A copy whose inputs have 1 for each open dim, and the names of these."""
    fixed, sizes = copy_of(proto), dict[str, int]()
    for info in fixed.graph.input:
        for dim in info.type.tensor_type.shape.dim:
            if not dim.HasField("dim_value"):
                sizes |= {dim.dim_param: 1} if dim.dim_param else {}
                dim.dim_value = 1
    if sizes or any(not dims_of(info) for info in fixed.graph.value_info):
        del fixed.graph.value_info[:]
    return fixed, sizes


def _type_of_sparse(tensor: onnx.SparseTensorProto) -> onnx.ValueInfoProto:
    return onnx.helper.make_tensor_value_info(tensor.values.name, tensor.values.data_type, tensor.dims)


def _tensors_of(graph: onnx.GraphProto) -> Iterator[TensorProto]:
    """What a graph stores as initializers, and in Constant nodes under the names of their outputs."""
    yield from graph.initializer
    yield from (sparse.values for sparse in graph.sparse_initializer)
    for node in graph.node:
        tensor = constant_of(node)
        if tensor is not None:
            named = copy_of(tensor)
            named.name = node.output[0]
            yield named


class _Counter:
    """Counts at fixed shapes."""

    def __init__(self, index: GraphIndex, types: Mapping[str, onnx.ValueInfoProto]) -> None:
        self.index, self.types = index, types

    def shape(self, name: str) -> tuple[int, ...] | None:
        stored = self.index.constants.get(name)
        if stored is not None:
            return tuple(stored.dims)
        dims = dims_of(self.types[name]) if name in self.types else None
        return None if dims is None or not all(isinstance(dim, int) for dim in dims) else dims  # type: ignore[return-value]

    def bytes_of(self, name: str) -> int | None:
        shape = self.shape(name)
        return None if shape is None else _bytes(self.types[name].type.tensor_type.elem_type, shape)

    def macs_of(self, node: NodeProto) -> int | None:
        """0 for a node that is no product; None for one whose shapes are not known, or that has no rule here, as most
        operators of other domains."""
        kind = node.op_type
        if kind in UNRULED:
            return None
        operand = FACTOR.get(kind)
        if operand is None:
            return 0 if node.domain in ONNX_DOMAINS else None
        weight, made, data = self.shape(node.input[operand]), self.shape(node.output[0]), self.shape(node.input[0])
        if weight is None or made is None or data is None:
            return None
        if kind in ("ConvTranspose",):
            return math.prod(data) * math.prod(weight[1:])
        if kind in CONVOLUTIONS:
            return math.prod(made) * math.prod(weight[1:])
        return math.prod(made) * data[-2 if attribute_of(node, "transA", 0) else -1]

    def peak(self) -> int | None:
        """Bytes that are alive at once at most; weights do not count."""
        last = {name: position for position, node in enumerate(self.index.nodes) for name in reads_of(node)}
        ends = len(self.index.nodes)
        last |= dict.fromkeys(self.index.outputs, ends)
        alive, peak = 0, 0
        computed = (name for name in self.index.producers if name not in self.index.constants)
        sizes = {name: self.bytes_of(name) for name in (*self.index.required_inputs, *computed)}
        if any(size is None for size in sizes.values()):
            return None
        alive = sum(sizes[name] or 0 for name in self.index.required_inputs)
        freed: dict[int, int] = Counter()
        for name, size in sizes.items():
            freed[last.get(name, self.index.positions.get(name, 0))] += size or 0
        for position, node in enumerate(self.index.nodes):
            alive += sum(sizes[name] or 0 for name in node.output if name in sizes)
            peak = max(peak, alive)
            alive -= freed.get(position, 0)
        return peak


@dataclass(slots=True)
class ProductCount:
    """MACs by operator; the operators of which some could not be counted, and those whose body is counted once."""

    macs: Counter[str] = field(default_factory=Counter)
    uncounted: dict[str, None] = field(default_factory=dict)
    repeated: dict[str, None] = field(default_factory=dict)


def count_products(graph: GraphIndex, types: Mapping[str, onnx.ValueInfoProto]) -> ProductCount:
    """Count the MACs of a graph and of the bodies in it.

    Args:
        graph: with inferred types, also those of values in bodies.
        types: of its values, and of those around it.
    """
    found, counter = ProductCount(), _Counter(graph, types)
    for node in graph.own:
        bodies = [GraphIndex(body, outer=graph) for body in bodies_in(node)]
        inner = [count_products(body, {**types, **body.types}) for body in bodies]
        for count in inner:
            found.uncounted |= count.uncounted
            found.repeated |= count.repeated
        largest = max((count.macs for count in inner), key=lambda macs: macs.total(), default=Counter[str]())
        found.macs += largest
        if largest and node.op_type != "If":
            found.repeated[op_name(node)] = None
        macs = counter.macs_of(node)
        if macs is None:
            found.uncounted[op_name(node)] = None
        elif macs:
            found.macs[op_name(node)] += macs
    return found


FACTOR: Final[Mapping[str, int]] = {
    **dict.fromkeys(
        ("MatMul", "Gemm", "Conv", "ConvTranspose", "MatMulInteger", "ConvInteger", "FusedMatMul", "FusedConv"), 1
    ),
    **dict.fromkeys(("QLinearMatMul", "QLinearConv"), 3),
}
"""Product → the position of its second factor."""

UNRULED: Final = frozenset(
    {
        "Einsum",
        "LSTM",
        "GRU",
        "RNN",
        "Attention",
        "MultiHeadAttention",
        "GroupQueryAttention",
        "DeformConv",
        "MatMulNBits",
    }
)
"""Operators that multiply and are not counted."""

MOST: Final = 5

UNRANKED: Final = "of unknown rank"


def _largest(found: Mapping[str, tuple[str, int]]) -> dict[str, tuple[str, int]]:
    return dict(sorted(found.items(), key=lambda entry: -entry[1][1])[:MOST])


def _kind(tensor: TensorProto) -> str:
    return f"{_dtype(tensor.data_type)}[{', '.join(map(str, tensor.dims))}]"


def _dtype(kind: int) -> str:
    return TensorProto.DataType.Name(kind).lower() if kind else ""


def _bytes(kind: int, dims: Sequence[int]) -> int:
    return byte_count(TensorProto(data_type=kind, dims=dims)) if kind else 0
