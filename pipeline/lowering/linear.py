"""Matrix products. No kernel here may write over an operand: each output element reads a whole row and column."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.ir.builder import Emitter
from pipeline.ir.graph import Attr
from pipeline.lowering.emitter import Specs, emitter, same_dtype
from pipeline.lowering.kinds import Kind
from pipeline.lowering.layout import ViewRule

__all__ = ["EMITTERS", "INPLACE", "VIEWS"]


def matrices(attrs: Mapping[str, Attr], ins: Specs, outs: Specs) -> str | None:
    """Gemm: two matrices, and a third operand that broadcasts to the product."""
    del attrs
    if [ins[0].rank, ins[1].rank, outs[0].rank] != [2, 2, 2]:
        return f"ranks {ins[0].rank}, {ins[1].rank} → {outs[0].rank}; expected matrices (MatMul takes other ranks)"
    if len(ins) == 3 and ins[2].rank > 2:
        return f"operand c has rank {ins[2].rank}; expected at most 2"
    return None


def at_least_vectors(attrs: Mapping[str, Attr], ins: Specs, outs: Specs) -> str | None:
    del attrs, outs
    return None if all(spec.rank for spec in ins) else "a scalar operand; expected rank 1 or more (Mul scales)"


EMITTERS: dict[str, Emitter] = {
    "MatMul": emitter(Kind.MatMul, "", same_dtype, at_least_vectors, inputs=2),
    "Gemm": emitter(Kind.Gemm, "alpha=f,beta=f,trans_a=?,trans_b=?", same_dtype, matrices, inputs=(2, 3)),
    "Einsum": emitter(Kind.Einsum, "equation=s", same_dtype, inputs=(1, None)),
}

INPLACE: dict[str, tuple[int, ...]] = {}

VIEWS: dict[str, ViewRule] = {}
