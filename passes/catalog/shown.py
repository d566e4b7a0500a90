"""One pass at work: its picture, before and after, run by the installed library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx

from passes.catalog.alone import alone
from passes.catalog.entry import Entry
from passes.catalog.picture import UNPICTURED, picture_of, read_picture
from passes.catalog.text import graph_text
from passes.context import PassContext
from passes.errors import PolicyError, StepFailed
from passes.model.canonical import canonical_digest
from passes.model.reads import live_nodes
from passes.model.weights import DetachedModel, attach, detach
from passes.suggest import nearest

__all__ = ["Shown", "find", "fires", "show"]


@dataclass(frozen=True, slots=True)
class Shown:
    """`before` and `after` are graphs as text. `why_not` says why they are missing, or why they are the same."""

    entry: Entry
    caption: str = ""
    before: str = ""
    after: str = ""
    left_behind: int = 0
    """Operators in `after` whose results nothing reads."""
    why_not: str = ""


def find(name: str, rows: Sequence[Entry]) -> tuple[Entry, ...]:
    """The rows that `name` means: the one of that name, or else those inside of steps.

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


def show(entry: Entry, rows: Sequence[Entry], bench: PassContext) -> Shown:
    """Run the pass of `entry` alone on its picture; `rows` is the whole catalogue."""
    if entry.runs == "missing":
        return Shown(entry, why_not=entry.note)
    file = picture_of(entry.name)
    if file is None:
        why = UNPICTURED.get(entry.bare)
        return Shown(entry, why_not=f"no picture: {why}" if why else "no picture in this release of onnxline")
    picture = read_picture(file)
    before = graph_text(picture.model)
    model = detached(picture.model)
    try:
        result = alone(entry, rows).apply(model, bench)
    except StepFailed as failure:
        return Shown(entry, picture.caption, before, why_not=f"on this model it failed: {failure}")
    if not fires(model, result):
        why = entry.note or "the installed release leaves this model as it is"
        return Shown(entry, picture.caption, before, why_not=why)
    graph = result.proto.graph
    dead = len(graph.node) - len(live_nodes(graph))
    return Shown(entry, picture.caption, before, graph_text(attach(result)), dead)


def detached(model: onnx.ModelProto) -> DetachedModel:
    """As the runner holds a model; `model` stays as it is."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return detach(copy)


def fires(before: DetachedModel, after: DetachedModel) -> bool:
    """Whether a pass changed something: what is computed, or what is read of it."""
    return canonical_digest(before) != canonical_digest(after)
