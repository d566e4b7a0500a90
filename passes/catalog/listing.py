"""The catalogue of passes: build it by asking the installed libraries which passes they have, and demonstrate a pass.

A demonstration is a pass's example model before and after, run by the installed library. The gallery holds tiny models
in ONNX text, each of which shows the effect of a pass. A declared value that no node computes is a weight. Its elements
are drawn with its name as the seed, so files hold no weights; elements that matter are written out. The comment in the
first line is the caption.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

import onnx
from onnx import numpy_helper

from passes.context import PassContext
from passes.errors import PolicyError, StepFailed
from passes.graph.formatting import graph_text
from passes.graph.index import computed_values
from passes.graph.traversal import live_nodes
from passes.model.canonical import canonical_digest
from passes.policy.policy import DESTROYS, groups_of
from passes.proof.draws import draw_array
from passes.recipe import CLEANING, TORCH_RECIPE
from passes.recipe.recipe import OWN_STEPS, default_passes, options_of, single_passes, steps_of
from passes.recipe.user_passes import installed_passes
from passes.step import UNDESCRIBED, Description, Reads, Step, flatten
from passes.suggest import nearest
from passes.weights.detached import DetachedModel, attach, open_model

Runs = Literal["default", "extra", "never", "missing"]
"""`default`: the library's default set has it. `extra`: it runs only where it is named. `never`: the library lists it
and takes it out each time. `missing`: the library is not installed."""


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """One pass, with its `name` as a recipe or a skip list writes it; a pass inside a step is called `STEP/NAME`.

    `does` is one sentence; `destroys` are the kinds of structures that the pass is known to break; for a composite
    step, the kinds that any of its default passes breaks. `note` says why a pass never runs, or what to install.
    `options` are those that a recipe may give, name → default; a step that hands options on takes those of its library.
    """

    name: str
    source: str
    runs: Runs
    does: str
    reads: Reads
    groups: tuple[str, ...] = ()
    destroys: tuple[str, ...] = ()
    note: str = ""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def bare(self) -> str:
        """The name without the step that the pass runs in."""
        return self.name.rpartition("/")[2]

    @property
    def described(self) -> bool:
        return self.does != UNDESCRIBED.does


def catalog(context: PassContext, *, steps: Collection[str] | None = None) -> tuple[CatalogEntry, ...]:
    """All passes: the passes that a recipe names one by one, then each step with its inner passes as `STEP/NAME`.

    Args:
        context: where libraries are asked for their passes.
        steps: whose inner passes to list; None for all. Asking a library starts the worker and takes seconds.
    """
    defaults = set(default_passes())
    rows = [_single_entry(step, "default" if step in defaults else "extra") for step in single_passes()]
    for name, make in OWN_STEPS.items():
        step = make()
        rows += rows_of(step, context) if steps is None or name in steps else [_step_entry(step)]
    return (*rows, *_user_entries())


def rows_of(step: Step, context: PassContext) -> list[CatalogEntry]:
    """The entry of one step, and those of its inner passes. The step's entry says if its library is missing."""
    if not step.is_composite:
        try:
            if step.source != Step.source:  # a step of onnxline's own can only lack an option that has no default
                step.check(context)
        except PolicyError as error:
            return [replace(_step_entry(step), runs="missing", note=str(error))]
        return [_step_entry(step)]
    try:
        inner, extras = step.inner(context), step.extras(context)
    except PolicyError as error:
        return [replace(_step_entry(step), runs="missing", note=str(error))]
    rows = [_inner_entry(step, name, "default") for name in inner]
    destroys = tuple(dict.fromkeys(kind for row in rows if row.runs == "default" for kind in row.destroys))
    own = replace(_step_entry(step), destroys=destroys)
    return [own, *rows, *(_inner_entry(step, extra, "extra") for extra in extras if extra not in inner)]


def _user_entries() -> list[CatalogEntry]:
    """Entries of the user's passes that installed packages announce; no pass is loaded for this."""
    rows = []
    for name, point in installed_passes().items():
        source, does = point.dist.name if point.dist else "user", f"A pass of the user's own, {point.value}"
        rows.append(CatalogEntry(name, source, "extra", does, "values", groups_of(name)))
    return rows


def _single_entry(step: Step, runs: Runs) -> CatalogEntry:
    return _entry(step.name, step.source, runs, step.describes.get(step.name, UNDESCRIBED))


def _step_entry(step: Step) -> CatalogEntry:
    runs = "default" if step.name in (*TORCH_RECIPE, *CLEANING) else "extra"
    taken = {} if step.hands_on_options else {name: _unfreeze(getattr(step, name)) for name in options_of(type(step))}
    return replace(_entry(step.name, step.source, runs, step.description), options=taken)


def _unfreeze(default: Any) -> Any:
    """A default as a recipe writes it."""
    return dict(default) if isinstance(default, Mapping) else list(default) if isinstance(default, tuple) else default


def _inner_entry(step: Step, bare: str, runs: Runs) -> CatalogEntry:
    never = step.never_run.get(bare, "")
    name = f"{step.name}/{bare}"
    return _entry(name, step.source, "never" if never else runs, step.describes.get(bare, UNDESCRIBED), never)


def _entry(name: str, source: str, runs: Runs, words: Description, note: str = "") -> CatalogEntry:
    destroys = DESTROYS.get(name.rpartition("/")[2], ())
    return CatalogEntry(name, source, runs, words.does, words.reads, groups_of(name), destroys, note)


@dataclass(frozen=True, slots=True)
class Demo:
    """`before` and `after` are graphs as text. `why_not` says why they are missing, or why they are the same."""

    entry: CatalogEntry
    caption: str = ""
    before: str = ""
    after: str = ""
    left_behind: int = 0
    """Operators in `after` whose results nothing reads."""
    why_not: str = ""


