"""Which inputs of a torch module are indices of tables, found out in one run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.export.arrays import to_torch
from pipeline.export.reference import run_torch
from pipeline.export.source import TorchSource

__all__ = ["indexed_rows"]


def indexed_rows(source: TorchSource, feeds: Mapping[str, np.ndarray]) -> dict[str, int]:
    """Inputs of whole numbers that are indices → the number of rows of the smallest table that they index.

    Raises:
        SourceError: the module raises.
    """
    whole = {name: to_torch(array) for name, array in feeds.items() if array.dtype.kind in "iu"}
    if not whole or any(tensor.is_meta for tensor in source.module.parameters()):
        return {}
    with _Lookups(whole) as lookups:
        run_torch(source, {**feeds, **whole})
    return lookups.rows


class _Lookups(TorchDispatchMode):
    """Follows tensors through ops that move or cast their elements, up to those that look up rows."""

    def __init__(self, inputs: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.rows: dict[str, int] = {}
        self._names = {name: {_place(tensor)} for name, tensor in inputs.items()}
        self._held: list[torch.Tensor] = []
        """Tensors that are followed: a place in memory says who is there only while they live."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        found = LOOKUPS.get(str(func))
        if found is not None:
            indices, axis = found
            self._note(args[0], args[indices], 0 if axis is None else args[axis])
        elif str(func).partition(".default")[0] in MOVING and args and isinstance(made, torch.Tensor):
            self._follow(args[0], made)
        return made

    def _follow(self, source: Any, made: torch.Tensor) -> None:
        for tensor in pytree.tree_leaves(source):
            for places in self._names.values():
                if isinstance(tensor, torch.Tensor) and _place(tensor) in places:
                    places.add(_place(made))
                    self._held.append(made)

    def _note(self, table: Any, indices: Any, axis: Any) -> None:
        for position, tensor in enumerate(indices if isinstance(indices, list | tuple) else [indices]):
            if not isinstance(tensor, torch.Tensor) or not isinstance(table, torch.Tensor):
                continue
            rows = table.shape[position if isinstance(indices, list | tuple) else int(axis)]
            for name, places in self._names.items():
                if _place(tensor) in places:
                    self.rows[name] = min(rows, self.rows.get(name, rows))


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


LOOKUPS: Final[Mapping[str, tuple[int, int | None]]] = {
    "aten.embedding.default": (1, None),
    "aten.index.Tensor": (1, None),
    "aten.index_select.default": (2, 1),
    "aten.gather.default": (2, 1),
}
"""Operator, whose first argument is the table → the places of its indices, and of its axis."""

MOVING: Final = frozenset(
    {
        *("aten._to_copy", "aten.clone", "aten.cat", "aten.select.int", "aten.slice.Tensor"),
        *("aten.expand", "aten.repeat", "aten.unsqueeze", "aten.view", "aten._unsafe_view"),
    }
)
