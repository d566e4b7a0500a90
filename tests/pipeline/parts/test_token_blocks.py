"""Tokens after the last one, which no token sees: a decoder is compiled for whole blocks of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest

from pipeline.parts.filling import TOKENS, fill_up
from pipeline.parts.generate import continue_text, take_largest
from pipeline.parts.sessions import CarriedStates, TextParts, TextReader
from pipeline.parts.slots import Step
from pipeline.verify.backends import Feeds, OnnxFile, OnnxRuntime
from tests.support.onnx_text import parse_renamed

DECODER = """
<ir_version: 10, opset_import: ["": 20]>
agraph (int64[batch_size, tokens] input_ids, float[batch_size, past] past_key)
    => (float[batch_size, tokens, 7] logits, float[batch_size, all] present_key)
<int64 seven = {7}, float[2] off_on = {0.0, 1.0}, int64 one = {1}, int64[1] axis = {1}, int64[1] end = {1000}> {
    new = Cast <to = 1> (input_ids)
    present_key = Concat <axis = -1> (past_key, new)
    sums = CumSum (present_key, one)
    seen = Shape <start = 1> (past_key)
    own = Slice (sums, seen, end, axis)
    whole = Cast <to = 7> (own)
    rest = Mod (whole, seven)
    logits = OneHot <axis = -1> (rest, seven, off_on)
}
"""
"""The next token is the sum of all tokens before it modulo 7; nothing hides a row of the cache."""

EXACT = (0, 1)
"""Rows of the cache and tokens of the first call as it is given."""


@pytest.fixture
def parts(tmp_path: Path) -> TextParts:
    model = parse_renamed(
        DECODER, lambda name: name.replace("past_key", "past_key_values.0.key").replace("present_", "present.0.")
    )
    onnx.save(model, tmp_path / "decoder.onnx")
    return TextParts.of(tmp_path)


def read(
    parts: TextParts,
    prompt: list[int],
    count: int,
    limit: int = 10**6,
    change: int = 0,
    last_only: bool = False,
    noise: float = 0.0,
) -> tuple[list[int], set]:
    """`count` tokens, and (rows of the cache, tokens) of the calls; there are `limit` positions.

    change: of 1, each token sees the last one.
    last_only: the logits are those of the last token.
    noise: how much each of the tokens of a call moves the logits.
    """
    met = set[tuple[int, int]]()

    def open_step(path: Path) -> Step:
        run = OnnxRuntime(OnnxFile(path)).run

        def step(feeds: Feeds) -> Mapping[str, np.ndarray]:
            sizes = feeds["past_key_values.0.key"].shape[1], feeds["input_ids"].shape[1]
            met.add(sizes)
            if sum(sizes) > limit:
                raise IndexError("no such position")
            outputs = run(feeds)
            logits = np.roll(outputs["logits"], change * int(feeds["input_ids"][0, -1]), -1) + noise * sizes[1]
            return {**outputs, "logits": logits[:, -1:] if last_only else logits}

        return step

    calls = CarriedStates(parts, lambda path: fill_up(open_step(path), parts.graphs["decoder"]))
    tokens = list(continue_text(TextReader(parts, calls), prompt, count, take_largest))
    read_tokens = [*prompt, *tokens[:-1]]
    assert calls.states["past_key_values.0.key"].tolist() == [read_tokens]
    return tokens, met


def by_hand(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(sum(tokens) % 7)
    return tokens[len(prompt) :]


@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_a_text_needs_a_call_of_other_sizes_for_each_block(parts: TextParts, noise: float) -> None:
    """Also where other sizes are rounded to other values, as in a quantized model."""
    tokens, met = read(parts, [3], 2 * TOKENS + 5, noise=noise)
    assert tokens == by_hand([3], 2 * TOKENS + 5) and len(set(tokens)) > 2
    assert met == {(0, TOKENS), (TOKENS, TOKENS), (2 * TOKENS, TOKENS)}


@pytest.mark.parametrize("length", [TOKENS - 1, TOKENS, TOKENS + 1])
def test_a_prompt_of_any_length(parts: TextParts, length: int) -> None:
    prompt = [at % 5 + 1 for at in range(length)]
    assert read(parts, prompt, TOKENS + 2)[0] == by_hand(prompt, TOKENS + 2)


def test_tokens_beyond_the_last_position_are_not_added(parts: TextParts) -> None:
    limit = 2 * TOKENS - 3
    tokens, met = read(parts, [3], limit, limit)
    assert tokens == by_hand([3], limit)
    assert {(TOKENS, count) for count in range(1, TOKENS - 2)} <= met


@pytest.mark.parametrize("length", [TOKENS, TOKENS + 3])
def test_logits_of_the_last_token_alone(parts: TextParts, length: int) -> None:
    prompt = [at % 5 + 1 for at in range(length)]
    assert read(parts, prompt, TOKENS + 2, last_only=True)[0] == by_hand(prompt, TOKENS + 2)


def test_a_model_whose_tokens_see_later_ones_is_called_as_it_is(parts: TextParts) -> None:
    _, met = read(parts, [3], 6, change=1)
    assert met == {EXACT, (0, TOKENS), *((seen, 1) for seen in range(1, 6))}
