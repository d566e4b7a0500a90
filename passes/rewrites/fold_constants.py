"""Make constants: of what depends on constants alone, and of initializers that are inputs of the model, too.

Values are computed with onnxruntime, in the worker, a few weights at a time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import ClassVar, Final

import numpy as np
import onnx
from onnx import NodeProto

from passes.context import PassContext
from passes.graph.index import GraphIndex, drop_unread, extract, replace_entries
from passes.graph.inference import dims_of
from passes.graph.op_facts import RANDOM_OPS, attribute_of, has_body
from passes.graph.traversal import group_linked, producers_read, reads_of
from passes.model.signature import FREE_INITIALIZERS, declare_initializers, drop_default_inputs
from passes.step import PassResult, Step
from passes.suggest import plural
from passes.weights.detached import DetachedModel
from passes.weights.sharing import MappedModel, WeightFile, WeightRef, portable
from passes.weights.stand_ins import DETACH_FROM_BYTES, Weight, initializer_of

KEEP_OPS: Final = frozenset({"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"})
"""Folding a dequantization would undo the quantization."""


@dataclass(frozen=True, slots=True)
class FoldConstants(Step, name="fold_constants", reads="values"):
    """Compute what depends on constants alone, where that does not make the model larger. What is computed from
    constants alone becomes an initializer.

    A result larger than `grow_limit` bytes that is also larger than everything it is computed from stays computed: a
    tiny Expand or Tile may spell a matrix of megabytes. What would read an unread weight of more than `unread_limit`
    bytes stays computed too.
    """

    grow_limit: int = 2**20
    unread_limit: int | None = None

    @property
    def may_grow(self) -> bool:
        return self.grow_limit != type(self)().grow_limit

    def apply(self, model: DetachedModel, context: PassContext) -> PassResult:
        excluded, unread = set[str](), _unread_to_skip(model, self.unread_limit)
        declared = _declared_bytes(model.proto.graph)
        while True:
            nodes = _foldable(model.proto, excluded, unread)
            if not nodes:
                but = ", but for what would make the model larger" if excluded else ""
                return PassResult(model, changed=False, why=f"nothing is computed from constants alone{but}")
            groups = _groups(nodes)
            sizes = _sizes(model)
            read = _read_by_others(model.proto, nodes)
            parts = [_part(model, group, read) for group in groups]
            limits = [max(self.grow_limit, _bytes_read(group, sizes)) for group in groups]
            # What is declared too large is not computed: the worker would keep the megabytes of a cache of zeros.
            too_large = _find_larger([{name: declared.get(name, 0) for name in wanted} for _, wanted in parts], limits)
            if not too_large:
                sources = [(portable(part, context.spill), wanted) for part, wanted in parts]
                computed = context.worker.call(compute, parts=sources, folder=str(context.folder))
                too_large = _find_larger([{value.name: value.nbytes for value in group} for group in computed], limits)
                if not too_large:
                    return PassResult(_replace_nodes(model, nodes, list(chain.from_iterable(computed))))
            excluded |= {node.output[0] for node in nodes if too_large & set(node.output)}


def _find_larger(groups: Iterable[Mapping[str, int]], limits: Iterable[int]) -> set[str]:
    """The values that take more bytes than the limit of their group."""
    pairs = zip(groups, limits, strict=True)
    return {name for group, limit in pairs for name, nbytes in group.items() if nbytes > limit}


@dataclass(frozen=True, slots=True)
class FixDefaults(Step, name="fix-defaults", reads="structure"):
    """Make constants of initializers that are inputs of the model, too. Exporters of Keras, mxnet and older torch
    declare all weights as inputs with a default."""

    fixes_defaults: ClassVar[bool] = True

    def apply(self, model: DetachedModel, context: PassContext) -> PassResult:
        proto = model.copy_proto()
        fixed = drop_default_inputs(proto.graph)
        if not fixed:
            return PassResult(model, changed=False, why="no input has a default")
        return PassResult(model.with_proto(proto), why=f"{plural(len(fixed), 'input')} made constant")


@dataclass(frozen=True, slots=True)
class FoldedValue:
    """One computed value: an array when it is small, else a weight in a file."""

    name: str
    nbytes: int
    array: np.ndarray | None
    stored: WeightRef | None = None
    digest: str = ""


def compute(parts: Sequence[tuple[MappedModel, Sequence[str]]], folder: str) -> list[list[FoldedValue]]:
    """In the worker: run each part and keep the wanted outputs; large ones go to a file in `folder`."""
    spill = WeightFile(Path(folder), "folded.data")
    return [_compute_part(part, wanted, spill) for part, wanted in parts]


def _compute_part(part: MappedModel, wanted: Sequence[str], spill: WeightFile) -> list[FoldedValue]:
    results = part.session(wanted, may_evaluate=True).run({}) if wanted else {}
    return [_store_value(name, results.pop(name), spill) for name in wanted]


def _store_value(name: str, array: np.ndarray, spill: WeightFile) -> FoldedValue:
    if array.nbytes < DETACH_FROM_BYTES or array.dtype.kind in "OUS":
        return FoldedValue(name, array.nbytes, array)
    weight = Weight.of(array)
    stored = WeightRef(name, weight.dims, weight.data_type, *spill.store(weight), array.nbytes)
    return FoldedValue(name, array.nbytes, None, stored, weight.digest)


def _unread_to_skip(model: DetachedModel, unread_limit: int | None) -> frozenset[str]:
    """The unread weights that nothing is computed from; joined ones have no bytes to compute with."""
    limit = math.inf if unread_limit is None else unread_limit
    weights = ((tensor.name, model.weight(tensor)) for tensor in model.proto.graph.initializer)
    return frozenset(
        name
        for name, weight in weights
        if weight is not None and weight.unread and (weight.data.nbytes > limit or not weight.data.flags.c_contiguous)
    )


def _declared_bytes(graph: onnx.GraphProto) -> dict[str, int]:
    """Bytes of each value whose type and sizes the graph declares."""
    found = {}
    for info in graph.value_info:
        dims, kind = dims_of(info), info.type.tensor_type.elem_type
        sizes = [dim for dim in dims or () if isinstance(dim, int)]
        if dims is not None and len(sizes) == len(dims) and kind not in NO_BYTES:
            found[info.name] = math.prod(sizes) * onnx.helper.tensor_dtype_to_np_dtype(kind).itemsize
    return found


NO_BYTES: Final = frozenset({onnx.TensorProto.UNDEFINED, onnx.TensorProto.STRING})
"""Types of elements whose size is not known from the type."""


def _foldable(proto: onnx.ModelProto, excluded: set[str], unread: Collection[str]) -> list[NodeProto]:
    """Nodes computable from constants, in graph order."""
    index = GraphIndex(proto.graph)
    constants = index.initializers.keys() - index.inputs.keys() - set(unread)
    nodes = []
    for node in proto.graph.node:
        fixed = (
            node.op_type not in RANDOM_OPS | KEEP_OPS
            and not has_body(node)
            and "Sequence" not in node.op_type
            and "Optional" not in node.op_type
            and node.output[0] not in excluded
            and index.outputs.keys().isdisjoint(node.output)
            and all(name in constants for name in node.input if name)
        )
        if fixed:
            nodes.append(node)
            constants.update(node.output)
    return nodes


def _groups(nodes: Sequence[NodeProto]) -> list[list[NodeProto]]:
    """`nodes` in groups that share no computed value, each in graph order: one is computed at a time."""
    links = ((position, *before) for position, before in enumerate(producers_read(nodes)))
    return [[nodes[position] for position in group] for group in group_linked(links)]


def _part(model: DetachedModel, group: Sequence[NodeProto], read: Collection[str]) -> tuple[DetachedModel, list[str]]:
    """`group` as a model of its own, and the outputs of `group` that are in `read`."""
    part = extract(model.proto, group)
    return model.with_proto(part), [name for node in group for name in node.output if name in read]


def _read_by_others(proto: onnx.ModelProto, nodes: Sequence[NodeProto]) -> frozenset[str]:
    folded = {id(node) for node in nodes}
    return frozenset(name for node in proto.graph.node if id(node) not in folded for name in reads_of(node))


def _sizes(model: DetachedModel) -> dict[str, int]:
    """Bytes of each detached initializer."""
    weights = ((tensor.name, model.weight(tensor)) for tensor in model.proto.graph.initializer)
    return {name: weight.data.nbytes for name, weight in weights if weight is not None}


def _bytes_read(group: Sequence[NodeProto], sizes: Mapping[str, int]) -> int:
    return sum(sizes.get(name, 0) for name in {name for node in group for name in node.input})


def _replace_nodes(model: DetachedModel, nodes: Sequence[NodeProto], folded: Sequence[FoldedValue]) -> DetachedModel:
    gone = {node.output[0] for node in nodes}
    proto = model.copy_proto()
    replace_entries(proto.graph.node, [node for node in proto.graph.node if node.output[0] not in gone])
    weights, transposed = dict(model.weights), _transposed_digests(model, nodes)
    for value in folded:
        if value.array is not None:
            proto.graph.initializer.append(onnx.numpy_helper.from_array(value.array, value.name))
        if value.stored is None:
            continue
        weight = value.stored.weight(value.digest)
        if value.name in transposed:
            weight = replace(weight, digest=transposed[value.name], unread=True)
        tensor, key = initializer_of(value.name, weight)
        proto.graph.initializer.append(tensor)
        if key is not None:
            weights.setdefault(key, weight)
    drop_unread(proto.graph)
    if proto.ir_version < FREE_INITIALIZERS:
        declare_initializers(proto.graph)
    return DetachedModel(proto, weights)


def _transposed_digests(model: DetachedModel, nodes: Sequence[NodeProto]) -> dict[str, str]:
    """Transposed tensor → its digest, for unread weights that are only transposed: it identifies a kept tensor."""
    stored = model.index.initializers
    digests = {}
    for node in nodes:
        tensor = stored.get(node.input[0]) if node.op_type == "Transpose" else None
        if tensor is not None and model.is_unread(tensor):
            axes = attribute_of(node, "perm", range(len(tensor.dims))[::-1])
            digests[node.output[0]] = model.transposed_digest(tensor, tuple(axes))
    return digests
