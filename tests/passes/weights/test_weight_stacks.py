"""Stacks of unread weights: one weight while passes run, pieces before and after."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import passes
from passes.errors import ModelError
from passes.weights.detached import DetachedModel, read_model
from passes.weights.files import save
from passes.weights.stand_ins import inline
from passes.weights.weight_stacks import collapse, expand
from tests.support.onnx_models import matrix

NESTED = """<ir_version: 10, opset_import: ["": 20]>
experts (float[2, 16] x, int64[1] chosen) => (float[1, 2, 32] y) {
    gates = Concat <axis = 0> (g0, g1)
    ups = Concat <axis = 0> (u0, u1)
    both = Concat <axis = -1> (gates, ups)
    one = Gather <axis = 0> (both, chosen)
    i = Identity (one)
    y = MatMul (x, i)
}"""


@pytest.fixture
def experts(tmp_path: Path) -> Path:
    model = onnx.parser.parse_model(NESTED)
    for seed, name in enumerate(("g0", "g1", "u0", "u1")):
        model.graph.initializer.append(onnx.numpy_helper.from_array(matrix(16, 16, seed)[None], name))
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="shard", size_threshold=1024)
    return tmp_path / "m.onnx"


def ops(model: DetachedModel) -> list[str]:
    return [node.op_type for node in model.proto.graph.node]


def test_a_stack_is_one_weight_and_comes_apart_again(experts: Path) -> None:
    model = read_model(experts, unread=True)
    whole, stacks = collapse(model)

    assert ops(whole) == ["Gather", "Identity", "MatMul"]
    [both] = whole.proto.graph.initializer
    assert (both.name, list(both.dims)) == ("both", [2, 16, 32])
    assert whole.nbytes() > 2 * 16 * 32 * 4

    again = expand(whole, stacks, model)
    assert ops(again) == ops(model)
    assert {tensor.name for tensor in again.proto.graph.initializer} == {"g0", "g1", "u0", "u1"}


def test_a_stack_cannot_be_read(experts: Path) -> None:
    whole, _ = collapse(read_model(experts, unread=True))
    [both] = whole.proto.graph.initializer
    weight = whole.weight(both)
    assert weight is not None
    with pytest.raises(ModelError, match="'both' is joined from several unread weights"):
        inline(both, weight.data)
    with pytest.raises(ValueError, match="contiguous"):
        weight.array()


def test_what_somebody_else_reads_too_stays_apart(experts: Path) -> None:
    model = onnx.load(experts, load_external_data=False)
    model.graph.node.append(onnx.helper.make_node("Neg", ["g0"], ["z"]))
    model.graph.output.append(onnx.helper.make_tensor_value_info("z", 1, [1, 16, 16]))
    experts.write_bytes(model.SerializeToString())
    whole, stacks = collapse(read_model(experts, unread=True))
    assert ops(whole).count("Concat") == 2
    assert len(stacks) == 1
    read = read_model(experts, unread=False)
    assert collapse(read) == (read, {})


def test_a_run_gives_the_same_numbers(experts: Path) -> None:
    import onnxruntime

    feeds = {"x": matrix(2, 16, 9), "chosen": np.array([1])}
    before = np.asarray(onnxruntime.InferenceSession(experts).run(None, feeds)[0])
    run = passes.optimize(experts, ["default", "fold_constants"], proof="structure")
    save(run.model, experts, referring=True)
    assert ops(run.model) == ["Concat", "Concat", "Concat", "Gather", "MatMul"]
    assert np.array_equal(np.asarray(onnxruntime.InferenceSession(experts).run(None, feeds)[0]), before)
    assert {path.name for path in experts.parent.iterdir()} == {"m.onnx", "shard"}
