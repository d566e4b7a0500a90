"""What a viewer draws of a model: boxes for nodes, in the torch modules they come from, and values between them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from onnx import NodeProto, TensorProto, ValueInfoProto

from passes.graph.formatting import format_attribute, format_type
from passes.graph.index import GraphIndex, constant_of
from passes.graph.inference import types_of
from passes.graph.op_facts import op_name
from passes.graph.traversal import bodies_in, reads_of
from passes.matching.flat_graph import ABSENT
from passes.provenance.annotations import annotations_of, known_as, module_of
from passes.structures import STRUCTURES, structure_of
from passes.structures.subgraph import subgraph_of
from passes.structures.view import GraphView
from passes.weights.detached import DetachedModel

if TYPE_CHECKING:
    from passes.diff.model_matching import ModelMatching
    from passes.matching.flat_graph import Item

BINS: Final = 24
"""Bars of a histogram."""

MOST_ELEMENTS: Final = 2**16
"""Elements of a tensor that its histogram counts; a larger one is counted at equal distances."""

MOST_SEARCHED: Final = 20_000
"""Nodes of a model up to which structures are searched for."""

UNKNOWN: Final = re.compile(r"\bunk__\d+\b")
"""The name that inference gives to a dim of which it knows nothing, with another number each time."""

MOST_HISTOGRAMS: Final = 2_000
"""Stored tensors that get a histogram, the first ones."""


@dataclass(frozen=True, slots=True)
class Scene:
    """Data for the page. A box is a mapping with an operator, a name, a module and what its panel shows; an edge is
    [source, target, value, type] over the indices of boxes. `state` of a box says what a second model has of it."""

    boxes: list[dict[str, Any]]
    edges: list[tuple[int, int, str, str]]
    title: str = ""

    def as_data(self) -> dict[str, Any]:
        return {"boxes": self.boxes, "edges": self.edges, "title": self.title}


def scene_of(model: DetachedModel, title: str = "", *, errors: Mapping[str, float] | None = None) -> Scene:
    """The scene of one model.

    Args:
        model: the model to draw.
        title: the heading.
        errors: value → SQNR in dB, for the colour of the node that makes it.
    """
    whole = model.without_functions()
    index = whole.index
    types = {name: _shown_type(info) for name, info in types_of(whole.proto).items()}
    kinds = _structures_of(whole) if len(index.own) <= MOST_SEARCHED else {}
    bars = None if whole.unread() else _Histograms(whole)
    boxes: list[dict[str, Any]] = [
        {"op": "input", "name": name, "outs": [f"{name} {types.get(name, '')}"]} for name in index.required_inputs
    ]
    places = {name: place for place, name in enumerate(index.required_inputs)}
    edges: list[tuple[int, int, str, str]] = []
    for node in index.own:
        if constant_of(node) is not None:
            continue
        place = len(boxes)
        boxes.append(_box_of(node, index, types, bars))
        if kind := kinds.get(node.output[0]):
            boxes[-1]["kind"] = kind
        known = [errors[name] for name in node.output if errors and name in errors]
        if known:
            boxes[-1]["db"] = None if min(known) == math.inf else round(max(min(known), LEAST_RATIO), 1)
        edges += [
            (places[name], place, name, types.get(name, "")) for name in dict.fromkeys(reads_of(node)) if name in places
        ]
        places |= {name: place for name in node.output if name}
    for name in index.outputs:
        place = len(boxes)
        boxes.append({"op": "output", "name": name, "ins": [f"{name} {types.get(name, '')}"]})
        if name in places:
            edges.append((places[name], place, name, types.get(name, "")))
    whole.release()  # before the weights of another model are read
    return Scene(boxes, edges, title)


LEAST_RATIO: Final = -300.0
"""dB. Stands for -inf, which JSON has not: of other shapes, with a NaN on one side only, or wrong where 0 is right."""


def mark_difference(first: Scene, second: Scene, matched: ModelMatching) -> None:
    """Give each box of both scenes a `state`: `same` or `changed` in the other model, or `only` in this one.

    `was` of a changed input or output is the type that the other model declares; `was` of a changed constant is the
    constant that the other model stores.

    Args:
        first: the scene of `matched.before`.
        second: the scene of `matched.after`.
        matched: two models without functions of their own, as `scene_of` draws them.
    """
    matching = matched.nodes
    before, after = _by_output(first), _by_output(second)
    for box in (*first.boxes, *second.boxes):
        box["state"] = "only"
    for old, new in matched.pairs():
        item, old_item = matching.after.items[new], matching.before.items[old]
        names = [matching.after.names[value] for value in item.outputs if value != ABSENT]
        old_names = [matching.before.names[value] for value in old_item.outputs if value != ABSENT]
        boxes = [box for box in (*map(after.get, names[:1]), *map(before.get, old_names[:1])) if box is not None]
        state = "same" if item.op_digest == old_item.op_digest and _weights_of(matching, new, old) else "changed"
        for box, other in zip(boxes, reversed(boxes), strict=True):
            box["state"], box["twin"] = state, other["name"]
        if state == "changed" and len(boxes) == 2:
            _mark_weights(boxes[1], boxes[0], matched, old_item, item)
    _mark_ends("input", first, second, matched.inputs, lambda old, new: True)
    outputs, old_outputs = matching.after.outputs, matching.before.outputs

    def is_same(old: str, new: str) -> bool:
        return matched.is_same_value(old_outputs[old], outputs[new])

    _mark_ends("output", first, second, matched.outputs, is_same)


def _mark_ends(
    op: str, first: Scene, second: Scene, pairs: Mapping[str, str], is_same: Callable[[str, str], bool]
) -> None:
    """Mark the inputs or outputs of both scenes; `pairs` are name in the second model → name in the first."""
    olds, news = ({box["name"]: box for box in scene.boxes if box["op"] == op} for scene in (first, second))
    for new, old in pairs.items():
        box, old_box = news.get(new), olds.get(old)
        if box is None or old_box is None:  # an input that one of them has a default for
            continue
        types = [_type_of(side) for side in (old_box, box)]
        state = "same" if types[0] == types[1] and is_same(old, new) else "changed"
        for side, other in ((box, old_box), (old_box, box)):
            side["state"], side["twin"] = state, other["name"]
            if types[0] != types[1]:
                side["was"] = f"{other['name']} {_type_of(other)}"


def _shown_type(info: ValueInfoProto) -> str:
    return UNKNOWN.sub("?", format_type(info)).replace("[]", " of unknown rank")


def _type_of(end: Mapping[str, Any]) -> str:
    """The type that the box of an input or output shows."""
    return (end.get("outs") or end["ins"])[0].removeprefix(end["name"]).strip()


def _mark_weights(
    first: Mapping[str, Any], second: Mapping[str, Any], matched: ModelMatching, old_item: Item, item: Item
) -> None:
    """Mark the constants that differ between two matched nodes, or that only one of the two nodes reads."""
    before, after = matched.nodes.before, matched.nodes.after
    olds, news = ({weight["name"]: weight for weight in box.get("weights", ())} for box in (first, second))
    for old, new in zip_longest(old_item.inputs, item.inputs, fillvalue=ABSENT):
        old_weight = None if old == ABSENT else olds.get(before.names[old])
        weight = None if new == ABSENT else news.get(after.names[new])
        if old_weight and weight and before.value_digests[old] == after.value_digests[new]:
            continue
        for side, other in ((old_weight, weight), (weight, old_weight)):
            if side is not None:
                side["was"] = "" if other is None else f"{other['name']} {other['type']}"


def _weights_of(matching: Any, new: int, old: int) -> bool:
    """Whether both nodes read the same constants."""
    digests = []
    for graph, place in ((matching.after, new), (matching.before, old)):
        constants = (value for value in graph.items[place].inputs if value != ABSENT and value in graph.constants)
        digests.append(sorted(graph.value_digests[value] for value in constants))
    return digests[0] == digests[1]


def _by_output(scene: Scene) -> dict[str, dict[str, Any]]:
    return {box["makes"]: box for box in scene.boxes if "makes" in box}


def _structures_of(model: DetachedModel) -> dict[str, str]:
    """First output of a node → the kind of structure that it belongs to; the first kind that has it counts."""
    found: dict[str, str] = {}
    view = GraphView(model)
    for kind in STRUCTURES:
        structure = structure_of(kind)
        for instance in structure.finder(view).instances if structure is not None else ():
            for node in subgraph_of(instance, view):
                found.setdefault(node.output[0], kind)
    return found


def _box_of(node: NodeProto, index: GraphIndex, types: Mapping[str, str], bars: _Histograms | None) -> dict[str, Any]:
    marks = annotations_of(node)
    box: dict[str, Any] = {
        "op": op_name(node),
        "name": known_as(node),
        "makes": node.output[0],
        "module": module_of(node),
        "outs": [f"{name} {types.get(name, '')}".strip() for name in node.output if name],
        "ins": [f"{name} {types.get(name, '')}".strip() for name in node.input if name],
    }
    if node.attribute:
        shown = (attribute for attribute in node.attribute if not attribute.HasField("g"))
        box["attrs"] = [f"{attribute.name} = {format_attribute(attribute)}"[:MOST_TEXT] for attribute in shown]
    if bodies_in(node):
        box["bodies"] = [f"{len(body.node)} nodes" for body in bodies_in(node)]
    if marks.author:
        box["by"] = marks.author
    stored = {name: index.constants[name] for name in dict.fromkeys(node.input) if name in index.constants}
    if stored and bars is not None:
        counted = [bars.of(name, tensor) for name, tensor in stored.items()]
        box["weights"] = [dict(entry) for entry in counted if entry is not None]  # a second model marks each use
    return box


MOST_TEXT: Final = 200


class _Histograms:
    """Counts the elements of stored tensors."""

    def __init__(self, model: DetachedModel) -> None:
        self._model = model
        self._known: dict[str, dict[str, Any] | None] = {}

    def of(self, name: str, tensor: TensorProto) -> dict[str, Any] | None:
        if name not in self._known:
            self._known[name] = self._count(name, tensor) if len(self._known) < MOST_HISTOGRAMS else None
        return self._known[name]

    def _count(self, name: str, tensor: TensorProto) -> dict[str, Any] | None:
        array = self._model.array(tensor)
        shown: dict[str, Any] = {"name": name, "type": f"{array.dtype}{list(array.shape)}"}
        if array.dtype.kind in "SUOcb" or not array.size:  # the floats and integers of ml_dtypes are of kind V, or f
            return shown
        flat = array.reshape(-1)[:: max(1, array.size // MOST_ELEMENTS)].astype(np.float64)
        flat = flat[np.isfinite(flat)]
        if flat.size == 1:
            return {**shown, "value": float(flat[0])}
        if flat.size:
            counts, edges = np.histogram(flat, BINS)
            shown |= {"bars": counts.tolist(), "low": float(edges[0]), "high": float(edges[-1])}
        return shown
