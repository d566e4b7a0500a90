"""Attention in one form, from torch's spelling, from a merged matrix, and from one operator; and as one operator."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import pytest

import passes
from passes.catalog.listing import example_of, read_example
from passes.context import PassContext
from passes.run.result import PassRun
from passes.weights.sessions import Session
from tests.support.onnx_models import detached, matrix, model_of, vector

MERGED = """g (float[2, 3, 8] x) => (float[2, 3, 8] y) {
    a = MatMul (x, w) b = Add (a, bias) q, k, v = Split <axis = 2> (b, parts)
    qh = Reshape (q, heads) kh = Reshape (k, heads) vh = Reshape (v, heads)
    qt = Transpose <perm = [0, 2, 1, 3]> (qh) kt = Transpose <perm = [0, 2, 3, 1]> (kh)
    vt = Transpose <perm = [0, 2, 1, 3]> (vh) s = MatMul (qt, kt) d = Div (s, root) m = Add (mask, d)
    p = Softmax (m) c = MatMul (p, vt) t = Transpose <perm = [0, 2, 1, 3]> (c) y = Reshape (t, back)
}"""
PACKED = """g (float[2, 3, 8] x) => (float[2, 3, 8] y) {
    y = com.microsoft.Attention <num_heads = 2> (x, w, bias)
}"""
JOINED = """g (float[2, 3, 8] x) => (float[2, 3, 8] y) {
    q = MatMul (x, wq) k = MatMul (x, wk) v = MatMul (x, wv)
    qh = Reshape (q, heads) kh = Reshape (k, heads) vh = Reshape (v, heads)
    qt = Transpose <perm = [0, 2, 1, 3]> (qh) kt = Transpose <perm = [0, 2, 3, 1]> (kh)
    vt = Transpose <perm = [0, 2, 1, 3]> (vh)
    qj = Reshape (qt, rows) kj = Reshape (kt, columns) vj = Reshape (vt, rows)
    s = MatMul (qj, kj) d = Div (s, root) a = Add (d, slopes) f = Reshape (a, apart) m = Add (mask, f)
    p = Softmax (m) j = Reshape (p, square) c = MatMul (j, vj) ca = Reshape (c, mixed)
    t = Transpose <perm = [0, 2, 1, 3]> (ca) y = Reshape (t, back)
}"""
JOINTS = {
    **{f"w{role}": matrix(8, 8, seed) for seed, role in enumerate("qkv")},
    "slopes": vector(12, 4).reshape(4, 1, 3), "rows": np.array([4, 3, 4]), "columns": np.array([4, 4, 3]),
    "apart": np.array([2, 2, 3, 3]), "square": np.array([4, 3, 3]), "mixed": np.array([2, 2, 3, 4]),
}  # fmt: skip
WEIGHTS = {"w": matrix(8, 24, 0), "bias": vector(24, 1)}
MORE = {
    "parts": np.array([8, 8, 8]), "heads": np.array([2, 3, 2, 4]), "back": np.array([2, 3, 8]), "root": np.float32(2),
    "mask": np.triu(np.full((3, 3), -np.inf, np.float32), 1),
}  # fmt: skip


def torch_form(opset: int) -> onnx.ModelProto:
    file = example_of("canonical-attention")
    assert file is not None
    model = read_example(file).model
    model.opset_import[0].version = opset
    return model


def packed_form() -> onnx.ModelProto:
    model = onnx.parser.parse_model('<ir_version: 9, opset_import: ["": 20, "com.microsoft": 1]>' + PACKED)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in WEIGHTS.items())
    return model


def run_step(model: onnx.ModelProto, context: PassContext, **options: object) -> PassRun:
    """The run of the step, which computes the same and does nothing the second time."""
    run = passes.optimize(model, [{"canonical-attention": options}], keep=["qkv?"], context=context)
    assert [row.status for row in run.rows] == ["ran"], run.rows
    shape = [dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim]
    feeds = {"x": np.random.default_rng(0).standard_normal(shape).astype(np.float32)}
    np.testing.assert_allclose(
        Session.of(run.model).run(feeds)["y"], Session.of(detached(model)).run(feeds)["y"], rtol=1e-5, atol=1e-5
    )  # the scale is rounded at another place
    assert not passes.optimize(run.model, [{"canonical-attention": options}], context=context).rows[0].changed
    return run


@pytest.mark.parametrize(
    ("model", "masked"),
    [(torch_form(20), 1), (model_of(MERGED, **WEIGHTS, **MORE), 1), (packed_form(), 0)],
    ids=["torch", "merged", "packed"],
)
def test_every_attention_has_one_form(model: onnx.ModelProto, masked: int, context: PassContext) -> None:
    run = run_step(model, context)
    nodes = run.model.proto.graph.node
    made = {name: node for node in nodes for name in node.output}
    (softmax,) = (node for node in nodes if node.op_type == "Softmax")
    name, ops = softmax.input[0], list[str]()
    while made[name].op_type != "MatMul":
        ops.append(made[name].op_type)
        name = next(read for read in made[name].input if read in made)
    assert ops == ["Add"] * masked + ["Mul"]
    stored = {tensor.name for tensor in run.model.proto.graph.initializer}
    products = [node for node in nodes if node.op_type in ("MatMul", "Gemm") and node.input[1] in stored]
    assert len({node.input[1] for node in products}) == 3
    count = Counter(node.op_type for node in nodes)
    assert (count["IsNaN"], count["Where"], count["Reshape"] - bool(count["Gemm"]), count["Transpose"]) == (0, 0, 4, 4)
    assert [verdict.kind for verdict in run.structures if verdict.kept] == ["qkv"]


def joined_form(text: str = JOINED) -> onnx.ModelProto:
    more = {name: array for name, array in MORE.items() if name != "parts"}
    return model_of(text, **JOINTS, **more)


def test_scores_of_joined_batch_and_heads_get_the_axes_of_their_softmax(context: PassContext) -> None:
    """As in Bloom, whose products have [batch · heads] and whose mask has [batch, 1]."""
    run = run_step(joined_form(), context)
    nodes = run.model.proto.graph.node
    made = {name: node for node in nodes for name in node.output}
    (softmax,) = (node for node in nodes if node.op_type == "Softmax")
    assert [made[softmax.input[0]].op_type, made[made[softmax.input[0]].input[1]].op_type] == ["Add", "Add"]
    count = Counter(node.op_type for node in nodes)
    assert count == {"MatMul": 5, "Reshape": 4, "Transpose": 4, "Mul": 1, "Add": 2, "Softmax": 1}
    assert [verdict.kind for verdict in run.structures if verdict.kept] == ["qkv"]


@pytest.mark.parametrize(
    ("old", "new"),
    [("a = Add (d, slopes)", "a = Tanh (d)"), ("y) {", "y, float[4, 3, 3] d) {")],
    ids=["a curve", "scores that are an output"],
)
def test_a_reshape_of_scores_that_no_axes_explain_is_named(old: str, new: str, context: PassContext) -> None:
    run = passes.optimize(joined_form(JOINED.replace(old, new)), ["canonical-attention"], context=context)
    assert "p: more than a scale and a mask is between it and two products" in run.rows[0].reason


def test_one_operator_where_the_opset_has_it(context: PassContext) -> None:
    run = run_step(torch_form(23), context, fused=True)
    ops = Counter(node.op_type for node in run.model.proto.graph.node)
    assert (ops["Attention"], ops["Softmax"], ops["MatMul"], ops["Transpose"]) == (1, 0, 3, 4)
    assert [verdict.kind for verdict in run.structures if verdict.kept] == ["qkv"]


def test_an_older_opset_says_so(context: PassContext) -> None:
    run = passes.optimize(torch_form(20), [{"canonical-attention": {"fused": True}}], context=context)
    assert "opset 20 has no Attention, opset 23 has" in run.rows[0].reason


def test_projections_have_the_names_of_their_module_unless_they_are_outputs(context: PassContext) -> None:
    text = JOINED.replace("y) {", "y, float[2, 3, 8] k) {")
    nodes = passes.optimize(joined_form(text), ["canonical-attention"], context=context).model.proto.graph.node
    assert [node.output[0] for node in nodes if node.input[1:] and node.input[1] in ("wq", "wk", "wv")] == [
        "attention 0.Q",
        "k",
        "attention 0.V",
    ]
