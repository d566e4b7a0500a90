"""Find group norm: as one op, as an InstanceNormalization between two Reshapes, or spelled out between them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from onnx import NodeProto

from passes.structures.candidates import Candidate, find_fused
from passes.structures.norms import find_norm_patterns, reshape_back, scale_and_bias
from passes.structures.view import GraphView

GROUP_NORM_OPS: Final = ("GroupNormalization", "com.microsoft.GroupNorm", "com.microsoft.SkipGroupNorm")


def find_group_norms(view: GraphView) -> Iterator[Candidate]:
    yield from find_fused(view, GROUP_NORM_OPS)
    for node in view.by_op.get("InstanceNormalization", ()):
        yield from _between_reshapes(view, node.input[0], (node,))
    for norm in find_norm_patterns(view):
        if norm.centred:
            yield from _between_reshapes(view, norm.x, norm.nodes)


def _between_reshapes(view: GraphView, x: str, norm: tuple[NodeProto, ...]) -> Iterator[Candidate]:
    back = reshape_back(view, x, norm[-1])
    if back is not None:
        nodes = (*norm, *scale_and_bias(view, back))
        yield Candidate(nodes[-1], nodes, (norm[-1].output[0], nodes[-1].output[0]))
