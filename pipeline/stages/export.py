"""Stage `export`: torch → ONNX, compared with torch before any pass. An ONNX source is taken as it is."""

from __future__ import annotations

import gc
import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np
import onnx
from onnx import TensorProto

from passes.context import PassContext, limit_runs
from passes.errors import StepFailed, StepTimedOut
from passes.functions import describe_layers, fold_layers
from passes.graph.layer_calls import count_nodes
from passes.graph.op_facts import opset_of
from passes.graph.traversal import freeze_objects, pause_collector
from passes.model.analysis import stored_bytes
from passes.proof.draws import Trait
from passes.proof.numbers import DRAWN, Errors
from passes.proof.numeric import NumericProver
from passes.proof.prover import Measurement, Reference
from passes.recipe.recipe import library_imports, names_of
from passes.structures.view import module_of
from passes.weights.detached import DetachedModel, read_model
from passes.weights.files import replace_when_done
from passes.worker.platforms import return_free_memory
from pipeline.config import RunConfig, locate
from pipeline.errors import CheckFailed, SourceError, Unsupported
from pipeline.export.source import OnnxSource, Source, TorchSource
from pipeline.report import ExportReport
from pipeline.stages.source import MODEL, leaves_unread, shards_folder, why_not_compared
from pipeline.verify.backends import onnxruntime_runner
from pipeline.verify.references import References
from pipeline.workspace import Workspace, stamp

WORTH_COLLECTING: Final = 2**25
"""Bytes. The weights of a smaller model may stay in memory until Python collects them by itself."""


def exported_path(config: RunConfig, source: Source, workspace: Workspace) -> Path:
    """The path of the exported model.

    A model that refers to a checkpoint's files cannot be loaded from the folder of the run, so it is no artifact.
    """
    if isinstance(source, OnnxSource):
        return source.path
    return (workspace.folder if shards_folder(config) is None else workspace.stages) / "exported.onnx"


def exported_files(path: Path, workspace: Workspace) -> tuple[tuple[str, int, int], ...]:
    """Name, size and time of the exported files, which a later run would read again; none for an ONNX source, which is
    part of the key. Weights may be in the file of the final model, if both share them."""
    if not path.is_relative_to(workspace.folder):
        return ()
    files = sorted([*path.parent.glob(f"{path.name}*"), *path.parent.glob(f"{MODEL}.*.data")])
    return tuple((str(file.relative_to(workspace.folder)), *stamp(file)) for file in files)


@dataclass(frozen=True, slots=True)
class _ExportFacts:
    """What torch's export says of a graph; nothing of a file that somebody else has exported."""

    parameters: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()
    lifted: tuple[str, ...] = ()
    """Sentences on values that became inputs."""
    computed_in: tuple[str, ...] = ()
    """The floating types in which torch computes."""
    ranges: Mapping[str, tuple[int, int | None]] = field(default_factory=dict)
    """Dim → the least and the largest size that the trace allows."""
    unheld: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """Dim that nobody asked for → sizes that the trace does not allow."""


@freeze_objects()
def export_and_compare(
    config: RunConfig,
    source: Source,
    references: References,
    workspace: Workspace,
    context: PassContext,
    *,
    is_own: bool = False,
) -> ExportReport:
    """Export, and compare with the references; `refuse_wrong_export` judges the result.

    Args:
        context: of the passes as well: its workers import the libraries of the recipe while torch exports.
        is_own: the run has made the module itself, so its weights may move into the exported file.
    """
    if not why_not_compared(config):
        context.start(library_imports(names_of(config.passes.recipe)))
    path = exported_path(config, source, workspace)
    facts = _ExportFacts() if isinstance(source, OnnxSource) else _export(config, source, path, is_own=is_own)
    model = _open_exported(config, source, path)
    if isinstance(source, OnnxSource) and not why_not_compared(config):  # the file computed the references
        prover = NumericProver(references.draws, context, config.verify.compared_within)
        measurement, draws, not_drawn = prover.measure_reference(model), references.draws, ()
    else:
        measurement, draws, not_drawn = _measure_export(model, references.draws, facts, config, context)
    limits = [_limit(name, high) for name, (_, high) in facts.ranges.items() if high is not None]
    limits += [_gap(name, size) for name, size in sorted(_unheld_sizes(references.draws, facts.unheld, draws))]
    return ExportReport(
        origin="onnx" if isinstance(source, OnnxSource) else "torch",
        opset=opset_of(model.proto),
        nodes=count_nodes(model.proto),
        weight_bytes=stored_bytes(model),
        inputs=tuple(str(spec) for spec in source.inputs),
        outputs=tuple(info.name for info in model.proto.graph.output),
        draws=tuple(reference.label for reference in draws),
        parameters=keys_of_parameters(model, facts.parameters),
        errors=measurement.errors,
        notes=facts.notes,
        computed_in=facts.computed_in,
        files=exported_files(path, workspace),
        limits=tuple(limits),
        not_drawn=not_drawn,
        random=_random_outputs(measurement.errors),
        weights="" if isinstance(source, OnnxSource) else source.weights,
        lifted=facts.lifted,
    )


