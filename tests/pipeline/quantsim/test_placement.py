"""Rules → the format of each tensor, what a rule matched, and why a tensor stays in float."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from passes.context import PassContext
from passes.rewrites.untie import Untie
from passes.weights.detached import DetachedModel
from pipeline.errors import UsageError
from pipeline.quantsim.encodings import encode
from pipeline.quantsim.hidden_values import describe_opaque_operators
from pipeline.quantsim.placement import place
from pipeline.quantsim.stored_constants import store_constants
from tests.pipeline.quantsim.pictures_of_qdq import mlp, model_of, nodes_of, picture, rule
from tests.support.onnx_models import detached


def test_a_rule_for_all() -> None:
    placement = place(mlp(), [rule("op:*", "int8/channel", "uint16")])
    assert picture(placement) == [
        "input x: uint16",
        "weight first: int8/channel",
        "bias bias: int32",
        "activation h: uint16",
        "activation r: uint16",
        "activation t: uint16",
        "weight second: int8/channel",
        "activation y: uint16",
    ]
    [matches] = placement.rules
    assert (matches.weights, matches.activations, matches.in_force) == (2, 6, 8)


def test_a_later_rule_counts_before_an_earlier_one() -> None:
    rules = [rule("op:*", "int8/channel", "uint8"), rule("op:MatMul", "int4/block4"), rule("tensor:y", None, "float")]
    placement = place(mlp(), rules)
    assert "weight second: int4/block4" in picture(placement)
    assert "activation y: the rule 'tensor:y' says float" in picture(placement)
    assert [matches.in_force for matches in placement.rules] == [6, 1, 1]


def test_tensors_that_share_numbers_share_a_format() -> None:
    placement = place(mlp(), [rule("op:*", "int8", "uint8"), rule("op:Reshape", None, "uint16")])
    assert {"activation r: uint16", "activation t: uint16"} <= set(picture(placement))
    groups = {placed.site.tensor: placed.site.group for placed in placement.sites}
    assert groups["t"] == groups["r"] == "r"


def test_a_bias_needs_both_factors() -> None:
    placement = place(mlp(), [rule("op:*", None, "uint8")])
    assert "bias bias: x and first are not both quantized" in picture(placement)
    placement = place(mlp(), [rule("op:*", "int4/block2", "uint8")])
    assert "bias bias: the weight first has a scale for each block" in picture(placement)


@pytest.mark.parametrize(
    ("selector", "message"),
    [
        ("op:Convv", "'op:Convv' matches no tensor; the model has Gemm, MatMul, Relu, Reshape"),
        ("qkv", "the model has no qkv"),
        ("qvk", "found 'qvk', expected a structure .*; did you mean 'qkv'"),
        ("layer:1", "found 'layer:1', expected op:GLOB, module:GLOB, node:GLOB, tensor:GLOB or a structure"),
        ("tensor:secnd", "matches no tensor; .*did you mean 'second'"),
    ],
)
def test_a_rule_that_matches_nothing_is_refused(selector: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        place(mlp(), [rule(selector, "int8", "uint8")])


def test_a_rule_without_a_format_for_what_it_matches_is_refused() -> None:
    with pytest.raises(UsageError, match="'op:Relu' matches 1 tensors, and none of them is among the weights"):
        place(mlp(), [rule("op:Relu", "int8")])


def test_weights_of_recurrent_cells_have_one_scale() -> None:
    draw = np.random.default_rng(0)
    model = model_of(
        """g (float[5, 1, 3] x) => (float[5, 1, 1, 2] y) {
            y = LSTM <hidden_size = 2> (x, w, r)
        }""",
        w=draw.standard_normal((1, 8, 3)).astype(np.float32),
        r=draw.standard_normal((1, 8, 2)).astype(np.float32),
    )
    placement = place(model, [rule("op:*", "int8/channel", "uint8")])
    assert "weight w: int8" in picture(placement)


LAYOUTS = {
    "t = Transpose <perm = [1, 0]> (w)": ((3, 4), 0, 1),
    "i = Identity(w) t = Transpose(i)": ((3, 4), 0, 1),
    "t = Reshape(w, upright)": ((1, 4, 3), 2, 1),
    "r = Reshape(w, flat) t = Transpose(r)": ((1, 3, 4), 1, 2),
}
"""What makes a weight [4, 3] of `w` → the shape of `w`, its axis of channels, and that of the sums."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_weight_in_another_layout_is_a_weight_where_it_is_stored(layout: str) -> None:
    shape, channels, summed = LAYOUTS[layout]
    weight = np.arange(12, dtype=np.float32).reshape(shape)
    model = model_of(
        f"g (float[2, 4] x) => (float[2, 3] y) {{ {layout} y = MatMul(x, t) }}",
        w=weight,
        upright=np.array([4, 3]),
        flat=np.array([3, 4]),
    )
    placement = place(model, [rule("op:MatMul", "int8/channel", "uint16")])
    assert picture(placement) == ["input x: uint16", "weight w: int8/channel", "activation y: uint16"]
    site = next(placed.site for placed in placement.sites if placed.site.tensor == "w")
    assert (site.channel_axis, site.summed_axis, site.op) == (channels, summed, "MatMul")
    encodings = encode(placement, {"x": (0.0, 1.0), "y": (0.0, 1.0)}, model)
    scales = encodings["w"].scale
    by_channel = np.moveaxis(weight, channels, 0).reshape(3, -1)
    np.testing.assert_allclose(scales, by_channel.max(1) / 127, rtol=1e-6)


