"""Chains of layout operators: numpy says where elements go, pictures show what is written."""

from __future__ import annotations

import math

import numpy as np
import pytest

from passes.context import PassContext
from passes.rewrites.layout_map import LayoutCall, LayoutMap, NoLayout
from passes.rewrites.merge_layout import MergeLayout
from passes.weights.sessions import Session
from tests.support.onnx_models import detached, model_of


def moved(array: np.ndarray, call: LayoutCall) -> np.ndarray:
    if call.op == "Transpose":
        return array.transpose(call.perm)
    if call.op == "Expand":
        return np.broadcast_to(array, np.broadcast_shapes(array.shape, call.shape))
    return array.reshape([array.shape[axis] if size == 0 else size for axis, size in enumerate(call.shape)])


def random_call(draw: np.random.Generator, shape: tuple[int, ...]) -> LayoutCall:
    kind = draw.integers(4)
    if kind == 0 and 1 in shape:
        sizes = tuple(int(draw.integers(1, 3)) if size == 1 else size for size in shape)
        return LayoutCall("Expand", sizes)
    if kind <= 1:
        return LayoutCall("Transpose", perm=tuple(int(axis) for axis in draw.permutation(len(shape))))
    sizes, left = [], math.prod(shape)
    while left > 1 and len(sizes) < 4:
        divisors = [size for size in range(1, left + 1) if left % size == 0]
        sizes.append(int(draw.choice(divisors)))
        left //= sizes[-1]
    return LayoutCall("Reshape", (*sizes, left))


@pytest.mark.parametrize("seed", range(60))
def test_the_shortest_form_moves_elements_as_the_chain_does(seed: int) -> None:
    draw = np.random.default_rng(seed)
    shape = tuple(int(size) for size in draw.choice([1, 2, 3, 4, 6], size=draw.integers(1, 5)))
    source = np.arange(math.prod(shape)).reshape(shape)
    layout, expected, chain = LayoutMap.of(shape), source, 0
    for _ in range(6):
        call = random_call(draw, expected.shape)
        known = expected
        try:
            {"Transpose": layout.transpose, "Reshape": layout.reshape, "Expand": layout.expand}[call.op](
                call.perm or call.shape
            )
        except NoLayout:
            break  # a Reshape across the axes of a Transpose, which no list of axes can say
        expected, chain = moved(known, call), chain + 1
        calls = layout.shortest()
        found = source
        for written in calls:
            found = moved(found, written)
            assert found.shape == written.sizes
        np.testing.assert_array_equal(found, expected)
        assert len(calls) <= max(chain, 4)
        assert sum(written.op == "Transpose" for written in calls) <= 1


