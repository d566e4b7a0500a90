"""Find what a target cannot run of a model, and name the step that helps: `onnxline check MODEL --target NAME`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import onnx
from onnx import NodeProto, TensorProto

from passes.graph.op_facts import ONNX_DOMAINS
from passes.graph.traversal import every_node
from passes.portability import BY_OPERATOR
from passes.provenance.annotations import annotations_of
from passes.rewrites.decompose_attention import is_attention
from passes.weights.detached import DetachedModel
from passes.worker.inference import InferenceError, infer_shapes
from pipeline.quantsim.profiles import OperatorGroup, TargetTable


@dataclass(frozen=True, slots=True)
class Obstruction:
    """Nodes that a target does not take for one reason; `places` are their names, or those of inputs."""

    what: str
    reason: str
    advice: str
    places: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.what}: {self.reason}; {self.advice}; it is at {', '.join(self.places)}"


@dataclass(frozen=True, slots=True)
class TargetReport:
    """What the target does not take. `remarks` are conditions on operators that it takes, which are not checked."""

    title: str
    obstructions: tuple[Obstruction, ...]
    remarks: tuple[str, ...]


def check_target(model: DetachedModel, table: TargetTable) -> TargetReport:
    """Hold the opset, the inputs and every node of `model`, also in bodies and functions, against the table."""
    return _TargetCheck(model, table).run()


class _TargetCheck:
    """Collects obstructions by their reason, so that one sentence names all nodes of each."""

    def __init__(self, model: DetachedModel, table: TargetTable) -> None:
        self._proto, self._table = model.proto, table
        self._functions = {(function.domain, function.name) for function in model.proto.functions}
        self._types = _types_of(model.proto)
        self._found: dict[tuple[str, str, str], list[str]] = {}
        self._operators: dict[str, OperatorGroup] = {}

    def run(self) -> TargetReport:
        self._check_opset()
        self._check_inputs()
        for graph in (self._proto.graph, *self._proto.functions):
            for node in every_node(graph):
                self._check_node(node)
        obstructions = tuple(Obstruction(*key, tuple(places)) for key, places in self._found.items())
        return TargetReport(self._table.title, obstructions, tuple(self._remarks()))

    def _check_opset(self) -> None:
        opset = max((entry.version for entry in self._proto.opset_import if entry.domain in ONNX_DOMAINS), default=0)
        low, high = self._table.opsets
        if not low <= opset <= high:
            to = high if opset > high else low
            self._add(
                f"opset {opset}",
                f"the target takes {low} to {high}",
                f"put {{convert-opset: {{to: {to}}}}} into the recipe",
                "the model",
            )

    def _check_inputs(self) -> None:
        if self._table.dynamic_shapes:
            return
        stored = {tensor.name for tensor in self._proto.graph.initializer}
        for info in self._proto.graph.input:
            dims = info.type.tensor_type.shape.dim
            if info.name not in stored and any(not dim.HasField("dim_value") for dim in dims):
                self._add(
                    "inputs",
                    "sizes are not fixed",
                    "call `onnxline fix-shapes`, or give model.inputs.NAME.shape of a torch model numbers",
                    info.name,
                )

    def _check_node(self, node: NodeProto) -> None:
        operator = node.op_type if node.domain in ONNX_DOMAINS else f"{node.domain}::{node.op_type}"
        group = self._table.group_of(operator)
        if (node.domain, node.op_type) in self._functions:
            self._add(operator, "it is a local function", "put onnxscript first in the recipe, which inlines it", node)
        elif group is None:
            self._add(operator, "the target does not have this operator", _advice_on(node), node)
        else:
            self._operators[operator] = group
            self._check_dtypes(node, operator, group)
            self._check_ranks(node, operator)

    def _check_dtypes(self, node: NodeProto, operator: str, group: OperatorGroup) -> None:
        names = [name for name in (*node.input, *node.output) if name in self._types]
        found = dict.fromkeys(_dtype_name(self._types[name][0]) for name in names)
        refused = [dtype for dtype in found if self._table.dtypes and dtype not in self._table.dtypes]
        data = node.input[DATA_INPUT.get(node.op_type, 0)] if node.input else node.output[0]
        if group.dtypes and node.op_type not in SHAPED and data in self._types:
            dtype = _dtype_name(self._types[data][0])
            refused += [dtype] if dtype not in group.dtypes and dtype not in refused else []
        for dtype in refused:
            self._add(f"{operator} of {dtype}", "the target does not take this dtype there", CAST, node)

    def _check_ranks(self, node: NodeProto, operator: str) -> None:
        greatest = self._table.rank_of(operator)
        ranks = [self._types[name][1] for name in (*node.input, *node.output) if name in self._types]
        rank = max((rank for rank in ranks if rank is not None), default=0)
        if greatest is not None and rank > greatest:
            self._add(f"{operator} of rank {rank}", f"the target takes {greatest} dims at most", RANK, node)

    def _add(self, what: str, reason: str, advice: str, where: NodeProto | str) -> None:
        place = where if isinstance(where, str) else where.name or next(iter(where.output), where.op_type)
        self._found.setdefault((what, reason, advice), []).append(place)

    def _remarks(self) -> Iterator[str]:
        for operator, group in self._operators.items():
            if group.by:
                yield f"{operator}: by {group.by}"
            if restriction := self._table.restrictions.get(operator):
                yield f"{operator}: its source asks for more, which is not checked: {restriction}"


def _types_of(proto: onnx.ModelProto) -> dict[str, tuple[int, int | None]]:
    """Tensor → its dtype and rank, where these are known; the rank of a value without a shape is None."""
    try:
        graph = infer_shapes(proto).graph
    except InferenceError:  # types behind an operator whose shape function fails stay unknown
        graph = proto.graph
    found: dict[str, tuple[int, int | None]] = {}
    for info in (*graph.input, *graph.value_info, *graph.output):
        kind = info.type.tensor_type
        if kind.elem_type:
            found[info.name] = (kind.elem_type, len(kind.shape.dim) if kind.HasField("shape") else None)
    found.update((tensor.name, (tensor.data_type, len(tensor.dims))) for tensor in graph.initializer)
    return found


def _advice_on(node: NodeProto) -> str:
    """What makes an operator go away: a step of ours, leaving out the pass that wrote it, or a change of the model."""
    if is_attention(node):
        return "put decompose-attention into the recipe"
    author = annotations_of(node).author
    if author:
        return f"skip {author}, the pass that writes it"
    if node.domain in ONNX_DOMAINS and node.op_type in MENDS:
        return MENDS[node.op_type]
    if node.domain in ONNX_DOMAINS and node.op_type in BY_OPERATOR:
        return BY_OPERATOR[node.op_type].advice
    if node.domain not in ONNX_DOMAINS:
        return "skip what writes it (`onnxline passes --group fusions`)"
    return "no pass of onnxline replaces it: compute it elsewhere, or by other operators in the model"


def _dtype_name(dtype: int) -> str:
    """The name of a dtype as the tables have it."""
    name = TensorProto.DataType.Name(dtype).lower()
    return {"float": "float32", "double": "float64"}.get(name, name)


CAST: Final = "cast in front of it, or export the model in another dtype"

RANK: Final = "no pass of onnxline lowers ranks: join dims in the model"

DATA_INPUT: Final[Mapping[str, int]] = {"Where": 1}
"""Op → the input that has the data, where it is not the first."""

SHAPED: Final = frozenset({"ConstantOfShape", "EyeLike", "Shape", "Size"})
"""Ops whose first input is a shape, or of which only the shape counts."""

FOLD: Final = "put fold_constants into the recipe, and fix the sizes that it depends on"

MENDS: Final[Mapping[str, str]] = {
    "CastLike": "put onnxscript first in the recipe, which writes Cast",
    "Dropout": "put the default recipe in front, which removes it",
    "Erf": "put {convert-opset: {to: 20}} and onnxsim into the recipe, whose fuse_gelu makes Gelu of it",
    "EyeLike": FOLD,
    "Identity": "put the default recipe in front, which removes it",
    "Range": FOLD,
    "Size": FOLD,
    "Trilu": FOLD,
}
"""Op → the steps of ours after which it is gone in most models."""
