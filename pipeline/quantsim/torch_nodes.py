"""Nodes as torch's operators: gradients of the outputs, what a layer alone adds, and a cross-check by torchao.

A node is the operators of its Graph, which torch computes and differentiates. Only nodes between the wanted values and
the outputs are computed here. What else these nodes read (shapes, masks, and all that is computed before) comes from a
run of onnxruntime, by name.

The cross-check shares no kernel with onnxruntime: floats are computed by torch's operators, integers by torchao's
`quantize_affine` and `dequantize_affine`. What holds no floats (sizes, indices, masks) comes from a run of onnxruntime.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import onnx
import torch
from onnx import NodeProto, helper
from torch import Tensor

from passes.graph.index import computed_values, keep_outputs
from passes.graph.inference import float_tensors
from passes.graph.traversal import read_names
from passes.suggest import plural
from passes.weights.detached import DetachedModel
from passes.weights.sessions import Session
from pipeline.argument_checks import a, a_mapping, expects
from pipeline.errors import OnnxlineError, Unsupported, UsageError
from pipeline.importers.from_onnx.model import NodeList, StaticPart, import_static_part
from pipeline.importers.from_onnx.replacements import pending_nodes
from pipeline.importers.from_onnx.source import Stored, wider_type
from pipeline.ir import Op, TensorSpec
from pipeline.ir.graph import ArrayPayload
from pipeline.ops import Kind
from pipeline.quantsim.encodings import Encoding, round_trip
from pipeline.quantsim.qdq import find_fixed_values
from pipeline.runtime.eager import STRAIGHT_THROUGH, Own, apply
from pipeline.runtime.kernels.base import place_of
from pipeline.runtime.tensors import as_tensor, dtype_name, to_numpy

Arrays = Mapping[str, np.ndarray]
Tensors = Mapping[str, Tensor]

QUANTIZE: Final = "onnxline.quantize.default"
DEQUANTIZE: Final = "onnxline.dequantize.default"

SHAPE_LENGTH: Final = 8
"""The most elements of a vector of integers that is taken for a shape, whose elements the importer needs. A value that
a node turns out to need is looked up as well, but costs another import."""

MOST_GRAPHS: Final = 16
"""Graphs of the same nodes that are kept, the latest."""

FLAT: Final = frozenset(f"aten.{name}.default" for name in ("ceil", "floor", "round", "sign", "trunc"))
"""Operators whose derivative is 0 nearly everywhere: a layer would seem to move no output."""


def read_stored(model: DetachedModel, arrays: Arrays = MappingProxyType({})) -> dict[str, Stored]:
    """The initializers of `model` as the importer takes them; `arrays` replace the elements of some."""
    stored: dict[str, Stored] = {}
    for tensor in model.proto.graph.initializer:
        array = arrays[tensor.name] if tensor.name in arrays else model.array(tensor)
        narrow = array.dtype.name if wider_type(tensor.data_type) and tensor.name not in arrays else ""
        array = array.astype(wider_type(tensor.data_type)) if narrow else array
        spec = TensorSpec(array.shape, array.dtype.name)
        stored[tensor.name] = Stored(tensor.name, spec, ArrayPayload(array), trainable=False, narrow=narrow)
    return stored


@dataclass(frozen=True, slots=True)
class ImportedNodes:
    """Some nodes for the shapes `signature`.

    tensors: by vid, of the graph's stored values. constants: by name, values that are known without a run.
    """

    signature: tuple[object, ...]
    part: StaticPart
    tensors: Mapping[int, Tensor]
    constants: Tensors


class TorchNodes:
    """Nodes of a model as torch's operators, which are called one by one.

    Args:
        nodes: in order, of a model that imports `opsets`.
        outputs: the values that are asked for.
        stored: the initializers that the nodes may read.
    """

    def __init__(
        self,
        nodes: Sequence[NodeProto],
        opsets: Sequence[onnx.OperatorSetIdProto],
        outputs: Collection[str],
        stored: Mapping[str, Stored],
    ) -> None:
        self._part = NodeList("nodes", pending_nodes(nodes, opsets), sorted(outputs), stored)
        made = {*computed_values(nodes)}
        self.reads = tuple(sorted(read_names(nodes) - made - stored.keys()))
        self._imported: list[ImportedNodes] = []

    def compute(self, values: Tensors, own: Own = STRAIGHT_THROUGH) -> dict[str, Tensor]:
        """The values that the nodes make, by name.

        Args:
            values: those of `reads`.
            own: functions for kinds of operators, in place of torch's.

        Raises:
            Unsupported: no Graph holds all of the nodes, or torch refuses the operands of an operator, such as a window
                that is larger than what it is laid over.
        """
        imported = self.import_for({name: values[name] for name in self.reads})
        graph, slots = imported.part.graph, dict(imported.tensors)
        names = [value.name for value in graph.values]
        slots |= {vid: values[names[vid]] for vid in graph.inputs}
        for op in graph.ops:
            slots.update(zip(op.outputs, compute_op(op, [slots[vid] for vid in op.inputs], own), strict=True))
        return {**imported.constants, **{names[vid]: tensor for vid, tensor in slots.items()}}

    def import_for(self, values: Tensors) -> ImportedNodes:
        """The Graph of the nodes for the shapes of `values`, which are those of `reads`, and for the elements that it
        needs.

        Raises:
            Unsupported: no Graph holds all of the nodes.
        """
        signature = tuple((value.dtype, tuple(value.shape)) for value in values.values())
        for imported in self._imported:
            same = (np.array_equal(array, to_numpy(values[name])) for name, array in imported.part.fixed.items())
            if imported.signature == signature and all(same):
                return imported
        arrays = {name: to_numpy(value) for name, value in values.items()}
        fixed = {name for name, array in arrays.items() if _is_shape(array)}
        try:
            part = import_static_part(self._part, arrays, fixed)
        except OnnxlineError as error:
            raise Unsupported(f"torch does not compute the model: {error}") from error
        missing = {str(op.attrs["op"]) for op in part.graph.ops if op.kind == Kind.OnnxNode.name}
        missing |= {node.key for node in part.rest[:1]}
        if missing:
            shown = ", ".join(sorted(missing))
            raise Unsupported(
                f"no gradient goes through {plural(len(missing), 'operator')} of the model: {shown}", sorted(missing)
            )
        stored = {vid: as_tensor(payload.numpy()) for vid, payload in part.graph.payloads.items()}
        constants = {name: as_tensor(array) for name, array in part.constants.items()}
        del self._imported[: max(len(self._imported) - MOST_GRAPHS + 1, 0)]
        self._imported.append(ImportedNodes(signature, part, stored, constants))
        return self._imported[-1]


def compute_op(op: Op, ins: Sequence[Tensor], own: Own = STRAIGHT_THROUGH) -> list[Tensor]:
    """The results of one op, through which gradients go.

    Args:
        own: functions for kinds of operators, in place of torch's.

    Raises:
        Unsupported: no gradient goes through it, or torch refuses its operands, such as a window that is larger than
            what it is laid over.
    """
    if op.kind in FLAT and ins[0].requires_grad:
        raise Unsupported(f"no gradient goes through 1 operator of the model: {op.operator}", [op.operator])
    try:
        return apply(op, ins, own)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise Unsupported(f"torch does not compute {place_of(op)} on these inputs: {error}") from error


def _is_shape(array: np.ndarray) -> bool:
    return array.dtype == np.int64 and array.ndim < 2 and array.size <= SHAPE_LENGTH


class QuantizedLayers:
    """Layers that read quantized values. Their weights take memory as well as those of `model`.

    Args:
        layers: the nodes of each.
    """

    def __init__(
        self, model: DetachedModel, encodings: Mapping[str, Encoding], layers: Sequence[Sequence[NodeProto]]
    ) -> None:
        self._encodings = encodings
        reads = {name for nodes in layers for node in nodes for name in node.input if name}
        stored = model.index.initializers
        arrays = {name: model.array(stored[name]) for name in reads & stored.keys()}
        for name in arrays.keys() & encodings.keys():
            arrays[name] = round_trip(arrays[name], encodings[name], is_stored=True)
        fixed = find_fixed_values(model.proto.graph, stored).intersection(reads).difference(encodings)
        arrays |= _compute_fixed(model, encodings, sorted(fixed))
        self._constants = {name: as_tensor(array) for name, array in arrays.items()}
        opsets = list(model.proto.opset_import)
        self._nodes = {
            id(node): TorchNodes([node], opsets, list(filter(None, node.output)), {})
            for nodes in layers
            for node in nodes
        }

    def measure_differences(self, nodes: Sequence[NodeProto], values: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
        """{result of a layer: what it is with quantized values, less what it is in float}.

        Args:
            nodes: the layer.
            values: of the float model; all that the layer reads and makes.
        """
        results: dict[str, Tensor] = {}
        with torch.no_grad():
            for node in nodes:
                reads = {
                    name: self._constants[name] if name in self._constants else self._quantize(name, values[name])
                    for name in filter(None, node.input)
                    if name not in results
                }
                made = self._nodes[id(node)].compute({**reads, **results})
                results |= {name: self._quantize(name, made.pop(name)) for name in node.output if name}
            return {name: results[name].sub_(values[name]).numpy() for name in filter(None, nodes[-1].output)}

    def _quantize(self, name: str, value: Tensor) -> Tensor:
        encoding = self._encodings.get(name)
        return value if encoding is None else as_tensor(round_trip(to_numpy(value), encoding, is_stored=False))


def _compute_fixed(
    model: DetachedModel, encodings: Mapping[str, Encoding], names: Iterable[str]
) -> dict[str, np.ndarray]:
    """The values `names`, which are computed from constants alone, such as a weight after a Transpose: from the
    constants in their formats."""
    proto = model.copy_proto()
    graph = proto.graph
    del graph.input[:], graph.initializer[:]
    keep_outputs(graph, names)
    read = {name for node in graph.node for name in node.input}
    feeds: dict[str, np.ndarray] = {}
    for tensor in model.proto.graph.initializer:
        if tensor.name in read and tensor.name in encodings:
            feeds[tensor.name] = round_trip(model.array(tensor), encodings[tensor.name], is_stored=True)
            graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
        elif tensor.name in read:
            graph.initializer.append(tensor)
    return Session.of(model.with_proto(proto)).run(feeds) if feeds else {}


QUANTIZERS: Final = ("QuantizeLinear", "DequantizeLinear")


class TorchRun:
    """A quantized model that torch and torchao run.

    Raises:
        UsageError: torchao is not installed, or `model` is no DetachedModel.
    """

    @expects(model=a(DetachedModel, "a model, as read_model gives"))
    def __init__(self, model: DetachedModel) -> None:
        try:
            from torchao.quantization import quant_primitives  # type: ignore[import-not-found]
        except ImportError as error:
            raise UsageError("the cross-check in torch needs torchao: pip install torchao") from error
        self._primitives: Any = quant_primitives
        graph = model.proto.graph
        floats = float_tensors(model.proto)
        nodes = [node for node in graph.node if node.op_type in QUANTIZERS or not floats.isdisjoint(node.output)]
        made = {*computed_values(nodes)}
        self._outputs = tuple(info.name for info in graph.output)
        self._nodes = TorchNodes(nodes, model.proto.opset_import, made.intersection(self._outputs), read_stored(model))
        inputs = {info.name for info in graph.input}
        self._session = Session.of(model, sorted(set(self._nodes.reads) - inputs))

    @expects(feeds=a_mapping("a mapping of the names of inputs to arrays"))
    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The outputs of one sample.

        Args:
            feeds: name of an input → array of its shape and dtype.

        Raises:
            Unsupported: torch has no function for an operator of floats, or torchao none for a type.
        """
        found = {**feeds, **self._session.run(feeds)}
        own = {QUANTIZE: self._quantize, DEQUANTIZE: self._dequantize}
        with torch.no_grad():
            made = self._nodes.compute({name: as_tensor(found[name]) for name in self._nodes.reads}, own=own)
        return {name: to_numpy(made[name]) if name in made else found[name] for name in self._outputs}

    def _quantize(self, op: Op, ins: Sequence[Tensor]) -> list[Tensor]:
        to = str(op.attrs["to"])
        size, scale, zero = _scales(op, ins, to)
        limits = torch.iinfo(getattr(torch, to))
        low, high = op.attrs.get("low", limits.min), op.attrs.get("high", limits.max)
        return [self._primitives.quantize_affine(ins[0].contiguous(), size, scale, zero, torch.int32, low, high)]

    def _dequantize(self, op: Op, ins: Sequence[Tensor]) -> list[Tensor]:
        size, scale, zero = _scales(op, ins, dtype_name(ins[0].dtype))
        integers = ins[0].contiguous().to(torch.int32)
        return [self._primitives.dequantize_affine(integers, size, scale, zero, torch.int32, LEAST, MOST)]


def _scales(op: Op, ins: Sequence[Tensor], dtype: str) -> tuple[tuple[int, ...], Tensor, Tensor]:
    """How many neighbours along each axis share a scale; the scales, and the zero points as integers of 32 bits."""
    if dtype.startswith("float8"):
        raise Unsupported(f"torchao has no quantizers for {dtype}", [dtype])
    shape, scale = tuple(ins[0].shape), ins[1]
    zero = ins[2].to(torch.int32) if len(ins) > 2 else torch.zeros_like(scale, dtype=torch.int32)
    if scale.numel() == 1:
        return shape, scale, zero
    axis, block = int(str(op.attrs.get("axis", 1))) % len(shape), int(str(op.attrs.get("block_size", 0)))
    if block and shape[axis] % block:
        raise Unsupported(f"torchao has no blocks of {block} that do not divide an axis of {shape[axis]}")
    sizes = ((block or 1) if place == axis else 1 if block else length for place, length in enumerate(shape))
    return tuple(sizes), scale, zero


LEAST, MOST = -(2**31), 2**31 - 1
