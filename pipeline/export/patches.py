"""Functions of libraries that are replaced while a model is traced, or while a model of parts is called at all.

A row is there only where a trace is impossible, wrong or slow without it. A test fails when a library no longer needs
it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import Tensor, nn

Place = tuple[Any, str]
"""An object, and the name of its attribute that is replaced."""


@dataclass(frozen=True, slots=True)
class CallPatch:
    """`make(original)` takes the place of each function that `find(model)` finds, while the model is called.

    Args:
        name: the name of the original function.
        find: the places of the original.
        make: returns the replacement.
        reason: why the original cannot stay.
        is_for_traces: replaced while any model is traced; otherwise in each call of a model of parts.
    """

    name: str
    find: Callable[[nn.Module], Iterable[Place]]
    make: Callable[[Any], Any]
    reason: str
    is_for_traces: bool = False


def _in_module(module: str, *path: str) -> Callable[[nn.Module], Iterator[Place]]:
    """The attribute at `path` in a Python module, where that is loaded."""

    def find(model: nn.Module) -> Iterator[Place]:
        del model
        if module in sys.modules:
            yield reduce(getattr, path[:-1], sys.modules[module]), path[-1]

    return find


def _files_with_delta_rule(model: nn.Module) -> Iterator[Place]:
    """`is_torchdynamo_exporting` in files of the model's classes, where it only chooses the form of the delta rule."""
    for name in sorted({type(module).__module__ for module in model.modules()}):
        file = sys.modules.get(name)
        if hasattr(file, "torch_chunk_gated_delta_rule") and hasattr(file, "is_torchdynamo_exporting"):
            yield file, "is_torchdynamo_exporting"


def _dynamic_rotations(model: nn.Module) -> Iterator[Place]:
    """The rotations whose frequencies follow the length of the text."""
    for module in model.modules():
        found = getattr(module, "rope_type", None)
        if "dynamic" in (found.values() if isinstance(found, Mapping) else (found,)):
            yield module, "forward"


def _caches_of_prefixes(model: nn.Module) -> Iterator[Place]:
    """`is_initialized` of caches, where types of tokens may say which of them are a prefix."""
    if "token_type_ids" in inspect.signature(model.forward).parameters and "transformers.cache_utils" in sys.modules:
        yield sys.modules["transformers.cache_utils"].Cache, "is_initialized"


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


def _with_frequencies_of_length(forward: Callable[..., Any]) -> Callable[..., Any]:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    module = getattr(forward, "__self__")  # noqa: B009 - a method, whose type says nothing of it
    rotate = inspect.unwrap(type(module).forward)

    @torch.no_grad()
    def rotate_by_length(x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        if layer_type is not None and module.rope_type[layer_type] != "dynamic":
            return forward(x, position_ids, layer_type)
        prefix, given = (f"{layer_type}_", [layer_type]) if layer_type is not None else ("", [])
        length = position_ids.max() + 1
        frequencies, scaling = ROPE_INIT_FUNCTIONS["dynamic"](module.config, x.device, length, *given)
        known = patch.dict(module._buffers, {f"{prefix}inv_freq": frequencies})
        with known, patch.object(module, f"{prefix}attention_scaling", scaling):
            return rotate(module, x, position_ids, *given)

    return rotate_by_length


PATCHES: Final = (
    CallPatch(
        "scaled_dot_product_attention",
        _in_module("torch.nn.functional", "scaled_dot_product_attention"),
        _with_additive_mask,
        "torch.onnx 2.13 adds the lowest number where torch adds -inf for a mask of bools, so a token of the padding, "
        "which sees no token, has another value in ONNX",
    ),
    CallPatch(
        "Module.to",
        _in_module("torch.nn", "Module", "to"),
        _without_move_to_itself,
        "routers of transformers convert their own weights to float32 in forward, which a trace refuses also where "
        "they have that type",
    ),
    CallPatch(
        "SwitchTransformersExperts.forward",
        _in_module(
            "transformers.models.switch_transformers.modeling_switch_transformers",
            "SwitchTransformersExperts",
            "forward",
        ),
        _with_every_expert,
        "the loop goes over the experts that tokens were sent to, which depends on values, and this class has no "
        "experts_implementation; here each expert sees all tokens, and what it was not sent counts zero times",
    ),
    CallPatch(
        "dynamic_rope_update",
        _dynamic_rotations,
        _with_frequencies_of_length,
        "it compares the length of the text with the longest before, which a trace refuses, and keeps the frequencies "
        "of an earlier text; here they follow from the positions of the call",
    ),
    CallPatch(
        "Cache.is_initialized",
        _caches_of_prefixes,
        lambda _: property(lambda _: False),
        "PaliGemma lets the tokens of a prompt see each other where the cache is empty, which one graph for all calls "
        "cannot ask; here the types of the tokens say in each call which are of the prompt",
    ),
    CallPatch(
        "is_torchdynamo_exporting",
        _files_with_delta_rule,
        lambda _: lambda: False,
        "for exporters without torch.linalg.solve_triangular the delta rule writes each of 64 rows of a chunk in "
        "place, which takes torch 20 s of processor time for each layer to trace",
        is_for_traces=True,
    ),
)


@contextmanager
def apply_patches(model: nn.Module, *, is_traced: bool = False) -> Iterator[None]:
    """Apply the patches of calls of a part, or with `is_traced` those of traces, in this block.

    Args:
        model: what is called.
    """
    with ExitStack() as stack:
        for row in PATCHES:
            if row.is_for_traces == is_traced:
                for place, name in row.find(model):
                    stack.enter_context(patch.object(place, name, row.make(getattr(place, name))))
        yield