def test_the_bias_of_a_weight_in_another_layout_has_the_scale_of_the_products() -> None:
    model = model_of(
        """g (float[2, 4] x) => (float[2, 3] y) {
            t = Transpose(w)
            y = Gemm(x, t, b)
        }""",
        w=np.arange(1, 13, dtype=np.float32).reshape(3, 4),
        b=np.ones(3, np.float32),
    )
    placement = place(model, [rule("op:*", "int8/channel", "uint16")])
    assert picture(placement) == ["input x: uint16", "weight w: int8/channel", "bias b: int32", "activation y: uint16"]
    encodings = encode(placement, {"x": (0.0, 1.0), "y": (0.0, 1.0)}, model)
    np.testing.assert_allclose(encodings["b"].scale, encodings["x"].scale * encodings["w"].scale, rtol=1e-6)


def test_activations_with_one_scale_for_each_channel_are_named_once_for_a_rule() -> None:
    rules = [rule("op:*", "int8/channel", "uint8/channel"), rule("tensor:y", None, "int8/block2")]
    placement = place(mlp(), rules)
    assert {"activation h: uint8", "activation y: int8", "weight first: int8/channel"} <= set(picture(placement))
    assert list(placement.notes()) == [
        "the rule 'op:*' says uint8/channel of 4 activations: each has one scale, as only weights have more",
        "the rule 'tensor:y' says int8/block2 of 1 activation: each has one scale, as only weights have more",
    ]


TIED = "a = Gemm(x, w) y = Gemm <transB = {}> (a, w)"


@pytest.mark.parametrize("text", ["int8/channel", "int4/block2"])
def test_a_weight_whose_readers_have_other_channels_has_one_scale(text: str, context: PassContext) -> None:
    graph = f"g (float[2, 4] x) => (float[2, 4] y) {{{{ {TIED} }}}}"
    square = np.arange(16, dtype=np.float32).reshape(4, 4)
    rules = [rule("op:*", text, "uint16")]
    alike = place(model_of(graph.format(0), w=square), rules)
    assert (f"weight w: {text}" in picture(alike), list(alike.notes())) == (True, [])
    other = place(model_of(graph.format(1), w=square), rules)
    assert f"weight w: {text.partition('/')[0]}" in picture(other)
    assert list(other.notes()) == [
        "w has one scale: a and y have their channels along different axes of it; put untie into quantsim.prepare for "
        "a copy for each module, or {untie: {each_node: true}} for each node"
    ]
    assert list(place(model_of(graph.format(1), w=square), [rule("op:*", "int8", "uint16")]).notes()) == []
    untied = place(Untie(each_node=True).apply(model_of(graph.format(1), w=square), context).model, rules)
    assert {f"weight w: {text}", f"weight w_2: {text}"} <= set(picture(untied))
    assert list(untied.notes()) == []


