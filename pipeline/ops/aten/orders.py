"""The attribute by which a call says that its results are stored with their axes permuted (`lowering.traced_order`)."""

from __future__ import annotations

from pipeline.ir.graph import Op

AS_STRIDED = "aten.as_strided.default"
"""The one operator that counts through the memory of its operand."""

ORDERS = "orders of axes"
"""An attribute that no torch operator has: for each result the permutation from its stored form, or ()."""


def has_permuted_results(op: Op) -> bool:
    """Whether a result of `op` is stored with its axes permuted."""
    orders = op.attrs.get(ORDERS, ())
    return isinstance(orders, tuple) and any(orders)
