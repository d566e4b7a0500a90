"""Operators of our own that torch's operators compute, judged by numpy and ml_dtypes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from pipeline.runtime.operators import UNSIGNED_FUNCTIONS, unsigned

NUMPY: dict[str, Any] = {
    "add": np.add,
    "sub": np.subtract,
    "div": np.floor_divide,
    "minimum": np.minimum,
    "maximum": np.maximum,
    "remainder": np.remainder,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.uint64])
@pytest.mark.parametrize("function", UNSIGNED_FUNCTIONS)
def test_unsigned_integers(function: str, dtype: Any) -> None:
    """Every pair of numbers around the ends and the middle of the range, and random ones."""
    top, draw = np.iinfo(dtype).max, np.random.default_rng(0)
    edges = np.array([0, 1, 2, 3, 7, top // 2, top // 2 + 1, top // 2 + 2, top - 1, top], dtype)
    few = draw.integers(0, 9, 300).astype(dtype)
    left = np.concatenate([np.repeat(edges, len(edges)), draw.integers(0, top, 600, dtype, endpoint=True)])
    right = np.concatenate([np.tile(edges, len(edges)), draw.integers(0, top, 300, dtype, endpoint=True), few])
    with np.errstate(all="ignore"):
        wanted = NUMPY[function](left, right)
    found = unsigned(torch.from_numpy(left), torch.from_numpy(right), function).numpy()
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"])
def test_float8_without_saturation(name: str) -> None:
    """All numbers of float16 and bfloat16, among them every tie."""
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    x = torch.cat([bits.view(torch.float16).float(), bits.view(torch.bfloat16).float()])
    with np.errstate(all="ignore"):
        wanted = x.numpy().astype(getattr(ml_dtypes, name)).astype(np.float32)
    found = torch.ops.onnxline.cast_float8(x, name, False).float().numpy()
    np.testing.assert_array_equal(found, wanted)
