"""Encodings before a recipe and after it, and the same simulation by both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from passes import optimize
from passes.catalog.listing import example_of, read_example
from passes.encodings.carry import CarriedEncodings
from passes.encodings.encoding import Encoding, Precision, share_by_moves
from passes.errors import UsageError
from passes.optimize import draw_feeds
from passes.weights.detached import DetachedModel
from passes.weights.sessions import Session
from pipeline.config.quantsim import parse_precision
from pipeline.quantsim.calibration import calibrate
from pipeline.quantsim.encodings import encode, quantize
from pipeline.quantsim.placement import PlacementRule, place
from pipeline.quantsim.qdq import insert_qdq
from tests.support.onnx_models import attention, biased_attention, detached, matrix, merged_attention, model_of, vector


def at_opset_21(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same with an opset whose QuantizeLinear takes 16 bits."""
    model.opset_import[0].version, model.ir_version = 21, 10
    return model


@pytest.mark.parametrize(("known", "shared"), [("x", "xyz"), ("z", "xyz"), ("s", "s")])
def test_layout_operators_of_onnx_share_one_scale_both_ways(known: str, shared: str) -> None:
    graph = onnx.parser.parse_graph(
        "g (float[2, 3] x) => (float[3, 2] z, float[6] s) { y = Transpose (x) z = Identity (y) s = own.Flatten (z) }"
    )
    encoding = Encoding(Precision(8, signed=True, symmetric=True), np.array(0.1, np.float32), np.array(0))
    assert share_by_moves(graph, {known: encoding}).keys() == set(shared)


def encode_model(model: onnx.ModelProto, weights: str = "int8/channel") -> dict[str, Encoding]:
    """Encodings for all tensors, calibrated on drawn inputs."""
    source = detached(model)
    placement = place(source, [PlacementRule("op:*", parse_precision(weights), parse_precision("uint16"))])
    feeds = [draw_feeds(source, seed) for seed in range(3)]
    return encode(placement, calibrate(source, placement, feeds), source)


def carry(
    model: onnx.ModelProto, recipe: Sequence[str], encodings: Mapping[str, Encoding], keep: Sequence[str] = ()
) -> tuple[DetachedModel, CarriedEncodings]:
    run = optimize(model, recipe, keep=keep, encodings=encodings)
    assert run.encodings is not None
    assert any(row.changed for row in run.rows), "the recipe does something"
    return run.model, run.encodings


def simulate(model: DetachedModel, encodings: Mapping[str, Encoding]) -> np.ndarray:
    """The output of the quantized model, by onnxruntime with optimizations off."""
    session = Session.of(insert_qdq(model, encodings))
    return session.run(draw_feeds(model, 7))[session.outputs[0]]


def sqnr_db(expected: np.ndarray, found: np.ndarray) -> float:
    return float(10 * np.log10(np.square(expected).sum() / np.square(found - expected).sum()))


@pytest.mark.parametrize("weights", ["int8/channel", "int4/block16", "int8"])
def test_a_split_weight_has_its_own_scales_and_the_simulation_stays_bit_for_bit(weights: str) -> None:
    model = at_opset_21(merged_attention())
    before = encode_model(model, weights)
    final, carried = carry(model, ["split-qkv"], before)
    assert carried.sources == {"w.q": ("w",), "w.k": ("w",), "w.v": ("w",)}
    assert [(lost.tensor, lost.kind, lost.by) for lost in carried.lost] == [("qkv", "gone", "split-qkv")]
    assert carried.uncovered == ()
    if weights == "int8/channel":
        parts = [carried.encodings[f"w.{part}"].scale for part in "qkv"]
        np.testing.assert_array_equal(np.concatenate(parts), before["w"].scale)
    np.testing.assert_array_equal(simulate(final, carried.encodings), simulate(detached(model), before))


def test_merged_weights_have_the_scales_of_their_parts() -> None:
    model = at_opset_21(attention())
    before = encode_model(model)
    final, carried = carry(model, ["fuse_qkv", "fold_constants"], before)
    assert carried.sources["wq_merged"] == ("wq", "wk", "wv")
    (open_tensor,) = carried.uncovered
    assert (open_tensor.by, open_tensor.is_due) == (
        "fuse_qkv",
        False,
    )  # the source has no such tensor
    np.testing.assert_array_equal(simulate(final, carried.encodings), simulate(detached(model), before))


