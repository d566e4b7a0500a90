"""Prefill and decode over a cache of fixed length: what they take, and that a text through both is torch's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.generation import make_model
from pipeline.config import CacheConfig, VerifyConfig
from pipeline.export.parts.draws import draw_calls
from pipeline.export.parts.static import StaticDecoder
from pipeline.parts.chain import generate_by_torch

QUICK = ("Llama", "Gemma 3", "Falcon-H1")
"""One with keys and values alone, one with a window, one with all kinds of states in one layer."""


def parts_of(model: Any, **settings: Any) -> tuple[StaticDecoder, StaticDecoder]:
    cache = CacheConfig(**{"kind": "static", "length": 40, "chunk": 4, **settings})
    return StaticDecoder(model, cache, cache.tokens), StaticDecoder(model, cache, 1)


@torch.no_grad()
def generate(parts: tuple[StaticDecoder, StaticDecoder], prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Greedy tokens: whole chunks by prefill, the rest by decode."""
    prefill, decode = parts
    states, new, seen, tokens = decode.empty_states(1, decode.length), list(prompt), 0, list[int]()
    while len(tokens) < count:
        part = prefill if len(new) >= prefill.tokens else decode
        ids = torch.tensor([new[: part.tokens]])
        found = part(**part.arguments(ids, seen, states))
        states, new, seen = found["present"], new[part.tokens :], seen + part.tokens
        if not new:
            tokens.append(int(found["logits"][0, -1].argmax()))
            new = tokens[-1:]
    return tuple(tokens)


@pytest.mark.parametrize("family", QUICK)
def test_chunks_and_tokens_are_as_torch_generates(family: str) -> None:
    model = make_model(family)
    text = generate_by_torch(model, 9, 1)
    assert len(set(text.tokens)) > 3
    assert generate(parts_of(model), text.prompt, len(text.tokens)) == text.tokens


def test_states_have_one_shape_and_the_dtype_that_is_asked_for() -> None:
    _, decode = parts_of(make_model("Falcon-H1"), dtype="float16")
    states = decode.empty_states(1, decode.length)["0"]
    assert {name: (tuple(state.shape), state.dtype) for name, state in states.items()} == {
        "key": ((1, 2, 40, 8), torch.float16),
        "value": ((1, 2, 40, 8), torch.float16),
        "conv_state": ((1, 80, 4), torch.float32),
        "recurrent_state": ((1, 8, 8, 8), torch.float32),
    }
    found = decode(**decode.arguments(torch.tensor([[3]]), 5, {"0": states, "1": states}))["present"]["0"]
    assert {name: state.dtype for name, state in found.items()} == {name: state.dtype for name, state in states.items()}


@torch.no_grad()
def test_what_fills_a_chunk_up_changes_nothing() -> None:
    prefill, decode = parts_of(make_model("Gemma 3"))
    empty, logits = decode.empty_states(1, 40), []
    for filling in (0, 7):
        first = prefill(**prefill.arguments(torch.tensor([[5, 17, filling, filling]]), 0, empty))
        then = decode(**decode.arguments(torch.tensor([[3]]), 2, first["present"]))
        logits.append(torch.cat([first["logits"][:, :2], then["logits"]], 1))
    torch.testing.assert_close(*logits, rtol=0, atol=0)


@torch.no_grad()
@pytest.mark.parametrize("family", ["Llama", "Mamba-2"])  # one takes logits_to_keep, one may not
def test_the_logits_of_one_token_of_a_chunk(family: str) -> None:
    model = make_model(family)
    (every, _), cache = parts_of(model), CacheConfig(kind="static", length=40, chunk=4)
    last = StaticDecoder(model, cache, 4, last_only=True)
    ids, empty = torch.tensor([[5, 17, 3, 8]]), every.empty_states(1, 40)
    given = {**last.arguments(ids, 0, empty), "last_token": torch.tensor([1])}
    found = last(**given)["logits"]
    assert found.shape == (1, 1, 89)
    torch.testing.assert_close(found, every(**every.arguments(ids, 0, empty))["logits"][:, 1:2])


def test_draws_begin_and_end_the_cache_over_rows_of_an_earlier_text() -> None:
    _, decode = parts_of(make_model("Gemma 3"))
    draws = draw_calls(decode, VerifyConfig())
    assert [int(draw.feeds["cache_position"][0]) for draw in draws] == [0, 7, 8, 39]
    for draw in draws:
        rows = abs(draw.feeds["past_key_values.0.key"]).max(axis=(0, 1, 3))
        assert np.count_nonzero(rows) > 30, draw.draw.label  # the token of the padding, whose embedding is 0, has none
