"""Attention spelled out: before and after as pictures, and the same numbers as onnxruntime's kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import passes
from passes.context import PassContext
from passes.provenance.annotations import annotations_of
from passes.rewrites.attention_operators import DecomposeAttention
from passes.weights.detached import attach
from passes.weights.sessions import Session
from tests.support.onnx_models import detached

TOLERANCE = {np.float32: 2e-5, np.float16: 4e-3}
"""Sums of at most 16 products in another order: some tens of roundings of 2^-24, or of 2^-11."""

Arrays = dict[str, np.ndarray]


def one_node(op: str, feeds: Arrays, outputs: list[str], *, opset: int = 24, domain: str = "", **attributes: Any):
    """A model of one node, whose inputs are `feeds`; an input named by digits is left out."""
    names = ["" if name.isdigit() else name for name in feeds]
    node = helper.make_node(op, names, outputs, name="attend", domain=domain, **attributes)
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in feeds.items()
        if not name.isdigit()
    ]
    dtype = helper.np_dtype_to_tensor_dtype(feeds[next(iter(feeds))].dtype)
    results = [helper.make_tensor_value_info(name, dtype, None) for name in outputs if name]
    graph = helper.make_graph([node], "g", inputs, results)
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def decompose(model: onnx.ModelProto) -> tuple[onnx.ModelProto, str | None]:
    result = DecomposeAttention().apply(detached(model), None)  # pyright: ignore[reportArgumentType]
    return attach(result.model), result.why


def run(model: onnx.ModelProto, feeds: Arrays) -> Arrays:
    return Session.of(detached(model)).run({name: array for name, array in feeds.items() if not name.isdigit()})


def assert_same_numbers(model: onnx.ModelProto, feeds: Arrays) -> onnx.ModelProto:
    after, why = decompose(model)
    assert why is None
    onnx.checker.check_model(onnx.shape_inference.infer_shapes(after, strict_mode=True))
    assert not any("Attention" in node.op_type for node in after.graph.node)
    expected, got = run(model, feeds), run(after, feeds)
    assert expected.keys() == got.keys()
    for name, array in expected.items():
        tolerance = TOLERANCE[array.dtype.type]
        np.testing.assert_allclose(got[name], array, rtol=tolerance, atol=tolerance, err_msg=name)
    return after


def show_first(mask: np.ndarray) -> np.ndarray:
    """A mask that hides no row whole: all of one would be near -10000, where float32 has three decimals."""
    mask[..., :1] = True
    return mask.astype(np.int32)


def draw(seed: int, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


@given(st.data())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_the_standards_attention_in_any_form(data: st.DataObject) -> None:
    batch, queries, keys, past = (data.draw(st.integers(1, 3)) for _ in range(4))
    kv_heads, group, size, value_size = (data.draw(st.integers(1, 3)) for _ in range(4))
    dtype = data.draw(st.sampled_from([np.float32, np.float16]))
    heads, merged, has_past = kv_heads * group, data.draw(st.booleans()), data.draw(st.booleans())

    def part(seed: int, count: int, length: int, width: int) -> np.ndarray:
        shape = (batch, length, count * width) if merged else (batch, count, length, width)
        return draw(seed, *shape, dtype=dtype)

    if has_past:
        keys = queries  # onnxruntime shows one query all keys otherwise, where the standard hides the last ones
    feeds = {"q": part(1, heads, queries, size), "k": part(2, kv_heads, keys, size)}
    feeds["v"] = part(3, kv_heads, keys, value_size)
    total = keys + past * has_past
    kind = data.draw(st.sampled_from(["none", "bool", "float"]))
    rows = data.draw(st.sampled_from([(), (queries,), (heads, queries), (batch, heads, queries), (1, 1, queries)]))
    shape = (*(rows or (queries,)), total)
    feeds["3"] = np.zeros(0)
    if kind == "bool":
        feeds["mask"] = draw(4, *shape) > 0
    elif kind == "float":
        feeds["mask"] = draw(4, *shape, dtype=dtype)
    if "mask" in feeds:
        del feeds["3"]
    if has_past:
        feeds["past_k"] = draw(5, batch, kv_heads, past, size, dtype=dtype)
        feeds["past_v"] = draw(6, batch, kv_heads, past, value_size, dtype=dtype)
    attributes: dict[str, Any] = {"q_num_heads": heads, "kv_num_heads": kv_heads} if merged else {}
    attributes["is_causal"] = data.draw(st.integers(0, 1))
    attributes["softcap"] = data.draw(st.sampled_from([0.0, 2.0]))
    if data.draw(st.booleans()):
        attributes["scale"] = 0.4
    outputs = ["y", "pk", "pv"] if has_past else ["y"]
    assert_same_numbers(one_node("Attention", feeds, outputs, **attributes), feeds)


@given(st.data())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_multi_head_attention_in_any_form(data: st.DataObject) -> None:
    batch, queries, keys, past, heads, size = (data.draw(st.integers(1, 3)) for _ in range(6))
    has_past, causal = data.draw(st.booleans()), data.draw(st.booleans())
    if has_past or causal:
        keys = queries
    total, width = keys + past * has_past, heads * size
    feeds = {"q": draw(1, batch, queries, width), "k": draw(2, batch, keys, width), "v": draw(3, batch, keys, width)}
    feeds["bias" if data.draw(st.booleans()) else "3"] = draw(4, 3 * width)
    mask = data.draw(st.sampled_from(["4", "wide", "cube"]))
    shape = {"4": (0,), "wide": (batch, total), "cube": (batch, queries, total)}[mask]
    feeds[mask] = show_first(draw(5, *shape) > 0)
    feeds["added" if data.draw(st.booleans()) else "5"] = draw(6, 1, heads, queries, total)
    if has_past:
        feeds |= {"past_k": draw(7, batch, heads, past, size), "past_v": draw(8, batch, heads, past, size)}
    attributes: dict[str, Any] = {"num_heads": heads, "unidirectional": int(causal)}
    if data.draw(st.booleans()):
        attributes["scale"] = 0.4
    model = one_node("MultiHeadAttention", feeds, ["y", "pk", "pv"], opset=18, domain="com.microsoft", **attributes)
    assert_same_numbers(model, feeds)


@pytest.mark.parametrize("packed", ["qkv", "kv"])
def test_packed_heads_are_those_of_separate_inputs(packed: str) -> None:
    """onnxruntime's CPU has no kernel for packed inputs, so its kernel for separate inputs is the reference."""
    separate = {name: draw(seed, 2, 5, 3, 4) for seed, name in enumerate("qkv")}  # [batch, length, heads, size]
    flat = {name: array.reshape(2, 5, 12) for name, array in separate.items()}
    expected = run(one_node("MultiHeadAttention", flat, ["y"], opset=18, domain="com.microsoft", num_heads=3), flat)
    feeds = {name: flat[name] for name in "qkv" if name not in packed}
    feeds[packed] = np.stack([separate[name] for name in packed], axis=3)
    after, why = decompose(one_node("MultiHeadAttention", feeds, ["y"], opset=18, domain="com.microsoft", num_heads=3))
    assert why is None
    np.testing.assert_allclose(run(after, feeds)["y"], expected["y"], rtol=2e-5, atol=2e-5)


