"""The pictures of a run's page: each structure before and after the passes, and after a step that was reverted; and the
nodes of the final model as rows of a table.

A drawing shows what nodes are, which weights they read, and what flows between them.
"""

from __future__ import annotations

import json
import zlib
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from onnx import NodeProto, TensorProto

from passes.diff import ModelMatching
from passes.graph.index import computed_values
from passes.graph.op_facts import op_name
from passes.model.analysis import AnalyzedModel
from passes.provenance import Descendants, annotations_of, known_as, module_path_of
from passes.run.result import PassRow, PassRun, Status
from passes.structures import Instance
from passes.structures.subgraph import is_data, nodes_between, subgraph_of
from passes.structures.view import GraphView
from passes.viewer import view_data
from passes.weights.detached import DetachedModel
from pipeline.report import Box, BoxKind, Drawing, NodeRow, Pictures, StructurePicture, Wire

MOST_VIEWED: Final = 5_000
"""Nodes of a model up to which the page has the graph viewer; `onnxline view` draws larger ones."""

MOST_DRAWN: Final = 400
"""Structures of one kind that are drawn."""

MOST_ROWS: Final = 20_000
"""Most nodes of the table."""


@dataclass(slots=True)
class BrokenStructures:
    """Collects the first broken model of each structure, from steps that were reverted or failed, by `kind name`."""

    by_structure: dict[str, tuple[str, DetachedModel]] = field(default_factory=dict)

    def note(self, row: PassRow, after: AnalyzedModel) -> None:
        """Keep `after`, the result of the step of `row`, for the structures that it lost and that had no model yet."""
        if row.status is not Status.RAN:
            for structure in row.lost:
                self.by_structure.setdefault(structure, (row.name, after.model))


def take_pictures(
    run: PassRun, source: DetachedModel, broken: BrokenStructures, matched: ModelMatching | None = None
) -> Pictures:
    """Draw every structure of `run`, and list the nodes of the final model.

    Args:
        run: the run of the passes.
        source: the model before them.
        broken: the models in which steps that were not taken lost a structure.
        matched: models that are matched already, these two or others.
    """
    album = _Album(GraphView(source), GraphView(run.model), broken.by_structure)
    pictures = [
        album.draw_structure(instance) for kind in run.watched.instances.values() for instance in kind[:MOST_DRAWN]
    ]
    sizes = [len(model.proto.graph.node) for model in (source, run.model)]
    view = _pack_view(source, run.model, matched) if max(sizes) <= MOST_VIEWED else ""
    return Pictures(tuple(pictures), node_rows(album.final)[:MOST_ROWS], value_types(album.final), view)


def _pack_view(source: DetachedModel, final: DetachedModel, matched: ModelMatching | None) -> str:
    """What the graph viewer draws of two models, packed for the page."""
    data = view_data(source, final, titles=("before the passes", "after the passes"), matched=matched)
    return b64encode(zlib.compress(json.dumps(data).encode())).decode()


@dataclass(slots=True)
class _Album:
    """Draws structures of the source in the source, in the final model and in broken ones."""

    source: GraphView
    final: GraphView
    broken: Mapping[str, tuple[str, DetachedModel]]
    views: dict[int, GraphView] = field(default_factory=dict)
    descendants: dict[int, Descendants] = field(default_factory=dict)
    """By the id of a view in this album."""

    def draw_structure(self, instance: Instance) -> StructurePicture:
        before = draw(subgraph_of(instance, self.source), self.source, instance)
        picture = StructurePicture(instance.kind, instance.name, before, self._draw_later(instance, self.final))
        author, model = self.broken.get(f"{instance.kind} {instance.name}", ("", None))
        if model is None:
            return picture
        return replace(picture, broken=self._draw_later(instance, self._view_of(model)), broken_by=author)

    def _view_of(self, model: DetachedModel) -> GraphView:
        """The view of a model, made once; it keeps the model alive, so that its id stays unique."""
        if id(model) not in self.views:
            self.views[id(model)] = GraphView(model)
        return self.views[id(model)]

    def _draw_later(self, instance: Instance, view: GraphView) -> Drawing | None:
        """Draw the descendants of `instance` in a later model; None if it has none."""
        if id(view) not in self.descendants:
            self.descendants[id(view)] = Descendants(view.nodes)
        descendants = self.descendants[id(view)].of(subgraph_of(instance, self.source))
        return draw(nodes_between(descendants, view), view, instance) if descendants else None


MOST_NODES: Final = 32
"""The most nodes of one drawing; larger ones cannot be read."""

WHOLE_NUMBERS: Final = frozenset({TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL})


def draw(nodes: Sequence[NodeProto], view: GraphView, instance: Instance) -> Drawing:
    """Draw `nodes`, which are some of `view`'s; a node that reads a kept weight of `instance` bears its role."""
    shown = nodes[:MOST_NODES]
    sketch = _Sketch(shown, view, {digest: weight.role for weight in instance.weights for digest in weight.digests})
    return Drawing(tuple(sketch.boxes), tuple(dict.fromkeys(sketch.wires)), len(nodes) - len(shown))


def shape_text(view: GraphView, name: str) -> str:
    """`1×197×768`; `?` is an unnamed dim; empty if nothing is known, `scalar` for rank 0."""
    dims = view.dims(name)
    return "" if dims is None else "×".join(map(_dim_text, dims)) or "scalar"


def _dim_text(dim: int | str) -> str:
    """ONNX's inference names what it does not know `unk__7`, with another number each time."""
    return "?" if str(dim).startswith("unk__") else str(dim) or "?"


