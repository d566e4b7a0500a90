"""The kernel of a node that another runtime computes, against ONNX's reference evaluator."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from pipeline.errors import SourceError, Unsupported
from pipeline.importers import from_onnx
from pipeline.ir import from_text, to_text
from pipeline.ops import KINDS, Kind, emitter_of
from pipeline.planning import to_json
from pipeline.runtime import compile_graph
from pipeline.runtime.tensors import to_numpy

MODEL = """<ir_version: 10, opset_import: ["" : 21]> g (float[1, 2, 5, 5] x, float[1, 18, 4, 4] d, float[3, 2, 3, 3] w)
=> (float[1, 3, 4, 4] z) {
  a = Neg(x)
  b = DeformConv <kernel_shape = [3, 3], pads = [1, 0, 0, 1]> (a, w, d)
  z = Relu(b)
}"""


def model() -> onnx.ModelProto:
    return onnx.parser.parse_model(MODEL)


def feed() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"x": (1, 2, 5, 5), "d": (1, 18, 4, 4), "w": (3, 2, 3, 3)}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def test_without_a_fallback_the_operator_is_refused() -> None:
    with pytest.raises(Unsupported, match="DeformConv"):
        from_onnx(model())


def test_the_node_is_an_op_of_the_plan() -> None:
    graph = from_onnx(model(), emitter_of=emitter_of, fallback=True)
    assert [(op.kind, op.attrs.get("op")) for op in graph.ops] == [
        ("aten.neg.default", None),
        ("OnnxNode", "DeformConv"),
        ("aten.relu.default", None),
    ]
    program = compile_graph(graph)
    wanted = np.asarray(next(iter(ReferenceEvaluator(model()).run(None, {**feed()}))))
    for _ in range(2):
        np.testing.assert_allclose(to_numpy(program.run(feed())["z"]), wanted, rtol=1e-4, atol=1e-5)


def test_a_graph_that_says_another_shape_is_the_users_mistake() -> None:
    text = to_text(from_onnx(model(), emitter_of=emitter_of, fallback=True))
    program = compile_graph(from_text(text.replace("[1, 3, 4, 4]", "[1, 3, 4, 5]")))
    said = r"op 1 \(DeformConv\): it made torch.float32\[1, 3, 4, 4\], and the graph says torch.float32\[1, 3, 4, 5\]"
    with pytest.raises(SourceError, match=said):
        program.run(feed())


def test_the_plan_keeps_the_node_as_text() -> None:
    plan = compile_graph(from_onnx(model(), emitter_of=emitter_of, fallback=True)).plan
    assert [call.kind_id for call in plan.calls].count(Kind.OnnxNode) == 1
    assert "DeformConv" in str(to_json(plan))


def test_which_kinds_cannot_be_captured_on_which_device() -> None:
    for device in ("cpu", "cuda"):
        found = {name for name, row in KINDS.items() if device in row.obstacles}
        assert found == {"OnnxNode", "HigherOrder", "Inverse", "RoiAlign"}
