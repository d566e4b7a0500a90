"""Inputs of a part that belong together: caches that torch wrote for random tokens, masks of ones and left padding.

A cache of random numbers is nothing that a model sees, and a mask has to be as long as cache and tokens together; so
these are calls of an application, and no independent draws.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from passes.proof.draws import Draw, GivenDraw
from pipeline.config import VerifyConfig
from pipeline.export.parts.decoder import CachedDecoder, chunk_of, random_tokens
from pipeline.export.parts.states import BATCH, PAST, TOKENS, TOTAL, States
from pipeline.export.parts.static import StaticDecoder
from pipeline.runtime.tensors import to_numpy


@dataclass(frozen=True, slots=True)
class DecoderCall:
    """One call: how many tokens are in the cache and how many are new; `padded` rows begin with hidden tokens."""

    title: str
    batch: int
    past: int
    tokens: int
    padded: bool = False

    @property
    def sizes(self) -> dict[str, int]:
        return {BATCH: self.batch, TOKENS: self.tokens, PAST: self.past, TOTAL: self.past + self.tokens}


CALLS: Final = (
    DecoderCall("a prompt", 2, 0, 8),
    DecoderCall("a padded prompt", 3, 0, 5, padded=True),
    DecoderCall("a prompt of one token", 1, 0, 1),
    DecoderCall("the next token", 1, 7, 1),
    DecoderCall("the next token after padding", 2, 9, 1, padded=True),
    DecoderCall("four tokens after thirteen", 2, 13, 4),
)

LONGEST: Final = 64
"""Longer windows and chunks are not passed: a prompt of thousands of tokens takes minutes in every proof."""


def draw_calls(part: CachedDecoder | StaticDecoder, verify: VerifyConfig) -> tuple[GivenDraw, ...]:
    """The calls of an application, and those beyond a window or a chunk, with tokens by `verify.seed`.

    Args:
        verify: two draws are one round of all calls, four are two rounds.
    """
    rounds = max(1, verify.draws // 2)
    if isinstance(part, StaticDecoder):
        pasts = tuple(_pasts(part)) * rounds
        return tuple(_draw_static(part, past, seed) for seed, past in enumerate(pasts, verify.seed))
    calls = (*CALLS, *_long_calls(part.held_model.config))
    seeds = range(verify.seed, verify.seed + rounds * len(calls))
    return tuple(
        GivenDraw(Draw(seed, call.sizes, source=call.title), make_feeds(part, call, seed))
        for seed, call in zip(seeds, calls * rounds, strict=True)
    )


def _long_calls(config: Any) -> Iterator[DecoderCall]:
    window, chunk = _window_of(config), chunk_of(config)
    if 0 < window <= LONGEST:
        yield DecoderCall(f"three tokens after a window of {window}", 1, window + 2, 3)
    if 0 < chunk <= LONGEST:
        yield DecoderCall("a prompt of three chunks", 1, 0, 2 * chunk + 3)


def _window_of(config: Any) -> int:
    return getattr(config.get_text_config(decoder=True), "sliding_window", None) or 0


@torch.no_grad()
def make_feeds(decoder: CachedDecoder, call: DecoderCall, seed: int) -> dict[str, np.ndarray]:
    """The inputs of `call` by name; the first and the last token of the vocabulary are among them."""
    whole = random_tokens(decoder, call.batch, call.past + call.tokens, seed)
    mask = torch.ones_like(whole)
    if call.padded:
        for row in range(call.batch - 1):  # the last row is whole
            mask[row, : 1 + row % max(1, call.past + call.tokens - 1)] = 0
    states = decoder.empty_states(call.batch)
    before, new = whole.split([call.past, call.tokens], dim=1)
    if call.past:
        states = decoder(**decoder.arguments(before, mask[:, : call.past], states))["present"]
    return flat_arrays(decoder.arguments(new, mask, states))


def _pasts(part: StaticDecoder) -> Iterator[int]:
    """How many tokens are in the cache: none, a few, more than a window has, and as many as leave no room."""
    room, window = part.length - part.tokens, _window_of(part.held_model.config)
    wanted = (0, 7, *((window + 2,) if 0 < window <= LONGEST else ()), room)
    yield from dict.fromkeys(past for past in wanted if 0 <= past <= room)


def _draw_static(part: StaticDecoder, past: int, seed: int) -> GivenDraw:
    """A call after `past` tokens, over a cache that has rows of an earlier text after them."""
    tokens = random_tokens(part, 1, part.tokens, seed)
    states = part.empty_states(1, part.length)
    if any(state.grows for state in part.states):
        states = _fill_rows(part, part.write_states(random_tokens(part, 1, min(LONGEST, part.length), seed + 100)))
    if past:
        before = random_tokens(part, 1, min(past, LONGEST), seed + 1)
        states = part.write_states(before, _with_empty(part, states))
        states = states if past <= LONGEST else _fill_rows(part, states)
    else:
        states = _with_empty(part, states)
    title = f"{part.tokens} tokens after {past}" if part.tokens > 1 else f"the token after {past}"
    return GivenDraw(Draw(seed, {}, source=title), flat_arrays(part.arguments(tokens, past, states)))


def _with_empty(part: StaticDecoder, states: States) -> States:
    """`states`, in which those of a fixed size are as before the first token."""
    empty = part.empty_states(1, part.length)
    grows = {(state.layer, state.name): state.grows for state in part.states}
    return {
        layer: {name: tensor if grows[layer, name] else empty[layer][name] for name, tensor in tensors.items()}
        for layer, tensors in states.items()
    }


def _fill_rows(part: StaticDecoder, states: States) -> States:
    """`states`, in which the first rows are repeated up to the end: a text of thousands of tokens takes minutes."""
    axes = {(state.layer, state.name): state.shape.index(PAST) for state in part.states if state.grows}

    def repeat(tensor: torch.Tensor, axis: int) -> torch.Tensor:
        places = torch.arange(part.length, device=tensor.device) % min(LONGEST, part.length)
        return tensor.index_select(axis, places)

    return {
        layer: {
            name: repeat(tensor, axes[layer, name]) if (layer, name) in axes else tensor
            for name, tensor in tensors.items()
        }
        for layer, tensors in states.items()
    }


def flat_arrays(arguments: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The tensors of a tree of arguments by name: `past_key_values.0.key`."""
    return {name: to_numpy(tensor) for name, tensor in _flatten("", arguments)}


def _flatten(prefix: str, tree: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flatten(f"{prefix}{key}.", value)
        else:
            yield f"{prefix}{key}", value
