"""Who brings its process down, and the smallest model on which it does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

import passes
from passes.bisect import Breakdown, bisect
from passes.context import PassContext, open_context
from passes.recipe.recipe import steps_of
from passes.weights.files import save
from tests.support.onnx_models import attention, detached, model_of, op_types

SHAPE_OF_NOTHING = "g (float[3, 4, 5] x) => (int64[0] y) { h = Relu (x) y = Shape <start = 2, end = 1> (h) }"
"""As in ONNX's own test_shape_start_greater_than_end."""

ENDLESS = """
import time

def endless(model):
    if any(node.op_type == "Neg" for node in model.graph.node):
        time.sleep(60)
    return model
"""


def test_a_real_crash_of_onnxoptimizer(context: PassContext, tmp_path: Path) -> None:
    model = detached(model_of(SHAPE_OF_NOTHING))
    finding = bisect(model, steps_of(["default"]), Breakdown.of(model, context), context)
    assert finding.culprit is not None and finding.smallest is not None
    assert finding.culprit.name == "eliminate_shape_op"
    assert finding.culprit.why == "crashed: the worker process died (signal SIGSEGV)"
    assert finding.runs <= 45
    assert [node.op for node in finding.smallest.removed] == ["Shape"]

    save(finding.smallest.model, tmp_path / "small.onnx")
    assert op_types(onnx.load(tmp_path / "small.onnx")) == ["Shape"]
    call = "import onnx, onnxoptimizer, sys; onnxoptimizer.optimize(onnx.load(sys.argv[1]), ['eliminate_shape_op'])"
    ended = subprocess.run([sys.executable, "-c", call, tmp_path / "small.onnx"], capture_output=True, check=False)
    assert ended.returncode < 0, "a plain call crashes too"


def test_a_step_that_does_not_end(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(ENDLESS)
    model = detached(model_of("g (float[4] x) => (float[4] y) { a = Relu (x) b = Neg (a) y = Abs (b) }"))
    with open_context(timeout_s=2) as context:
        finding = bisect(model, steps_of([f"{own}:endless"]), Breakdown.of(model, context), context, budget_s=0)
    assert finding.culprit is not None
    assert (finding.culprit.name, finding.runs) == ("endless", 1)
    assert finding.culprit.why.startswith("timed out: ran past 2 s")


def test_a_step_that_changes_the_outputs_of_the_model(context: PassContext, tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "def stop_early(model):\n    model.graph.output[0].name = model.graph.node[0].output[0]\n    return model\n"
    )
    model = detached(model_of("g (float[4] x) => (float[4] y) { a = Relu (x) y = Abs (a) }"))
    recipe = steps_of(["nop", f"{own}:stop_early"])
    finding = bisect(model, recipe, Breakdown.of(model, context), context, budget_s=0)
    assert finding.culprit is not None and finding.culprit.name == "stop_early"
    assert "changes the model's outputs from ['y'] to ['a']" in finding.culprit.why


def test_a_model_that_is_not_valid_itself(context: PassContext) -> None:
    """Then it is no fault of the pass, and that is said."""
    text = "g (float[4] x) => (float[4] y) { a = Relu (nothing) y = Neg (a) }"
    model = detached(onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": 20]> {text}'))
    finding = bisect(model, steps_of(["eliminate_common_subexpression"]), Breakdown.of(model, context), context)
    assert finding.culprit is not None
    (note,) = finding.notes
    assert note.startswith("the model itself is not valid ONNX, which may be why: ") and "nothing" in note


def test_nothing_crashes(context: PassContext) -> None:
    model = detached(attention())
    finding = bisect(model, steps_of(["fuse_qkv", "eliminate_deadend"]), Breakdown.of(model, context), context)
    assert (finding.culprit, finding.nothing) == (None, "nothing crashes")


SQUEEZES = (
    "g (float[1, 3, 1, 1, 5] x) => (float[3, 5] y) { a = Squeeze (x, first) b = Squeeze (a, second) y = Relu (b) }"
)


def test_a_step_whose_model_does_not_run(context: PassContext) -> None:
    """A run of passes calls such a step failed."""
    model = detached(model_of(SQUEEZES, first=np.array([-3]), second=np.array([-2, 0])))
    finding = bisect(model, steps_of(["default"]), Breakdown.of(model, context), context, budget_s=20)
    run = passes.optimize(model, recipe=["default"], context=context)
    assert [row.name for row in run.rows if row.status is passes.Status.FAILED] == ["fuse_consecutive_squeezes"]
    assert finding.culprit is not None and finding.smallest is not None
    assert finding.culprit.name == "fuse_consecutive_squeezes"
    assert finding.culprit.why.startswith("failed: onnxruntime refuses the model")
    assert finding.smallest.nodes == 2


ENDS = """
import os, signal, subprocess, sys

def raises(model): raise KeyError("no such layer")
def raises_elsewhere(model): subprocess.run([sys.executable, "-c", "1 / 0"], check=True)
def is_killed(model): os.kill(os.getpid(), signal.SIGKILL)
def exits(model): os._exit(3)
def returns_nothing(model): return None
def forgets(model):
    model.graph.node[0].op_type = "Forgotten"
    return model
"""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("raises", "failed: KeyError: 'no such layer'"),
        ("raises_elsewhere", "failed: CalledProcessError"),
        ("is_killed", "crashed: the worker process died (signal SIGKILL)"),
        ("exits", "crashed: the pass ended its process (exit code 3)"),
        ("returns_nothing", "failed: TypeError"),
        ("forgets", "failed: onnxruntime refuses the model"),
    ],
)
def test_each_way_to_break_down_is_named(name: str, words: str, tmp_path: Path, context: PassContext) -> None:
    (tmp_path / "own.py").write_text(ENDS)
    model = detached(model_of("g (float[4] x) => (float[4] y) { y = Relu (x) }"))
    steps = steps_of(["nop", f"{tmp_path}/own.py:{name}"], context.user_code)
    finding = bisect(model, steps, Breakdown.of(model, context), context, budget_s=20)
    assert finding.culprit is not None and finding.smallest is not None
    assert (finding.culprit.name, finding.smallest.nodes) == (name, 1)
    assert finding.culprit.why.startswith(words)
