"""Which names of the source stand for what in a final model: a map from old to new, made from annotations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod

from onnx import ModelProto, NodeProto

from passes.graph.index import computed_values
from passes.graph.inference import FLOATS
from passes.provenance.annotations import annotations_of, known_as

Names = Mapping[str, tuple[str, ...]]
"""Name in the source → the names in the final model; empty where nothing is known to stand for it."""


@dataclass(frozen=True, slots=True)
class NameMap:
    """Source name → its names in a final model; names that map only to themselves are left out.

    Inputs and outputs of the model are left out, since their names never change.
    """

    nodes: Names = field(default_factory=dict)
    """A node without a name counts by its first output."""
    values: Names = field(default_factory=dict)
    """What nodes compute. A value is another one by name only if its node is still there."""
    weights: Names = field(default_factory=dict)
    """Stored float tensors of two numbers or more, with the tensors made of them: `w.q`, `w_transposed`."""


def map_names(before: ModelProto, after: ModelProto) -> NameMap:
    """The names of `before` in `after`, which passes have made of it; both with their annotations."""
    return NameMap(_map_nodes(before, after), _map_values(before, after), _map_weights(before, after))


def _map_nodes(before: ModelProto, after: ModelProto) -> Names:
    found: dict[str, dict[str, None]] = defaultdict(dict)
    for node in after.graph.node:
        for name in _sources_of(node):
            found[name][known_as(node)] = None
    return _without_unchanged((known_as(node), tuple(found.get(known_as(node), ()))) for node in before.graph.node)


def _sources_of(node: NodeProto) -> tuple[str, ...]:
    marks = annotations_of(node)
    return marks.replaced if marks.author else (known_as(node),)


def _map_values(before: ModelProto, after: ModelProto) -> Names:
    computed, has = computed_values(before.graph.node), computed_values(after.graph.node)
    survivors = {known_as(node): node for node in after.graph.node if not annotations_of(node).author}
    pairs: list[tuple[str, tuple[str, ...]]] = []
    for node in before.graph.node:
        same = survivors.get(known_as(node))
        outputs = list(same.output) if same is not None and same.op_type == node.op_type else []
        for place, name in enumerate(node.output):
            new = outputs[place] if place < len(outputs) else ""
            names = (name,) if name in has else (new,) if new and new not in computed else ()
            pairs += [(name, names)] if name else []
    return _without_unchanged(pairs)


def _map_weights(before: ModelProto, after: ModelProto) -> Names:
    found: dict[str, dict[str, None]] = defaultdict(dict)
    for tensor in after.graph.initializer:
        for name in dict.fromkeys((*annotations_of(tensor).replaced, tensor.name)):
            found[name][tensor.name] = None
    weights = (weight for weight in before.graph.initializer if weight.data_type in FLOATS and prod(weight.dims) > 1)
    return _without_unchanged((weight.name, tuple(found.get(weight.name, ()))) for weight in weights)


def _without_unchanged(pairs: Iterable[tuple[str, tuple[str, ...]]]) -> Names:
    return {old: news for old, news in pairs if news != (old,)}
