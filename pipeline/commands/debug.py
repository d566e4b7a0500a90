"""`onnxline debug compare A B MODEL`: walks two backends over one model, and names the values in which they part."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import typer

from passes.custom_ops import declare_ops
from passes.errors import StepFailed
from passes.proof.numbers import TOLERANCES, Tolerance
from passes.suggest import ELLIPSIS, join_first, nearest, plural
from passes.visible import visible_line
from pipeline.commands.shared import FORMAT_VERSION, add_command, custom_ops_of, locate_parts, print_styled
from pipeline.errors import SourceError, Unsupported, UsageError
from pipeline.terminal import print_json, print_line
from pipeline.workspace import disk_errors

if TYPE_CHECKING:  # torch takes seconds to import, and a misspelt name does not need it
    import numpy as np

    from pipeline.config import RunConfig
    from pipeline.export.source import InputSpec
    from pipeline.ir import Graph
    from pipeline.verify.backends import RunnableModel
    from pipeline.verify.device_dump import DeviceDump
    from pipeline.verify.divergence import BackendComparison, Divergence, InputValue, ValueStatistics

DIFFERENT: Final = 1
"""Exit code when a value differs."""

MOST: Final = 20
"""Values that are written out by default."""

IR_ENDINGS: Final = (".json", ".json.zst")

STYLES: Final = {"no difference": "green", "  ": "", "": "bold"}
"""How a line begins → its style on a terminal."""


@dataclass(frozen=True, slots=True)
class DumpOptions:
    """How the files of a device are read; see `DeviceDump`."""

    encodings: Path | None = None
    layout: Literal["nchw", "nhwc"] | None = None
    integers: Literal["signed", "unsigned"] | None = None


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="Find out why a model computes something else than it should: where two backends part.")
    add_command(group, "debug compare", compare)
    app.add_typer(group, name="debug")


def compare(
    first: str,
    second: str,
    model: str,
    first_divergence: bool = False,
    inputs: Path | None = None,
    seed: int | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    weights: Path | None = None,
    out: Path | None = None,
    overrides: list[str] | None = None,
    most: int | None = None,
    step: int | None = None,
    encodings: Path | None = None,
    layout: Literal["nchw", "nhwc"] | None = None,
    integers: Literal["signed", "unsigned"] | None = None,
    part: str | None = None,
    as_json: bool = False,
) -> None:
    """Run MODEL on the backends A and B with the same inputs, and compare every value; exit code 1 if any differs.

    A or B may be a folder of tensors that a device has dumped for these inputs.

    An element may differ by atol + rtol × the scale of its tensor; both follow from the dtype where they are not given.
    """
    is_dumped = _check_backends(first, second)
    dump = DumpOptions(encodings, layout, integers)
    if not is_dumped and dump != DumpOptions():
        raise UsageError(
            "--encodings, --layout and --integers read a folder of dumped tensors; give one as A or B, or leave "
            "them out"
        )
    if step is not None:
        _compare_step({first, second}, model, overrides, step, _tolerances(rtol, atol), as_json=as_json)
        return
    if inputs is not None and seed is not None:
        raise UsageError("--inputs gives the values, so --seed has no effect; leave one of them out")
    if first_divergence and most is not None:
        raise UsageError("--first-divergence shows one value, so --most has no effect; leave one of them out")
    if model.endswith(IR_ENDINGS) and (overrides or out is not None or part is not None):
        option = "--set" if overrides else "--part" if out is None else "--out"
        raise UsageError(f"{option} is for a configuration, a run or an ONNX file; an IR runs as it is")
    tolerances = _tolerances(rtol, atol)
    with declare_ops(custom_ops_of(Path(model), overrides or ())):
        subject = (
            _open_ir(Path(model), weights)
            if model.endswith(IR_ENDINGS)
            else _open_model(model, overrides, out, weights, part)
        )
        feeds = subject.feeds(inputs, seed)
        found = _compare_values(subject, (first, second), feeds, tolerances, dump, first_only=first_divergence)
    if not found.compared:
        raise UsageError(
            f"{model}: {first} and {second} have no value in common, so nothing was compared; expected a model with "
            "an operator that both compute"
        )
    if as_json:
        print_json(_as_data(first, second, found))
    else:
        lines = _lines(first, second, found, 1 if first_divergence else most or MOST)
        shown = "\n".join(map(visible_line, lines))
        print_styled(shown + "\n", STYLES)
    if found.divergences:
        raise typer.Exit(DIFFERENT)


def _compare_values(
    subject: Subject,
    names: tuple[str, str],
    feeds: Mapping[str, np.ndarray],
    given: Mapping[str, Tolerance],
    dump: DumpOptions,
    *,
    first_only: bool,
) -> BackendComparison:
    """Run both backends, or read the dump of one, and compare every value; `given` are the user's tolerances."""
    from pipeline.verify.backends import BACKENDS, shapes_of
    from pipeline.verify.divergence import compare_backends

    dumped = [Path(name).is_dir() and name not in BACKENDS for name in names]
    tolerances = {**subject.tolerances, **(given or (_tolerances(DEVICE_RTOL, 0.0) if any(dumped) else {}))}
    try:
        left, right = (
            _open_dump(subject, Path(name), dump, feeds)
            if is_dumped
            else BACKENDS[name](subject.model, subject.fusions, **subject.options)
            for name, is_dumped in zip(names, dumped, strict=True)
        )
        graph = subject.model.graph_for(shapes_of(feeds))
        return compare_backends(left, right, graph, feeds, tolerances, first_only=first_only)
    except StepFailed as failure:
        raise UsageError(f"onnxruntime does not run the model on these inputs: {failure}") from failure
    except Unsupported as refusal:
        if not refusal.operators:
            raise
        raise Unsupported(
            f"{refusal}\nThe values of a model are compared in one graph of the whole of it. `onnxline run` takes a "
            "model with If, Loop or sequences in segments, and compares its outputs.",
            refusal.operators,
        ) from refusal


