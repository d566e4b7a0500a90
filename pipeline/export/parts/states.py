"""The states of a cache: the tensors of its layers by name, read from transformers' own cache and written into one.

Which layers there are follows from the model's configuration (`DynamicCache(config=…)`). A state grows with each token
along its axis of positions, such as keys and values, or has a fixed size, such as the state of a convolution.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor
from transformers import DynamicCache, cache_utils
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from passes.suggest import describe_argument
from pipeline.errors import SourceError
from pipeline.runtime.operators import find_operator
from pipeline.runtime.tensors import dtype_name

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
    "key_scales": ("key_scale", 2, "is_initialized"),
    "value_scales": ("value_scale", 2, "is_initialized"),
    "indexer_key_scales": ("indexer_key_scale", 1, "is_indexer_initialized"),
}
"""Attribute of a layer → name of the state, its axis of positions, and the flag that says that it is there.

Only layers of fixed length have scales: of a cache in int8 in which each row has its own.
"""

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

    @property
    def grows(self) -> bool:
        """Whether it has a row for each token, and not a fixed size."""
        return PAST in self.shape

    def empty(self, batch: int, length: int = 0) -> Tensor:
        """Zeros: the state before the first token, with `length` rows where it grows."""
        sizes = {BATCH: batch, PAST: length}
        return torch.zeros([sizes[dim] if isinstance(dim, str) else dim for dim in self.shape], dtype=self.dtype)


def is_equal(first: Tensor, second: Tensor) -> bool:
    """Whether two results, which may have other dtypes, are equal, or not a number in the same places."""
    return first.shape == second.shape and bool(((first == second) | (first.isnan() & second.isnan())).all())


def new_cache(config: Any) -> DynamicCache:
    """An empty cache for a model of this configuration, in which each layer of attention keeps all positions.

    A layer that keeps a window only counts its tokens in Python, which a trace would hold fast; the window is in the
    mask too. transformers' own exporters do the same.
    """
    cache = DynamicCache(config=config)
    cache.layers = [_without_window(layer) for layer in cache.layers]
    return cache


def fixed_cache(
    config: Any, states: States, cache_position: Tensor, scales: States = MappingProxyType({})
) -> DynamicCache:
    """A cache with these states, whose keys and values have one length: new ones go to `cache_position`.

    Args:
        cache_position: int64 (tokens,), the rows of the new tokens, one after the other.
        scales: of states that are kept as int8: float, (), (heads,) or (heads, 1, width).

    Raises:
        SourceError: a layer keeps its states in another way.
    """
    cache = new_cache(config)
    for place, layer in enumerate(cache.layers):
        if str(place) in states:
            kind = FIXED_LAYERS.get(type(layer))
            if kind is None:
                raise SourceError(
                    f"model.cache: layer {place} keeps its states in {describe_argument(layer)}, which has no form "
                    "of fixed length; expected kind: dynamic for this model"
                )
            fixed = cache.layers[place] = kind.__new__(kind)
            fixed.__dict__.update(vars(layer), cache_position=cache_position, scales=scales.get(str(place), {}))
    return fill_cache(cache, states)


def _without_window(layer: Any) -> Any:
    if not isinstance(layer, DynamicSlidingWindowLayer):
        return layer
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        return LinearAttentionAndFullAttentionLayer(number_of_states=layer.number_of_states)
    return DynamicLayer()


class FixedLength:
    """Keys and values of a fixed length: an update writes at `cache_position`, and gives the whole cache back.

    What is computed may have another dtype than what is kept.
    """

    is_compileable = True  # so that a mask for one token is made too: rows that are not yet written have to be hidden
    cache_position: Tensor
    scales: Mapping[str, Tensor] = MappingProxyType({})
    keys: Any
    values: Any
    indexer_keys: Any
    key_scales: Any = None
    value_scales: Any = None
    indexer_key_scales: Any = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the keys and values of the new tokens, (1, heads, tokens, width)."""
        return self._update("keys", key_states), self._update("values", value_states)

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Write the keys of an indexer, (1, tokens, width)."""
        return self._update("indexer_keys", indexer_key_states)

    def _update(self, attribute: str, new: Tensor) -> Tensor:
        """Write the rows of the new tokens; return all rows, in the dtype of the new ones."""
        name, axis, _ = GROWING[attribute]
        by_row, scale = f"{name}_scales", self.scales.get(name)
        if getattr(self, by_row) is not None:
            factor = to_scale(new.abs().amax(-1, keepdim=True))
            return self._update_scaled(attribute, new, factor, self._write(by_row, axis, factor))
        if scale is None:
            return _cast(self._write(attribute, axis, _cast(new, getattr(self, attribute))), new)
        if scale.ndim > 1:
            return self._update_scaled(attribute, new, scale, scale)
        rows = self._write(attribute, axis, QUANTIZE(new, scale, to=KEPT))
        return DEQUANTIZE(rows, scale, to=dtype_name(new.dtype))

    def _update_scaled(self, attribute: str, new: Tensor, factor: Tensor, factors: Tensor) -> Tensor:
        """As `_update`, with the scales of the new rows and of all: QuantizeLinear has none along several axes."""
        unit = torch.ones(())
        rows = self._write(attribute, GROWING[attribute][1], QUANTIZE(new / factor, unit, to=KEPT))
        return DEQUANTIZE(rows, unit, to=dtype_name(new.dtype)) * _cast(factors, new)

    def _write(self, attribute: str, axis: int, new: Tensor) -> Tensor:
        """Write the rows of the new tokens into a state; return all of its rows."""
        rows = torch.index_copy(getattr(self, attribute), axis, self.cache_position, new)
        setattr(self, attribute, rows)
        return rows

    def get_seq_length(self) -> Tensor:
        """A tensor, so that no position is a constant of the graph."""
        return self.cache_position[0]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The whole length, and the first position in it."""
        return self.get_max_length(), 0

    def get_max_length(self) -> int:
        return self.keys.shape[2]


