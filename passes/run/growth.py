"""Notes on a step: the model grew, or nodes were removed only because random weights hold zeros and ones.

Folding trades computation for stored bytes: a folded Tile may store megabytes, and a folded Transpose stores a tied
table a second time. `compute_again` puts back the nodes of folded values that make the model much larger. Every library
gives the folded tensor the name of the computed value, so this works for all of them.

Biases of random weights are zero, and those of a trained model are not. So the nodes that a step removed because their
stored operand is zero or one would stay in a trained model: `describe_void_nodes` counts them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from onnx import NodeProto, TensorProto

from passes.graph.index import computed_values, delete_named, initializers_of, producers_of, replace_entries
from passes.graph.op_facts import LAYOUT_OPS, RANDOM_OPS, op_name
from passes.graph.traversal import bodies_in, every_graph, every_node, group_linked, reads_of, sort_nodes
from passes.model.analysis import AnalyzedModel, bytes_of
from passes.suggest import bytes_text, join_first, plural
from passes.weights.detached import DetachedModel

ALLOWED: Final = 2**17
"""Bytes by which folding may make any model larger: tables of positions, masks of short sequences."""

ALLOWED_SHARE: Final = 100
"""A model may grow by 1/100 of its stored bytes, where that is more than `ALLOWED`."""

NOTICED: Final = 2**10
"""Bytes of growth that a note mentions, if they are also 1/100 of the model."""

NAMED: Final = 3
"""The most folded tensors that a note names."""


def describe_growth(before: AnalyzedModel, after: AnalyzedModel) -> tuple[str, ...]:
    """Sentences on growth: one if the stored tensors of `after` are larger, one if it has more nodes."""
    sentences = []
    had, has = before.stored_bytes, after.stored_bytes
    if has - had >= max(NOTICED, had // ALLOWED_SHARE):
        new = sorted(_new_tensors(before.model, after.model), key=bytes_of, reverse=True)
        made_by = producers_of(every_node(before.model.proto.graph))
        largest = join_first([_describe(tensor, made_by) for tensor in new], NAMED)
        sentences.append(
            f"stored tensors grew from {bytes_text(had)} to {bytes_text(has)}" + (f": {largest}" if new else "")
        )
    nodes, left = before.node_count, after.node_count
    if left > nodes:
        sentences.append(f"the model grew from {nodes:,} to {plural(left, 'node')}")
    return tuple(sentences)


def _describe(tensor: TensorProto, made_by: Mapping[str, NodeProto]) -> str:
    node = made_by.get(tensor.name)
    what = f"{op_name(node)} {tensor.name!r} folded" if node is not None else repr(tensor.name)
    return f"{what} ({bytes_text(bytes_of(tensor))})"


def compute_again(before: AnalyzedModel, after: AnalyzedModel) -> tuple[DetachedModel, str]:
    """Compute the folded values that make `after` much larger again.

    Returns:
        The model, and a note that names these values; `after` itself and an empty text if there are none.
    """
    growth, allowed = after.stored_bytes - before.stored_bytes, max(ALLOWED, before.stored_bytes // ALLOWED_SHARE)
    if growth <= NOTICED:
        return after.model, ""
    undone: list[_FoldedGroup] = []
    for group in sorted(_folded_groups(before.model, after.model), key=lambda group: group.gain, reverse=True):
        if group.gain > NOTICED and (growth > allowed or group.is_copy):
            undone.append(group)
            growth -= group.gain
    if not undone:
        return after.model, ""
    names = [name for group in undone for name in group.names]
    made_by = before.model.index.producers
    listed = join_first([f"{op_name(made_by[name])} {name!r}" for name in names], NAMED)
    gain = bytes_text(sum(group.gain for group in undone))
    note = f"{listed} stayed computed: folded, the model would have {gain} more to store"
    return _unfold(before.model, after.model, undone), note


@dataclass(frozen=True, slots=True)
class _FoldedGroup:
    """Folded values that are computed from the same stored tensors, so that all or none of them is folded.

    Args:
        names: the folded values.
        nodes: the nodes that computed them, by the name of the first output.
        sources: the stored tensors that these nodes need and that the step has dropped.
        gain: bytes that the model saves if the values are computed.
    """

    names: tuple[str, ...]
    nodes: Mapping[str, NodeProto]
    sources: Mapping[str, TensorProto]
    gain: int

    @property
    def is_copy(self) -> bool:
        """Whether a tensor that is still stored would be stored once more, in another layout."""
        return not self.sources and all(node.op_type in LAYOUT_OPS for node in self.nodes.values())


def _folded_groups(before: DetachedModel, after: DetachedModel) -> Iterator[_FoldedGroup]:
    """Walk back from each new stored tensor, as `before` computed it, to what `after` still has."""
    index, now = before.index, after.index
    made_by, stored, fed = index.producers, index.initializers, index.inputs
    kept = (now.initializers.keys() & stored.keys()) | now.producers.keys()
    parts: list[tuple[TensorProto, dict[str, NodeProto], dict[str, TensorProto]]] = []
    for tensor in _new_tensors(before, after):
        nodes, sources = dict[str, NodeProto](), dict[str, TensorProto]()
        open_names = [tensor.name] if tensor.name in made_by else []
        while open_names:
            name = open_names.pop()
            node = made_by.get(name)
            if name in kept or name in sources or (node is not None and node.output[0] in nodes):
                continue
            if node is None and name in stored and name not in fed:
                sources[name] = stored[name]
            elif node is None or node.op_type in RANDOM_OPS or bodies_in(node):
                break
            else:
                nodes[node.output[0]] = node
                open_names += reads_of(node)
        else:
            if nodes:
                parts.append((tensor, nodes, sources))
    needing: dict[str, list[int]] = defaultdict(list)
    for part, (_, _, sources) in enumerate(parts):
        for name in sources:
            needing[name].append(part)
    for members in group_linked([*([part] for part in range(len(parts))), *needing.values()]):
        group = [parts[part] for part in members]
        sources = {name: tensor for _, _, needed in group for name, tensor in needed.items()}
        nodes = {name: node for _, made, _ in group for name, node in made.items()}
        folded = tuple(tensor.name for tensor, _, _ in group)
        gain = sum(bytes_of(tensor) for tensor, _, _ in group) - sum(map(bytes_of, sources.values()))
        yield _FoldedGroup(folded, nodes, sources, gain)


def _unfold(before: DetachedModel, after: DetachedModel, groups: Iterable[_FoldedGroup]) -> DetachedModel:
    """`after` with the nodes and sources of `groups` in place of their folded tensors."""
    proto = after.copy_proto()
    graph = proto.graph
    names = {name for group in groups for name in group.names}
    nodes = {name: node for group in groups for name, node in group.nodes.items()}
    sources = {name: tensor for group in groups for name, tensor in group.sources.items()}
    computed = computed_values(nodes.values()).keys()
    has = initializers_of(graph)
    stays = [tensor for tensor in graph.initializer if tensor.name not in names | computed]
    stays += [tensor for name, tensor in sources.items() if name not in has]
    replace_entries(graph.initializer, stays)
    delete_named(graph.value_info, computed)
    graph.node.extend(nodes.values())
    sort_nodes(graph)
    return DetachedModel(proto, {**before.weights, **after.weights})


def _new_tensors(before: DetachedModel, after: DetachedModel) -> list[TensorProto]:
    """The stored tensors of `after`, also of bodies, that `before` has not stored by that name."""
    had = {tensor.name for graph in every_graph(before.proto.graph) for tensor in graph.initializer}
    graphs = every_graph(after.proto.graph)
    return [tensor for graph in graphs for tensor in graph.initializer if tensor.name not in had]


def describe_void_nodes(before: AnalyzedModel, after: AnalyzedModel) -> tuple[str, ...]:
    """A sentence for each operator of which `before` has nodes that do nothing, and `after` fewer.

    A zero bias that has become an operand of another node is still read, so its Add counts as fused and not as removed.
    """
    had, has = before.void_nodes, after.void_nodes
    sentences = []
    freed = had.reads - has.reads
    for (op_type, unit), count in (had.nodes - has.nodes).items():
        removed = min(count, freed[unit])
        freed[unit] -= removed
        if removed:
            what = "values are" if op_type == "BatchNormalization" else "operand is"
            whose = "its" if removed == 1 else "their"
            sentences.append(f"{plural(removed, f'{op_type} node')} removed since {whose} stored {what} {unit}")
    return tuple(sentences)