def test_fused_products_are_gone_with_the_pass_that_removed_them() -> None:
    model = at_opset_21(biased_attention())
    before = encode_model(model)
    final, carried = carry(model, ["onnxsim"], before, keep=["qkv"])
    assert {(lost.tensor, lost.kind, lost.by) for lost in carried.lost} == {
        (name, "gone", "onnxsim") for name in ("q0", "k0", "v0")
    }
    assert all("MatMul is part of Gemm" in lost.reason for lost in carried.lost)
    assert carried.uncovered == ()
    whole = Session.of(final)
    floats = whole.run(draw_feeds(final, 7))[whole.outputs[0]]
    levels = [sqnr_db(floats, simulate(*pair)) for pair in ((detached(model), before), (final, carried.encodings))]
    assert levels[1] == pytest.approx(levels[0], abs=0.5)  # three tensors fewer are rounded


NORMALIZED = """
g (float[1, 3, 6, 6] x) => (float[1, 4, 4, 4] y) {
    c = Conv (x, kernel)
    n = BatchNormalization (c, gain, shift, mean, variance)
    y = Relu (n)
}
"""


@pytest.mark.parametrize("step", ["fuse_bn_into_conv", "fold-batchnorm"])
def test_a_folded_batchnorm_goes_into_the_scales_of_the_weight(step: str) -> None:
    model, kernel = normalized(gain=[1.5, -0.5, 0.25, 3.0])
    before = encode_model(model)
    final, carried = carry(model, [step, "fold_constants"], before)
    conv = next(node for node in final.proto.graph.node if node.op_type == "Conv")
    name = conv.input[1]
    assert carried.sources.get(name, (name,)) == ("kernel",)
    tensor = next(one for one in final.proto.graph.initializer if one.name == name)
    found, folded = carried.encodings[name], final.array(tensor)
    signs = np.array([1, -1, 1, 1])[:, None, None, None]
    np.testing.assert_array_equal(quantize(folded, found), signs * quantize(kernel, before["kernel"]))
    assert {"x", "y"} <= carried.encodings.keys()
    result = carried.encodings.get("n") or next(
        carried.encodings[name] for name, sources in carried.sources.items() if "n" in sources
    )
    np.testing.assert_array_equal(result.scale, before["n"].scale)
    lost = {one.tensor: one for one in carried.lost}
    assert "kernel" not in lost
    assert lost["c"].kind in ("gone", "stale")
    assert lost["c"].by == step
    assert carried.encodings[conv.input[2]].scale == pytest.approx(before["x"].scale * found.scale)


def test_one_scale_for_all_channels_cannot_follow_a_folded_batchnorm() -> None:
    model, _ = normalized(gain=[1.5, -0.5, 0.25, 3.0])
    before = encode_model(model, weights="int8")
    _, carried = carry(model, ["fuse_bn_into_conv", "fold_constants"], before)
    lost = {one.tensor: one for one in carried.lost}
    assert (lost["kernel"].kind, lost["kernel"].by) == ("stale", "fold_constants")  # which multiplies it
    assert "each slice along axis 0 is multiplied by a factor of its own" in lost["kernel"].reason
    assert not any("kernel" in sources for sources in carried.sources.values())


def normalized(gain: Sequence[float]) -> tuple[onnx.ModelProto, np.ndarray]:
    """The model, and its kernel."""
    kernel = np.random.default_rng(0).standard_normal((4, 3, 3, 3)).astype(np.float32)
    norms = {"shift": vector(4, 2), "mean": vector(4, 3), "variance": np.abs(vector(4, 4)) + 0.5}
    model = model_of(NORMALIZED, kernel=kernel, gain=np.array(gain, np.float32), **norms)
    return at_opset_21(model), kernel


TURNED = """
g (float[2, 8] x) => (float[2, 6] y) {
    t = Transpose <perm = [1, 0]> (w)
    p = MatMul (x, t)
    y = Add (p, b)
}
"""


def test_the_axis_of_channels_follows_a_transpose() -> None:
    model = at_opset_21(model_of(TURNED, w=matrix(6, 8, 0), b=vector(6, 1)))
    precision = parse_precision("int8/channel")
    assert precision is not None
    scale = np.arange(1, 7, dtype=np.float32) / 100
    before = {"w": Encoding(precision, scale, np.zeros(6, np.int64), 0)}
    final, carried = carry(model, ["fold_constants"], before)
    (name,) = carried.encodings
    tensor = next(one for one in final.proto.graph.initializer if one.name == name)
    assert list(tensor.dims) == [8, 6]
    assert carried.encodings[name].axis == 1
    np.testing.assert_array_equal(carried.encodings[name].scale, scale)


def test_weights_of_a_source_that_a_run_has_made_are_found_by_their_own_names() -> None:
    """The metadata of such a source names the weights of the model before it."""
    run = optimize(at_opset_21(model_of(TURNED, w=matrix(6, 8, 0), b=vector(6, 1))), ["fold_constants"])
    source = run.to_proto()
    _, carried = carry(source, ["linear-to-conv"], encode_model(source))
    assert not carried.uncovered


