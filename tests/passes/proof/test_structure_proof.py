"""Proof by structure: for models that nobody can run. What is kept stays, and nothing of the weights is read."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

import passes
from passes.context import PassContext
from passes.recipe.recipe import RecipeItem
from passes.weights.detached import read_model
from passes.weights.files import save
from tests.support.onnx_models import attention

RECIPE = ["onnxscript", "default", "onnxsim"]


@pytest.fixture
def referring(tmp_path: Path) -> Path:
    """An attention block whose weights lie in a file beside it."""
    onnx.save(attention(64, 4), tmp_path / "m.onnx", save_as_external_data=True, location="shard", size_threshold=1024)
    return tmp_path / "m.onnx"


def test_what_is_kept_stays_and_weights_stay_where_they_are(referring: Path, context: PassContext) -> None:
    shard = (referring.parent / "shard").read_bytes()
    x = np.random.default_rng(0).standard_normal((2, 8, 64)).astype(np.float32)
    before = onnxruntime.InferenceSession(referring).run(None, {"x": x})[0]

    run = passes.optimize(referring, RECIPE, keep=["qkv"], proof="structure", context=context)
    save(run.model, referring, referring=True)

    assert [verdict.kept for verdict in run.structures] == [True]
    assert not any(row.errors for row in run.rows)
    assert run.rows[-1].reason == "without fuse_attention"
    after = onnxruntime.InferenceSession(referring).run(None, {"x": x})[0]
    np.testing.assert_allclose(np.asarray(after), np.asarray(before), atol=1e-5)
    assert (referring.parent / "shard").read_bytes() == shard
    assert {path.name for path in referring.parent.iterdir()} == {"m.onnx", "shard"}


CONFUSE = """
def confuse(model):
    for node in model.graph.node:
        node.input[:] = ["wv" if name == "wk" else name for name in node.input]
    return model

confuse.reads = "structure"
"""


def test_a_step_that_breaks_what_is_kept_is_reverted(referring: Path, context: PassContext) -> None:
    (referring.parent / "own.py").write_text(CONFUSE)
    run = passes.optimize(
        referring, [f"{referring.parent}/own.py:confuse"], keep=["qkv"], proof="structure", context=context
    )
    assert [row.status for row in run.rows] == ["reverted"]
    assert "no separate product with the matrix of K (wk)" in run.rows[0].reason


@pytest.mark.parametrize("step", ["onnxslim", {"onnxsim": {"check_n": 1}}])
def test_a_step_that_needs_the_weights_fails_and_says_so(
    referring: Path, step: RecipeItem, context: PassContext
) -> None:
    run = passes.optimize(referring, [step], proof="structure", context=context)
    assert run.rows[-1].status == "failed"
    assert "it takes the whole model with its weights, and 4 of them are to stay unread" in run.rows[-1].reason


def test_a_folded_transpose_is_written_beside_and_its_projection_is_still_kept(
    tmp_path: Path, context: PassContext
) -> None:
    model = attention(64, 4)
    for node in list(model.graph.node):
        if node.op_type == "MatMul" and node.input[1] == "wq":
            node.input[1] = "turned"
    model.graph.node.insert(0, onnx.helper.make_node("Transpose", ["wq"], ["turned"], perm=[1, 0]))
    path = tmp_path / "m.onnx"
    wq = next(onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer if tensor.name == "wq")
    onnx.save(model, path, save_as_external_data=True, location="shard", size_threshold=1024)

    run = passes.optimize(path, ["fold_constants"], keep=["qkv"], proof="structure", context=context)
    save(run.model, path, referring=True)

    assert run.rows[0].changed and run.rows[0].status == "ran"
    assert [verdict.kept for verdict in run.structures] == [True]
    [data] = tmp_path.glob("m.onnx.*.data")
    assert data.read_bytes() == np.ascontiguousarray(wq.T).tobytes()


def test_nothing_is_read_of_a_model_of_terabytes(tmp_path: Path, context: PassContext) -> None:
    """Its weights are holes in a file: to hash them would take hours."""
    side = 2**18
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 20]>
        g (float[1, {side}] x) => (float[1, {side}] y) {{
            h = MatMul (x, a)
            t = Transpose <perm = [1, 0]> (b)
            i = Identity (h)
            y = MatMul (i, t)
        }}"""
    )
    for place, name in enumerate("ab"):
        tensor = model.graph.initializer.add(name=name, data_type=onnx.TensorProto.FLOAT, dims=[side, side])
        tensor.data_location = onnx.TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value="hole")
        tensor.external_data.add(key="offset", value=str(place * 4 * side * side))
    with (tmp_path / "hole").open("wb") as file:
        file.truncate(2 * 4 * side * side + mmap.PAGESIZE)
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())

    run = passes.optimize(path, RECIPE, proof="structure", context=context)

    assert [node.op_type for node in run.model.proto.graph.node] == ["MatMul", "Transpose", "MatMul"]
    assert read_model(path, unread=True).nbytes() > 2**39
