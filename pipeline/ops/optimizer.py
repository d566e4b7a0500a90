"""Kinds that update parameters: one call for any number of them, each with a gradient and the optimizer's moments.

The operands come in groups of `count`: parameters, gradients, then the moments of each sort; after them scalars. The
results are the new parameters and the new moments, in the order of the operands. Each may be written over the operand
that it replaces, since element i of every operand is read before element i of any result is written.

Scalars are tensors and no attributes, so that a schedule may change them between runs: `step` (Adam: the number of this
step, the first one is 1), `rate` (the learning rate), `skip` (1: nothing changes). NotFinite makes `skip` of the loss,
and CountStep the next `step`.
"""

from __future__ import annotations

from pipeline.ir.graph import Attr
from pipeline.ops.kinds import Kind
from pipeline.ops.rows import Check, OpCall, OverwriteRule, floating, kind, same_dtype, signature

SCALARS_OF_SGD = 2
SCALARS_OF_ADAM = 3


def groups(scalars: int, *moments: int) -> Check:
    """The operands are groups of one size and shape, `moments` of them after parameters and gradients, and scalars."""

    def check(call: OpCall) -> str | None:
        count, operands = _count(call.attrs["count"]), call.ins[: len(call.ins) - scalars]
        if count < 1 or len(operands) % count or len(operands) // count - 2 not in moments:
            return (
                f"{len(call.ins)} inputs with count={count}; expected {scalars} scalars after parameters, gradients "
                f"and {' or '.join(map(str, moments))} moments of {count} tensors each"
            )
        shapes = [[spec.shape for spec in operands[at : at + count]] for at in range(0, len(operands), count)]
        if any(shape != shapes[0] for shape in shapes):
            return "a gradient or a moment has another shape than its parameter"
        if [*call.outs] != [*operands[:count], *operands[2 * count :]]:
            return "the results are not of the shapes and dtypes of the parameters and the moments"
        if len({spec.dtype for spec in operands}) > 1:
            return "parameters, gradients and moments of several dtypes; expected one"
        numbers = call.ins[-scalars:]
        if any(spec.numel != 1 for spec in numbers):
            return "a scalar with more than one element"
        wrong = [spec.dtype for at, spec in enumerate(numbers) if at != scalars - 2 and spec.dtype != "float32"]
        return f"a scalar of {wrong[0]}; expected float32 for all but the rate" if wrong else None

    return check


def all_but_gradients(scalars: int) -> OverwriteRule:
    """Results replace parameters and moments; gradients and the `scalars` operands at the end are only read."""

    def overwrites(call: OpCall) -> tuple[int, ...]:
        count = _count(call.attrs["count"])
        return (*range(count), *range(2 * count, len(call.ins) - scalars))

    return overwrites


def to_scalar(call: OpCall) -> str | None:
    """Every operand has one element, and the result is float32 without dimensions."""
    out = call.outs[0]
    if out.shape or out.dtype != "float32" or any(spec.numel != 1 for spec in call.ins):
        return f"a result {out.dtype}{list(out.shape)}; expected one element in all operands, and float32[]"
    return None


def _count(count: Attr) -> int:
    return count if isinstance(count, int) else 0


KINDS = (
    kind(
        Kind.SGD,
        signature(groups(SCALARS_OF_SGD, 0, 1), inputs=(4, None), outputs=(1, None)),
        "count=i,momentum=f,weight_decay=f,nesterov=?,maximize=?",
        overwrites=all_but_gradients(SCALARS_OF_SGD),
    ),
    kind(
        Kind.Adam,
        signature(groups(SCALARS_OF_ADAM, 2, 3), inputs=(7, None), outputs=(3, None)),
        "count=i,beta1=f,beta2=f,epsilon=f,weight_decay=f,decoupled=?,maximize=?",
        overwrites=all_but_gradients(SCALARS_OF_ADAM),
    ),
    kind(Kind.NotFinite, signature(floating, to_scalar)),
    kind(Kind.CountStep, signature(same_dtype, to_scalar, inputs=2), inplace=(0,)),
)
"""Adam has a third sort of moments where it is AMSGrad's; `decoupled` weight decay is AdamW's."""
