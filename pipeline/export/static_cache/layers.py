"""What stands in a `transformers.Cache` while a wrapper traces the model: layers whose update is dataflow.

transformers' own layers write into tensors that they hold, which a graph does not show. These take tensors and
keep the results for the wrapper to return. Models written for older releases of transformers give `update` extra
arguments (`cache_kwargs`); a layer here needs none of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

__all__ = ["FixedLayer", "FreshLayer"]


class FreshLayer(CacheLayerMixin):
    """A layer before the first token: what the model writes is what it reads.

    Keeps all positions, also of a sliding window: the window is in the mask, and decode has room for all of them.
    """

    is_sliding = False
    updates = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Take K and V of the prompt, (1, heads, length, width) each, and give them back."""
        self.keys, self.values = key_states, value_states
        self.updates += 1
        return key_states, value_states

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to allocate."""

    def get_seq_length(self) -> Any:
        """Positions that are filled: none before the update."""
        return 0 if self.keys is None else self.keys.shape[-2]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys. The mask is an input, so models ask only out of habit."""
        return query_length, 0

    def get_max_length(self) -> int:
        """No limit of its own."""
        return -1

    get_max_cache_shape = get_max_length  # its older name in transformers


class FixedLayer(FreshLayer):
    """A layer of fixed length: new states go to `cache_position` by `index_copy`, and the graph sees old and new.

    Args:
        keys, values: (1, heads, max_cache_len, width), the widths may differ; never written to.
        cache_position: int64 (new tokens,), where these go.
    """

    is_compileable = True

    def __init__(self, keys: Tensor, values: Tensor, cache_position: Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.is_initialized = True
        self.cache_position = cache_position

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Give back the whole caches with the new states written into them."""
        assert self.keys is not None and self.values is not None
        keys = torch.index_copy(self.keys, 2, self.cache_position, key_states)
        values = torch.index_copy(self.values, 2, self.cache_position, value_states)
        return super().update(keys, values)

    def get_seq_length(self) -> Any:
        """A tensor, so that a model which computes with it computes in the graph, and no step is baked in."""
        return self.cache_position[0]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The whole fixed length, from 0."""
        return self.get_max_length(), 0

    def get_max_length(self) -> int:
        """The fixed length."""
        assert self.keys is not None
        return self.keys.shape[-2]

    get_max_cache_shape = get_max_length
