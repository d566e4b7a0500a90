"""The `.onnx` files inside of packages of the extra `models`: each runs on our own runtime, without a fallback."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from pipeline.segments import SegmentedModel

SIZES = {"sr": (), "input": (1, 576), "state": (2, 1, 128), "h": (1, 1, 128), "c": (1, 1, 128), "bytes": (1, 2048)}
"""Shapes of inputs that a model leaves open, by name."""

PICTURES = {"cls": (1, 3, 48, 192), "det": (1, 3, 64, 96), "rec": (1, 3, 48, 96)}


def files() -> list[Path]:
    found = []
    for package in ("silero_vad", "rapidocr", "magika"):
        spec = find_spec(package)
        if spec is not None and spec.origin is not None:
            found += sorted(Path(spec.origin).parent.rglob("*.onnx"))
    return found


def feed_of(session: onnxruntime.InferenceSession, path: Path) -> dict[str, np.ndarray]:
    rng, feed = np.random.default_rng(0), {}
    for value in session.get_inputs():
        if value.name == "sr":
            feed["sr"] = np.array(16000)
            continue
        picture = next((shape for word, shape in PICTURES.items() if f"_{word}_" in path.name), None)
        shape = picture or SIZES.get(value.name) or value.shape
        if "int" in value.type:
            feed[value.name] = rng.integers(0, 100, shape).astype(value.type[7:-1])
        else:
            feed[value.name] = rng.standard_normal(shape).astype(np.float32)
    return feed


@pytest.mark.parametrize("path", files(), ids=lambda path: path.stem)
def test_it_runs_as_on_onnxruntime(path: Path) -> None:
    session = onnxruntime.InferenceSession(path)
    feed = feed_of(session, path)
    model = SegmentedModel(path)
    for _ in range(2):
        found = model.run(feed)
        for value, wanted in zip(session.get_outputs(), session.run(None, feed), strict=True):
            np.testing.assert_allclose(found[value.name], np.asarray(wanted), rtol=1e-3, atol=1e-4)
    assert model.count().fallbacks == ()


def test_the_branch_of_silero_is_one_plan() -> None:
    """Its sample rate decides an If: for each rate there is a plan of the condition, and one of all that follows."""
    path = next(path for path in files() if path.name == "silero_vad.onnx")
    session, model = onnxruntime.InferenceSession(path), SegmentedModel(path)
    state = np.zeros((2, 1, 128), np.float32)
    for rate, length in ((16000, 576), (8000, 288)):
        feed = {"input": np.ones((1, length), np.float32) / 8, "state": state, "sr": np.array(rate)}
        wanted, found = np.asarray(session.run(None, feed)[0]), model.run(feed)["output"]
        np.testing.assert_allclose(found, wanted, atol=1e-6)
    assert model.count().steps == 4
