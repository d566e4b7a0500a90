"""Norms, GELUs and rotary embeddings in another form compute the same; the gallery has their pictures."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import onnx
import pytest

from passes.context import PassContext
from passes.rewrites.canonical_parts import CanonicalGelu, CanonicalNorm
from passes.rewrites.canonical_rope import CanonicalRope
from passes.step import Step
from passes.weights.detached import DetachedModel
from passes.weights.sessions import Session
from tests.support.onnx_models import detached, matrix, model_of, vector

LAYER_NORM = """g (float[2, 3, 8] x) => (float[2, 3, 8] y) {
    m = ReduceMean <keepdims = 1> (x, axis) d = Sub (x, m) s = Mul (d, d) v = ReduceMean <keepdims = 1> (s, axis)
    e = Add (v, epsilon) r = Sqrt (e) n = Div (d, r) w = Mul (n, scale) y = Add (w, bias)
}"""
RMS_NORM = """g (float[2, 3, 8] x) => (float[2, 3, 8] y) {
    s = Pow (x, two) v = ReduceMean <keepdims = 1> (s, axis) e = Add (epsilon, v) r = Sqrt (e)
    i = Reciprocal (r) n = Mul (i, x) y = Mul (scale, n)
}"""
GROUP_NORM = "g (float[2, 8, 3] x) => (float[2, 8, 3] y) { y = GroupNormalization <num_groups = 4> (x, scale, bias) }"
ONE_GELU = 'g (float[2, 3, 8] x) => (float[2, 3, 8] y) { y = Gelu <approximate = "tanh"> (x) }'
GELU = "g (float[2, 3, 8] x) => (float[2, 3, 8] y) { y = Gelu (x) }"
ROPE = """g (float[2, 3, 8] x, float[3, 8] sine) => (float[2, 3, 8] y, float[2, 3, 8] z) {
    a = Slice (x, zero, four, last) b = Slice (x, four, end, last) c = Neg (b) d = Concat <axis = -1> (c, a)
    e = Mul (sine, d) f = Mul (x, cosine) y = Add (f, e)
    g = Relu (x) h, i = Split <axis = 2, num_outputs = 2> (g) j = Neg (i) k = Concat <axis = 2> (j, h)
    l = Mul (k, sine) m = Mul (g, cosine) z = Add (l, m)
}"""

WEIGHTS = {"scale": vector(8, 0), "bias": vector(8, 1), "cosine": matrix(3, 8, 2), "axis": np.array([-1])}
NUMBERS = {"epsilon": np.float32(1e-3), "two": np.float32(2)}
PLACES = {"zero": np.array([0]), "four": np.array([4]), "end": np.array([99]), "last": np.array([2])} | {
    "one": np.array([1]), "two_steps": np.array([2]), "final": np.array([3]), "minus": np.array([-1]),
    "whole": np.array([2, 3, 5, 8]), "groups": np.array([0, 4, -1]), "image": np.array([2, 8, 3, 5]),
    "ones": np.ones(4, np.float32), "zeros": np.zeros(4, np.float32),
    "by_channel": vector(8, 8)[:, None, None], "to_channel": vector(8, 9)[:, None, None],
}  # fmt: skip


def written(
    step: Step, text: str, context: PassContext, opset: int, **tensors: np.ndarray
) -> tuple[Counter[str], DetachedModel]:
    """The operators after a step, which computes the same and does nothing the second time."""
    stored = WEIGHTS | NUMBERS | PLACES | tensors
    model = model_of(text, **{name: stored[name] for name in stored.keys() & set(re.findall(r"\w+", text))})
    model.opset_import[0].version = opset
    model = onnx.shape_inference.infer_shapes(model)
    result = step.apply(detached(model), context)
    assert result.changed, result.why
    assert not step.apply(result.model, context).changed
    random = np.random.default_rng(0)
    shapes = {info.name: [dim.dim_value for dim in info.type.tensor_type.shape.dim] for info in model.graph.input}
    feeds = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    before, after = Session.of(detached(model)).run(feeds), Session.of(result.model).run(feeds)
    for name, array in before.items():
        np.testing.assert_allclose(after[name], array, rtol=1e-5, atol=1e-5)  # sums of 8 in another order
    return Counter(node.op_type for node in result.model.proto.graph.node), result.model


def test_norms_in_parts_become_one_operator(context: PassContext) -> None:
    ops, _ = written(CanonicalNorm(), LAYER_NORM, context, 20)
    assert ops == {"LayerNormalization": 1}
    ops, _ = written(CanonicalNorm(newer=True), RMS_NORM, context, 23)
    assert ops == {"RMSNormalization": 1}
    assert written(CanonicalNorm("parts"), LAYER_NORM_OF, context, 20)[0].total() == 9


SQUARE_NORM = """g ({data}[8, 8] x) => ({result} y) {{
    h = Cast <to = 1> (x) m = ReduceMean <keepdims = {kept}> (h, axis) d = Sub (h, m) s = Mul (d, d)
    v = ReduceMean <keepdims = {kept}> (s, axis) {end}
}}"""
ROOT_END = "e = Add (v, epsilon) r = Sqrt (e) n = Div (d, r) y = Mul (n, gain)"


@pytest.mark.parametrize(
    ("end", "gain", "changes"),
    [
        ("r = Sqrt (v) e = Add (r, epsilon) n = Div (d, e) y = Mul (n, gain)", vector(8, 0), {}),
        (ROOT_END, vector(8, 0)[:, None], {}),
        (ROOT_END, vector(8, 0)[None, None], {"result": "float[1, 8, 8]"}),
        (ROOT_END, vector(8, 0), {"kept": 0}),
        (ROOT_END, vector(8, 0), {"data": "float16"}),
    ],
    ids=["epsilon after the root", "a gain by row", "one more axis", "means of columns", "two dtypes"],
)
def test_what_layer_normalization_does_not_say_stays_in_parts(
    end: str, gain: np.ndarray, changes: dict[str, object], context: PassContext
) -> None:
    text = SQUARE_NORM.format(**{"data": "float", "result": "float[8, 8]", "kept": 1, "end": end} | changes)
    model = model_of(text, gain=gain, axis=WEIGHTS["axis"], epsilon=np.float32(0.5))
    assert not CanonicalNorm().apply(detached(model), context).changed
    assert CanonicalNorm().apply(detached(model_of(LAYER_NORM, **WEIGHTS, **NUMBERS)), context).changed


def test_a_bias_after_an_rms_norm_is_a_sum(context: PassContext) -> None:
    ops, _ = written(CanonicalNorm(newer=True), RMS_NORM.replace("y = Mul", "p = Mul").replace(
        "\n}", " y = Add (p, bias)\n}"), context, 23)  # fmt: skip
    assert ops == {"RMSNormalization": 1, "Add": 1}


LAYER_NORM_OF = """g (float[2, 3, 8] x) => (float[2, 3, 8] y) {
    y = LayerNormalization <axis = 2, epsilon = 0.001> (x, scale, bias)
}"""


@pytest.mark.parametrize(("opset", "newer"), [(20, True), (23, False)])
def test_an_operator_of_a_later_opset_is_written_where_it_is_asked_for(
    opset: int, newer: bool, context: PassContext
) -> None:
    ops, _ = written(CanonicalNorm(newer=newer), RMS_NORM, context, opset)
    assert ops == {"Pow": 1, "ReduceMean": 1, "Add": 1, "Sqrt": 1, "Div": 1, "Mul": 1}


def test_a_norm_of_groups_in_parts(context: PassContext) -> None:
    ops, _ = written(CanonicalNorm("parts"), GROUP_NORM, context, 21)
    assert (ops["Reshape"], ops["ReduceMean"], ops["GroupNormalization"]) == (2, 2, 0)


@pytest.mark.parametrize("text", [ONE_GELU, GELU])
def test_a_gelu_goes_to_parts_and_back(text: str, context: PassContext) -> None:
    ops, parts = written(CanonicalGelu("parts"), text, context, 20)
    assert ops["Gelu"] == 0
    joined = CanonicalGelu().apply(parts, context).model.proto.graph.node
    assert [node.op_type for node in joined] == ["Gelu"]


def test_an_older_opset_has_no_gelu(context: PassContext) -> None:
    parts = CanonicalGelu("parts").apply(detached(model_of(GELU)), context).model
    parts.proto.opset_import[0].version = 18
    result = CanonicalGelu().apply(parts, context)
    assert (result.changed, result.why) == (False, "opset 18 has no Gelu, opset 20 has")


def test_rotary_embeddings_share_signed_sines(context: PassContext) -> None:
    ops, model = written(CanonicalRope(), ROPE, context, 20)
    assert (ops["Neg"], ops["Slice"], ops["Split"], ops["Mul"]) == (0, 0, 2, 5)
    signs = next(tensor for tensor in model.proto.graph.initializer if tensor.name.startswith("signs"))
    assert model.array(signs).tolist() == [-1, -1, -1, -1, 1, 1, 1, 1]


PAIRS = """g (float[2, 3, 5, 8] x) => (float[2, 3, 5, 8] y) {
    a = Slice (x, zero, end, final, two_steps) b = Slice (x, one, end, final, two_steps) c = Neg (b)
    d = Unsqueeze (c, minus) e = Unsqueeze (a, minus) f = Concat <axis = -1> (d, e) h = Reshape (f, whole)
    i = Mul (h, sines) j = Mul (x, cosines) y = Add (j, i)
}"""
HALVES = """g (float[2, 3, 5, 8] x) => (float[2, 3, 5, 8] y) {
    a = Slice (x, zero, four, final) b = Slice (x, four, end, final) c = Neg (b) h = Concat <axis = -1> (c, a)
    i = Mul (h, sines) j = Mul (x, cosines) y = Add (j, i)
}"""
SINES = {"sines": matrix(5, 4, 6)[None, None], "cosines": matrix(5, 4, 7)[None, None]}


def tables(text: str) -> dict[str, np.ndarray]:
    """Tables whose elements are those of each pair, or of both halves."""
    return {
        name: np.repeat(array, 2, axis=-1) if text == PAIRS else np.concatenate([array, array], axis=-1)
        for name, array in SINES.items()
    }


def test_pairs_of_neighbours_are_exchanged_by_one_gather(context: PassContext) -> None:
    ops, _ = written(CanonicalRope(), PAIRS, context, 20, **tables(PAIRS))
    assert ops == {"Gather": 1, "Mul": 2, "Add": 1}


@pytest.mark.parametrize("text", [PAIRS, HALVES])
def test_a_rotary_embedding_is_one_operator_where_the_user_asks(text: str, context: PassContext) -> None:
    ops, _ = written(CanonicalRope(newer=True), text, context, 23, **tables(text))
    assert ops == {"RotaryEmbedding": 1}
    _, shorter = written(CanonicalRope(), text, context, 23, **tables(text))
    result = CanonicalRope(newer=True).apply(shorter, context)
    assert [node.op_type for node in result.model.proto.graph.node] == ["RotaryEmbedding"]
    assert result.why == "1 rotary embedding as one operator"


@pytest.mark.parametrize(
    ("text", "opset", "why"),
    [
        (HALVES, 20, "opset 20 has no RotaryEmbedding, opset 23 has"),
        (PAIRS.replace(", sines)", ", head_sines)"), 23, "its tables differ by head, or their halves differ"),
        (
            PAIRS.replace("[2, 3, 5, 8] x)", "[2, 3, 5, 8] x, float[5, 8] given)").replace(", sines)", ", given)"),
            23,
            "its tables are computed",
        ),
        (ROPE, 23, "its data has no four fixed sizes"),
    ],
)
def test_a_rotary_embedding_that_no_operator_says_is_named(
    text: str, opset: int, why: str, context: PassContext
) -> None:
    stored = WEIGHTS | NUMBERS | PLACES | tables(PAIRS) | {"head_sines": matrix(15, 8, 0).reshape(3, 5, 8)}
    model = model_of(text, **{name: stored[name] for name in stored.keys() & set(re.findall(r"\w+", text))})
    model.opset_import[0].version = opset
    result = CanonicalRope(newer=True).apply(detached(model), context)
    assert not result.changed and why in (result.why or "")


INSTANCE_NORM = """g (float[2, 8, 3, 5] x) => (float[2, 8, 3, 5] y) {
    a = Reshape (x, groups) b = InstanceNormalization <epsilon = 0.001> (a, ones, zeros) c = Reshape (b, image)
    d = Mul (c, by_channel) y = Add (d, to_channel)
}"""


@pytest.mark.parametrize(
    ("opset", "text", "expected"),
    [
        (21, INSTANCE_NORM, {"GroupNormalization": 1}),
        (21, INSTANCE_NORM.replace("d = Mul (c, by_channel) y = Add (d, to_channel)", "y = Relu (c)"),
         {"GroupNormalization": 1, "Relu": 1}),
    ],
)  # fmt: skip
def test_a_group_norm_around_an_instance_norm_is_one_operator(
    opset: int, text: str, expected: dict[str, int], context: PassContext
) -> None:
    ops, _ = written(CanonicalNorm(), text, context, opset)
    assert ops == expected
