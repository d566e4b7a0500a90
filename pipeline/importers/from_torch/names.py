"""Names of ops and values, as torch.fx gives them: `linear`, `linear_1`, `sum_1` where the plain name is Python's own.

They are counted afresh here, in the order of the ops. So what torch numbered while it traced and threw away later
leaves no gap, and a graph that was traced in part and repeated has the names of one that was traced whole.
"""

from __future__ import annotations

import builtins
import keyword
from collections.abc import Iterable

__all__ = ["Names", "base_name"]

RESERVED = frozenset(
    {*dir(builtins), *keyword.kwlist, "inf", "nan", "NoneType", "torch", "device", "fx_pytree", "pytree"}
)
"""What torch.fx never uses as a name by itself, since its generated code has another meaning for it."""


def base_name(kind: str) -> str:
    """What an op of this kind is called: `linear` of aten.linear.default, `cond` of higher_order.cond."""
    parts = kind.split(".")
    return parts[-1] if parts[0] == "higher_order" else parts[-2]


class Names:
    """The names of one graph."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._taken = set(taken)
        self._counts: dict[str, int] = {}

    def new(self, base: str) -> str:
        """`base`, or `base_1`, `base_2`, … when that is taken or reserved."""
        name = base
        count = self._counts.get(base, 0)
        while name in self._taken or name in RESERVED:
            count += 1
            name = f"{base}_{count}"
        self._counts[base] = count
        self._taken.add(name)
        return name
