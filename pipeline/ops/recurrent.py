"""Recurrent cells: the plain LSTM over whole sequences, and cells with lengths, peepholes and activations of choice."""

from __future__ import annotations

from dataclasses import replace

from pipeline.ops.kinds import Kind
from pipeline.ops.rows import OpCall, floating, kind, one_of, same_dtype, signature

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
LENGTHS = 4


def operands(call: OpCall) -> str | None:
    """x, W, R, B, the lengths, and then states; an LSTM has a second state and peepholes."""
    cell = call.attrs["cell"]
    wanted = (8, 3) if cell == "LSTM" else (6, 2)
    if (len(call.ins), len(call.outs)) != wanted:
        return f"{len(call.ins)} inputs and {len(call.outs)} outputs; expected {wanted[0]} and {wanted[1]} of {cell}"
    if call.ins[LENGTHS].dtype != "int32":
        return f"lengths of dtype {call.ins[LENGTHS].dtype}; expected int32"
    return same_dtype(replace(call, ins=[*call.ins[:LENGTHS], *call.ins[LENGTHS + 1 :]]))


def gates(call: OpCall) -> str | None:
    """LSTM: W, R and B hold four gates for each direction; the last two inputs are the state before the first step."""
    ins, directions = call.ins, 2 if call.attrs["direction"] == "bidirectional" else 1
    batch, features, hidden = ins[0].shape[1], ins[0].shape[2], ins[2].shape[-1]
    state = (directions, batch, hidden)
    rows = ins[2].sizes[1] // 4 * 4
    expected = [(directions, rows, features), (directions, rows, hidden), (directions, 2 * rows), state, state]
    shapes = [spec.shape for spec in ins[1:]]
    return None if shapes == expected else f"W, R, B and the states have the shapes {shapes}; expected {expected}"


def weights(call: OpCall) -> str | None:
    """W, R and B hold the gates of each direction, one after the other."""
    gates = GATES[str(call.attrs["cell"])]
    steps, batch, features = call.ins[0].shape
    directions, hidden = 2 if call.attrs["direction"] == "bidirectional" else 1, call.ins[2].sizes[-1]
    state = (directions, batch, hidden)
    rows = gates * hidden
    expected = [(directions, rows, features), (directions, rows, hidden), (directions, 2 * rows), (batch,), state]
    shapes = [spec.shape for spec in call.ins[1:6]]
    if shapes != expected:
        return f"W, R, B, lengths and state have the shapes {shapes}; expected {expected}"
    every = (steps, directions, batch, hidden)
    return None if call.outs[0].shape == every else f"output of shape {call.outs[0].shape}; expected {every}"


def activations(call: OpCall) -> str | None:
    """As many activations as the cell has in all directions, each with a number alpha and a number beta."""
    directions = 2 if call.attrs["direction"] == "bidirectional" else 1
    wanted = {"LSTM": 3, "GRU": 2, "RNN": 1}[str(call.attrs["cell"])] * directions
    names, alphas, betas = str(call.attrs["activations"]).split(","), call.attrs["alphas"], call.attrs["betas"]
    counts = [len(names), *(len(each) if isinstance(each, tuple) else -1 for each in (alphas, betas))]
    return None if counts == [wanted] * 3 else f"{counts} activations, alphas and betas; expected {wanted} of each"


LSTM = signature(
    same_dtype, floating, one_of("direction", "forward", "reverse", "bidirectional"), gates, inputs=6, outputs=3
)

RECURRENT = signature(
    floating,
    one_of("cell", *GATES),
    one_of("direction", "forward", "reverse", "bidirectional"),
    operands,
    weights,
    activations,
    inputs=(6, 8),
    outputs=(2, 3),
)

LAYOUT = "cell=s,direction=s,activations=s,alphas=f[],betas=f[],clip=f,input_forget=?,reset_after=?"

KINDS = (kind(Kind.LSTM, LSTM, "direction=s"), kind(Kind.Recurrent, RECURRENT, LAYOUT))
