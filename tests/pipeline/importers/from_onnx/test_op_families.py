"""Each family: ONNX text, and the IR ops that it becomes, attributes normalised and no optional input left."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.errors import SourceError, Unsupported
from pipeline.importers.from_onnx import elementwise, reduce
from pipeline.importers.from_onnx.node import Node
from tests.pipeline.importers.from_onnx.import_text import ops

X = "float[2, 3, 8, 8] x"


def ints(name: str, *items: int) -> str:
    return f"{name} = Constant <value_ints = [{', '.join(map(str, items))}]> () "


ELEMENTWISE = {
    "y = Relu(x)": "aten.relu.default(%0)",
    'y = Gelu <approximate = "tanh"> (x)': 'aten.gelu.default(%0) {approximate: "tanh"}',
    "y = Gelu(x)": 'aten.gelu.default(%0) {approximate: "none"}',
    "y = LeakyRelu(x)": "aten.leaky_relu.default(%0) {negative_slope: 0.01}",
    "y = Elu <alpha = 0.3> (x)": "aten.elu.default(%0) {alpha: 0.3}",
    "y = Mod <fmod = 1> (x, x)": "aten.fmod.Tensor(%0, %0)",
    "y = Dropout(x)": "aten.clone.default(%0)",
    "y = Max(x)": "aten.clone.default(%0)",
    "y = Max(x, x)": "aten.maximum.default(%0, %0)",
    "y = Clip(x)": "aten.clone.default(%0)",
    "lo = Constant <value_float = 0.1> () y = Clip(x, lo)": "aten.clamp.default(%0) {min: 0.10000000149011612}",
}


def test_a_hard_sigmoid_is_a_line_between_0_and_1() -> None:
    assert ops("g (float[2] x) => (float[2] y) { y = HardSigmoid(x) }").splitlines() == [
        '%1 "y.mul": float32[2] = aten.mul.Tensor(%0) {other: 0.2}',
        '%2 "y.add": float32[2] = aten.add.Tensor(%1) {other: 0.5}',
        '%3 "y": float32[2] = aten.clamp.default(%2) {min: 0, max: 1}',
    ]


def test_clip_by_computed_bounds_is_min_of_max() -> None:
    text = ops("g (float[2] x, float lo, float hi) => (float[2] y) { y = Clip(x, lo, hi) }")
    assert text.splitlines() == [
        '%3 "y.maximum": float32[2] = aten.maximum.default(%0, %1)',
        '%4 "y": float32[2] = aten.minimum.default(%3, %2)',
    ]


def test_many_inputs_become_a_chain() -> None:
    text = ops("g (float[2, 1] a, float[3] b, float[1] c) => (float[2, 3] y) { y = Sum(a, b, c) }")
    assert (
        text == '%3 "y.add": float32[2, 3] = aten.add.Tensor(%0, %1)\n%4 "y": float32[2, 3] = aten.add.Tensor(%3, %2)'
    )


LINEAR = {
    "y = MatMul(a, b)": "aten.matmul.default(%0, %1)",
    "y = Gemm(a, b)": "aten.mm.default(%0, %1)",
    "y = Gemm(a, b, d)": "aten.addmm.default(%3, %0, %1)",
    "y = Gemm <alpha = 0.1, beta = 2.0> (a, b, d)": "aten.addmm.default(%3, %0, %1) {beta: 2.0, alpha: 0.1}",
    "y = Gemm <transB = 1> (a, c, d)": "aten.linear.default(%0, %2, %3)",
    'y = Einsum <equation = "ij, jk -> ik"> (a, b)': 'aten.einsum.default(%0, %1) {equation: "ij,jk->ik"}',
}


CONV = {
    ("y = Conv(x, w)", "2, 5, 6, 6"): "aten.conv2d.default(%0, %1)",
    ('y = Conv <auto_pad = "VALID", dilations = [2, 1]> (x, w)', "2, 5, 4, 6"): (
        "aten.conv2d.default(%0, %1) {dilation: [2, 1]}"
    ),
    ("y = ConvTranspose <strides = [2, 2], output_padding = [1, 1], pads = [1, 1, 1, 1]> (x, v)", "2, 5, 16, 16"): (
        "aten.conv_transpose2d.input(%0, %3) {stride: [2, 2], padding: [1, 1], output_padding: [1, 1]}"
    ),
    ("y = MaxPool <kernel_shape = [3, 3], strides = [2, 2], ceil_mode = 1> (x)", "2, 3, 4, 4"): (
        "aten.max_pool2d.default(%0) {kernel_size: [3, 3], stride: [2, 2], ceil_mode: true}"
    ),
    ("y = GlobalAveragePool(x)", "2, 3, 1, 1"): "aten.mean.dim(%0) {dim: [2, 3], keepdim: true}",
    ("s = Constant <value_floats = [1.0, 1.0, 2.0, 0.5]> () y = Resize(x, , s)", "2, 3, 16, 4"): (
        "aten.upsample_nearest2d.default(%0) {output_size: [16, 4]}"
    ),
}


NORM = {
    "y = LayerNormalization(x, s)": "aten.layer_norm.default(%0, %1) {normalized_shape: [8], eps: 1e-05}",
    "y = LayerNormalization <axis = -1, epsilon = 1e-6> (x, s, s)": (
        "aten.layer_norm.default(%0, %1, %1) {normalized_shape: [8], eps: 1e-06}"
    ),
    "y = BatchNormalization(x, c, c, c, c)": (
        "aten.batch_norm.default(%0, %2, %2, %2, %2) {training: false, momentum: 0.0, eps: 1e-05, cudnn_enabled: false}"
    ),
    "y = InstanceNormalization(x, c, c)": "aten.group_norm.default(%0, %2, %2) {num_groups: 3, eps: 1e-05}",
    "y = Softmax <axis = -2> (x)": "aten.softmax.int(%0) {dim: 2}",
    "y = LogSoftmax(x)": "aten.log_softmax.int(%0) {dim: 3}",
}


def test_a_sum_from_the_end_without_the_element_is_one_of_flipped_and_shifted_elements() -> None:
    text = "a = Constant <value_int = 0> () y = CumSum <reverse = 1, exclusive = 1> (x, a)"
    assert ops(f"g (float[3] x) => (float[3] y) {{ {text} }}").splitlines() == [
        '%1 "y.flip": float32[3] = aten.flip.default(%0) {dims: [0]}',
        '%2 "y.constant_pad_nd": float32[3] = aten.constant_pad_nd.default(%1) {pad: [1, -1], value: 0.0}',
        '%3 "y.cumsum": float32[3] = aten.cumsum.default(%2) {dim: 0, dtype: word("dtype", "float32")}',
        '%4 "y": float32[3] = aten.flip.default(%3) {dims: [0]}',
    ]


def test_group_weights_of_older_opsets_are_spread_over_channels() -> None:
    text = ops("g (float[2, 4] x, float[2] s) => (float[2, 4] y) { y = GroupNormalization <num_groups = 2> (x, s, s) }")
    assert '"y.expand": float32[2, 2] = aten.expand.default(%2) {size: [2, 2]}' in text
    assert "aten.group_norm.default(%0, %4, %7) {num_groups: 2, eps: 1e-05}" in text


def test_softmax_of_older_opsets_is_flat() -> None:
    assert ops("g (float[2, 3, 4] x) => (float[2, 3, 4] y) { y = Softmax(x) }", 11) == (
        '%1 "y.reshape": float32[2, 12] = aten.reshape.default(%0) {shape: [2, 12]}\n'
        '%2 "y.softmax": float32[2, 12] = aten.softmax.int(%1) {dim: 1}\n'
        '%3 "y": float32[2, 3, 4] = aten.reshape.default(%2) {shape: [2, 3, 4]}'
    )


REDUCE = {
    ("y = ReduceMean(x)", "1, 1, 1, 1"): "aten.mean.dim(%0) {dim: [0, 1, 2, 3], keepdim: true}",
    ("a = Constant <value_ints = [-1, 0]> () y = ReduceSum <keepdims = 0> (x, a)", "3, 8"): (
        "aten.sum.dim_IntList(%0) {dim: [0, 3], keepdim: false}"
    ),
    ("y = ReduceMax <noop_with_empty_axes = 1> (x)", "2, 3, 8, 8"): "aten.clone.default(%0)",
    ("a = Constant <value_int = -1> () y = CumSum(x, a)", "2, 3, 8, 8"): (
        'aten.cumsum.default(%0) {dim: 3, dtype: word("dtype", "float32")}'
    ),
}


SHAPE = {
    (ints("s", 0, -1) + "y = Reshape(x, s)", "2, 192"): "aten.reshape.default(%0) {shape: [2, 192]}",
    ("y = Flatten(x)", "2, 192"): "aten.reshape.default(%0) {shape: [2, 192]}",
    (ints("a", 0) + "y = Unsqueeze(x, a)", "1, 2, 3, 8, 8"): "aten.reshape.default(%0) {shape: [1, 2, 3, 8, 8]}",
    ("y = Transpose(x)", "8, 8, 3, 2"): "aten.permute.default(%0) {dims: [3, 2, 1, 0]}",
    ("y = Concat <axis = -1> (x, x)", "2, 3, 8, 16"): "aten.cat.default(%0, %0) {dim: 3}",
    (ints("s", 4, 1, 1, 1, 1) + "y = Expand(x, s)", "4, 2, 3, 8, 8"): "aten.expand.default(%0) {size: [4, 2, 3, 8, 8]}",
    (ints("r", 1, 2, 1, 3) + "y = Tile(x, r)", "2, 6, 8, 24"): "aten.repeat.default(%0) {repeats: [1, 2, 1, 3]}",
    (ints("s", -3) + ints("e", 2**62) + ints("a", -1) + "y = Slice(x, s, e, a)", "2, 3, 8, 3"): (
        "aten.slice.Tensor(%0) {dim: 3, start: 5, end: 8, step: 1}"
    ),
    (ints("s", -99) + ints("e", -100) + ints("a", 2) + ints("t", -1) + "y = Slice(x, s, e, a, t)", "2, 3, 1, 8"): (
        "aten.slice.Tensor(%0) {dim: 2, start: 0, end: 1, step: 1}"
    ),
    (ints("s", 2) + ints("e", 5) + ints("a", 2) + ints("t", -1) + "y = Slice(x, s, e, a, t)", "2, 3, 0, 8"): (
        "aten.slice.Tensor(%0) {dim: 2, start: 0, end: 0, step: 1}"
    ),
    (ints("p", 1, 2, 3, 4) + ints("a", -1, 1) + "y = Pad(x, p, , a)", "2, 8, 8, 12"): (
        "aten.constant_pad_nd.default(%0) {pad: [1, 3, 0, 0, 2, 4, 0, 0], value: 0.0}"
    ),
    ("y = Trilu <upper = 0> (x)", "2, 3, 8, 8"): "aten.where.self(%1, %0, %2)",
}


OTHERS = {
    ("y = Cast <to = 16> (x)", "float[2] x", "bfloat16[2] y"): (
        'aten._to_copy.default(%0) {dtype: word("dtype", "bfloat16")}'
    ),
    ("y = CastLike(x, like)", "float[2, 3] x, float16[1] like", "float16[2, 3] y"): (
        'aten._to_copy.default(%0) {dtype: word("dtype", "float16")}'
    ),
    ("hi = Constant <value_int = 9007199254740993> () y = Clip(x, , hi)", "int64[2, 3] x", "int64[2, 3] y"): (
        "aten.clamp.default(%0) {max: 9007199254740993}"
    ),
    ("y = Clip <min = 0.0, max = 6.0> (x)", "float[2] x", "float[2] y", 7): (
        "aten.clamp.default(%0) {min: 0.0, max: 6.0}"
    ),
    ("y = RMSNormalization(x, s)", "float[2, 4, 8] x, float[8] s", "float[2, 4, 8] y", 23): (
        "aten.rms_norm.default(%0, %1) {normalized_shape: [8], eps: 1e-05}"
    ),
    ("y = GroupNormalization <num_groups = 2> (x, c, c)", "float[2, 4, 8] x, float[4] c", "float[2, 4, 8] y", 21): (
        "aten.group_norm.default(%0, %1, %1) {num_groups: 2, eps: 1e-05}"
    ),
    ("y = ReduceMean <axes = [-2], keepdims = 0> (x)", X, "float[2, 3, 8] y", 13): (
        "aten.mean.dim(%0) {dim: [2], keepdim: false}"
    ),
    ("y = ArgMax <axis = -1, keepdims = 0> (x)", X, "int64[2, 3, 8] y"): (
        "aten.argmax.default(%0) {dim: 3, keepdim: false}"
    ),
}
"""(node, inputs, output, opset) → the call."""

ONE_OP = {
    **{(node, "float[2, 3] x", "float[2, 3] y"): call for node, call in ELEMENTWISE.items()},
    **{
        (node, "float[2, 3] a, float[3, 4] b, float[4, 3] c, float[4] d", "float[2, 4] y"): call
        for node, call in LINEAR.items()
    },
    **{
        (node, f"{X}, float[5, 3, 3, 3] w, float[5] b, float[3, 5, 3, 3] v", f"float[{shape}] y"): call
        for (node, shape), call in CONV.items()
    },
    **{(node, f"{X}, float[8] s, float[3] c", "float[2, 3, 8, 8] y"): call for node, call in NORM.items()},
    **{(node, X, f"float[{shape}] y"): call for (node, shape), call in {**REDUCE, **SHAPE}.items()},
    **OTHERS,
}


@pytest.mark.parametrize("case", ONE_OP, ids=lambda case: case[0])
def test_a_node_that_becomes_one_call(case: tuple[Any, ...]) -> None:
    node, inputs, output, *opset = case
    lines = [line for line in ops(f"g ({inputs}) => ({output}) {{ {node} }}", *opset).splitlines() if line[0] == "%"]
    assert [line.rsplit("] = ", 1)[1] for line in lines] == [ONE_OP[case]]


def test_a_step_back_is_a_slice_that_is_flipped() -> None:
    bounds = " ".join(ints(name, number) for name, number in (("s", -1), ("e", -(2**62)), ("a", 2), ("t", -3)))
    assert ops(f"g ({X}) => (float[2, 3, 3, 8] y) {{ {bounds} y = Slice(x, s, e, a, t) }}").splitlines() == [
        '%1 "y.slice": float32[2, 3, 3, 8] = aten.slice.Tensor(%0) {dim: 2, start: 1, end: 10, step: 3}',
        '%2 "y": float32[2, 3, 3, 8] = aten.flip.default(%1) {dims: [2]}',
    ]


def test_split_has_its_sizes() -> None:
    expected = (
        '%1 "a": float32[2, 2], %2 "b": float32[2, 1] = aten.split_with_sizes.default(%0) {split_sizes: [2, 1], dim: 1}'
    )
    given = ints("s", 2, 1) + "a, b = Split <axis = -1> (x, s)"
    assert ops(f"g (float[2, 3] x) => (float[2, 2] a, float[2, 1] b) {{ {given} }}") == expected
    counted = "a, b = Split <axis = -1, num_outputs = 2> (x)"
    assert ops(f"g (float[2, 3] x) => (float[2, 2] a, float[2, 1] b) {{ {counted} }}") == expected


def test_a_split_to_sequence_is_a_split() -> None:
    read = "p = Constant <value_int = -1> () q = Constant <value_int = 0> () a = SequenceAt(s, p) b = SequenceAt(s, q)"
    step = "t = Constant <value_int = 2> ()"
    text = (
        f"g (float[2, 3] x) => (float[2, 1] a, float[2, 2] b) {{ {step} s = SplitToSequence <axis = 1> (x, t) {read} }}"
    )
    assert ops(text) == (
        '%1 "b": float32[2, 2], %2 "a": float32[2, 1] = aten.split_with_sizes.default(%0) {split_sizes: [2, 1], dim: 1}'
    )


def test_a_split_to_sequence_may_drop_its_axis() -> None:
    read = "p = Constant <value_int = 1> () a = SequenceAt(s, p)"
    text = f"g (float[2, 2] x) => (float[2] a) {{ s = SplitToSequence <axis = 1, keepdims = 0> (x) {read} }}"
    assert ops(text) == (
        '%1 "s.0.0": float32[2, 1], %2 "a.0": float32[2, 1] = '
        "aten.split_with_sizes.default(%0) {split_sizes: [1, 1], dim: 1}\n"
        '%3 "s.0": float32[2] = aten.reshape.default(%1) {shape: [2]}\n'
        '%4 "a": float32[2] = aten.reshape.default(%2) {shape: [2]}'
    )


INDEX = {
    ("y = Gather <axis = -1> (x, i)", "2, 3, 8, 4, 1"): ["aten.index.Tensor(%0, %1) {indices: [none, none, none, $1]}"],
    ("y = GatherND(x, i)", "4, 3, 8, 8"): ["aten.unbind.int(%1) {dim: 1}", "aten.index.Tensor(%0, %5) {indices: [$1]}"],
    ("y = GatherElements <axis = -1> (x, j)", "2, 3, 8, 1"): [
        "aten.lt.Scalar(%2) {other: 0}",
        "aten.add.Tensor(%2) {other: 8}",
        "aten.where.self(%5, %6, %2)",
        "aten.gather.default(%0, %7) {dim: 3}",
    ],
    ('y = ScatterND <reduction = "add"> (x, i, u)', "2, 3, 8, 8"): [
        "aten.unbind.int(%1) {dim: 1}",
        "aten.index_put.default(%0, %5, %3) {accumulate: true}",
    ],
}


@pytest.mark.parametrize("case", INDEX, ids=lambda case: case[0])
def test_index(case: tuple[str, str]) -> None:
    node, shape = case
    inputs = f"{X}, int64[4, 1] i, int64[2, 3, 8, 1] j, float[4, 3, 8, 8] u, float[2] v"
    text = ops(f"g ({inputs}) => (float[{shape}] y) {{ {node} }}")
    assert [line.rsplit("] = ", 1)[1] for line in text.splitlines()] == INDEX[case]


def test_top_k_makes_both_outputs() -> None:
    text = ops(f"g (float[2, 3] x) => (int64[2, 2] i) {{ {ints('k', 2)} , i = TopK <largest = 0> (x, k) }}")
    assert text.splitlines() == [
        '%1 "topk.0": float32[2, 2], %2 "i": int64[2, 2] = onnxline.top_k.default(%0) {k: 2, dim: 1, largest: false}'
    ]


LSTM = "float[5, 2, 3] x, float[1, 16, 3] w, float[1, 16, 4] r, float[1, 32] b, float[1, 2, 4] h"


def test_an_lstm_has_all_inputs_and_outputs() -> None:
    text = f"g ({LSTM}) => (float[1, 2, 4] last) {{ , last = LSTM <hidden_size = 4> (x, w, r, b, , h, h) }}"
    assert ops(text) == (
        '%5 "last.Y": float32[5, 1, 2, 4], %6 "last": float32[1, 2, 4], %7 "last.Y_c": float32[1, 2, 4] = '
        'onnxline.recurrent.default(%0, %1, %2, %3, %4, %4) {kind: "LSTM", direction: "forward"}'
    )
    text = f"g ({LSTM}) => (float[5, 1, 2, 4] y) {{ y = LSTM <hidden_size = 4> (x, w, r) }}"
    assert 'onnxline.recurrent.default(%0, %1, %2, %5, %6, %7) {kind: "LSTM", direction: "forward"}' in ops(text)


def test_the_lengths_of_sequences_come_after_the_state() -> None:
    text = """g (float[5, 2, 3] x, float[1, 12, 3] w, float[1, 12, 4] r, int32[2] n) => (float[5, 1, 2, 4] y) {
        y = GRU <hidden_size = 4, linear_before_reset = 1> (x, w, r, , n) }"""
    call = 'onnxline.recurrent.default(%0, %1, %2, %4, %5, %3) {kind: "GRU", direction: "forward", reset_after: true}'
    assert ops(text).endswith(call)


def test_weights_of_another_shape_are_refused() -> None:
    text = f"g ({LSTM}) => (float[5, 1, 2, 4] y) {{ y = GRU <hidden_size = 4> (x, w, r) }}"
    with pytest.raises(Unsupported, match=r"its input 'r' has the shape \[1, 16, 4\], expected \[1, 12, 4\]"):
        ops(text.replace("1, 16, 3", "1, 12, 3"))
    with pytest.raises(Unsupported, match=r"its input 'w' has the shape \[1, 16, 3\], expected \[1, 12, 3\]"):
        ops(text)


REFUSED = {
    "y, i = MaxPool <kernel_shape = [1]> (c) z = Not(b) w = Neg(i)": "its output 'i' is read",
    "y = AveragePool <kernel_shape = [9]> (c) z = Not(b)": "its window reaches over 9 elements of axis 2, which has 8",
    "y = Trilu(x, k) z = Not(b)": "the diagonal is 'k', which is not a constant",
}


LEFT_OVER = {
    "z = LSTM <hidden_size = 4, activation_alpha = [0.1]> (x, w, r)": "activation_alpha has 1 number that no",
    "z = Relu <alpha = 0.5> (x)": "an attribute 'alpha', and Relu knows none",
    "z = Softmax <beta = 2.0> (x)": "an attribute 'beta', and Softmax knows axis",
    "z = ReduceMax <noop_with_empty_axes = 1> (x)": "an attribute 'noop_with_empty_axes'",
    "z = Relu (x, s)": "has 2 inputs; Relu takes 1",
    "q, z = Relu (x)": "has 2 outputs; Relu takes 1",
}
"""Node of opset 17 → why it is refused, by the door where ONNX knows no such thing."""


@pytest.mark.parametrize("node", LEFT_OVER)
def test_what_no_importer_reads_is_refused(node: str) -> None:
    inputs = "float[5, 2, 3] x, float[1, 16, 3] w, float[1, 16, 4] r, float[3] s"
    with pytest.raises((Unsupported, SourceError)) as caught:
        ops(f"g ({inputs}) => (z) {{ {node} }}", 17)
    assert LEFT_OVER[node] in str(caught.value)


def ignoring(node: Node) -> None:
    """An importer that looks at its first input alone."""
    node.emit_first("Relu", node.operands(0))


@pytest.mark.parametrize(
    ("node", "why"),
    [
        ("z = Pow (x, s)", "its input 1, 's', is not handled"),
        ("z = LpNormalization <p = 1> (x)", "its attribute 'p' is not handled"),
        ("z = LpNormalization <p = 2> (x)", ""),  # the default
    ],
)
def test_what_an_importer_forgets_is_refused(node: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the standard gives the operator no body, which would be imported in its place."""
    monkeypatch.setitem(elementwise.IMPORTERS, "Pow", ignoring)
    monkeypatch.setitem(reduce.IMPORTERS, "LpNormalization", ignoring)
    text = f"g (float[2, 3] x, float[3] s) => (float[2, 3] z) {{ {node} }}"
    if not why:
        assert "Relu(%0)" in ops(text)
        return
    with pytest.raises(Unsupported) as caught:
        ops(text)
    assert why in str(caught.value)


def test_an_output_that_is_a_sequence_is_refused() -> None:
    text = "g (float[2, 3] x) => (seq(float[2]) z) { z = SplitToSequence <axis = 1, keepdims = 0> (x) }"
    with pytest.raises(Unsupported, match="'z' is a sequence of tensors"):
        ops(text)


@pytest.mark.parametrize("node", REFUSED)
def test_odd_cases_are_refused_by_name(node: str) -> None:
    with pytest.raises(Unsupported) as caught:
        ops(f"g (float[2, 3] x, float[1, 2, 8] c, bool[1] b, int64 k) => (z) {{ {node} }}")
    assert REFUSED[node] in str(caught.value)