def _open_exported(config: RunConfig, source: Source, path: Path) -> DetachedModel:
    unread, folder = leaves_unread(config), shards_folder(config)
    if isinstance(source, OnnxSource) and unread is None and folder is None:
        return source.model
    return read_model(path, unread=unread, folder=folder)


def _export(config: RunConfig, source: TorchSource, path: Path, *, is_own: bool) -> _ExportFacts:
    """Export a torch module to `path`, with equal layers as functions where the configuration asks for it."""
    from pipeline.export import describe_lifted, export_onnx  # a second, which a cached export does not need

    # Without weights there is nothing large to collect, and visits of 70,000 weights take a fifth of the time.
    with pause_collector() if config.weightless else nullcontext():
        exported = export_onnx(source, config.export)
        if shards_folder(config) is not None:
            from pipeline.export.checkpoint import read_shards

            exported = exported.referring_to(read_shards(locate(config.checkpoint or "")), config.export.pieces)
        exported.save(path)
    facts = _ExportFacts(
        exported.parameters,
        exported.notes,
        tuple(describe_lifted(exported.source.lifted)),
        exported.computed_in,
        exported.ranges,
        {name: sizes for name, sizes in exported.unheld.items() if name not in config.model.dims},
    )
    if is_own:
        exported.move_weights(path)
    del exported
    # What the trace held, and the memory of weights that lie in the file now, goes with cycles that Python would
    # keep alive. A collection costs 0.2 s, whatever it frees.
    written = sum(file.stat().st_size for file in path.parent.glob(f"{path.name}*"))
    if config.export.functions or written > WORTH_COLLECTING:
        gc.collect()
        return_free_memory()
    if config.export.functions:  # after torch's graph is gone: 400 MiB for 61 layers, and a fold copies the model
        facts = replace(facts, notes=(*facts.notes, _fold_file(path, leaves_unread(config))))
    return facts


def _fold_file(path: Path, unread: bool | None) -> str:
    """Write a model again with functions of equal layers; returns a sentence on them."""
    with pause_collector():
        folded = fold_layers(onnx.load(path, load_external_data=False), unread=bool(unread))
        with replace_when_done(path) as out:
            out.write_bytes(folded.SerializeToString())
        return describe_layers(folded)


