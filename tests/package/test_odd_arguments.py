"""The doors of the Python API, given what is no model, no configuration and no setting: one sentence, exit code 2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest
import torch

import onnxline
from onnxline.authoring import Adam, CrossEntropyLoss, Linear, Model, ReLU, StepRecord, TrainingHistory
from onnxline.bisect import Bisection, Culprit, Smallest
from onnxline.static_cache import Generated
from onnxline.torch_ir import VerificationReport
from passes import OnnxlineError, guard, optimize, why
from passes.diff.types import NodeLabel
from passes.suggest import shorten_lines
from passes.weights.detached import detach
from tests.support.onnx_models import attention
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


# What results print of themselves in a notebook or at a prompt: at most ten lines, whatever they hold.


def test_ten_lines_count_those_that_are_left_out() -> None:
    assert shorten_lines(["title", "first"]) == "title\n  first"
    ten = ["title", *map(str, range(9))]
    assert shorten_lines(ten) == "\n  ".join(ten)
    assert shorten_lines([*ten, "10"]).splitlines()[-2:] == ["  7", "  and 2 more lines"]


def test_a_bisection_prints_the_culprit_and_no_model() -> None:
    culprit = Culprit("onnxsim", "onnxsim", "fuse_qkv", (), 2, 1, repeats=False, why="loses qkv attention 0")
    smallest = Smallest(detach(attention()), removed=tuple(NodeLabel("MatMul", f"node_{at}") for at in range(40)))
    lines = repr(Bisection("lost qkv", 3, culprit, smallest, "", runs=9, seconds=1.5)).splitlines()
    assert lines[:3] == ["Bisection", "  onnxsim/fuse_qkv (onnxsim), step 2 of 3", "    loses qkv attention 0"]
    assert len(lines) == 10
    assert repr(smallest.model) == f"DetachedModel({smallest.nodes} nodes)"


def test_a_diff_prints_its_first_differences() -> None:
    merged = onnxline.optimize(attention(), recipe=["fuse_qkv"]).to_proto()
    lines = repr(onnxline.diff(attention(), merged)).splitlines()
    assert lines[0].startswith("Diff: ") and 2 < len(lines) <= 10
    assert repr(onnxline.diff(attention(), attention())) == "Diff: 0 differences"


def test_results_that_hold_tensors_print_none_of_their_values() -> None:
    generated = Generated(torch.arange(100), torch.rand(100, 512))
    assert repr(generated) == (
        "Generated(tokens=[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, … 84 more], logits of (100, 512))"
    )
    snapshot = onnxline.Snapshot({"weight": torch.zeros(256, 4), "bias": torch.zeros(4)})
    assert repr(snapshot) == "Snapshot(2 states, 4.0 KiB)"
    report = VerificationReport(False, 0.5, 0.1, 50, output_details=[{"index": at} for at in range(50)])
    assert repr(report) == str(report) and len(repr(report).splitlines()) <= 10


def test_models_by_hand_and_their_histories() -> None:
    model = Model((8, 4)).add(Linear(4, 16)).add(ReLU()).add(Linear(16, 3))
    model.compile(Adam(), CrossEntropyLoss())
    assert repr(model) == "Model(float32[8, 4]): Sequential(Linear(4, 16), ReLU(), Linear(16, 3))"
    history = TrainingHistory(tuple(StepRecord(step, 4.0 - step / 100, 0.1) for step in range(1, 201)))
    assert repr(history) == "TrainingHistory(200 steps, loss 3.99 → 2.245)"
    assert repr(TrainingHistory()) == "TrainingHistory(0 steps)"
