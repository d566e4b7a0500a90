"""The quantized model: which nodes it has, and that onnxruntime computes of it what ONNX's reference evaluator does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx.reference import ReferenceEvaluator

import onnxline
from passes.encodings.aimet import from_aimet, to_aimet
from passes.encodings.encoding import Encoding, Precision, fit_encodings
from passes.encodings.from_qdq import read_qdq
from passes.structures import structure_of
from passes.weights.detached import DetachedModel, attach, detach
from passes.weights.sessions import Session
from pipeline.config import KEYS, OptionNames, QuantSimConfig
from pipeline.errors import UsageError
from pipeline.quantsim.calibration import calibrate
from pipeline.quantsim.encodings import encode, round_trip
from pipeline.quantsim.int8 import OPTIONS
from pipeline.quantsim.placement import PlacementRule, place
from pipeline.quantsim.qdq import check_opset, insert_qdq
from pipeline.quantsim.quantizer import ModelQuantizer
from pipeline.quantsim.simulation import simulate_outputs
from tests.pipeline.quantsim.pictures_of_qdq import mlp, model_of, nodes_of, rule
from tests.support.onnx_models import biased_attention, detached

RANGES: dict[str, tuple[float, float]] = dict.fromkeys(("x", "h", "r", "y"), (-4.0, 4.0))


def quantize_mlp(*rules: PlacementRule) -> DetachedModel:
    model = mlp()
    return insert_qdq(model, encode(place(model, rules), RANGES, model))


def test_every_tensor_is_quantized_where_it_is_made() -> None:
    assert nodes_of(quantize_mlp(rule("op:*", "int8/channel", "uint8"))) == [
        "first_dequantized = DequantizeLinear <axis: int = 1> (first_quantized, first_scale, first_zero_point)",
        "bias_dequantized = DequantizeLinear <axis: int = 0> (bias_quantized, bias_scale, bias_zero_point)",
        "second_dequantized = DequantizeLinear <axis: int = 1> (second_quantized, second_scale, second_zero_point)",
        "x_quantized = QuantizeLinear (x, x_scale, x_zero_point)",
        "x_dequantized = DequantizeLinear (x_quantized, x_scale, x_zero_point)",
        "h = Gemm (x_dequantized, first_dequantized, bias_dequantized)",
        "h_quantized = QuantizeLinear (h, h_scale, h_zero_point)",
        "h_dequantized = DequantizeLinear (h_quantized, h_scale, h_zero_point)",
        "r = Relu (h_dequantized)",
        "r_quantized = QuantizeLinear (r, r_scale, r_zero_point)",
        "r_dequantized = DequantizeLinear (r_quantized, r_scale, r_zero_point)",
        "t = Reshape (r_dequantized, shape)",
        "t_quantized = QuantizeLinear (t, t_scale, t_zero_point)",
        "t_dequantized = DequantizeLinear (t_quantized, t_scale, t_zero_point)",
        "y_float = MatMul (t_dequantized, second_dequantized)",
        "y_quantized = QuantizeLinear (y_float, y_scale, y_zero_point)",
        "y = DequantizeLinear (y_quantized, y_scale, y_zero_point)",
    ]


@pytest.mark.parametrize(
    ("weights", "activations"), [("fp8e4m3/channel", "fp8e4m3"), ("fp8e5m2", "fp8e5m2"), ("fp8e4m3/block2", "uint8")]
)
def test_floats_of_8_bits_are_computed_as_the_reference_evaluator_does(weights: str, activations: str) -> None:
    quantized = quantize_mlp(rule("op:*", weights, activations))
    lines = nodes_of(quantized)
    assert "h = Gemm (x_dequantized, first_dequantized, bias)" in lines  # sums of floats have no whole bias
    x = np.random.default_rng(0).standard_normal((2, 4)).astype(np.float32)
    expected = ReferenceEvaluator(attach(quantized)).run(None, {"x": x})[0]
    np.testing.assert_array_equal(Session.of(quantized).run({"x": x})["y"], expected)


def test_floats_of_8_bits_need_opset_19() -> None:
    model = mlp()
    model.proto.opset_import[0].version = 18
    encodings = encode(place(model, [rule("op:*", "fp8e4m3", None)]), RANGES, model)
    words = "'first' is to have fp8e4m3, for which QuantizeLinear needs opset 19, and the model has 18; "
    with pytest.raises(UsageError, match=words + r"convert it by onnxline.convert_opset\(model, 19\)$"):
        insert_qdq(model, encodings)
    with pytest.raises(UsageError, match=words + "put {convert-opset: {to: 19}} into quantsim.prepare, or set export"):
        check_opset(model.proto, place(model, [rule("op:*", "fp8e4m3", None)]).formats(), KEYS)


def test_a_weight_that_is_transposed_is_stored_in_integers() -> None:
    model = model_of(
        "g (float[2, 4] x) => (float[2, 3] y) { t = Transpose(w) y = MatMul(x, t) }", w=np.ones((3, 4), np.float32)
    )
    placement = place(model, [rule("op:*", "int8/channel", None)])
    assert nodes_of(insert_qdq(model, encode(placement, {}, model))) == [
        "w_dequantized = DequantizeLinear <axis: int = 0> (w_quantized, w_scale, w_zero_point)",
        "t = Transpose (w_dequantized)",
        "y = MatMul (x, t)",
    ]


def test_fewer_bits_than_the_dtype_are_clipped_in_front() -> None:
    nodes = nodes_of(quantize_mlp(rule("op:Relu", None, "uint6")))
    assert nodes == [
        "h = Gemm (x, first, bias)",
        "r = Relu (h)",
        "r_clipped = Clip (r, r_lowest, r_highest)",
        "r_quantized = QuantizeLinear (r_clipped, r_scale, r_zero_point)",
        "r_dequantized = DequantizeLinear (r_quantized, r_scale, r_zero_point)",
        "t = Reshape (r_dequantized, shape)",
        "t_clipped = Clip (t, t_lowest, t_highest)",
        "t_quantized = QuantizeLinear (t_clipped, t_scale, t_zero_point)",
        "t_dequantized = DequantizeLinear (t_quantized, t_scale, t_zero_point)",
        "y = MatMul (t_dequantized, second)",
    ]


def test_blocks_are_stored_as_the_standard_has_them() -> None:
    model = quantize_mlp(rule("op:MatMul", "int4/block4"))
    assert nodes_of(model)[0] == (
        "second_dequantized = DequantizeLinear <axis: int = 0, block_size: int = 4> "
        "(second_quantized, second_scale, second_zero_point)"
    )
    shapes = {tensor.name: tuple(tensor.dims) for tensor in model.proto.graph.initializer}
    assert shapes["second_quantized"] == (8, 3)
    assert shapes["second_scale"] == (2, 3)


@pytest.mark.parametrize(("opset", "dtype"), [(21, "int4"), (25, "int2")])
@pytest.mark.parametrize("weights", ["int2/block8", "uint2/channel"])
def test_weights_of_2_bits_lie_in_onnxs_own_type_where_the_opset_has_it(weights: str, opset: int, dtype: str) -> None:
    draw = np.random.default_rng(0)
    weight = draw.normal(size=(32, 4)).astype(np.float32)
    model = model_of("g (float[2, 32] x) => (float[2, 4] y) { y = MatMul(x, w) }", opset, w=weight)
    encodings = encode(place(model, [rule("op:*", weights, "float")]), {}, model)
    quantized = insert_qdq(model, encodings)
    stored = quantized.array(quantized.index.initializers["w_quantized"])
    assert str(stored.dtype) == ("u" if weights.startswith("u") else "") + dtype
    feeds = {"x": draw.normal(size=(2, 32)).astype(np.float32)}
    expected = feeds["x"] @ round_trip(weight, encodings["w"], is_stored=True)
    (by_specification,) = ReferenceEvaluator(attach(quantized)).run(None, feeds)
    np.testing.assert_allclose(np.asarray(by_specification), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(Session.of(quantized).run(feeds)["y"], expected, rtol=1e-5, atol=1e-6)
    if opset == 25:  # below, a file does not say that only some of the 4 bits are used
        assert read_qdq(quantized)["w"].precision == encodings["w"].precision


def test_bodies_read_the_dequantized_values() -> None:
    model = model_of(
        """g (bool c, float[2] x) => (float[2] y) {
            r = Relu(x)
            y = If (c) <
                then_branch = yes () => (float[2] a) { a = Neg(r) },
                else_branch = no () => (float[2] b) { b = Identity(r) }
            >
        }"""
    )
    quantized = insert_qdq(
        model, encode(place(model, [rule("op:Relu", None, "uint8")]), {"r": (0.0, 2.0), "x": (0.0, 2.0)}, model)
    )
    assert "Neg (r_dequantized)" in nodes_of(quantized)[-1]
    assert "Identity (r_dequantized)" in nodes_of(quantized)[-1]


@settings(max_examples=25)
@given(
    st.sampled_from(["int8/channel", "int8", "int4/block4", "int6/channel", "float"]),
    st.sampled_from(["uint8", "int8", "uint16", "uint5", "float"]),
    st.integers(0, 100),
)
def test_onnxruntime_computes_what_the_reference_evaluator_does(weights: str, activations: str, seed: int) -> None:
    """All but the order of the sums in a product is given by the specification. A sum that lies at the edge between two
    numbers may be rounded to either, so the outputs may be a step apart, and are equal nearly everywhere."""
    quantized = quantize_mlp(rule("op:*", weights, activations))
    x = np.random.default_rng(seed).uniform(-4, 4, (2, 4)).astype(np.float32)
    [expected] = ReferenceEvaluator(attach(quantized)).run(None, {"x": x})
    found = Session.of(quantized).run({"x": x})["y"]
    step = 8 / 31 if activations == "uint5" else 8 / 255
    np.testing.assert_allclose(found, expected, rtol=0, atol=step * 1.01 if activations != "float" else 1e-5)
    if activations != "float":
        assert (found == expected).mean() > 0.5


@pytest.mark.parametrize(("names", "words"), [(KEYS, "quantsim.prepare, or set export"), (OPTIONS, "has 9; apply")])
def test_a_quantizer_says_by_what_its_caller_converts_the_opset(names: OptionNames, words: str) -> None:
    model = model_of("g (float[2, 4] x) => (float[2, 4] y) { y = MatMul(x, w) }", 9, w=np.eye(4, dtype=np.float32))
    quantizer = ModelQuantizer(model, QuantSimConfig(profile="ort-cpu"), lambda _: None, names=names)
    with pytest.raises(UsageError, match=words) as error:
        quantizer.begin()
    assert "onnxline.convert_opset(model" not in str(error.value)


def test_scales_along_an_axis_that_their_file_does_not_say_are_refused() -> None:
    """AIMET's files up to 1.0.0 say none; `fit_encodings` takes that of the weight."""
    model = model_of("g (float[2, 4] x) => (float[2, 4] y) { y = MatMul(x, w) }", w=np.eye(4, dtype=np.float32))
    scale, precision = np.ones(4, np.float32), Precision(8, signed=True, symmetric=True, granularity="channel")
    own = Encoding(precision, scale, np.zeros(4, np.int64), axis=1)
    read = from_aimet(to_aimet({"w": own}, {"w"}, "1.0.0"))
    with pytest.raises(UsageError, match=r"'w' has scales along an axis that its file does not say; give insert_qdq"):
        insert_qdq(model, read)
    assert read_qdq(insert_qdq(model, fit_encodings(read, model)))["w"].axis == 1


