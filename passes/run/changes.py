"""How two models differ, at a glance: which kinds of nodes are more, and which fewer."""

from __future__ import annotations

from collections import Counter

from onnx import NodeProto

from passes.weights.detached import DetachedModel

__all__ = ["op_changes", "op_counts"]


def op_counts(model: DetachedModel) -> Counter[str]:
    """Op type → number of nodes; other domains than ONNX's own as `domain::Op`."""
    return Counter(map(_kind, model.proto.graph.node))


def op_changes(before: DetachedModel, after: DetachedModel) -> dict[str, int]:
    """Op type → number of nodes in `after` less that in `before`, where they differ."""
    had, has = op_counts(before), op_counts(after)
    return {kind: has[kind] - had[kind] for kind in sorted(had | has) if has[kind] != had[kind]}


def _kind(node: NodeProto) -> str:
    return f"{node.domain}::{node.op_type}" if node.domain else node.op_type
