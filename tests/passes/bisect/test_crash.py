"""Who brings its process down, and the smallest model on which it does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import onnx

from passes.bisect import Breakdown, bisect
from passes.context import PassContext, open_context
from passes.recipe.recipe import steps_of
from passes.weights.files import save
from tests.support.onnx_models import attention, detached, model_of

SHAPE_OF_NOTHING = "g (float[3, 4, 5] x) => (int64[0] y) { h = Relu (x) y = Shape <start = 2, end = 1> (h) }"
"""As in ONNX's own test_shape_start_greater_than_end."""

ENDLESS = """
import time

def endless(model):
    if any(node.op_type == "Neg" for node in model.graph.node):
        time.sleep(60)
    return model
"""


def ops(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


def test_a_real_crash_of_onnxoptimizer(context: PassContext, tmp_path: Path) -> None:
    finding = bisect(detached(model_of(SHAPE_OF_NOTHING)), steps_of(["default"]), Breakdown(), context)
    assert finding.culprit is not None and finding.smallest is not None
    assert finding.culprit.name == "eliminate_shape_op"
    assert finding.culprit.why == "crashed: the worker process died (signal SIGSEGV)"
    assert finding.runs <= 8
    assert [node.op for node in finding.smallest.removed] == ["Shape"]

    save(finding.smallest.model, tmp_path / "small.onnx")
    assert ops(onnx.load(tmp_path / "small.onnx")) == ["Shape"]
    call = "import onnx, onnxoptimizer, sys; onnxoptimizer.optimize(onnx.load(sys.argv[1]), ['eliminate_shape_op'])"
    ended = subprocess.run([sys.executable, "-c", call, tmp_path / "small.onnx"], capture_output=True, check=False)
    assert ended.returncode < 0, "a plain call crashes too"


def test_a_step_that_does_not_end(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(ENDLESS)
    model = detached(model_of("g (float[4] x) => (float[4] y) { a = Relu (x) b = Neg (a) y = Abs (b) }"))
    with open_context(timeout_s=4) as context:
        finding = bisect(model, steps_of([f"{own}:endless"]), Breakdown(), context, budget_s=0)
    assert finding.culprit is not None
    assert (finding.culprit.name, finding.runs) == ("endless", 1)
    assert finding.culprit.why.startswith("timed out: ran past 4 s")


def test_a_model_that_is_not_valid_itself(context: PassContext) -> None:
    """Then it is no fault of the pass, and that is said."""
    text = "g (float[4] x) => (float[4] y) { a = Relu (nothing) y = Neg (a) }"
    model = detached(onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": 20]> {text}'))
    finding = bisect(model, steps_of(["nop"]), Breakdown(), context)
    assert finding.culprit is not None
    (note,) = finding.notes
    assert note.startswith("the model itself is not valid ONNX, which may be why: ") and "nothing" in note


def test_nothing_crashes(context: PassContext) -> None:
    finding = bisect(detached(attention()), steps_of(["fuse_qkv", "eliminate_deadend"]), Breakdown(), context)
    assert (finding.culprit, finding.nothing) == (None, "nothing crashes")