def test_a_format_that_the_opset_has_not_is_refused() -> None:
    model = mlp()
    model.proto.opset_import[0].version = 20
    encodings = encode(place(model, [rule("op:*", "int8", "uint16")]), RANGES, model)
    with pytest.raises(UsageError, match=r"'x' is to have 16 bits, for which QuantizeLinear needs opset 21, .* has 20"):
        insert_qdq(model, encodings)


@pytest.mark.parametrize(
    "text",
    [
        "g (float[2] x) => (float[2] x_scale) { x_scale = Neg(x) }",
        "g (float[2] x, float[2] x_scale) => (float[2] y) { y = Add(x, x_scale) }",
    ],
)
def test_new_values_have_names_that_are_free(text: str) -> None:
    model = model_of(text)
    encodings = encode(place(model, [rule("tensor:x", None, "uint8")]), RANGES, model)
    quantized = insert_qdq(model, encodings).proto
    onnx.checker.check_model(quantized, full_check=True)
    assert [tensor.name for tensor in quantized.graph.initializer] == ["x_2_scale", "x_2_zero_point"]


@pytest.mark.parametrize("title", ["x_QuantizeLinear", "x_DequantizeLinear"])
def test_new_nodes_have_names_that_are_free(title: str) -> None:
    model = model_of("g (float[2, 4] x) => (float[2, 4] y) { y = Relu(x) }")
    model.proto.graph.node[0].name = title
    quantized = attach(insert_qdq(model, encode(place(model, [rule("op:*", None, "uint8")]), RANGES, model)))
    assert len({node.name for node in quantized.graph.node}) == len(quantized.graph.node) == 5
    Session.of(detach(quantized))  # onnxruntime refuses two nodes of one name


