"""Are the projections still apart? Judged by weights alone: names may change, matrices may not.

Shares no code with the finder: it does not know what attention looks like. It looks for a product node of its own for
each kept matrix, reached through nothing but layout, and counts them, since layers may share a matrix.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Final

from onnx import NodeProto

from passes.model.reads import live_nodes
from passes.model.weights import DetachedModel
from passes.structures.base import Instance

__all__ = ["lost_projections"]


def lost_projections(instances: Sequence[Instance], model: DetachedModel) -> dict[str, str]:
    """Instance name → why it is lost. An instance stands when each of its matrices has a product node of its own.

    Layers may share a matrix. Where there are fewer products with it than instances, those instances stand whose own
    value is still such a product.
    """
    products = _products_by_digest(model)
    needed = Counter(weight.digests for instance in instances for weight in instance.weights)
    reasons: dict[str, str] = {}
    for instance in instances:
        values = {weight.role: pin.name for weight, pin in zip(instance.weights, instance.pins, strict=False)}
        missing = []
        for weight in instance.weights:
            made = {name for digest in weight.digests for name in products[digest]}
            if len(made) < needed[weight.digests] and values.get(weight.role) not in made:
                missing.append(f"{weight.role} ({weight.name})")
        if missing:
            reasons[instance.name] = f"no separate product with the matrix of {', '.join(missing)}"
    return reasons


def _products_by_digest(model: DetachedModel) -> dict[str, set[str]]:
    """Digest of a matrix → the values that are a product with it and nothing else."""
    graph = model.proto.graph
    digests = {tensor.name: model.digest(tensor) for tensor in graph.initializer if len(tensor.dims) >= 2}
    made_by = {name: node for node in graph.node for name in node.output}
    products: dict[str, set[str]] = defaultdict(set)
    for node in live_nodes(graph, by_numbers=True):  # a product that nobody reads keeps nothing
        if node.op_type not in ("MatMul", "Gemm", "Conv", "FusedMatMul", "Einsum"):
            continue
        for operand in node.input[:2]:
            digest = digests.get(_source(operand, made_by))
            if digest is not None and _is_unscaled(node):
                products[digest].add(node.output[0])
    return products


def _source(name: str, made_by: dict[str, NodeProto]) -> str:
    """Follow `name` back through nodes that only re-arrange their first input, or give it another type."""
    node = made_by.get(name)
    while node is not None and node.op_type in LAYOUT_OPS:
        name = node.input[0]
        node = made_by.get(name)
    return name


def _is_unscaled(node: NodeProto) -> bool:
    return all(attribute.f == 1.0 for attribute in node.attribute if attribute.name == "alpha")


LAYOUT_OPS: Final = ("Transpose", "Reshape", "Identity", "Squeeze", "Unsqueeze", "Cast")
