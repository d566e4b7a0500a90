"""Trained models that onnxsim breaks: the guilty stage is named, and the rest of the step stands."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import passes
from passes import Status
from passes.context import PassContext
from tests.support.onnx_models import matrix


def find_packaged(name: str) -> Path:
    spec = find_spec("silero_vad")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "data" / name


FEEDS = {"input": matrix(1, 512, 0), "state": np.zeros((2, 1, 128), np.float32), "sr": np.array(16000, np.int64)}


@pytest.mark.parametrize("name", ["silero_vad_16k_op15.onnx", "silero_vad_half.onnx"])
def test_silero_comes_through_without_the_folding_that_breaks_it(name: str, context: PassContext) -> None:
    run = passes.optimize(find_packaged(name), recipe=["default", "onnxsim"], feeds=[FEEDS], context=context)
    guilty, step = run.rows[-2:]
    assert (guilty.name, guilty.status) == ("onnxsim/constant_folding", Status.FAILED)
    assert "topologically sorted" in guilty.reason
    assert (step.name, step.status, step.reason) == ("onnxsim", Status.RAN, "without constant_folding")
    assert step.changed
    assert all(errors.ok for errors in step.errors.values())
