"""Structures in quantized models: seen through pairs, dequantized weights and MatMulNBits, and pairs as a structure."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Final

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from passes.structures.types import sums_of
from tests.support.structure_models import drawn, found, lost, names

NUMBERS: Final = (
    """float sx = {0.05}, uint8 zx = {128}, float sw = {0.01}, int8 zw = {0}, float low = {-6.4}, float high = {6.3}"""
)
EACH_ROLE: Final = "qkv"

PLAIN: Final = "float[32, 32] w{r}"
WHOLE: Final = "int8[32, 32] w{r}"
FORMS: Final = {
    "pairs on activations": (
        PLAIN,
        """{r}0 = MatMul (x, w{r}) {r}1 = QuantizeLinear ({r}0, sx, zx) {r} = DequantizeLinear ({r}1, sx, zx)""",
    ),
    "a Clip in front of the pair": (
        PLAIN,
        """{r}0 = MatMul (x, w{r}) {r}2 = Clip ({r}0, low, high) {r}1 = QuantizeLinear ({r}2, sx, zx)
        {r} = DequantizeLinear ({r}1, sx, zx)""",
    ),
    "weights per tensor": (WHOLE, "m{r} = DequantizeLinear (w{r}, sw, zw) {r} = MatMul (x, m{r})"),
    "weights per channel": (
        f"{WHOLE}, float[32] s{{r}}",
        "m{r} = DequantizeLinear <axis = 1> (w{r}, s{r}) {r} = MatMul (x, m{r})",
    ),
    "weights per block": (
        f"{WHOLE}, float[2, 32] s{{r}}",
        "m{r} = DequantizeLinear <axis = 0, block_size = 16> (w{r}, s{r}) {r} = MatMul (x, m{r})",
    ),
    "dequantized, then transposed": (
        WHOLE,
        """m{r} = DequantizeLinear (w{r}, sw, zw) t{r} = Transpose <perm = [1, 0]> (m{r}) {r} = MatMul (x, t{r})""",
    ),
    "dequantized, then reshaped": (
        "int8[4, 8, 32] w{r}",
        """m{r} = DequantizeLinear (w{r}, sw, zw) t{r} = Reshape (m{r}, two) {r} = MatMul (x, t{r})""",
    ),
    "float weights through a pair": (
        PLAIN,
        """i{r} = QuantizeLinear (w{r}, sw, zw) m{r} = DequantizeLinear (i{r}, sw, zw) {r} = MatMul (x, m{r})""",
    ),
    "Gemm with a bias in 32 bits": (
        f"{WHOLE}, int32[32] b{{r}}",
        """m{r} = DequantizeLinear (w{r}, sw, zw) c{r} = DequantizeLinear (b{r}, sw)
        {r} = Gemm <transB = 1> (x, m{r}, c{r})""",
    ),
    "pairs around product and bias": (
        f"{WHOLE}, int32[32] b{{r}}",
        """xi{r} = QuantizeLinear (x, sx, zx) xd{r} = DequantizeLinear (xi{r}, sx, zx)
        m{r} = DequantizeLinear (w{r}, sw, zw) {r}0 = MatMul (xd{r}, m{r}) {r}1 = QuantizeLinear ({r}0, sx, zx)
        {r}2 = DequantizeLinear ({r}1, sx, zx) c{r} = DequantizeLinear (b{r}, sw) {r}3 = Add ({r}2, c{r})
        {r}4 = QuantizeLinear ({r}3, sx, zx) {r} = DequantizeLinear ({r}4, sx, zx)""",
    ),
    "onnxruntime's own operators": (
        WHOLE,
        """m{r} = com.microsoft.DequantizeLinear (w{r}, sw, zw) {r}0 = MatMul (x, m{r})
        {r}1 = com.microsoft.QuantizeLinear ({r}0, sx, zx) {r} = com.microsoft.DequantizeLinear ({r}1, sx, zx)""",
    ),
    "packed": (
        "uint8[32, 2, 8] w{r}, float[64] s{r}",
        "{r} = com.microsoft.MatMulNBits <K = 32, N = 32, bits = 4, block_size = 16> (x, w{r}, s{r})",
    ),
}


def attention(form: str, tail: str = "") -> onnx.ModelProto:
    weights, body = FORMS[form]
    declared = ", ".join(weights.replace("{r}", role) for role in EACH_ROLE)
    return with_whole_numbers(
        drawn(
            f"""
            g (float[8, 32] x) => (float[8, 32] y) <{NUMBERS}, int64[2] two = {{32, 32}}, {declared}> {{
                {" ".join(body.replace("{r}", role) for role in EACH_ROLE)}
                kt = Transpose <perm = [1, 0]> (k)
                s = MatMul (q, kt)
                s1 = QuantizeLinear (s, sx, zx)
                s2 = DequantizeLinear (s1, sx, zx)
                p = Softmax (s2)
                p1 = Clip (p, low, high)
                p2 = QuantizeLinear (p1, sx, zx)
                p3 = DequantizeLinear (p2, sx, zx)
                y = MatMul (p3, v)
            }}""",
            opset=21,
        )
    )


def with_whole_numbers(model: onnx.ModelProto) -> onnx.ModelProto:
    """The weights that are stored as whole numbers, drawn anew: as such, most normal draws are zero."""
    for tensor in model.graph.initializer:
        if tensor.dims and tensor.data_type in (TensorProto.INT8, TensorProto.UINT8, TensorProto.INT32):
            generator = np.random.default_rng(zlib.crc32(tensor.name.encode()))
            numbers = generator.integers(0, 100, tuple(tensor.dims)).astype(numpy_helper.to_array(tensor).dtype)
            tensor.CopyFrom(numpy_helper.from_array(numbers, tensor.name))
    return model


def with_tensor(model: onnx.ModelProto, name: str, change: Callable[[np.ndarray], np.ndarray]) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    tensor = next(tensor for tensor in copy.graph.initializer if tensor.name == name)
    tensor.CopyFrom(numpy_helper.from_array(change(numpy_helper.to_array(tensor)), name))
    return copy


def next_float(numbers: np.ndarray) -> np.ndarray:
    return np.nextafter(numbers, np.float32(np.inf), dtype=np.float32)


@pytest.mark.parametrize("form", FORMS)
def test_projections_are_found(form: str) -> None:
    model = attention(form)
    (instance,) = found("qkv", model)
    assert [weight.name for weight in instance.weights] == ["wq", "wk", "wv"]
    assert instance.wiring is not None
    assert instance.wiring.other_weights == ((0,), (0,), (0,))
    assert lost("qkv", (instance,), model) == {}


@pytest.mark.parametrize("form", FORMS)
def test_attention_is_found(form: str) -> None:
    model = attention(form)
    (instance,) = found("attention", model)
    assert lost("attention", (instance,), model) == {}


SCALED: Final = {form: "sq" if "s{r}" in weights else "sw" for form, (weights, _) in list(FORMS.items())[2:]}
"""Form → a scale of its matrices."""


@pytest.mark.parametrize("form", SCALED)
def test_the_next_number_as_a_scale_is_a_loss(form: str) -> None:
    model = attention(form)
    (instance,) = found("qkv", model)
    (why,) = lost("qkv", (instance,), with_tensor(model, SCALED[form], next_float)).values()
    assert why.startswith("no separate product with the matrix of Q (wq)")


@pytest.mark.parametrize("form", FORMS)
def test_a_matrix_beside_the_kept_one_is_a_loss(form: str) -> None:
    """The old product stays, but attention reads another one."""
    model = attention(form)
    (instance,) = found("qkv", model)
    bypassed = onnx.ModelProto()
    bypassed.CopyFrom(model)
    graph = bypassed.graph
    generator = np.random.default_rng(7)
    numbers = generator.integers(0, 100, (32, 32)).astype(np.int8)
    graph.initializer.append(numpy_helper.from_array(numbers, "other"))
    added = [
        helper.make_node("DequantizeLinear", ["other", "sw"], ["other_float"]),
        helper.make_node("MatMul", ["x", "other_float"], ["other_product"]),
    ]
    scores = next(node for node in graph.node if "s" in node.output)
    scores.input[0] = "other_product"
    kept = list(graph.node)
    del graph.node[:]
    graph.node.extend([*added, *kept])
    graph.output.append(helper.make_tensor_value_info("q", TensorProto.FLOAT, [8, 32]))
    (why,) = lost("qkv", (instance,), bypassed).values()
    assert why == "attention does not read the product with the matrix of Q (wq) by itself"


def test_a_folded_matrix_is_the_same_matrix() -> None:
    model = attention("weights per tensor")
    (instance,) = found("qkv", model)
    assert lost("qkv", (instance,), folded(model, "wq", "mq")) == {}


def test_integers_that_are_stored_transposed_are_the_same_matrix() -> None:
    model = attention("dequantized, then transposed")
    (instance,) = found("qkv", model)
    turned = with_tensor(model, "wq", lambda numbers: np.ascontiguousarray(numbers.T))
    turned.graph.node.remove(next(node for node in turned.graph.node if "tq" in node.output))
    next(node for node in turned.graph.node if "q" in node.output).input[1] = "mq"
    assert lost("qkv", (instance,), turned) == {}


def folded(model: onnx.ModelProto, stored: str, value: str) -> onnx.ModelProto:
    """`model` with the weight that is made of `stored` in floats."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    tensor = next(tensor for tensor in copy.graph.initializer if tensor.name == stored)
    numbers = numpy_helper.to_array(tensor).astype(np.float32) * np.float32(0.01)
    tensor.CopyFrom(numpy_helper.from_array(numbers, value))
    copy.graph.node.remove(next(node for node in copy.graph.node if value in node.output))
    return copy


