"""Operators of onnxruntime's own domain, on a plan without a fallback, against onnxruntime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from pipeline.errors import SourceError, Unsupported
from pipeline.importers import from_onnx
from pipeline.importers.from_onnx import contrib
from pipeline.importers.from_onnx.node import Node
from pipeline.importers.from_onnx.shape import emit_reshape
from pipeline.importers.from_onnx.specs import OWN_SHAPES, Constants, Specs
from pipeline.ir import TensorSpec
from pipeline.ops import emitter_of
from pipeline.runtime import compile_graph
from pipeline.runtime.tensors import to_numpy
from tests.pipeline.importers.from_onnx.import_text import graph_from, model

HEAD = '<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]> '
ROWS = "float[2, 4, 16] x, float[2, 4, 16] s, float[16] g, float[16] b, float[16] c"

MODELS = {
    "FusedMatMul": """(float[2, 3, 4] a, float[2, 5, 4] b) => (float[2, 3, 5] y)
        { y = com.microsoft.FusedMatMul <transB = 1, alpha = 0.5> (a, b) }""",
    "STFT": """(float[2, 16, 1] x) => (float[2, 3, 5, 2] y)
        <int64 hop = {4}, float[8] w = {0.1, 0.4, 0.8, 1.0, 0.9, 0.7, 0.3, 0.2}> { y = STFT (x, hop, w) }""",
    "Inverse": "(float[2, 3, 3] x) => (float[2, 3, 3] y) { y = com.microsoft.Inverse (x) }",
    "CDist": "(float[4, 3] a, float[5, 3] b) => (float[4, 5] y) { y = com.microsoft.CDist (a, b) }",
    "CDist, euclidean": """(float[4, 3] a, float[5, 3] b) => (float[4, 5] y)
        { y = com.microsoft.CDist <metric = "euclidean"> (a, b) }""",
    "Trilu": """(float[2, 3, 4] x) => (float[2, 3, 4] y)
        { k = Constant <value_int = 1> () y = com.microsoft.Trilu (x, k) }""",
    "Trilu, lower": "(float[3, 4] x) => (float[3, 4] y) { y = com.microsoft.Trilu <upper = 0> (x) }",
    "Gelu": "(float[5] x) => (float[5] y) { y = com.microsoft.Gelu (x) }",
    "FastGelu": "(float[2, 5] x, float[5] b) => (float[2, 5] y) { y = com.microsoft.FastGelu (x, b) }",
    "BiasGelu": "(float[2, 5] x, float[5] b) => (float[2, 5] y) { y = com.microsoft.BiasGelu (x, b) }",
    "QuickGelu": "(float[5] x) => (float[5] y) { y = com.microsoft.QuickGelu <alpha = 1.5> (x) }",
    "SkipLayerNormalization": f"""({ROWS}) => (float[2, 4, 16] y, float[2, 4, 16] t)
        {{ y, , , t = com.microsoft.SkipLayerNormalization <epsilon = 0.01> (x, s, g, b, c) }}""",
    "SkipSimplifiedLayerNormalization": f"""({ROWS}) => (float[2, 4, 16] y, float[2, 4, 16] t)
        {{ y, , , t = com.microsoft.SkipSimplifiedLayerNormalization (x, s, g, c) z = Neg(b) }}""",
    "SimplifiedLayerNormalization": """(float[2, 4, 16] x, float[16] g) => (float[2, 4, 16] y)
        { y = SimplifiedLayerNormalization <axis = -1, epsilon = 0.01> (x, g) }""",
    "MultiHeadAttention": """(float[2, 4, 16] x, float[2, 6, 16] k, float[2, 6, 16] v) => (float[2, 4, 16] y)
        { y = com.microsoft.MultiHeadAttention <num_heads = 4> (x, k, v) }""",
    "GroupQueryAttention": """(float[1, 4, 32] x, float[1, 4, 16] k, float[1, 4, 16] v, float[1, 2, 0, 8] pk,
        float[1, 2, 0, 8] pv) => (float[1, 4, 32] y, float[1, 2, 4, 8] nk, float[1, 2, 4, 8] nv) {
            last = Constant <value = int32[1] {3}> () all = Constant <value = int32 {4}> ()
            y, nk, nv = com.microsoft.GroupQueryAttention <num_heads = 4, kv_num_heads = 2> (x, k, v, pk, pv, last, all)
        }""",
    "Attention": """(float[2, 4, 16] x, float[16, 48] w, float[48] b) => (float[2, 4, 16] y)
        { y = com.microsoft.Attention <num_heads = 4, unidirectional = 1> (x, w, b) }""",
}


def numbers(shape: list[int]) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def check_against_onnxruntime(model: onnx.ModelProto) -> None:
    session = onnxruntime.InferenceSession(model.SerializeToString())
    feed: dict[str, Any] = {value.name: numbers(value.shape) for value in session.get_inputs()}
    program = compile_graph(from_onnx(model))
    found = program.run({entry.name: feed[entry.name] for entry in program.feed_signature})
    for value, wanted in zip(session.get_outputs(), session.run(None, feed), strict=True):
        np.testing.assert_allclose(to_numpy(found[value.name]), wanted, rtol=2e-4, atol=2e-5, err_msg=value.name)


@pytest.mark.parametrize("name", MODELS)
def test_like_onnxruntime(name: str) -> None:
    check_against_onnxruntime(onnx.parser.parse_model(f"{HEAD} g {MODELS[name]}"))


@pytest.mark.parametrize("points", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_weights_of_few_bits(bits: int, points: bool) -> None:
    rows, columns, block = 48, 5, 16
    rng = np.random.default_rng(0)
    arrays = {
        "w": rng.integers(0, 256, (columns, rows // block, block * bits // 8), np.uint8),
        "s": rng.random((columns, rows // block), np.float32),
        "z": rng.integers(0, 256, (columns, -(-rows // block * bits // 8)), np.uint8),
    }
    names = ["w", "s", *(["z"] if points else [])]
    text = f"""{HEAD} g (float[2, {rows}] x) => (float[2, {columns}] y) {{
        y = com.microsoft.MatMulNBits <K = {rows}, N = {columns}, bits = {bits}, block_size = {block}>
            (x, {", ".join(names)})
    }}"""
    model = onnx.parser.parse_model(text)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(arrays[name], name) for name in names)
    check_against_onnxruntime(model)


def test_computed_weights_of_few_bits_are_refused() -> None:
    text = f"""{HEAD} g (float[2, 16] x, uint8[4, 1, 8] w, float[4, 1] s) => (float[2, 4] y)
        {{ y = com.microsoft.MatMulNBits <K = 16, N = 4, bits = 4, block_size = 16> (x, w, s) }}"""
    with pytest.raises(Unsupported, match="expected stored weights"):
        from_onnx(onnx.parser.parse_model(text))


@pytest.mark.parametrize(
    ("node", "missing"),
    [("BiasGelu (x)", 1), ("FusedMatMul (x)", 1), ("SkipLayerNormalization (x)", 1), ("QuickGelu ()", 0)],
)
def test_an_input_that_is_left_out_is_named(node: str, missing: int) -> None:
    text = f"{HEAD} g (float[2, 4] x) => (float[2, 4] y) {{ y = com.microsoft.{node} }}"
    with pytest.raises(Unsupported, match=f"it has no input {missing}, which it needs"):
        from_onnx(onnx.parser.parse_model(text))


def test_another_operator_is_a_row_of_importers_and_one_of_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its shape may follow from a constant: ExpandDims inside of a model that declares no shape for it."""

    def expanded(node: onnx.NodeProto, specs: Specs, constants: Constants) -> dict[str, TensorSpec]:
        spec, axis = specs[node.input[0]], int(constants[node.input[1]].item())
        return {node.output[0]: TensorSpec((*spec.shape[:axis], 1, *spec.shape[axis:]), spec.dtype)}

    def expand(node: Node) -> None:
        node.need_constant(1, "the axis")
        emit_reshape(node, node.operand(0))

    monkeypatch.setitem(contrib.IMPORTERS, "com.microsoft::ExpandDims", expand)
    monkeypatch.setitem(OWN_SHAPES, "com.microsoft::ExpandDims", expanded)
    check_against_onnxruntime(
        onnx.parser.parse_model(f"""{HEAD} g (float[2, 3] x) => (float[2, 1, 3] y)
        {{ k = Constant <value = int32 {{1}}> () h = com.microsoft.ExpandDims (x, k) y = Cosh (h) }}""")
    )


