"""onnxsim without the weights: each large weight is a reference to an empty file of external data.

A model that a pass works on has a stand-in for each weight: a tensor whose few elements identify the weight
(`passes.weights.stand_ins`). Before onnxsim runs, stand-ins become references, which onnxsim cannot read; after it has
run, the references become stand-ins again. onnxsim folds no constant computed from a reference; all its other work is
the same. Afterwards, `FoldConstants` folds these constants with the real values, a weight at a time. To onnxsim all
references look equal, so onnxoptimizer runs the two passes of onnxsim that compare tensors, on the stand-ins, which are
equal only where the weights are. All of this repeats until these passes and the folding change nothing, as in onnxsim.

Weights whose values a pass of onnxsim may read are sent with the model. The factor of a product and the table of a
Gather are not read (`OPAQUE_OPERANDS`), but for the weights of three products of one value, of which fuse_attention
makes one weight, where a Softmax stands without torch's guard. A weight that the user wants left on disk
(`weight.unread`) is sent in these cases alone, however small it is, and nothing is folded from it if it has more than
`LARGE` bytes.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import replace
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any, Final

import onnx
from onnx import GraphProto, NodeProto, TensorProto

from passes.context import PassContext
from passes.errors import StepFailed
from passes.external.onnxoptimizer import OnnxOptimizerPass
from passes.graph.index import GraphIndex
from passes.graph.layer_calls import LAYERS
from passes.graph.op_facts import ARRANGING, CONTRACTIONS, MATRIX_PRODUCTS
from passes.graph.traversal import reads_of
from passes.model.canonical import canonical_digest
from passes.rewrites.fold_constants import FoldConstants
from passes.weights.detached import PROTOBUF_LIMIT, DetachedModel, detach
from passes.weights.stand_ins import TYPED_FIELDS, clear_data, inline

LARGE: Final = 2**18
"""Bytes. A smaller weight is sent to onnxsim, unless it is to be left on disk; a larger one may be kept back."""

COMPARING: Final = ("eliminate_duplicate_initializer", "eliminate_common_subexpression")

OPAQUE_OPERANDS: Final = frozenset(
    {(kind, at) for kind in CONTRACTIONS for at in (0, 1)}
    | {(kind, 0) for kind in ("Gather", "GatherND", "GatherElements")}
)
"""(operator, position) of operands at which no pass of onnxsim looks. Of others a pass may ask, for example, whether
they are all zero, and a reference looks as if it were all zero."""

LAYOUT: Final = ARRANGING - {"Flatten"}
"""Operators through which an operand is traced to its weight."""

ROUNDS: Final = 10
"""The most rounds. A round of a BERT whose joined weights are sent takes 1.5 s."""

LOCATION: Final = "weights-that-stayed"
STAND_IN: Final = "onnxline.stand-in"
"""The key of a reference under which the elements of its stand-in are kept."""
WHOLE_FIELDS: Final = frozenset({"int32_data", "int64_data", "uint64_data"})

OPTIONAL: Final = ("torch", "sympy")
"""What onnxsim imports where it is installed, for functions that we do not call: 1.2 s and 0.25 s, and 200 MB."""


def simplify_detached(
    model: DetachedModel,
    context: PassContext,
    options: Mapping[str, Any],
    skipped: Collection[str],
    rounds: int = ROUNDS,
) -> DetachedModel:
    """Run `onnxsim.simplify` on `model` without sending all the weights.

    Args:
        model: the model, which does not change.
        context: whose worker runs onnxsim.
        options: arguments of `onnxsim.simplify`.
        skipped: passes of onnxsim to leave out.
        rounds: the most times that onnxsim runs.

    Raises:
        StepFailed: onnxsim raised, crashed or timed out, or weights to be left on disk would have to be sent and are
            larger than protobuf allows.
    """
    (context.folder / LOCATION).touch()  # onnx.checker refuses a reference to a file that does not exist
    sent_options = {**options, "skipped_optimizers": [*skipped, *(name for name in COMPARING if name not in skipped)]}
    folds = not options.get("skip_constant_folding", False)
    for _ in range(rounds):
        with_data = _weights_to_send(model, attention="fuse_attention" not in skipped)
        result = context.worker.call(
            simplify_references,
            model=copy_with_references(model, with_data).SerializeToString(),
            folder=str(context.folder),
            options=sent_options,
        )
        model = _resolve_references(onnx.load_from_string(result), model)
        simplified = canonical_digest(model)
        for name in COMPARING:
            if name not in skipped:
                model = OnnxOptimizerPass(name).apply(model, context).model
        if folds:
            limit = _bytes_of(str(options.get("tensor_size_threshold", "1.5GB")))
            model = FoldConstants(grow_limit=limit, unread_limit=LARGE).apply(model, context).model
        if canonical_digest(model) == simplified:
            break
    return model


def _bytes_of(size: str) -> int:
    """The bytes of a size as onnxsim takes it: 64MB, 1.5GB, or digits alone; what onnxsim refuses is not asked for."""
    found = SIZE.fullmatch(size.strip().upper())
    return int(float(found[1]) * UNITS[found[2]]) if found else 2**31


SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([KMG]?)I?B?")
UNITS: Final = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def simplify_references(model: bytes, folder: str, options: dict[str, Any]) -> bytes:
    """In the worker: simplify a serialized model whose large weights are references."""
    with contextlib.chdir(folder):
        return call_simplify(onnx.load_from_string(model), options).SerializeToString()


def call_simplify(model: onnx.ModelProto | str, options: Mapping[str, Any]) -> onnx.ModelProto:
    """In the worker: the result of `onnxsim.simplify` on a model, or on the file of one."""
    simplified, _ = import_onnxsim().simplify(model, **options)
    return simplified


def import_onnxsim() -> ModuleType:
    """The module of `onnxsim.simplify`, without the rest of the package, torch and sympy: 0.09 s in place of 1.9."""
    if SIMPLIFIER in sys.modules:
        return sys.modules[SIMPLIFIER]
    package = find_spec("onnxsim")
    if package is None:
        raise ImportError("onnxsim is not installed")
    absent = [name for name in OPTIONAL if name not in sys.modules and "torch" not in sys.modules]
    hidden: dict[str, Any] = dict.fromkeys(absent)  # None: cannot be imported
    if "onnxsim" not in sys.modules:
        hidden["onnxsim"] = module_from_spec(package)  # whose code would import 130 modules more
    sys.modules.update(hidden)
    try:
        return importlib.import_module(SIMPLIFIER)
    finally:
        for name in hidden:
            del sys.modules[name]


SIMPLIFIER: Final = "onnxsim.onnx_simplifier"


def copy_with_references(model: DetachedModel, with_data: Collection[str]) -> onnx.ModelProto:
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
        elements = getattr(tensor, TYPED_FIELDS[tensor.data_type])
        text = " ".join(repr(number) for number in elements)
        clear_data(tensor)
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=LOCATION)
        tensor.external_data.add(key=STAND_IN, value=text)
    return proto


def _resolve_references(proto: onnx.ModelProto, model: DetachedModel) -> DetachedModel:
    """`proto` with stand-ins in place of references; their shape may have been changed, their bytes are the same."""
    known = dict(model.weights)
    by_elements = {(data_type, elements): weight for (_, data_type, elements), weight in known.items()}
    for tensor in proto.graph.initializer:
        text = next((entry.value for entry in tensor.external_data if entry.key == STAND_IN), None)
        if text is None:
            continue
        kind = int if TYPED_FIELDS[tensor.data_type] in WHOLE_FIELDS else float
        elements = tuple(kind(word) for word in text.split())
        clear_data(tensor)
        getattr(tensor, TYPED_FIELDS[tensor.data_type]).extend(elements)
        weight = by_elements[tensor.data_type, elements]
        dims = tuple(tensor.dims)
        known.setdefault((dims, tensor.data_type, elements), replace(weight, dims=dims))
    _restore_stand_ins(proto, model)
    detached = detach(proto, known=known)
    return DetachedModel(proto, {**model.weights, **detached.weights})


def _restore_stand_ins(proto: onnx.ModelProto, model: DetachedModel) -> None:
    """Put the stand-in back, in place, for each weight to be left on disk that returns with the data that was sent."""
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
        StepFailed: those of them that are to be left on disk are together larger than protobuf allows.
    """
    graph, unread = model.proto.graph, frozenset(model.unread())
    names = names_to_send(graph, attention=attention, skips_concat=bool(unread))
    weights = [model.weight(tensor) for tensor in graph.initializer if tensor.name in names & unread]
    total = sum(weight.data.nbytes for weight in weights if weight is not None)
    if total > PROTOBUF_LIMIT:
        raise StepFailed(
            f"its passes may read {len(weights)} of the weights that are to stay unread, {total / 2**30:.3g} GiB, such "
            f"as {min(names & unread)!r}"
        )
    return names


