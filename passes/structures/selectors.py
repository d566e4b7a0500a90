"""Find structures by name: nodes by op or name (`op:Softmax`, `node:layer0_*`), and torch modules.

The checkers ignore names: they look for nodes of the same op with the same weights, and for the values at which a
module begins and ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from onnx import NodeProto, TensorProto

from passes.graph.index import computed_values
from passes.graph.op_facts import PASSING_OPS
from passes.structures.candidates import Candidate, instances_of, pins_at
from passes.structures.types import Boundary, Crossing, Instance, PinSite, SearchResult
from passes.structures.view import GraphView, modules_of
from passes.suggest import ELLIPSIS, is_named, join_first, nearest

SHOWN: Final = 6
"""How many names of other nodes or modules a message lists."""


def find_nodes(view: GraphView, kind: str, pattern: str, label: Callable[[NodeProto], str]) -> SearchResult:
    """The nodes whose `label` matches the glob `pattern`, each as one structure."""
    chosen = [node for node in view.nodes if label(node) and is_named(label(node), pattern)]
    singles = (
        Candidate(node, (node,), (*node.input, *node.output), name=node.name or node.output[0]) for node in chosen
    )
    instances = instances_of(kind, singles, view)
    if instances:
        return SearchResult(instances)
    if chosen:
        return SearchResult((), f"{len(chosen)} of them, but all compute a constant, which may be folded")
    labels = Counter(name for node in view.nodes if (name := label(node)))
    counted = [f"{count} {name}" if count > 1 else name for name, count in labels.most_common()]
    others = join_first(counted, SHOWN, ELLIPSIS)
    return SearchResult((), f"{others}{nearest(pattern, labels)}" if labels else "nodes without names")


def name_of(node: NodeProto) -> str:
    """The name of a node; empty for none."""
    return node.name


def find_modules(view: GraphView, kind: str, pattern: str) -> SearchResult:
    """The torch modules whose path, in the exporter's metadata, matches the glob `pattern`.

    The values that cross a module's boundary are kept, so no fusion reaches across. Inside, and among layout ops,
    passes may work.
    """
    inside: dict[str, list[NodeProto]] = {}
    for node in view.nodes:
        for path in modules_of(node):
            inside.setdefault(path, []).append(node)
    instances = []
    for path, nodes in inside.items():
        boundary = _boundary_of(view, nodes) if is_named(path, pattern) else None
        if boundary is not None:
            instances.append(Instance(kind, path, path, (), _pin_sites(view, boundary), boundary=boundary))
    return SearchResult(tuple(instances), "" if instances else _other_modules(list(inside), pattern))


def _other_modules(paths: list[str], pattern: str) -> str:
    if not paths:
        return "no torch module paths (torch's exporter writes them with dynamo=True, as pkg.torch.onnx.name_scopes)"
    if any(is_named(path, pattern) for path in paths):
        return "such a module, but it computes nothing from data"
    listed = [path for path in paths if "." not in path] or paths
    return f"the modules {', '.join(listed[:SHOWN])}{' …' if len(paths) > SHOWN else ''}{nearest(pattern, paths)}"


def _boundary_of(view: GraphView, nodes: list[NodeProto]) -> Boundary | None:
    """The boundary of the part of the graph that `nodes` form; None if it computes only constants."""
    values = {*computed_values(nodes)}
    origins = {view.origin_of(name, PASSING_OPS) for node in nodes for name in node.input if name not in values}
    # Passes may merge layout ops across a boundary, so inputs are taken from before the layout.
    outputs = _crossings(view, computed_values(nodes), values, inwards=False)
    inputs = _crossings(view, sorted(origins - values), values, inwards=True)
    if not outputs:
        return None
    return Boundary(inputs, outputs)


def _crossings(view: GraphView, values: Iterable[str], inside: set[str], *, inwards: bool) -> tuple[Crossing, ...]:
    """Those of `values` that are data, can be pinned, and are read by a computing node on the other side."""
    crossings = []
    for name in values:
        node = view.producers.get(name)
        is_layout = node is not None and node.op_type in PASSING_OPS
        if name in view.folded or is_layout or view.dims(name) is None or _is_size(view, name):
            continue
        read_as = [read for read, is_inside in _reads(view, name, inside) if is_inside == inwards]
        if read_as:
            crossings.append(Crossing(name, tuple(dict.fromkeys(read_as))))
    return tuple(crossings)


def _reads(view: GraphView, name: str, inside: set[str]) -> Iterator[tuple[str, bool]]:
    """`name` after layout ops, in each form that a node reads, each with whether the consumer is inside the part."""
    if name in view.outputs:
        yield name, False
    for consumer in view.consumers.get(name, []):
        if consumer.op_type in PASSING_OPS and consumer.input[0] == name:
            yield from _reads(view, consumer.output[0], inside)
        else:
            yield name, not inside.isdisjoint(consumer.output)


def _pin_sites(view: GraphView, boundary: Boundary) -> tuple[PinSite, ...]:
    """For each value that crosses the boundary, where it is computed and, after layout ops, where it is read."""
    pairs = [(crossing.value, read) for crossing in (*boundary.inputs, *boundary.outputs) for read in crossing.read_as]
    known = [pair for pair in pairs if len(pins_at(pair, view)) == len(set(pair))]
    return tuple(PinSite(view.types[value], view.types[value], view.types[read]) for value, read in known)


def _is_size(view: GraphView, name: str) -> bool:
    """Whether a value is an integer of rank 0 or 1: a size or an index, which passes compute in other ways."""
    dims, info = view.dims(name), view.types.get(name)
    whole = info is not None and info.type.tensor_type.elem_type in (TensorProto.INT64, TensorProto.INT32)
    return whole and dims is not None and len(dims) < 2
