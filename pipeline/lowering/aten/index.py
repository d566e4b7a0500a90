"""Operators of torch whose result is their first operand, changed in some places: how a cache is written.

Their results may be written over that operand where it dies; then nothing is copied but what changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from pipeline.ir.attr import Attr, Use
from pipeline.ir.graph import Op

__all__ = ["CHANGED", "changed_in_place"]

CHANGED: Final = frozenset(
    {
        "aten.copy.default",
        "aten.fill.Scalar",
        "aten.fill.Tensor",
        "aten.index_add.default",
        "aten.index_copy.default",
        "aten.index_fill.int_Scalar",
        "aten.index_fill.int_Tensor",
        "aten.index_put.default",
        "aten.masked_fill.Tensor",
        "aten.masked_scatter.default",
        "aten.scatter.src",
        "aten.scatter.value",
        "aten.scatter_add.default",
        "aten.select_scatter.default",
        "aten.slice_scatter.default",
        "aten.zero.default",
    }
)


def changed_in_place(op: Op) -> tuple[int, ...]:
    """The input that `op` may write over: (0,), or nothing where that is not the operand, or is read once more."""
    found = [index for item in op.attrs.values() for index in _uses(item)]
    return (0,) if op.kind in CHANGED and op.attrs.get("self") == Use(0) and found.count(0) == 1 else ()


def _uses(item: Attr) -> Iterator[int]:
    if isinstance(item, Use):
        yield item.index
    elif isinstance(item, tuple):
        for part in item:
            yield from _uses(part)
