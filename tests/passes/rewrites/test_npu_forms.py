"""Products as convolutions, a head of attention each, indices of int32: what is left, and what is not handled."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import onnx
import pytest
from onnx import TensorProto

import passes
from passes.context import PassContext
from passes.rewrites.canonical_attention import CanonicalAttention
from passes.rewrites.channels_last import ToNhwc
from passes.rewrites.four_axes import To4d
from passes.rewrites.npu_forms import LinearToConv, MhaToSha, NoInt64
from passes.step import Step
from passes.weights.detached import DetachedModel
from passes.weights.sessions import Session
from tests.support.onnx_models import detached, matrix, model_of, vector

FEED_FORWARD = """g (float[2, 3, 8] x) => (float[2, 3, 8] y) {
    a = MatMul (x, up) b = Add (bias, a) c = Gelu (b) d = Reshape (c, rows) e = Gemm <transB = 1> (d, down, last)
    y = Reshape (e, back)
}"""
WEIGHTS = {"up": matrix(8, 16, 0), "bias": vector(16, 1), "down": matrix(8, 16, 2), "last": vector(8, 3)}
SIZES = {"rows": np.array([6, 16]), "back": np.array([2, 3, 8])}
HEADS = """g (float[1, 2, 3, 4] q, float[1, 1, 4, 3] k, float[1, 2, 3, 4] v, bool[1, 1, 3, 3] seen) =>
    (float[1, 2, 3, 4] y) {
    s = MatMul (q, k) b = Add (s, by_head) m = Where (seen, b, low) p = Softmax (m) y = MatMul (p, v)
}"""


Written = tuple[DetachedModel, dict[str, float]]


def written(
    made: Step, text: str, context: PassContext, opset: int = 20, /, **weights: np.ndarray | np.generic
) -> Written:
    """The model after the step, which does nothing the second time, and the greatest error of each output."""
    model = model_of(text, opset, **weights)
    result = made.apply(detached(model), context)
    assert result.changed, result.why
    assert not made.apply(result.model, context).changed
    random = np.random.default_rng(0)
    feeds: dict[str, np.ndarray] = {}
    for info in model.graph.input:
        shape = [dim.dim_value for dim in info.type.tensor_type.shape.dim]
        kind = info.type.tensor_type.elem_type
        whole = kind == TensorProto.INT64
        feeds[info.name] = random.integers(0, 3, shape) if whole else random.standard_normal(shape).astype(np.float32)
        if kind == TensorProto.BOOL:
            feeds[info.name] = random.standard_normal(shape) > -1
    before, after = Session.of(detached(model)).run(feeds), Session.of(result.model).run(feeds)
    return result.model, {name: float(np.abs(after[name] - array).max()) for name, array in before.items()}


def test_a_feed_forward_block_is_two_convolutions_between_two_transposes(context: PassContext) -> None:
    model, errors = written(LinearToConv(), FEED_FORWARD, context, **WEIGHTS, **SIZES)
    assert errors["y"] < 1e-5  # sums of 16 in another order
    run = passes.optimize(model, ["merge-layout"], context=context)
    ops = Counter(node.op_type for node in run.model.proto.graph.node)
    assert ops == {"Reshape": 2, "Transpose": 2, "Conv": 2, "Gelu": 1}


def test_products_that_a_conv_does_not_compute_are_named(context: PassContext) -> None:
    text = (
        'g (float["N", 8] x, float[2, 8] z) => (float["N", 8] y, float[2, 8] u) { y = MatMul (x, w) u = MatMul (z, w) }'
    )
    result = LinearToConv().apply(detached(model_of(text, w=matrix(8, 8, 0))), context)
    assert result.why == "1 product as Conv; 1 product left, y: the sizes of its data are not fixed"


def test_heads_compute_the_same_bits_and_share_what_they_shared(context: PassContext) -> None:
    by_head = np.random.default_rng(1).standard_normal((1, 2, 1, 3)).astype(np.float32)
    model, errors = written(MhaToSha(), HEADS, context, by_head=by_head, low=np.float32(-1e9))
    assert errors["y"] == 0.0
    nodes = model.proto.graph.node
    assert Counter(node.op_type for node in nodes) == {
        **{"Split": 2, "MatMul": 4, "Add": 2, "Where": 2, "Softmax": 2, "Concat": 1}
    }
    products = [node for node in nodes if node.op_type == "MatMul"]
    assert [node.input[1] for node in products].count("k") == 2
    assert [node.input[0] for node in nodes if node.op_type == "Where"] == ["seen", "seen"]


@pytest.mark.parametrize("bias", ["float[2, 3, 3]", "float[3, 3]"])
def test_a_bias_without_the_axis_of_the_batch_is_split_by_head(bias: str, context: PassContext) -> None:
    text = HEADS.replace("bool[1, 1, 3, 3] seen", bias + " by_head").replace("m = Where (seen, b, low)", "m = Relu (b)")
    _, errors = written(MhaToSha(), text.replace("m = Relu (b) p = Softmax (m)", "p = Softmax (b)"), context)
    assert errors["y"] == 0.0


def test_an_attention_with_more_between_its_products_is_named(context: PassContext) -> None:
    text = HEADS.replace("s = MatMul (q, k)", "a = MatMul (q, k) s = Tanh (a)")
    model = detached(model_of(text, low=np.float32(-1e9), by_head=matrix(3, 3, 0)))
    for step in (MhaToSha(), CanonicalAttention()):
        assert "p: more than a scale and a mask is between it" in (step.apply(model, context).why or "")


def test_a_mask_of_an_open_number_of_heads_is_named(context: PassContext) -> None:
    text = HEADS.replace("bool[1, 1, 3, 3]", 'bool[1, "H", 3, 3]')
    result = MhaToSha().apply(detached(model_of(text, low=np.float32(-1e9), by_head=matrix(3, 3, 0))), context)
    assert not result.changed and "seen: how many heads it has is not known" in (result.why or "")


@pytest.mark.parametrize("bias", [vector(8, 1)[:, None], vector(8, 1)[None, None]], ids=["by row", "one more axis"])
def test_a_sum_that_is_no_bias_of_a_conv_stays(bias: np.ndarray, context: PassContext) -> None:
    shape = "1, 8, 8" if bias.ndim == 3 else "8, 8"
    text = f"g (float[8, 8] x) => (float[{shape}] y) {{ a = MatMul (x, w) y = Add (a, bias) }}"
    model, errors = written(LinearToConv(), text, context, w=matrix(8, 8, 0), bias=bias)
    assert errors["y"] < 1e-5  # sums of 8 in another order
    assert [node.op_type for node in model.proto.graph.node][-1] == "Add"


def test_a_product_of_integers_is_no_conv(context: PassContext) -> None:
    text = "g (int64[8, 8] x) => (int64[8, 8] y) { y = MatMul (x, w) }"
    result = LinearToConv().apply(detached(model_of(text, w=np.ones((8, 8), np.int64))), context)
    assert result.why == "1 product left, y: its data is no float of 16 or 32 bits"


def test_one_hot_reads_index_and_depth_of_int32(context: PassContext) -> None:
    text = "g (int64[3] x) => (float[3, 4] y) { y = OneHot (x, depth, values) }"
    values = np.array([0, 1], np.float32)
    model, errors = written(NoInt64(), text, context, depth=np.array(4), values=values)
    assert errors["y"] == 0.0
    assert "depth_int32" in model.proto.graph.node[-1].input
    text = text.replace("float[3, 4]", "int64[3, 4]")
    whole = model_of(text, depth=np.array(4), values=values.astype(np.int64))  # onnxruntime has no kernel
    assert not NoInt64().apply(detached(whole), context).changed


@pytest.mark.parametrize("shape", ["1, 1, 3, 4", "3, 4"])
def test_one_head_is_left_as_it_is(shape: str, context: PassContext) -> None:
    text = f"""g (float[{shape}] q, float[{shape}] v) => (float[{shape}] y) {{
        s = MatMul (q, k) p = Softmax (s) y = MatMul (p, v)
    }}"""
    result = MhaToSha().apply(detached(model_of(text, k=matrix(4, 3, 0))), context)
    assert not result.changed and "1 attention left" in (result.why or "")


def test_indices_are_int32_and_shapes_stay(context: PassContext) -> None:
    text = """g (float[4, 6] x, int64[3] fed) => (float[3, 2] y, float[6, 3] z) {
        a = Slice (x, start, end, axis, step) b = Gather (a, fed) y = Reshape (b, shape)
        c = Gather <axis = 0> (x, fed) d = Transpose (c) z = Relu (d)
    }"""
    bounds = {"start": [0], "end": [2**62], "axis": [1], "step": [3], "shape": [3, 2]}
    model, errors = written(NoInt64(), text, context, **{name: np.array(values) for name, values in bounds.items()})
    assert errors == {"y": 0.0, "z": 0.0}
    kinds = {tensor.name: tensor.data_type for tensor in model.proto.graph.initializer}
    assert sorted(kinds.values()) == [TensorProto.INT32] * 4 + [TensorProto.INT64]
    assert [node.op_type for node in model.proto.graph.node].count("Cast") == 1


WINDOWS = """g (float[2, 16, 6] x, float[16, 6] z) => (float[8, 4, 6] y, float[1, 17, 6] u) {
    a = MatMul (x, weight) b = Add (a, z) c = Reshape (b, windows)
    o = Einsum <equation = "nhwpqc->nchpwq"> (c) r = Transpose <perm = [0, 2, 3, 4, 5, 1]> (o) q = Relu (r)
    half = Constant <value_float = 0.5> () d = Mul (q, half)
    e = Softmax <axis = 3> (d) f = Mul (e, by_window) y = Reshape (f, rows)
    h = Gemm <transB = 1> (z, square, bias) i = Unsqueeze (h, front) j = Concat <axis = 1> (token, i)
    k = LayerNormalization (j, bias) l = ReduceMean <keepdims = 1> (k, axes) u = Sub (k, l)
}"""
THREE_PROJECTIONS = """g (float[8, 16, 24] x) => (float[3, 8, 2, 16, 4] y) {
    a = Add (x, each) b = Reshape (a, apart) c = Transpose <perm = [2, 0, 3, 1, 4]> (b) y = Relu (c)
}"""
IMAGES = """g (float[1, 2, 4, 4] x) => (float[1, 3, 4, 4] y, float[1, 4, 4, 3] z, float[1, 3] u) {
    a = Conv (x, kernel) b = Add (a, shift) c = Sigmoid (b) y = Conv (c, second) d = Relu (y)
    e = Concat <axis = 1> (c, d) f, g = Split <axis = 1> (e, threes) h = Mul (f, g)
    i = Transpose <perm = [0, 2, 3, 1]> (h) z = LayerNormalization (i, scale)
    j = ReduceMean <keepdims = 1> (h, image) k = GlobalAveragePool (j) u = Flatten (k)
}"""
STORED = {
    "weight": matrix(6, 6, 0), "square": matrix(6, 6, 1), "bias": vector(6, 2), "token": vector(6, 3)[None, None],
    "by_window": vector(2, 4).reshape(1, 2, 1, 1, 1, 1), "windows": np.array([2, 2, 2, 2, 2, 6]),
    "rows": np.array([8, 4, 6]), "front": np.array([0]), "axes": np.array([1]), "image": np.array([2, 3]),
    "kernel": matrix(3, 2, 5).reshape(3, 2, 1, 1), "second": matrix(3, 3, 6).reshape(3, 3, 1, 1),
    "shift": vector(3, 7).reshape(3, 1, 1), "scale": vector(3, 8), "threes": np.array([3, 3]),
    "each": vector(24, 9), "apart": np.array([8, 16, 3, 2, 4]),
}  # fmt: skip


@pytest.mark.parametrize(("step", "text"), [(To4d(), WINDOWS), (To4d(), THREE_PROJECTIONS), (ToNhwc(), IMAGES)])
def test_values_in_another_layout_have_the_same_elements(step: Step, text: str, context: PassContext) -> None:
    stored = {name: STORED[name] for name in STORED.keys() & set(re.findall(r"\w+", text))}
    model, errors = written(step, text, context, **stored)
    assert max(errors.values()) < 1e-6  # Gemm and MatMul sum six products in another order
    nodes, infos = model.proto.graph.node, onnx.shape_inference.infer_shapes(model.proto).graph.value_info
    if isinstance(step, To4d):
        assert {len(info.type.tensor_type.shape.dim) for info in infos if info.name != "half"} == {4}
        return
    ops = [node.op_type for node in nodes]
    assert (ops.count("Transpose"), ops.count("Flatten")) == (4, 1)
    ends = {name: node for node in nodes for name in node.output}
    assert ends[ends["z"].input[0]].op_type == "Mul"


def test_a_split_without_an_axis_is_along_the_first(context: PassContext) -> None:
    text = """g (float[2, 2, 4, 4] x) => (float[1, 3, 4, 4] y, float[1, 3, 4, 4] z) {
        a = Conv (x, kernel) b, c = Split <num_outputs = 2> (a) y = Conv (b, second) z = Conv (c, second)
    }"""
    model, errors = written(ToNhwc(), text, context, kernel=STORED["kernel"], second=STORED["second"])
    assert max(errors.values()) < 1e-6  # sums of two products in another order
    assert [node.op_type for node in model.proto.graph.node].count("Transpose") == 3


@pytest.mark.parametrize(
    ("step", "shape", "text"),
    [
        (To4d(), "2, 3", "y = Add <axis = 0, broadcast = 1> (x, bias)"),
        (ToNhwc(), "1, 2, 3, 3", "a = MaxPool <kernel_shape = [1, 1]> (x) y = Add <axis = 1, broadcast = 1> (a, bias)"),
    ],
)
def test_operands_that_an_attribute_aligns_stay(step: Step, shape: str, text: str, context: PassContext) -> None:
    model = model_of(f"g (float[{shape}] x) => (float[{shape}] y) {{ {text} }}", 6, bias=vector(2, 1))
    assert not step.apply(detached(model), context).changed


def test_axes_that_are_an_attribute_stay_one(context: PassContext) -> None:
    text = """g (float[3, 4] x) => (float[3, 2] y) {
        a = Slice <axes = [1], ends = [3], starts = [1]> (x) b = ReduceMax <axes = [0], keepdims = 1> (x) c = Relu (a)
        d = ReduceMax <axes = [1], keepdims = 1> (b) y = Mul (c, d)
    }"""
    (errors,) = written(To4d(), text, context, 9)[1].values()
    assert errors == 0


def test_a_reshape_at_an_operator_that_is_not_known_stays(context: PassContext) -> None:
    """Written for a twin, it would be made again each time: heads that are repeated are Expand on five axes."""
    text = """g (float[1, 2, 3, 4] x) => (float[1, 4, 3, 4] y) {
        a = Reshape (x, apart) b = Expand (a, repeated) y = Reshape (b, together)
    }"""
    shapes = {"apart": [1, 2, 1, 3, 4], "repeated": [1, 2, 2, 3, 4], "together": [1, 4, 3, 4]}
    model = model_of(text, **{name: np.array(sizes) for name, sizes in shapes.items()})
    assert not To4d().apply(detached(model), context).changed


def test_open_sizes_have_no_four_axes(context: PassContext) -> None:
    text = 'g (float["N", 8] x) => (float["N", 8] y) { a = MatMul (x, w) y = Relu (a) }'
    assert not To4d().apply(detached(model_of(text, w=matrix(8, 8, 0))), context).changed