# onnxruntime's own ops, taken apart, against onnxruntime.

INPUTS = "float[2, 5, 6] x, float[6, 24] w, float[24] b"

ATTENTIONS = ["num_heads = 2", "num_heads = 2, qkv_hidden_sizes = [6, 6, 12]", "num_heads = 4, scale = 0.25"]


@pytest.mark.parametrize("attributes", ATTENTIONS)
@pytest.mark.parametrize("with_bias", [True, False])
def test_attention_like_onnxruntime(attributes: str, with_bias: bool) -> None:
    hidden = 12 if "qkv" in attributes else 8
    node = f"y = com.microsoft.Attention <{attributes}> (x, w, b)"
    proto = model(f"g ({INPUTS}) => (float[2, 5, {hidden}] y) {{ {node} }}")
    random = np.random.default_rng(0)
    feeds = {
        value.name: random.normal(size=[dim.dim_value for dim in value.type.tensor_type.shape.dim]).astype(np.float32)
        for value in proto.graph.input
    }
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    if not with_bias:
        feeds["b"][:] = 0  # onnxruntime 1.31 crashes where the bias is left out
    wanted = session.run(None, feeds)[0]
    if not with_bias:
        proto.graph.node[0].input.pop()
    actual = compile_graph(from_onnx(proto, emitter_of=emitter_of)).run(feeds)["y"].numpy()
    # float32: dot products of six terms, and a softmax over five.
    np.testing.assert_allclose(actual, wanted, atol=2e-6, rtol=2e-5)


