"""onnxsim without the weights: each large weight is a reference to external data that nobody opens.

onnxsim folds no constant computed from a weight that it cannot read; all its other work is the same. Afterwards,
`FoldConstants` folds these constants with the real values, a weight at a time. Two references look equal to onnxsim, so
onnxoptimizer, which distinguishes stand-ins, runs the two passes of onnxsim that compare tensors. The rounds repeat
until nothing changes, as onnxsim's own rounds do.

Weights whose values a pass of onnxsim may read are sent with the model: weights that are more than a factor in a
product or a table to gather from, and the weights of three products of one value, which fuse_attention joins in its own
memory. No other unread weight is sent, however small, and a value computed from an unread weight of more than `LARGE`
bytes is not folded.
"""

from __future__ import annotations

import contextlib
import sys
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any, Final

import onnx
from onnx import GraphProto, NodeProto, TensorProto

from passes.context import PassContext
from passes.errors import StepFailed
from passes.external.onnxoptimizer import OnnxOptimizerPass
from passes.graph.index import GraphIndex
from passes.graph.op_facts import ARRANGING, MATRIX_PRODUCTS
from passes.graph.traversal import reads_of
from passes.model.canonical import canonical_digest
from passes.rewrites.fold_constants import FoldConstants
from passes.weights.detached import PROTOBUF_LIMIT, DetachedModel, detach
from passes.weights.stand_ins import TYPED_FIELDS, clear_data, inline

LARGE: Final = 2**18
"""Size in bytes. A smaller weight is sent to onnxsim, unless its data is unread; a larger one may be kept back."""

COMPARING: Final = ("eliminate_duplicate_initializer", "eliminate_common_subexpression")

UNREAD: Final = frozenset(
    {(kind, at) for kind in MATRIX_PRODUCTS | {"Einsum"} for at in (0, 1)}
    | {(kind, 0) for kind in ("Gather", "GatherND", "GatherElements")}
)
"""Operands where only the op itself reads a weight. Elsewhere a pass may ask, for example, whether the weight is all
zero, and a reference looks as if it were."""

LAYOUT: Final = ARRANGING - {"Flatten"}

ROUNDS: Final = 10

LOCATION: Final = "weights-that-stayed-behind"
NUMBERS: Final = "onnxline.stand-in"
WHOLE_FIELDS: Final = frozenset({"int32_data", "int64_data", "uint64_data"})

OPTIONAL: Final = ("torch", "sympy")
"""What onnxsim imports where it is installed, for functions that we do not call: 1.2 s and 0.25 s, and 200 MB."""


def simplify_detached(
    model: DetachedModel, context: PassContext, options: Mapping[str, Any], skipped: Collection[str]
) -> DetachedModel:
    """Run `onnxsim.simplify` on `model` without sending all the weights.

    Args:
        options: arguments of simplify, with `skipped` among them as `skipped_optimizers`.

    Raises:
        StepFailed: onnxsim raised, crashed or timed out.
    """
    (context.folder / LOCATION).touch()  # the checker wants it to be there
    own = {**options, "skipped_optimizers": [*skipped, *(name for name in COMPARING if name not in skipped)]}
    folds = not options.get("skip_constant_folding", False)
    before = canonical_digest(model)
    for _ in range(ROUNDS):
        with_data = _weights_to_send(model, attention="fuse_attention" not in skipped)
        result = context.worker.call(
            simplify_references,
            model=_with_references(model, with_data).SerializeToString(),
            folder=str(context.folder),
            options=own,
        )
        model = _resolve_references(onnx.load_from_string(result), model)
        for name in COMPARING:
            if name not in skipped:
                model = OnnxOptimizerPass(name).apply(model, context).model
        if folds:
            model = FoldConstants(grow_limit=2**31, unread_limit=LARGE).apply(model, context).model
        after = canonical_digest(model)
        if after == before:
            break
        before = after
    return model


def simplify_references(model: bytes, folder: str, options: dict[str, Any]) -> bytes:
    """In the worker: simplify a serialized model whose large weights are references."""
    with contextlib.chdir(folder):
        return call_simplify(onnx.load_from_string(model), options).SerializeToString()


def call_simplify(model: onnx.ModelProto | str, options: Mapping[str, Any]) -> onnx.ModelProto:
    """In the worker: the result of `onnxsim.simplify` on an unchanged model or file."""
    simplified, _ = import_onnxsim().simplify(model, **options)
    return simplified


def import_onnxsim() -> ModuleType:
    """onnxsim without torch and sympy: 0.4 s in place of 1.9."""
    absent = [name for name in OPTIONAL if name not in sys.modules]
    if "onnxsim" in sys.modules or "torch" in sys.modules:
        absent = []
    for name in absent:
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        import onnxsim
    finally:
        for name in absent:
            del sys.modules[name]
    return onnxsim