PAIR: Final = "{r}q = QuantizeLinear ({r}, sx, zx) {r}d = DequantizeLinear ({r}q, sx, zx)"


def pairs(text: str) -> str:
    """`text`, in which `@a` is a pair after `a`: the value `ad`."""
    words = []
    for word in text.split():
        words.append(PAIR.replace("{r}", word[1:]) if word.startswith("@") else word)
    return " ".join(words)


HEAD: Final = f"g (float[2, 4, 8] x) => (float[2, 4, 8] y) <{NUMBERS}, float one = {{1.0}}"
KINDS: Final = {
    "layernorm": f"""{HEAD}, float two = {{2.0}}, float eps = {{1e-5}}, int64[1] last = {{-1}}, int8[8] w,
        float[8] b> {{
        @x m = ReduceMean (xd, last) @m d = Sub (xd, md) @d e = Pow (dd, two) @e f = ReduceMean (ed, last) @f
        h = Add (fd, eps) @h i = Sqrt (hd) @i j = Div (dd, id) @j wd = DequantizeLinear (w, sw, zw) k = Mul (jd, wd) @k
        y = Add (kd, b) }}""",
    "gelu": f"""{HEAD}, float root = {{1.4142135}}, int8 i = {{127}}, float si = {{0.003937008}}> {{
        @x a = Div (xd, root) @a b = Erf (ad) @b c = Add (bd, one) @c e = Mul (xd, cd) @e
        idd = DequantizeLinear (i, si) y = Mul (ed, idd) }}""",
    "swiglu": f"""{HEAD}, int8[8, 8] w, int8[8, 8] v> {{
        @x wd = DequantizeLinear (w, sw, zw) vd = DequantizeLinear (v, sw, zw) a = MatMul (xd, wd) @a
        b = MatMul (xd, vd) @b c = Sigmoid (ad) @c e = Mul (ad, cd) @e y = Mul (ed, bd) }}""",
    "residual": f"""{HEAD}, int8[8, 8] w> {{
        @x wd = DequantizeLinear (w, sw, zw) a = MatMul (xd, wd) @a b = Relu (ad) @b y = Add (xd, bd) }}""",
    "rope": f"""{HEAD}, int64[1] zero = {{0}}, int64[1] four = {{4}}, int64[1] eight = {{8}}, int64[1] last = {{2}},
        float[4, 8] cos, float[4, 8] sin> {{
        @x a = Slice (xd, zero, four, last) @a b = Slice (xd, four, eight, last) @b n = Neg (bd) @n
        c = Concat <axis = 2> (nd, ad) @c e = Mul (xd, cos) @e f = Mul (cd, sin) @f y = Add (ed, fd) }}""",
    "embedding": f"""g (int64[2, 4] x) => (float[2, 4, 8] y) <{NUMBERS}, int8[40, 8] w> {{
        wd = DequantizeLinear (w, sw, zw) y = Gather (wd, x) }}""",
}