def _compare_step(
    names: set[str],
    model: str,
    overrides: Sequence[str] | None,
    step: int,
    tolerances: Mapping[str, Tolerance],
    *,
    as_json: bool,
) -> None:
    """Compare one step of the training that the configuration `model` describes with eager torch."""
    if names != {"torch", "plan"}:
        raise UsageError(f"found {' and '.join(sorted(names))} with --step; expected torch and plan, which train")
    from pipeline.config import RunConfig
    from pipeline.train_run import TrainRun

    config = RunConfig.from_source(model, overrides or ())
    found = TrainRun(config).compare_step(step, {**config.verify.compared_within, **tolerances})
    if as_json:
        print_json({"format_version": FORMAT_VERSION, **dataclasses.asdict(found)})
    else:
        print_styled(visible_line(str(found)) + "\n", STYLES)
    if found.errors is not None:
        raise typer.Exit(DIFFERENT)


@dataclass(frozen=True, slots=True)
class Subject:
    """What is compared: a model, and how its inputs are drawn."""

    model: RunnableModel
    inputs: tuple[InputSpec, ...]
    sizes: Mapping[str, int]
    """Of named dims; one that is not here is drawn as the first of the default sizes."""
    config: RunConfig | None = None

    @property
    def fusions(self) -> Sequence[str]:
        return self.config.runtime.chosen_fusions if self.config is not None else ()

    @property
    def options(self) -> Mapping[str, Any]:
        return self.config.runtime.program_options if self.config is not None else {}

    @property
    def tolerances(self) -> Mapping[str, Tolerance]:
        return self.config.verify.compared_within if self.config is not None else {}

    def feeds(self, file: Path | None, seed: int | None) -> Mapping[str, np.ndarray]:
        """The inputs from a file, or the configuration's own first ones, or drawn ones.

        Raises:
            SourceError: a file cannot be read, or its arrays do not fit the inputs.
        """
        from pipeline.config import DEFAULT_SIZES
        from pipeline.export.source import draw_inputs, named_dims
        from pipeline.verify.user_inputs import read_inputs, read_samples

        if file is not None:
            return next(iter(read_samples([str(file)], self.inputs, "--inputs")))[1]
        if seed is None and self.config is not None and self.config.verify.inputs:
            return read_inputs(self.config.verify, self.inputs).draws[0].feeds
        if seed is None:
            seed = self.config.verify.seed if self.config is not None else 0
        sizes = {dim: self.sizes.get(dim, DEFAULT_SIZES[0]) for dim in named_dims(self.inputs)}
        return draw_inputs(self.inputs, sizes, seed)


