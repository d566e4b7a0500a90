"""What a part needs otherwise than the libraries have it, in its trace and in its reference.

A row is there only where a trace is impossible or wrong without it. A test fails when a library no longer needs it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class CallPatch:
    """`make(original)` takes the place of `name` in `module`, where that is loaded, while the part is called."""

    module: str
    name: str
    make: Callable[[Any], Any]
    reason: str


def _with_additive_mask(attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def attend(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **options: Any) -> Tensor:
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            lowest = torch.finfo(query.dtype).min
            shown = torch.zeros(attn_mask.shape, dtype=query.dtype, device=query.device)
            attn_mask = shown.masked_fill(attn_mask.logical_not(), lowest)
        return attention(query, key, value, attn_mask, **options)

    return attend


def _without_move_to_itself(to: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    def convert(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        tensors = (*self.parameters(), *self.buffers())
        kinds = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
        return self if not kwargs and args == tuple(kinds) else to(self, *args, **kwargs)

    return convert


def _with_every_expert(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    del forward

    def compute(self: Any, hidden_states: Tensor, selected_experts: Tensor, routing_weights: Tensor) -> Tensor:
        weights = selected_experts[:, 0].to(routing_weights.dtype) * routing_weights  # (tokens, experts)
        results = [self[f"expert_{place}"](hidden_states) for place in range(self.num_experts)]
        weighted = [result * weights[:, place, None] for place, result in enumerate(results)]
        return torch.stack(weighted).sum(0).to(hidden_states.dtype)

    return compute


PATCHES: Final = (
    CallPatch(
        "torch.nn.functional",
        "scaled_dot_product_attention",
        _with_additive_mask,
        "torch.onnx 2.13 adds the lowest number where torch adds -inf for a mask of bools, so a token of the padding, "
        "which sees no token, has another value in ONNX",
    ),
    CallPatch(
        "torch.nn",
        "Module.to",
        _without_move_to_itself,
        "routers of transformers convert their own weights to float32 in forward, which a trace refuses also where "
        "they have that type",
    ),
    CallPatch(
        "transformers.models.switch_transformers.modeling_switch_transformers",
        "SwitchTransformersExperts.forward",
        _with_every_expert,
        "the loop goes over the experts that tokens were sent to, which depends on values, and this class has no "
        "experts_implementation; here each expert sees all tokens, and what it was not sent counts zero times",
    ),
)


@contextmanager
def apply_patches() -> Iterator[None]:
    """Apply all patches in this block."""
    with ExitStack() as stack:
        for row in PATCHES:
            if row.module in sys.modules:
                *owner, name = row.name.split(".")
                place = attrgetter(".".join(owner))(sys.modules[row.module]) if owner else sys.modules[row.module]
                stack.enter_context(patch.object(place, name, row.make(getattr(place, name))))
        yield
