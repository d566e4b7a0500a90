"""Pictures of a pass run for `report.html`: each structure before and after, and what a reverted pass made of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from passes.model.analysis import AnalyzedModel
from passes.provenance import Descendants
from passes.run.result import PassRow, PassRun, Status
from passes.structures import Instance
from passes.structures.subgraph import nodes_between, subgraph_of
from passes.structures.view import GraphView
from passes.weights.detached import DetachedModel
from pipeline.report import Drawing, Pictures, StructurePicture
from pipeline.report.subgraph import draw, node_rows, value_types

__all__ = ["Broken", "take_pictures"]

MOST: Final = 400
"""Structures of one kind that are drawn."""

MOST_NODES: Final = 20_000
"""Nodes that go into the table."""


@dataclass(slots=True)
class Broken:
    """Collects what steps that did not stand have made of structures: the first of each, by `kind name`."""

    by_structure: dict[str, tuple[str, DetachedModel]] = field(default_factory=dict)

    def note(self, row: PassRow, made: AnalyzedModel) -> None:
        if row.status is not Status.RAN:
            for structure in row.lost:
                self.by_structure.setdefault(structure, (row.name, made.model))


def take_pictures(run: PassRun, source: DetachedModel, broken: Broken) -> Pictures:
    """Draw every structure of `run`, and list the nodes of the final model."""
    album = _Album(GraphView(source), GraphView(run.model), broken.by_structure)
    pictures = [album.picture(one) for kind in run.watched.instances.values() for one in kind[:MOST]]
    return Pictures(tuple(pictures), node_rows(album.final)[:MOST_NODES], value_types(album.final))


@dataclass(slots=True)
class _Album:
    source: GraphView
    final: GraphView
    broken: Mapping[str, tuple[str, DetachedModel]]
    views: dict[int, GraphView] = field(default_factory=dict)
    heirs: dict[int, Descendants] = field(default_factory=dict)
    """By the id of a view in this album."""

    def picture(self, instance: Instance) -> StructurePicture:
        before = draw(subgraph_of(instance, self.source), self.source, instance)
        picture = StructurePicture(instance.kind, instance.name, before, self._later(instance, self.final))
        author, model = self.broken.get(f"{instance.kind} {instance.name}", ("", None))
        if model is None:
            return picture
        return replace(picture, broken=self._later(instance, self._view(model)), broken_by=author)

    def _view(self, model: DetachedModel) -> GraphView:
        """One for each model, which it holds, so that no other can have its id."""
        if id(model) not in self.views:
            self.views[id(model)] = GraphView(model)
        return self.views[id(model)]

    def _later(self, instance: Instance, view: GraphView) -> Drawing | None:
        """What stands for `instance` in a later model; None if nothing does."""
        if id(view) not in self.heirs:
            self.heirs[id(view)] = Descendants(view.nodes)
        heirs = self.heirs[id(view)].of(subgraph_of(instance, self.source))
        return draw(nodes_between(heirs, view), view, instance) if heirs else None