@pytest.mark.parametrize("kind", KINDS)
def test_other_structures_are_found_and_kept(kind: str) -> None:
    model = with_whole_numbers(drawn(pairs(KINDS[kind]), opset=21))
    instances = found(kind, model)
    assert names(instances) == ["y"]
    assert lost(kind, instances, model) == {}


def test_a_large_quantized_table_is_known_by_what_is_stored() -> None:
    text = f"""g (int64[2, 4] x) => (float[2, 4, 300] y) <{NUMBERS}, int8[300, 300] w> {{
        wd = DequantizeLinear (w, sw, zw) y = Gather (wd, x) }}"""
    model = with_whole_numbers(drawn(text, opset=21))
    instances = found("embedding", model)
    assert lost("embedding", instances, model) == {}
    assert lost("embedding", instances, folded(model, "w", "wd")) == {}
    assert lost("embedding", instances, with_tensor(model, "sw", next_float)) != {}
    assert lost("embedding", instances, with_tensor(model, "w", lambda numbers: numbers + 1)) != {}


LINEAR: Final = f"""g (float[4, 8] x) => (float[4, 8] y, float[4, 8] z) <{NUMBERS},
    int8[8, 8] w, int8[8, 8] v, int32[8] b> {{
    xq = QuantizeLinear (x, sx, zx)
    xd = DequantizeLinear (xq, sx, zx)
    wd = DequantizeLinear (w, sw, zw)
    vd = DequantizeLinear (v, sw, zw)
    bd = DequantizeLinear (b, sw)
    a = MatMul (xd, wd)
    y = Add (a, bd)
    z0 = MatMul (xd, vd)
    z1 = QuantizeLinear (z0, sx, zx)
    z = DequantizeLinear (z1, sx, zx)
}}"""