@given(st.data())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_onnxruntimes_own_attention_in_any_form(data: st.DataObject) -> None:
    batch, length, past, heads, size = (data.draw(st.integers(1, 3)) for _ in range(5))
    has_past = data.draw(st.booleans())
    total, width = length + past * has_past, heads * size
    feeds = {"x": draw(1, batch, length, 4), "w": draw(2, 4, 3 * width)}
    feeds["bias"] = draw(3, 3 * width)  # onnxruntime 1.31 dies without one
    mask = data.draw(st.sampled_from(["3", "wide", "cube", "ends", "both"]))
    if mask in ("ends", "both"):
        ends, starts = np.full(batch, max(total - 1, 1)), np.zeros(batch)
        feeds[mask] = (ends if mask == "ends" else np.concatenate([ends, starts])).astype(np.int32)
    else:
        shape = {"3": (0,), "wide": (batch, total), "cube": (batch, length, total)}[mask]
        feeds[mask] = show_first(draw(5, *shape) > 0)
    feeds["past" if has_past else "4"] = draw(6, 2, batch, heads, past, size)
    if not has_past and data.draw(st.booleans()):
        feeds["added"] = draw(7, batch, heads, length, total)
    attributes = {"num_heads": heads, "unidirectional": data.draw(st.integers(0, 1))}
    outputs = ["y", "present"] if has_past else ["y"]
    model = one_node("Attention", feeds, outputs, opset=18, domain="com.microsoft", **attributes)
    assert_same_numbers(model, feeds)


