"""Carry metadata and names of nodes across a pass: match nodes, restore the survivors, annotate new ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest

from onnx import NodeProto

from passes.graph.index import free_name
from passes.matching.flat_graph import ABSENT, DigestTable, NodeMatching, flatten_graph
from passes.matching.match import match
from passes.matching.replacements import ReplacedNodes, find_replacements
from passes.model.canonical import CanonicalModel, canonicalize
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


def carry(
    before: DetachedModel,
    after: DetachedModel,
    author: str,
    canonical: tuple[CanonicalModel, CanonicalModel] | None = None,
) -> DetachedModel:
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
        canonical: their canonical forms, if they are known already.

    Returns:
        `after`.
    """
    first, second = canonical or (canonicalize(before), canonicalize(after))
    table: DigestTable = {}
    matching = match(flatten_graph(before, first, table), flatten_graph(after, second, table))
    replaced = find_replacements(matching)
    news = _mark_new(matching, author, replaced)
    trace_weights(matching, (before, after), author, replaced)
    survivors = [(new, old) for new, old in enumerate(matching.old_of) if old >= 0]
    for new, old in survivors:
        node = matching.after.items[new].node
        _give_back(node, matching.before.items[old].node)
        if _is_changed(matching, new, old):
            write_annotations(node, annotations_of(node).changed_by(author))
    named = [(matching.after.items[new].node, matching.before.items[old].node.name) for new, old in survivors]
    restore_names(named, [matching.after.items[new].node for new in sorted(news)])
    _carry_model(before, after)
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


def _give_back(node: NodeProto, known: NodeProto) -> None:
    if node.metadata_props or node.doc_string:
        has = {entry.key for entry in node.metadata_props}
        node.metadata_props.extend(entry for entry in known.metadata_props if entry.key not in has)
        if known.doc_string and not node.doc_string:
            node.doc_string = known.doc_string
        return
    carried = NodeProto(metadata_props=known.metadata_props, doc_string=known.doc_string or None)
    node.MergeFromString(carried.SerializeToString())  # quicker than entry by entry


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
