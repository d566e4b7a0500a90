"""What a target cannot run of a model: the nodes, why, where they come from in torch, and the steps that help.

`onnxline check MODEL --target NAME` prints it; `--fix` writes the steps as a recipe, once they were run and proven.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Final, Literal

import onnx
import yaml
from onnx import NodeProto, TensorProto

from passes.encodings.encoding import Precision
from passes.graph.index import constant_of, initializers_of
from passes.graph.inference import infer_types
from passes.graph.op_facts import ONNX_DOMAINS, op_name, opset_of
from passes.graph.traversal import every_node
from passes.portability import BY_OPERATOR
from passes.provenance.annotations import annotations_of, known_as, module_path_of
from passes.rewrites.attention_operators import is_attention
from passes.weights.detached import DetachedModel
from pipeline.errors import CheckFailed, UsageError
from pipeline.quantsim.placement import Placement
from pipeline.quantsim.profiles import OperatorGroup, TargetTable

Kind = Literal["opset", "inputs", "function", "operator", "dtype", "rank"]


@dataclass(frozen=True, slots=True)
class Obstruction:
    """Nodes that a target does not take for one reason; `places` are their names, or those of inputs.

    `steps` are items of a recipe that mend it, and `origins` the torch modules of the nodes, with their lines.
    """

    what: str
    reason: str
    advice: str
    places: tuple[str, ...]
    steps: tuple[Any, ...] = ()
    origins: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.what}: {self.reason}; {self.advice}; it is at {', '.join(self.places)}"


@dataclass(frozen=True, slots=True)
class TargetReport:
    """What the target does not take. `remarks` are conditions on operators that it takes, which are not checked."""

    title: str
    obstructions: tuple[Obstruction, ...]
    remarks: tuple[str, ...]


def refuse_formats(placement: Placement, table: TargetTable, source: str = "") -> None:
    """Whether the target runs the formats that weights and activations are to have, by the option `source` or else by
    rules. Biases are not asked.

    Raises:
        UsageError: it lacks one.
    """
    for placed in placement.quantized_sites():
        site, precision, is_weight = placed.site, placed.precision, placed.site.role == "weight"
        if site.role != "bias" and isinstance(precision, Precision) and not table.runs(precision, is_weight=is_weight):
            other = "take the profile weight-only" if is_weight else "leave it in float"
            raise UsageError(
                f"{source or placement.names.rules}: {site.tensor} is to be {precision}, which {table.title} does not "
                f"dequantize; give it another format, or {other}"
            )


def describe_obstructions(
    model: DetachedModel, name: str, table: TargetTable | None, *, refuse: bool
) -> tuple[str, ...]:
    """A sentence for each thing that a target does not take.

    Args:
        model: in float.
        name: of the profile, which the sentences begin with.
        table: of the target; None has no sentences.
        refuse: whether a single one is too many.

    Raises:
        CheckFailed: there is one, and `refuse` is set.
    """
    found = check_target(model, table).obstructions if table is not None else ()
    if found and refuse:
        listing = "".join(f"\n  {obstruction}" for obstruction in found)
        raise CheckFailed(f"{name} does not take the model (quantsim.unsupported: refuse):{listing}")
    return tuple(f"{name}: {obstruction}" for obstruction in found)


def check_target(model: DetachedModel, table: TargetTable) -> TargetReport:
    """Hold the opset, the inputs and every node of `model`, also in bodies and functions, against the table."""
    return check_targets(model, [table])[0]


def check_targets(model: DetachedModel, tables: Sequence[TargetTable]) -> list[TargetReport]:
    """`check_target` for several tables, of which types are inferred once."""
    types = _types_of(model.proto)
    return [_TargetCheck(model, table, types).run() for table in tables]


class _TargetCheck:
    """Collects obstructions by their reason, so that one sentence names all nodes of each."""

    def __init__(self, model: DetachedModel, table: TargetTable, types: TensorTypes) -> None:
        self._proto, self._table = model.proto, table
        self._functions = {(function.domain, function.name) for function in model.proto.functions}
        self._types = types
        self._found: dict[tuple[str, str, str], list[str]] = {}
        self._steps: dict[tuple[str, str, str], tuple[Any, ...]] = {}
        self._origins: dict[tuple[str, str, str], dict[str, None]] = {}
        self._operators: dict[str, OperatorGroup] = {}

    def run(self) -> TargetReport:
        self._check_opset()
        self._check_inputs()
        for graph in (self._proto.graph, *self._proto.functions):
            for node in every_node(graph):
                self._check_node(node)
        obstructions = tuple(
            Obstruction(*key, tuple(places), self._steps[key], tuple(self._origins[key]))
            for key, places in self._found.items()
        )
        return TargetReport(self._table.title, obstructions, tuple(self._remarks()))

    def _check_opset(self) -> None:
        opset = opset_of(self._proto)
        low, high = self._table.opsets
        if not low <= opset <= high:
            to = high if opset > high else low
            self._add(
                f"opset {opset}",
                f"the target takes {low} to {high}",
                f"put {{convert-opset: {{to: {to}}}}} into the recipe",
                "the model",
                ({"convert-opset": {"to": to}},),
            )

    def _check_inputs(self) -> None:
        if self._table.dynamic_shapes:
            return
        stored = initializers_of(self._proto.graph)
        for info in self._proto.graph.input:
            dims = info.type.tensor_type.shape.dim
            if info.name not in stored and any(not dim.HasField("dim_value") for dim in dims):
                self._add(
                    "inputs",
                    "sizes are not fixed",
                    "call `onnxline fix-shapes`, or export the model with numbers as their shape",
                    info.name,
                )

    def _check_node(self, node: NodeProto) -> None:
        by_call = node.op_type == "Constant" and any(attribute.ref_attr_name for attribute in node.attribute)
        if by_call or constant_of(node) is not None:
            return  # runtimes store what it holds, as they do an initializer
        operator = op_name(node)
        group = self._table.group_of(operator)
        if (node.domain, node.op_type) in self._functions:
            self._add(
                operator,
                "it is a local function",
                "put onnxscript first in the recipe, which inlines it",
                node,
                ("onnxscript",),
            )
        elif group is None:
            steps = tuple(
                step
                for step, operators, written in MENDING
                if _is_mended(node, operators) and (not written or self._table.group_of(written) is not None)
            )
            self._add(operator, UNKNOWN, _advice_on(node, steps), node, steps)
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
            steps = ("no-int64",) if dtype == "int64" and "int32" in (self._table.dtypes or ("int32",)) else ()
            advice = "put no-int64 into the recipe" if steps else CAST
            self._add(f"{operator} of {dtype}", "the target does not take this dtype there", advice, node, steps)

    def _check_ranks(self, node: NodeProto, operator: str) -> None:
        greatest = self._table.rank_of(operator)
        ranks = [self._types[name][1] for name in (*node.input, *node.output) if name in self._types]
        rank = max((rank for rank in ranks if rank is not None), default=0)
        if greatest is not None and rank > greatest:
            reason = f"the target takes {greatest} dims at most"
            self._add(f"{operator} of rank {rank}", reason, RANK, node, ("to-4d",))

    def _add(self, what: str, reason: str, advice: str, where: NodeProto | str, steps: tuple[Any, ...] = ()) -> None:
        key = what, reason, advice
        place = where if isinstance(where, str) else place_of(where)
        self._found.setdefault(key, []).append(place)
        self._steps[key] = steps
        origins = self._origins.setdefault(key, {})
        if not isinstance(where, str) and (origin := origin_of(where)):
            origins[origin] = None

    def _remarks(self) -> Iterator[str]:
        for operator, group in self._operators.items():
            if group.by:
                yield f"{operator}: by {group.by}"
            if restriction := self._table.restrictions.get(operator):
                yield f"{operator}: its source asks for more, which is not checked: {restriction}"


TensorTypes = Mapping[str, tuple[int, int | None]]
"""Tensor → its dtype and rank, where these are known; the rank of a value without a shape is None."""


def _types_of(proto: onnx.ModelProto) -> TensorTypes:
    graph = infer_types(proto)
    found: dict[str, tuple[int, int | None]] = {}
    for info in (*graph.input, *graph.value_info, *graph.output):
        kind = info.type.tensor_type
        if kind.elem_type:
            found[info.name] = (kind.elem_type, len(kind.shape.dim) if kind.HasField("shape") else None)
    found.update((tensor.name, (tensor.data_type, len(tensor.dims))) for tensor in graph.initializer)
    return found


def place_of(node: NodeProto) -> str:
    """The name by which an obstruction names a node."""
    return known_as(node) or node.op_type


def origin_of(node: NodeProto) -> str:
    """The innermost torch module of a node, and the line of its forward: `encoder.layer.0 (modeling_vit.py:182)`; empty
    where the exporter wrote nothing."""
    place = module_path_of(node)
    if place is None:
        return ""
    module = next((path for path in reversed(place.paths) if path), "")
    lines = [match for frame in place.frames if (match := FRAME.search(frame)) and "/torch/" not in match["file"]]
    line = f"({PurePath(lines[-1]['file']).name}:{lines[-1]['line']})" if lines else ""
    return " ".join(filter(None, (module, line)))


FRAME: Final = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


def _is_mended(node: NodeProto, operators: Collection[str]) -> bool:
    return is_attention(node) if operators is ATTENTION else op_name(node) in operators


def _advice_on(node: NodeProto, steps: Sequence[Any]) -> str:
    """What makes an operator go away: a step of ours, leaving out the pass that wrote it, or a change of the model."""
    if is_attention(node):
        return "put decompose-attention into the recipe"
    author = annotations_of(node).author
    if author and node.op_type in COPYING.get(author, (node.op_type,)):
        return f"skip {author}, the pass that writes it"
    if node.domain in ONNX_DOMAINS and node.op_type in MENDS:
        return MENDS[node.op_type]
    if steps:
        step = steps[0] if isinstance(steps[0], str) else yaml.safe_dump(steps[0], default_flow_style=True).strip()
        return f"put {step} into the recipe (--fix writes it)"
    if node.domain in ONNX_DOMAINS and node.op_type in BY_OPERATOR:
        return BY_OPERATOR[node.op_type].advice
    if node.domain not in ONNX_DOMAINS:
        return "skip what writes it (`onnxline passes --group fusions`)"
    return "no pass of onnxline replaces it: compute it elsewhere, or by other operators in the model"


def _dtype_name(dtype: int) -> str:
    """The name of a dtype as the tables have it."""
    name = TensorProto.DataType.Name(dtype).lower()
    return {"float": "float32", "double": "float64"}.get(name, name)


UNKNOWN: Final = "the target does not have this operator"
"""The reason of an operator that is not in the table."""

CAST: Final = "cast before it, or export the model in another dtype"

RANK: Final = "put to-4d into the recipe, which writes fixed sizes with four dims"

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

ATTENTION: Final = ("Attention",)
"""Stands for every operator of attention, of ONNX and of onnxruntime."""

FOLDED: Final = ("EyeLike", "Range", "Size", "Trilu", "ConstantOfShape", "Tile", "OneHot")

MENDING: Final[tuple[tuple[Any, Collection[str], str], ...]] = (
    ("onnxscript", ("CastLike", "SequenceConstruct", "SequenceAt", "SplitToSequence", "ConcatFromSequence"), ""),
    ("decompose-attention", ATTENTION, "Softmax"),
    ("default", ("Dropout", "Identity"), ""),
    ("fold_constants", FOLDED, ""),
    ("drop-softmax-guard", ("IsNaN",), ""),
    ("fold-shape", ("Shape", "Size", "ConstantOfShape", "Range"), ""),
    ("canonical-gelu", ("Erf",), "Gelu"),
    ("canonical-norm", ("Reciprocal",), "Div"),
    ("canonical-rope", ("Neg",), "Split"),
    ("merge-layout", ("Expand",), ""),
    ({"canonical-norm": {"form": "parts"}}, ("LayerNormalization", "RMSNormalization", "GroupNormalization"), "Sqrt"),
    ({"canonical-gelu": {"form": "parts"}}, ("Gelu",), "Erf"),
    ("replace_einsum_with_matmul", ("Einsum",), "MatMul"),
    ("to-4d", (), ""),
)
"""Steps in the order of a recipe, each with the operators that it takes away in most models, and the operator that it
writes, which the target has to take."""


COPYING: Final[Mapping[str, Collection[str]]] = {
    "merge-layout": ("Transpose", "Reshape", "Expand", "Gemm"),
    "to-4d": ("Transpose", "Reshape", "MatMul", "Add"),
    "to-nhwc": ("Transpose",),
    "mha-to-sha": ("Split", "Concat"),
}
"""Steps that write operators of the model in another place, and the operators that they write of their own: without the
step, any other operator is there too."""


def fix_recipe(found: Sequence[Obstruction]) -> list[Any]:
    """The items of a recipe that mend what was `found`, in the order in which they run; the opset comes last."""
    wanted = [step for obstruction in found for step in obstruction.steps]
    order = [step for step, _, _ in MENDING]
    placed = [step for step in order if step in wanted]
    others = [step for step in wanted if step not in order]
    return [*placed, *(step for at, step in enumerate(others) if step not in others[:at])]