@given(st.data())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_grouped_query_attention_in_any_form(data: st.DataObject) -> None:
    length, past, kv_heads, group = (data.draw(st.integers(1, 3)) for _ in range(4))
    has_past, packed, turns = (data.draw(st.booleans()) for _ in range(3))
    batch, size = 1 if has_past else data.draw(st.integers(1, 3)), 16
    heads, total = kv_heads * group, length + past * has_past
    if packed:
        feeds = {"q": draw(1, batch, length, (heads + 2 * kv_heads) * size), "1": np.zeros(0), "2": np.zeros(0)}
    else:
        feeds = {"q": draw(1, batch, length, heads * size)}
        feeds |= {name: draw(2, batch, length, kv_heads * size) for name in ("k", "v")}
    cache = (batch, kv_heads, past if has_past else 0, size)
    feeds |= {"past_k": draw(3, *cache), "past_v": draw(4, *cache)}
    feeds |= {"ends": np.full(batch, total - 1, np.int32), "total": np.array(total, np.int32)}
    attributes: dict[str, Any] = {"num_heads": heads, "kv_num_heads": kv_heads}
    if turns:
        feeds |= {"cosine": draw(5, 8, size // 2), "sine": draw(6, 8, size // 2)}
        attributes |= {"do_rotary": 1, "rotary_interleaved": data.draw(st.integers(0, 1))}
    attributes["softcap"] = data.draw(st.sampled_from([0.0, 2.0]))
    attributes["local_window_size"] = data.draw(st.sampled_from([-1, 1, 2]))
    model = one_node("GroupQueryAttention", feeds, ["y", "pk", "pv"], opset=18, domain="com.microsoft", **attributes)
    assert_same_numbers(model, feeds)


def picture(model: onnx.ModelProto) -> list[str]:
    return [f"{node.output[0]} = {node.op_type} ({', '.join(node.input)})" for node in model.graph.node]


def test_the_picture_of_grouped_heads_with_a_causal_mask() -> None:
    feeds = {"q": draw(1, 1, 8, 32), "k": draw(2, 1, 8, 16), "v": draw(3, 1, 8, 16)}
    model = one_node("Attention", feeds, ["y"], q_num_heads=4, kv_num_heads=2, is_causal=1)
    after = assert_same_numbers(model, feeds)
    assert picture(after) == [
        "attend/query_split = Reshape (q, attend/query_shape)",
        "attend/query = Transpose (attend/query_split)",
        "attend/value_split = Reshape (v, attend/value_shape)",
        "attend/value = Transpose (attend/value_split)",
        "attend/key_split = Reshape (k, attend/value_shape)",
        "attend/key_transposed = Transpose (attend/key_split)",
        "attend/value_heads = Gather (attend/value, attend/heads_of_query)",
        "attend/key_heads = Gather (attend/key_transposed, attend/heads_of_query)",
        "attend/scores = MatMul (attend/query, attend/key_heads)",
        "attend/scaled = Mul (attend/scores, attend/scale)",
        "attend/masked = Add (attend/scaled, attend/causal_bias)",
        "attend/probabilities = Softmax (attend/masked)",
        "attend/mixed = MatMul (attend/probabilities, attend/value_heads)",
        "attend/merged = Transpose (attend/mixed)",
        "y = Reshape (attend/merged, attend/output_shape)",
    ]
    again = DecomposeAttention().apply(detached(after), None)  # pyright: ignore[reportArgumentType]
    assert not again.changed


def test_a_mask_that_may_hide_a_row_whole_gives_zeros_there() -> None:
    feeds = {name: draw(seed, 1, 1, 3, 4) for seed, name in enumerate("qkv")}
    feeds["mask"] = np.array([[True, False, True], [False, False, False], [True, True, True]])
    after = assert_same_numbers(one_node("Attention", feeds, ["y"]), feeds)
    assert [node.op_type for node in after.graph.node][-8:] == [
        *("Cast", "ReduceMax", "Cast", "Not"),
        *("Add", "Softmax", "Where", "MatMul"),
    ]
    assert not run(after, feeds)["y"][0, 0, 1].any()
    # clamp-mask may change the number of a mask where nothing but the scores reads it
    masking = next(node.input[2] for node in after.graph.node if node.op_type == "Where")
    assert [node.op_type for node in after.graph.node if masking in node.input] == ["Where"]


def test_a_mask_of_numbers_that_may_hide_a_row_whole_gives_zeros_there() -> None:
    feeds = {name: draw(seed, 1, 1, 3, 4) for seed, name in enumerate("qkv")}
    feeds["mask"] = np.where(np.array([[True, False, True], [True, True, False], [True, True, True]]), 0, -np.inf)
    feeds["mask"] = feeds["mask"].astype(np.float32)
    after = assert_same_numbers(one_node("Attention", feeds, ["y"]), feeds)
    assert [node.op_type for node in after.graph.node][-6:] == [
        *("ReduceMax", "Equal"),
        *("Add", "Softmax", "Where", "MatMul"),
    ]


def test_a_constant_mask_that_hides_no_row_whole_needs_no_guard() -> None:
    feeds = {name: draw(seed, 1, 1, 3, 4) for seed, name in enumerate("qkv")}
    model = one_node("Attention", {**feeds, "mask": np.tri(3, dtype=np.bool_)}, ["y"])
    del model.graph.input[3]
    model.graph.initializer.append(numpy_helper.from_array(np.tri(3, dtype=np.bool_), "mask"))
    after = assert_same_numbers(model, feeds)
    assert [node.op_type for node in after.graph.node][-3:] == ["Add", "Softmax", "MatMul"]


@pytest.mark.parametrize("mode", range(4))
@pytest.mark.parametrize("opset", [23, 24])
def test_the_scores_as_an_output(mode: int, opset: int) -> None:
    """Against onnxruntime, and ONNX's reference evaluator but for mode 0, where that one has the cap in it already."""
    feeds = {name: draw(seed, 1, 1, 3, 4) for seed, name in enumerate("qkv")}
    feeds["mask"] = np.array([[True, False, True], [False, True, False], [True, True, True]])
    outputs = ["y", "", "", "scores"]
    model = one_node("Attention", feeds, outputs, opset=opset, qk_matmul_output_mode=mode, softcap=1.5)
    after, why = decompose(model)
    assert why is None
    got, expected = run(after, feeds), ReferenceEvaluator(model).run(None, feeds)
    if mode != 2:  # onnxruntime adds its lowest number where the standard adds minus infinity
        np.testing.assert_allclose(got["scores"], run(model, feeds)["scores"], rtol=2e-5, atol=2e-5)
    if mode != 0:
        np.testing.assert_allclose(got["scores"], expected[1], rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(got["y"], expected[0], rtol=2e-5, atol=2e-5)


def test_keys_that_end_elsewhere_in_each_batch_entry() -> None:
    feeds = {name: draw(seed, 2, 1, 3, 4) for seed, name in enumerate("qkv")}
    feeds |= {"3": np.zeros(0), "4": np.zeros(0), "5": np.zeros(0), "ends": np.array([2, 3])}
    assert_same_numbers(one_node("Attention", feeds, ["y"]), feeds)


def test_softmax_in_another_precision() -> None:
    feeds = {name: draw(seed, 1, 1, 3, 4, dtype=np.float16) for seed, name in enumerate("qkv")}
    after = assert_same_numbers(one_node("Attention", feeds, ["y"], softmax_precision=TensorProto.FLOAT), feeds)
    assert [node.op_type for node in after.graph.node][-4:] == ["Cast", "Softmax", "Cast", "MatMul"]


def test_sizes_that_only_a_run_knows() -> None:
    """The causal mask is computed then; all else has fixed shapes with zeros for the sizes that stay."""
    feeds = {"q": draw(1, 2, 3, 8), "k": draw(2, 2, 3, 4), "v": draw(3, 2, 3, 4), "3": np.zeros(0)}
    feeds |= {"past_k": draw(4, 2, 1, 5, 4), "past_v": draw(5, 2, 1, 5, 4)}
    model = one_node("Attention", feeds, ["y", "pk", "pv"], q_num_heads=2, kv_num_heads=1, is_causal=1)
    for info in model.graph.input:
        dims = info.type.tensor_type.shape.dim
        dims[0].dim_param = "batch"
        dims[2 if info.name.startswith("past") else 1].dim_param = "past" if info.name.startswith("past") else "new"
    after = assert_same_numbers(model, feeds)
    assert {"Range", "Shape", "GreaterOrEqual"} <= {node.op_type for node in after.graph.node}


def test_layers_share_one_causal_mask() -> None:
    text = """<ir_version: 10, opset_import: ["": 23]>
    g (float[1, 2, 32, 4] q) => (float[1, 2, 32, 4] y) {
        h = Attention <is_causal = 1> (q, q, q)
        y = Attention <is_causal = 1> (h, h, h)
    }"""
    model = detached(onnx.parser.parse_model(text))
    result = DecomposeAttention().apply(model, None)  # pyright: ignore[reportArgumentType]
    masks = [tensor for tensor in result.model.proto.graph.initializer if list(tensor.dims) == [32, 32]]
    assert [(tensor.name, result.model.weight(tensor) is not None) for tensor in masks] == [("h/causal_bias", True)]


STAY = {
    "heads are not known": (
        "Attention",
        "",
        {},
        {"q": (None, None, 3, 4), "k": (1, 1, 3, 4), "v": (1, 1, 3, 4)},
        "the number of heads of its query",
    ),
    "a mask shorter than the keys": (
        "Attention",
        "",
        {},
        {"q": (1, 1, 3, 4), "k": (1, 1, 3, 4), "v": (1, 1, 3, 4), "m": (3, 2)},
        "its mask has fewer columns than there are keys",
    ),
    "packed in two": (
        "MultiHeadAttention",
        "com.microsoft",
        {"num_heads": 2},
        {"q": (1, 3, 2, 2, 4)},
        "its input q is not packed in 3",
    ),
    "an attribute of a later release": (
        "MultiHeadAttention",
        "com.microsoft",
        {"num_heads": 2, "novel": 1},
        {"q": (1, 3, 8), "k": (1, 3, 8), "v": (1, 3, 8)},
        "its attribute novel is not known",
    ),
    "pasts of many lengths": (
        "GroupQueryAttention",
        "com.microsoft",
        {"num_heads": 2, "kv_num_heads": 1},
        {"q": (2, 1, 8), "k": (2, 1, 4), "v": (2, 1, 4), "pk": (2, 1, 5, 4), "pv": (2, 1, 5, 4)},
        "its batch is not of the fixed size 1",
    ),
}


@pytest.mark.parametrize("name", STAY)
def test_a_form_that_is_not_handled_stays_and_says_why(name: str) -> None:
    op, domain, attributes, shapes, reason = STAY[name]
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    node = helper.make_node(op, list(shapes), ["y"], name="attend", domain=domain, **attributes)
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    imports = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(helper.make_graph([node], "g", inputs, [result]), opset_imports=imports)
    after, why = decompose(model)
    assert after == model
    assert why is not None
    assert why.startswith(f"left as they are: {op} 'attend': ")
    assert reason in why


def test_a_run_proves_it_and_carries_provenance(context: PassContext) -> None:
    feeds = {name: draw(seed, 1, 2, 4, 8) for seed, name in enumerate("qkv")}
    model = one_node("Attention", feeds, ["y"], opset=23)
    model = onnx.shape_inference.infer_shapes(model)
    result = passes.optimize(model, ["decompose-attention"], context=context)
    [row] = result.rows
    assert (row.changed, row.status, max(errors.max_abs for errors in row.errors.values()) < 1e-6) == (
        True,
        "ran",
        True,
    )
    assert {annotations_of(node).author for node in result.model.proto.graph.node} == {"decompose-attention"}