def _measure_export(
    model: DetachedModel, references: Sequence[Reference], facts: _ExportFacts, config: RunConfig, context: PassContext
) -> tuple[Measurement, list[Reference], tuple[str, ...]]:
    """Measure the export: its errors, the draws that it holds for, and why it does not hold for the others.

    Optional sizes, and sizes that nobody asked for and that torch's trace does not allow (`unheld`), are left out where
    torch traced the graph for other sizes only, or the export does not run.
    torch.export assumes that every dim is 2 or more, but most graphs are right for 1 too, so 1 is tried. Masks of zeros
    are left out where the export differs: attention to nothing has no defined result.
    """
    if why_not_compared(config):
        return Measurement({}, {}), [], ()
    ranges, unheld = facts.ranges, facts.unheld
    required = [draw for draw in references if not (_is_optional(draw) or _sizes_in(draw, unheld))]
    optional = [draw for draw in references if _is_optional(draw) or _sizes_in(draw, unheld)]
    not_drawn = [_not_drawn(draw, beyond) for draw in optional if (beyond := _beyond(draw, ranges))]
    optional = [draw for draw in optional if not _beyond(draw, ranges)]
    with limit_runs(context, model, [draw.feeds for draw in references]):

        def measure(draws: Sequence[Reference]) -> Measurement:
            return NumericProver(
                draws, context, config.verify.compared_within, facts.computed_in or None
            ).measure_export(model)

        try:
            measurement = measure([*required, *optional])
            if not measurement.why:
                return measurement, [*required, *optional], tuple(not_drawn)
        except StepFailed as failure:
            if not optional:
                raise _does_not_run(failure) from failure
            if isinstance(failure, StepTimedOut):  # each of them alone would take that time again
                not_drawn += [_not_drawn(draw, f"the export {failure}") for draw in optional]
                optional = []
        for draw in optional:
            try:
                is_doubtful = _is_assumed(draw, ranges) or _masks_all(draw) or bool(_sizes_in(draw, unheld))
                why = measure([draw]).why if is_doubtful else ""
            except StepFailed as failure:
                why = f"the export does not run on it: {' '.join(str(failure).split())[:200]}"
            if why:
                not_drawn.append(_not_drawn(draw, why))
            else:
                required.append(draw)
        try:
            return measure(required), required, tuple(not_drawn)
        except StepFailed as failure:
            raise _does_not_run(failure) from failure


def _random_outputs(errors: Mapping[str, Errors]) -> tuple[str, ...]:
    """The outputs that depend on random values, which no two programs draw equally.

    Raises:
        SourceError: all of them do.
    """
    drawn = [name for name, error in errors.items() if error.judged_as == DRAWN]
    if drawn and len(drawn) == len(errors):
        shown = ", ".join(map(repr, drawn))
        raise SourceError(
            f"every output of the model depends on random values ({shown}), so nothing can be compared; "
            "make the noise an input, or set its scale to 0 (noise_scale, dropout) in the model's configuration"
        )
    return tuple(drawn)


def _beyond(reference: Reference, ranges: Mapping[str, tuple[int, int | None]]) -> str:
    """Explain which dim of a draw is outside of the range that the graph was traced for; empty where none is."""
    for name, size in (reference.draw.sizes if reference.draw else {}).items():
        low, high = ranges.get(name, (0, None))
        if (high is not None and size > high) or (size < low and low > ASSUMED):
            return f"the export holds for {name} from {low} to {high or 'any size'}"
    return ""


def _limit(name: str, high: int) -> str:
    return (
        f"the export holds for {name} up to {high}, which the ONNX file cannot say: the model has a table that "
        f"ends there, or torch's trace has kept a number of chunks; model.dims chooses the {name} that is traced"
    )


def _gap(name: str, size: int) -> str:
    return (
        f"the export does not hold for {name} of {size}, which the ONNX file cannot say: torch's trace has kept a "
        f"condition, such as chunks that are full; model.dims chooses the {name} that is traced"
    )


def _sizes_in(reference: Reference, unheld: Mapping[str, frozenset[int]]) -> set[tuple[str, int]]:
    """The dims of a draw, with sizes for which a guard of torch's trace fails; none of the user's own inputs."""
    sizes = reference.draw.sizes if reference.draw and not reference.draw.source else {}
    return {(name, size) for name, size in sizes.items() if size in unheld.get(name, ())}


def _unheld_sizes(
    references: Sequence[Reference], unheld: Mapping[str, frozenset[int]], measured: Sequence[Reference]
) -> set[tuple[str, int]]:
    """Those of draws that all have to run, and were left out."""
    needed = {pair for draw in references if not _is_optional(draw) for pair in _sizes_in(draw, unheld)}
    return needed - {pair for draw in measured for pair in _sizes_in(draw, unheld)}


def _is_optional(reference: Reference) -> bool:
    return reference.is_optional or _masks_all(reference)


def _masks_all(reference: Reference) -> bool:
    return reference.draw is not None and Trait.ZEROS in reference.draw.traits


def _is_assumed(reference: Reference, ranges: Mapping[str, tuple[int, int | None]]) -> bool:
    """Whether a dim is below the least size that torch has assumed."""
    sizes = reference.draw.sizes if reference.draw else {}
    return any(size < ranges.get(name, (0, None))[0] for name, size in sizes.items())