def test_a_sum_with_a_short_bias_keeps_its_encoding_as_a_gemm() -> None:
    """A vector of 8 elements identifies no node, so the Gemm is matched with the product alone."""
    text = """g (float[1, 6, 8] x) => (float[1, 2, 4, 6] y) {
        product = MatMul (x, w) biased = Add (product, bias) split = Reshape (biased, heads)
        keys = Transpose <perm = [0, 2, 1, 3]> (split) joined = Reshape (keys, flat) curved = Tanh (joined)
        turned = Transpose <perm = [0, 2, 1]> (curved) y = Reshape (turned, back)
    }"""
    sizes = {"heads": np.array([1, 6, 2, 4]), "flat": np.array([2, 6, 4]), "back": np.array([1, 2, 4, 6])}
    model = at_opset_21(model_of(text, w=matrix(8, 8, 0), bias=vector(8, 1), **sizes))
    final, carried = carry(model, ["merge-layout"], encode_model(model))
    (gemm,) = (node for node in final.proto.graph.node if node.op_type == "Gemm")
    assert carried.sources[gemm.output[0]] == ("biased",)
    assert not carried.uncovered


def test_a_proof_by_structure_takes_nothing_on_trust() -> None:
    model = at_opset_21(biased_attention())
    before = encode_model(model)
    run = optimize(model, ["onnxsim"], keep=["qkv"], proof="structure", encodings=before)
    assert run.encodings is not None
    kinds = {lost.tensor: lost.kind for lost in run.encodings.lost}
    assert kinds["q"] == "unproven"
    assert {"x", "h", "wo"} <= run.encodings.encodings.keys()


def test_names_that_match_nothing_are_refused_with_the_nearest() -> None:
    model = at_opset_21(merged_attention())
    before = encode_model(model)
    with pytest.raises(UsageError, match=r"1 of 1 are for tensors .* 'qkw'; did you mean 'qkv'"):
        optimize(model, ["split-qkv"], encodings={"qkw": before["qkv"]})


def test_what_is_gone_names_the_step_and_what_stands_for_it() -> None:
    text = "g (float[2, 8] x) => (float[2, 8] y) { a = Identity (x) y = Neg (a) b = Abs (w) dead = MatMul (x, b) }"
    model = at_opset_21(model_of(text, w=matrix(8, 8, 0)))
    recipe = ["eliminate_identity", "eliminate_deadend", "eliminate_unused_initializer"]
    _, carried = carry(model, recipe, encode_model(model))
    lost = {lost.tensor: (lost.kind, lost.by, lost.reason) for lost in carried.lost}
    assert lost == {
        "a": ("gone", "", "'x' has the same values, and stands for both"),
        "w": ("gone", "eliminate_unused_initializer", "nothing reads it any more"),
        "b": ("gone", "eliminate_deadend", "its Abs is gone"),
        "dead": ("gone", "eliminate_deadend", "its MatMul is gone"),
    }


@pytest.mark.parametrize(
    ("step", "uncovered", "least_db"),
    [
        ("drop-softmax-guard", [], None),
        ("merge-layout", [], 80),  # the sum before the bias has no rounding of its own any more
        ("mha-to-sha", [], None),
        ("to-4d", [], None),
        ("to-nhwc", [], None),
        ("linear-to-conv", [], 80),  # neither has it here
        ("canonical-norm", [], 80),
        ("canonical-gelu", [], 80),
        ("canonical-rope", ["sine_folded"], 80),  # one scale does not follow the sign of a half
        ("fold-scale", ["a/scale", "a_2"], None),  # the one factor and its product are new values
        ("canonical-attention", ["scores/matmul", "scores/scale", "masked/bias", "masked/add"], 60),
    ],
)
def test_canonical_forms_and_those_of_accelerators_carry_encodings(
    step: str, uncovered: list[str], least_db: float | None
) -> None:
    """On the picture of each step. What is only moved computes the same bits in the simulation."""
    file = example_of(step)
    assert file is not None
    model = at_opset_21(read_example(file).model)
    for tensor in model.graph.initializer:
        array = numpy_helper.to_array(tensor)
        if array.dtype == np.float32:  # a mask of infinities has no scale
            tensor.CopyFrom(numpy_helper.from_array(np.maximum(array, np.float32(-50)), tensor.name))
    before = encode_model(model)
    final, carried = carry(model, [step], before)
    assert [tensor.tensor for tensor in carried.uncovered] == uncovered
    expected, found = simulate(detached(model), before), simulate(final, carried.encodings)
    if least_db is None:
        np.testing.assert_array_equal(found, expected)
    else:
        assert sqnr_db(expected, found) > least_db
