"""The parts `prefill` and `decode`: a causal LM over a cache of fixed length, which a call updates in place.

    prefill: input_ids (1, chunk), cache_position (chunk), past_key_values.N.NAME → logits, present.N.NAME
    decode:  the same, with one token

Each state has the same shape before and after, so that an application binds both to one memory; where each token has a
scale of its own, the scales are states too. A prompt goes in chunks of one size. Where the last chunk is not full, the
rest are any tokens: later tokens are written over them, and no token sees a row after its own. All shapes are numbers,
and the mask is made in the graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.config import CacheConfig, InputConfig
from pipeline.errors import SourceError
from pipeline.export.checkpoint import is_weightless
from pipeline.export.parts.decoder import DecoderPart, random_tokens, switch_of_rotation
from pipeline.export.parts.states import KEPT, CacheState, States, fixed_cache, read_states, scales_of_rows, to_scale
from pipeline.export.source import Example
from pipeline.export.user_code import first_line


class StaticDecoder(DecoderPart):
    """The part that takes `tokens` new tokens at once.

    Args:
        cache: of kind static.
        tokens: how many; those of a chunk for `prefill`, 1 for `decode`.

    Raises:
        SourceError: as `DecoderPart`; or the model has no positions for as many tokens as the cache holds.
    """

    def __init__(
        self, model: Any, cache: CacheConfig, tokens: int, folder: Path | None = None, *, last_only: bool = False
    ) -> None:
        super().__init__(model, folder, last_only=last_only)
        assert cache.length is not None
        self.length, self.tokens, self.is_rounded = cache.length, tokens, cache.dtype == KEPT
        kind, limit = switch_of_rotation(model.config) or ("", self.length)
        if self.length > limit:
            raise SourceError(
                f"model.cache.length: found {self.length}, but RoPE of the kind {kind} takes other frequencies for a "
                f"text of more than {limit} tokens, also for its first ones, and here a prompt goes in chunks; "
                f"expected {limit} or less, or cache: {{kind: dynamic}}"
            )
        self._refuse_length_without_positions()
        if cache.dtype == KEPT and cache.scales != "token":
            self._measure_scales(cache)
        if cache.dtype is not None:
            kept = getattr(torch, cache.dtype)
            self.states = tuple(
                CacheState(state.layer, state.name, state.shape, kept) if state.grows else state
                for state in self.states
            )
        if cache.scales == "token":
            self.states += tuple(scales_of_rows(state) for state in self.states if state.grows)

    @property
    def scales(self) -> dict[str, dict[str, Tensor]]:
        """The scales that are constants, by layer and name of a state: float, (), (heads,) or (heads, 1, width)."""
        found: dict[str, dict[str, Tensor]] = {}
        for state in self.states:
            if hasattr(self, _buffer_of(state)):
                found.setdefault(state.layer, {})[state.name] = getattr(self, _buffer_of(state))
        return found

    @torch.no_grad()
    def _refuse_length_without_positions(self) -> None:
        """Refuse a cache with more rows than the model has positions in a table; RoPE computes any position."""
        positions = getattr(self.held_model.config.get_text_config(decoder=True), "max_position_embeddings", 0)
        if self.length <= positions or is_weightless(self):
            return
        last = torch.tensor([self.length - 1], device=self.device)
        try:
            self.forward(torch.zeros_like(last)[None], last, past_key_values=self.empty_states(1, self.length))
        except Exception as error:  # a model's forward may raise anything
            raise SourceError(
                f"model.cache.length: found {self.length}, but {type(self.held_model).__name__} computes no token at "
                f"position {self.length - 1} ({first_line(error)}); expected the number of its positions or less: "
                f"{positions or 'its configuration has it'}"
            ) from error

    @torch.no_grad()
    def _measure_scales(self, cache: CacheConfig) -> None:
        """Make buffers of the scales by which the largest key or value that the prompts write is 127."""
        if is_weightless(self):
            raise SourceError("model.cache.dtype: found int8 for a model without weights, which say the scales")
        largest: dict[tuple[str, str], Tensor] = {}
        for ids in read_prompts(self, cache.data):
            for layer, tensors in self.write_states(ids[:, : self.length]).items():
                for name, tensor in tensors.items():
                    size = _largest(tensor.abs(), cache.scales or "head")
                    largest[layer, name] = torch.maximum(size, largest.get((layer, name), size))
        for state in self.states:
            if state.grows:
                self.register_buffer(_buffer_of(state), to_scale(largest[state.layer, state.name]), persistent=False)

    def forward(
        self,
        input_ids: Tensor,
        cache_position: Tensor,
        last_token: Tensor | None = None,
        past_key_values: States | None = None,
    ) -> dict[str, Any]:
        """
        Args:
            input_ids: int64 (1, tokens), the tokens that are new.
            cache_position: int64 (tokens,), their positions, one after the other; rows of the cache too.
            last_token: int64 (1,), which of them gives the logits; where those of the last token are asked for.
            past_key_values: the states, as the last call returned them.

        Returns:
            logits, float (1, tokens or 1, vocabulary), and `present`, the states after these tokens.
        """
        cache = fixed_cache(self.held_model.config, past_key_values or {}, cache_position, self.scales)
        given: dict[str, Any] = {"position_ids": cache_position[None], "cache_position": cache_position}
        if last_token is not None:
            given["logits_to_keep"] = last_token
        logits = self.compute_logits(input_ids, cache, **given)
        if last_token is not None and logits.shape[1] > 1:
            logits = logits.index_select(1, last_token)
        return {"logits": logits, "present": read_states(cache)}

    def declarations(self) -> dict[str, InputConfig]:
        """Name of each input → the values that it takes; no axis is open."""
        ranges = {
            "input_ids": (0.0, float(self.vocabulary)),
            "cache_position": (0.0, float(self.length)),
            "last_token": (0.0, float(self.tokens)),
        }
        return {name: InputConfig(range=ranges[name]) for name in self.arguments(*self._first_call()) if name in ranges}

    def arguments(self, ids: Tensor, past: int, states: States) -> dict[str, Any]:
        """The keyword arguments of a call for tokens after `past` others."""
        positions = torch.arange(past, past + ids.shape[1], device=ids.device)
        named = {"last_token": positions.new_tensor([ids.shape[1] - 1])} if self.last_only and self.tokens > 1 else {}
        return {"input_ids": ids, "cache_position": positions, **named, "past_key_values": states}

    def _first_call(self) -> tuple[Tensor, int, States]:
        return random_tokens(self, 1, self.tokens, seed=0), 0, self.empty_states(1, self.length)

    @torch.no_grad()
    def example(self) -> Example:
        """A call for a trace, whose cache the model has written; an empty one without weights."""
        past = 0 if is_weightless(self) else min(7, self.length - self.tokens)
        states = self.write_states(random_tokens(self, 1, past, seed=1)) if past else self._first_call()[2]
        return Example((), self.arguments(random_tokens(self, 1, self.tokens, seed=0), past, states))

    @torch.no_grad()
    def write_states(self, ids: Tensor, states: States | None = None) -> States:
        """The states after the tokens `ids`, int64 (1, any), at the first rows of `states`, by default of zeros."""
        states = self.empty_states(1, self.length) if states is None else states
        positions = torch.arange(ids.shape[1], device=ids.device)
        return self.forward(ids, positions, past_key_values=states)["present"]


def _largest(sizes: Tensor, scales: str) -> Tensor:
    """The largest of (batch, heads, tokens, width), or of (batch, tokens, width), for each scale."""
    if scales == "channel":
        return sizes.amax((0, -2), keepdim=True)[0]
    return sizes.amax((0, 2, 3)) if sizes.ndim == 4 and scales == "head" else sizes.max()


def _buffer_of(state: CacheState) -> str:
    return f"{state.name}_scale_{state.layer}"


def read_prompts(part: DecoderPart, files: Sequence[str]) -> Iterator[Tensor]:
    """The prompts in `files`, rows of an array `input_ids`, int64 (1, tokens) each; random ones where no file is named.

    Raises:
        SourceError: a file has no such array, or a token outside of the vocabulary.
    """
    for seed in range(0 if files else PROMPTS):
        yield random_tokens(part, 1, PROMPT_TOKENS, seed)
    for file in files:
        try:
            with np.load(file) as arrays:
                rows = np.atleast_2d(arrays["input_ids"])
        except Exception as error:  # a damaged file has errors of zip, pickle and numpy
            raise SourceError(
                f"model.cache.data: {file} is no file .npz with an array input_ids of prompts: {first_line(error)}"
            ) from error
        if rows.dtype.kind not in "iu" or not rows.size or rows.min() < 0 or rows.max() >= part.vocabulary:
            raise SourceError(
                f"model.cache.data: {file}: found {rows.dtype}{list(rows.shape)}, expected integers from 0 to "
                f"{part.vocabulary - 1}"
            )
        for row in rows:
            yield torch.from_numpy(row.astype(np.int64))[None].to(part.device)


PROMPTS, PROMPT_TOKENS = 4, 64
"""How many random prompts decide the scales of a cache in int8, and how many tokens each has."""
