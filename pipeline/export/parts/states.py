"""The states of a cache: the tensors of its layers by name, read from transformers' own cache and written into one.

Which layers there are follows from the model's configuration (`DynamicCache(config=…)`). A state grows with each token
along its axis of positions, such as keys and values, or has a fixed size, such as the state of a convolution.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
)

BATCH: Final = "batch_size"
TOKENS: Final = "sequence_length"
PAST: Final = "past_sequence_length"
TOTAL: Final = "total_sequence_length"
"""Names of dims, in the words of onnxruntime-genai; TOTAL is PAST and TOKENS together."""

States = Mapping[str, Mapping[str, Tensor]]
"""Index of the layer → name of the state → tensor."""

GROWING: Final[Mapping[str, tuple[str, int, str]]] = {
    "keys": ("key", 2, "is_initialized"),
    "values": ("value", 2, "is_initialized"),
    "indexer_keys": ("indexer_key", 1, "is_indexer_initialized"),
}
"""Attribute of a layer → name of the state, its axis of positions, and the flag that says that it is there."""

FIXED: Final[Mapping[str, tuple[str, str]]] = {
    "conv_states": ("conv_state", "is_conv_states_initialized"),
    "recurrent_states": ("recurrent_state", "is_recurrent_states_initialized"),
}
"""Attribute of a layer that holds states by their index → name of the first, and the flags by index."""


@dataclass(frozen=True, slots=True)
class CacheState:
    """One state. Strings in `shape` are BATCH and PAST."""

    layer: str
    name: str
    shape: tuple[int | str, ...]
    dtype: torch.dtype

    def empty(self, batch: int) -> Tensor:
        """The state before the first token: of length 0, or zeros."""
        sizes = {BATCH: batch, PAST: 0}
        return torch.zeros([sizes[dim] if isinstance(dim, str) else dim for dim in self.shape], dtype=self.dtype)


def new_cache(config: Any) -> DynamicCache:
    """An empty cache for a model of this configuration, in which each layer of attention keeps all positions.

    A layer that keeps a window only counts its tokens in Python, which a trace would hold fast; the window is in the
    mask too. transformers' own exporters do the same.
    """
    cache = DynamicCache(config=config)
    cache.layers = [_without_window(layer) for layer in cache.layers]
    return cache


def _without_window(layer: Any) -> Any:
    if not isinstance(layer, DynamicSlidingWindowLayer):
        return layer
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        return LinearAttentionAndFullAttentionLayer(number_of_states=layer.number_of_states)
    return DynamicLayer()


def read_states(cache: Any) -> dict[str, dict[str, Tensor]]:
    """The tensors of all layers; layers that keep nothing are left out."""
    states = {str(index): dict(_states_of(layer)) for index, layer in enumerate(cache.layers)}
    return {index: tensors for index, tensors in states.items() if tensors}


def _states_of(layer: Any) -> Iterator[tuple[str, Tensor]]:
    for attribute, (name, _, _) in GROWING.items():
        tensor = getattr(layer, attribute, None)
        if tensor is not None:
            yield name, tensor
    for attribute, (name, _) in FIXED.items():
        for index, tensor in (getattr(layer, attribute, None) or {}).items():
            if tensor is not None:
                yield _numbered(name, index), tensor


def _numbered(name: str, index: int) -> str:
    return f"{name}_{index}" if index else name


def fill_cache(cache: DynamicCache, states: States) -> DynamicCache:
    """Write `states` into an empty cache. Layers write to fixed states in place, so these are copies."""
    for index, tensors in states.items():
        layer: Any = cache.layers[int(index)]
        first = next(iter(tensors.values()))
        layer.dtype, layer.device = first.dtype, first.device
        for attribute, (name, _, flag) in GROWING.items():
            if name in tensors:
                setattr(layer, attribute, tensors[name])
                setattr(layer, flag, True)
        for attribute, (name, flags) in FIXED.items():
            for place in getattr(layer, attribute, None) or {}:
                if (tensor := tensors.get(_numbered(name, place))) is not None:
                    getattr(layer, attribute)[place] = tensor.clone()
                    getattr(layer, flags)[place] = layer.has_previous_state[place] = True
                    if attribute == "conv_states":
                        layer.conv_kernel_size[place] = tensor.shape[-1]
    return cache


def specs_of(states: States) -> tuple[CacheState, ...]:
    """The states that a call has written, with names for the dims that differ between calls."""
    axes = {name: axis for name, axis, _ in GROWING.values()}
    found = []
    for layer, tensors in states.items():
        for name, tensor in tensors.items():
            named = {0: BATCH, **({axes[name]: PAST} if name in axes else {})}
            shape = tuple(named.get(axis, size) for axis, size in enumerate(tensor.shape))
            found.append(CacheState(layer, name, shape, tensor.dtype))
    return tuple(found)
