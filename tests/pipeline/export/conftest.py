"""Fixtures of the export tests: configurations from a mapping, factories from source text, and a second opinion.

Helpers are fixtures, so that no test module imports another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from pipeline.config import ModelConfig, RunConfig
from pipeline.export import ExportedModel, draw_inputs, run_torch

PRELUDE = "import torch\nfrom torch import nn\n\n"


@pytest.fixture
def configured(tmp_path: Path) -> Callable[..., ModelConfig]:
    """The `model:` section of a checked configuration that lies in `tmp_path`."""

    def make(**model: Any) -> ModelConfig:
        return RunConfig.from_mapping({"model": model}, tmp_path).model

    return make


@pytest.fixture
def factory(tmp_path: Path, configured: Callable[..., ModelConfig]) -> Callable[..., ModelConfig]:
    """Write a factory file, whose function is `make`, and configure it."""

    def write(code: str, **model: Any) -> ModelConfig:
        (tmp_path / "net.py").write_text(PRELUDE + code)
        return configured(factory="net.py:make", **model)

    return write


@pytest.fixture
def onnx_outputs(tmp_path: Path) -> Callable[..., dict[str, np.ndarray]]:
    """What onnxruntime makes of the saved file, without its own graph optimization."""

    def run(exported: ExportedModel, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        path = tmp_path / "exported.onnx"
        exported.save(path)
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        names = [value.name for value in session.get_outputs()]
        return dict(zip(names, (np.asarray(array) for array in session.run(names, dict(feeds))), strict=True))

    return run


@pytest.fixture
def assert_agrees(onnx_outputs: Callable[..., dict[str, np.ndarray]]) -> Callable[..., None]:
    """torch and onnxruntime give the same names, shapes and numbers on one draw."""

    def check(exported: ExportedModel, **sizes: int) -> None:
        feeds = draw_inputs(exported.source.inputs, sizes, seed=7)
        expected = run_torch(exported.source, feeds)
        actual = onnx_outputs(exported, feeds)
        assert list(actual) == list(expected) == list(exported.source.outputs)
        for name, array in expected.items():
            assert actual[name].shape == array.shape, name
            np.testing.assert_allclose(actual[name], array, atol=1e-5, rtol=1e-4, err_msg=name)

    return check
