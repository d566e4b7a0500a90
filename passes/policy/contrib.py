"""Operators that ONNX does not have: onnxruntime's `com.microsoft`, and those of others.

A runtime of its own has them, and few other tools do. A policy can refuse that a step brings them in; what the source
has already is named, with the step that rewrites it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import onnx
from onnx import NodeProto

from passes.graph.op_facts import ONNX_DOMAINS, op_name
from passes.graph.traversal import every_node
from passes.rewrites.attention_operators import is_attention

DOMAINS: Final = frozenset({*ONNX_DOMAINS, "ai.onnx.ml", "ai.onnx.preview", "ai.onnx.preview.training"})


def find_contrib(proto: onnx.ModelProto) -> list[NodeProto]:
    """The nodes, also in bodies and functions, whose operators neither ONNX nor a function of the model defines."""
    functions = {(function.domain, function.name) for function in proto.functions}
    nodes = (node for graph in (proto.graph, *proto.functions) for node in every_node(graph))
    return [node for node in nodes if (node.domain, node.op_type) not in functions and not _is_standard(node)]


def _is_standard(node: NodeProto) -> bool:
    """Whether ONNX has the operator. onnxruntime adds some to ONNX's own domain: SimplifiedLayerNormalization."""
    if node.domain not in DOMAINS:
        return False
    domain = "" if node.domain in ONNX_DOMAINS else node.domain
    return onnx.defs.has(node.op_type, domain)


def describe_brought_in(before: onnx.ModelProto, after: onnx.ModelProto) -> str:
    """Which of them a step has brought in; empty if it left no more of them than there were.

    So a step may write one in the place of another, as `split-qkv` does with a packed Attention.
    """
    had, has = find_contrib(before), find_contrib(after)
    if len(has) <= len(had):
        return ""
    known = {tuple(node.output) for node in had}
    new = [node for node in has if tuple(node.output) not in known] or has
    return f"brings in {_names(new)}, which ONNX does not have; passes.contrib: keep lets it in"


def describe_left(proto: onnx.ModelProto) -> tuple[str, ...]:
    """A sentence for each of these operators in a final model into which no step could bring one."""
    found: dict[str, list[NodeProto]] = {}
    for node in find_contrib(proto):
        found.setdefault(op_name(node), []).append(node)
    left = ((_names(nodes), _advice(nodes[0])) for nodes in found.values())
    return tuple(f"passes.contrib: {names} is left of the source; {advice}" for names, advice in left)


def _advice(node: NodeProto) -> str:
    if is_attention(node):
        return "put decompose-attention into the recipe"
    step = REWRITTEN_BY.get(node.op_type) if node.domain not in ONNX_DOMAINS else None
    if step is not None:
        return f"put {step} into the recipe"
    return "no step of onnxline rewrites it, so export the model without it"


REWRITTEN_BY: Final = {"QAttention": "split-qkv and decompose-attention"}
"""Operator → the steps after which it is gone, for operators other than attention."""


def _names(nodes: Sequence[NodeProto]) -> str:
    first = nodes[0]
    more = f" (and {len(nodes) - 1} more)" if len(nodes) > 1 else ""
    return f"{op_name(first)} {first.name or next(iter(first.output), '')!r}{more}"