def names_to_send(graph: GraphProto, *, attention: bool, skips_concat: bool) -> frozenset[str]:
    """The initializers whose values a pass of onnxsim may read.

    Args:
        graph: the graph that onnxsim gets.
        attention: whether fuse_attention runs, which joins the weights of three products of one value.
        skips_concat: whether to take a Concat for an operator that reads no weight, since nothing is folded from it.
    """
    index = GraphIndex(graph)
    products: dict[str, list[NodeProto]] = defaultdict(list)
    read: set[str] = set()
    for node in graph.node:
        products[node.input[0] if node.op_type in MATRIX_PRODUCTS else ""].append(node)
        read.update(
            name
            for position, name in enumerate(reads_of(node))
            if node.op_type not in LAYOUT
            and node.domain != LAYERS
            and (node.op_type, position) not in OPAQUE_OPERANDS
            and not (skips_concat and node.op_type == "Concat")
        )
    if attention and _has_bare_softmax(graph):
        fusible = _fusible_values(graph)
        for value, siblings in products.items():
            joined = [
                node.input[1]
                for node in siblings
                if value and node.output[0] in fusible and _reaches_product(index, node.output[0])
            ]
            read.update(joined if len(joined) >= 3 else ())
    return frozenset(index.origin_of(name, LAYOUT) for name in read)


