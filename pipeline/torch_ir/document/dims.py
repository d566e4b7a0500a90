"""Named dims in the JSON of an IR: the sizes that they may have, and conditions between them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.errors import SourceError
from pipeline.ir import DimRange
from pipeline.ir.expression import names_in
from pipeline.torch_ir.document.expected import Unexpected, as_expected, is_list, is_text, is_whole, mapping

__all__ = ["dims_in", "read_dims"]


def read_dims(data: Mapping[str, Any]) -> tuple[dict[str, DimRange], tuple[str, ...]]:
    """The ranges of named dims, and the guards, of the IR `data`.

    Raises:
        Unexpected: a range that is none or has no size in it, a guard that is no expression, or one of other dims.
    """
    what = "the least and the most size, as in [2, 9] or [2, null]"
    ranges = {
        name: DimRange(*as_expected(item, f"dims: {name}", what, _is_range))
        for name, item in mapping(data, "dims").items()
    }
    guards = as_expected(data.get("guards") or (), "guards", "a list of expressions", is_list)
    for index, guard in enumerate(guards):
        named = dims_in(guard, f"guards[{index}]")
        as_expected(guard, f"guards[{index}]", _of_dims(ranges), lambda _, named=named: named <= ranges.keys())
    return ranges, tuple(guards)


def dims_in(item: Any, where: str) -> frozenset[str]:
    """The dims of which the expression `item` speaks.

    Raises:
        Unexpected: it is no expression.
    """
    try:
        return names_in(as_expected(item, where, "an expression of named dims, as text", is_text))
    except SourceError as error:
        raise Unexpected(f"{where}: {error}") from error


def _of_dims(ranges: Mapping[str, DimRange]) -> str:
    return f"an expression of {', '.join(ranges)}" if ranges else "none, as there are no dims"


def _is_range(item: Any) -> bool:
    if not (is_list(item) and len(item) == 2 and is_whole(item[0])):
        return False
    least, most = item
    return most is None or (is_whole(most) and most >= least)
