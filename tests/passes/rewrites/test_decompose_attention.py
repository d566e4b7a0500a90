"""Attention spelled out: before and after as pictures, and the same numbers as onnxruntime's kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper

from passes.rewrites.decompose_attention import DecomposeAttention
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