ODD = [
    "y = com.microsoft.Attention <num_heads = 2, unidirectional = 1> (x, w, b)",
    "y = com.microsoft.Attention <num_heads = 2> (x, w, b, m)",
]


@pytest.mark.parametrize("node", ODD)
def test_the_odd_cases_are_taken_apart_as_the_step_does(node: str) -> None:
    """test_contrib_nodes.py compares their numbers with onnxruntime."""
    graph = graph_from(f"g ({INPUTS}, int32[2] m) => (float[2, 5, 8] y) {{ {node} }}")
    assert "aten.softmax.int" in [op.kind for op in graph.ops]


def test_rotary_attention_is_refused() -> None:
    node = "y = com.microsoft.Attention <num_heads = 2, do_rotary = 1> (x, w, b)"
    with pytest.raises(Unsupported, match=r"com\.microsoft::Attention \(it turns positions, .*\): 1 × at 'y'"):
        graph_from(f"g ({INPUTS}) => (float[2, 5, 8] y) {{ {node} }}")


def test_the_proto_is_left_as_it_is() -> None:
    proto = model(f"g ({INPUTS}) => (float[2, 5, 8] y) {{ y = com.microsoft.Attention <num_heads = 2> (x, w, b) }}")
    before = onnx.ModelProto()
    before.CopyFrom(proto)
    from_onnx(proto)
    assert proto == before


def test_an_attribute_of_another_type_is_refused() -> None:
    """It was read as 0. ONNX has no schema of onnxruntime's operators, so the door does not hold it to one."""
    with pytest.raises(SourceError, match=r"has an attribute 'alpha' of type INT; FusedMatMul takes FLOAT"):
        graph_from(
            "g (float[3, 4] a, float[4, 5] b) => (float[3, 5] y) { y = com.microsoft.FusedMatMul <alpha = 2> (a, b) }"
        )
