"""Carry metadata and names of nodes across a pass: match nodes, restore the survivors, annotate new ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Final

from onnx import ModelProto, NodeProto

from passes.graph.index import free_name
from passes.matching.flat_graph import ABSENT, DigestTable, FlatGraph, NodeMatching, flatten_graph
from passes.matching.match import match
from passes.matching.replacements import ReplacedNodes, find_replacements
from passes.model.analysis import AnalyzedModel
from passes.provenance.annotations import (
    ModulePath,
    annotations_of,
    common_module,
    join_annotations,
    module_path_of,
    write_annotations,
    write_module_path,
)
from passes.provenance.weight_origins import trace_weights
from passes.weights.detached import DetachedModel


class Carrier:
    """Carries metadata through the passes of one run; keeps the index of a model for the next pass."""

    def __init__(self) -> None:
        self._table: DigestTable = {}
        self._indices: list[tuple[ModelProto, FlatGraph]] = []

    def carry(self, before: AnalyzedModel, after: AnalyzedModel, author: str) -> None:
        """Like `passes.provenance.carry`. Changes the graph of `after`."""
        matching = match(self._index_of(before), self._index_of(after))
        replaced = find_replacements(matching)
        news = _mark_new(matching, author, replaced)
        trace_weights(matching, (before.model, after.model), author, replaced)
        survivors = [(new, old) for new, old in enumerate(matching.old_of) if old >= 0]
        for new, old in survivors:
            _give_back(matching, new, old)
            if _is_changed(matching, new, old):
                node = matching.after.items[new].node
                write_annotations(node, annotations_of(node).with_change_by(author))
                matching.after.carried.pop(new, None)
        named = [(matching.after.items[new].node, matching.before.items[old].node.name) for new, old in survivors]
        restore_names(named, [matching.after.items[new].node for new in sorted(news)])
        _carry_model(before.model, after.model)

    def _index_of(self, analyzed: AnalyzedModel) -> FlatGraph:
        """The index of a model, cached by identity."""
        found = next((index for proto, index in self._indices if proto is analyzed.model.proto), None)
        if found is None:
            found = flatten_graph(analyzed.model, analyzed.canonical, self._table)
            self._indices = [*self._indices, (analyzed.model.proto, found)][-REMEMBERED:]
        return found


def carry(before: DetachedModel, after: DetachedModel, author: str) -> DetachedModel:
    """Restore the metadata of the nodes that a pass left, and annotate the nodes that it made.

    A node that survived gets its metadata, its name and its doc string back, and is annotated as changed if the pass
    changed its attributes or constants. A new node is annotated with the pass and the nodes that it replaces. Its
    module path, in torch's own keys, is the innermost module that holds all replaced nodes; if the new node replaces
    none, the module that holds the nodes around it. A stored tensor that the pass made is annotated with the
    initializers of the source that it was made of.

    Args:
        before: the model before the pass.
        after: the result of the pass, whose proto is changed.
        author: the name of the pass.

    Returns:
        `after`.
    """
    Carrier().carry(AnalyzedModel(before), AnalyzedModel(after), author)
    return after


def _mark_new(matching: NodeMatching, author: str, found: Sequence[ReplacedNodes]) -> set[int]:
    """Annotate the nodes that the pass made, and return them."""
    root = _root(matching) if found else None
    for replacement in found:
        replaced = [matching.before.items[old].node for old in replacement.lost]
        around = [matching.before.items[old].node for old in replacement.around]
        inside, surrounding, marks = _common(replaced), _common(around), join_annotations(author, replaced)
        for node in (matching.after.items[new].node for new in replacement.news):
            # A tool may have copied the metadata of one replaced node; the module that holds all of them is surer.
            module = inside or _common([node]) or surrounding or root
            write_annotations(node, marks)
            if module is not None:
                write_module_path(node, module, author)
    return {new for replacement in found for new in replacement.news}


def _common(nodes: Iterable[NodeProto]) -> ModulePath | None:
    return common_module(module for module in map(module_path_of, nodes) if module is not None)


def _root(matching: NodeMatching) -> ModulePath | None:
    """The module path of the model itself; None if no node has one."""
    modules = (module_path_of(item.node) for item in matching.before.items)
    found = (module for module in modules if module is not None and module.paths)
    return next((ModulePath(module.paths[:1], module.classes[:1], ()) for module in found), None)


def _give_back(matching: NodeMatching, new: int, old: int) -> None:
    node, known = matching.after.items[new].node, matching.before.items[old].node
    if node.metadata_props or node.doc_string:
        has = {entry.key for entry in node.metadata_props}
        node.metadata_props.extend(entry for entry in known.metadata_props if entry.key not in has)
        if known.doc_string and not node.doc_string:
            node.doc_string = known.doc_string
        return
    carried = matching.before.carried.get(old)
    if carried is None:
        bare = NodeProto(metadata_props=known.metadata_props, doc_string=known.doc_string or None)
        carried = bare.SerializeToString()
    node.MergeFromString(carried)
    matching.after.carried[new] = carried


def _is_changed(matching: NodeMatching, new: int, old: int) -> bool:
    """Whether the pass changed the attributes, the number of inputs, or the constants of the node."""
    item, old_item = matching.after.items[new], matching.before.items[old]
    if item.digest == old_item.digest:
        return False
    pairs = zip_longest(item.inputs, old_item.inputs, fillvalue=ABSENT)
    return item.op_digest != old_item.op_digest or any(_is_other(matching, left, right) for left, right in pairs)


def _is_other(matching: NodeMatching, value: int, old_value: int) -> bool:
    if ABSENT in (value, old_value):
        return value != old_value
    if value not in matching.after.shapes or old_value not in matching.before.shapes:
        return False
    return matching.after.value_digests[value] != matching.before.value_digests[old_value]


def _carry_model(before: DetachedModel, after: DetachedModel) -> None:
    known = {entry.key for entry in after.proto.metadata_props}
    after.proto.metadata_props.extend(entry for entry in before.proto.metadata_props if entry.key not in known)
    if not after.proto.graph.quantization_annotation:
        after.proto.graph.quantization_annotation.extend(before.proto.graph.quantization_annotation)


REMEMBERED: Final = 4
"""Models whose index is kept: the current model, and the results of trying a step on it under each set of pins."""


def restore_names(survivors: Iterable[tuple[NodeProto, str]], made: Iterable[NodeProto]) -> None:
    """Rename nodes in place: survivors get their old names back, and new nodes make way for them.

    No name appears twice unless it did before. Nodes without a name stay so.

    Args:
        survivors: nodes of the new model, with their old names.
        made: the other nodes of the new model.
    """
    survivors, made = list(survivors), list(made)
    taken: set[str] = set()
    late = []
    for node, name in survivors:
        if name:
            node.name = name
            taken.add(name)
        else:
            late.append(node)
    for node in (*late, *made):
        if node.name:
            node.name = free_name(node.name, taken)
            taken.add(node.name)
