"""optimum-onnx, in an environment of its own, runs the folders that runs in parts write."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.optimum_client import compare_answers, compare_features, compare_images, compare_tokens

pytestmark = pytest.mark.skipif(
    not os.environ.get("OPTIMUM_PYTHON"), reason="OPTIMUM_PYTHON names no interpreter with optimum-onnx"
)


def python() -> str:
    return os.environ["OPTIMUM_PYTHON"]


def test_a_decoder_over_its_cache(tmp_path: Path) -> None:
    assert compare_tokens(python(), tmp_path) == "32 of 32 tokens"


@pytest.mark.parametrize("family", ["T5", "Whisper"])
def test_an_encoder_and_its_decoder(family: str, tmp_path: Path) -> None:
    assert compare_answers(python(), family, tmp_path) == "32 of 32 tokens"


def test_features(tmp_path: Path) -> None:
    assert compare_features(python(), tmp_path) < 1e-5  # float32, other orders of sums


def test_an_image_of_a_pipeline(tmp_path: Path) -> None:
    pytest.importorskip("diffusers", reason="needs onnxline[diffusion]")
    assert compare_images(python(), tmp_path) < 1e-4  # of values from 0 to 1, after 4 steps