def _open_dump(subject: Subject, folder: Path, options: DumpOptions, feeds: Mapping[str, np.ndarray]) -> DeviceDump:
    """The tensors of a device as a backend; files that belong to no value are named on standard error."""
    from passes.encodings.aimet import read_aimet
    from pipeline.verify.backends import shapes_of
    from pipeline.verify.device_dump import DeviceDump

    encodings, integers = {}, options.integers
    if options.encodings is not None:
        encodings, version = read_aimet(options.encodings)
        integers = integers or (None if version in ("0.6.1", "1.0.0") else "signed")  # later ones say the dtype
    dump = DeviceDump(subject.model, folder, encodings, options.layout, integers)
    left = dump.find_unmatched(shapes_of(feeds))
    if left:
        listed = join_first(left, MOST_FILES, ELLIPSIS)
        print_line(
            f"{folder}: {plural(len(left), 'file')} that no value of the model has the name of: {listed}", err=True
        )
    for name in dump.find_ambiguous(shapes_of(feeds))[:1]:
        print_line(
            f"{folder}: {name} does not say whether its channels are second or last, so such files are read with "
            "channels second; say where they lie with --layout nchw or --layout nhwc",
            err=True,
        )
    return dump


MOST_FILES: Final = 5

DEVICE_RTOL: Final = 0.05
"""Of the scale of a tensor, what a device that computes in 8 bits may differ by where no tolerance is given."""


def _check_backends(first: str, second: str) -> bool:
    """Whether one of both is a folder of dumped tensors; a name that is neither is refused."""
    from pipeline.config import Backend

    known = get_args(Backend)
    folders = [name for name in (first, second) if name not in known and Path(name).is_dir()]
    for name in (first, second):
        if name not in known and name not in folders:
            raise UsageError(
                f"no backend {name!r}{nearest(name, known)}; backends: {', '.join(known)}, or a folder of dumps"
            )
    if first == second or len(folders) > 1:
        both = f"{first} twice, which cannot differ from itself" if first == second else "two folders"
        raise UsageError(f"found {both}; expected two backends")
    return bool(folders)


def _open_model(
    text: str, overrides: Sequence[str] | None, out: Path | None, weights: Path | None, part: str | None
) -> Subject:
    """An ONNX file by itself, or the final model of a run, or of a part of it, with the inputs that its configuration
    describes."""
    from pipeline.config import RunConfig
    from pipeline.export.load import read_onnx_file
    from pipeline.stages.check import default_folder
    from pipeline.verify.backends import OnnxFile

    if weights is not None:
        raise UsageError("--weights is for an IR; an ONNX file has its own")
    path = Path(text)
    config = None if path.is_dir() else RunConfig.from_source(text, overrides or ())
    if config is not None and path.suffix != ".onnx":
        path = default_folder(config, out)
        config = config.of_part(part) if part in config.model.part_names else config
    (path,) = locate_parts([path], part)
    if path.suffix != ".onnx":
        settings, path = path / "run.yaml", path / "model.onnx"
        config = config or RunConfig.from_source(settings if settings.is_file() else path, overrides or ())
    assert config is not None
    if not path.is_file():
        raise UsageError(f"{text}: there is no {path}; expected an ONNX file, or the model.onnx that a run writes")
    declared = config.model.model_copy(
        update={"onnx": str(path), "factory": None, "transformers": None, "inputs": {}, "dims": {}}
    )
    names = {spec.name for spec in read_onnx_file(str(path), declared).inputs}
    own = {name: entry for name, entry in config.model.inputs.items() if name in names}
    source = read_onnx_file(str(path), declared.model_copy(update={"inputs": own}))
    sizes = {dim: several[0] for dim, several in config.model.dims.items()}
    return Subject(OnnxFile(path), source.inputs, sizes, config)


def _open_ir(path: Path, weights: Path | None) -> Subject:
    if not path.is_file():
        raise UsageError(f"there is no file {path}; expected an IR, as `onnxline ir extract` or a run writes it")
    from pipeline.config import InputConfig
    from pipeline.export.source import input_spec
    from pipeline.runtime.slots import with_weights
    from pipeline.torch_ir import load_weights
    from pipeline.verify.backends import GraphModel

    graph = _read_graph(path)
    names = {name for several in graph.weight_names().values() for name in several}
    state = load_weights(weights) if weights is not None else {}
    graph = with_weights(graph, {name: tensor for name, tensor in state.items() if name in names})
    missing = [
        own[0]
        for vid, own in graph.weight_names().items()
        if vid not in graph.payloads and (graph.values[vid].users or vid in graph.outputs)
    ]
    if missing:
        raise UsageError(
            f"{path} holds no values for {join_first(missing, 3, ', …')}; name a file "
            "of its weights by --weights, or compare the ONNX file that it was made of"
        )
    values = [graph.values[vid] for vid in graph.inputs]
    inputs = tuple(input_spec(value.name, InputConfig(), value.spec.shape, value.spec.dtype) for value in values)
    return Subject(GraphModel(graph, str(path)), inputs, {})


