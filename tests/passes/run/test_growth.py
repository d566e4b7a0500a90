"""A step that makes a model larger: what an optimizer folded is computed again, and what was asked for is named."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import passes
from passes.context import PassContext
from passes.errors import PolicyError
from passes.model.analysis import stored_bytes
from tests.support.onnx_models import detached, matrix, model_of, vector

ROWS, COLUMNS = 256, 512
"""A folded value has 512 KiB."""

SPELLED: Mapping[str, tuple[str, dict[str, np.ndarray]]] = {
    "Tile": ("t = Tile (c, r)", {"c": matrix(1, COLUMNS, 0), "r": np.array([ROWS, 1])}),
    "Expand": ("t = Expand (c, r)", {"c": matrix(1, COLUMNS, 0), "r": np.array([ROWS, COLUMNS])}),
    "Gather": ("t = Gather (c, i)", {"c": matrix(2, COLUMNS, 0), "i": np.zeros(ROWS, np.int64)}),
    "Pad": ("t = Pad (c, p)", {"c": matrix(1, 8, 0), "p": np.array([0, 0, ROWS - 1, COLUMNS - 8])}),
    "Where": ("t = Where (m, c, d)", {"m": np.ones((ROWS, 1), bool), "c": vector(COLUMNS, 0), "d": vector(COLUMNS, 1)}),
    "Cast": ("t = Cast <to = 1> (c)", {"c": matrix(ROWS, COLUMNS, 0).astype(np.float16)}),
}

LIBRARIES = ["onnxsim", "onnxslim", "onnxscript", "onnxruntime", "fold_constants"]

TIED = """g (int64[2, 4] x) => (float[2, 4, 64] y) {
    e = Gather (table, x) h = Relu (e) turned = Transpose <perm = [1, 0]> (table) y = MatMul (h, turned)
}"""


def spelled(name: str) -> onnx.ModelProto:
    line, weights = SPELLED[name]
    shape = f"float[{ROWS}, {COLUMNS}]"
    return model_of(f"g ({shape} x) => ({shape} y) {{ {line} y = Add (x, t) }}", **weights)


@pytest.mark.parametrize("name", SPELLED)
def test_the_default_recipe_leaves_what_spells_many_bytes_computed(name: str, context: PassContext) -> None:
    model = spelled(name)
    run = passes.optimize(model, context=context)
    assert stored_bytes(run.model) <= stored_bytes(detached(model))
    assert [row.status.value for row in run.reverted] == []
    assert run.remarks == ()


@pytest.mark.parametrize("library", LIBRARIES)
def test_each_library_leaves_it_computed_and_does_the_rest(library: str, context: PassContext) -> None:
    line, weights = SPELLED["Tile"]
    shape = f"float[{ROWS}, {COLUMNS}]"
    text = f"g ({shape} x) => ({shape} y) {{ {line} a = Add (x, t) k = Neg (n) y = Mul (a, k) }}"
    run = passes.optimize(model_of(text, **weights, n=vector(4, 0)[:1]), [library], context=context)
    assert sorted(node.op_type for node in run.model.proto.graph.node) == ["Add", "Mul", "Tile"]


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_tied_table_is_stored_once(library: str, context: PassContext) -> None:
    model = model_of(TIED, table=matrix(64, 32, 0))  # 8 KiB, which folding elsewhere may add
    run = passes.optimize(model, [library], context=context)
    assert stored_bytes(run.model) == 64 * 32 * 4
    assert [node.op_type for node in run.model.proto.graph.node] == ["Gather", "Relu", "Transpose", "MatMul"]


def test_growth_that_was_asked_for_is_named_in_the_row_and_in_the_end(context: PassContext) -> None:
    run = passes.optimize(spelled("Tile"), [{"onnxsim": {"tensor_size_threshold": "1GB"}}], context=context)
    [row] = run.rows
    assert row.remarks == ("stored tensors grew from 2.0 KiB to 512.0 KiB: Tile 't' folded (512.0 KiB)",)
    assert run.remarks == (f"onnxsim: {row.remarks[0]}",)
    untied = passes.optimize(model_of(TIED, table=matrix(64, 32, 0)), ["untie"], context=context)
    assert untied.rows[0].remarks == ("stored tensors grew from 8.0 KiB to 16.0 KiB: 'table_2' (8.0 KiB)",)


def test_an_inner_pass_that_leaves_more_nodes_is_left_out(context: PassContext) -> None:
    layer = "m = MatMul (x, w) a = Add (m, b) r = Relu (a) n = MatMul (r, w) y = Add (n, b)"
    model = model_of(
        f"g (float[n, 8, 16] x) => (float[n, 8, 16] y) {{ {layer} }}", w=matrix(16, 16, 0), b=vector(16, 0)
    )
    run = passes.optimize(model, ["onnxsim"], context=context)
    assert len(run.model.proto.graph.node) == 5
    assert "without fuse_matmul_add_bias_into_gemm_batched, which would have left 7 nodes" in run.rows[0].reason


def test_a_tied_table_with_a_bias_leaves_no_more_nodes(context: PassContext) -> None:
    """Its Transpose stays computed, so the two Reshapes around a Gemm are not paid for by a folded node."""
    layers = "h = Gather (table, ids) t = Transpose <perm = [1, 0]> (table) m = MatMul (h, t) y = Add (m, b)"
    model = model_of(
        f"g (int64[n, 4] ids) => (float[n, 4, 64] y) {{ {layers} }}", table=matrix(64, 32, 0), b=vector(64, 0)
    )
    run = passes.optimize(model, ["onnxsim"], context=context)
    assert stored_bytes(run.model) == stored_bytes(passes.optimize(model, [], context=context).model)
    assert [node.op_type for node in run.model.proto.graph.node] == ["Gather", "Transpose", "MatMul", "Add"]


def test_shapes_that_a_step_fixes_are_those_of_the_proof(context: PassContext) -> None:
    model = model_of("g (float[n, 4] x, float[n, 4] z) => (float[n, 4] y) { y = Add (x, z) }")
    for step, option in (
        ("onnxsim", "overwrite_input_shapes"),
        ("onnxsim", "input_shapes"),
        ("onnxslim", "input_shapes"),
    ):
        run = passes.optimize(model, [{step: {option: {"x": [3, 4]}}}], context=context)
        assert run.rows[0].status.value == "ran", run.rows[0].reason
        assert run.model.proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value == 3
        assert run.example["z"].shape == (3, 4)


def test_a_tile_that_is_folded_in_both_branches_of_an_if_is_named(context: PassContext) -> None:
    text = """g (bool c, float[512, 64] x) => (float[512, 64] y) {
        y = If (c) <then_branch = a () => (float[512, 64] e) { t = Tile (w, n) e = Add (x, t) },
                    else_branch = b () => (float[512, 64] f) { u = Tile (w, n) f = Sub (x, u) }>
    }"""
    model = model_of(text, w=matrix(2, 64, 0), n=np.array([256, 1]))
    [row] = passes.optimize(model, ["onnxruntime"], context=context).rows
    assert row.remarks == (
        "stored tensors grew from 528 B to 256.0 KiB: Tile 'u' folded (128.0 KiB), Tile 't' folded (128.0 KiB)",
    )


REFUSED: Mapping[str, tuple[dict[str, dict[str, object]], str]] = {
    "an input that is not there": ({"onnxsim": {"overwrite_input_shapes": {"z": [1, 4]}}}, "no input 'z'"),
    "another rank": ({"onnxsim": {"input_shapes": {"x": [4]}}}, r"x is to be \[4\], and the model declares \['n', 4\]"),
    "no shape": ({"onnxslim": {"input_shapes": ["x:1,4"]}}, "input_shapes is"),
    "a size in words": ({"onnxsim": {"tensor_size_threshold": "lots"}}, "does not take these options"),
    "no such provider": ({"onnxsim": {"providers": ["Abacus"]}}, "Abacus"),
    "no such library": ({"onnxsim": {"custom_lib": "nowhere.so"}}, "no such file"),
    "outputs dropped": ({"onnxsim": {"unused_output": ["y"]}}, "drops outputs"),
    "another dtype": ({"onnxslim": {"dtype": "float16"}}, "dtype is refused"),
    "the dtype that onnxslim knows": ({"onnxslim": {"dtype": "fp16"}}, "dtype is refused"),
    "less than none": ({"onnxscript": {"num_iterations": -1}}, "num_iterations is -1; expected 0 or more"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_options_that_cannot_work_are_mistakes(name: str, context: PassContext) -> None:
    step, message = REFUSED[name]
    model = model_of("g (float[n, 4] x) => (float[n, 4] y) { y = Relu (x) }")
    with pytest.raises(PolicyError, match=message):
        passes.optimize(model, [step], context=context)


def test_nodes_of_stored_zeros_and_ones_are_counted_whatever_removed_them(context: PassContext) -> None:
    text = """g (float[2, 8, 16] x) => (float[2, 8, 16] y) {
        a = Add (x, zero) b = Mul (a, one) c = Add (b, zero2) d = Relu (c) e = Add (d, bias) y = Relu (e)
    }"""
    zeros, ones = np.zeros(16, np.float32), np.ones(16, np.float32)
    model = model_of(text, zero=zeros, zero2=zeros, one=ones, bias=vector(16, 0))
    said = {
        "2 Add nodes removed since their stored operand is zero",
        "1 Mul node removed since its stored operand is one",
    }
    for step in ("onnxsim", "onnxslim"):
        run = passes.optimize(model, [step], context=context)
        assert set(run.rows[0].remarks) == said
        assert set(run.remarks) == {f"{step}: {remark}" for remark in said}


def test_a_zero_bias_that_another_node_takes_over_is_no_removal(context: PassContext) -> None:
    layer = "m = MatMul (x, w) y = Add (m, b)"
    model = model_of(
        f"g (float[8, 16] x) => (float[8, 16] y) {{ {layer} }}", w=matrix(16, 16, 0), b=np.zeros(16, np.float32)
    )
    run = passes.optimize(model, ["fuse_matmul_add_bias_into_gemm", "eliminate_deadend"], context=context)
    assert [node.op_type for node in run.model.proto.graph.node] == ["Gemm"]
    assert [row.remarks for row in run.rows] == [(), ()]


def convolution(ir_version: int, opset: int, *, are_inputs: bool = True) -> onnx.ModelProto:
    """A Conv with a BatchNormalization after it, whose weights are inputs of the graph, too."""
    rng = np.random.default_rng(0)
    arrays = {name: (np.abs(rng.standard_normal(4)) + 0.1).astype(np.float32) for name in ("s", "b", "m", "v")}
    arrays["w"] = rng.standard_normal((4, 3, 3, 3)).astype(np.float32)
    stored = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("BatchNormalization", ["c", "s", "b", "m", "v"], ["y"]),
    ]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 8, 8])]
    inputs += [helper.make_tensor_value_info(t.name, t.data_type, list(t.dims)) for t in stored] if are_inputs else []
    graph = helper.make_graph(nodes, "g", inputs, [onnx.ValueInfoProto(name="y")], stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    model.ir_version = ir_version
    return model


@pytest.mark.parametrize("opset", [7, 8, 9])
def test_initializers_of_an_old_model_are_constants_and_stay_inputs(opset: int, context: PassContext) -> None:
    run = passes.optimize(convolution(3, opset), context=context)
    graph = run.model.proto.graph
    assert [node.op_type for node in graph.node] == ["Conv"]
    assert run.model.proto.ir_version == 3
    assert {tensor.name for tensor in graph.initializer} == {info.name for info in graph.input} - {"x"}
    onnx.checker.check_model(run.to_proto())


@pytest.mark.parametrize(("ir_version", "opset"), [(4, 9), (8, 17)])
def test_defaults_that_callers_may_override_keep_their_meaning(
    ir_version: int, opset: int, context: PassContext
) -> None:
    model = convolution(ir_version, opset)
    run = passes.optimize(model, context=context)
    assert [node.op_type for node in run.model.proto.graph.node] == ["Conv", "BatchNormalization"]
    assert [info.name for info in run.model.proto.graph.input] == [info.name for info in model.graph.input]
    assert "5 initializers are inputs, too (b, m, s and 2 more)" in run.remarks[0]
    fixed = passes.optimize(model, ["fix-defaults", "onnxsim"], context=context)
    assert [node.op_type for node in fixed.model.proto.graph.node] == ["Conv"]
    assert [info.name for info in fixed.model.proto.graph.input] == ["x"]


def test_an_output_gets_the_shape_that_inference_knows(context: PassContext) -> None:
    run = passes.optimize(convolution(8, 17, are_inputs=False), context=context)
    declared = run.model.proto.graph.output[0].type.tensor_type
    assert (declared.elem_type, [dim.dim_value for dim in declared.shape.dim]) == (TensorProto.FLOAT, [1, 4, 8, 8])
    assert run.invalid == ""


def test_an_output_of_unknown_rank_stays_without_a_shape(context: PassContext) -> None:
    model = model_of("g (float[2, 8] x, int64[k] s) => (float[2, 8] y) { i = Identity (x) y = Reshape (i, s) }")
    model.graph.output[0].type.tensor_type.ClearField("shape")
    feeds = [{"x": matrix(2, 8, 0), "s": np.array([4, 4])}]
    run = passes.optimize(model, feeds=feeds, context=context)
    assert run.invalid == ""
    assert len(run.model.proto.graph.node) == 1
