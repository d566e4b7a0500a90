"""`split-qkv`: each form in which models merge Q, K and V, before and after as pictures, with numbers and weights."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from passes.rewrites.split_merged import split_qkv
from passes.structures import STRUCTURES
from tests.passes.rewrites.merged_models import assert_parts_of, split_and_compare
from tests.support.onnx_models import detached
from tests.support.onnx_text import (
    ATTENTION,
    ATTENTION_PICTURE,
    THREE_SLICES,
    arrays_of,
    lines_of,
    merged_model,
    picture,
)

FORMS = {
    "GPT-2: a Gemm of all positions, and Split": (
        """g (float[2, 8, 32] x) => (float[2, 4, 8, 8] y) <float[32, 96] c_attn.weight, float[96] c_attn.bias> {
            flat = Reshape (x, #[-1, 32])
            qkv = Gemm (flat, c_attn.weight, c_attn.bias)
            wide = Reshape (qkv, #[2, 8, 96])
            qw, kw, vw = Split <axis = 2> (wide, #[32, 32, 32])
            $h = Reshape ($w, #[2, 8, 4, 8])
            $ = Transpose <perm = [0, 2, 1, 3]> ($h)""",
        """
            flat = Reshape (x, [-1,32])
            qkv.$ = Gemm (flat, c_attn.$.weight, c_attn.$.bias)
            $w = Reshape (qkv.$, [2,8,32])
            $h = Reshape ($w, [2,8,4,8])
            $ = Transpose <perm = [0, 2, 1, 3]> ($h)""",
    ),
    "three Slices of a product with a bias after it": (
        THREE_SLICES,
        """
            product.$ = MatMul (x, qkv.$.weight)
            $ = Add (qkv.$.bias, product.$)""",
    ),
    "GPT-NeoX: each head has its Q, K and V beside each other": (
        """g (float[2, 8, 32] x) => (float[2, 4, 8, 8] y) <float[32, 96] qkv.weight> {
            product = MatMul (x, qkv.weight)
            heads = Reshape (product, #[2, 8, 4, 24])
            turned = Transpose <perm = [0, 2, 1, 3]> (heads)
            q, k, v = Split <axis = 3, num_outputs = 3> (turned)""",
        """
            product.$ = MatMul (x, qkv.$.weight)
            $.heads = Reshape (product.$, [2,8,4,8])
            $ = Transpose <perm = [0, 2, 1, 3]> ($.heads)""",
    ),
    "Bloom: Gather after a Reshape, with the features of a head last": (
        """g (float[2, 8, 32] x) => (float[2, 4, 8, 8] y) <float[32, 96] qkv.weight> {
            product = MatMul (x, qkv.weight)
            heads = Reshape (product, #[2, 8, 4, 3, 8])
            qh = Gather <axis = 3> (heads, #0)
            kh = Gather <axis = -2> (heads, #-2)
            vh = Gather <axis = 3> (heads, #2)
            $ = Transpose <perm = [0, 2, 1, 3]> ($h)""",
        """
            product.$ = MatMul (x, qkv.$.weight)
            $h = Reshape (product.$, [2,8,4,8])
            $ = Transpose <perm = [0, 2, 1, 3]> ($h)""",
    ),
    "timm: unbind of the first axis, by Split and Squeeze": (
        """g (float[2, 8, 32] x) => (float[2, 4, 8, 8] y) <float[32, 96] qkv.weight> {
            product = MatMul (x, qkv.weight)
            five = Reshape (product, #[2, 8, 3, 4, 8])
            turned = Transpose <perm = [2, 0, 3, 1, 4]> (five)
            q1, k1, v1 = Split <axis = 0, num_outputs = 3> (turned)
            $ = Squeeze ($1, #[0])""",
        """
            product.$ = MatMul (x, qkv.$.weight)
            $.heads = Reshape (product.$, [2,8,4,8])
            $ = Transpose <perm = [0, 2, 1, 3]> ($.heads)""",
    ),
    "Falcon: groups of two heads of Q with a K and a V, repeated": (
        """g (float[2, 8, 32] x) => (float[2, 4, 8, 8] y) <float[32, 64] qkv.weight> {
            product = MatMul (x, qkv.weight)
            groups = Reshape (product, #[2, 8, 2, 4, 8])
            q5 = Slice (groups, #[0], #[-2], #[3])
            k5 = Gather <axis = 3> (groups, #[-2])
            v5 = Slice (groups, #[-1], #[9], #[3])
            kw = Expand (k5, #[2, 8, 2, 2, 8])
            vw = Expand (v5, #[2, 8, 2, 2, 8])
            q4 = Reshape (q5, #[2, 8, 4, 8])
            k4 = Reshape (kw, #[2, 8, 4, 8])
            v4 = Reshape (vw, #[2, 8, 4, 8])
            $ = Transpose <perm = [0, 2, 1, 3]> ($4)""",
        """
            product.q = MatMul (x, qkv.q.weight)
            q5 = Reshape (product.q, [2,8,2,2,8])
            q4 = Reshape (q5, [2,8,4,8])
            q = Transpose <perm = [0, 2, 1, 3]> (q4)
            product.k = MatMul (x, qkv.k.weight)
            k5 = Reshape (product.k, [2,8,2,1,8])
            kw = Expand (k5, [2,8,2,2,8])
            k4 = Reshape (kw, [2,8,4,8])
            k = Transpose <perm = [0, 2, 1, 3]> (k4)
            product.v = MatMul (x, qkv.v.weight)
            v5 = Reshape (product.v, [2,8,2,1,8])
            vw = Expand (v5, [2,8,2,2,8])
            v4 = Reshape (vw, [2,8,4,8])
            v = Transpose <perm = [0, 2, 1, 3]> (v4)""",
    ),
    "SAM: batch and heads are one axis before the parts are taken": (
        """g (float[2, 8, 32] x) => (float[1, 8, 8, 8] y) <float[32, 96] qkv.weight> {
            product = MatMul (x, qkv.weight)
            five = Reshape (product, #[2, 8, 3, 4, 8])
            turned = Transpose <perm = [2, 0, 3, 1, 4]> (five)
            rows = Reshape (turned, #[3, 8, 8, 8])
            q, k, v = Split <axis = 0, num_outputs = 3> (rows)""",
        """
            product.$ = MatMul (x, qkv.$.weight)
            $.heads = Reshape (product.$, [2,8,4,8])
            $.transposed = Transpose <perm = [0, 2, 1, 3]> ($.heads)
            $ = Reshape ($.transposed, [1,8,8,8])""",
    ),
    "a 1×1 Conv, and Split of its channels": (
        """g (float[2, 32, 8] x) => (float[2, 1, 8, 32] y) <float[96, 32, 1] to_qkv.weight, float[96] to_qkv.bias> {
            product = Conv (x, to_qkv.weight, to_qkv.bias)
            q1, k1, v1 = Split <axis = 1, num_outputs = 3> (product)
            $2 = Transpose <perm = [0, 2, 1]> ($1)
            $ = Unsqueeze ($2, #[1])""",
        """
            $1 = Conv (x, to_qkv.$.weight, to_qkv.$.bias)
            $2 = Transpose <perm = [0, 2, 1]> ($1)
            $ = Unsqueeze ($2, [1])""",
    ),
    "LeViT: BatchNormalization over the channels, and parts of other widths": (
        """g (float[2, 8, 32] x) => (float[2, 4, 8, 16] y)
        <float[32, 128] qkv.weight, float[128] bn.weight, float[128] bn.bias, float[128] bn.mean, float[128] bn.var> {
            product = MatMul (x, qkv.weight)
            rows = Reshape (product, #[16, 128])
            normal = BatchNormalization <epsilon = 0.5> (rows, bn.weight, bn.bias, bn.mean, bn.var)
            back = Reshape (normal, #[2, 8, 4, 32])
            q1, k1, v1 = Split <axis = 3> (back, #[8, 8, 16])
            $ = Transpose <perm = [0, 2, 1, 3]> ($1)""",
        """
            product.q = MatMul (x, qkv.q.weight)
            product.q.flat = Reshape (product.q, [-1,32])
            normal.q = BatchNormalization <epsilon = 0.5> (product.q.flat, bn.q.weight, bn.q.bias, bn.mean.q, bn.var.q)
            q1 = Reshape (normal.q, [2,8,4,8])
            q = Transpose <perm = [0, 2, 1, 3]> (q1)
            product.k = MatMul (x, qkv.k.weight)
            product.k.flat = Reshape (product.k, [-1,32])
            normal.k = BatchNormalization <epsilon = 0.5> (product.k.flat, bn.k.weight, bn.k.bias, bn.mean.k, bn.var.k)
            k1 = Reshape (normal.k, [2,8,4,8])
            k = Transpose <perm = [0, 2, 1, 3]> (k1)
            product.v = MatMul (x, qkv.v.weight)
            product.v.flat = Reshape (product.v, [-1,64])
            normal.v = BatchNormalization <epsilon = 0.5> (product.v.flat, bn.v.weight, bn.v.bias, bn.mean.v, bn.var.v)
            v1 = Reshape (normal.v, [2,8,4,16])
            v = Transpose <perm = [0, 2, 1, 3]> (v1)""",
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_before_and_after(form: str) -> None:
    text, expected = FORMS[form]
    model = merged_model(f"{text}\n{ATTENTION}}}")
    result = split_and_compare(model, split_qkv)
    assert sorted(picture(result.model)) == sorted([*lines_of(expected), *ATTENTION_PICTURE])
    assert result.notes == ()
    before, after = arrays_of(detached(model)), arrays_of(result.model)
    (merged,) = result.split
    axis = 0 if before[merged].ndim == 3 else -1
    assert_parts_of(before[merged], [after[name] for name in part_names(merged)], axis)
    triples = STRUCTURES["qkv"].find(result.model).instances
    assert [[weight.name for weight in one.weights] for one in triples] == [part_names(merged)]


def part_names(merged: str) -> list[str]:
    return [merged.replace(".weight", f".{role}.weight") for role in "qkv"]


def test_sizes_that_are_open_are_read_where_the_model_reads_them() -> None:
    """GPT-2 with an open batch and an open length: its Gemm knows only their product."""
    text = """g (float[b, n, 32] x) => (float[b, 4, n, 8] y) <float[32, 96] w.weight> {
        flat = Reshape (x, #[-1, 32])
        qkv = Gemm (flat, w.weight)
        size = Shape <start = 0, end = 2> (x)
        wide_size = Concat <axis = 0> (size, #[96])
        wide = Reshape (qkv, wide_size)
        qw, kw, vw = Split <axis = -1, num_outputs = 3> (wide)
        $h = Reshape ($w, #[0, 0, 4, 8])
        $ = Transpose <perm = [0, 2, 1, 3]> ($h)"""
    feeds = {"x": np.random.default_rng(0).uniform(-1, 1, (3, 5, 32)).astype(np.float32)}
    result = split_and_compare(merged_model(f"{text}\n{ATTENTION}}}"), split_qkv, feeds)
    assert "qw = Reshape (qkv.q, qw.shape)" in picture(result.model)
    assert "qw.shape = Concat <axis = 0> (wide_size.0, wide_size.1, [32])" in picture(result.model)


def test_the_size_of_the_product_is_read_from_its_data() -> None:
    """torch's older exporter asks the merged value for its sizes, as Bloom's code does."""
    text = """g (float[b, n, 32] x) => (float[b, 4, n, 8] y) <float[32, 96] w.weight, float[96] w.bias> {
        product = MatMul (x, w.weight)
        sum = Add (product, w.bias)
        size = Shape (sum)
        batch = Gather <axis = 0> (size, #[0])
        length = Gather <axis = 0> (size, #[1])
        width = Gather <axis = 0> (size, #[2])
        three = Div (width, #[12])
        five = Reshape (sum, #[0, 0, 4, 3, 8])
        qh = Gather <axis = 3> (five, #0)
        kh = Gather <axis = 3> (five, #1)
        vh = Gather <axis = 3> (five, #2)
        q = Transpose <perm = [0, 2, 1, 3]> (qh)
        k = Transpose <perm = [0, 2, 1, 3]> (kh)
        v4 = Transpose <perm = [0, 2, 1, 3]> (vh)
        whole = Concat <axis = 0> (batch, #[4], length, three)
        v = Reshape (v4, whole)"""
    feeds = {"x": np.random.default_rng(0).uniform(-1, 1, (3, 5, 32)).astype(np.float32)}
    after = picture(split_and_compare(merged_model(f"{text}\n{ATTENTION}}}"), split_qkv, feeds).model)
    assert [line for line in after if line.startswith("size")] == [
        "size.data = Shape (x)",
        "size.positions = Gather <axis = 0> (size.data, [0,1])",
        "size = Concat <axis = 0> (size.positions, [96])",
    ]


@st.composite
def interleavings(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int, str]:
    """The order of groups, parts and features in the matrix; groups; heads of Q in a group; how parts are taken."""
    order = tuple(draw(st.permutations((0, 1, 2))))
    return order, draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.sampled_from(("Split", "Slice", "Gather")))


@settings(max_examples=40, deadline=None)
@given(interleavings())
def test_any_interleaving_is_found_as_the_permutation_that_it_is(case: tuple[tuple[int, ...], int, int, str]) -> None:
    """A matrix whose channels are groups × (heads of Q, a K, a V) × 4 features, in any order of the three."""
    order, groups, heads, how = case
    sizes = (groups, heads + 2, 4)
    shape = [2, 5, *(sizes[at] for at in order)]
    back = [0, 1, *(2 + order.index(at) for at in range(3))]  # to (batch, length, groups, parts, features)
    taken = {"q": range(heads), "k": [heads], "v": [heads + 1]}
    take = {
        "Split": f"q0, k0, v0 = Split <axis = 3> (t, #{[heads, 1, 1]})",
        "Slice": "".join(f"{role}0 = Slice (t, #[{at[0]}], #[{at[-1] + 1}], #[3]) " for role, at in taken.items()),
        "Gather": "".join(f"{role}0 = Gather <axis = 3> (t, #{list(at)}) " for role, at in taken.items()),
    }[how]
    text = f"""g (float[2, 5, 32] x) => (float[2, {groups}, {5 * heads}, 4] y) <float[32, {np.prod(sizes)}] w.weight> {{
        m = MatMul (x, w.weight)
        r = Reshape (m, #{shape})
        t = Transpose <perm = {back}> (r)
        {take}
        $1 = Transpose <perm = [0, 2, 3, 1, 4]> ($0)
        q = Reshape (q1, #[2, {groups}, {5 * heads}, 4])
        k = Reshape (k1, #[2, {groups}, 5, 4])
        v = Reshape (v1, #[2, {groups}, 5, 4])
        {ATTENTION} }}"""
    model = merged_model(text)
    result = split_and_compare(model, split_qkv)
    assert result.notes == ()
    merged, after = arrays_of(detached(model))["w.weight"], arrays_of(result.model)
    numbers = np.arange(np.prod(sizes)).reshape([sizes[at] for at in order])
    numbers = numbers.transpose([order.index(at) for at in range(3)])
    for role, places in taken.items():
        channels = set(numbers[:, list(places)].reshape(-1).tolist())
        part = after[f"w.{role}.weight"]
        assert {column.tobytes() for column in part.T} == {merged[:, one].tobytes() for one in channels}
        assert part.shape[1] == len(channels)
