"""The pass `small-attention`: attention with few scores keeps them in the plan, for the CPU."""

from __future__ import annotations

import math

from pipeline.ir.graph import Graph, Op, TensorSpec
from pipeline.lowering.fusion.attention import SWAP, declare_by_token
from pipeline.lowering.fusion.op_patterns import match_attention
from pipeline.lowering.fusion.rewrite import Rewrite


def keep_scores(graph: Graph) -> Graph:
    """Replace attention without a mask that has at most `SMALL` scores: the op of `fuse_attention`, and torch's own."""
    rewrite = Rewrite(graph)
    for op in graph.ops:
        whole = match_attention(op)
        if whole is not None:
            if whole.mask is not None or whole.causal or not _is_small(graph, (whole.query, whole.key, whole.value)):
                continue
            stored = declare_by_token(rewrite, op)
            _put_small(rewrite, op, (whole.query, whole.key, whole.value), stored, whole.scale_of(graph))
            rewrite.replace(op, "aten.permute.default", [stored], op.outputs, {"dims": SWAP})
        elif op.kind == "ScaledDotProductAttention" and not op.attrs["mask"] and not op.attrs["causal"]:
            query, key, value = op.inputs
            if _is_small(graph, (query, key, value)):
                _put_small(rewrite, op, (query, key, value), op.outputs[0], float(op.attrs["scale"]))  # type: ignore[arg-type]
    return rewrite.build()


def _put_small(rewrite: Rewrite, op: Op, operands: tuple[int, int, int], result: int, scale: float) -> None:
    """Replace `op` by the kernel for few scores; its second result is the scores, so that the plan stores them."""
    query, key = (rewrite.spec(vid).shape for vid in operands[:2])
    name = rewrite.graph.values[op.outputs[0]].name.removesuffix(" by token")
    scores = rewrite.declare(f"{name} scores", TensorSpec((*query[:3], key[2]), "float32"))
    rewrite.replace(op, "SmallAttention", operands, [result, scores], {"scale": scale})


def _is_small(graph: Graph, operands: tuple[int, int, int]) -> bool:
    """Whether the kernel for few scores takes this attention: static float32 of rank 4, at most `SMALL` scores."""
    specs = [graph.values[vid].spec for vid in operands]
    if not all(spec.rank == 4 and spec.is_static and spec.dtype == "float32" for spec in specs):
        return False
    query, key, value = (spec.sizes for spec in specs)
    fits = query[:2] == key[:2] and query[3] == key[3] == value[3] and key == value
    return fits and math.prod(query[:3]) * key[2] <= SMALL


SMALL = 2**15
"""The most scores (128 KiB of float32) for which products and softmax are faster than torch's kernel."""