def _not_drawn(reference: Reference, why: str) -> str:
    return f"not drawn: {reference.label.partition(' ')[2].partition(' ')[2]} ({why})"


def _does_not_run(failure: StepFailed) -> Unsupported:
    """The error for an export that onnxruntime does not run; advice on dtypes only where one of them is the cause."""
    lacks = LACKS_DTYPE.search(str(failure))
    advice = (
        f"onnxruntime's CPU kernels lack some dtypes{', bfloat16 above all' if 'bfloat16' in str(failure) else ''}: "
        "make the model in float32 or float16"
        if lacks
        else "try another export.opset, or find the operator with `model:` narrowed to a part of the model"
    )
    return Unsupported(f"the exported model cannot be compared with torch: {failure}\n  {advice}")


LACKS_DTYPE: Final = re.compile(r"NOT_IMPLEMENTED|Could not find an implementation|Type '?tensor\(\w+\)'? of input")
"""How onnxruntime says that no kernel takes a dtype."""

ASSUMED: Final = 2
"""The least size that torch.export assumes for every open dim."""


def refuse_wrong_export(report: ExportReport, path: Path, references: References) -> None:
    """Raise CheckFailed when the exported model at `path` differs from its reference."""
    why = Measurement(report.errors, {}).why
    if why:
        draws = [draw for draw in references.draws if draw.label in report.draws]
        remedy = describe_ties(read_model(path), draws) or (
            "does forward read what changes from call to call, such as a global variable or a clock? make it an input; "
            "else try another export.opset, or find the operator with `model:` narrowed to a part of the model"
        )
        raise CheckFailed(f"the exported model does not compute what torch computes ({why}); {remedy}")


def describe_ties(model: DetachedModel, draws: Sequence[Reference]) -> str:
    """Explain which node chooses among equal values, where torch and onnxruntime may differ; empty where none does.
    Routers and detectors with random weights score everything equally."""
    computed = model.index.producers
    nodes = [node for node in model.proto.graph.node if node.op_type in CHOOSING and node.input[0] in computed]
    if not nodes:
        return ""
    session = onnxruntime_runner(model, [name for node in nodes for name in (node.input[0], node.output[0])])
    for values in (session(reference.feeds) for reference in draws):
        for node in nodes:
            is_topk, option = node.op_type == "TopK", {attribute.name: attribute.i for attribute in node.attribute}.get
            axis = option("axis", -1 if is_topk else 0)
            is_largest = option("largest", 1) if is_topk else node.op_type == "ArgMax"
            count = values[node.output[0]].shape[axis] if is_topk else 1
            ordered = np.sort(np.moveaxis(values[node.input[0]], axis, -1).astype(np.float64), axis=-1)
            best = (ordered[..., ::-1] if is_largest else ordered)[..., : count + 1]
            rounding = NEARLY_EQUAL * np.abs(best).max(initial=0.0)
            if np.isclose(best[..., 1:], best[..., :-1], rtol=0, atol=rounding).any():
                module = module_of([node])
                place = f" in module {module!r}" if module else ""
                return (
                    f"the {node.op_type} {node.name!r}{place} chooses among equal values, of which torch and "
                    "onnxruntime may take different ones, so the difference need not be a fault of the export: use "
                    "trained weights, or inputs that tell the values apart"
                )
    return ""


CHOOSING: Final = frozenset({"TopK", "ArgMax", "ArgMin"})

NEARLY_EQUAL: Final = 1e-6
"""Difference of two values, relative to the greatest among which a node chooses, whose order rounding may change."""


def keys_of_parameters(model: DetachedModel, names: frozenset[str]) -> frozenset[str]:
    """Digests of the initializers called `names`, as they are and transposed: passes may fold a Transpose into them."""
    digests: set[str] = set()
    for tensor in model.proto.graph.initializer:
        if tensor.name in names:
            digests.add(key_of_parameter(tensor, model.digest(tensor)))
            if len(tensor.dims) == 2:
                digests.add(key_of_parameter(tensor, model.transposed_digest(tensor, (1, 0))))
    return frozenset(digests)


def key_of_parameter(tensor: TensorProto, digest: str) -> str:
    """Key of a parameter: dtype and digest. By bytes alone, two float32 zeros would equal an int64 start of a Slice."""
    return f"{tensor.data_type}:{digest}"
