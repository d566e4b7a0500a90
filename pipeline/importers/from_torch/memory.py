"""Which memory a tensor lies in."""

from __future__ import annotations

import torch

__all__ = ["memory_of"]


def memory_of(item: object) -> int | None:
    """What names the storage of a tensor, on meta too, where every address is 0; None of what is no dense tensor."""
    if not isinstance(item, torch.Tensor) or item.layout is not torch.strided or item.is_nested:
        return None
    return item.untyped_storage()._cdata
