"""The kind of an ONNX node that another runtime computes: rare operators, each visible in the plan by its name."""

from __future__ import annotations

from pipeline.ops.kinds import Kind
from pipeline.ops.rows import OpCall, everywhere, kind, signature


def as_many_as_given(call: OpCall) -> str | None:
    """As many values as `inputs` and `outputs` mark with 1; a 0 marks one that the node leaves out."""
    for name, specs in (("inputs", call.ins), ("outputs", call.outs)):
        marks = call.attrs[name]
        if not isinstance(marks, tuple) or sum(bool(mark) for mark in marks) != len(specs):
            return f"attr {name}={marks} and {len(specs)} of them; expected a 1 for each"
    return None


KINDS = (
    kind(
        Kind.OnnxNode,
        signature(as_many_as_given, inputs=(0, None), outputs=(1, None)),
        "op=s,opset=i,node=s,inputs=i[],outputs=i[]",
        obstacles=everywhere("another runtime computes it, on the host"),
    ),
)
