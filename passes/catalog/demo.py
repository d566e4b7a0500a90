"""Demonstrate one pass: its example model before and after, run by the installed library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx

from passes.catalog.example_model import UNPICTURED, example_of, read_example
from passes.catalog.listing import CatalogEntry
from passes.context import PassContext
from passes.errors import PolicyError, StepFailed
from passes.graph.formatting import graph_text
from passes.graph.traversal import live_nodes
from passes.model.canonical import canonical_digest
from passes.recipe.recipe import steps_of
from passes.recipe.steps import OWN_STEPS
from passes.step import Step, flatten
from passes.suggest import nearest
from passes.weights.detached import DetachedModel, attach, detach


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
    """The entries that `name` means: the one with this full name, or else those of this name inside steps.

    Raises:
        PolicyError: there is none, with the nearest name.
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
    model = detached_copy(picture.model)
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


def detached_copy(model: onnx.ModelProto) -> DetachedModel:
    """A detached copy, as the runner takes it; `model` is not changed."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return detach(copy)


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
