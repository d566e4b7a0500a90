"""Demonstrate one pass: its example model before and after, run by the installed library.

The gallery holds tiny models in ONNX text, each of which shows the effect of a pass. A declared value that no node
computes is a weight. Its elements are drawn with its name as the seed, so files hold no weights; elements that matter
are written out. The comment in the first line is the caption.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import onnx
from onnx import numpy_helper

from passes.catalog.listing import CatalogEntry
from passes.context import PassContext
from passes.errors import PolicyError, StepFailed
from passes.graph.formatting import graph_text
from passes.graph.index import computed_values
from passes.graph.traversal import live_nodes
from passes.model.canonical import canonical_digest
from passes.proof.draws import draw_array
from passes.recipe.recipe import steps_of
from passes.recipe.steps import OWN_STEPS
from passes.step import Step, flatten
from passes.suggest import nearest
from passes.weights.detached import DetachedModel, attach, open_model


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
    """Whether a pass changed the meaning of the model."""
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


def read_example(file: Path, seed: str = "") -> ExampleModel:
    """Read one file of the gallery, draw its weights, and infer the type of every value.

    Another `seed` draws other weights. Floats are drawn from [-1, 1].
    """
    text = file.read_text(encoding="utf-8")
    model = onnx.parser.parse_model(text)
    computed = computed_values(model.graph.node)
    declared = list(model.graph.value_info)
    del model.graph.value_info[:]
    model.graph.value_info.extend(info for info in declared if info.name in computed)
    model.graph.initializer.extend(_draw_weight(info, seed) for info in declared if info.name not in computed)
    caption = text.partition("\n")[0].removeprefix("#").strip()
    return ExampleModel(caption, onnx.shape_inference.infer_shapes(model))


def _draw_weight(info: onnx.ValueInfoProto, seed: str) -> onnx.TensorProto:
    tensor = info.type.tensor_type
    shape = [dim.dim_value for dim in tensor.shape.dim]
    dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type).name
    return numpy_helper.from_array(draw_array(f"{seed}{info.name}", shape, dtype, -1.0, 1.0), info.name)


UNPICTURED: Final[Mapping[str, str]] = {
    "nop": "it does nothing, on purpose",
    "clamp-mask": "its bound comes from the scores on the draws of a run",
    "smooth-quant": "its factors come from the activations on the draws of a run",
    "rotate": "it rotates a whole decoder",
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
