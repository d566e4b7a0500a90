"""Targets and profiles: what a target takes, and the rules that come before those of the configuration.

What a target takes, and how it is quantized, stands in one table for each: targets/NAME.yaml, with its sources. A table
may extend another one, and then says what differs. `onnxline check MODEL --target NAME` names what the target cannot
run of a model, with the step that helps. The rules of a profile are those of a table, or of a file of AIMET.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import onnx
import yaml
from onnx import NodeProto, TensorProto
from pydantic import BeforeValidator, Field, StrictBool, StrictInt, StrictStr

from passes.graph.inference import InferenceError, infer_shapes
from passes.graph.op_facts import ONNX_DOMAINS
from passes.graph.traversal import every_node
from passes.portability import BY_OPERATOR
from passes.provenance.annotations import annotations_of
from passes.rewrites.attention_operators import is_attention
from passes.suggest import nearest
from passes.weights.detached import DetachedModel
from pipeline.config import AimetProfile, FormatsConfig, QuantSimConfig
from pipeline.config.paths import AIMET_CONFIGS, locate
from pipeline.config.quantsim import FLOAT, Precision
from pipeline.config.sections import Section
from pipeline.errors import SourceError, UsageError
from pipeline.quantsim.aimet_config import AimetConfig, read_aimet_config
from pipeline.quantsim.conventions import apply_conventions
from pipeline.quantsim.placement import PlacementRule
from pipeline.quantsim.sites import Site, find_sites
from pipeline.quantsim.tool_rules import follow_quantize_static, follow_tensorrt


def _split(value: object) -> object:
    return value.split() if isinstance(value, str) else value


Words = Annotated[tuple[StrictStr, ...], BeforeValidator(_split)]


class OperatorGroup(Section):
    """Operators that a target takes alike; `domain::Name` outside of ONNX's own domain.

    dtypes: of the data that they read; none where a source does not say it.
    by: by which of several ways alone the target takes them; empty for all.
    """

    names: Words
    dtypes: Words = ()
    by: StrictStr = ""


class TargetPlacement(Section):
    """How a target quantizes: rules as a configuration has them, or the conventions of AIMET with numbers of bits.

    tool: the tool of the target whose choice of tensors is followed; all others stay in float.
    float_biases: whether biases stay in float.
    """

    rules: dict[StrictStr, FormatsConfig] = Field(default_factory=dict)
    conventions: AimetConfig | None = None
    weight_bits: StrictInt = 8
    activation_bits: StrictInt = 16
    tool: Literal["quantize_static", "tensorrt"] | None = None
    float_biases: StrictBool = False


class TargetSources(Section):
    """Where each part of a table comes from; "none" where no source was had."""

    operators: StrictStr
    opsets: StrictStr
    dtypes: StrictStr
    ranks: StrictStr
    dynamic_shapes: StrictStr
    placement: StrictStr


class TargetTable(Section):
    """One table.

    operators: those that are taken; every one where none are listed.
    ranks: operator → its greatest rank, where that is not `max_rank`.
    restrictions: operator → what a model has to see to besides it, which is named and not checked.
    """

    title: StrictStr
    sources: TargetSources
    opsets: tuple[StrictInt, StrictInt]
    dynamic_shapes: StrictBool
    max_rank: StrictInt | None = None
    dtypes: Words = ()
    operators: tuple[OperatorGroup, ...] = ()
    ranks: dict[StrictStr, StrictInt] = Field(default_factory=dict)
    restrictions: dict[StrictStr, StrictStr] = Field(default_factory=dict)
    placement: TargetPlacement

    def group_of(self, operator: str) -> OperatorGroup | None:
        """What is said of an operator; None for one that the target does not take."""
        if not self.operators:
            return OperatorGroup(names=(operator,))
        return next((group for group in self.operators if operator in group.names), None)

    def rank_of(self, operator: str) -> int | None:
        return self.ranks.get(operator, self.max_rank)


def load_target(name: str) -> TargetTable:
    """The table of a target.

    Raises:
        UsageError: there is none of that name; the message has the nearest.
    """
    if name not in TARGETS:
        raise UsageError(f"no target named {name!r}{nearest(name, TARGETS)}; expected one of {', '.join(TARGETS)}")
    return _read_table(name)


@cache
def _read_table(name: str) -> TargetTable:
    return TargetTable.model_validate(_read_data(name))


def _read_data(name: str) -> dict[str, Any]:
    """The table as it is written, on top of the table that it extends, if any: entry by entry of its sections."""
    data: dict[str, Any] = yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    base = data.pop("extends", None)
    if base is None:
        return data
    known = _read_data(base)
    sections = {key: {**known[key], **value} for key, value in data.items() if isinstance(value, dict)}
    return {**known, **data, **sections}


FOLDER: Final = Path(__file__).parent / "targets"

TARGETS: Final = tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))
"""The names of all targets."""


@dataclass(frozen=True, slots=True)
class Profile:
    """A profile as it was asked for. `name` is that of its target, or of the file; `target` may be unknown."""

    name: str
    placement: TargetPlacement
    target: TargetTable | None

    def rules(
        self, model: DetachedModel, given: Collection[str] = ()
    ) -> tuple[tuple[PlacementRule, ...], tuple[str, ...]]:
        """The rules for a model, and sentences on what the profile says and onnxline does otherwise.

        Args:
            given: the tensors that a file has encodings of; that the target's tool would not round them says nothing.
        """
        placement, sites = self.placement, find_sites(model)
        rules = [
            PlacementRule(selector, formats.weight_format(), formats.activation_format())
            for selector, formats in placement.rules.items()
        ]
        notes: tuple[str, ...] = ()
        if placement.conventions is not None:
            found = apply_conventions(
                placement.conventions, placement.weight_bits, placement.activation_bits, model, sites
            )
            rules += found.rules
            notes = found.notes
        if placement.tool is not None:
            chosen = TOOLS[placement.tool](model, sites)
            rules += (replace(rule, tensors=(rule.tensors or frozenset()).difference(given)) for rule in chosen)
        if placement.float_biases:
            rules += _keep_biases(sites, self.name)
        return tuple(rules), tuple(f"quantsim: {self.name}: {note}" for note in notes)


TOOLS: Final = {"quantize_static": follow_quantize_static, "tensorrt": follow_tensorrt}


def read_profile(config: QuantSimConfig) -> Profile:
    """The profile that a configuration names.

    Raises:
        ConfigError: it is a file that AIMET's configurations do not look like.
        SourceError: there is no such file.
    """
    profile = config.profile
    if isinstance(profile, AimetProfile):
        path = _locate_config(profile.aimet_config)
        placement = TargetPlacement(
            conventions=read_aimet_config(path),
            weight_bits=profile.weight_bits,
            activation_bits=profile.activation_bits,
        )
        return Profile(path.name, placement, load_target(profile.target) if profile.target else None)
    target = load_target(profile)
    return Profile(profile, target.placement, target)


def _locate_config(text: str) -> Path:
    """The file of a configuration of AIMET; where it is missing, the message has AIMET's own names too."""
    try:
        return locate(text)
    except SourceError as error:
        error.add_note(
            f"AIMET's own configurations are named {', '.join(AIMET_CONFIGS)}{nearest(Path(text).name, AIMET_CONFIGS)}"
        )
        raise