KEPT: Final = "int8"
"""The dtype of states that have scales."""

SMALLEST: Final = 1e-6
"""The largest value of what is always 0, in place of 0."""


def to_scale(largest: Tensor) -> Tensor:
    """The scale, float32, by which `largest`, float of any shape, is the largest number of int8."""
    return largest.float().clamp(min=SMALLEST) / torch.iinfo(torch.int8).max


def scales_of_rows(state: CacheState) -> CacheState:
    """The state that has a scale for each row of a head of `state`."""
    return CacheState(state.layer, f"{state.name}_scale", (*state.shape[:-1], 1), torch.float32)


QUANTIZE, DEQUANTIZE = (find_operator(f"onnxline.{name}.default") for name in ("quantize", "dequantize"))


def _cast(tensor: Tensor, like: Tensor) -> Tensor:
    return tensor if tensor.dtype == like.dtype else tensor.to(like.dtype)  # one that casts nothing is an operator too


FIXED_LAYERS: Final[Mapping[type, Any]] = {
    LinearAttentionLayer: LinearAttentionLayer,
    **{
        kind: type(f"Fixed{name}", (FixedLength, kind), {})
        for name in ("DynamicLayer", "DynamicIndexedLayer", "LinearAttentionAndFullAttentionLayer")
        if (kind := getattr(cache_utils, name, None)) is not None  # the second one is new in transformers
    },
}
"""Class of a layer → that of fixed length."""


def fixed_layer(keys: Tensor, values: Tensor, cache_position: Tensor) -> Any:
    """A layer with these keys and values, (1, heads, length, width); the widths may differ."""
    layer = FIXED_LAYERS[DynamicLayer]()
    layer.keys, layer.values, layer.cache_position, layer.is_initialized = keys, values, cache_position, True
    return layer


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
                yield _state_name(name, index), tensor


def _state_name(name: str, index: int) -> str:
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
                if (tensor := tensors.get(_state_name(name, place))) is not None:
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
