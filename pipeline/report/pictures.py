"""What `report.html` shows of the models, as data: structures as drawings, and the nodes of the final model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

__all__ = ["Box", "BoxKind", "Drawing", "NodeRow", "Pictures", "StructurePicture", "Wire"]


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
    """A value between two boxes, by their places in the drawing; `shape` is `1×197×768`, or empty if not known."""

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