@pytest.mark.parametrize(
    ("nodes", "placed"),
    [
        ("a = Gemm(x, w, b) r = Reshape(x, sizes) y = Gemm(r, w, b)", "int32"),  # the same scales
        ("a = Gemm(x, w, b) y = Gemm(x, v, b)", "the products of a and y"),
        ("a = Gemm(x, w, b) y = Gemm(a, w, b)", "the products of a and y"),
    ],
)
def test_a_bias_of_products_with_other_scales_stays_in_float(nodes: str, placed: str) -> None:
    weights = {name: np.arange(1, 17, dtype=np.float32).reshape(4, 4) for name in "wv"}
    model = model_of(
        f"g (float[2, 4] x) => (float[2, 4] y) {{ {nodes} }}",
        **weights,
        b=np.ones(4, np.float32),
        sizes=np.array([2, 4]),
    )
    if placed != "int32":
        placed += " that it is added to have scales of their own; "
        placed += (
            "put untie into quantsim.prepare for a copy for each module, or {untie: {each_node: true}} for each node"
        )
    assert f"bias b: {placed}" in picture(place(model, [rule("op:*", "int8/channel", "uint16")]))


def test_a_weight_in_a_constant_node_is_a_weight() -> None:
    model = model_of(
        """g (float[2, 2] x) => (float[2, 2] y, float[2] z) {
            w = Constant <value = float[2, 2] {1, 2, 3, 4}> ()
            z = Constant <value = float[2] {1, 2}> ()
            t = Transpose(w)
            y = MatMul(x, t)
        }"""
    )
    stored = store_constants(model)
    assert nodes_of(stored) == [
        "z = Constant <value: tensor = float[2] {1,2}> ()",
        "t = Transpose (w)",
        "y = MatMul (x, t)",
    ]
    assert picture(place(stored, [rule("op:MatMul", "int8/channel", "uint16")]))[:2] == [
        "input x: uint16",
        "activation z: no rule says anything of activations of Constant",
    ]
    assert "weight w: int8/channel" in picture(place(stored, [rule("op:MatMul", "int8/channel", "uint16")]))


def test_a_constant_in_another_layout_that_no_product_reads_is_no_weight() -> None:
    model = model_of(
        """g (float[2, 4] x) => (float[2, 4] y) {
            t = Reshape(c, places)
            y = Add(x, t)
        }""",
        c=np.ones((1, 4), np.float32),
        places=np.array([4]),
    )
    placement = place(model, [rule("op:*", "int8/channel", "uint16")])
    assert picture(placement)[1:3] == ["constant c: uint16", "activation t: uint16"]


def test_what_is_stored_in_whole_numbers_is_not_quantized_again() -> None:
    """Nor are the scales of it; and its bias stays in float, since whose scale would it have."""
    model = model_of(
        """g (float[2, 4] x) => (float[2, 3] y) {
            d = DequantizeLinear <axis = 0> (w, scales)
            t = Transpose(d)
            y = Gemm(x, t, b)
        }""",
        w=np.ones((3, 4), np.int8),
        scales=np.ones(3, np.float32),
        b=np.ones(3, np.float32),
    )
    assert picture(place(model, [rule("op:*", "int8/channel", "uint16")])) == [
        "input x: uint16",
        "weight d: the model stores it as int8 already",
        "bias b: x and d are not both quantized",
        "activation y: uint16",
    ]


