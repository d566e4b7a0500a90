"""What results print of themselves in a notebook or at a prompt: at most ten lines, whatever they hold."""

from __future__ import annotations

import torch

import onnxline
from onnxline.authoring import Adam, CrossEntropyLoss, Linear, Model, ReLU, StepRecord, TrainingHistory
from onnxline.bisect import Bisection, Culprit, Smallest
from onnxline.static_cache import Generated
from onnxline.torch_ir import VerificationReport
from passes.diff.types import NodeLabel
from passes.suggest import shorten_lines
from passes.weights.detached import detach
from tests.support.onnx_models import attention


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
