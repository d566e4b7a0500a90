"""Are the projections still apart? Judged by weights alone: names may change, matrices may not.

Shares no code with the finder: it does not know what attention looks like. It looks for a product node of its own for
each kept matrix, reached through nothing but layout, and counts them, since layers may share a matrix.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from onnx import NodeProto

from passes.structures.base import Instance
from passes.weights import DetachedModel

__all__ = ["lost_projections"]


def lost_projections(instances: Sequence[Instance], model: DetachedModel) -> dict[str, str]:
    """Instance name → why it is lost. An instance stands when each of its matrices has a product node of its own."""
    available = _products_by_digest(model)
    needed: Counter[frozenset[str]] = Counter(weight.digests for one in instances for weight in one.weights)
    short = {
        digests: sum(available[digest] for digest in digests)
        for digests, count in needed.items()
        if sum(available[digest] for digest in digests) < count
    }
    outputs = {name for node in model.proto.graph.node for name in node.output}
    reasons: dict[str, str] = {}
    for instance in instances:
        missing = [weight for weight in instance.weights if weight.digests in short]
        # A matrix shared by several instances: those whose own values are still computed have theirs.
        shared = any(short[weight.digests] for weight in missing)
        if shared and instance.pins and all(pin.name in outputs for pin in instance.pins):
            continue
        if missing:
            roles = ", ".join(f"{weight.role} ({weight.name})" for weight in missing)
            reasons[instance.name] = f"no separate product with the matrix of {roles}"
    return reasons


def _products_by_digest(model: DetachedModel) -> Counter[str]:
    graph = model.proto.graph
    digests = {tensor.name: model.digest(tensor) for tensor in graph.initializer if len(tensor.dims) >= 2}
    made_by = {name: node for node in graph.node for name in node.output}
    count: Counter[str] = Counter()
    for node in graph.node:
        if node.op_type not in ("MatMul", "Gemm", "Conv", "FusedMatMul"):
            continue
        digest = digests.get(_source(node.input[1], made_by))
        if digest is not None and _is_unscaled(node):
            count[digest] += 1
    return count


def _source(name: str, made_by: dict[str, NodeProto]) -> str:
    """Follow `name` back through nodes that only re-arrange their first input."""
    node = made_by.get(name)
    while node is not None and node.op_type in ("Transpose", "Reshape", "Identity", "Squeeze", "Unsqueeze"):
        name = node.input[0]
        node = made_by.get(name)
    return name


def _is_unscaled(node: NodeProto) -> bool:
    return all(attribute.f == 1.0 for attribute in node.attribute if attribute.name == "alpha")
