"""Quick ways of operators that pick elements by indices."""

from __future__ import annotations

from functools import partial

import torch

from pipeline.runtime.kernels.aten.call import Call, Quick, into
from pipeline.runtime.kernels.base import Launch, Outs

__all__ = ["QUICK"]


def embedding(call: Call, outs: Outs) -> Launch | None:
    """Rows of the table, picked into the result at once, as torch itself picks them."""
    table, indices = call.args[:2]
    if not (indices.is_contiguous() and outs[0].is_contiguous() and outs[0].numel() and table.dim() == 2):
        return None
    return partial(torch.index_select, table, 0, indices.view(-1), out=outs[0].view(-1, table.shape[1]))


QUICK: dict[str, Quick] = {
    "aten.embedding.default": embedding,
    "aten.gather.default": into(torch.gather),
    "aten.index_select.default": into(torch.index_select),
}
