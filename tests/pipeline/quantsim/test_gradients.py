"""Each operator that gradients go through computes what onnxruntime computes, and torch can differentiate it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch

from benchmarks.quant_sensitivity import measure_each_alone, rank_correlation
from passes.weights.sessions import Session
from pipeline.quantsim.calibration import calibrate
from pipeline.quantsim.encodings import encode
from pipeline.quantsim.gradients import Backward, cut_graph
from pipeline.quantsim.placement import place
from pipeline.quantsim.sensitivity import estimate_sensitivity, find_layers
from pipeline.quantsim.torch_nodes import Tensors, TorchNodes, read_stored
from tests.pipeline.quantsim.pictures_of_qdq import model_of, rule

IMAGE, ROW = (2, 4, 6, 6), (3, 2, 5)

CELL = {"w": (1, 16, 5), "r": (1, 16, 4), "b": (1, 32), "h": (1, 2, 4), "c": (1, 2, 4), "p": (1, 12)}
GATED = {"w": (1, 12, 5), "r": (1, 12, 4), "b": (1, 24), "h": (1, 2, 4)}
BOTH_WAYS = {name: (2, *shape[1:]) for name, shape in CELL.items()}

CASES: Mapping[str, tuple[tuple[int, ...], Mapping[str, tuple[int, ...] | list[int] | list[float]]]] = {
    "ConvTranspose(x, w, b)": (IMAGE, {"w": (4, 3, 3, 3), "b": (3,)}),
    "ConvTranspose <strides = [2, 2], pads = [1, 0, 0, 1], output_padding = [1, 1]> (x, w)": (
        IMAGE,
        {"w": (4, 3, 3, 3)},
    ),
    'ConvTranspose <strides = [2, 2], auto_pad = "SAME_UPPER"> (x, w)': (IMAGE, {"w": (4, 3, 3, 3)}),
    "ConvTranspose <strides = [2, 2], output_shape = [12, 12]> (x, w)": (IMAGE, {"w": (4, 3, 3, 3)}),
    "ConvTranspose <group = 2, dilations = [2, 2]> (x, w, b)": (IMAGE, {"w": (4, 3, 3, 3), "b": (6,)}),
    "Gemm <alpha = 0.5, beta = 2.0, transB = 1> (x, w, b)": ((3, 5), {"w": (4, 5), "b": (4,)}),
    "AveragePool <kernel_shape = [3, 3], pads = [1, 1, 0, 0], strides = [2, 2]> (x)": (IMAGE, {}),
    "AveragePool <kernel_shape = [2, 2], pads = [1, 1, 0, 0], count_include_pad = 1> (x)": (IMAGE, {}),
    "GlobalMaxPool(x)": (IMAGE, {}),
    "GroupNormalization <num_groups = 2> (x, s, b)": (IMAGE, {"s": (4,), "b": (4,)}),
    "InstanceNormalization(x, s, b)": (IMAGE, {"s": (4,), "b": (4,)}),
    "LpNormalization <axis = 1> (x)": (IMAGE, {}),
    "LSTM <hidden_size = 4> (x, w, r, b)": (ROW, CELL),
    "LSTM <hidden_size = 4> (x, w, r, b, , h, c, p)": (ROW, CELL),
    "LSTM <hidden_size = 4, clip = 0.5> (x, w, r)": (ROW, CELL),
    'LSTM <hidden_size = 4, activations = ["Relu", "Tanh", "Tanh"]> (x, w, r)': (ROW, CELL),
    "LSTM <hidden_size = 4> (x, w, r, , k)": (ROW, {**CELL, "k": [3, 1]}),
    'LSTM <hidden_size = 4, direction = "bidirectional"> (x, w, r, b, , h, c)': (ROW, BOTH_WAYS),
    'LSTM <hidden_size = 4, direction = "reverse"> (x, w, r)': (ROW, CELL),
    "GRU <hidden_size = 4> (x, w, r, b)": (ROW, GATED),
    "GRU <hidden_size = 4> (x, w, r)": (ROW, GATED),
    "GRU <hidden_size = 4, linear_before_reset = 1> (x, w, r, b, , h)": (ROW, GATED),
    "RNN <hidden_size = 4> (x, w, r, b)": (ROW, {"w": (1, 4, 5), "r": (1, 4, 4), "b": (1, 8)}),
    'Resize <mode = "nearest"> (x, , k)': (IMAGE, {"k": [1.0, 1.0, 2.0, 2.0]}),
    'Resize <mode = "linear"> (x, , k)': (IMAGE, {"k": [1.0, 1.0, 1.5, 2.0]}),
    'Resize <mode = "linear", coordinate_transformation_mode = "align_corners"> (x, , , k)': (
        IMAGE,
        {"k": [2, 4, 9, 4]},
    ),
    "Pad(x, k)": (IMAGE, {"k": [0, 0, 1, -1, 0, 1, 2, 0]}),
    'Pad <mode = "reflect"> (x, k)': (IMAGE, {"k": [0, 0, 1, 0, 0, 0, 2, 3]}),
    'Pad <mode = "edge"> (x, k)': (IMAGE, {"k": [0, 0, 1, 0, 0, 0, 2, 3]}),
    "CumSum <exclusive = 1, reverse = 1> (x, k)": (IMAGE, {"k": [2]}),
    "DepthToSpace <blocksize = 2> (x)": (IMAGE, {}),
    'DepthToSpace <blocksize = 2, mode = "CRD"> (x)': (IMAGE, {}),
    "SpaceToDepth <blocksize = 2> (x)": (IMAGE, {}),
    'Einsum <equation = "abcd,abed->abce"> (x, x)': (IMAGE, {}),
    "GatherElements <axis = 2> (x, k)": ((1, 1, 6), {"k": [0, -1, 3]}),
    "Max(x, a, b)": (IMAGE, {"a": IMAGE, "b": (1, 6)}),
    "Mean(x, a, b)": (IMAGE, {"a": IMAGE, "b": (1, 6)}),
    "PRelu(x, s)": (IMAGE, {"s": (4, 1, 1)}),
    "Celu <alpha = 0.7> (x)": (IMAGE, {}),
    "Mish(x)": (IMAGE, {}),
    "Selu(x)": (IMAGE, {}),
    "Softsign(x)": (IMAGE, {}),
    "ThresholdedRelu <alpha = 0.3> (x)": (IMAGE, {}),
    "Tile(x, k)": (IMAGE, {"k": [1, 2, 1, 3]}),
    "Trilu <upper = 0> (x)": (IMAGE, {}),
    "ReduceL1 <keepdims = 0> (x, k)": (IMAGE, {"k": [1, 3]}),
    "ReduceL2(x, k)": (IMAGE, {"k": [1]}),
    "ReduceLogSumExp(x, k)": (IMAGE, {"k": [1, 2]}),
    "ReduceSumSquare(x)": (IMAGE, {}),
}
"""A node that reads `x` → the shape of `x`; and of each constant its shape, or its whole numbers or factors."""


@pytest.mark.parametrize("text", CASES)
def test_an_operator_computes_what_onnxruntime_does(text: str) -> None:
    shape, constants = CASES[text]
    draw = np.random.default_rng(0)
    arrays = {
        name: np.array(value, np.int64 if isinstance(value[0], int) else np.float32)
        if isinstance(value, list)
        else draw.standard_normal(value).astype(np.float32)
        for name, value in constants.items()
        if f" {name}," in text or f" {name})" in text
    }
    if text.startswith("CumSum"):
        arrays["k"] = arrays["k"].reshape(())
    if text.startswith("LSTM") and "k" in arrays:
        arrays["k"] = arrays["k"].astype(np.int32)
    if text.startswith("GatherElements"):
        arrays["k"] = arrays["k"].reshape(1, 1, 3)
    op = text.partition(" ")[0].partition("(")[0]
    states = {"LSTM": ["y", "y_h", "y_c"], "GRU": ["y", "y_h"], "RNN": ["y", "y_h"]}.get(op, ["y"])
    types = ", ".join(f"float {name}" for name in states)
    sizes = ", ".join(map(str, shape))
    model = model_of(f"g (float[{sizes}] x) => ({types}) {{ {', '.join(states)} = {text} }}", **arrays)
    x = draw.standard_normal(shape).astype(np.float32)
    expected = Session.of(model).run({"x": x})

    data = torch.from_numpy(x).requires_grad_()
    nodes = TorchNodes(model.proto.graph.node, model.proto.opset_import, states, read_stored(model))
    made = nodes.compute(dict.fromkeys(nodes.reads, data))
    for name in states:
        np.testing.assert_allclose(made[name].detach().numpy(), expected[name], rtol=1e-4, atol=1e-5)
    (slope,) = torch.autograd.grad(made[states[0]].sum(), data)
    assert slope.isfinite().all()


def test_swish_is_that_of_its_definition() -> None:
    """onnxruntime has no kernel for it."""
    text = "g (float[5] x) => (float[5] y) { y = Swish <alpha = 2.0> (x) }"
    model = model_of(text, 24)
    x = torch.linspace(-2, 2, 5)
    nodes = TorchNodes(model.proto.graph.node, model.proto.opset_import, ["y"], {})
    torch.testing.assert_close(nodes.compute({"x": x})["y"], x / (1 + torch.exp(-2 * x)))


SPEECH = """speech (float[1, 3, 32] x) => (float[1, 2, 132] y) {
    c = Conv <pads = [1, 1]> (x, wc, bc)
    r = Relu(c)
    t = Transpose <perm = [2, 0, 1]> (r)
    s, , last = LSTM <hidden_size = 8> (t, w, u, b)
    q = Squeeze(s, one)
    g, gh = GRU <hidden_size = 8> (q, gw, gu)
    h = Squeeze(g, one)
    p = Transpose <perm = [1, 2, 0]> (h)
    d = ConvTranspose <strides = [2]> (p, wd)
    y = Resize <mode = "linear"> (d, , factors)
}"""


def test_the_estimate_goes_through_cells_and_transposed_convolutions() -> None:
    draw = np.random.default_rng(0)

    def weight(*shape: int, size: float = 0.4) -> np.ndarray:
        return (size * draw.standard_normal(shape)).astype(np.float32)

    model = model_of(
        SPEECH,
        wc=weight(6, 3, 3),
        bc=weight(6),
        w=weight(1, 32, 6),
        u=weight(1, 32, 8),
        b=weight(1, 64),
        gw=weight(1, 24, 8),
        gu=weight(1, 24, 8),
        wd=weight(8, 2, 4),
        one=np.array([1]),
        factors=np.array([1, 1, 2], np.float32),
    )
    data = [{"x": draw.standard_normal((1, 3, 32)).astype(np.float32)} for _ in range(6)]
    rules = [rule("op:*", "int8", "uint16"), rule("op:LSTM", "int6"), rule("op:ConvTranspose", "int5")]
    placement = place(model, rules)
    encodings = encode(placement, calibrate(model, placement, data), model)
    layers = find_layers(model, encodings)
    measured = measure_each_alone(model, encodings, layers, data)
    estimated = estimate_sensitivity(model, encodings, data, directions=8)
    assert list(estimated) == list(measured) == ["c", "s", "g", "d"]
    assert rank_correlation(list(estimated.values()), list(measured.values())) == 1
    # The errors of a cell go on from step to step, and so have to do with each other, which the estimate leaves out.
    assert max(abs(estimated[name] - measured[name]) for name in measured) < 6


CASTS: Mapping[str, str] = {
    "y = MatMul (r, w)": "float",
    "d = Cast <to = 11> (r) e = Add (d, d) c = Cast <to = 1> (e) y = MatMul (c, w)": "float",
    "d = Cast <to = 16> (r) c = Cast <to = 1> (d) y = MatMul (c, w)": "float",
    "d = Cast <to = 10> (r) c = Cast <to = 1> (d) y = MatMul (c, w)": "float",
    "f = Cast <to = 11> (s) c = CastLike (f, r) q = Sqrt (c) h = Mul (r, q) y = MatMul (h, w)": "float",
    "h = MatMul (r, w) y = Cast <to = 11> (h)": "double",
    "h = MatMul (r, w) y = Cast <to = 10> (h)": "float16",
}
"""What follows a layer, with casts to double (11), bfloat16 (16) and float16 (10) → the dtype of the output."""


@pytest.mark.parametrize("text", CASTS)
def test_the_estimate_goes_through_casts_to_other_floats(text: str) -> None:
    draw = np.random.default_rng(0)
    v, w = (draw.standard_normal((32, 32)).astype(np.float32) for _ in range(2))
    model = model_of(
        f"g (float[4, 32] x) => ({CASTS[text]}[4, 32] y) {{ r = MatMul (x, v) {text} }}", v=v, w=w, s=abs(v[:1])
    )
    data = [{"x": draw.standard_normal((4, 32)).astype(np.float32)} for _ in range(4)]
    placement = place(model, [rule("tensor:[vw]", "int6"), rule("tensor:r", None, "uint4")])
    encodings = encode(placement, calibrate(model, placement, data), model)
    layers = find_layers(model, encodings)
    measured = measure_each_alone(model, encodings, layers, data)
    estimated = estimate_sensitivity(model, encodings, data, directions=16)
    assert list(estimated) == list(measured)
    assert {"r"} < estimated.keys()
    for name, ratio in measured.items():
        assert estimated[name] == pytest.approx(ratio, abs=1.5)


def test_outputs_of_bfloat16_have_gradients() -> None:
    """onnxruntime gives none of them to Python, but the backward pass stands for itself."""
    text = "g (float[2, 4] x) => (bfloat16[2, 4] y) { r = MatMul (x, w) y = Cast <to = 16> (r) }"
    model = model_of(text, w=np.eye(4, dtype=np.float32))
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    backward = Backward(model, {"r": ()})
    assert backward.reads == ("r",)
    forward = backward.forward({"r": x})
    (output,) = forward.outputs().values()
    np.testing.assert_array_equal(output, x)
    gradients: dict[str, np.ndarray] = {}
    forward.visit_gradients({"y": x}, lambda name, gradient, _: gradients.__setitem__(name, gradient))
    np.testing.assert_array_equal(gradients["r"], x)


ATTENTION = """g (float[1, 64, 8] x) => (float[1, 64, 8] y) {
    a = MatMul(x, w)
    b = MatMul(x, v)
    t = Transpose <perm = [0, 2, 1]> (b)
    s = MatMul(a, t)
    p = Softmax <axis = -1> (s)
    c = MatMul(p, a)
    m = MatMul(c, w)
    d = Add(m, bias)
    e = MatMul(d, v)
    y = Add(e, a)
}"""


def test_gradients_of_pieces_are_those_of_the_whole() -> None:
    draw = np.random.default_rng(0)
    w, v = (draw.standard_normal((8, 8)).astype(np.float32) for _ in range(2))
    model = model_of(ATTENTION, w=w, v=v, bias=w[0])
    x = draw.standard_normal((1, 64, 8)).astype(np.float32)
    company = {"a": "xa", "b": "xb", "s": "ats", "c": "pac", "d": ("c", "m", "d"), "e": "de"}
    found: list[dict[str, np.ndarray]] = []
    for whole in (2**28, 1):
        forward = Backward(model, company, {*company, "m"}, whole).forward({"x": x})
        gradients: dict[str, np.ndarray] = {}

        def visit(name: str, gradient: np.ndarray, values: Tensors, into: dict[str, np.ndarray] = gradients) -> None:
            assert values.keys() >= {*company[name]}
            into[name] = into.get(name, 0) + gradient

        for number in range(2):
            forward.visit_gradients({"y": np.roll(x, number, 1)}, visit, is_last=number == 1)
        found.append(gradients)
    assert found[0].keys() == found[1].keys() == company.keys()
    for name, gradient in found[0].items():
        np.testing.assert_allclose(found[1][name], gradient, rtol=1e-5, atol=1e-5)  # sums of float32 in another order


def test_cuts_lie_where_little_crosses() -> None:
    """The scores, 16 KiB each, are with the products that make and read them; all else crosses with 2 KiB."""
    model = model_of(
        ATTENTION, w=np.eye(8, dtype=np.float32), v=np.eye(8, dtype=np.float32), bias=np.ones(8, np.float32)
    )
    nodes = model.proto.graph.node
    stored = read_stored(model)
    made = [name for node in nodes for name in node.output]
    graph = (
        TorchNodes(nodes, model.proto.opset_import, made, stored).import_for({"x": torch.zeros(1, 64, 8)}).part.graph
    )
    (whole,) = cut_graph(graph, {}, [graph.value("y").vid])
    assert whole.ops == graph.ops
    pieces = cut_graph(graph, {}, [graph.value("y").vid], whole=1)
    assert tuple(op for piece in pieces for op in piece.ops) == graph.ops
    crossing = {graph.values[vid].name for piece in pieces[:-1] for vid in piece.makes}
    assert crossing
    assert crossing.isdisjoint({"s", "p"})
