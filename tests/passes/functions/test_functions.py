"""Equal layers become one function; passes run once on its body, and the whole stays what it was."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import FunctionProto, GraphProto, ModelProto, TensorProto, helper, numpy_helper

import passes
from passes import PassRun, PolicyError
from passes.bisect import bisect
from passes.context import PassContext
from passes.diff import compare_models, diff_text
from passes.functions import describe_layers, fold_layers, lay_out
from passes.graph.layer_calls import inline_layers, layer_functions
from passes.model.canonical import value_digests
from passes.weights.detached import attach
from tests.support.onnx_models import detached, matrix, vector

LAYERS = 3
WIDTH = 16

LAYER = """
    {0}_w = Transpose <perm = [1, 0]> ("layers.{0}.up.weight")
    {0}_m = MatMul ({1}, {0}_w)
    {0}_s = Add ({0}_m, "layers.{0}.bias")
    {0}_t = Identity ({0}_s)
    {0}_c = Clip ({0}_t, zero, six)
    {0}_y = Add ({1}, {0}_c)
"""
"""Of the layer `{0}`, after the value `{1}`."""

FOLDED = ["Relu", *["Transpose", "Layer"] * LAYERS, "Neg"]

BODY = ["MatMul", "Add", "Identity", "Clip", "Add"]


def layered(layer: str = LAYER, last: str = LAYER, between: str = "", shape: str = f"float[2, {WIDTH}]") -> ModelProto:
    """A model of three layers, whose nodes know the torch module that they come from, as torch's exporter writes it."""
    before = ["h", *(f"{number}_y" for number in range(LAYERS))]
    bodies = [(last if number == LAYERS - 1 else layer).format(number, before[number]) for number in range(LAYERS)]
    text = f"g ({shape} x) => ({shape} z) {{ h = Relu (x) {between.join(bodies)} z = Neg ({before[-1]}) }}"
    for number in range(LAYERS):  # the parser takes names that begin with a letter
        text = text.replace(f" {number}_", f" v{number}_").replace(f"({number}_", f"(v{number}_")
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 20]> {text}')
    stored = {"zero": np.array(0.0, np.float32), "six": np.array(6.0, np.float32)}
    for number in range(LAYERS):
        stored[f"layers.{number}.up.weight"] = matrix(WIDTH, WIDTH, number)
        stored[f"layers.{number}.bias"] = vector(WIDTH, number)
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in stored.items())
    for node in model.graph.node:
        scopes, classes = ["", node.op_type], ["Model", node.op_type]
        if node.output[0].startswith("v"):
            scopes.insert(1, f"layers.{node.output[0][1]}")
            classes.insert(1, "model.Layer")
        for key, value in (("name_scopes", scopes), ("class_hierarchy", classes)):
            node.metadata_props.add(key=f"pkg.torch.onnx.{key}", value=repr(value))
        node.name = f"node_{node.output[0]}"
    return onnx.shape_inference.infer_shapes(model)


def ops(graph: GraphProto | FunctionProto) -> list[str]:
    return [node.op_type for node in graph.node if node.op_type != "Constant"]


def body_of(model: ModelProto) -> FunctionProto:
    [function] = layer_functions(model).values()
    return function