def test_constants_that_set_up_an_operator_are_no_tensors_to_quantize() -> None:
    model = model_of(
        "g (float[1, 1, 2, 2] x) => (float[1, 1, 6, 6] y) { y = Resize(x, roi, factors) }",
        roi=np.zeros(0, np.float32),
        factors=np.array([1, 1, 3, 3], np.float32),
    )
    assert picture(place(model, [rule("op:*", "int8", "uint16")])) == ["input x: uint16", "activation y: uint16"]


def test_operators_that_quantizers_do_not_see_into_are_named_with_what_helps() -> None:
    text = """<ir_version: 10, opset_import: ["": 20, "com.microsoft": 1]>
        g (float[1, 4, 8] x) => (float[1, 4, 8] y) {
            g = com.microsoft.FastGelu (x)
            h = com.microsoft.FastGelu (g)
            y = com.microsoft.MultiHeadAttention <num_heads = 2> (h, h, h)
        }"""
    model = detached(onnx.parser.parse_model(text))
    assert describe_opaque_operators(model) == (
        "com.microsoft::FastGelu (2 nodes) is an operator that few quantizers know; "
        "skip what writes it (`onnxline passes --group fusions`)",
        "com.microsoft::MultiHeadAttention (1 node) hides its scores and softmax from quantizers; "
        "put decompose-attention into quantsim.prepare",
    )
    assert describe_opaque_operators(mlp()) == ()


def test_a_constant_without_end_stays_in_float() -> None:
    model = model_of("g (float[2, 4] a) => (float[2, 4] y) { y = Max(a, least) }", least=np.array(-np.inf, np.float32))
    assert picture(place(model, [rule("op:*", None, "uint8")])) == [
        "input a: uint8",
        "constant least: the constant least holds infinity or NaN",
        "activation y: uint8",
    ]


def test_a_weight_that_is_an_output_stays_in_float() -> None:
    model = model_of(
        "g (float[2, 4] x) => (float[2, 4] y, float[4, 4] w) { y = MatMul(x, w) }", w=np.eye(4, dtype="f4")
    )
    assert picture(place(model, [rule("op:*", "int8", "uint8")])) == [
        "input x: uint8",
        "weight w: the stored tensor is an output of the model",
        "activation y: uint8",
    ]


def test_rules_with_one_selector_are_counted_apart() -> None:
    placement = place(mlp(), [rule("op:*", "int8", "uint8"), rule("op:*", None, "float")])
    assert [matches.in_force for matches in placement.rules] == [2, 6]


BRANCHES = """g (float[2, 4] x, bool c) => (float[2, 4] y) {
    h = MatMul(x, both)
    z = If (c) <
        then_branch = th () => (float[2, 4] t) { t0 = MatMul(h, both) t = MatMul(t0, inner) },
        else_branch = el () => (float[2, 4] e) {
            k = Constant <value_floats = [1.0, 2.0, 3.0, 4.0]> () m = Mul(h, k) n = Shape(m) e = Add(m, offset)
        }
    >
    y = Relu(z)
}"""


def test_what_only_bodies_read_or_make_stays_in_float() -> None:
    model = model_of(
        BRANCHES, both=np.eye(4, dtype=np.float32), inner=np.eye(4, dtype=np.float32), offset=np.ones(4, np.float32)
    )
    assert picture(place(model, [rule("op:*", "int8/channel", "uint8")])) == [
        "input x: uint8",
        "weight both: int8/channel",
        "activation h: uint8",
        "weight inner: read in a body of If",
        "constant offset: read in a body of If",
        "activation t0: made in a body of If",
        "activation t: made in a body of If",
        "activation k: made in a body of If",
        "activation m: made in a body of If",
        "activation e: made in a body of If",
        "activation z: uint8",
        "activation y: uint8",
    ]


