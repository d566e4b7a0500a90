"""ONNX's own code on a model of the user's: what it finds is what onnx finds, and what does not end is stopped."""

from __future__ import annotations

import os

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

import passes
from passes.context import PassContext
from passes.errors import InferenceStopped, ModelError
from passes.graph import inference
from passes.worker.client import Worker
from passes.worker.platforms import crowding
from tests.support.onnx_models import attention, detached, model_of

INT = numpy_helper.from_array(np.array([1, 1]), "c0")
TEXT = helper.make_tensor("c0", TensorProto.STRING, [2], [b"a", b"b"])


def doubling(constant: TensorProto, times: int = 34) -> ModelProto:
    """Each node makes the constant twice as long."""
    nodes = [helper.make_node("Concat", [f"c{place}"] * 2, [f"c{place + 1}"], axis=0) for place in range(times)]
    nodes += [helper.make_node("Shape", [f"c{times}"], ["s"]), helper.make_node("Add", ["s", "x"], ["y"])]
    ends = [helper.make_tensor_value_info(name, TensorProto.INT64, [1]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], [constant])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


@pytest.fixture
def short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference, "LEAST_SECONDS", 1.0)
    monkeypatch.setattr(inference, "MOST_SECONDS", 1.0)


def test_it_finds_what_onnx_finds() -> None:
    model = attention()
    assert inference.infer_shapes(model, data_prop=True) == onnx.shape_inference.infer_shapes(model, data_prop=True)


def test_a_contradiction_is_the_error_of_onnx() -> None:
    model = model_of("g (float[2] x) => (float[3] y) { y = Relu (x) }")
    with pytest.raises(inference.InferenceError, match="Inferred shape and existing shape differ"):
        inference.infer_shapes(model, strict_mode=True)


@pytest.mark.parametrize("constant", [INT, TEXT], ids=["integers", "strings"])
@pytest.mark.usefixtures("short_limit")
def test_a_constant_that_doubles_ends_in_one_sentence(constant: TensorProto) -> None:
    with pytest.raises(
        ModelError, match="takes more than 1 s, and was stopped; is there a constant that node"
    ) as error:
        inference.infer_shapes(doubling(constant), data_prop=True)
    assert error.value.exit_code == 2
    assert inference.infer_shapes(doubling(constant, 3), data_prop=True).graph.output[0].name == "y"


def test_a_limit_of_time_grows_with_the_load_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The start of a process alone takes longer than the limit where ten others want the same core."""
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    for load, expected in ((0.1, 1.0), (2.0, 1.0), (14.0, 7.0)):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        assert crowding() == expected


@pytest.mark.usefixtures("short_limit")
def test_a_model_with_such_a_constant_is_a_mistake_of_its_file(context: PassContext) -> None:
    with pytest.raises(InferenceStopped):
        passes.optimize(doubling(INT), recipe=["nop"], context=context)


LOOP = """
g (float[2, 4] x) => (float[2, 4] y) {
    w2 = Loop (n, t, w) <body = b (int64 i, bool k, float[4, 4] a) => (bool k2, float[4, 4] c) {
        k2 = Identity (k)
        c = Neg (a)
    }>
    y = MatMul (x, w2)
}
"""


@pytest.mark.usefixtures("short_limit")
def test_a_constant_of_an_endless_loop_is_not_computed() -> None:
    model = model_of(LOOP, w=np.ones((4, 4), np.float32), t=np.array(True), n=np.array(10**12))
    part = ModelProto()
    part.CopyFrom(model)
    del part.graph.input[:], part.graph.output[:], part.graph.node[1:]
    part.graph.output.add(name="w2")
    assert inference.evaluate(part) is None
    part.graph.initializer[2].CopyFrom(numpy_helper.from_array(np.array(3), "n"))
    values = inference.evaluate(part)
    assert values is not None
    np.testing.assert_array_equal(values, -np.ones((4, 4)))


def test_processes_of_ours_switch_off_the_telemetry_of_onnxruntime() -> None:
    with Worker() as worker, Worker(alone=True) as alone:
        assert [one.call(os.getenv, key="ORT_DISABLE_TELEMETRY") for one in (worker, alone)] == ["1", "1"]
    assert os.environ["ORT_DISABLE_TELEMETRY"] == "1"


def test_the_file_of_spilled_weights_is_that_of_one_run(context: PassContext) -> None:
    """One context for many models: what earlier runs wrote is gone, and what they have mapped stays valid."""
    runs = [passes.optimize(attention(), recipe=["nop"], context=context) for _ in range(3)]
    spilled = list(context.folder.glob("weights*.data"))
    assert len(spilled) == 1
    first = detached(attention())
    expected = {tensor.name: first.array(tensor) for tensor in first.proto.graph.initializer}
    for done in runs:
        for tensor in done.model.proto.graph.initializer:
            np.testing.assert_array_equal(done.model.array(tensor), expected[tensor.name])