def find_entries(name: str, rows: Sequence[CatalogEntry]) -> tuple[CatalogEntry, ...]:
    """The entries that `name` means: the entry with this full name, or else the entries with this name inside steps.

    Raises:
        PolicyError: no entry has this name; the message has the nearest name.
    """
    found = [row for row in rows if row.name == name] or [row for row in rows if row.bare == name]
    if found:
        return tuple(found)
    known = (*(row.name for row in rows), *(row.bare for row in rows))
    raise PolicyError(
        f"no pass named {name!r}{nearest(name, known)} (`onnxline passes` lists what this installation has)"
    )


def show(entry: CatalogEntry, rows: Sequence[CatalogEntry], context: PassContext) -> Demo:
    """Run the pass of `entry` alone on its example model; `rows` is the whole catalogue."""
    if entry.runs == "missing":
        return Demo(entry, why_not=entry.note)
    file = example_of(entry.name)
    if file is None:
        why = UNPICTURED.get(entry.bare)
        return Demo(entry, why_not=f"no picture: {why}" if why else "no picture in this release of onnxline")
    picture = read_example(file)
    before = graph_text(picture.model)
    model = open_model(picture.model)
    try:
        result = isolate_pass(entry, rows).apply(model, context).model
    except StepFailed as failure:
        return Demo(entry, picture.caption, before, why_not=f"on this model it failed: {failure}")
    if not fires(model, result):
        why = entry.note or "the installed release leaves this model as it is"
        return Demo(entry, picture.caption, before, why_not=why)
    graph = result.proto.graph
    dead = len(graph.node) - len(live_nodes(graph))
    return Demo(entry, picture.caption, before, graph_text(attach(result)), dead)


def fires(before: DetachedModel, after: DetachedModel) -> bool:
    """Whether a pass changed what the model computes."""
    return canonical_digest(before) != canonical_digest(after)


def isolate_pass(entry: CatalogEntry, rows: Sequence[CatalogEntry]) -> Step:
    """A step that runs only the pass of `entry`; a composite step leaves out every other pass in `rows`."""
    name, _, bare = entry.name.rpartition("/")
    if not name:
        (step,) = flatten(steps_of([bare]))
        return step
    step = OWN_STEPS[name]()
    if entry.runs == "extra":
        step = step.with_extra(bare)
    needed = {bare, *step.appliers(bare)}
    return step.without([row.bare for row in rows if row.name.startswith(f"{name}/") and row.bare not in needed])


GALLERY: Final = Path(__file__).parents[1] / "gallery"


@dataclass(frozen=True, slots=True)
class ExampleModel:
    """A model to run a pass on. `caption` is one sentence."""

    caption: str
    model: onnx.ModelProto


def example_of(name: str) -> Path | None:
    """The example file of the pass `name`, if any. `onnxsim.fuse_qkv`, with the step, takes precedence."""
    step, _, bare = name.rpartition("/")
    files = [GALLERY / f"{stem}.onnxtxt" for stem in ((f"{step}.{bare}", bare) if step else (bare,))]
    return next((file for file in files if file.is_file()), None)


def read_example(file: Path) -> ExampleModel:
    """Read one file of the gallery, draw its weights, floats from [-1, 1], and infer the type of every value."""
    text = file.read_text(encoding="utf-8")
    model = onnx.parser.parse_model(text)
    computed = computed_values(model.graph.node)
    declared = list(model.graph.value_info)
    del model.graph.value_info[:]
    model.graph.value_info.extend(info for info in declared if info.name in computed)
    model.graph.initializer.extend(_draw_weight(info) for info in declared if info.name not in computed)
    caption = text.partition("\n")[0].removeprefix("#").strip()
    return ExampleModel(caption, onnx.shape_inference.infer_shapes(model))


def _draw_weight(info: onnx.ValueInfoProto) -> onnx.TensorProto:
    tensor = info.type.tensor_type
    shape = [dim.dim_value for dim in tensor.shape.dim]
    dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type).name
    return numpy_helper.from_array(draw_array(info.name, shape, dtype, -1.0, 1.0), info.name)


UNPICTURED: Final[Mapping[str, str]] = {
    "nop": "it does nothing, on purpose",
    "take-weights": "it takes a file of weights",
    "merge": "it takes the file of another model",
    "lora-inputs": "it declares inputs, and leaves every operator as it is",
    "clamp-mask": "its bound comes from the scores on the draws of a run",
    "smooth-quant": "its factors come from the activations on the draws of a run",
    "awq": "its factors come from the activations on the draws of a run",
    "cross-layer-equalization": "its factors come from all numbers of two weights",
    "rotate": "it rotates a whole decoder",
    **dict.fromkeys(
        ("extract", "outputs", "rename", "fix-shapes", "change-batch"), "what it does follows from what it is asked for"
    ),
    **dict.fromkeys(
        ("to-fp16", "to-bf16", "to-float32"), "it computes in another type, within the tolerance of that type"
    ),
    "infer_shapes": "it writes types and shapes, and leaves every operator as it is",
    "shape_inference": "it writes types and shapes, and leaves every operator as it is",
    "set_unique_name_for_nodes": "it writes names, and leaves every operator as it is",
    "rename_input_output": "it renames the inputs and outputs of the model, and a run reverts what does that",
    "rewrite_input_dtype": "it changes what the model takes, and a run reverts what does that",
    "split_init": "it changes what the model computes, and a run reverts what does that",
    "split_predict": "it changes what the model computes, and a run reverts what does that",
    "rank0_to_rank1": "it changes the shape of an output, and a run reverts what does that",
    "lift_lexical_references": "what it makes is no ONNX model",
}
"""Bare name → why a pass has no example."""