def _read_graph(path: Path) -> Graph:
    """The graph of an `ir.json` of a run, or of a file of `ir extract` or pytorch-ir."""
    if path.suffix == ".json":
        from pipeline.ir.json import from_json

        with disk_errors(path):
            text = path.read_bytes()
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise SourceError(f"{path}: it is not JSON: {error}") from error
        if isinstance(data, dict) and "tensors" in data:
            return from_json(data)
    from pipeline.torch_ir import load_ir

    return load_ir(path).graph


def _tolerances(rtol: float | None, atol: float | None) -> dict[str, Tolerance]:
    """The given tolerances for every floating type; empty where none is given."""
    if rtol is None and atol is None:
        return {}
    return {
        dtype: Tolerance(own.atol if atol is None else atol, own.rtol if rtol is None else rtol)
        for dtype, own in TOLERANCES.items()
    }


def _lines(first: str, second: str, found: BackendComparison, most: int) -> Iterator[str]:
    for divergence in found.divergences[:most]:
        yield from _divergence_lines(first, second, divergence)
    if len(found.divergences) > most:
        yield f"and {plural(len(found.divergences) - most, 'value')} more (--most shows them)"
    alone = [
        f"{len(names)} only {name} has"
        for name, names in ((first, found.only_first), (second, found.only_second))
        if names
    ]
    rest = f"; of the others {' and '.join(alone)}" if alone else ""
    if found.divergences:
        yield f"{plural(found.compared, 'value')} compared, {len(found.divergences)} of them differ{rest}"
        return
    value, share = found.worst
    near = f"; {value} comes nearest to its limit, by {share:.2%}" if value else ""
    yield f"no difference: {first} and {second} agree on {plural(found.compared, 'value')}{near}{rest}"


def _divergence_lines(first: str, second: str, found: Divergence) -> Iterator[str]:
    node = f" {found.node}" if found.node else ""
    yield f"{found.value}: {found.type}, made by {found.kind}{node}{f' ({found.line})' if found.line else ''}"
    if found.worst is not None:
        at = f" at {list(found.worst.index)}" if found.worst.index else ""
        yield (
            f"  largest difference {found.errors.max_abs:.3g}{at}: {found.worst.first} by {first}, "
            f"{found.worst.second} by {second}"
        )
    yield f"  {found.errors.why}"
    width = max(len(first), len(second))
    yield f"  {first:<{width}}  {_statistics_text(found.first)}"
    yield f"  {second:<{width}}  {_statistics_text(found.second)}"
    if found.inputs:
        yield "  it reads"
    for entry in found.inputs:
        yield f"    {_input_text(entry)}"


def _input_text(entry: InputValue) -> str:
    numbers = _statistics_text(entry.statistics) if entry.statistics is not None else "not a value of its own on both"
    known = entry.largest_difference
    differs = "" if known is None else f", largest difference {known:.3g}" if known else ", equal on both"
    return f"{entry.role} {entry.name}: {entry.type}, {numbers}{differs}"


def _statistics_text(found: ValueStatistics) -> str:
    parts = [
        f"least {found.least:.6g}",
        f"largest {found.largest:.6g}",
        f"mean {found.mean:.6g}",
        f"deviation {found.deviation:.6g}",
    ]
    parts += [f"{found.nan} NaN"] * bool(found.nan) + [f"{found.infinite} infinite"] * bool(found.infinite)
    return "  ".join(parts) if found.elements else "no element"


def _as_data(first: str, second: str, found: BackendComparison) -> dict[str, object]:
    data = dataclasses.asdict(found)
    for divergence in data["divergences"]:  # JSON has no infinity
        divergence["errors"] = {
            key: number if not isinstance(number, float) or abs(number) < float("inf") else str(number)
            for key, number in divergence["errors"].items()
        }
        for entry in divergence["inputs"]:
            if entry["largest_difference"] == float("inf"):
                entry["largest_difference"] = "inf"
    value, share = data.pop("worst")
    return {
        "format_version": FORMAT_VERSION,
        "backends": [first, second],
        **data,
        "nearest_to_limit": {"value": value, "share": share},
    }
