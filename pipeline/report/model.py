"""The run as data: `report.json`, what each stage found, and `Pictures`, what `report.html` shows of the models.

docs/reference/report.md explains the fields of `report.json`. A training is a part of it; what a quantization
simulation found is saved apart, for the page.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import PlainSerializer, TypeAdapter

from passes.diff import LayerErrors
from passes.proof.coverage import Coverage
from passes.proof.numbers import Errors
from passes.proof.prover import Sensitivity
from passes.provenance.annotations import NameMap
from passes.run.result import PassRow, StructureVerdict
from passes.suggest import plural
from passes.visible import visible_json
from pipeline.events import Phase
from pipeline.report.chain import ChainReport, ImageReport, ValuesReport


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step that was done: its number from 1, its loss before the update, and the seconds of training until then."""

    step: int
    loss: float
    """The loss before the update."""
    seconds: float
    """Seconds of training until the end of the step."""


@dataclass(frozen=True, slots=True)
class TrainingReport:
    """`last_loss` is the mean of the last 50 steps, None where none was done; `metrics` are of `train.evaluate`."""

    steps: int
    last_loss: float | None
    loss: str
    optimizer: str
    parameters: int
    """Count of trained elements: the sizes of all trained tensors, added."""
    ops: int
    """Of the Graph of a step: forward, backward and update."""
    phases: tuple[Phase, ...]
    losses: tuple[StepRecord, ...]
    metrics: Mapping[str, float] = field(default_factory=dict)
    onnx: str = ""
    """What the main job made of the trained model; empty where it was not asked to."""


class _Ratios:
    """Data with ratios that may be infinite, which plain JSON does not have."""

    __slots__ = ()
    __pydantic_config__: ClassVar[dict[str, str]] = {"ser_json_inf_nan": "strings"}


@dataclass(frozen=True, slots=True)
class QuantizedTensor(_Ratios):
    """A computed tensor, in graph order. `part` names the structure and the role in it, such as `qkv layer.0 q`; ratios
    are of signal to noise in dB, infinite where nothing differs."""

    tensor: str
    op: str
    module: str
    part: str
    precision: str
    local_db: float
    total_db: float


@dataclass(frozen=True, slots=True)
class QuantizedLayer(_Ratios):
    """A layer, known by its output: the ratio in the model's outputs if it alone is quantized, and its share of what
    all layers alone add to their noise. Worst first."""

    layer: str
    op: str
    module: str
    part: str
    sqnr_db: float
    share: float


@dataclass(frozen=True, slots=True)
class QuantizedStructure(_Ratios):
    """A structure with a result of its own, such as an attention or a GELU: the ratio of its worst step alone, and that
    of its result in the quantized model. Worst result first."""

    kind: str
    name: str
    result: str
    worst: str
    """The tensor that its worst step makes."""
    local_db: float
    total_db: float