def test_what_the_model_quantizes_itself_is_left_as_it_is() -> None:
    """A second simulation of what the first one wrote: no value is rounded twice."""
    model = mlp()
    names = {name for node in model.proto.graph.node for name in (*node.input, *node.output)}
    ranges = dict.fromkeys(names, (-4.0, 4.0))
    quantized = insert_qdq(model, encode(place(model, [rule("op:*", "int8", "uint8")]), ranges, model))
    again = place(quantized, [rule("op:*", "int8", "uint8")])
    assert not again.quantized_sites()
    assert {placed.site.stored_as for placed in again.sites} <= {"int8", "int32", "uint8"}


@pytest.mark.parametrize("activations", ["uint8", "uint6"])
def test_structures_are_found_in_the_quantized_model(activations: str) -> None:
    """Of 6 bits there is a Clip in front of each pair. Six products are places, and 19 tensors that none reads."""
    source = biased_attention()
    model = detached(source)
    ranges = {name: (-4.0, 4.0) for node in source.graph.node for name in (*node.input, *node.output)}
    quantized = insert_qdq(model, encode(place(model, [rule("op:*", "int8/channel", activations)]), ranges, model))
    for kind, count in {"qkv": 1, "attention": 1, "qdq": 6 + 19}.items():
        structure = structure_of(kind)
        assert structure is not None
        instances = structure.find(quantized).instances
        assert len(instances) == count
        assert structure.find_lost(instances, quantized) == {}


