"""What is zero because a weight is: a product of finite numbers with zeros is known without running it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

import numpy as np
from onnx import GraphProto, NodeProto

__all__ = ["zeros_of"]


def zeros_of(graph: GraphProto, zeroed: Collection[str], fed: Mapping[str, np.ndarray]) -> set[str]:
    """The values of `graph` that are all zeros when the initializers called `zeroed` are, and its inputs are `fed`.

    Only what follows by arithmetic: zeros in another layout, and a product of zeros with inputs that are finite. Not
    every zero is found.
    """
    zeros = set(zeroed)
    finite = {info.name for info in graph.input if np.isfinite(fed[info.name]).all()}
    for node in graph.node:
        if _moves(node, zeros) or _multiplies(node, zeros, finite):
            zeros.update(node.output)
    return zeros


def _moves(node: NodeProto, zeros: set[str]) -> bool:
    return not node.domain and node.op_type in LAYOUT_OPS and node.input[0] in zeros


def _multiplies(node: NodeProto, zeros: set[str], finite: set[str]) -> bool:
    """A Gemm or a Conv may add something."""
    if node.domain or node.op_type != "MatMul" or zeros.isdisjoint(node.input):
        return False
    return all(name in zeros or name in finite for name in node.input)


LAYOUT_OPS: Final = frozenset({"Transpose", "Reshape", "Squeeze", "Unsqueeze", "Identity"})
