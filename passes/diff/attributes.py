"""What a node that is in both models says otherwise: its attributes, and how many outputs it makes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

from onnx import AttributeProto, NodeProto

from passes.diff.found import AttributeChange
from passes.diff.labels import label_of
from passes.diff.matched import Matched
from passes.graph.formatting import spelled_attribute
from passes.provenance.wiring import Item

__all__ = ["attribute_changes"]


def attribute_changes(matched: Matched, item: Item, old_item: Item) -> Iterator[AttributeChange]:
    """What `item` of the second model says otherwise than `old_item`, which it is."""
    if item.settings != old_item.settings:
        yield from _attribute_changes(matched, item, old_item)
    yield from _output_count(item, old_item)


def _attribute_changes(matched: Matched, item: Item, old_item: Item) -> Iterator[AttributeChange]:
    old, new = _attributes(old_item.node), _attributes(item.node)
    for name in dict.fromkeys((*old, *new)):
        if name in old and name in new and _is_same(matched, old[name], new[name]):
            continue
        before, after = (spelled_attribute(one[name]) if name in one else "" for one in (old, new))
        if before == after:  # too long to be written out
            before, after = (f"{before} #{_digest(one[name])}" for one in (old, new))
        yield AttributeChange(label_of(item.node), name, before, after)


def _digest(attribute: AttributeProto) -> str:
    return hashlib.blake2b(attribute.SerializeToString(deterministic=True), digest_size=3).hexdigest()


def _output_count(item: Item, old_item: Item) -> Iterator[AttributeChange]:
    """Optional outputs that a node makes or not; on them may depend what it computes, as of Split."""
    old, new = ([bool(name) for name in one.node.output] for one in (old_item, item))
    if old != new:
        yield AttributeChange(label_of(item.node), "outputs", str(sum(old)), str(sum(new)))


def _attributes(node: NodeProto) -> Mapping[str, AttributeProto]:
    return {attribute.name: attribute for attribute in node.attribute}


def _is_same(matched: Matched, old: AttributeProto, new: AttributeProto) -> bool:
    if old.type != new.type:
        return False
    if old.type in (AttributeProto.TENSOR, AttributeProto.TENSORS) and not old.ref_attr_name:
        told = [
            [(list(tensor.dims), tensor.data_type, model.digest(tensor)) for tensor in (one.tensors or [one.t])]
            for one, model in ((old, matched.before), (new, matched.after))
        ]
        return told[0] == told[1]
    if old.type in (AttributeProto.GRAPH, AttributeProto.GRAPHS):  # its nodes are among the others
        return len(old.graphs) == len(new.graphs)
    bare = []
    for one in (old, new):
        copy = AttributeProto()
        copy.CopyFrom(one)
        copy.ClearField("doc_string")
        bare.append(copy.SerializeToString(deterministic=True))
    return bare[0] == bare[1]
