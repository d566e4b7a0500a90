"""Inputs of a decoder that belong together: caches that torch wrote for random tokens, masks of ones and left padding.

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
from pipeline.export.parts.decoder import CachedDecoder, chunk_of
from pipeline.export.parts.states import BATCH, PAST, TOKENS, TOTAL
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


def draw_calls(decoder: CachedDecoder, verify: VerifyConfig) -> tuple[GivenDraw, ...]:
    """The calls of `CALLS`, and those beyond a window or a chunk, with tokens by `verify.seed`.

    Args:
        verify: two draws are one round of all calls, four are two rounds.
    """
    calls = (*CALLS, *_long_calls(decoder.held_model.config))
    rounds = max(1, verify.draws // 2)
    seeds = range(verify.seed, verify.seed + rounds * len(calls))
    return tuple(
        GivenDraw(Draw(seed, call.sizes, source=call.title), make_feeds(decoder, call, seed))
        for seed, call in zip(seeds, calls * rounds, strict=True)
    )


def _long_calls(config: Any) -> Iterator[DecoderCall]:
    window, chunk = getattr(config.get_text_config(decoder=True), "sliding_window", None) or 0, chunk_of(config)
    if 0 < window <= LONGEST:
        yield DecoderCall(f"three tokens after a window of {window}", 1, window + 2, 3)
    if 0 < chunk <= LONGEST:
        yield DecoderCall("a prompt of three chunks", 1, 0, 2 * chunk + 3)


@torch.no_grad()
def make_feeds(decoder: CachedDecoder, call: DecoderCall, seed: int) -> dict[str, np.ndarray]:
    """The inputs of `call` by name; the first and the last token of the vocabulary are among them."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randint(0, decoder.vocabulary, (call.batch, call.past + call.tokens), generator=generator)
    whole[0, -1], whole[-1, 0] = decoder.vocabulary - 1, 0
    mask = torch.ones_like(whole)
    if call.padded:
        for row in range(call.batch - 1):  # the last row is whole
            mask[row, : 1 + row % max(1, call.past + call.tokens - 1)] = 0
    states = decoder.empty_states(call.batch)
    before, new = whole.split([call.past, call.tokens], dim=1)
    if call.past:
        states = decoder(**decoder.arguments(before, mask[:, : call.past], states))["present"]
    return {name: to_numpy(tensor) for name, tensor in _flatten("", decoder.arguments(new, mask, states))}


def _flatten(prefix: str, tree: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flatten(f"{prefix}{key}.", value)
        else:
            yield f"{prefix}{key}", value
