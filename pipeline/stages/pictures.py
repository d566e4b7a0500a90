"""Pictures of a pass run for `report.html`: each structure before and after, and after a reverted pass."""

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

__all__ = ["BrokenStructures", "take_pictures"]

MOST: Final = 400
"""Structures of one kind that are drawn."""

MOST_NODES: Final = 20_000
"""Most nodes of the table."""


@dataclass(slots=True)
class BrokenStructures:
    """Collects the first broken model of each structure, from steps that were reverted or failed, by `kind name`."""

    by_structure: dict[str, tuple[str, DetachedModel]] = field(default_factory=dict)

    def note(self, row: PassRow, after: AnalyzedModel) -> None:
        if row.status is not Status.RAN:
            for structure in row.lost:
                self.by_structure.setdefault(structure, (row.name, after.model))


def take_pictures(run: PassRun, source: DetachedModel, broken: BrokenStructures) -> Pictures:
    """Draw every structure of `run`, and list the nodes of the final model."""
    album = _Album(GraphView(source), GraphView(run.model), broken.by_structure)
    pictures = [album.picture(one) for kind in run.watched.instances.values() for one in kind[:MOST]]
    return Pictures(tuple(pictures), node_rows(album.final)[:MOST_NODES], value_types(album.final))


@dataclass(slots=True)
class _Album:
    """Draws structures of the source in the source, in the final model and in broken ones."""

    source: GraphView
    final: GraphView
    broken: Mapping[str, tuple[str, DetachedModel]]
    views: dict[int, GraphView] = field(default_factory=dict)
    descendants: dict[int, Descendants] = field(default_factory=dict)
    """By the id of a view in this album."""

    def picture(self, instance: Instance) -> StructurePicture:
        before = draw(subgraph_of(instance, self.source), self.source, instance)
        picture = StructurePicture(instance.kind, instance.name, before, self._later(instance, self.final))
        author, model = self.broken.get(f"{instance.kind} {instance.name}", ("", None))
        if model is None:
            return picture
        return replace(picture, broken=self._later(instance, self._view(model)), broken_by=author)

    def _view(self, model: DetachedModel) -> GraphView:
        """The view of a model, made once; it keeps the model alive, so that its id stays unique."""
        if id(model) not in self.views:
            self.views[id(model)] = GraphView(model)
        return self.views[id(model)]

    def _later(self, instance: Instance, view: GraphView) -> Drawing | None:
        """Draw the descendants of `instance` in a later model; None if it has none."""
        if id(view) not in self.descendants:
            self.descendants[id(view)] = Descendants(view.nodes)
        descendants = self.descendants[id(view)].of(subgraph_of(instance, self.source))
        return draw(nodes_between(descendants, view), view, instance) if descendants else None
