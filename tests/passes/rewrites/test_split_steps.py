"""`split-qkv` and `split-gate-up` in a run: proven, kept from there on, named, and with a word on what is left."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import passes
from passes.context import PassContext
from passes.errors import PolicyError
from passes.provenance.annotations import annotations_of
from passes.rewrites.split_merged import split_qkv
from passes.weights.detached import read_model
from passes.why import why_weights
from tests.passes.rewrites.merged_models import merged_model
from tests.support.onnx_models import attention
from tests.support.pass_runs import ops

QKV = """g (float[2, 8, 32] x) => (float[2, 8, 32] y) <float[96, 32] attn.in_proj.weight> {
    h = Relu (x)
    w = Transpose <perm = [1, 0]> (attn.in_proj.weight)
    product = MatMul (h, w)
    q, k, v = Split <axis = -1, num_outputs = 3> (product)
    kt = Transpose <perm = [0, 2, 1]> (k)
    s = MatMul (q, kt)
    p = Softmax <axis = -1> (s)
    y = MatMul (p, v)
}"""

NORMED = QKV.replace(
    "q, k, v = Split <axis = -1, num_outputs = 3> (product)",
    """
    normal = LpNormalization (product)
    q, k, v = Split <axis = -1, num_outputs = 3> (normal)""",
)

GATED = """g (float[2, 8, 32] x) => (float[2, 8, 48] y) <float[32, 96] mlp.gate_up.weight> {
    product = MatMul (x, mlp.gate_up.weight)
    gate, up = Split <axis = -1, num_outputs = 2> (product)
    curve = Gelu (gate)
    y = Mul (curve, up)
}"""


def test_what_was_split_is_kept_from_there_on(context: PassContext) -> None:
    recipe = ["split-qkv", "fold_constants", "fuse_qkv"]
    kept = passes.optimize(merged_model(QKV), recipe, keep=["qkv"], context=context)
    free = passes.optimize(merged_model(QKV), recipe, context=context)
    assert (ops(kept)["Split"], ops(free)["Split"]) == (0, 1)
    assert [(one.kind, one.kept) for one in kept.structures] == [("qkv", True)]
    assert [(one.kept, one.broken_by) for one in free.structures] == [(False, "fuse_qkv")]
    assert [row.status for row in kept.rows] == ["ran", "ran", "ran"]


def test_what_a_pass_has_merged_is_taken_apart_again(context: PassContext) -> None:
    run = passes.optimize(attention(), ["fuse_qkv", "fold_constants", "split-qkv"], context=context)
    assert [(one.name, one.kept, one.broken_by) for one in run.structures] == [("attention 0", True, "fuse_qkv")]
    recipe = ["fuse_qkv", "fold_constants", "split-qkv", "eliminate_deadend", "fuse_qkv"]
    again = passes.optimize(attention(), recipe, context=context)
    assert [one.kept for one in again.structures] == [False]
    assert [row.lost for row in again.rows] == [("qkv attention 0",), (), (), (), ("qkv attention 0",)]


def test_parts_are_named_after_the_merged_weight(context: PassContext) -> None:
    run = passes.optimize(merged_model(QKV), ["fold_constants", "split-qkv", "default"], keep=["qkv"], context=context)
    stored = {tensor.name: tensor for tensor in run.model.proto.graph.initializer if len(tensor.dims) == 2}
    assert list(stored) == [f"attn.in_proj.{role}.weight_transposed" for role in "qkv"]
    assert {annotations_of(tensor).replaced for tensor in stored.values()} == {("attn.in_proj.weight",)}
    (origin,) = why_weights(run.model, "attn.in_proj.q.weight_transposed")
    assert (origin.sources, origin.part, origin.form) == (("attn.in_proj.weight",), "q", "transposed")
    made = [annotations_of(node) for node in run.model.proto.graph.node if node.output[0] in ("q", "k", "v")]
    assert [one.author for one in made] == ["split-qkv"] * 3


def test_a_keep_without_a_match_after_the_split_is_a_mistake(context: PassContext) -> None:
    with pytest.raises(PolicyError, match=r"keep: qkv matches nothing .* one matrix in the source already"):
        passes.optimize(merged_model(NORMED), ["split-qkv"], keep=["qkv"], context=context)


def test_the_row_says_what_is_left_and_why(context: PassContext) -> None:
    run = passes.optimize(merged_model(NORMED), ["split-qkv"], context=context)
    assert [(row.changed, row.reason) for row in run.rows] == [
        (False, "attn.in_proj.weight is read whole by LpNormalization")
    ]


def test_a_gated_mlp_is_proven_by_numbers(context: PassContext) -> None:
    run = passes.optimize(merged_model(GATED), ["split-gate-up"], context=context)
    [row] = run.rows
    assert (row.status, row.changed, row.reason, row.diff) == ("ran", True, "", {"MatMul": 1, "Split": -1})
    assert {name: error.max_abs < 2e-6 for name, error in row.errors.items()} == {"y": True}
    names = {tensor.name for tensor in run.to_proto().graph.initializer}
    assert names == {"mlp.gate_up.gate.weight", "mlp.gate_up.up.weight"}
    onnx.checker.check_model(run.to_proto(), full_check=True)


def test_rows_of_an_unread_weight_are_places_in_its_file(tmp_path: Path) -> None:
    whole = merged_model(QKV)
    merged = onnx.numpy_helper.to_array(whole.graph.initializer[0])
    onnx.save(whole, tmp_path / "model.onnx", save_as_external_data=True, location="model.data", size_threshold=1024)
    model = read_model(tmp_path / "model.onnx", unread=True)
    result = split_qkv(model)
    assert result.model.unread() == [f"attn.in_proj.{role}.weight" for role in "qkv"]
    stored = {tensor.name: result.model.array(tensor) for tensor in result.model.proto.graph.initializer}
    for at, role in enumerate("qkv"):
        np.testing.assert_array_equal(stored[f"attn.in_proj.{role}.weight"], merged[32 * at : 32 * at + 32])


def test_an_unread_weight_with_its_parts_in_between_is_left(tmp_path: Path) -> None:
    interleaved = QKV.replace(
        "q, k, v = Split <axis = -1, num_outputs = 3> (product)",
        """five = Reshape (product, #[2, 8, 32, 3])
        q = Gather <axis = 3> (five, #0)
        k = Gather <axis = 3> (five, #1)
        v = Gather <axis = 3> (five, #2)""",
    )
    path = tmp_path / "model.onnx"
    onnx.save(merged_model(interleaved), path, save_as_external_data=True, location="model.data", size_threshold=1024)
    assert split_qkv(read_model(path)).split == ("attn.in_proj.weight",)
    result = split_qkv(read_model(path, unread=True))
    assert result.notes == ("attn.in_proj.weight stays unread, and its parts are not consecutive rows of it",)
