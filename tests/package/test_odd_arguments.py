"""The doors of the Python API, given what is no model, no configuration and no setting: one sentence, exit code 2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest
import torch

import onnxline
from passes import guard, optimize, why
from passes.errors import OnnxlineError
from tests.support.paths import EXAMPLES

ODD: Final = {
    "tensor": torch.zeros(2, 3),
    "array": np.zeros((2, 3)),
    "list": [1, 2],
    "None": None,
    "number": 7,
    "bytes": b"x",
    "function": len,
}

MODEL: Final = EXAMPLES / "attention.onnx"

DOORS: Final[dict[str, Callable[[Any], object]]] = {
    "optimize": onnxline.optimize,
    "optimize keep": lambda odd: onnxline.optimize(MODEL, keep=odd),
    "run": onnxline.run,
    "RunConfig.from_yaml": onnxline.RunConfig.from_yaml,
    "RunConfig.from_mapping": onnxline.RunConfig.from_mapping,
    "Pipeline": onnxline.Pipeline,
    "diff": lambda odd: onnxline.diff(odd, MODEL),
    "diff with": lambda odd: onnxline.diff(MODEL, odd),
    "compile_graph": onnxline.compile_graph,
    "from_onnx": onnxline.from_onnx,
    "passes.optimize": optimize,
    "passes.why": lambda odd: why(odd, "y"),
    "passes.why of a name": lambda odd: why(MODEL, odd),
    "passes.guard": lambda odd: guard(keep=odd).__enter__(),
}

SETTINGS: Final = {
    "recipe": ODD,
    "skip": ODD,
    "keep": ODD,
    "watch": ODD,
    "proof": ODD,
    "feeds": ODD,
    "timeout_s": {name: odd for name, odd in ODD.items() if name != "number"},
    "memory_gib": {name: odd for name, odd in ODD.items() if name not in ("number", "None")},
    "sizes": {name: odd for name, odd in ODD.items() if name not in ("list", "bytes")},
    "reproducers": {name: odd for name, odd in ODD.items() if name != "None"},
    "encodings": {name: odd for name, odd in ODD.items() if name != "None"},
    "contrib": ODD,
    "context": {name: odd for name, odd in ODD.items() if name != "None"},
    "prover": {name: odd for name, odd in ODD.items() if name != "None"},
    "observer": {name: odd for name, odd in ODD.items() if name != "function"},
    "on_change": {name: odd for name, odd in ODD.items() if name != "function"},
}
"""Argument of `passes.optimize` → the odd values that it does not take."""


def assert_is_one_sentence(call: Callable[[], object]) -> None:
    with pytest.raises(OnnxlineError) as caught:
        call()
    assert caught.value.exit_code == 2
    assert str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("door", DOORS)
def test_a_door_refuses_what_is_none_of_its_kind(door: str, odd: str) -> None:
    assert_is_one_sentence(lambda: DOORS[door](ODD[odd]))


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_of_optimize_is_checked_before_anything_runs(name: str) -> None:
    for odd in SETTINGS[name].values():
        assert_is_one_sentence(lambda odd=odd: optimize(MODEL, **{"recipe": ["nop"], name: odd}))
