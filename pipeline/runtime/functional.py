"""Why torch does not differentiate a kind: every op that an importer makes is an operator that it does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from pipeline.errors import Unsupported
from pipeline.ir import Graph, Op
from pipeline.ops import Kind
from pipeline.ops.aten import CALL_KINDS

FUSED = "it is made only when a plan is compiled, after which nothing is trained"

REFUSED: Mapping[Kind, str] = {
    Kind.SGD: "it is the update of a train step, which has no gradient",
    Kind.Adam: "it is the update of a train step, which has no gradient",
    Kind.NotFinite: "it decides about the update of a train step, which has no gradient",
    Kind.CountStep: "it counts the updates of a train step, which has no gradient",
    Kind.LinearPointwise: FUSED,
    Kind.ConvPointwise: FUSED,
    Kind.ScaledDotProductAttention: FUSED,
    Kind.SmallAttention: FUSED,
    Kind.FeedForward: FUSED,
    Kind.ReluProduct: FUSED,
    Kind.OnnxNode: "it is run by another runtime, outside of torch",
    **dict.fromkeys(CALL_KINDS, "an operator of torch is run by torch"),
}
"""kind → why torch has no function for an op of this name."""


def why_not_differentiable(op: Op) -> str:
    """Why torch has no function for an op, as the end of a sentence; empty for an operator of torch."""
    if op.kind not in Kind.__members__:
        return ""
    if op.kind == Kind.OnnxNode.name:
        return f"{op.attrs['op']} is run by another runtime, outside of torch"
    return REFUSED[Kind[op.kind]]


def refuse_kinds(graph: Graph) -> dict[str, Callable[[Op, Sequence[torch.Tensor]], list[torch.Tensor]]]:
    """Functions that refuse the ops of `graph` that are no operators of torch, as `run_eager(own=…)` takes them."""
    return dict.fromkeys((op.kind for op in graph.ops if op.kind in Kind.__members__), _refuse)


def _refuse(op: Op, ins: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    del ins
    raise Unsupported(f"{op.operator} {op.name!r} cannot be computed by torch: {why_not_differentiable(op)}")
