"""How the tensors lie that exist before the first call: inputs, weights, states, constants."""

from __future__ import annotations

from pipeline.ir.graph import Value
from pipeline.lowering import Layout

__all__ = ["first_layout", "traced_strides"]


def first_layout(value: Value) -> Layout:
    """Where the elements of `value` lie if it owns its storage.

    What a call makes lies row after row. What is given is brought to the strides that it had in the trace, since
    operators choose by them (a convolution on channels_last, a `view`), unless several elements lay on one place there:
    an expanded input may hold other numbers at each of them in a run, and every view of it is one of rows as well.
    """
    sizes, strides = value.spec.sizes, traced_strides(value)
    traced = None if strides is None else Layout(sizes, strides)
    return traced if traced is not None and traced.is_distinct else Layout.contiguous(sizes)


def traced_strides(value: Value) -> tuple[int, ...] | None:
    """The strides of a given value, in elements; None where the trace had it contiguous, or does not say."""
    if value.producer is not None or value.strides is None:
        return None
    strides = tuple(stride for stride in value.strides if isinstance(stride, int))
    return strides if len(strides) == value.spec.rank else None
