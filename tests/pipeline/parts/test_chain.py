"""Texts of the parts against texts by torch: a token may differ where torch's logits of the two differ by rounding."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest

from passes.proof.numbers import TOLERANCES
from pipeline.parts.chain import TorchText, compare_texts
from pipeline.parts.sessions import CarriedStates, TextParts, TextReader
from pipeline.verify.backends import OnnxFile, OnnxRuntime
from tests.pipeline.parts.test_generate import COUNTER, by_hand, with_dots
from tests.support.onnx_text import parse_renamed

PROMPT = (1, 2, 3)
FOUND = by_hand(list(PROMPT), 5)
ROUNDING = 2 * (TOLERANCES["float32"].atol + TOLERANCES["float32"].rtol)
"""Of logits of at most 1."""


@pytest.fixture
def reader(tmp_path: Path) -> TextReader:
    onnx.save(parse_renamed(COUNTER, with_dots), tmp_path / "decoder.onnx")
    parts = TextParts.of(tmp_path)
    return TextReader(parts, CarriedStates(parts, lambda path: OnnxRuntime(OnnxFile(path)).run))


def text_with(place: int, gap: float) -> TorchText:
    """Torch's text, whose token at `place` is another, with a logit that is larger by `gap`."""
    logits = np.eye(7, dtype=np.float32)[list(FOUND)] / 2
    other = (FOUND[place] + 1) % 7
    logits[place, [FOUND[place], other]] = 1 - gap, 1
    return TorchText(PROMPT, tuple(logits.argmax(-1).tolist()), logits)


def test_texts_that_are_equal(reader: TextReader) -> None:
    text = TorchText(PROMPT, FOUND, np.eye(7, dtype=np.float32)[list(FOUND)])
    report = compare_texts([text, text], reader, "onnxruntime", "float32")
    assert (report.prompts, report.tokens, report.equal, report.is_right, report.why) == (2, 10, 10, True, "")


@pytest.mark.parametrize(("share", "is_right"), [(0.5, True), (2.0, False)])
def test_a_token_may_differ_by_rounding(reader: TextReader, share: float, is_right: bool) -> None:
    text = text_with(2, share * ROUNDING)
    report = compare_texts([text], reader, "onnxruntime", "float32")
    assert (report.equal, report.is_right) == (2, is_right)
    said = f"token 3 of prompt 1 is {FOUND[2]}, torch has {text.tokens[2]}; torch's logits of the two differ by"
    assert report.why.startswith(said)
    gap, limit = map(float, re.findall(r"\d\.\de-\d+", report.why))
    assert (gap, limit) == pytest.approx((share * ROUNDING, ROUNDING), rel=0.05)
