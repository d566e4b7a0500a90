"""What each kind computes, by torch's functional operators: differentiable, and op by op. Read `base.py` first.

The families are those of `runtime/kernels`. `REFUSED` says why a kind has no form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from pipeline.errors import Unsupported
from pipeline.ir import Graph, Op
from pipeline.ops import Kind
from pipeline.ops.aten import CALL_KINDS
from pipeline.ops.tables import join
from pipeline.runtime.functional import conv, fallback, random, recurrent
from pipeline.runtime.functional.base import Form
from pipeline.runtime.functional.fallback import NODES
from pipeline.runtime.tensors import torch_dtype

__all__ = ["FAMILIES", "FORMS", "REFUSED", "functional_operators", "why_not_differentiable"]

FAMILIES = (conv, recurrent, random, fallback)

FORMS: Mapping[Kind, Form] = join(family.FORMS for family in FAMILIES)

FUSED = "it is made only when a plan is compiled, behind which nothing is trained"

REFUSED: Mapping[Kind, str] = {
    Kind.SGD: "it is the update of a train step, which has no gradient",
    Kind.Adam: "it is the update of a train step, which has no gradient",
    Kind.NotFinite: "it decides about the update of a train step, which has no gradient",
    Kind.CountStep: "it counts the updates of a train step, which has no gradient",
    Kind.RoiAlign: "how many samples a region takes is read off its corners, and a form may look at no number",
    Kind.LinearPointwise: FUSED,
    Kind.ConvPointwise: FUSED,
    Kind.ScaledDotProductAttention: FUSED,
    Kind.SmallAttention: FUSED,
    Kind.FeedForward: FUSED,
    Kind.ReluProduct: FUSED,
    **dict.fromkeys(CALL_KINDS, "an operator of torch is run by torch"),
}
"""kind → why it has no form."""


def why_not_differentiable(op: Op) -> str:
    """Why an op has no form, as the end of a sentence; empty where it has one, and for torch's own operators."""
    if op.kind not in Kind.__members__:
        return ""
    kind = Kind[op.kind]
    if kind is Kind.OnnxNode and op.attrs["op"] not in NODES:
        return f"{op.attrs['op']} is run by another runtime, outside of torch"
    return REFUSED.get(kind, "")


def functional_operators(
    graph: Graph, *, keep_dtypes: bool = True
) -> dict[str, Callable[[Op, Sequence[torch.Tensor]], list[torch.Tensor]]]:
    """The forms of the kinds of `graph`, as `run_eager(own=…)` takes them.

    Without `keep_dtypes` the results of QuantizeLinear are floats, which have a gradient.
    """

    def run(op: Op, ins: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if why := why_not_differentiable(op):
            raise Unsupported(f"{op.operator} {op.name!r} has no functional form: {why}")
        specs = [graph.values[vid].spec for vid in op.outputs]
        found = FORMS[Kind[op.kind]](ins, op.attrs, specs)
        results = [found] if isinstance(found, torch.Tensor) else list(found)
        if keep_dtypes:
            results = [result.to(torch_dtype(spec.dtype)) for result, spec in zip(results, specs, strict=True)]
        return results

    return dict.fromkeys((op.kind for op in graph.ops if op.kind in Kind.__members__), run)
