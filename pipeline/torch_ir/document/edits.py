"""Apply a user's edits of the view of an IR: merge them with its Graph into the data that `reader` reads.

The view shows less than the Graph has: no exact calls, bodies, module paths or lines, no devices, strides, updates or
further names of weights. Nodes and tensors that are still in the view keep these. A node is recognized as the object
that was handed out, even if renamed, or by its first output; a tensor by its name, or by its position if only the name
is new. An IR that was built by hand is a view of the empty Graph, and all of it is new.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from pipeline.ir import Graph, Op
from pipeline.ir.json import write_attr
from pipeline.torch_ir.calls import MASKS, SIZES, format_attrs, read_call
from pipeline.torch_ir.document.writing import facts, nodes
from pipeline.torch_ir.fields import Unexpected, as_expected, is_list, is_object, is_text
from pipeline.torch_ir.nodes import OpNode, Parts, TensorMeta, as_attr, as_torch
from pipeline.torch_ir.validation import a_type

Data = dict[str, Any]
Pair = tuple[Data, Data]
"""A tensor before the edits (empty if it is new), and after them."""
T = TypeVar("T")


def apply_edits(graph: Graph, name: str, view: Parts, handed: Sequence[tuple[OpNode, str]]) -> Data:
    """The document of `graph`, called `name`, with everything that a view shows taken from `view`.

    `handed` are the nodes that were handed out, each with the name of its op in `graph`.

    Raises:
        Unexpected: something in `view` is no node or no tensor; or a tensor was changed where it is read alone.
    """
    before = facts(graph)
    inputs = [*_tensors("graph_inputs", view.graph_inputs, before["graph_inputs"])]
    outputs = [*_tensors("graph_outputs", view.graph_outputs, before["graph_outputs"])]
    weights = [*_tensors("weights", view.weights, before["weights"])]
    found = [*_nodes(graph, view.nodes, handed)]
    made = [*inputs, *(pair for _, pairs in found for pair in pairs)]
    names, keys = _find_renames(made), _find_renames(weights)
    now = {
        "model_name": name,
        "graph_inputs": [one for _, one in inputs],
        "graph_outputs": [one for _, one in outputs],
        "weights": [one for _, one in weights],
        "weight_name_mapping": _names(view.weight_name_mapping),
        "updates": {names.get(one, one): names.get(after, after) for one, after in before.get("updates", {}).items()},
        "tied": {keys.get(key, key): others for key, others in before.get("tied", {}).items()},
        "nodes": [node for node, _ in found],
    }
    _refuse_lost(graph, now, made)
    return before | now


def _nodes(
    graph: Graph, view: Sequence[OpNode], handed: Sequence[tuple[OpNode, str]]
) -> Iterator[tuple[Data, list[Pair]]]:
    """Each node with its outputs."""
    were = list(zip(graph.ops, nodes(graph), strict=True))
    named = {op.name: (op, was) for op, was in were}
    known = {id(node): named[name] for node, name in handed if name in named}
    making = {was["outputs"][0]["name"]: (op, was) for op, was in were if was["outputs"]}
    for where, node in _each("nodes", view, OpNode):
        inputs = [one for _, one in _tensors(f"{where}.inputs", node.inputs, ())]
        first = next((one.name for _, one in _each(f"{where}.outputs", node.outputs, TensorMeta)), None)
        name = as_expected(node.name, f"{where}.name", "a string", is_text)
        op, was = known.get(id(node)) or making.get(first or "") or (None, {})
        outputs = [*_tensors(f"{where}.outputs", node.outputs, was.get("outputs", ()))]
        now: Data = {"name": name, "op_type": node.op_type, "inputs": inputs}
        now |= {"outputs": [one for _, one in outputs], "attrs": _attrs(node.attrs)}
        yield now | ({} if op is None else _keep_hidden(op, was, now)), outputs


def _attrs(given: Any) -> Any:
    """Attributes as the document has them; what is no mapping is left for the reader to refuse."""
    return {name: as_attr(item) for name, item in given.items()} if isinstance(given, Mapping) else given


def _keep_hidden(op: Op, was: Data, now: Data) -> Data:
    """The keys of `op` that the view does not show, as far as they still apply to the node `now`."""
    same = now["op_type"] == op.kind
    found = {key: was[key] for key in ("module_path", "line", *(["bodies"] if same else [])) if key in was}
    if same and "call" in was and isinstance(now["attrs"], dict) and (call := _call(op, now)) is not None:
        found["call"] = call
    return found


def _call(op: Op, now: Data) -> Data | None:
    """The exact call of `op` with the arguments that `now` changes; None where they cannot be combined."""
    attrs, shown = now["attrs"], {name: as_attr(item) for name, item in format_attrs(op, as_torch)}
    if len(now["inputs"]) != len(op.inputs) or any(attrs.get(key) != shown.get(key) for key in (SIZES, MASKS)):
        return None
    new = {name: item for name, item in attrs.items() if name not in shown or not is_identical(shown[name], item)}
    read = read_call(op.kind, len(op.inputs), {"attrs": new})
    kept = {name: item for name, item in op.attrs.items() if name not in shown or name in attrs}
    try:
        return {name: write_attr(item) for name, item in (kept | {name: read[name] for name in new}).items()}
    except KeyError:  # no such argument, or nothing that one can be: the reader says so of the attributes
        return None


def _tensors(where: str, view: Sequence[TensorMeta], before: Sequence[Data]) -> Iterator[Pair]:
    named = {was["name"]: was for was in before}
    for index, (place, meta) in enumerate(_each(where, view, TensorMeta)):
        now = _facts(place, meta)
        was = named.get(meta.name, {})
        if not was and len(view) == len(before) and _look(before[index]) == _look(now):
            was = before[index]
        hidden = ("device", "strides") if was.get("shape") == now["shape"] else ("device",)
        yield was, now | {key: was[key] for key in hidden if key in was}


def _facts(where: str, meta: TensorMeta) -> Data:
    name = as_expected(meta.name, f"{where}.name", "a string", is_text)
    shape = list(meta.shape) if isinstance(meta.shape, list | tuple) else meta.shape
    now: Data = {"name": name, "shape": shape, "dtype": meta.dtype}
    if meta.producer_node is None:
        return now
    return now | {"producer_node": meta.producer_node, "producer_output_idx": meta.producer_output_idx or 0}


def _names(given: Any) -> Mapping[str, str]:
    found = as_expected(given or {}, "weight_name_mapping", "an object", is_object)
    for name, key in found.items():
        as_expected(key, f"weight_name_mapping: {name}", "the name of a weight", is_text)
    return found


def _look(tensor: Data) -> tuple[Any, Any]:
    return tensor["shape"], tensor["dtype"]


def _find_renames(pairs: Iterable[Pair]) -> dict[str, str]:
    return {was["name"]: now["name"] for was, now in pairs if was}


def _refuse_lost(graph: Graph, now: Data, made: Sequence[Pair]) -> None:
    """Refuse another shape or dtype where a tensor is only read: the name alone decides, so the edit would be lost."""
    was = {value.name: (list(value.spec.shape), value.spec.dtype) for value in graph.values}
    keys = {key: name for name, key in now["weight_name_mapping"].items()}
    declared = {one["name"]: _look(one) for _, one in made}
    declared |= {keys.get(one["name"], one["name"]): _look(one) for one in now["weights"]}
    places = ((f"nodes[{index}].inputs", node["inputs"]) for index, node in enumerate(now["nodes"]))
    for where, tensors in (*places, ("graph_outputs", now["graph_outputs"])):
        for one in tensors:
            name, look = one["name"], _look(one)
            if name in was and look not in (was[name], declared.get(name)):
                expected = "{1}{0}".format(*declared.get(name, was[name]))
                raise Unexpected(f"{where}: {name!r}: found {look[1]}{look[0]}, expected {expected}, as it is made")


def _each(where: str, items: Any, kind: type[T]) -> Iterator[tuple[str, T]]:
    for index, item in enumerate(as_expected(items, where, "a list", is_list)):
        if not isinstance(item, kind):
            raise Unexpected(f"{where}[{index}]: found {a_type(item)}, expected one of type {kind.__name__}")
        yield f"{where}[{index}]", item


def is_identical(one: Any, other: Any) -> bool:
    """Whether two parts of a view are equal, types included: 1, 1.0 and True differ, and so do 0.0 and -0.0."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    match one:
        case TensorMeta():
            return one == other
        case OpNode() | Parts():
            return all(is_identical(getattr(one, name), getattr(other, name)) for name in one.__match_args__)
        case list() | tuple():
            return len(one) == len(other) and all(map(is_identical, one, other))
        case dict():
            return one.keys() == other.keys() and all(is_identical(item, other[key]) for key, item in one.items())
        case _:
            return repr(one) == repr(other)