def merged(text: str, context: PassContext, *, atol: float = 0.0, **weights: np.ndarray | np.generic) -> list[str]:
    """The nodes after the step, which computes the same and does nothing the second time."""
    model = model_of(text, **weights)
    result = MergeLayout().apply(detached(model), context)
    assert not MergeLayout().apply(result.model, context).changed
    shapes = {info.name: [dim.dim_value or 3 for dim in info.type.tensor_type.shape.dim] for info in model.graph.input}
    feeds = {name: np.random.default_rng(0).standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    before, after = Session.of(detached(model)).run(feeds), Session.of(result.model).run(feeds)
    for name, array in before.items():
        np.testing.assert_allclose(after[name], array, rtol=0, atol=atol)
    stored = {tensor.name: result.model.array(tensor).tolist() for tensor in result.model.proto.graph.initializer}
    return [
        f"{node.op_type} {stored[node.input[1]]}"
        if node.op_type in ("Reshape", "Expand")
        else f"Transpose {list(node.attribute[0].ints)}"
        if node.op_type == "Transpose"
        else node.op_type
        for node in result.model.proto.graph.node
    ]


KEYS = """g (float[2, 6, 8] x) => (float[2, 6, 6] y) {
    split = Reshape (x, heads) keys = Transpose <perm = [0, 2, 1, 3]> (split)
    joined = Reshape (keys, joint) turned = Transpose <perm = [0, 2, 1]> (joined)
    apart = Reshape (turned, four) scaled = Mul (apart, scale) queries = Squeeze (split, none)
    all = ReduceSum <keepdims = 0> (scaled, axis) y = MatMul (x, all)
}"""


def test_keys_are_transposed_once(context: PassContext) -> None:
    ints = {"heads": [2, 6, 2, 4], "joint": [4, 6, 4], "four": [2, 2, 4, 6], "axis": [3], "none": [0]}
    text = KEYS.replace("queries = Squeeze (split, none)\n", "\n").replace("y = MatMul (x, all)", "y = Add (all, zero)")
    text = text.replace("float[2, 6, 6] y", "float[2, 2, 4] y")
    weights = {name: np.array(values) for name, values in ints.items()}
    lines = merged(text, context, scale=np.float32(0.5), zero=np.float32(0), **weights)
    assert lines == ["Mul", "Reshape [2, 6, 2, 4]", "Transpose [0, 2, 3, 1]", "ReduceSum", "Add"]


def test_a_transpose_and_its_inverse_go_through_a_curve(context: PassContext) -> None:
    text = """g (float[2, 3, 4] x) => (float[2, 3, 4] y) {
        a = Transpose <perm = [2, 0, 1]> (x) b = Gelu (a) c = Transpose <perm = [1, 2, 0]> (b) y = Relu (c)
    }"""
    assert merged(text, context) == ["Gelu", "Relu"]


def test_heads_that_are_repeated_are_transposed_before_they_are_repeated(context: PassContext) -> None:
    text = """g (float[1, 2, 6, 4] x, float[1, 4, 6, 4] q) => (float[1, 4, 6, 6] y) {
        a = Unsqueeze (x, two) b = Expand (a, five) c = Reshape (b, four)
        d = Reshape (c, three) e = Transpose <perm = [0, 2, 1]> (d) f = Reshape (e, last) y = MatMul (q, f)
    }"""
    ints = {"two": [2], "five": [1, 2, 2, 6, 4], "four": [1, 4, 6, 4], "three": [4, 6, 4], "last": [1, 4, 4, 6]}
    lines = merged(text, context, **{name: np.array(values) for name, values in ints.items()})
    assert sorted(line.split()[0] for line in lines) == ["Expand", "MatMul", "Reshape", "Reshape", "Transpose"]


def test_a_transpose_gets_no_fifth_axis_of_a_reshape(context: PassContext) -> None:
    """Reshape and Transpose on five axes are one operator fewer; onnxruntime's own optimizer does worse with them."""
    text = """g (float[1, 8, 6] x) => (float[1, 2, 4, 2, 3] y) {
        a = Reshape (x, heads) b = Transpose <perm = [0, 2, 1, 3]> (a) y = Reshape (b, chunks)
    }"""
    lines = merged(text, context, heads=np.array([1, 8, 2, 3]), chunks=np.array([1, 2, 4, 2, 3]))
    assert [line.split()[0] for line in lines] == ["Reshape", "Transpose", "Reshape"]


def test_a_tile_counts_as_an_expand_of_axes_of_size_one_and_ends_a_chain_elsewhere(context: PassContext) -> None:
    text = """g (float[2, 3, 1] x) => (float[3, 2, 4] y, float[4, 3, 1] z) {
        a = Transpose <perm = [1, 0, 2]> (x) b = Tile (a, ones) c = Tile (b, last) d = Transpose <perm = [1, 0, 2]> (c)
        e = Transpose <perm = [1, 0, 2]> (d) y = Relu (e) f = Identity (x) g = Tile (f, first) z = Tile (g, ones)
    }"""
    ints = {"ones": [1, 1, 1], "last": [1, 1, 4], "first": [2, 1, 1]}
    lines = merged(text, context, **{name: np.array(values) for name, values in ints.items()})
    assert sorted(line.split()[0] for line in lines) == ["Expand", "Relu", "Tile", "Transpose"]


def test_open_sizes_are_followed_by_name(context: PassContext) -> None:
    text = """g (float["N", "S", 8] x) => (float["N", 2, "S", 4] y, float["N", "S", 8] z) {
        a = Reshape (x, heads) b = Transpose <perm = [0, 2, 1, 3]> (a) c = Unsqueeze (b, one) y = Squeeze (c, one)
        d = Transpose <perm = [0, 2, 1, 3]> (b) z = Reshape (d, back)
    }"""
    weights = {"heads": np.array([0, 0, 2, 4]), "one": np.array([1]), "back": np.array([0, 0, 8])}
    lines = merged(text, context, **weights)
    assert lines == ["Identity", "Reshape [0, 0, 2, 4]", "Transpose [0, 2, 1, 3]"]


@pytest.mark.parametrize(
    "nodes",
    [
        "a = Reshape (x, size) b = Transpose <perm = [1, 0]> (a) c = Reshape (b, across) y = Relu (c)",
        "a = Transpose <perm = [1, 0, 2]> (x) c = Add (a, vector) b = Transpose <perm = [1, 0, 2]> (c) y = Relu (b)",
        "a = Reshape (x, open) b = Softmax (a) y = Reshape (b, back)",
    ],
)
def test_what_no_shorter_chain_does_stays(nodes: str, context: PassContext) -> None:
    text = f"g (float[2, 3, 4] x, float[4] vector) => (float[2, 3, 4] y) {{ {nodes} }}"
    ints = {"size": [6, 4], "across": [2, 3, 4], "open": [2, -1], "back": [2, 3, 4]}
    model = model_of(text, **{name: np.array(values) for name, values in ints.items()})
    result = MergeLayout().apply(detached(model), context)
    assert (result.changed, result.why) == (False, "every chain is in its shortest form")


def test_a_chain_between_names_that_stay_keeps_them(context: PassContext) -> None:
    text = """g (float[2, 3] x) => (float[2, 3] y, float[3, 2] turned) {
        turned = Transpose <perm = [1, 0]> (x) y = Transpose <perm = [1, 0]> (turned)
    }"""
    assert merged(text, context) == ["Transpose [1, 0]", "Identity"]


def test_an_expand_that_broadcasting_does_goes(context: PassContext) -> None:
    text = """g (float[2, 1, 4] x, float[2, 3, 4] b) => (float[2, 3, 4] y, float[2, 3, 4] z) {
        a = Expand (x, size) y = Add (a, b) c = Expand (x, size) d = Relu (x) z = Add (c, d)
    }"""
    assert merged(text, context, size=np.array([2, 3, 4])) == ["Add", "Expand [2, 3, 4]", "Relu", "Add"]


ROWS = """g (float[2, 3, 8] x, float[2, 3, 8] r) => (float[2, 3, 8] y) {
    a = Reshape (x, flat) b = Gemm (a, w) c = Reshape (b, deep) d = Add (c, r)
    n = NORM e = Reshape (n, flat) f = Gemm (e, w) h = Reshape (f, deep) i = Mul (h, table) y = Add (i, d)
}"""
ROW_WEIGHTS = {
    **{"w": np.eye(8, dtype=np.float32)[::-1].copy(), "scale": np.arange(8, dtype=np.float32)},
    **{
        "table": np.arange(48, dtype=np.float32).reshape(2, 3, 8),
        "flat": np.array([6, 8]),
        "deep": np.array([2, 3, 8]),
    },
}


def test_rows_stay_a_matrix_between_two_products(context: PassContext) -> None:
    lines = merged(ROWS.replace("NORM", "LayerNormalization <axis = 2> (d, scale)"), context, **ROW_WEIGHTS)
    flat, deep = "Reshape [6, 8]", "Reshape [2, 3, 8]"
    norm = ["Add", "LayerNormalization", "Gemm", "Mul", "Add"]
    assert sorted(lines) == sorted([flat, "Gemm", flat, *norm, deep])


def test_a_reshape_of_the_rows_to_another_shape_is_not_their_matrix(context: PassContext) -> None:
    text = ROWS.replace("NORM", "LayerNormalization <axis = 2> (d, scale)")
    text = text.replace("[2, 3, 8] y)", "[2, 3, 8] y, float[2, 24] u)").replace("\n}", " u = Reshape (r, two)\n}")
    lines = merged(text, context, **ROW_WEIGHTS, two=np.array([2, 24]))
    assert sorted(line for line in lines if "Reshape" in line) == [
        "Reshape [2, 24]", "Reshape [2, 3, 8]", "Reshape [6, 8]", "Reshape [6, 8]",
    ]  # fmt: skip


def test_a_value_that_others_read_too_is_given_back_once(context: PassContext) -> None:
    text = ROWS.replace("NORM", "LayerNormalization <axis = 2> (d, scale)")
    text = text.replace("(float[2, 3, 8] y)", "(float[2, 3, 8] y, float[2, 8, 3] u)")
    text = text.replace(
        "y = Add (i, d)", "u = Transpose <perm = [0, 2, 1]> (n) j = Gelu (n) k = Mul (j, i) y = Add (k, d)"
    )
    lines = merged(text, context, **ROW_WEIGHTS)
    assert sum(line.startswith("Reshape") for line in lines) == 4
    assert sorted(line for line in lines if "Reshape" not in line) == sorted(
        ["Gemm", "Gemm", "Add", "Add", "LayerNormalization", "Gelu", "Mul", "Mul", "Transpose [0, 2, 1]"]
    )


def test_a_sum_of_three_is_entered_by_one_reshape(context: PassContext) -> None:
    """With both sums among the rows, each of the three summands would have a Reshape of its own."""
    text = ROWS.replace("float[2, 3, 8] r)", "float[2, 3, 8] p, float[2, 3, 8] q)").replace("Add (c, r)", "Add (c, t)")
    text = text.replace("a = Reshape (x, flat)", "s = Add (p, q) t = Add (s, x) a = Reshape (t, flat)")
    lines = merged(text.replace("NORM", "Gelu (d)"), context, **ROW_WEIGHTS)
    flat, deep = "Reshape [6, 8]", "Reshape [2, 3, 8]"
    assert sorted(lines) == sorted(["Add", "Add", flat, "Gemm", "Add", "Gelu", "Gemm", "Mul", "Add", deep])


def test_a_region_of_a_thousand_operators_is_written(context: PassContext) -> None:
    """Taking the operators before it out one within another would exceed Python's recursion limit."""
    block = "h{0} = Reshape (v{0}, flat) g{0} = Gemm (h{0}, w) d{0} = Reshape (g{0}, deep) r{0} = Relu (d{0}) "
    block += "s{0} = Tanh (v{0}) t{0} = Relu (s{0}) u{0} = Tanh (t{0}) v{1} = Add (r{0}, u{0}) "
    blocks = "".join(block.format(number, number + 1) for number in range(160))
    text = f"g (float[2, 3, 8] x) => (float[2, 3, 8] y) {{ v0 = Abs (x) {blocks} y = Neg (v160) }}"
    weights = {name: array for name, array in ROW_WEIGHTS.items() if name in ("w", "flat", "deep")}
    result = MergeLayout().apply(detached(model_of(text, **weights)), context)
    assert sum(node.op_type == "Reshape" for node in result.model.proto.graph.node) == 2


BIASED = """g (float[2, 3, 8] x) => (float[2, 3, 8] y) {
    a = MatMul (x, w) b = Add (a, bias) c = Gelu (b) d = MatMul (c, w) e = Add (row, d) y = Add (e, x)
}"""
BIASES = {"bias": np.arange(8, dtype=np.float32), "row": np.arange(8, dtype=np.float32).reshape(1, 1, 8)}


def test_products_of_rows_take_their_biases_where_that_saves_as_many_nodes_as_it_adds(context: PassContext) -> None:
    """Of equally many nodes, two Reshapes cost less than two sums. Gemm adds the bias in another order."""
    lines = merged(BIASED, context, atol=1e-6, w=ROW_WEIGHTS["w"], **BIASES)
    assert lines == ["Reshape [6, 8]", "Gemm", "Gelu", "Gemm", "Add", "Reshape [2, 3, 8]"]


@pytest.mark.parametrize(
    ("shape", "left"),
    [
        ("2, 3, 8", "1 product apart from the bias: a Gemm would need more Reshapes than it saves nodes"),
        ('"N", 3, 8', "1 product apart from the bias: sizes are open"),
    ],
)
def test_a_product_alone_stays_apart_from_its_bias(shape: str, left: str, context: PassContext) -> None:
    text = f"g (float[{shape}] x) => (float[{shape}] y) {{ a = MatMul (x, w) y = Add (a, bias) }}"
    result = MergeLayout().apply(detached(model_of(text, w=ROW_WEIGHTS["w"], bias=BIASES["bias"])), context)
    assert (result.changed, result.why) == (False, f"every chain is in its shortest form; {left}")


@pytest.mark.parametrize(
    ("bias", "lines"), [(np.float32(2), ["Gemm"]), (np.arange(6, dtype=np.float32)[:, None], ["MatMul", "Add"])]
)
def test_a_product_of_matrices_takes_a_bias_that_is_the_same_for_each_row(
    bias: np.ndarray, lines: list[str], context: PassContext
) -> None:
    text = "g (float[6, 8] x) => (float[6, 8] y) { a = MatMul (x, w) y = Add (a, bias) }"
    assert merged(text, context, atol=1e-6, w=ROW_WEIGHTS["w"], bias=bias) == lines


def test_the_operators_of_rows_read_a_matrix_that_a_reshape_made_of_the_rows(context: PassContext) -> None:
    text = """g (float[1, 3, 8] x) => (float[1, 3, 8] y) {
        a = MatMul (x, w) b = Add (a, bias) c = Reshape (b, sizes) y = Sub (b, c)
    }"""
    weights = {"w": ROW_WEIGHTS["w"], "bias": BIASES["bias"], "sizes": np.array([3, 8])}
    assert merged(text, context, atol=1e-6, **weights) == ["Reshape [3, 8]", "Gemm", "Sub", "Reshape [1, 3, 8]"]


def test_each_output_of_a_split_of_rows_keeps_its_name(context: PassContext) -> None:
    text = """g (float[3, 8] x) => (float[1, 3, 4] left, float[1, 3, 4] right, float[3, 8] y) {
        a = Reshape (x, sizes) left, right = Split <axis = 2> (a, halves) b = MatMul (left, w) c = Add (b, bias)
        y = Reshape (c, flat)
    }"""
    sizes = {"sizes": np.array([1, 3, 8]), "halves": np.array([4, 4]), "flat": np.array([3, 8])}
    lines = merged(text, context, atol=1e-6, w=ROW_WEIGHTS["w"][:4], bias=BIASES["bias"], **sizes)
    assert lines == ["Split", "Reshape [1, 3, 4]", "Reshape [1, 3, 4]", "Gemm"]


def test_an_output_that_a_branch_makes_keeps_its_name(context: PassContext) -> None:
    """An Identity would stand for the Reshape, and another one for that Identity, without an end."""
    text = """g (float[3, 8] x) => (float[3, 8] y) {
        a = If (c) <then_branch = t () => (float[3, 8] b) { b = Neg (x) },
                    else_branch = e () => (float[3, 8] d) { d = Abs (x) }>
        y = Reshape (a, sizes)
    }"""
    result = MergeLayout().apply(detached(model_of(text, c=np.bool_(True), sizes=np.array([3, 8]))), context)
    assert (result.changed, result.why) == (False, "every chain is in its shortest form")


def test_rows_that_are_mixed_keep_their_axes(context: PassContext) -> None:
    """A Softmax along another axis, and a product of whole values, need the axes."""
    text = ROWS.replace("NORM", "Softmax <axis = 1> (d)")
    weights = {name: array for name, array in ROW_WEIGHTS.items() if name != "scale"}
    result = MergeLayout().apply(detached(model_of(text, **weights)), context)
    assert (result.changed, result.why) == (False, "every chain is in its shortest form")


def test_a_dead_consumer_does_not_hold_a_chain(context: PassContext) -> None:
    text = """g (float[4, 6] x) => (float[1, 1, 8, 3] y) {
        a = Reshape (x, rows) b = Unsqueeze (a, first) c = Add (b, b) d = Neg (c) e = Transpose <perm = [2, 1, 0]> (d)
        y = Unsqueeze (b, first)
    }"""
    sizes = {"rows": np.array([8, 3]), "first": np.array([0])}
    result = MergeLayout().apply(detached(model_of(text, **sizes)), context)
    assert [node.op_type for node in result.model.proto.graph.node] == ["Reshape"]
    assert not MergeLayout().apply(result.model, context).changed