def _reaches_product(index: GraphIndex, name: str) -> bool:
    """Whether operators that move elements, and sums and products with a constant, are all that lies between a value
    and a product of it with another: queries and keys that are rotated or normalized are no pattern of fuse_attention.
    """
    for node in index.consumers[name]:
        if node.op_type == "MatMul":
            return True
        constant = all(operand == name or operand in index.folded for operand in node.input)
        if (node.op_type in LAYOUT or (node.op_type in SCALING and constant)) and any(
            _reaches_product(index, output) for output in node.output
        ):
            return True
    return False


SCALING: Final = frozenset({"Add", "Sub", "Mul", "Div"})


def _has_bare_softmax(graph: GraphProto) -> bool:
    """Whether a Softmax is without torch's guard, an IsNaN of its result, which fuse_attention has no pattern for."""
    guarded = {node.input[0] for node in graph.node if node.op_type == "IsNaN"}
    return any(node.op_type == "Softmax" and node.output[0] not in guarded for node in graph.node)


def _fusible_values(graph: GraphProto) -> frozenset[str]:
    """The values of which fuse_attention may take: no outputs of the graph, nor operands of a sum that is an output."""
    index = GraphIndex(graph)
    held = {
        name
        for node in graph.node
        if node.op_type == "Add" and not index.outputs.keys().isdisjoint(node.output)
        for name in node.input
    }
    return frozenset(index.producers.keys() - index.outputs.keys() - held)
