"""Stage `passes`: runs the recipe under the policy, and writes the final model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeVar

import onnx

import passes
from passes.context import PassContext, limit_runs
from passes.diff import (
    DrawnInputs,
    LayerErrors,
    ModelMatching,
    Numbers,
    compare_layers,
    compare_matched,
    diff_as_data,
    diff_text,
    match_models,
    numbers_as_data,
    numbers_text,
)
from passes.encodings.aimet import AimetVersion, aimet_text_of, read_aimet
from passes.encodings.carry import carried_as_data, summarize_carried
from passes.functions import lay_out
from passes.graph.layer_calls import count_nodes
from passes.load import byte_count
from passes.model.analysis import AnalyzedModel
from passes.model.canonical import CanonicalModel, structure_fingerprint
from passes.portability import describe_left, find_obstacles
from passes.proof.numeric import NumericProver
from passes.proof.prover import STRUCTURE
from passes.provenance.annotations import map_names, strip_metadata
from passes.recipe.recipe import RecipeItem, steps_of
from passes.run.apply_step import fix_input_shapes
from passes.run.result import PassRow, PassRun, op_counts
from passes.step import flatten
from passes.suggest import plural
from passes.weights.detached import DetachedModel, read_model
from passes.weights.files import save
from passes.weights.weight_stacks import collapse
from pipeline.config import RunConfig
from pipeline.errors import CheckFailed, UsageError
from pipeline.events import Note, Observer, PassEnded, Progress
from pipeline.report import DIFFS, SOURCE, Mark, PassesReport, Pictures, diff_folder
from pipeline.stages.pictures import MOST_VIEWED, BrokenStructures, take_pictures
from pipeline.stages.source import final_path, leaves_unread, link_to, shards_folder, why_not_compared
from pipeline.verify.references import References
from pipeline.workspace import REPRODUCERS, Workspace, stamp

T = TypeVar("T")

MOST_LAYERS: Final = 64
"""Layers that are compared for `report.html`, in one run of each model; `onnxline diff --layers` compares all."""

MOST_COMPARED: Final = 2**27
"""Bytes of a model up to which layers are compared: two more runs of a larger one take seconds (ViT-base)."""


def run_passes(
    config: RunConfig,
    exported: Path,
    references: References,
    workspace: Workspace,
    observer: Observer,
    context: PassContext,
    computed_in: Collection[str] = (),
    begin: Callable[[], object] = lambda: None,
) -> PassesReport:
    """Run every pass alone, with a proof after every change.

    Args:
        context: whose workers may have run the exported model already.
        begin: called once, before results of an earlier run are replaced; the policy has been checked by then.
        computed_in: the floating types in which torch computed the references.

    Raises:
        PolicyError: an unknown name, or a `keep` that matches nothing.
        CheckFailed: the final model is not valid ONNX; it is not written.
    """
    wishes, path = config.passes, final_path(config, workspace)  # raises before the work
    given, version = (None, None) if wishes.encodings is None else read_aimet(Path(wishes.encodings))
    history = _History(config, workspace, observer, begin)
    stored = read_model(exported, unread=leaves_unread(config), folder=shards_folder(config))
    source, _ = lay_out(collapse(stored)[0])  # as the passes get it
    history.marks[SOURCE] = _mark(SOURCE, source)
    _check_shapes(wishes.recipe, stored, references)
    with limit_runs(context, source, [draw.feeds for draw in references.draws]):
        run = passes.optimize(
            stored,
            wishes.recipe,
            wishes.skip,
            wishes.keep,
            watch=wishes.watch,
            proof=config.verify.proof,
            prover=_prover_of(config, references, context, computed_in),
            context=context,
            encodings=given,
            contrib=wishes.contrib or "keep",
            reproducers=workspace.folder / REPRODUCERS,
            observer=history.observe,
            on_change=history.note_change,
        )
        layers: tuple[LayerErrors, ...] = _make_or_note(
            lambda: _layers(stored, run.model, references, context, history, observer), (), "errors by layer", observer
        )
    laid_out = replace(run, model=lay_out(collapse(run.model)[0])[0])
    pictures = _make_or_note(
        lambda: take_pictures(laid_out, source, history.broken, history.matched), Pictures(), "drawings", observer
    )
    history.clear_old_results()  # a recipe may have no step
    if wishes.strip_metadata:
        run = replace(run, model=strip_metadata(run.model))
    _save_final(run, path, stored, exported, config, workspace)
    merged = run.describe_merges(wishes.keep, wishes.recipe)
    for text in (*_notes(run, run.model.proto), *merged, *_contrib_notes(config, run.model.proto)):
        observer(Note(text))
    diffs = sorted((workspace.folder / DIFFS).glob("*/diff.*"))
    files = [path, *sorted(path.parent.glob(f"{path.name}.*.data")), *_save_encodings(run, version, workspace), *diffs]
    return PassesReport(
        passes=run.rows,
        structures=run.structures,
        sensitivity=run.power,
        nodes=count_nodes(run.model.proto),
        files=tuple((_shown_path(file, workspace), *stamp(file)) for file in files),
        marks=tuple(mark for _, mark in sorted(history.marks.items())),
        pictures=pictures,
        not_compared=why_not_compared(config),
        coverage=run.coverage,
        layers=layers,
        names=map_names(source.proto, laid_out.model.proto),
    )


class _History:
    """Observes the pass run: sends events, writes a diff of each change, and collects data for the report."""

    def __init__(
        self, config: RunConfig, workspace: Workspace, observer: Observer, begin: Callable[[], object]
    ) -> None:
        self.marks: dict[int, Mark] = {}
        self.broken = BrokenStructures()
        self.matched: ModelMatching | None = None
        """Of the last two models that were matched, where the viewer draws such models."""
        self._workspace, self._send, self._begin = workspace, observer, begin
        self._not_compared = why_not_compared(config)
        self._has_begun = False

    def observe(self, name: str, index: int, total: int, row: PassRow | None) -> None:
        self.clear_old_results()
        self._send(Progress("passes", name, index, total) if row is None else PassEnded(row))

    def clear_old_results(self) -> None:
        if self._has_begun:
            return
        self._has_begun = True
        self._begin()
        for folder in (REPRODUCERS, DIFFS):
            shutil.rmtree(self._workspace.folder / folder, ignore_errors=True)

    def note_change(self, place: int, row: PassRow, before: AnalyzedModel, after: AnalyzedModel) -> None:
        folder = diff_folder(place, row)
        self.broken.note(row, after)
        if row.changed:
            self.marks[place] = _mark(place, after.model)
            matched = self.match(before.model, after.model, (before.canonical, after.canonical))
            _write_diff(folder, row, matched, self._workspace, self._not_compared)
            if row.name in EQUALIZING:
                self._keep_models(self._workspace.folder / folder, row, before, after)
        else:
            self.marks.pop(place, None)
            shutil.rmtree(self._workspace.folder / folder, ignore_errors=True)

    def match(
        self,
        before: DetachedModel,
        after: DetachedModel,
        canonical: tuple[CanonicalModel, CanonicalModel] | None = None,
    ) -> ModelMatching:
        """The matched nodes of two models. The only step of a run, the errors by layer and the viewer ask for those of
        the same two."""
        known = self.matched
        if known is not None and known.before is before and known.after is after:
            return known
        matched = match_models(before, after, canonical)
        is_small = max(len(model.proto.graph.node) for model in (before, after)) <= MOST_VIEWED
        self.matched = matched if is_small else None
        return matched

    @staticmethod
    def _keep_models(folder: Path, row: PassRow, before: AnalyzedModel, after: AnalyzedModel) -> None:
        """Keep the models around a step that stands; one that is undone later is shown again."""
        for name, model in ((BEFORE, before.model), (AFTER, after.model)):
            if row.status.counts_as_reverted:
                (folder / name).unlink(missing_ok=True)
            else:
                save(model, folder / name)


EQUALIZING: Final = frozenset({"awq", "cross-layer-equalization", "rotate", "smooth-quant"})
"""Steps that move factors between weights, and round nothing: what they are good for shows in a quantized model. So
the models before and after them are kept, next to their diff."""

BEFORE: Final = "before.onnx"
AFTER: Final = "after.onnx"


def find_equalized(folder: Path) -> Iterator[tuple[str, Path]]:
    """The name of each step of `EQUALIZING` that has changed the model, and the folder with its models, in order.

    Args:
        folder: of the run.
    """
    found = (path.parent for path in (folder / DIFFS).glob(f"*/{BEFORE}"))
    numbered = sorted((int(step.name.partition("-")[0]), step) for step in found)
    for _, step in numbered:
        yield step.name.partition("-")[2], step


def _check_shapes(recipe: Sequence[RecipeItem], model: DetachedModel, references: References) -> None:
    """Refuse a step that is asked to fix input shapes in which the reference did not run."""
    fixed = fix_input_shapes(flatten(steps_of(recipe)), model.proto)
    for info in fixed.graph.input if fixed is not None else ():
        dims = [dim.dim_value for dim in info.type.tensor_type.shape.dim]
        drawn = {draw.feeds[info.name].shape for draw in references.draws if info.name in draw.feeds}
        others = [
            list(shape) for shape in drawn if any(size and size != got for size, got in zip(dims, shape, strict=True))
        ]
        if others:
            raise UsageError(
                f"the recipe fixes {info.name!r} at {dims}, and the run compares at {others[0]} too; give the shape to "
                f"the source of the run instead: model.inputs: {{{info.name}: {{shape: {dims}}}}}"
            )


def _prover_of(
    config: RunConfig, references: References, context: PassContext, computed_in: Collection[str]
) -> NumericProver | None:
    """The prover that compares outputs with `references`, `computed_in` these types; None for proof by structure."""
    if config.verify.proof == STRUCTURE:
        return None
    known = {"inputs": references.traits, "skipped": references.skipped}
    return NumericProver(references.draws, context, config.verify.compared_within, computed_in or None, **known)


def _save_final(
    run: PassRun, path: Path, stored: DetachedModel, exported: Path, config: RunConfig, workspace: Workspace
) -> None:
    if run.invalid:
        raise CheckFailed(
            f"the final model is not valid ONNX, so it was not written: {run.invalid}; "
            "check the source with onnx.checker.check_model, and leave out passes with passes.skip"
        )
    shared = (stored, exported) if exported.parent == path.parent == workspace.folder else None
    save(run.model, path, referring=shards_folder(config) is not None, source=shared)
    link_to(path, workspace)


def _save_encodings(run: PassRun, version: AimetVersion | None, workspace: Workspace) -> tuple[Path, ...]:
    """Write the encodings that were carried to the final model, and what became of the others."""
    if run.encodings is None or version is None:
        for name in (CARRIED, CARRIED_REPORT):
            (workspace.folder / name).unlink(missing_ok=True)  # of an earlier run
        return ()
    report = json.dumps(carried_as_data(run.encodings), indent=1)
    return (
        workspace.write_text(CARRIED, aimet_text_of(run.model, run.encodings.encodings, version)),
        workspace.write_text(CARRIED_REPORT, report + "\n"),
    )


CARRIED: Final = "carried.encodings"
CARRIED_REPORT: Final = "carried.json"


def _notes(run: PassRun, final: onnx.ModelProto) -> tuple[str, ...]:
    """Notes for the user on the structures, the proof, and the final model."""
    notes = [f"keep: {kind}: the source has {seen}" for kind, seen in run.watched.partly.items()]
    if run.power.blind:
        notes.append(f"a fault in the weights of {', '.join(run.power.blind)} would not show in the outputs")
    if run.encodings is not None:
        notes.append(f"{summarize_carried(run.encodings)} ({CARRIED_REPORT} lists them)")
    return (*notes, *run.remarks, *find_obstacles(final))


def _contrib_notes(config: RunConfig, final: onnx.ModelProto) -> tuple[str, ...]:
    """The operators outside of ONNX that the source has and that no step removed, if such operators are refused."""
    return describe_left(final) if config.passes.contrib == "refuse" else ()


def _shown_path(file: Path, workspace: Workspace) -> str:
    """The path relative to the folder of the run; in full for a file outside of it."""
    return str(file.relative_to(workspace.folder) if file.is_relative_to(workspace.folder) else file)


def _layers(
    source: DetachedModel,
    final: DetachedModel,
    references: References,
    context: PassContext,
    history: _History,
    observer: Observer,
) -> tuple[LayerErrors, ...]:
    """Compare the final model with the export layer by layer, on the first draw; empty where no number is compared."""
    if not references.draws:
        return ()
    if source.nbytes() > MOST_COMPARED:
        observer(
            Note(
                f"report.html has no errors by layer above {MOST_COMPARED >> 20} MiB, where that takes seconds more; "
                "`onnxline diff exported.onnx model.onnx --layers` in the folder of the run shows them"
            )
        )
        return ()
    first = references.draws[0]
    draws = [DrawnInputs(first.label, first.feeds)]
    whole = history.match(source.without_functions(), final.without_functions())
    return compare_layers(whole, draws, context, most=MOST_LAYERS)


def _make_or_note(make: Callable[[], T], default: T, what: str, observer: Observer) -> T:
    """Make a part of `report.html`. If that fails, a note says so and the run, which is done, still succeeds."""
    try:
        return make()
    except Exception as error:
        observer(Note(f"report.html has no {what}: {type(error).__name__}: {error}"))
        return default


def _mark(row: int, model: DetachedModel) -> Mark:
    stored = [tensor for tensor in model.proto.graph.initializer if tensor.data_type != onnx.TensorProto.STRING]
    return Mark(row, structure_fingerprint(model), sum(map(byte_count, stored)), dict(sorted(op_counts(model).items())))


def _write_diff(folder: str, row: PassRow, matched: ModelMatching, workspace: Workspace, why_not_compared: str) -> None:
    """Write a diff: of the structure against the model before the pass, of the outputs against the reference."""
    numbers = Numbers(row.errors) if row.errors else None
    why = "" if row.errors else row.reason or why_not_compared or "there is no output to compare"
    diff = compare_matched(matched)
    (workspace.folder / folder).mkdir(parents=True, exist_ok=True)
    text = diff_text(diff, most=None) + numbers_text(numbers, why, title="numbers, against the reference")
    workspace.write_text(f"{folder}/diff.txt", text)
    workspace.write_text(
        f"{folder}/diff.json", json.dumps({**diff_as_data(diff), **numbers_as_data(numbers, why)}, indent=1)
    )


def refuse_reverts(config: RunConfig, report: PassesReport) -> None:
    """Raise CheckFailed under `strict` when a step was reverted or failed."""
    bad = [row for row in report.passes if row.status.counts_as_reverted]
    if config.passes.strict and bad:
        listing = "; ".join(f"{row.name} {row.status}: {row.reason}" for row in bad)
        were = "was" if len(bad) == 1 else "were"
        raise CheckFailed(f"strict: {plural(len(bad), 'step')} {were} reverted or failed: {listing}")