def linear(*edits: tuple[str, str]) -> onnx.ModelProto:
    text = LINEAR
    for before, after in edits:
        assert before in text
        text = text.replace(before, after)
    return with_whole_numbers(drawn(text, opset=21))


def test_each_product_and_each_other_tensor_is_a_place() -> None:
    instances = found("qdq", linear())
    assert {one.name: [site.tight.name for site in one.pins] for one in instances} == {
        "a": ["xd", "a"],
        "z0": ["xd", "z0"],
        "bd": [],
        "z": ["z0", "z"],
    }
    assert lost("qdq", instances, linear()) == {}


KEPT: Final = {
    "other names": [("xd", "k"), ("wd", "m"), ("z1", "n")],
    "a Gemm with the bias": [
        ("a = MatMul (xd, wd)", ""),
        ("y = Add (a, bd)", "y = Gemm (xd, wd, bd)"),
    ],
}
LOST: Final = {
    "a pair gone in front of one product": [("MatMul (xd, vd)", "MatMul (x, vd)")],
    "a pair gone behind a product": [("z0 = ", "z = "), ("z1 = QuantizeLinear (z0, sx, zx)", ""),
                                     ("z = DequantizeLinear (z1, sx, zx)", "")],
    "a weight in floats": [("int8[8, 8] v", "float[8, 8] vd"), ("vd = DequantizeLinear (v, sw, zw)", "")],
    "a bias in floats": [("int32[8] b", "float[8] bd"), ("bd = DequantizeLinear (b, sw)", "")],
    "another scale": [("xq, sx, zx", "xq, sw, zx")],
    "another zero point": [("uint8 zx = {128}", "uint8 zx = {127}")],
    "another axis": [("DequantizeLinear (v, sw, zw)", "DequantizeLinear <axis = 0> (v, sw, zw)")],
}  # fmt: skip


@pytest.mark.parametrize("case", KEPT)
def test_pairs_that_stay(case: str) -> None:
    assert lost("qdq", found("qdq", linear()), linear(*KEPT[case])) == {}


@pytest.mark.parametrize("case", LOST)
def test_pairs_that_go(case: str) -> None:
    assert lost("qdq", found("qdq", linear()), linear(*LOST[case])) != {}


def test_packed_weights_are_places_too() -> None:
    model = attention("packed")
    instances = found("qdq", model)
    assert [one.name for one in instances][:3] == ["q", "k", "v"]
    assert lost("qdq", instances, model) == {}
    assert list(lost("qdq", instances, with_tensor(model, "sk", next_float))) == ["k"]


def test_a_model_in_floats_has_no_pairs() -> None:
    assert found("qdq", drawn("g (float[4, 8] x) => (float[4, 8] y) <float[8, 8] w> { y = MatMul (x, w) }")) == ()


# Sums know a matrix again that was transposed or rounded, and no other one.

MATRIX = np.random.default_rng(0).standard_normal((24, 16))

SAME: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "transposed": lambda matrix: matrix.T,
    "rounded to float32": lambda matrix: matrix.astype(np.float32),
    "rounded to float16, transposed": lambda matrix: matrix.astype(np.float16).T,
    "computed in another order": lambda matrix: (matrix * 3).astype(np.float32) / np.float32(3),
}


@pytest.mark.parametrize("change", SAME)
def test_the_same_matrix(change: str) -> None:
    assert sums_of(SAME[change](MATRIX)).is_close(sums_of(MATRIX.astype(np.float32)))
    assert sums_of(MATRIX.astype(np.float32)).is_close(sums_of(SAME[change](MATRIX)))


OTHERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "scaled": lambda matrix: 1.01 * matrix,
    "negated": lambda matrix: -matrix,
    "rows exchanged": lambda matrix: matrix[::-1],
    "one number changed": lambda matrix: matrix + 0.1 * (np.arange(matrix.size) == 7).reshape(matrix.shape),
    "cut": lambda matrix: matrix[:-1],
    "of another shape": lambda matrix: matrix.reshape(16, 24),
    "zeros": np.zeros_like,
}


@pytest.mark.parametrize("change", OTHERS)
def test_another_matrix(change: str) -> None:
    assert not sums_of(OTHERS[change](MATRIX).astype(np.float32)).is_close(sums_of(MATRIX.astype(np.float32)))


def test_a_stack_is_its_matrices_side_by_side() -> None:
    stack = MATRIX.reshape(24, 4, 4)
    assert sums_of(stack).is_close(sums_of(MATRIX))