LOOP = """g (int64 count, float[4] x) => (float[4] y) {
    keep = Constant <value_int = 1> ()
    go = Cast <to = 9> (keep)
    y = Loop (count, go, x) <
        body = step (int64 i, bool still, float[4] carried) => (bool again, float[4] following) {
            again = Identity(still)
            scaled = Mul(carried, factor)
            following = If (again) <
                then_branch = th () => (float[4] doubled) { doubled = Add(scaled, scaled) },
                else_branch = el () => (float[4] same) { same = Identity(scaled) }
            >
        }
    >
}"""


def loop() -> DetachedModel:
    """A Loop with an If in its body, whose factor is in a Constant node there."""
    model = model_of(LOOP, factor=np.ones(4, np.float32))
    stored = model.proto.graph.initializer[0]
    body = next(entry.g for entry in model.proto.graph.node[-1].attribute if entry.name == "body")
    nodes = [onnx.helper.make_node("Constant", [], ["factor"], value=stored), *body.node]
    del body.node[:], model.proto.graph.initializer[:]
    body.node.extend(nodes)
    return model


def test_bodies_are_listed_to_any_depth_with_what_they_are_given_and_their_constants() -> None:
    assert picture(place(loop(), [rule("op:*", "int8", "uint8")])) == [
        "input x: uint8",
        "constant factor: read in a body of Loop",
        "activation carried: made in a body of Loop",
        "activation scaled: made in a body of Loop",
        "activation following: made in a body of Loop",
        "activation doubled: made in a body of Loop",
        "activation same: made in a body of Loop",
        "activation y: uint8",
    ]


def test_a_rule_that_matches_in_bodies_alone_is_refused() -> None:
    with pytest.raises(UsageError, match="'op:Mul' matches 2 tensors in bodies of Loop, where nothing is quantized"):
        place(loop(), [rule("op:*", "int8", "uint8"), rule("op:Mul", None, "int8")])


def test_a_model_without_floats_is_refused_by_what_it_is() -> None:
    """The rule may be one of a profile, which its reader has not written."""
    model = model_of("g (int64[2] x) => (int64[2] y) { y = Add(x, x) }")
    with pytest.raises(UsageError, match=r"^the model has no tensor of floats, so there is nothing to quantize$"):
        place(model, [rule("op:*", "int8", "uint8")])


CASTS = """g (float[2, 4] x) => (float[2, 4] y) {
    a = MatMul(x, w)
    h = Cast <to = DTYPE> (a)
    r = Neg(h)
    b = Cast <to = 1> (r)
    y = Relu(b)
}"""


@pytest.mark.parametrize(("number", "dtype"), [("10", "float16"), ("16", "bfloat16"), ("11", "float64")])
def test_tensors_of_other_floats_stay_as_they_are(number: str, dtype: str) -> None:
    model = model_of(CASTS.replace("DTYPE", number), w=np.eye(4, dtype=np.float32))
    why = f"holds {dtype}, and only float32 is quantized"
    assert picture(place(model, [rule("op:*", "int8", "uint8")])) == [
        "input x: uint8",
        "weight w: int8",
        "activation a: uint8",
        f"activation h: {why}",
        f"activation r: {why}",
        "activation b: uint8",
        "activation y: uint8",
    ]


@pytest.mark.parametrize(("kind", "dtype"), [("float16", "float16"), ("double", "float64")])
def test_a_model_of_other_floats_is_refused(kind: str, dtype: str) -> None:
    text = f"g ({kind}[2, 4] x) => ({kind}[2, 4] y) {{ y = MatMul(x, w) }}"
    advice = "put to-float32 into" if dtype == "float16" else "export the model in float32"
    for model in (
        model_of(text, w=np.eye(4, dtype=dtype)),
        model_of(text.replace("y = MatMul(x, w)", "y = Neg(x)")),
        model_of(
            f"g (float[2, 4] f) => ({kind}[2, 4] y) {{ x = CastLike(f, w) y = MatMul(x, w) }}", w=np.eye(4, dtype=dtype)
        ),
    ):
        with pytest.raises(UsageError, match=f"are {dtype}, and only float32 is simulated; {advice}"):
            place(model, [rule("op:*", "int8", "uint8")])
