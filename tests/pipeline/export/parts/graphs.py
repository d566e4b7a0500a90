"""What a part's graph computes, against its module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from passes.proof.draws import GivenDraw
from pipeline.config import ExportConfig, VerifyConfig
from pipeline.export import TorchSource, export_onnx, run_torch


def check_graph(source: TorchSource, file: Path) -> tuple[GivenDraw, ...]:
    """Export a part to `file`, and hold its results on each draw against torch's; returns the draws."""
    assert source.draws is not None
    export_onnx(source, ExportConfig(), file)
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    assert [value.name for value in session.get_inputs()] == [spec.name for spec in source.inputs]
    draws = tuple(source.draws(VerifyConfig()))
    for draw in draws:
        expected = run_torch(source, draw.feeds)
        found: list[Any] = session.run(list(expected), dict(draw.feeds))
        for name, array in zip(expected, found, strict=True):
            limit = 1e-4 * max(1.0, float(np.abs(expected[name]).max(initial=0)))  # float32, other orders of sums
            np.testing.assert_allclose(array, expected[name], atol=limit, rtol=0, err_msg=f"{draw.draw.label}: {name}")
    return draws
