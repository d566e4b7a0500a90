"""Gradients of the operators of the namespace `onnxline`: against finite differences, and torch's own layers."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import pipeline.runtime.operators  # noqa: F401  (registers them)
from pipeline.runtime.operators import UNSIGNED_FUNCTIONS, unsigned

onnxline = torch.ops.onnxline

SETTINGS: dict[str, dict[str, object]] = {
    "LSTM": {"kind": "LSTM"},
    "LSTM, both ways, clipped, coupled": {
        "kind": "LSTM", "direction": "bidirectional", "clip": 1.5, "input_forget": True
    },
    "GRU": {"kind": "GRU", "direction": "reverse"},
    "GRU, reset after the product": {"kind": "GRU", "reset_after": True},
    "RNN, by a Softsign": {
        "kind": "RNN", "activations": "Softsign", "alphas": [0.0], "betas": [0.0]
    },
}  # fmt: skip


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=GENERATOR).requires_grad_()


GENERATOR = torch.Generator().manual_seed(0)


@pytest.mark.parametrize("title", SETTINGS)
def test_cells_have_the_gradients_of_finite_differences(title: str) -> None:
    """With rows of unequal length, and for an LSTM with peepholes."""
    settings = SETTINGS[title]
    gates, ways = {"LSTM": 4, "GRU": 3, "RNN": 1}[str(settings["kind"])], 2 if "direction" in settings else 1
    ways = 1 if settings.get("direction") == "reverse" else ways
    is_lstm = settings["kind"] == "LSTM"
    cell, peepholes = (draw(ways, 2, 3), draw(ways, 9)) if is_lstm else (None, None)
    operands = (
        draw(3, 2, 2), draw(ways, gates * 3, 2), draw(ways, gates * 3, 3), draw(ways, gates * 6), draw(ways, 2, 3)
    )  # fmt: skip
    lengths = torch.tensor([3, 1])

    def run(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, more = given[:5], given[5:]
        states = (more[0], lengths, more[1]) if is_lstm else (None, lengths, None)
        return tuple(onnxline.recurrent(*first, *states, **settings))

    assert torch.autograd.gradcheck(
        run, (*operands, *(extra for extra in (cell, peepholes) if extra is not None)), fast_mode=True
    )


def test_an_lstm_has_the_gradient_of_torchs() -> None:
    """torch orders its gates input, forget, cell, output; ONNX input, output, forget, cell."""
    layer = torch.nn.LSTM(2, 3).double()
    order = torch.tensor([0, 3, 1, 2])

    def rows(weight: torch.Tensor) -> torch.Tensor:
        return weight.detach().reshape(4, 3, -1)[order].reshape(12, -1).squeeze(1)

    w, r = rows(layer.weight_ih_l0)[None], rows(layer.weight_hh_l0)[None]
    b = torch.cat([rows(layer.bias_ih_l0), rows(layer.bias_hh_l0)])[None]
    x, start = draw(5, 2, 2), torch.zeros(1, 2, 3, dtype=torch.float64)
    ours, *_ = onnxline.recurrent(x, w, r, b, start, start, kind="LSTM")
    theirs, _ = layer(x)
    torch.testing.assert_close(ours.squeeze(1), theirs)
    pairs = (torch.autograd.grad(result.square().sum(), x)[0] for result in (ours, theirs))
    torch.testing.assert_close(*pairs)


@pytest.mark.parametrize("mode", ["avg", "max"])
def test_roi_align_has_the_gradient_of_finite_differences(mode: str) -> None:
    """That of the picture; the places of boxes are read as numbers."""
    boxes = torch.tensor([[0.3, 0.2, 3.1, 2.7], [1.0, 1.0, 4.0, 3.5]], dtype=torch.float64)
    places = torch.tensor([0, 1])
    picture = draw(2, 2, 5, 6)
    assert torch.autograd.gradcheck(lambda x: onnxline.roi_align(x, boxes, places, [2, 2], mode), (picture,))


def test_what_quantize_rounds_has_the_gradient_of_a_straight_line() -> None:
    """Beyond the ends of the format it is 0. The scale has LSQ's: round(x / s) - x / s within, the end beyond."""
    x = torch.tensor([0.24, -0.37, 9.0, -9.0], dtype=torch.float64, requires_grad=True)
    scale = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
    zero = torch.tensor(3, dtype=torch.int8)
    numbers = onnxline.quantize(x, scale, zero, to="int8", low=-20, high=20, as_floats=True)
    y = onnxline.dequantize(numbers, scale, zero, to="float64")
    torch.testing.assert_close(y.detach(), torch.tensor([0.2, -0.4, 1.7, -2.3], dtype=torch.float64))
    directions = torch.tensor([1.0, 2.0, 4.0, 8.0], dtype=torch.float64)
    of_x, of_scale = torch.autograd.grad((y * directions).sum(), (x, scale))
    torch.testing.assert_close(of_x, torch.tensor([1.0, 2.0, 0.0, 0.0], dtype=torch.float64))
    steps = torch.tensor([2 - 2.4, -4 + 3.7, 17.0, -23.0], dtype=torch.float64)
    torch.testing.assert_close(of_scale, (steps * directions).sum())


def test_dequantize_has_the_gradient_of_finite_differences() -> None:
    data, scale, zero = draw(2, 4, 3), draw(4), draw(4)
    assert torch.autograd.gradcheck(
        lambda *given: onnxline.dequantize(*given, to="float64", axis=1), (data, scale, zero)
    )


def test_a_cast_to_float8_has_the_gradient_of_a_straight_line() -> None:
    """In the dtype of what it read."""
    x = torch.tensor([0.3, -1000.0], dtype=torch.float16, requires_grad=True)
    (slope,) = torch.autograd.grad(onnxline.cast_float8(x, "float8_e5m2").to(torch.float16).sum(), x)
    assert (slope.dtype, slope.tolist()) == (torch.float16, [1.0, 1.0])


# Operators of our own that torch's operators compute, judged by numpy and ml_dtypes.

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
