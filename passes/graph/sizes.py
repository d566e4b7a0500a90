"""The types of all values of a model whose inputs have fixed sizes, where the model computes shapes itself.

ONNX's inference of a whole model follows a computed shape through few operators: a Reshape of a size, or a Where over
sizes, ends it, and all values after it have open sizes. Here each node is inferred alone, with the values of the small
tensors that it reads, and a node that reads nothing but known small tensors is computed.
"""

from __future__ import annotations

import math

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TypeProto, ValueInfoProto, helper, numpy_helper

from passes.errors import StepCrashed, StepTimedOut
from passes.graph.index import GraphIndex
from passes.graph.inference import MOST_SECONDS, call_limited, dims_of, infer_types
from passes.graph.op_facts import ONNX_DOMAINS, attribute_of, has_body, is_opaque, opset_of

MOST_SIZES = 64
"""Elements of a tensor that is followed: more are no shape."""


def infer_at_sizes(model: ModelProto) -> GraphProto:
    """The graph with the types of all values that inference reaches, after computed shapes too if all inputs are fixed.

    Args:
        model: without functions; it does not change.
    """
    graph = infer_types(model, data_prop=True)
    index = GraphIndex(graph)
    open_values = [name for name in index.producers if name not in index.types or is_open(index.types[name])]
    if not open_values or any(map(is_open, index.required_inputs.values())):
        return graph
    inferred = ModelProto(ir_version=model.ir_version, opset_import=model.opset_import, graph=graph)
    try:
        found = call_limited(follow_sizes, MOST_SECONDS, content=inferred.SerializeToString())
    except (StepCrashed, StepTimedOut):
        return graph
    for name in open_values:
        if name not in found:
            continue
        info = index.types.get(name)
        if info is None:
            info = graph.value_info.add(name=name)
        info.type.ParseFromString(found[name])
    return graph


def is_open(info: ValueInfoProto) -> bool:
    """Whether a tensor has a size that is not known."""
    dims = dims_of(info)
    return info.type.WhichOneof("value") == "tensor_type" and (
        dims is None or not all(isinstance(dim, int) and dim >= 0 for dim in dims)
    )


def follow_sizes(content: bytes) -> dict[str, bytes]:
    """In the process that infers: the types that are known now of values whose sizes were open.

    Args:
        content: a model with the types that inference of the whole found.
    """
    model = onnx.load_from_string(content)
    walk = _SizeWalk(model)
    for node in walk.index.nodes:
        walk.visit(node)
    return {name: kind.SerializeToString() for name, kind in walk.found.items()}


class _SizeWalk:
    """Goes through the nodes of a model in their order, with the types and the small values that are known so far."""

    def __init__(self, model: ModelProto) -> None:
        self.model, self.index = model, GraphIndex(model.graph)
        self.types = {name: info.type for name, info in self.index.types.items()}
        self.found: dict[str, TypeProto] = {}
        self.values = dict[str, onnx.TensorProto]()
        for name, tensor in self.index.constants.items():
            self.types[name] = helper.make_tensor_type_proto(tensor.data_type, tensor.dims)
            if math.prod(tensor.dims) <= MOST_SIZES and tensor.data_location != onnx.TensorProto.EXTERNAL:
                self.values[name] = tensor

    def visit(self, node: NodeProto) -> None:
        """Learn the types of what a node makes, and the values if they are known."""
        if node.domain not in ONNX_DOMAINS or has_body(node):
            return
        if any(
            name not in self.types or is_open(ValueInfoProto(type=self.types[name])) for name in node.output if name
        ):
            self._infer(node)
        self._compute(node)

    def _infer(self, node: NodeProto) -> None:
        """Ask ONNX for the types of what a node makes, and take those of which more is known than before."""
        read = {name: self.types[name] for name in node.input if name in self.types}
        if len(read) < len({*node.input} - {""}):
            return
        data = {name: self.values[name] for name in read if name in self.values}
        imports = [*self.model.opset_import]
        try:
            schema = onnx.defs.get_schema(node.op_type, opset_of(self.model))
            made = onnx.shape_inference.infer_node_outputs(
                schema, node, read, data, opset_imports=imports, ir_version=self.model.ir_version
            )
        except Exception:  # onnx does not know the operator, or refuses the node: the types stay as they are
            return
        for name, kind in made.items():
            if name and (name not in self.types or _known_sizes(kind) > _known_sizes(self.types[name])):
                self.types[name] = self.found[name] = kind

    def _compute(self, node: NodeProto) -> None:
        """Compute what a node makes, where it is small and what the node reads is known."""
        names = [name for name in node.output if name]
        dims = [dims_of(ValueInfoProto(type=self.types[name])) if name in self.types else None for name in names]
        if any(not _is_small(shape) for shape in dims):
            return
        if node.op_type in ("Shape", "Size"):
            read = self.types.get(node.input[0])
            sizes = None if read is None else dims_of(ValueInfoProto(type=read))
            if sizes is None or not all(isinstance(size, int) for size in sizes):
                return
            kept = sizes[attribute_of(node, "start", 0) : attribute_of(node, "end")]
            arrays = [np.array(kept if node.op_type == "Shape" else math.prod(sizes), np.int64)]  # type: ignore[type-var]
        elif not is_opaque(node) and all(name in self.values for name in node.input if name):
            arrays = self._run(node, names)
        else:
            return
        for name, array in zip(names, arrays, strict=False):
            self.values[name] = numpy_helper.from_array(array, name)

    def _run(self, node: NodeProto, names: list[str]) -> list[np.ndarray]:
        """The outputs of a node by ONNX's evaluator; none where it cannot compute them."""
        from onnx.reference import ReferenceEvaluator  # as in `inference.compute`

        stored = []
        for name in dict.fromkeys(filter(None, node.input)):
            stored.append(onnx.TensorProto())
            stored[-1].CopyFrom(self.values[name])
            stored[-1].name = name  # a Constant node holds a tensor without a name
        ends = [ValueInfoProto(name=name, type=self.types[name]) for name in names]
        graph = helper.make_graph([node], "node", [], ends, stored)
        alone = helper.make_model(graph, opset_imports=self.model.opset_import, ir_version=self.model.ir_version)
        try:
            return [np.asarray(array) for array in ReferenceEvaluator(alone).run(None, {})]
        except Exception:  # whatever an operator of the evaluator raises
            return []


def _known_sizes(kind: TypeProto) -> int:
    """How much is known of a shape: the number of its sizes that are, and -1 where the rank is not."""
    dims = dims_of(ValueInfoProto(type=kind))
    return -1 if dims is None else sum(isinstance(dim, int) for dim in dims)


def _is_small(shape: tuple[int | str | None, ...] | None) -> bool:
    sizes = [size for size in shape or () if isinstance(size, int)]
    return shape is not None and len(sizes) == len(shape) and math.prod(sizes) <= MOST_SIZES
