"""A model that was run ahead counts for that very model."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from passes.context import PassContext
from passes.optimize import draw_feeds
from passes.proof.numeric import NumericProver
from passes.proof.same_executable import is_same_executable
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


def chain() -> onnx.ModelProto:
    return model_of(CHAIN, bias=np.arange(8, dtype=np.float32))


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


def prover_of(model: DetachedModel, bench: PassContext) -> NumericProver:
    prover = NumericProver.of_itself([draw_feeds(model, 0)], bench)
    prover.watch(model, [])
    return prover


def test_what_was_rehearsed_counts_for_that_model_alone(bench: PassContext) -> None:
    other = chain()
    weighed(other)
    prover = prover_of(detached(chain()), bench)
    prover.rehearse(detached(other))
    assert prover.run(detached(chain()), hold=False).why == ""
    assert prover.run(detached(other), hold=False).why.startswith("y: max abs error")


def test_a_rehearsal_is_lost_with_the_worker_and_the_model_is_run(bench: PassContext) -> None:
    prover = prover_of(detached(chain()), bench)
    prover.rehearse(detached(chain()))
    bench.proofs.close()
    assert prover.run(detached(chain()), hold=False).why == ""
