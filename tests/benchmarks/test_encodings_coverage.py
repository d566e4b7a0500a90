"""The checker of benchmarks/encodings_coverage.py: what is due has an encoding, and a missing or wrong one shows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.encodings_coverage import encode_source, judge
from passes.encodings.carry import UncoveredTensor
from passes.optimize import draw_feeds, optimize
from passes.recipe import DEFAULT_RECIPE
from tests.support.onnx_models import attention, biased_attention, detached, merged_attention

MODELS = {"plain": attention, "biased": biased_attention, "merged": merged_attention}


@pytest.mark.parametrize("name", MODELS)
def test_all_that_is_due_is_covered(name: str) -> None:
    source = detached(MODELS[name]())
    feeds = [draw_feeds(source, seed) for seed in range(2)]
    known = encode_source(source, feeds)
    run = optimize(source, (*DEFAULT_RECIPE, "split-qkv"), keep=["qkv?"], encodings=known)
    assert run.encodings is not None
    cells, is_right = judge(source, run.model, known, run.encodings, feeds[0])
    assert is_right, cells
    assert cells[1:3] == ["100.0%", "100.0%"]


def test_the_checker_sees_what_is_missing_and_what_is_wrong() -> None:
    source = detached(biased_attention())
    feeds = [draw_feeds(source, seed) for seed in range(2)]
    known = encode_source(source, feeds)
    run = optimize(source, ["onnxsim"], keep=["qkv"], encodings=known)
    assert run.encodings is not None
    less = replace(run.encodings, uncovered=(UncoveredTensor("h", "", "left out", True),))
    cells, is_right = judge(source, run.model, known, less, feeds[0])
    assert not is_right
    assert cells[2].endswith(": h")
    other = replace(run.encodings, sources={**run.encodings.sources, "y": ("weights",)})
    cells, is_right = judge(source, run.model, known, other, feeds[0])
    assert not is_right
    assert cells[4] == "y"