def computed(model: ModelProto) -> np.ndarray:
    """By onnxruntime without its own optimization; by itself it inlines functions."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    [result] = session.run(None, {"x": matrix(2, WIDTH, 9)})
    assert isinstance(result, np.ndarray)
    return result


def optimized(model: ModelProto, recipe: list[object], context: PassContext, **wishes: list[str]) -> PassRun:
    return passes.optimize(model, recipe, context=context, **wishes)  # type: ignore[arg-type]


def test_equal_layers_become_one_function_that_is_called_with_the_weights_of_each() -> None:
    folded = fold_layers(layered())
    body = body_of(folded)

    assert ops(folded.graph) == FOLDED
    assert ops(body) == BODY
    assert list(body.input) == ["h", "up.weight", "bias"]
    assert [node.input[2] for node in folded.graph.node if node.op_type == "Layer"] == [
        f"layers.{number}.bias" for number in range(LAYERS)
    ]
    assert [node.name for node in folded.graph.node if node.op_type == "Layer"] == ["layers.0", "layers.1", "layers.2"]
    assert describe_layers(folded) == "layers as functions: Layer (7 nodes, 3 calls)"
    onnx.checker.check_model(folded, full_check=True)


def test_the_model_with_functions_computes_what_it_computed() -> None:
    model = layered()
    folded = fold_layers(model)
    np.testing.assert_array_equal(computed(folded), computed(model))  # the same operators on the same values


def test_inlining_gives_the_layers_back() -> None:
    model = layered()
    inlined = inline_layers(fold_layers(model))
    assert value_digests(detached(inlined)).whole == value_digests(detached(model)).whole
    scopes = [prop.value for node in inlined.graph.node for prop in node.metadata_props if "scopes" in prop.key]
    assert sum("'layers.1'" in text for text in scopes) == len(BODY) + 1  # and its Transpose
    assert not inlined.functions
    onnx.checker.check_model(inlined, full_check=True)


def test_what_is_computed_from_weights_alone_stays_inside_where_nobody_reads_weights() -> None:
    folded = fold_layers(layered(), unread=True)
    assert ops(folded.graph) == ["Relu", "Layer", "Layer", "Layer", "Neg"]
    assert ops(body_of(folded)) == ["Transpose", *BODY]
    np.testing.assert_array_equal(computed(folded), computed(layered()))


def test_a_layer_that_does_something_else_stays_as_it_is() -> None:
    folded = fold_layers(layered(last=LAYER.replace("Clip ({0}_t, zero, six)", "Clip ({0}_t, six, six)")))
    assert ops(folded.graph) == [*FOLDED[:-2], *BODY, "Neg"]


def test_layers_that_draw_random_values_stay_as_they_are() -> None:
    layer = LAYER.replace("Identity ({0}_s)", "RandomNormalLike ({0}_s)")
    model = layered(layer, layer)
    assert fold_layers(model) is model
    assert describe_layers(model).startswith("export.functions: the model has no two equal layers")


def test_a_value_that_leaves_a_layer_and_comes_back_keeps_it_apart() -> None:
    model = layered()
    middle = next(node for node in model.graph.node if node.output[0] == "v1_t")
    del middle.metadata_props[:]
    folded = fold_layers(model)
    assert [node.name for node in folded.graph.node if node.op_type == "Layer"] == ["layers.0", "layers.2"]
    np.testing.assert_array_equal(computed(folded), computed(model))


def test_what_a_pass_leaves_dead_in_a_body_is_no_node_around_it() -> None:
    laid_out, layout = lay_out(detached(fold_layers(layered())))
    assert layout is not None
    proto = laid_out.copy_proto()
    proto.graph.node.append(helper.make_node("Shape", ["Layer/h"], ["Layer/dead"]))
    proto.graph.node.append(helper.make_node("Neg", ["Layer/dead"], ["Layer/deader"]))
    proto.graph.node.append(helper.make_node("Shape", ["h"], ["dead"]))
    folded = attach(layout.fold(laid_out.with_proto(proto)))
    assert ops(body_of(folded)) == BODY
    assert ops(folded.graph) == [*FOLDED, "Shape"]  # of the graph itself: to remove it is a pass's work
    onnx.checker.check_model(folded, full_check=True)


def test_a_value_of_a_layer_that_a_branch_reads_is_an_output_of_the_function() -> None:
    model = layered()
    branch = onnx.parser.parse_graph("b () => (float[2, 16] o) { o = Abs (v1_m) }")
    chosen = numpy_helper.from_array(np.array(True), "chosen")
    model.graph.initializer.append(chosen)
    model.graph.node.append(helper.make_node("If", ["chosen"], ["w"], then_branch=branch, else_branch=branch))
    model.graph.output.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [2, WIDTH]))
    folded = fold_layers(model)
    assert [len(node.output) for node in folded.graph.node if node.op_type == "Layer"] == [2, 2, 2]
    onnx.checker.check_model(folded, full_check=True)


def test_layers_of_other_sizes_are_not_equal() -> None:
    """By their nodes they are; but a pass may use a size."""
    folded = fold_layers(
        layered("""
        {0}_n = Neg ({1}) {0}_a = Abs ({0}_n) {0}_b = Relu ({0}_a) {0}_y = Concat <axis = 1> ({0}_b, {0}_n)""")
    )
    assert not folded.functions


def test_a_pass_runs_once_on_the_body_and_on_the_nodes_around_it(context: PassContext) -> None:
    model = layered()
    run = optimized(fold_layers(model), ["eliminate_identity", "fold_constants"], context)
    proto = attach(run.model)

    assert ops(body_of(proto)) == ["MatMul", "Add", "Clip", "Add"]
    assert ops(proto.graph) == ["Relu", "Layer", "Layer", "Layer", "Neg"]  # each Transpose is folded, with its weight
    [row, _] = run.rows
    assert (row.status, row.nodes_before - row.nodes_after) == ("ran", 1)
    assert all(errors.max_abs == 0 for errors in row.errors.values())  # nothing is computed in another way
    np.testing.assert_array_equal(computed(proto), computed(model))
    onnx.checker.check_model(proto, full_check=True)


def test_no_pass_sees_a_value_that_is_that_of_one_layer_alone(context: PassContext) -> None:
    model = layered()
    bias = next(tensor for tensor in model.graph.initializer if tensor.name == "layers.0.bias")
    bias.CopyFrom(numpy_helper.from_array(np.zeros(WIDTH, np.float32), bias.name))
    run = optimized(fold_layers(model), ["eliminate_nop_with_unit", "onnxsim"], context)
    proto = attach(run.model)
    assert ops(body_of(proto)) == ["Gemm", "Clip", "Add"]  # the bias, which is zero in the first layer, is in the Gemm
    np.testing.assert_allclose(computed(proto), computed(model), rtol=1e-6)  # onnxsim may order a sum anew


def test_a_structure_of_a_body_counts_for_every_call(context: PassContext) -> None:
    run = optimized(fold_layers(layered()), ["onnxsim"], context, keep=["op:Clip"])
    assert [(verdict.module, verdict.kept) for verdict in run.structures if verdict.kind == "op:Clip"] == [
        (f"layers.{number}", True) for number in range(LAYERS)
    ]


def test_libraries_that_take_the_whole_model_leave_the_calls(context: PassContext) -> None:
    model = layered()
    run = optimized(fold_layers(model), ["onnxslim", "onnxscript", "onnxruntime"], context)
    np.testing.assert_allclose(computed(attach(run.model)), computed(model), rtol=1e-6)
    assert len(layer_functions(run.model.proto)) == 1


def test_a_weight_that_all_calls_share_stays_an_argument(context: PassContext) -> None:
    shared = LAYER.replace('"layers.{0}.up.weight"', "table")
    model = layered(shared, shared)
    model.graph.initializer.append(numpy_helper.from_array(matrix(WIDTH, WIDTH, 7), "table"))
    run = optimized(fold_layers(model), ["default"], context)
    proto = attach(run.model)
    assert ops(body_of(proto)) == ["MatMul", "Add", "Clip", "Add"]
    np.testing.assert_array_equal(computed(proto), computed(model))


def test_the_graph_that_passes_get_has_each_body_once() -> None:
    laid_out, layout = lay_out(detached(fold_layers(layered())))
    assert layout is not None
    assert ops(laid_out.proto.graph) == [*FOLDED, *BODY]
    assert [info.name for info in laid_out.proto.graph.input] == ["x", "Layer/h", "Layer/up.weight", "Layer/bias"]
    assert [info.name for info in laid_out.proto.graph.output] == ["z", "Layer/v0_y"]
    assert value_digests(layout.make_whole(laid_out)).whole == value_digests(detached(layered())).whole


@pytest.mark.parametrize("step", ["to-fp16", "fix-defaults"])
def test_a_step_that_functions_cannot_take_is_refused_in_one_sentence(step: str, context: PassContext) -> None:
    with pytest.raises(PolicyError, match=f"layers as functions, which the step {step} cannot be used with"):
        optimized(fold_layers(layered()), [step], context)


def test_bisecting_looks_at_the_inlined_model(context: PassContext) -> None:
    found = bisect(fold_layers(layered()), ["eliminate_identity", "onnxsim"], lost="op:Identity", context=context)
    assert found.culprit is not None
    assert found.culprit.name == "eliminate_identity"


def test_why_names_the_module_of_a_node_in_a_body(context: PassContext) -> None:
    run = optimized(fold_layers(layered()), ["eliminate_identity"], context)
    [origin] = passes.why(attach(run.model), "op:Clip")
    assert (origin.within, origin.module) == (("Layer",), "layers.0")


def test_a_diff_says_that_the_body_has_changed(context: PassContext) -> None:
    folded = fold_layers(layered())
    run = optimized(folded, ["eliminate_identity"], context)
    text = diff_text(compare_models(detached(folded), run.model))
    assert "removed Identity node_v0_t (layers.0)" in text
