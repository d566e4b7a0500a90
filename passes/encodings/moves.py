"""Encodings that follow for a tensor that only holds numbers of another one, such as behind a Reshape.

One scale for a whole tensor says nothing of where its numbers are. Scales of channels and blocks do, so these are not
passed on here.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from onnx import GraphProto

from passes.encodings.encoding import Encoding
from passes.graph.op_facts import LAYOUT_OPS, ONNX_DOMAINS, moved_inputs


def share_by_moves(graph: GraphProto, encodings: Mapping[str, Encoding]) -> dict[str, Encoding]:
    """`encodings`, and those that follow from them for other tensors of `graph`."""
    known = dict(encodings)
    count = -1
    while count < len(known):
        count = len(known)
        for node in graph.node:
            sources = [known.get(name) for name in moved_inputs(node)]
            first = sources[0] if sources else None
            if first is None or first.axis is not None or any(not is_same_encoding(first, one) for one in sources):
                continue
            for name in filter(None, node.output):
                known.setdefault(name, first)
        for node in reversed(graph.node):
            if node.op_type in LAYOUT_OPS and node.domain in ONNX_DOMAINS:  # every number of the input is in the output
                result = known.get(node.output[0])
                if result is not None and result.axis is None:
                    known.setdefault(node.input[0], result)
    return known


def is_same_encoding(one: Encoding, other: Encoding | None) -> bool:
    """Whether both make the same whole numbers of the same floats."""
    return (
        other is not None
        and one.precision == other.precision
        and one.axis == other.axis
        and np.array_equal(one.scale, other.scale)
        and np.array_equal(one.zero_point, other.zero_point)
    )
