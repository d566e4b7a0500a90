"""An attention block that onnxruntime quantizes: optimized with its structures kept, compared, bisected, explained."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_static
from typer.testing import CliRunner

from passes import PassRun, why, why_weights
from passes.bisect import Loss, bisect
from passes.context import PassContext
from passes.diff import compare_models
from passes.recipe.recipe import steps_of
from pipeline.cli import app
from pipeline.importers import from_onnx
from pipeline.runtime import compile_graph
from pipeline.runtime.tensors import to_numpy
from tests.support.onnx_models import biased_attention, detached, op_counts
from tests.support.structure_models import found, run

RECIPE = ["default", "onnxsim"]


class Samples(CalibrationDataReader):
    """Four inputs from one seed."""

    def __init__(self) -> None:
        draws = np.random.default_rng(0).standard_normal((4, 2, 8, 32)).astype(np.float32)
        self._left = iter([{"x": draw} for draw in draws])

    def get_next(self) -> dict[str, np.ndarray]:
        return next(self._left, None)  # type: ignore[return-value]  # None is how a reader says that it is done


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a block in floats; quantized; and with pairs around its weights too."""
    folder = tmp_path_factory.mktemp("quantized")
    source = biased_attention()
    source.opset_import[0].version = 21
    onnx.save(source, folder / "floats.onnx")
    for name, options in (("plain", {}), ("pairs", {"AddQDQPairToWeight": True})):
        quantize_static(
            folder / "floats.onnx", folder / f"{name}.onnx", Samples(), QuantFormat.QDQ, extra_options=options
        )
    return folder


def verdicts(result: PassRun, kind: str) -> list[tuple[bool, str | None]]:
    return [(one.kept, one.broken_by) for one in result.structures if one.kind == kind]


def test_structures_are_found_and_kept(files: Path, context: PassContext) -> None:
    model = onnx.load(files / "plain.onnx")
    result = run(model, context, RECIPE, keep=["qkv", "qdq?"])
    assert verdicts(result, "qkv") == [(True, None)]
    assert len(found("qdq", model)) > 20
    assert verdicts(result, "qdq") == [(True, None)] * len(found("qdq", model))
    linear = ("QuantizeLinear", "DequantizeLinear", "MatMul")
    assert [op_counts(result.to_proto())[op] for op in linear] == [op_counts(model)[op] for op in linear]


def test_folded_pairs_are_reverted(files: Path, context: PassContext) -> None:
    """onnxruntime stores the whole numbers of a weight in place of its floats and their QuantizeLinear."""
    model = onnx.load(files / "pairs.onnx")
    free = run(model, context, ["onnxruntime"])
    assert op_counts(free.to_proto())["QuantizeLinear"] < op_counts(model)["QuantizeLinear"]
    kept = run(model, context, ["onnxruntime"], keep=["qdq"])
    assert op_counts(kept.to_proto())["QuantizeLinear"] == op_counts(model)["QuantizeLinear"]
    assert (True, "onnxruntime/ConstantFolding") in verdicts(kept, "qdq")


def test_a_bisection_names_who_folds_a_pair(files: Path, context: PassContext) -> None:
    model = detached(onnx.load(files / "pairs.onnx"))
    finding = bisect(model, steps_of([*RECIPE, "onnxruntime"]), Loss.of("qdq", model), context, budget_s=0)
    assert finding.culprit is not None
    assert (finding.culprit.source, finding.culprit.inner) == ("onnxruntime", "ConstantFolding")


def test_a_diff_says_what_is_quantized(files: Path) -> None:
    found = compare_models(files / "floats.onnx", files / "plain.onnx")
    entries = {one.name: one for one in found.quantized}
    assert {"wq", "wk", "wv", "wo", "bq", "q", "scores", "weights", "y"} <= entries.keys()
    assert [node.op for node in found.added if "Linear" in node.op] == []
    assert [one.name for one in found.initializers] == []
    weight = entries["wq"]
    assert (weight.dtype, weight.is_stored) == ("int8", True)
    scale = float(weight.how.split("scale ")[1].split(",")[0])
    assert 0.45 * scale < float(weight.what.removeprefix("off by up to ")) <= 0.501 * scale
    assert compare_models(files / "plain.onnx", files / "plain.onnx").is_empty


def test_a_baseline_holds(files: Path, tmp_path: Path) -> None:
    (tmp_path / "plain.onnx").write_bytes((files / "plain.onnx").read_bytes())
    options = ["--out", str(tmp_path / "out"), "--set", "passes.recipe=[default, onnxsim]"]
    options += ["--set", "passes.keep=[qkv, qdq]"]
    for act in ("accept", "check"):
        shown = CliRunner().invoke(app, ["baseline", act, str(tmp_path / "plain.onnx"), *options])
        assert shown.exit_code == 0, shown.output
    assert "qdq" in (tmp_path / "plain.baseline").read_text(encoding="utf-8")


def test_where_a_quantized_weight_is_read(files: Path) -> None:
    model = onnx.load(files / "plain.onnx")
    (origin,) = why(model, "wq_DequantizeLinear")
    assert origin.inputs[0] == "wq_quantized"
    (weight,) = why_weights(model, "wq_quantized")
    assert weight.readers == ("MatMul q0 through DequantizeLinear wq_DequantizeLinear",)
    (scale,) = why_weights(model, "wq_scale")
    assert scale.readers == ("DequantizeLinear wq_DequantizeLinear",)


# What `onnxline quantsim` writes runs on our own runtime, without a fallback, as it does on onnxruntime.

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
