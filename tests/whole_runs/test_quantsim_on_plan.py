"""What `onnxline quantsim` writes runs on our own runtime, without a fallback, as it does on onnxruntime."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper
from typer.testing import CliRunner

from pipeline.cli import app
from pipeline.importers import from_onnx
from pipeline.runtime import compile_graph
from pipeline.runtime.tensors import to_numpy

X = np.random.default_rng(0).standard_normal((2, 8)).astype(np.float32)


def network() -> onnx.ModelProto:
    rng = np.random.default_rng(1)
    weights = {"w": rng.standard_normal((8, 16)), "b": rng.standard_normal(16), "v": rng.standard_normal((16, 4))}
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "w"], ["h"]),
            helper.make_node("Add", ["h", "b"], ["s"]),
            helper.make_node("Relu", ["s"], ["r"]),
            helper.make_node("MatMul", ["r", "v"], ["y"]),
        ],
        "network",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [2, 8])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [2, 4])],
        [numpy_helper.from_array(array.astype(np.float32), name) for name, array in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.parametrize("rule", ["{weights: int4/block4, activations: uint16}", "{weights: int8, activations: uint8}"])
def test_a_simulation_runs_on_the_plan(tmp_path: Path, rule: str) -> None:
    onnx.save(network(), tmp_path / "network.onnx")
    np.savez(tmp_path / "x.npz", x=X)
    (tmp_path / "network.yaml").write_text(f"""
model: {{onnx: network.onnx}}
passes: {{recipe: []}}
quantsim:
  rules: {{"op:MatMul": {rule}}}
  calibration: {{data: x.npz}}
""")
    shown = CliRunner().invoke(app, ["quantsim", str(tmp_path / "network.yaml"), "--out", str(tmp_path / "out")])
    assert shown.exit_code == 0, shown.output
    path = tmp_path / "out" / "model.qdq.onnx"
    assert "QuantizeLinear" in [node.op_type for node in onnx.load(path).graph.node]
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    (wanted,) = onnxruntime.InferenceSession(path, options).run(None, {"x": X})
    found = to_numpy(compile_graph(from_onnx(path)).run({"x": X})["y"])
    np.testing.assert_allclose(found, np.asarray(wanted), rtol=1e-5, atol=1e-5)
