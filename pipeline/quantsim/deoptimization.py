"""What a baseline holds of the final model, so that a silent loss of optimization is seen: sizes that are no longer
fixed, fused operators that are in parts again, islands that a target leaves to another device, and the estimated cost.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, Final

from onnx import NodeProto

from passes.graph.index import GraphIndex, computed_values
from passes.graph.inference import dims_of, infer_types
from passes.graph.op_facts import op_name
from passes.graph.traversal import every_node, group_linked, reads_of
from passes.tools import inspect_model
from passes.weights.detached import DetachedModel
from pipeline.quantsim.profiles import TARGETS, load_target
from pipeline.quantsim.target_check import check_target, place_of

FUSED: Final = frozenset(
    {
        *("Attention", "Gelu", "GroupNormalization", "HardSwish", "InstanceNormalization", "LayerNormalization"),
        *("LogSoftmax", "LpNormalization", "Mish", "RMSNormalization", "RotaryEmbedding", "Softmax", "Swish"),
    }
)
"""Operators of ONNX that compute what several others would; every operator of another domain counts as one."""


def graph_entry(model: DetachedModel) -> dict[str, Any]:
    """The entry `graph` of a baseline, as plain data.

    `shapes` counts computed values with fixed and with open sizes; `fused` the operators that stand for several, by
    operator; `islands`, for each target, the groups of connected nodes that it does not take; `cost` has multiply-adds
    and the bytes of values alive at once, at most, with 1 for an open size; None where a size is not known.
    """
    model = model.without_functions()
    index = GraphIndex(infer_types(model.proto, data_prop=True))
    values = [dims_of(index.types[name]) if name in index.types else None for name in index.producers]
    fixed = sum(dims is not None and all(isinstance(dim, int) for dim in dims) for dims in values)
    ops = Counter(op_name(node) for node in every_node(model.proto.graph))
    facts = inspect_model(model)
    return {
        "shapes": {"fixed": fixed, "open": len(values) - fixed},
        "fused": {op: count for op, count in sorted(ops.items()) if op in FUSED or "::" in op},
        "islands": {target: count_islands(model, target) for target in TARGETS if load_target(target).operators},
        "cost": {"macs": sum(facts.macs.values()), "peak_bytes": facts.peak},
    }


def count_islands(model: DetachedModel, target: str) -> int:
    """How many groups of connected nodes `target` does not take; each ends what it runs in one piece."""
    found = check_target(model, load_target(target)).obstructions
    places = {place for obstruction in found for place in obstruction.places}
    refused = [node for node in model.proto.graph.node if place_of(node) in places]
    return len(_connected_groups(refused))


def _connected_groups(nodes: Sequence[NodeProto]) -> list[list[int]]:
    """The nodes, by position, in groups that read values of each other."""
    touching: dict[str, list[int]] = defaultdict(list)
    computed = computed_values(nodes).keys()
    for position, node in enumerate(nodes):
        for name in {*node.output, *reads_of(node)} & computed:
            touching[name].append(position)
    return group_linked([*([position] for position in range(len(nodes))), *touching.values()])