@dataclass(frozen=True, slots=True)
class QuantizedOutput(_Ratios):
    """An output by the specification of the operators, and as onnxruntime runs it with all optimizations."""

    name: str
    sqnr_db: float
    max_abs: float
    device_db: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationFindings:
    """What quantsim.json and the page have alike. `layers` by what they do to the outputs.

    not_estimated: why there are no layers. not_measured: why there is no noise at all, only placement and sizes; empty
    where there is.
    """

    rows: tuple[QuantizedTensor, ...]
    structures: tuple[QuantizedStructure, ...] = ()
    layers: tuple[QuantizedLayer, ...]
    not_estimated: str = ""
    weight_bytes: int
    quantized_weight_bytes: int
    tensors: int
    quantized_tensors: int
    not_measured: str = ""
    notes: tuple[str, ...] = ()
    """Where a format is coarser than its rule says, and why; each bias that its format does not hold; steps of the
    preparation that did not stand, and backends that fell short."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization(QuantizationFindings):
    """What the page shows; `rows` are in graph order, and `notes` begin with those on the metric and on steps."""

    outputs: tuple[QuantizedOutput, ...]
    left_in_float: Mapping[str, int]
    """Reason → how many tensors."""
    suggestion: str = ""
    """A sentence, and rules in YAML on the lines after it; empty where none was asked for."""


REPORT_VERSION: Final = 1

DIFFS: Final = "passes"
"""The folder of the diffs of a run."""

SOURCE: Final = -1
"""The `row` of the mark before all passes."""


class BoxKind(StrEnum):
    NODE = "node"
    INPUT = "input"
    """A value from outside of the drawing."""
    OUTPUT = "output"
    """The consumers of a value outside of the drawing."""


@dataclass(frozen=True, slots=True)
class Box:
    """One thing in a drawing. `op` and `detail` are its two lines: an operator, and the shapes of its weights
    (`768×768`) or else of its result."""

    kind: BoxKind
    op: str
    detail: str = ""
    role: str = ""
    """Of the kept weight that the node reads: Q, K or V, say."""
    made_by: str = ""
    """The pass that made the node; empty for one of the source."""
    name: str = ""
    """Of the node, or of the value."""


@dataclass(frozen=True, slots=True)
class Wire:
    """A value between two boxes, by their indices in the drawing; `shape` is `1×197×768`, or empty if not known."""

    start: int
    end: int
    shape: str = ""


@dataclass(frozen=True, slots=True)
class Drawing:
    """A part of a graph, in graph order. `omitted` counts nodes that were too many to draw."""

    boxes: tuple[Box, ...]
    wires: tuple[Wire, ...]
    omitted: int = 0


@dataclass(frozen=True, slots=True)
class StructurePicture:
    """An instance of a structure: in the source, in the final model, and in the result of the pass that broke it.

    `broken_by` is that pass, which was reverted.
    """

    kind: str
    name: str
    before: Drawing
    after: Drawing | None
    """None if nothing in the final model corresponds to it."""
    broken: Drawing | None = None
    broken_by: str = ""


@dataclass(frozen=True, slots=True)
class NodeRow:
    """A node of the final model. `module` is None where there is no torch metadata; `made_by` is empty for a node of
    the source. `shapes` are those of `outputs`."""

    name: str
    op: str
    shapes: tuple[str, ...]
    module: str | None
    made_by: str
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Pictures:
    structures: tuple[StructurePicture, ...] = ()
    nodes: tuple[NodeRow, ...] = ()
    values: Mapping[str, str] = field(default_factory=dict)
    """dtype and shape of the values that nodes read and none computes: inputs, weights, constants."""
    view: str = ""
    """What the graph viewer draws of the source and the final model: JSON, packed by zlib and base64."""


@dataclass(frozen=True, slots=True)
class ExportReport:
    """The exported model against the reference, before any pass. `origin` is torch or onnx."""

    origin: str
    opset: int
    nodes: int
    weight_bytes: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    draws: tuple[str, ...]
    parameters: Annotated[frozenset[str], PlainSerializer(sorted)]
    """Element types and digests of the initializers that are an `nn.Parameter`, as they are and transposed."""
    errors: Mapping[str, Errors]
    notes: tuple[str, ...] = ()
    files: tuple[tuple[str, int, int], ...] = ()
    computed_in: tuple[str, ...] = ()
    """The floating types that the torch module computes in; empty for an ONNX source, whose file says it."""
    limits: tuple[str, ...] = ()
    """Sentences on open dims for which the export is valid at some sizes only."""
    not_drawn: tuple[str, ...] = ()
    """Sizes, not asked for by the user, at which the export is not valid, with the reasons."""
    random: tuple[str, ...] = ()
    """Outputs that depend on random values: of these only shape and dtype are compared."""
    weights: str = ""
    """Where the weights of a torch module come from: `random, seed 0`; empty for an ONNX source."""
    lifted: tuple[str, ...] = ()
    """Sentences on the inputs and outputs for buffers and inputs that forward writes to."""

    @property
    def not_covered(self) -> tuple[str, ...]:
        """Sentences on what the comparisons of the run do not cover."""
        return (*self.limits, *self.not_drawn, *self.not_compared)

    @property
    def not_compared(self) -> tuple[str, ...]:
        """A sentence on random outputs, if there are any."""
        shown = ", ".join(map(repr, self.random))
        said = f"not compared with the reference: {shown} (random values; shape and dtype are compared)"
        return (said,) if shown else ()


@dataclass(frozen=True, slots=True)
class Mark:
    """Identifies a model after a row of `passes`, or before all of them (`row` -1), also on another machine.

    `nbytes` are those of its initializers; `ops` are counts by operator.
    """

    row: int
    fingerprint: str
    nbytes: int
    ops: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class PassesReport:
    passes: tuple[PassRow, ...]
    structures: tuple[StructureVerdict, ...]
    sensitivity: Sensitivity
    nodes: int
    files: tuple[tuple[str, int, int], ...] = ()
    """Name, size and time of the written files, by which the next run sees whether they are unchanged."""
    marks: tuple[Mark, ...] = ()
    """Of the source, and of each row that changed the model, accepted or not."""
    pictures: Pictures = field(default_factory=Pictures)
    """For `report.html`; `report.json` does not hold them."""
    not_compared: str = ""
    """Why no values were compared; empty where they were."""
    coverage: Coverage = field(default_factory=Coverage)
    layers: tuple[LayerErrors, ...] = ()
    """The final model against the export, on the first draw, where a layer ends."""
    names: NameMap = field(default_factory=NameMap)


@dataclass(frozen=True, slots=True)
class BackendReport:
    """`errors` are the worst over the draws that ran; `seconds` the median of some runs at the sizes of the first of
    these, after a warm-up.

    A default backend that nobody named is no error. It is `unsupported` where it refuses the model or a draw,
    `failed` where it fails at one, and `differs` where it computes something else: `reason` says what, and
    `operators` are those that it lacks.
    """

    name: str
    errors: Mapping[str, Errors]
    seconds: float
    status: Literal["ran", "unsupported", "failed", "differs"] = "ran"
    reason: str = ""
    operators: tuple[str, ...] = ()
    fallbacks: tuple[str, ...] = ()
    """Operators that another runtime computed in its place, each as often as the model has it."""
    segments: int = 0
    """How many plans and steps between them the model ran in; 0 where one plan holds all of it."""
    native_calls: int = 0
    """How many calls were computed by kernels in C++, which this machine's compiler built."""

    @property
    def remark(self) -> str:
        """What was not one plan of our own kernels, in a few words; empty where nothing was."""
        counts = Counter(self.fallbacks)
        parts = [f"{count} × {kind}" for kind, count in sorted(counts.items())]
        remarks = [f"computed by another runtime: {', '.join(parts)}"] if parts else []
        if self.segments:
            remarks.append(f"run in {plural(self.segments, 'segment')}: some shapes or branches depend on the data")
        return "; ".join(remarks)

    @property
    def excuse(self) -> str:
        """Why a difference from the reference is rounding of both; empty where nothing differs."""
        return self.reason if self.status == "ran" and not self.is_wrong else ""

    @property
    def shortfall(self) -> str:
        """What the backend does not run, or computes otherwise, in a few words; empty if it ran right."""
        if self.status == "ran":
            return ""
        return f"{self.status}: {', '.join(self.operators) or self.reason.splitlines()[0]}"

    @property
    def is_wrong(self) -> bool:
        """Whether it ran, and a result is wrong, which fails the run."""
        return self.status == "ran" and not all(errors.ok for errors in self.errors.values())


