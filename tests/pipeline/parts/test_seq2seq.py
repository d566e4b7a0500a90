"""A text after an encoder: the encoder runs once, its states go into each call of the decoder, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from pipeline.errors import UsageError
from pipeline.parts import TextGenerator
from pipeline.parts.seq2seq import Seq2SeqReader
from pipeline.verify.backends import Feeds
from tests.support.onnx_text import parse_renamed

ENCODER = """
<ir_version: 10, opset_import: ["": 20]>
agraph (float[batch_size, 2, 3] input_features) => (float[batch_size, 6] present_cross) <int64[2] row = {0, -1}> {
    present_cross = Reshape (input_features, row)
}
"""
DECODER = """
<ir_version: 10, opset_import: ["": 20]>
agraph (int64[batch_size, tokens] input_ids, float[batch_size, past] past_own, float[batch_size, 6] past_cross)
    => (float[batch_size, tokens, 7] logits, float[batch_size, all] present_own)
<float seven = {7.0}, int64 depth = {7}, float[2] off_on = {0.0, 1.0}, int64[1] last = {-1}> {
    new = Cast <to = 1> (input_ids)
    present_own = Concat <axis = -1> (past_own, new)
    own = ReduceSum <keepdims = 1> (present_own, last)
    source = ReduceSum <keepdims = 1> (past_cross, last)
    sum = Add (own, source)
    rest = Mod <fmod = 1> (sum, seven)
    shape = Shape (input_ids)
    place = Expand (rest, shape)
    whole = Cast <to = 7> (place)
    logits = OneHot <axis = -1> (whole, depth, off_on)
}
"""
"""The next token is the sum of the source and of all tokens modulo 7."""

NAMES = {"cross": "0.encoder.key", "own": "0.decoder.key"}


@pytest.fixture
def models(tmp_path: Path) -> Path:
    for part, text in (("encoder", ENCODER), ("decoder", DECODER)):
        for name in NAMES:
            text = text.replace(f"present_{name}", f"P_{name}").replace(f"past_{name}", f"I_{name}")
        onnx.save(parse_renamed(text, with_dots), tmp_path / f"{part}.onnx")
    (tmp_path / "config.json").write_text('{"vocab_size": 7, "eos_token_id": 6, "decoder_start_token_id": 2}')
    return tmp_path


def with_dots(name: str) -> str:
    """The names of states, which ONNX's text cannot have."""
    kind, _, state = name.partition("_")
    prefix = {"P": "present.", "I": "past_key_values."}.get(kind)
    return prefix + NAMES[state] if prefix and state in NAMES else name


FEATURES = np.arange(6, dtype=np.float64).reshape(1, 2, 3)  # 15 in all; another dtype is cast


def by_hand(start: list[int], count: int) -> tuple[int, ...]:
    tokens = list(start)
    for _ in range(count):
        tokens.append((15 + sum(tokens)) % 7)
    return tuple(tokens[len(start) :])


@pytest.mark.parametrize("backend", ["onnxruntime", "plan", "torch"])
def test_the_decoder_reads_what_the_encoder_computed(models: Path, backend: str) -> None:
    generator = TextGenerator(models, backend)
    settings = {"inputs": {"input_features": FEATURES}, "max_new_tokens": 5, "stop": ()}
    assert generator.generate(**settings).tokens == by_hand([2], 5)  # begins with the token of config.json
    assert generator.generate(**settings, start=[1, 4]).tokens == by_hand([1, 4], 5)


def test_a_token_of_the_configuration_ends_the_text(models: Path) -> None:
    start = next([first, 1] for first in range(7) if 6 in by_hand([first, 1], 4)[:3])
    found = TextGenerator(models).generate(inputs={"input_features": FEATURES}, start=start, max_new_tokens=9)
    assert found.tokens[-1] == 6 and len(found.tokens) < 5


def test_the_encoder_runs_once_a_text(models: Path) -> None:
    calls: list[str] = []

    def open_step(path: Path):
        def run(feeds: Feeds) -> dict[str, np.ndarray]:
            calls.append(path.stem)
            if path.stem == "encoder":
                return {"present.0.encoder.key": np.full((1, 6), 3.0)}
            assert feeds["past_key_values.0.encoder.key"].sum() == 18.0
            return {"logits": np.eye(7, dtype=np.float32)[None, :1], "present.0.decoder.key": np.zeros((1, 1))}

        return run

    reader = Seq2SeqReader(models, open_step)
    reader.encode({"input_features": FEATURES})
    reader.begin(3)
    for _ in range(3):
        reader.read([1])
    assert calls == ["encoder", "decoder", "decoder", "decoder"]


@pytest.mark.parametrize(
    ("wishes", "sentence"),
    [
        ({"ids": [1, 2]}, "the encoder reads input_features; found input_ids"),
        ({"inputs": {"pixels": FEATURES}}, "the encoder reads input_features; found pixels"),
        ({"inputs": {"input_features": FEATURES[:, :1]}}, r"has the shape \[1, 1, 3\], expected \[any, 2, 3\]"),
        ({"inputs": {"input_features": FEATURES[0]}}, r"has the shape \[2, 3\], expected \[any, 2, 3\]"),
        ({"inputs": {"input_features": FEATURES}, "start": [7]}, "found the token 7, expected 0 to 6"),
        ({"prompt": "hello"}, "has no tokenizer, since its source had none"),
        ({}, "the prompt has no token"),
    ],
)
def test_wrong_wishes_are_one_sentence(models: Path, wishes: dict, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        TextGenerator(models).generate(**wishes)