class _Sketch:
    """Boxes and wires, as they grow."""

    def __init__(self, nodes: Sequence[NodeProto], view: GraphView, roles: dict[str, str]) -> None:
        self.boxes: list[Box] = []
        self.wires: list[Wire] = []
        self._view, self._roles = view, roles
        self._sources: dict[str, int] = {}
        """Value → the box that it comes from."""
        for node in nodes:
            self._add_node(node)
        self._add_readers(nodes)

    def _add_node(self, node: NodeProto) -> None:
        data = [name for name in dict.fromkeys(node.input) if name and name not in self._view.folded]
        starts = [(name, self._source(name)) for name in data]
        place = self._add(self._make_box(node))
        self.wires += [Wire(start, place, shape_text(self._view, name)) for name, start in starts]
        self._sources |= {name: place for name in node.output if name}

    def _source(self, name: str) -> int:
        if name not in self._sources:
            self._sources[name] = self._add(Box(BoxKind.INPUT, name, shape_text(self._view, name), name=name))
        return self._sources[name]

    def _add(self, box: Box) -> int:
        self.boxes.append(box)
        return len(self.boxes) - 1

    def _make_box(self, node: NodeProto) -> Box:
        weights = [tensor for tensor in map(self._find_weight, node.input) if tensor is not None]
        roles = (self._roles.get(self._view.model.digest(tensor), "") for tensor in weights)
        shapes = ", ".join(dict.fromkeys(filter(None, map(self._weight_shape, node.input))))
        detail = shapes or (self._describe_result(node) if node.op_type in LAYOUT else "")
        role = next(filter(None, roles), "")
        return Box(BoxKind.NODE, op_name(node), detail, role, annotations_of(node).author, known_as(node))

    def _describe_result(self, node: NodeProto) -> str:
        """`→ 1×197×768`, or `→ 3 × 1×197×768` of a Split into as many."""
        count = sum(map(bool, node.output))
        return f"→ {f'{count} × ' if count > 1 else ''}{shape_text(self._view, node.output[0])}"

    def _weight_shape(self, name: str) -> str:
        """As the node reads it, which may be another layout than the stored one."""
        tensor = self._find_weight(name)
        return "" if tensor is None else shape_text(self._view, name) or "×".join(map(str, tensor.dims))

    def _find_weight(self, name: str) -> TensorProto | None:
        """The tensor of an input that is constant and no size or place."""
        if not name or name not in self._view.folded:
            return None
        tensor = self._view.find_weight(name)
        return None if tensor is None or tensor.data_type in WHOLE_NUMBERS or not tensor.dims else tensor

    def _add_readers(self, nodes: Sequence[NodeProto]) -> None:
        """An output box for each value that is read outside of the drawing."""
        inside = computed_values(nodes).keys()
        ends = {info.name for info in self._view.model.proto.graph.output}
        for node in nodes:
            for name in filter(None, node.output):
                everyone = self._view.consumers.get(name, [])
                consumers = [
                    node for node in everyone if inside.isdisjoint(node.output) and self._reads_data(node, name)
                ]
                label = _consumer_label(consumers, name in ends)
                if label:
                    end = self._add(Box(BoxKind.OUTPUT, label, shape_text(self._view, name), name=name))
                    self.wires.append(Wire(self._sources[name], end, shape_text(self._view, name)))

    def _reads_data(self, node: NodeProto, name: str) -> bool:
        """Whether `node` reads the elements of the value `name`, and not only its type or shape."""
        if node.op_type in ("Shape", "Size") or not is_data(node, self._view):
            return False
        return node.op_type != "CastLike" or node.input[0] == name


def _consumer_label(consumers: Sequence[NodeProto], is_output: bool) -> str:
    labels = [*(["output"] if is_output else []), *map(op_name, consumers)]
    ops: list[str] = list(dict.fromkeys(labels))
    return ", ".join(ops[:2]) + (" …" if len(ops) > 2 else "")


LAYOUT: Final = frozenset(
    {"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Expand", "Slice", "Split", "Concat", "Gather", "Tile"}
)
"""Operators that a drawing describes by the shape of their result."""


def node_rows(view: GraphView) -> tuple[NodeRow, ...]:
    """One row a node, in graph order; those in the bodies of If, Loop and Scan are not among them."""
    return tuple(_row(node, view) for node in view.nodes)


def _row(node: NodeProto, view: GraphView) -> NodeRow:
    shapes = tuple(_value_text(view, name) for name in node.output if name)
    path = module_path_of(node)
    module = None if path is None else path.paths[-1] if path.paths else ""
    inputs, outputs = tuple(filter(None, node.input)), tuple(filter(None, node.output))
    return NodeRow(known_as(node), op_name(node), shapes, module, annotations_of(node).author, inputs, outputs)


def value_types(view: GraphView) -> dict[str, str]:
    """dtype and shape of the values that nodes read and none computes."""
    computed = view.producers
    names = dict.fromkeys(name for node in view.nodes for name in node.input if name and name not in computed)
    stored = view.initializers
    return {name: _tensor_text(stored[name]) if name in stored else _value_text(view, name) for name in names}


def _tensor_text(tensor: TensorProto) -> str:
    dtype = TensorProto.DataType.Name(tensor.data_type).lower()
    return f"{dtype} {'×'.join(map(str, tensor.dims)) or 'scalar'}"


def _value_text(view: GraphView, name: str) -> str:
    """`float 1×197×768`."""
    info = view.types.get(name)
    dtype = info.type.tensor_type.elem_type if info is not None else 0
    words = [TensorProto.DataType.Name(dtype).lower() if dtype else "", shape_text(view, name)]
    return " ".join(filter(None, words)) or "?"
