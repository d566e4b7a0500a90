"""The final model is foreseen and run while the steps to it are proven: it counts for that very model."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from passes.external.onnxoptimizer import OnnxOptimizerPass, passes_of
from passes.optimize import draw_feeds
from passes.proof.numeric import NumericProver
from passes.proof.same_executable import is_same_executable
from passes.step import Workbench
from passes.weights.detached import DetachedModel
from tests.passes.models import detached, model_of

CHAIN = """
g (float[2, 8] x) => (float[2, 8] y) {
    a = Transpose <perm = [1, 0]> (x)
    b = Transpose <perm = [1, 0]> (a)
    c = Identity (b)
    d = Add (c, bias)
    y = Relu (d)
}
"""

NAMES = ("nop", "eliminate_identity", "fuse_consecutive_transposes", "eliminate_nop_transpose", "eliminate_deadend")

LONG_S = 30.0


def chain() -> onnx.ModelProto:
    return model_of(CHAIN, bias=np.arange(8, dtype=np.float32))


def foreseen_by(step: OnnxOptimizerPass, model: DetachedModel, bench: Workbench) -> DetachedModel:
    step.begin(model, bench)
    deadline = time.monotonic() + LONG_S
    while (made := step.foreseen(model, bench)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return made


def test_what_is_foreseen_is_what_the_steps_come_to(bench: Workbench) -> None:
    steps = passes_of(NAMES)
    model = detached(chain())
    foreseen = foreseen_by(steps[0], model, bench)
    for step in steps:
        model = step.apply(model, bench)
    assert [node.op_type for node in model.proto.graph.node] == ["Add", "Relu"]
    assert is_same_executable(foreseen.proto, model.proto)


def test_nothing_is_foreseen_where_a_pass_fails(bench: Workbench) -> None:
    step = OnnxOptimizerPass("eliminate_identity", ("no_such_pass",))
    model = detached(chain())
    step.begin(model, bench)
    assert step.foreseen(model, bench) is None
    assert len(step.apply(model, bench).proto.graph.node) == 4
    assert step.foreseen(model, bench) is None


def renamed(model: onnx.ModelProto) -> None:
    model.graph.node[0].name = "another"
    model.graph.node[0].metadata_props.add(key="a", value="b")


def swapped(model: onnx.ModelProto) -> None:
    model.graph.node[4].input[0] = "c"


def retyped(model: onnx.ModelProto) -> None:
    model.graph.value_info.append(helper.make_tensor_value_info("c", TensorProto.FLOAT16, [2, 8]))


def turned(model: onnx.ModelProto) -> None:
    model.graph.node[1].attribute[0].ints[:] = [0, 1]


def weighed(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].raw_data = np.ones(8, np.float32).tobytes()


@pytest.mark.parametrize(
    ("change", "stays"), [(renamed, True), (swapped, False), (retyped, False), (turned, False), (weighed, False)]
)
def test_alike_is_what_a_runtime_sees(change: Callable[[onnx.ModelProto], None], stays: bool) -> None:
    model = chain()
    change(model)
    assert is_same_executable(chain(), model) is stays


def prover_of(model: DetachedModel, bench: Workbench) -> NumericProver:
    prover = NumericProver.of_itself([draw_feeds(model, 0)], bench)
    prover.watch(model, [])
    return prover


def test_what_was_rehearsed_counts_for_that_model_alone(bench: Workbench) -> None:
    other = chain()
    weighed(other)
    prover = prover_of(detached(chain()), bench)
    prover.rehearse(detached(other))
    assert prover.run(detached(chain()), hold=False).why == ""
    assert prover.run(detached(other), hold=False).why.startswith("y: max abs error")


def test_a_rehearsal_is_lost_with_the_worker_and_the_model_is_run(bench: Workbench) -> None:
    prover = prover_of(detached(chain()), bench)
    prover.rehearse(detached(chain()))
    bench.proofs.close()
    assert prover.run(detached(chain()), hold=False).why == ""