@dataclass(frozen=True, slots=True)
class RuntimeReport:
    backends: tuple[BackendReport, ...]
    ops: int = 0
    values: int = 0
    device: str = "cpu"
    """Where the plan runs, and has its arena."""
    arena_bytes: int = 0
    live_bytes: int = 0
    """Bytes of the values that are alive at once at most: no arena can be smaller."""
    aliases: int = 0
    files: tuple[tuple[str, int, int], ...] = ()
    packed_bytes: int = 0
    generic_calls: Mapping[str, int] = field(default_factory=dict)
    """Operators of torch that the plan calls by name, since no kernel kind stands for them, and how often."""


@dataclass(frozen=True, slots=True)
class Report:
    """The whole report. `failure` is empty when the run ended well; then `exit_code` is 0."""

    name: str
    exit_code: int
    failure: str
    export: ExportReport | None
    passes: tuple[PassRow, ...]
    structures: tuple[StructureVerdict, ...]
    sensitivity: Sensitivity | None
    runtime: RuntimeReport | None
    versions: Mapping[str, str]
    cached: tuple[str, ...]
    seconds: Mapping[str, float]
    files: tuple[str, ...]
    marks: tuple[Mark, ...] = ()
    not_compared: str = ""
    """Why no values were compared; empty where they were."""
    coverage: Coverage | None = None
    """What the draws have shown; None where the proof ran no model: by structure alone, or not at all."""
    notes: tuple[str, ...] = ()
    """Notes of the stages, also from the earlier run of a cached stage."""
    layers: tuple[LayerErrors, ...] = ()
    """The final model against the export, on the first draw, where a layer ends."""
    names: NameMap | None = None
    """Names of the export that are others in the final model; None where no passes ran."""
    training: TrainingReport | None = None
    """What `onnxline train` did; None in the report of a run."""
    parts: Mapping[str, Report] = field(default_factory=dict)
    """The reports of the parts by their names, of a run in parts; report.json of another run leaves this out."""
    chain: tuple[ChainReport | ImageReport | ValuesReport, ...] = ()
    """The chain of the parts, on each backend; left out as `parts` is."""
    format_version: int = field(default=REPORT_VERSION)


def diff_folder(index: int, row: PassRow) -> str:
    """The folder of the diff of the row with this index, relative to that of the run: `passes/30-fuse_qkv`."""
    return f"{DIFFS}/{index + 1:02}-{row.name.replace('/', '.')}"


ONLY_OF_PARTS: Final = {"parts", "chain"}
"""Fields that a run of one model does not have in its report.json."""


def report_json(report: Report) -> str:
    """The text of report.json."""
    left_out: Any = {"parts": {"__all__": ONLY_OF_PARTS}} if report.parts else ONLY_OF_PARTS
    return visible_json(TypeAdapter(Report).dump_json(report, indent=1, exclude=left_out).decode()) + "\n"
