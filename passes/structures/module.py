"""`module:encoder.layer.3.*`: a torch module, by the paths that the exporter wrote down. Its boundary is kept."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from onnx import NodeProto, TensorProto, ValueInfoProto

from passes.structures.base import Boundary, Crossing, Found, Instance
from passes.structures.boundary_check import lost_boundaries, sources_of
from passes.structures.sketch import pins_at
from passes.structures.view import GraphView, modules_of
from passes.suggest import nearest
from passes.weights.detached import DetachedModel

__all__ = ["Modules"]

LAYOUT: Final = frozenset(
    {"Identity", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Cast", "CastLike", "Dropout"}
)

SHOWN: Final = 6


@dataclass(frozen=True, slots=True)
class Modules:
    """The torch modules whose path matches the glob `pattern`: what crosses a module's boundary stays a value, so no
    fusion reaches across. Inside, and among mere layout, passes may work."""

    kind: str
    pattern: str

    @property
    def what(self) -> str:
        return f"modules that match {self.kind}"

    def find(self, model: DetachedModel) -> Found:
        return self.search(GraphView(model))

    def search(self, view: GraphView) -> Found:
        inside: dict[str, list[NodeProto]] = {}
        for node in view.nodes:
            for path in modules_of(node):
                inside.setdefault(path, []).append(node)
        instances = []
        for path, nodes in inside.items():
            boundary = _boundary(view, nodes) if fnmatch.fnmatchcase(path, self.pattern) else None
            if boundary is not None:
                pins, loose = _pins(view, boundary)
                instances.append(Instance(self.kind, path, path, (), pins, loose, boundary=boundary))
        return Found(tuple(instances), "" if instances else self._instead(list(inside)))

    def lost(self, instances: Sequence[Instance], model: DetachedModel) -> dict[str, str]:
        return {name: why for (_, name), why in lost_boundaries(instances, model).items()}

    def _instead(self, paths: list[str]) -> str:
        if not paths:
            return (
                "no torch module paths (torch's exporter writes them with dynamo=True, as pkg.torch.onnx.name_scopes)"
            )
        if any(fnmatch.fnmatchcase(path, self.pattern) for path in paths):
            return "such a module, but it computes nothing from data"
        near = nearest(self.pattern, paths)
        shown = [path for path in paths if "." not in path] or paths
        return f"the modules {', '.join(shown[:SHOWN])}{' …' if len(paths) > SHOWN else ''}{near}"


def _boundary(view: GraphView, nodes: list[NodeProto]) -> Boundary | None:
    """Where the part of the graph that `nodes` are begins and ends; None if it computes nothing but constants."""
    made = {name for node in nodes for name in node.output}
    origins = {_origin(view, name) for node in nodes for name in node.input if name not in made}
    outputs = _crossings(view, (name for node in nodes for name in node.output), made, inwards=False)
    inputs = _crossings(view, sorted(origins - made), made, inwards=True)
    if not outputs:
        return None
    return Boundary(inputs, outputs, frozenset(sources_of(outputs, inputs, view.model)))


def _crossings(view: GraphView, values: Iterable[str], made: set[str], *, inwards: bool) -> tuple[Crossing, ...]:
    """Those of `values` that are data, can be pinned, and are read on the other side, by a node that computes."""
    crossings = []
    for name in values:
        node = view.producers.get(name)
        is_layout = node is not None and node.op_type in LAYOUT
        if name in view.folded or is_layout or view.dims(name) is None or _is_size(view, name):
            continue
        read_as = [read for read, is_inside in _reads(view, name, made) if is_inside == inwards]
        if read_as:
            crossings.append(Crossing(name, tuple(dict.fromkeys(read_as))))
    return tuple(crossings)


def _reads(view: GraphView, name: str, made: set[str]) -> Iterator[tuple[str, bool]]:
    """The values as which `name` is read behind layout, each with whether a node that `made` the part reads it."""
    if any(name == info.name for info in view.model.proto.graph.output):
        yield name, False
    for reader in view.consumers.get(name, []):
        if reader.op_type in LAYOUT and reader.input[0] == name:
            yield from _reads(view, reader.output[0], made)
        else:
            yield name, not made.isdisjoint(reader.output)


def _pins(view: GraphView, boundary: Boundary) -> tuple[tuple[ValueInfoProto, ...], tuple[ValueInfoProto, ...]]:
    """What to hold visible: each value as it is computed or, once that is gone, as it is read."""
    pairs = [(one.value, read) for one in (*boundary.inputs, *boundary.outputs) for read in one.read_as]
    known = [pair for pair in pairs if len(pins_at(pair, view)) == len(set(pair))]
    return tuple(view.types[value] for value, _ in known), tuple(view.types[read] for _, read in known)


def _origin(view: GraphView, name: str) -> str:
    """`name` before it was rearranged: passes may merge layout across a boundary."""
    node = view.producers.get(name)
    while node is not None and node.op_type in LAYOUT and node.output[0] == name:
        name = node.input[0]
        node = view.producers.get(name)
    return name


def _is_size(view: GraphView, name: str) -> bool:
    """Whole numbers of rank 0 or 1 are sizes and places, which passes compute in other ways."""
    dims, info = view.dims(name), view.types.get(name)
    whole = info is not None and info.type.tensor_type.elem_type in (TensorProto.INT64, TensorProto.INT32)
    return whole and dims is not None and len(dims) < 2