def rules_of(config: QuantSimConfig, model: DetachedModel) -> tuple[PlacementRule, ...]:
    """The rules of the profile for a model, and then those of the configuration."""
    return (*read_profile(config).rules(model)[0], *own_rules(config))


def own_rules(config: QuantSimConfig) -> tuple[PlacementRule, ...]:
    """The rules of the configuration itself."""
    return tuple(
        PlacementRule(name, formats.weight_format(), formats.activation_format())
        for name, formats in config.rules.items()
    )


def formats_of(config: QuantSimConfig) -> list[Precision]:
    """The formats that the profile and the rules of a configuration can give to a tensor, before a model is known.

    A rule for every operator replaces the formats of the rules before it.
    """
    placement = read_profile(config).placement
    weights, activations = [Precision(8, signed=True, symmetric=True)], [Precision(8, signed=False, symmetric=False)]
    if placement.conventions is not None:
        weights = [Precision(placement.weight_bits, signed=True, symmetric=True, granularity="channel")]
        activations = [Precision(placement.activation_bits, signed=False, symmetric=False)]
    for selector, rule in (*placement.rules.items(), *config.rules.items()):
        for formats, precision in ((weights, rule.weight_format()), (activations, rule.activation_format())):
            if precision is not None and selector == "op:*":
                formats.clear()
            if isinstance(precision, Precision):
                formats.append(precision)
    return weights + activations


def _keep_biases(sites: Sequence[Site], name: str) -> Iterator[PlacementRule]:
    biases = frozenset(site.tensor for site in sites if site.role == "bias")
    if biases:
        yield PlacementRule(BIASES, FLOAT, FLOAT, biases, reason=f"{name} takes biases in float alone")


BIASES: Final = "biases"
"""What the report calls the rule of biases."""


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
    except InferenceError:  # types after an operator whose shape function fails stay unknown
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


CAST: Final = "cast before it, or export the model in another dtype"

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
