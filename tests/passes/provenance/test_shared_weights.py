"""The module of a product whose weight is stored, judged by the checkpoint alone: the module whose weight it is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, numpy_helper

import passes
from passes.context import PassContext
from passes.provenance import annotations_of, module_path_of
from passes.weights.detached import attach
from tests.support.annotated_models import annotate_modules, carry_annotations, modules, replaced_nodes
from tests.support.onnx_models import matrix, model_of

ALBERT = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "embedding_size": 8}
CONFIG = {**ALBERT, "num_hidden_layers": 3, "vocab_size": 20, "max_position_embeddings": 16}
IDS = {"input_ids": {"shape": [2, 6], "dtype": "int64", "range": [0, 20]}}


@pytest.fixture(scope="module", params=["biases of zeros", "biases that differ"])
def albert(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ALBERT calls one layer three times. Biases of zeros, as after initialization, are equal in all its layers."""
    from pipeline.config import ExportConfig, RunConfig
    from pipeline.export import TorchSource, export_onnx, load_source

    settings = {"model": {"transformers": {"class": "AlbertModel", "config": CONFIG}, "inputs": IDS}}
    source = load_source(RunConfig.from_mapping(settings).model)
    assert isinstance(source, TorchSource)
    path = tmp_path_factory.mktemp("albert") / "albert.onnx"
    export_onnx(source, ExportConfig(), path)
    if request.param == "biases that differ":
        model = onnx.load(path)
        for seed, tensor in enumerate(model.graph.initializer):
            if tensor.name.endswith("bias"):
                tensor.CopyFrom(numpy_helper.from_array(matrix(1, tensor.dims[0], seed)[0], tensor.name))
        onnx.save(model, path)
    return path


@pytest.mark.parametrize("name", ["onnxslim", "onnxsim", "default", "onnxscript"])
def test_a_product_belongs_to_the_module_that_owns_its_weight(albert: Path, name: str, context: PassContext) -> None:
    owners = {}
    for tensor in onnx.load(albert).graph.initializer:
        weight = numpy_helper.to_array(tensor)
        owners |= dict.fromkeys((weight.tobytes(), weight.T.tobytes()), tensor.name)
    result = attach(passes.optimize(albert, recipe=[name], context=context).model)
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in result.graph.initializer}
    for node in result.graph.node:
        if node.op_type == "Transpose" and node.input[0] in stored:
            stored[node.output[0]] = stored[node.input[0]].T
    judged, made_by_passes = 0, 0
    for node in result.graph.node:
        for weight in (stored[name] for name in node.input if name in stored):
            if node.op_type in ("Gemm", "MatMul") and weight.ndim == 2:
                place = module_path_of(node)
                assert place is not None
                assert f"{place.paths[-1]}.weight" == owners[weight.tobytes()], node.name
                judged += 1
                made_by_passes += bool(annotations_of(node).author)
    assert judged == 20, "six products in each of three calls, one before them and one after"
    assert made_by_passes >= 6 or name != "onnxslim"


CALLED_TWICE = """
g (float[2, 8] x) => (float[2, 8] y) {
    [first_product] p1 = MatMul (x, w)
    [first_sum] s1 = Add (p1, zeros1)
    [gate] t1 = Tanh (s1)
    [product] p2 = MatMul (t1, v)
    [sum] s2 = Add (p2, zeros2)
    [gate2] t2 = Tanh (s2)
    [product2] p3 = MatMul (t2, v)
    [sum2] s3 = Add (p3, zeros2)
    [end] y = Neg (s3)
}
"""
MODULES = {
    **{"first_product": "first", "first_sum": "first", "gate": "gate", "gate2": "gate"},
    **{"product": "shared", "sum": "shared", "product2": "shared", "sum2": "shared"},
}


def called_twice() -> ModelProto:
    zeros = np.zeros((2, 8), np.float32)
    model = model_of(CALLED_TWICE, w=matrix(8, 8, 0), v=matrix(8, 8, 1), zeros1=zeros, zeros2=zeros)
    return annotate_modules(model, **MODULES)


def test_equal_biases_that_a_pass_made_one_of_tell_no_product() -> None:
    after = model_of(
        """
        g (float[2, 8] x) => (float[2, 8] y) {
            n1 = Gemm (x, w, zeros1) t1 = Tanh (n1)
            r2 = Reshape (t1, dims) n2 = Gemm (r2, v, zeros1) m2 = Reshape (n2, dims) t2 = Tanh (m2)
            r3 = Reshape (t2, dims) n3 = Gemm (r3, v, zeros1) m3 = Reshape (n3, dims) y = Neg (m3)
        }
        """,
        w=matrix(8, 8, 0),
        v=matrix(8, 8, 1),
        zeros1=np.zeros((2, 8), np.float32),
        dims=np.array([2, 8]),
    )
    for node in after.graph.node:
        node.name = node.output[0]
    result = carry_annotations(called_twice(), after)
    expected = {"n1": ("first_product", "first_sum"), "n2": ("product", "sum"), "n3": ("product2", "sum2")}
    stands_for = replaced_nodes(result)
    assert {name: stands_for[name] for name in expected} == expected
    place = modules(result)
    assert [place[name] for name in expected] == ["first", "shared", "shared"]


def test_a_reshape_that_was_made_of_another_does_not_draw_the_product_along() -> None:
    before = annotate_modules(
        model_of(
            """
            g (float[2, 2, 4] x) => (float[2, 8] y) {
                [act] a = Relu (x)
                [view] v1 = Reshape (a, dims)
                [product] p = MatMul (v1, w)
                [sum] s = Add (p, b)
                [end] y = Neg (s)
            }
            """,
            w=matrix(8, 8, 0),
            b=matrix(2, 8, 1),
            dims=np.array([2, 8]),
        ),
        **{"act": "attention", "view": "attention", "product": "attention.dense", "sum": "attention.dense"},
    )
    after = model_of(
        "g (float[2, 2, 4] x) => (float[2, 8] y) { a = Relu (x) n1 = Flatten (a) n2 = Gemm (n1, w, b) y = Neg (n2) }",
        w=matrix(8, 8, 0),
        b=matrix(2, 8, 1),
    )
    for node in after.graph.node:
        node.name = node.output[0]
    result = carry_annotations(before, after)
    assert (replaced_nodes(result)["n2"], modules(result)["n2"]) == (("product", "sum"), "attention.dense")


def test_a_dropout_that_went_in_front_of_a_product_does_not_count() -> None:
    before = annotate_modules(
        model_of(
            """
            g (float[2, 8] x) => (float[2, 8] y) {
                [act] a = Relu (x)
                [drop] d = Identity (a)
                [product] p = MatMul (d, w)
                [sum] s = Add (p, b)
                [drop2] d2 = Identity (s)
                [end] y = Neg (d2)
            }
            """,
            w=matrix(8, 8, 0),
            b=matrix(2, 8, 1),
        ),
        **{"act": "act", "drop": "before", "product": "block.dense", "sum": "block.dense", "drop2": "block.drop"},
    )
    after = model_of(
        "g (float[2, 8] x) => (float[2, 8] y) { a = Relu (x) n = Gemm (a, w, b) y = Neg (n) }",
        w=matrix(8, 8, 0),
        b=matrix(2, 8, 1),
    )
    after.graph.node[1].name = "n"
    result = carry_annotations(before, after)
    assert (replaced_nodes(result)["n"], modules(result)["n"]) == (("product", "sum"), "block.dense")
