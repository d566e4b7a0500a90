"""Compare two models by structure: node by node, and as a whole (opsets, inputs, outputs, functions, names)."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Final

from onnx import AttributeProto, ModelProto, NodeProto, ValueInfoProto

from passes.diff.initializers import Stored, initializer_changes
from passes.diff.model_matching import ModelMatching, match_models
from passes.diff.quantizations import find_quantizations, find_requantizations
from passes.diff.types import AttributeChange, Diff, HeaderChange, InputChange, Renaming, Replacement, label_of
from passes.graph.formatting import format_attribute, format_type
from passes.graph.index import GraphIndex, copy_of
from passes.matching.flat_graph import ABSENT, FlatGraph, Item
from passes.model.canonical import CanonicalModel, function_digests
from passes.weights.detached import OpenableModel, open_model


def compare_models(
    before: OpenableModel, after: OpenableModel, canonical: tuple[CanonicalModel, CanonicalModel] | None = None
) -> Diff:
    """Compare two models: nodes, attributes, edges and stored tensors.

    Nodes are matched by what they compute, so other names, another order of independent nodes and other metadata are no
    difference. Nor is a node that computes something else only because its inputs do.

    Args:
        before: a model, its path, or a result that has it, such as a PassRun.
        after: the model that is compared with it.
        canonical: their canonical forms, if they are known already.

    Returns:
        A Diff, the differences of `after` from `before`; `diff_text` writes it out.

    Raises:
        ModelError: one of them is no model, or cannot be read.

    Example:
        >>> import onnxline
        >>> onnxline.diff("model.onnx", "model.onnx").is_empty
        True
    """
    return compare_matched(match_models(open_model(before), open_model(after), canonical))


def compare_matched(matched: ModelMatching) -> Diff:
    """Like `compare_models`, for models that have been matched."""
    attributes, rewired = [], []
    stored: list[Stored] = []
    for old, new in matched.pairs():
        item, old_item = matched.nodes.after.items[new], matched.nodes.before.items[old]
        attributes.extend(attribute_changes(matched, item, old_item))
        inputs, tensors = input_changes(matched, item, old_item)
        rewired.extend(inputs)
        stored.extend(tensors)
    header = header_changes(matched.before.proto, matched.after.proto)
    quantized = find_quantizations(matched, stored)
    requantized = find_requantizations(matched)
    changes = initializer_changes(matched, stored)
    diff = Diff(
        replaced=tuple(_replacements(matched, stored, requantized.removed, quantized.nodes | requantized.added)),
        attributes=tuple(change for change in attributes if not requantized.explains_attribute(change)),
        rewired=tuple(rewired),
        initializers=tuple(
            change for change in changes if not quantized.explains(change) and not requantized.explains(change)
        ),
        quantized=quantized.found,
        requantized=requantized.found,
        header=(*header, *function_changes(matched), *output_changes(matched)),
        renamed=tuple(dict.fromkeys(renamings(matched))),
    )
    return diff if not diff.is_empty else replace(diff, shared=tuple(sharing_changes(matched)))


def _replacements(
    matched: ModelMatching, stored: Sequence[Stored], dequantized: Collection[int], quantizing: Collection[int]
) -> Iterator[Replacement]:
    """The nodes without a counterpart, except old nodes that are `dequantized`, and new nodes that are `quantizing`."""
    before, after = matched.nodes.before, matched.nodes.after
    names: dict[int, dict[str, None]] = {}
    """Node that computed a constant → the initializers that hold it now."""
    for old, new in stored:
        if old not in before.tensors and new in after.tensors:
            names.setdefault(before.producers[old], {})[after.names[new]] = None
    for all_olds, news in matched.groups:
        olds = [old for old in all_olds if old not in dequantized]
        others = [new for new in news if new not in quantizing]
        if olds or others:
            yield Replacement(
                tuple(label_of(before.items[old].node) for old in olds),
                tuple(label_of(after.items[new].node) for new in others),
                tuple(name for old in olds for name in names.get(old, ())),
            )


def attribute_changes(matched: ModelMatching, item: Item, old_item: Item) -> Iterator[AttributeChange]:
    """The attributes and outputs in which `item` of the second model differs from its counterpart `old_item`."""
    if item.op_digest != old_item.op_digest:
        yield from _attribute_changes(matched, item, old_item)
    yield from _output_count(item, old_item)


def _attribute_changes(matched: ModelMatching, item: Item, old_item: Item) -> Iterator[AttributeChange]:
    old, new = _attributes(old_item.node), _attributes(item.node)
    for name in dict.fromkeys((*old, *new)):
        if name in old and name in new and _is_same(matched, old[name], new[name]):
            continue
        before, after = (format_attribute(attributes[name]) if name in attributes else "" for attributes in (old, new))
        if before == after:  # too long to be written out
            before, after = (f"{before} #{_digest(attributes[name])}" for attributes in (old, new))
        yield AttributeChange(label_of(item.node), name, before, after)


def _digest(attribute: AttributeProto) -> str:
    return hashlib.blake2b(attribute.SerializeToString(deterministic=True), digest_size=3).hexdigest()


def _output_count(item: Item, old_item: Item) -> Iterator[AttributeChange]:
    """A change in the optional outputs of a node, which may change what it computes, as for Split."""
    old, new = ([bool(name) for name in side.node.output] for side in (old_item, item))
    if old != new:
        yield AttributeChange(label_of(item.node), "outputs", str(sum(old)), str(sum(new)))


def _attributes(node: NodeProto) -> Mapping[str, AttributeProto]:
    return {attribute.name: attribute for attribute in node.attribute}


def _is_same(matched: ModelMatching, old: AttributeProto, new: AttributeProto) -> bool:
    if old.type != new.type:
        return False
    if old.type in (AttributeProto.TENSOR, AttributeProto.TENSORS) and not old.ref_attr_name:
        contents = [
            [
                (list(tensor.dims), tensor.data_type, model.digest(tensor))
                for tensor in (attribute.tensors or [attribute.t])
            ]
            for attribute, model in ((old, matched.before), (new, matched.after))
        ]
        return contents[0] == contents[1]
    if old.type in (AttributeProto.GRAPH, AttributeProto.GRAPHS):  # the nodes of the body are compared like all others
        return len(old.graphs) == len(new.graphs)
    bare = []
    for attribute in (old, new):
        copy = copy_of(attribute)
        copy.ClearField("doc_string")
        bare.append(copy.SerializeToString(deterministic=True))
    return bare[0] == bare[1]


def input_changes(matched: ModelMatching, item: Item, old_item: Item) -> tuple[list[InputChange], list[Stored]]:
    """The inputs at which a node reads another value; and pairs of ids of stored tensors whose content differs, or of
    constants that one model stores and the other computes."""
    matching = matched.nodes
    rewired, stored = [], []
    for position, (old, new) in enumerate(zip_longest(old_item.inputs, item.inputs, fillvalue=ABSENT)):
        if old in matching.before.shapes and new in matching.after.shapes:
            digest, old_digest = matching.after.value_digests[new], matching.before.value_digests[old]
            if digest == old_digest:
                continue
            if digest not in matched.old_digests or matching.after.names[new] == matching.before.names[old]:
                stored.append((old, new))
                continue
        elif _is_stored_and_computed(matched, old, new):
            stored.append((old, new))
            continue
        elif (new != ABSENT and old != ABSENT and matched.is_same_value(old, new)) or new == old == ABSENT:
            continue
        before, after = _name(matching.before, old), _name(matching.after, new)
        inner = position - max(len(item.node.input), len(old_item.node.input))
        what = f"input {position}" if inner < 0 else f"result {inner} of its bodies"
        rewired.append(InputChange(label_of(item.node), position, before, after, what))
    return rewired, stored


def _is_stored_and_computed(matched: ModelMatching, old: int, new: int) -> bool:
    """Whether one of two constants is stored, and a node that has no counterpart computes the other."""
    matching = matched.nodes
    if ABSENT in (old, new) or (old in matching.before.shapes) == (new in matching.after.shapes):
        return False
    if new in matching.after.shapes:
        return old in matching.before.constants and matching.is_lost(matching.before.producers[old])
    return new in matching.after.constants and matching.old_of[matching.after.producers[new]] < 0


def _name(flat: FlatGraph, value: int) -> str:
    """The name of a value; of an input of a body or a function with the name of that, since callers may have another
    value of this name."""
    if value == ABSENT:
        return ""
    return flat.names[value] + (f" of {flat.formals[value]}" if value in flat.formals else "")


def function_changes(matched: ModelMatching) -> Iterator[HeaderChange]:
    """Model-local functions that were added or removed, or compute something else."""
    old, new = (
        function_digests(model, canonical)
        for model, canonical in zip((matched.before, matched.after), matched.canonical, strict=True)
    )
    for name in dict.fromkeys((*old, *new)):
        if old.get(name) != new.get(name):
            digests = [f"({names[name][:SHOWN]})" if name in names else "" for names in (old, new)]
            yield HeaderChange(f"function {name}", *digests)


def output_changes(matched: ModelMatching) -> Iterator[HeaderChange]:
    """Outputs that another node computes, under the same name."""
    matching = matched.nodes
    for name, old in matching.before.outputs.items():
        new = matching.after.outputs.get(name)
        if new is not None and not matched.is_same_value(old, new):
            made = _producer(matching.before, old), _producer(matching.after, new)
            yield HeaderChange(f"what output {name} is", *made)


def _producer(flat: FlatGraph, value: int) -> str:
    producer = flat.producers[value]
    if producer < 0:
        return flat.names[value]
    item = flat.items[producer]
    return f"{label_of(item.node)}" + (f", output {item.outputs.index(value)}" if len(item.outputs) > 1 else "")


def sharing_changes(matched: ModelMatching) -> Iterator[HeaderChange]:
    """For models that are equal node by node: which of several equal values is read."""
    first, second = matched.canonical
    if first.digest == second.digest:
        return
    reads = [_reads(flat) for flat in (matched.nodes.before, matched.nodes.after)]
    shared = reads[0].keys() & reads[1].keys()
    differing = [digest for digest in reads[0] if digest in shared and reads[0][digest][1] != reads[1][digest][1]]
    for digest in differing:
        counts = [", ".join(map(str, values[digest][1])) for values in reads]
        yield HeaderChange(f"how often values equal to that of {reads[0][digest][0]} are read", *counts)
    if not differing:
        yield HeaderChange("digest", f"({first.digest[:SHOWN]})", f"({second.digest[:SHOWN]})")


def _reads(flat: FlatGraph) -> dict[int, tuple[str, list[int]]]:
    """Digest → the first value with this digest, and how often each value with this digest is read."""
    values: dict[int, tuple[str, list[int]]] = {}
    outputs = Counter(flat.outputs.values())
    for value, digest in enumerate(flat.value_digests):
        values.setdefault(digest, (flat.names[value], []))[1].append(len(flat.uses[value]) + outputs[value])
    return {digest: (name, sorted(counts, reverse=True)) for digest, (name, counts) in values.items()}


SHOWN: Final = 8
"""Digits of a digest."""


def header_changes(before: ModelProto, after: ModelProto) -> Iterator[HeaderChange]:
    """Changes of versions, inputs and outputs. The latter are compared by name, as callers find them, and by order."""
    for describe in (_versions, _inputs, _outputs):
        old, new = describe(before), describe(after)
        for what in dict.fromkeys((*old, *new)):
            follows = what.startswith("order") and old.keys() != new.keys()
            if old.get(what) != new.get(what) and not follows:
                yield HeaderChange(what, old.get(what, ""), new.get(what, ""))


def _versions(model: ModelProto) -> Mapping[str, str]:
    opsets = {f"opset {entry.domain or 'ai.onnx'}": str(entry.version) for entry in model.opset_import}
    return {"IR version": str(model.ir_version), **opsets}


def _inputs(model: ModelProto) -> Mapping[str, str]:
    index = GraphIndex(model.graph)
    optional = {name: info for name, info in index.inputs.items() if name in index.initializers}
    defaults = {f"input {name}": f"{format_type(info)}, has a default" for name, info in optional.items()}
    return {**_signature("input", list(index.required_inputs.values())), **defaults}


def _outputs(model: ModelProto) -> Mapping[str, str]:
    return _signature("output", list(model.graph.output))


def _signature(what: str, infos: list[ValueInfoProto]) -> Mapping[str, str]:
    types = {f"{what} {info.name}": format_type(info) for info in infos}
    return {**types, f"order of {what}s": ", ".join(info.name for info in infos)}


def renamings(matched: ModelMatching) -> Iterator[Renaming]:
    """Matched nodes, values and initializers whose names differ."""
    before, after = matched.nodes.before, matched.nodes.after
    for old, new in matched.pairs():
        item, old_item = after.items[new], before.items[old]
        if item.node.name != old_item.node.name:
            yield Renaming("node", old_item.node.name, item.node.name)
        for new_value, old_value in zip(item.outputs, old_item.outputs, strict=False):
            if ABSENT not in (new_value, old_value) and after.names[new_value] != before.names[old_value]:
                yield Renaming("value", before.names[old_value], after.names[new_value])
        for new_value, old_value in zip(item.inputs, old_item.inputs, strict=False):
            if _is_initializer(after, new_value) and _is_initializer(before, old_value):
                is_same = after.value_digests[new_value] == before.value_digests[old_value]
                if is_same and after.names[new_value] != before.names[old_value]:
                    yield Renaming("initializer", before.names[old_value], after.names[new_value])


def _is_initializer(flat: FlatGraph, value: int) -> bool:
    return value in flat.shapes and flat.producers[value] < 0
