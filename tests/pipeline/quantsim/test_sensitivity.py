"""The noise of each layer alone, estimated at once, against a run for each."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx.reference import ReferenceEvaluator

from benchmarks.quant_sensitivity import measure_each_alone, rank_correlation
from passes.weights.detached import DetachedModel, attach, detach
from pipeline.errors import Unsupported
from pipeline.quantsim.calibration import calibrate
from pipeline.quantsim.encodings import Encoding, encode
from pipeline.quantsim.gradients import Backward
from pipeline.quantsim.noise import measure_noise
from pipeline.quantsim.placement import place
from pipeline.quantsim.sensitivity import count_needed_samples, estimate_sensitivity, find_layers
from pipeline.quantsim.sites import find_sites
from pipeline.quantsim.stored_constants import declare_types
from tests.pipeline.quantsim.pictures_of_qdq import mlp, model_of, rule

BLOCK = """block (float[1, 12, 32] x) => (float[1, 12, 32] y, float[1, 32] pooled) {
    n = LayerNormalization <axis = -1> (x, scale)
    q0 = MatMul(n, wq)
    q = Add(q0, bq)
    k = MatMul(n, wk)
    v = MatMul(n, wv)
    t = Transpose <perm = [0, 2, 1]> (k)
    s = MatMul(q, t)
    p = Softmax(s)
    a = MatMul(p, v)
    o = MatMul(a, wo)
    r = Add(x, o)
    u0 = MatMul(r, wu)
    u = Add(u0, bu)
    g = Gelu(u)
    d = MatMul(g, wd)
    y = Add(r, d)
    first = Gather <axis = 1> (y, zero)
    c = Gemm(first, wp)
    pooled = Tanh(c)
}"""


def block() -> DetachedModel:
    draw = np.random.default_rng(0)

    def weight(*shape: int, size: float = 0.2) -> np.ndarray:
        return (size * draw.standard_normal(shape)).astype(np.float32)

    return model_of(
        BLOCK,
        scale=np.ones(32, np.float32),
        wq=weight(32, 32, size=0.02),
        bq=weight(32),
        wk=weight(32, 32),
        wv=weight(32, 32, size=0.1),
        wo=weight(32, 32, size=0.4),
        wu=weight(32, 64),
        bu=weight(64),
        wd=weight(64, 32, size=0.6),
        wp=weight(32, 32),
        zero=np.array(0, np.int64),
    )


def samples(model: DetachedModel, count: int) -> list[dict[str, np.ndarray]]:
    (info,) = model.proto.graph.input
    shape = [dim.dim_value for dim in info.type.tensor_type.shape.dim]
    draw = np.random.default_rng(5)
    return [{info.name: draw.standard_normal(shape).astype(np.float32)} for _ in range(count)]


def encodings_of(model: DetachedModel, *rules: tuple[str, str | None, str | None]) -> dict[str, Encoding]:
    placement = place(model, [rule(*formats) for formats in rules])
    return encode(placement, calibrate(model, placement, samples(model, 8)), model)


def test_a_layer_is_a_product_with_its_bias() -> None:
    model = block()
    layers = find_layers(model, encodings_of(model, ("op:*", "int8/channel", "uint8")))
    assert [layer.output for layer in layers] == ["q", "k", "v", "s", "a", "o", "u", "d", "c"]  # r has no constant
    assert layers[0].tensors() == ("n", "wq", "q0", "bq", "q")


@pytest.mark.parametrize(
    "graph",
    [
        "g (float[2, 4] x) => (float[2, 4] y, float[2, 4] h) { h = MatMul(x, w) y = Add(h, b) }",
        "g (float[2, 4] x) => (float[2, 4] y, float[2, 4] z) { h = MatMul(x, w) y = Add(h, b) z = Relu(h) }",
    ],
)
def test_a_sum_is_no_bias_where_something_else_reads_the_product(graph: str) -> None:
    model = model_of(graph, w=np.eye(4, dtype=np.float32), b=np.ones(4, np.float32))
    layers = find_layers(model, encodings_of(model, ("op:*", "int8", "uint8")))
    assert [layer.output for layer in layers] == ["h"]


@pytest.mark.parametrize(
    ("samples", "layers", "needed"),
    [(512, 1000, 256), (512, 10, 103), (511, 25, 256), (512, 24, 246), (1, 1, 1), (8, 3, 1)],
)
def test_the_estimate_takes_half_of_the_samples_and_fewer_in_a_small_model(
    samples: int, layers: int, needed: int
) -> None:
    assert count_needed_samples(samples, layers) == needed


def test_the_estimate_has_the_order_of_a_run_for_each_layer() -> None:
    model = block()
    rules = [
        ("op:*", "int8/channel", "uint16"),
        ("tensor:w[qou]", "int4/channel", None),
        ("tensor:[sd]", None, "uint8"),
    ]
    encodings = encodings_of(model, *rules)
    data = samples(model, 8)
    measured = measure_each_alone(model, encodings, find_layers(model, encodings), data)
    estimated = estimate_sensitivity(model, encodings, data, directions=8)
    assert estimated.keys() == measured.keys()
    assert rank_correlation(list(estimated.values()), [measured[name] for name in estimated]) >= 0.95
    assert max(abs(estimated[name] - measured[name]) for name in measured) < 3.5  # and the numbers, in dB


def test_a_layer_in_float_is_no_layer_of_the_estimate() -> None:
    model = mlp()
    placement = place(model, [rule("tensor:second", "int8/channel")])
    encodings = encode(placement, {}, model)
    assert list(estimate_sensitivity(model, encodings, samples(model, 2))) == ["y"]
    assert estimate_sensitivity(model, {}, samples(model, 2)) == {}
    done: list[int] = []
    estimate_sensitivity(model, encodings, samples(model, 2), observer=done.append)
    assert done == [1, 2]


def test_a_layer_that_no_output_depends_on_moves_none() -> None:
    draw = np.random.default_rng(0)
    model = model_of(
        """two (float[2, 4] x) => (float[2, 3] y, int64[2, 1] best) {
            y = MatMul(x, first)
            h = MatMul(x, second)
            best = ArgMax <axis = -1> (h)
        }""",
        first=draw.standard_normal((4, 3)).astype(np.float32),
        second=draw.standard_normal((4, 3)).astype(np.float32),
    )
    found = estimate_sensitivity(model, encodings_of(model, ("op:*", "int8", "uint8")), samples(model, 2))
    assert (list(found), found["h"]) == (["y", "h"], np.inf)
    assert 20 < found["y"] < 60


def test_the_size_of_an_output_is_no_matter() -> None:
    """A sum of squares of 1e20 has no float32."""
    weight = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
    found = []
    for size in (1, 1e20):
        model = model_of("g (float[2, 4] x) => (float[2, 3] y) { y = MatMul(x, w) }", w=np.float32(size) * weight)
        found.append(
            estimate_sensitivity(model, encodings_of(model, ("op:*", "int8", "uint8")), samples(model, 2))["y"]
        )
    assert found[1] == pytest.approx(found[0], abs=0.1)


def test_a_sample_counts_by_the_size_of_its_outputs() -> None:
    """The first row of the weight is rounded to zeros, the others not at all; nothing comes of a sample of zeros."""
    weight = np.diag(np.array([0.01, 1, 1, 1], np.float32))
    model = model_of("g (float[1, 4] x) => (float[1, 4] y) { y = MatMul(x, w) }", w=weight)
    encodings = encodings_of(model, ("op:*", "int4", None))
    lost, exact = np.array([[1, 0, 0, 0]], np.float32), np.array([[0, 1000, 0, 0]], np.float32)

    def estimate(*samples: np.ndarray) -> float:
        return estimate_sensitivity(model, encodings, [{"x": sample} for sample in samples])["y"]

    assert estimate(lost) == pytest.approx(0)
    assert estimate(lost, exact) == pytest.approx(100)
    assert estimate(0 * lost) == np.inf


def test_a_cell_without_a_function_of_torch_is_a_layer_where_no_gradient_goes_through_it() -> None:
    draw = np.random.default_rng(0)
    model = model_of(
        """speech (float[5, 2, 6] x) => (float[2, 3] y) {
            h, last = LSTM <hidden_size = 4, clip = 1.0> (x, w, r, b)
            s = Squeeze(last, zero)
            y = MatMul(s, v)
        }""",
        w=draw.standard_normal((1, 16, 6)).astype(np.float32),
        r=draw.standard_normal((1, 16, 4)).astype(np.float32),
        b=draw.standard_normal((1, 32)).astype(np.float32),
        zero=np.array([0]),
        v=draw.standard_normal((4, 3)).astype(np.float32),
    )
    encodings = encodings_of(model, ("op:LSTM", "int4/channel", None), ("op:MatMul", "int8", "uint8"))
    data = samples(model, 8)
    measured = measure_each_alone(model, encodings, find_layers(model, encodings), data)
    found = estimate_sensitivity(model, encodings, data, directions=8)
    assert list(found) == ["h", "y"]
    assert [found[name] for name in found] == pytest.approx([measured[name] for name in found], abs=2)


def test_a_cell_that_leaves_out_its_sequence_is_known_by_a_state() -> None:
    """The two cells have no first output, and are two layers."""
    draw = np.random.default_rng(0)
    model = model_of(
        """both (float[5, 1, 6] x, float[1, 1, 4] start) => (float[1, 1, 3] y) {
            , h = LSTM <hidden_size = 4> (x, w, r, b, , start, start)
            , g = GRU <hidden_size = 4> (x, w3, r3)
            s = Add(h, g)
            y = MatMul(s, v)
        }""",
        w=draw.standard_normal((1, 16, 6)).astype(np.float32),
        r=draw.standard_normal((1, 16, 4)).astype(np.float32),
        b=draw.standard_normal((1, 32)).astype(np.float32),
        w3=draw.standard_normal((1, 12, 6)).astype(np.float32),
        r3=draw.standard_normal((1, 12, 4)).astype(np.float32),
        v=draw.standard_normal((4, 3)).astype(np.float32),
    )
    data = [
        {"x": draw.standard_normal((5, 1, 6)).astype("f4"), "start": draw.standard_normal((1, 1, 4)).astype("f4")}
        for _ in range(8)
    ]
    placement = place(model, [rule("op:*", "int8", "uint8"), rule("op:LSTM", "int4")])
    encodings = encode(placement, calibrate(model, placement, data), model)
    found = estimate_sensitivity(model, encodings, data, directions=8)
    assert list(found) == ["h", "g", "y"]
    assert found["h"] < found["g"]
    noise = measure_noise(model, encodings, ["h", "g"], data)
    assert noise["h"].local_db < noise["g"].local_db, "each has its own step"


@pytest.mark.parametrize("taken", [True, False])
def test_a_value_that_only_a_body_reads_reaches_the_outputs_through_the_branch_that_is_taken(taken: bool) -> None:
    """Without the If, what the layer does would be taken for nothing."""
    model = model_of(
        """g (float[2, 4] x, bool c) => (float[2, 4] y) {
            h = MatMul(x, w)
            y = If (c) <
                then_branch = t () => (float[2, 4] p) { p = Neg(h) },
                else_branch = e () => (float[2, 4] q) { q = Abs(h) }
            >
        }""",
        w=np.diag(np.linspace(0.3, 1, 4, dtype=np.float32)),
    )
    draw = np.random.default_rng(2)
    data = [{"x": draw.standard_normal((2, 4)).astype(np.float32), "c": np.array(taken)}]
    placement = place(model, [rule("op:*", "int4", "uint8")])
    encodings = encode(placement, calibrate(model, placement, data), model)
    measured = measure_each_alone(model, encodings, find_layers(model, encodings), data)
    assert estimate_sensitivity(model, encodings, data)["h"] == pytest.approx(measured["h"], abs=0.5)


def test_a_loop_has_no_gradient_and_is_named() -> None:
    model = model_of(
        """g (float[2, 4] x, int64 n, bool go) => (float[2, 4] y) {
            h = MatMul(x, w)
            y = Loop (n, go, h) <
                body = b (int64 i, bool before, float[2, 4] v) => (bool after, float[2, 4] u) {
                    after = Identity(before) u = Neg(v)
                }
            >
        }""",
        w=np.eye(4, dtype=np.float32),
    )
    data = [{"x": np.ones((2, 4), np.float32), "n": np.array(2), "go": np.array(True)}]
    placement = place(model, [rule("op:*", "int8", "uint8")])
    encodings = encode(placement, calibrate(model, placement, data), model)
    with pytest.raises(Unsupported, match="no gradient goes through 1 operator of the model: Loop"):
        estimate_sensitivity(model, encodings, data)


@pytest.mark.parametrize("op", ["Floor", "Ceil", "Round", "Sign"])
def test_an_operator_that_is_flat_is_named(op: str) -> None:
    """Its gradient is 0: the layer would seem to move no output."""
    model = model_of(
        f"g (float[2, 4] x) => (float[2, 4] y) {{ h = MatMul(x, w) y = {op}(h) }}", w=np.eye(4, dtype=np.float32)
    )
    with pytest.raises(Unsupported, match=f"no gradient goes through 1 operator of the model: {op}"):
        estimate_sensitivity(model, encodings_of(model, ("op:*", "int8", "uint8")), samples(model, 1))


def test_a_quantizer_of_the_model_lets_noise_through() -> None:
    model = model_of(
        """g (float[2, 4] x) => (float[2, 4] y) {
            h = MatMul(x, w)
            n = QuantizeLinear(h, scale, zero)
            d = DequantizeLinear(n, scale, zero)
            y = MatMul(d, v)
        }""",
        w=np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32),
        v=np.random.default_rng(1).standard_normal((4, 4)).astype(np.float32),
        scale=np.float32(0.01),
        zero=np.int8(0),
    )
    found = estimate_sensitivity(model, encodings_of(model, ("tensor:w", "int4", None)), samples(model, 4))
    assert 5 < found["h"] < 40


def test_a_constant_after_arithmetic_is_no_part_of_a_layer() -> None:
    draw = np.random.default_rng(0)
    model = model_of(
        """scaled (float[2, 4] x) => (float[2, 3] y) {
            w = Mul(stored, two)
            y = MatMul(x, w)
        }""",
        stored=draw.standard_normal((4, 3)).astype(np.float32),
        two=np.float32(2),
    )
    encodings = encodings_of(model, ("tensor:stored", "int4", "int4"), ("tensor:y", None, "uint16"))
    assert estimate_sensitivity(model, encodings, samples(model, 8))["y"] > 80  # by 4 bits it would be 23


@pytest.mark.parametrize(("opset", "said"), [(11, ", split = [2, 2, 2]"), (13, ""), (18, ", num_outputs = 3")])
def test_a_split_into_equal_parts_is_that_into_their_sizes(opset: int, said: str) -> None:
    """Up to opset 17 the number of its results alone says how many parts there are."""
    draw = np.random.default_rng(1)
    constants = {name: draw.standard_normal(size).astype(np.float32) for name, size in (("w", (4, 6)), ("v", (2, 4)))}
    text = """g (float[2, 4] x) => (float[2, 4] y) {{
        h = MatMul(x, w)
        q, k, v_ = Split <axis = 1{attributes}> (h{sizes})
        s = Mul(q, k)
        t = Sub(s, v_)
        y = MatMul(t, v)
    }}"""
    equal = model_of(text.format(attributes=said, sizes=""), opset, **constants)
    sized = model_of(
        text.format(attributes="", sizes=", sizes"), max(opset, 13), **constants, sizes=np.array([2, 2, 2])
    )
    found, wanted = (
        estimate_sensitivity(model, encodings_of(model, ("op:*", "int8", "uint8")), samples(model, 2))
        for model in (equal, sized)
    )
    assert list(found) == ["h", "y"]
    assert found == wanted


def test_slopes_are_those_of_differences() -> None:
    model = block()
    backward = Backward(model, {"u0": ()})
    feeds = samples(model, 1)[0]
    names = [*backward.reads]
    values = dict(zip(names, evaluate(_with_outputs(model, names), feeds), strict=True))
    forward = backward.forward({**feeds, **values})
    expected = evaluate(attach(model), feeds)
    for found, wanted in zip(forward.outputs().values(), expected, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5)
    directions = {name: np.ones_like(array) for name, array in forward.outputs().items()}
    slopes: dict[str, np.ndarray] = {}
    forward.visit_gradients(directions, lambda name, gradient, _: slopes.__setitem__(name, gradient))
    slope = slopes["u0"]
    step = np.zeros_like(values["u0"])
    step[0, 0, 3] = 1e-2
    moved = []
    for sign in (1, -1):
        outputs = backward.forward({**feeds, **values, "u0": values["u0"] + sign * step}).outputs()
        moved.append(sum(float(array.sum()) for array in outputs.values()))
    assert slope[0, 0, 3] == pytest.approx((moved[0] - moved[1]) / 2e-2, rel=1e-2, abs=1e-3)
    assert torch.is_grad_enabled()


def evaluate(proto: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    return [np.asarray(array) for array in ReferenceEvaluator(proto).run(None, feeds)]


def _with_outputs(model: DetachedModel, names: list[str]) -> onnx.ModelProto:
    proto = attach(model)
    del proto.graph.output[:]
    for name in names:
        proto.graph.output.add().name = name
    return proto


def test_an_operator_without_gradient_is_named() -> None:
    model = model_of(
        """greatest (float[2, 4] x) => (float[2, 4] y) {
            h = MatMul(x, w)
            y = Hardmax(h)
        }""",
        w=np.eye(4, dtype=np.float32),
    )
    with pytest.raises(Unsupported, match="no gradient goes through 1 operator of the model: Hardmax"):
        estimate_sensitivity(model, encodings_of(model, ("op:*", "int8", "uint8")), samples(model, 1))


def test_a_model_whose_outputs_are_whole_numbers_has_no_sensitivity() -> None:
    model = model_of(
        """classes (float[2, 4] x) => (int64[2, 1] y) {
            h = MatMul(x, w)
            y = ArgMax <axis = -1> (h)
        }""",
        w=np.eye(4, dtype=np.float32),
    )
    with pytest.raises(Unsupported, match="no output of floats depends on a layer that is quantized"):
        estimate_sensitivity(model, encodings_of(model, ("op:*", "int8", "uint8")), samples(model, 1))


CONTRIB = """<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>
g (float[2, 8] x) => (float[2, 8] y) {{ a = MatMul(x, u) {text} c = MatMul(g, v) d = Relu(c) y = MatMul(d, w) }}"""


@pytest.mark.parametrize(
    "text",
    [
        "g = com.microsoft.FastGelu(a)",
        "g = com.microsoft.BiasGelu(a, b)",
        "g = com.microsoft.QuickGelu <alpha = 1.7> (a)",
        "g = com.microsoft.SkipLayerNormalization(a, x, s)",
    ],
)
def test_values_after_an_operator_of_another_domain_have_types_and_are_sites(text: str) -> None:
    """ONNX's inference stops there; onnxruntime knows the types."""
    draw = np.random.default_rng(0)
    proto = onnx.parser.parse_model(CONTRIB.format(text=text))
    arrays = {name: draw.standard_normal((8, 8)).astype(np.float32) for name in "uvw"}
    arrays |= {"b": draw.standard_normal(8).astype(np.float32), "s": np.ones(8, np.float32)}
    proto.graph.initializer.extend(
        onnx.numpy_helper.from_array(array, name)
        for name, array in arrays.items()
        if name in "uvw" or f" {name})" in text
    )
    model = declare_types(detach(proto))
    assert {"a", "g", "c", "d", "y"} <= {site.tensor for site in find_sites(model)}
    encodings = encodings_of(model, ("op:MatMul", "int8", "uint8"))
    found = estimate_sensitivity(model, encodings, samples(model, 4))
    assert list(found) == ["a", "c", "y"]
    assert all(10 < ratio < 80 for ratio in found.values())


def test_a_model_whose_types_are_known_stays_as_it_is() -> None:
    model = block()
    assert declare_types(model) is model


def test_a_branch_that_is_dropped_where_it_is_infinite_lets_the_noise_of_the_other_through() -> None:
    head = "g (float[3, 4] x, bool[3, 4] c) => (float[3, 4] y)"
    branch = "log = Log(a) rest = Sub(x, x) off = Mul(log, rest) z = Where(c, a, off)"
    draw = np.random.default_rng(0)
    w, v = draw.standard_normal((2, 4, 4)).astype(np.float32)
    x = draw.standard_normal((3, 4)).astype(np.float32)
    x[1] = 0.0
    samples = [{"x": x, "c": np.ones((3, 4), np.bool_)}]
    found = []
    for text in (branch, "z = Where(c, a, x)"):
        model = model_of(f"{head} {{ a = MatMul(x, w) {text} y = MatMul(z, v) }}", w=w, v=v)
        placement = place(model, [rule("op:MatMul", weights="int8")])
        encodings = encode(placement, calibrate(model, placement, samples), model)
        found.append(estimate_sensitivity(model, encodings, samples))
    assert found[0] == found[1] and all(np.isfinite([*found[0].values()]))