def _with_references(model: DetachedModel, with_data: Collection[str]) -> onnx.ModelProto:
    """A copy of `model` with its large weights as references, except weights in `with_data`, which hold their data."""
    proto = model.copy_proto()
    for node in proto.graph.node:
        del node.metadata_props[:]
    for tensor in proto.graph.initializer:
        weight = model.weight(tensor)
        if weight is None:
            continue
        if (weight.data.nbytes < LARGE and not weight.unread) or tensor.name in with_data:
            inline(tensor, weight.data)
            continue
        numbers = getattr(tensor, TYPED_FIELDS[tensor.data_type])
        text = " ".join(repr(number) for number in numbers)
        clear_data(tensor)
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=LOCATION)
        tensor.external_data.add(key=NUMBERS, value=text)
    return proto


def _resolve_references(proto: onnx.ModelProto, model: DetachedModel) -> DetachedModel:
    """`proto` with stand-ins in place of references; their shape may have been changed, their bytes are the same."""
    known = dict(model.weights)
    by_numbers = {(data_type, numbers): weight for (_, data_type, numbers), weight in known.items()}
    for tensor in proto.graph.initializer:
        text = next((entry.value for entry in tensor.external_data if entry.key == NUMBERS), None)
        if text is None:
            continue
        kind = int if TYPED_FIELDS[tensor.data_type] in WHOLE_FIELDS else float
        numbers = tuple(kind(word) for word in text.split())
        clear_data(tensor)
        getattr(tensor, TYPED_FIELDS[tensor.data_type]).extend(numbers)
        weight = by_numbers[tensor.data_type, numbers]
        dims = tuple(tensor.dims)
        known.setdefault((dims, tensor.data_type, numbers), replace(weight, dims=dims))
    _leave_unread_again(proto, model)
    detached = detach(proto, known=known)
    return DetachedModel(proto, {**model.weights, **detached.weights})


def _leave_unread_again(proto: onnx.ModelProto, model: DetachedModel) -> None:
    """Unread weights that come back with the data that they were sent with become stand-ins again, in place."""
    sent = {name: tensor for name, tensor in model.index.initializers.items() if model.is_unread(tensor)}
    for tensor in proto.graph.initializer:
        before = sent.get(tensor.name)
        if before is None or not tensor.HasField("raw_data") or tensor.dims != before.dims:
            continue
        weight = model.weight(before)
        if weight is not None and tensor.raw_data == weight.data.tobytes():
            tensor.CopyFrom(before)


def _weights_to_send(model: DetachedModel, *, attention: bool) -> frozenset[str]:
    """Initializers whose values a pass of onnxsim may read; with `attention`, also those that fuse_attention joins.

    Raises:
        StepFailed: these weights must stay unread, and are too large to send.
    """
    graph, unread = model.proto.graph, frozenset(model.unread())
    names = _names_to_send(graph, attention=attention, skips_concat=bool(unread))
    weights = [model.weight(tensor) for tensor in graph.initializer if tensor.name in names & unread]
    total = sum(weight.data.nbytes for weight in weights if weight is not None)
    if total > PROTOBUF_LIMIT:
        raise StepFailed(
            f"its passes may read {len(weights)} of the weights that are to stay unread, {total / 2**30:.3g} GiB, such "
            f"as {min(names & unread)!r}"
        )
    return names


def _names_to_send(graph: GraphProto, *, attention: bool, skips_concat: bool) -> frozenset[str]:
    """`skips_concat`: a Concat of weights reads none of them, since nothing will be computed from what it makes."""
    index = GraphIndex(graph)
    products: dict[str, list[NodeProto]] = defaultdict(list)
    read: set[str] = set()
    for node in graph.node:
        products[node.input[0] if node.op_type in MATRIX_PRODUCTS else ""].append(node)
        read.update(
            name
            for index, name in enumerate(reads_of(node))
            if node.op_type not in LAYOUT
            and (node.op_type, index) not in UNREAD
            and not (skips_concat and node.op_type == "Concat")
        )
    if attention:
        free = _unpinned_values(graph)
        for value, siblings in products.items():
            joined = [node.input[1] for node in siblings if value and node.output[0] in free]
            read.update(joined if len(joined) >= 3 else ())
    return frozenset(index.origin_of(name, LAYOUT) for name in read)


def _unpinned_values(graph: GraphProto) -> frozenset[str]:
    """Values that are no output of the graph, and whose sum with a bias is no output either."""
    index = GraphIndex(graph)
    held = {
        name
        for node in graph.node
        if node.op_type == "Add" and not index.outputs.keys().isdisjoint(node.output)
        for name in node.input
    }
    return frozenset(index.producers.keys() - index.outputs.keys() - held)
