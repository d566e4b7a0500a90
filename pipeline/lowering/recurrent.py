"""Recurrent kinds: time is the first axis, and a direction has weights of its own."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.ir.builder import Emitter
from pipeline.ir.graph import Attr
from pipeline.lowering.emitter import Specs, emitter, floating, one_of, same_dtype
from pipeline.lowering.kinds import Kind
from pipeline.lowering.layout import ViewRule

__all__ = ["EMITTERS", "INPLACE", "VIEWS"]


def gates(attrs: Mapping[str, Attr], ins: Specs, outs: Specs) -> str | None:
    """W, R and B hold four gates for each direction; the last two inputs are the state before the first step."""
    del outs
    directions = 2 if attrs["direction"] == "bidirectional" else 1
    batch, features, hidden = ins[0].shape[1], ins[0].shape[2], ins[2].shape[-1]
    state = (directions, batch, hidden)
    rows = ins[2].sizes[1] // 4 * 4
    expected = [(directions, rows, features), (directions, rows, hidden), (directions, 2 * rows), state, state]
    found = [spec.shape for spec in ins[1:]]
    return None if found == expected else f"W, R, B and the states have the shapes {found}; expected {expected}"


EMITTERS: dict[str, Emitter] = {
    "LSTM": emitter(
        Kind.LSTM,
        "direction=s",
        same_dtype,
        floating,
        one_of("direction", "forward", "reverse", "bidirectional"),
        gates,
        inputs=6,
        outputs=3,
    ),
}

INPLACE: dict[str, tuple[int, ...]] = {}

VIEWS: dict[str, ViewRule] = {}