@pytest.mark.parametrize("text", ["uint2", "int3", "uint4", "uint6", "fp8e4m3"])
def test_onnxruntime_runs_a_clip_in_front_of_every_format(text: str, tmp_path: Path) -> None:
    """The model's own, and the one that keeps values within the numbers of a format."""
    model = model_of(
        "g (float[2, 4] x) => (float[2, 4] y) { h = Clip(x, low, high) y = Neg(h) }",
        low=np.array(0, np.float32),
        high=np.array(2, np.float32),
    )
    placement = place(model, [rule("op:*", None, text)])
    data = [{"x": np.linspace(-3, 3, 8, dtype=np.float32).reshape(2, 4)}]
    quantized = insert_qdq(model, encode(placement, calibrate(model, placement, data), model))
    outputs, device = simulate_outputs(model, quantized, data, tmp_path)
    assert device.outputs["y"].sqnr_db == pytest.approx(outputs["y"].sqnr_db)


@pytest.mark.parametrize(("weight", "is_kept"), [("first", False), ("shape", True)])
def test_a_training_info_is_kept_while_its_weights_are_there(weight: str, is_kept: bool) -> None:
    model = attach(mlp())
    model.training_info.add().update_binding.add(key=weight, value="new")
    result = onnxline.to_int8(model, samples=4)
    assert bool(result.to_proto().training_info) is is_kept
    assert any("training_info is not in the result" in note for note in result.notes) is not is_kept


@pytest.mark.parametrize(
    ("largest", "words"),
    [(1.5e38, "y has a value on a sample that is far above all others"), (3e38, "y is infinite or NaN on a sample")],
)
def test_a_ratio_that_says_nothing_is_named(largest: float, words: str) -> None:
    model = attach(model_of("g (float[8] x) => (float[8] y, float[8] z) { y = Add(x, x) z = Sigmoid(x) }"))
    drawn = np.linspace(-1, 1, 8, dtype=np.float32)
    feeds = [{"x": drawn}, {"x": np.append(drawn[:7], np.float32(largest))}]
    keep = ["tensor:y"] if largest > 2e38 else []
    notes = onnxline.to_int8(model, feeds=feeds, keep=keep).notes
    assert [note for note in notes if note.startswith(words)], notes
    assert not [note for note in onnxline.to_int8(model, feeds=feeds[:1]).notes if note.startswith("y ")]
