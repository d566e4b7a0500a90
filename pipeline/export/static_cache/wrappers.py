"""The two graphs of a causal LM, as modules with flat tensors in and out, and the caches that they trace with."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from pipeline.export.static_cache.masks import mask_for_model
from pipeline.export.static_cache.model_checks import check_model, check_updates


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


class _Wrapper(nn.Module):
    """Holds a model's children and parameters as its own, so that no name gets a prefix."""

    wrapped: list[nn.Module]

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        check_model(model)
        object.__setattr__(self, "wrapped", [model])  # in a list, where torch does not look for modules
        for name, child in model.named_children():
            self.add_module(name, child)
        for name, parameter in model.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, buffer in model.named_buffers(recurse=False):
            self.register_buffer(name, buffer, persistent=name not in model._non_persistent_buffers_set)
        self.training = False  # as the model; .eval() would visit each of a large model's modules

    def _run(self, cache: Cache, ids: Tensor, mask: Tensor, positions: Tensor, **named: Tensor) -> tuple[Tensor, ...]:
        (model,) = self.wrapped
        result = model.forward(  # not `model(…)`: the tracer would look for the model among the wrapper's modules
            input_ids=ids,
            attention_mask=mask_for_model(mask, positions, model),
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            **named,
        )
        check_updates(cache, model)
        layers: list[Any] = cache.layers
        return (result.logits, *(state for layer in layers for state in (layer.keys, layer.values)))


class Prefill(_Wrapper):
    """The prompt in one go: logits of every position, then K and V of every layer.

    Args:
        model: any causal LM whose forward takes `past_key_values` with transformers' `Cache` interface and returns an
            object with `.logits`. It is not copied, and its parameters keep their names: a checkpoint of the model is
            one of the wrapper.

    Raises:
        UsageError: the model cannot be split like this; the message says why.
    """

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> tuple[Tensor, ...]:
        """
        Args:
            input_ids, position_ids: int64 (1, length).
            attention_mask: float32 (1, 1, length, length), additive; see `causal_mask`.

        Returns:
            logits (1, length, vocabulary), then k0, v0, k1, v1, …, each (1, heads, length, width) as the model
            caches it: after rotation, before heads are repeated.
        """
        cache = Cache(layer_class_to_replicate=FreshLayer)
        return self._run(cache, input_ids, attention_mask, position_ids)


class Decode(_Wrapper):
    """One more token, or a few: reads caches of fixed length, returns them with the new states written in.

    Args and Raises: as `Prefill`.
    """

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        cache_position: Tensor,
        *past_kv_flat: Tensor,
    ) -> tuple[Tensor, ...]:
        """
        Args:
            input_ids, position_ids: int64 (1, new tokens).
            attention_mask: float32 (1, 1, new tokens, max_cache_len), additive; hides what is not yet written.
            cache_position: int64 (new tokens,), where in the caches the new states go.
            past_kv_flat: k0, v0, k1, v1, …, each (1, heads, max_cache_len, width).

        Returns:
            logits (1, new tokens, vocabulary), then the caches in the order in which they came.
        """
        pairs = zip(past_kv_flat[::2], past_kv_flat[1::2], strict=True)
        cache = Cache(layers=[FixedLayer(keys, values, cache_position) for keys, values in pairs])
        # A model that takes `cache_position` makes it of the cache's length if it is not given one.
        named = {"cache_position": cache_position} if _takes(self.wrapped[0], "cache_position") else {}
        return self._run(cache, input_ids, attention_mask, position_ids, **named)


def _takes(model: nn.Module, argument: str) -> bool:
    return argument in inspect.signature(model.forward).parameters
