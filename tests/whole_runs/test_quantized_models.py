"""An attention block that onnxruntime quantizes: optimized with its structures kept, compared, bisected, explained."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_static
from typer.testing import CliRunner

from passes.bisect import Loss, bisect
from passes.context import PassContext
from passes.diff import compare_models
from passes.recipe.recipe import steps_of
from passes.run.result import PassRun
from passes.why import why, why_weights
from pipeline.cli import app
from tests.support.onnx_models import biased_attention, detached
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


def count(model: onnx.ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.node)


def verdicts(result: PassRun, kind: str) -> list[tuple[bool, str | None]]:
    return [(one.kept, one.broken_by) for one in result.structures if one.kind == kind]


def test_structures_are_found_and_kept(files: Path, context: PassContext) -> None:
    model = onnx.load(files / "plain.onnx")
    result = run(model, context, RECIPE, keep=["qkv", "qdq?"])
    assert verdicts(result, "qkv") == [(True, None)]
    assert len(found("qdq", model)) > 20
    assert verdicts(result, "qdq") == [(True, None)] * len(found("qdq", model))
    linear = ("QuantizeLinear", "DequantizeLinear", "MatMul")
    assert [count(result.to_proto())[op] for op in linear] == [count(model)[op] for op in linear]


def test_folded_pairs_are_reverted(files: Path, context: PassContext) -> None:
    """onnxruntime stores the whole numbers of a weight in place of its floats and their QuantizeLinear."""
    model = onnx.load(files / "pairs.onnx")
    free = run(model, context, ["onnxruntime"])
    assert count(free.to_proto())["QuantizeLinear"] < count(model)["QuantizeLinear"]
    kept = run(model, context, ["onnxruntime"], keep=["qdq"])
    assert count(kept.to_proto())["QuantizeLinear"] == count(model)["QuantizeLinear"]
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
