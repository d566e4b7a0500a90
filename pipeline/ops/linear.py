"""Matrix products, and the recurrent kinds, which are products over time.

No kernel here may write over an operand: each output element reads a whole row and column.
"""

from __future__ import annotations

from pipeline.ops.kinds import Kind
from pipeline.ops.rows import OpCall, floating, kind, one_of, same_dtype, signature


def matrices(call: OpCall) -> str | None:
    """Gemm: two matrices, and a third operand that broadcasts to the product."""
    a, b, out = call.ins[0].rank, call.ins[1].rank, call.outs[0].rank
    if [a, b, out] != [2, 2, 2]:
        return f"ranks {a}, {b} → {out}; expected matrices (MatMul takes other ranks)"
    if len(call.ins) == 3 and call.ins[2].rank > 2:
        return f"operand c has rank {call.ins[2].rank}; expected at most 2"
    return None


def at_least_vectors(call: OpCall) -> str | None:
    return None if all(spec.rank for spec in call.ins) else "a scalar operand; expected rank 1 or more (Mul scales)"


def gates(call: OpCall) -> str | None:
    """LSTM: W, R and B hold four gates for each direction; the last two inputs are the state before the first step."""
    ins, directions = call.ins, 2 if call.attrs["direction"] == "bidirectional" else 1
    batch, features, hidden = ins[0].shape[1], ins[0].shape[2], ins[2].shape[-1]
    state = (directions, batch, hidden)
    rows = ins[2].sizes[1] // 4 * 4
    expected = [(directions, rows, features), (directions, rows, hidden), (directions, 2 * rows), state, state]
    shapes = [spec.shape for spec in ins[1:]]
    return None if shapes == expected else f"W, R, B and the states have the shapes {shapes}; expected {expected}"


LSTM = signature(
    same_dtype, floating, one_of("direction", "forward", "reverse", "bidirectional"), gates, inputs=6, outputs=3
)

KINDS = (
    kind(Kind.MatMul, signature(same_dtype, at_least_vectors, inputs=2)),
    kind(Kind.Gemm, signature(same_dtype, matrices, inputs=(2, 3)), "alpha=f,beta=f,trans_a=?,trans_b=?"),
    kind(Kind.Einsum, signature(same_dtype, inputs=(1, None)), "equation=s"),
    kind(Kind.LSTM, LSTM, "direction=s"),
)
