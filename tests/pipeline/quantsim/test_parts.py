"""Samples of a part out of the chain, values that two parts share, and one file of encodings for both."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

from passes.weights.detached import open_model
from pipeline.config import QuantSimConfig
from pipeline.errors import UsageError
from pipeline.parts.sessions import TextParts
from pipeline.quantsim.calibration import MeasuredRanges
from pipeline.quantsim.parts import (
    ChainSamples,
    Prompts,
    _join_encodings,
    _narrow,
    _shared_values,
    _widen,
    compare_chains,
)
from tests.pipeline.parts.test_generate import save_in_place


def settings(**calibration: object) -> QuantSimConfig:
    return QuantSimConfig.model_validate({"calibration": calibration})


def test_decode_is_sampled_on_the_cache_that_prefill_has_written(tmp_path: Path) -> None:
    save_in_place(tmp_path)
    np.savez(tmp_path / "prompts.npz", input_ids=np.array([[1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1]]))
    chosen = settings(data=[str(tmp_path / "prompts.npz")])
    parts = TextParts.of(tmp_path)
    first, *others = ChainSamples(chosen, parts, "decode", Prompts(chosen, 7)).first(6)
    assert len(others) == 5  # four of the first prompt, and two of the next one
    assert first["past_key_values.0.key"][0, 0, :, 0].tolist() == [*range(1, 7), *[0] * 6]
    assert first["cache_position"].tolist() == [6] and first["input_ids"].tolist() == [[21 % 7]]
    chunks = list(ChainSamples(chosen, parts, "prefill", Prompts(chosen, 7)).first(3))
    assert [chunk["input_ids"][0].tolist() for chunk in chunks] == [[1, 2, 3, 4], [5, 6, 0, 0], [6, 5, 4, 3]]


def test_a_prompt_outside_of_the_vocabulary_is_one_sentence(tmp_path: Path) -> None:
    np.savez(tmp_path / "prompts.npz", input_ids=np.array([[1, 9]]))
    with pytest.raises(UsageError, match=r"prompts.npz: found the token 9, expected 0 to 6"):
        next(iter(Prompts(settings(data=[str(tmp_path / "prompts.npz")]), 7)))


def test_a_chain_is_equal_to_itself(tmp_path: Path) -> None:
    save_in_place(tmp_path)
    parts = TextParts.of(tmp_path)
    found = compare_chains(parts, parts, [[1, 2, 3], [6]])
    assert (found.tokens, found.equal) == (10 + 12, 22)
    assert found.sentence == "chain: 22 of 22 tokens are those of the parts in float, logits exact"


def test_values_of_one_name_operator_and_weight_are_shared() -> None:
    text = """<ir_version: 10, opset_import: ["": 20]> part (float[TOKENS, 2] x) => (float[TOKENS, 2] y)
    <float[2, 2] w = {1.0, 2.0, 3.0, 4.0}, float[2] bias = {0.0, BIAS}> {
        product = MatMul (x, w)
        sum = Add (product, bias)
        y = KIND (sum)
    }"""
    models = [
        text.replace("TOKENS", tokens).replace("KIND", kind).replace("BIAS", bias)
        for tokens, kind, bias in (("4", "Relu", "1.0"), ("1", "Sigmoid", "2.0"))
    ]
    first, second = (open_model(onnx.parser.parse_model(model)) for model in models)
    assert _shared_values(first, second) == {"x", "product"}


def test_ranges_of_shared_values_are_those_of_all_parts() -> None:
    first = MeasuredRanges(3, {"key": (-1.0, 1.0), "own": (0.0, 2.0)})
    assert _narrow(first, frozenset({"key"})) == MeasuredRanges(0, {"key": (-1.0, 1.0)})
    later = MeasuredRanges(5, {"key": (-1.0, 4.0), "own": (-9.0, 9.0), "other": (0.0, 1.0)})
    assert _widen(first, later, frozenset({"key"})) == MeasuredRanges(3, {"key": (-1.0, 4.0), "own": (0.0, 2.0)})


def test_encodings_of_all_parts_are_one_file() -> None:
    first = {"version": "2.0.0", "encodings": [{"name": "key", "scale": 1}], "table": {"a": 1}}
    second = {"version": "2.0.0", "encodings": [{"name": "key", "scale": 1}, {"name": "b", "scale": 2}], "table": {}}
    assert _join_encodings([first, second]) == {
        "version": "2.0.0",
        "encodings": [{"name": "key", "scale": 1}, {"name": "b", "scale": 2}],
        "table": {"a": 1},
    }
