"""Every fused kind against the ops that it stands for, in each of its forms: packed and unpacked, in every layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.nn import functional

from pipeline.errors import InternalError
from pipeline.ir.builder import Builder
from pipeline.ir.graph import Graph, TensorSpec
from pipeline.ops import GraphBuilder
from pipeline.ops.fused import ACTIVATIONS, PLAIN
from pipeline.runtime import compile_graph
from pipeline.runtime.capture.call_graphs import read_operator_calls
from pipeline.runtime.compile import CompiledProgram
from pipeline.runtime.kernels.packing import launch_pair_onto, pack_pair

KINDS = ("LinearPointwise", "FeedForward", "ConvPointwise", "ScaledDotProductAttention", "SmallAttention")
"""The kinds that this file compares."""

ATOL, RTOL = 2e-4, 2e-5
"""float32: sums of 288 to 1024 products of numbers near 1, in orders of their own."""

NUMBERS = {"clip": (-0.5, 1.5), "leaky_relu": (0.2,)}

TORCH = {
    "none": lambda x: x,
    "relu": torch.relu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "hardswish": functional.hardswish,
    "clip": lambda x: x.clamp(-0.5, 1.5),
    "leaky_relu": lambda x: functional.leaky_relu(x, 0.2),
}


def compile_one(
    kind: str, out: Sequence[int], attrs: dict[str, Any], fed: Sequence[torch.Tensor], stored: dict[int, torch.Tensor]
) -> tuple[CompiledProgram, dict[str, torch.Tensor]]:
    """`kind` with operands in order: those in `stored`, by position, are weights, the others are fed."""
    builder, rest = GraphBuilder("one"), list(fed)
    vids, feed = [], {}
    for at in range(len(fed) + len(stored)):
        tensor = stored[at] if at in stored else rest.pop(0)
        spec = TensorSpec(tuple(tensor.shape), "float32")
        vids.append(builder.param(f"in{at}", spec) if at in stored else builder.input(f"in{at}", spec))
        if at not in stored:
            feed[f"in{at}"] = tensor
    outs = builder.emit(kind, vids, [("y", TensorSpec(tuple(out), "float32"))], attrs)
    return compile_graph(builder.build(outs), {f"in{at}": tensor for at, tensor in stored.items()}), feed


def of_activation(name: str) -> dict[str, Any]:
    return {"activation": name, "numbers": NUMBERS.get(name, ())}


def assert_close(program: CompiledProgram, feed: dict[str, torch.Tensor], expected: torch.Tensor) -> None:
    """Twice, so that what a first run leaves behind is seen."""
    for _ in range(2):
        torch.testing.assert_close(program.run(feed)["y"], expected, atol=ATOL, rtol=RTOL)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("packed", [True, False])
def test_a_product_with_a_bias_and_every_activation(activation: str, packed: bool) -> None:
    x, weight, bias = torch.randn(2, 16, 512), torch.randn(1024, 512), torch.randn(1024)
    attrs = {"trans": True, "add": False, "bias": True, **of_activation(activation)}
    stored = {1: weight, 2: bias} if packed else {}
    program, feed = compile_one("LinearPointwise", (2, 16, 1024), attrs, [x] if packed else [x, weight, bias], stored)
    assert (program.packed_bytes > 0) == packed
    assert_close(program, feed, TORCH[activation](functional.linear(x, weight, bias)))


def test_a_product_without_bias_and_the_rows_of_a_transposed_input() -> None:
    """No strides can show these rows, so the product is by torch, also where the weight is packed."""
    builder = GraphBuilder("turned")
    x = builder.input("x", TensorSpec((64, 4, 256), "float32"))
    w = builder.param("w", TensorSpec((256, 256), "float32"))
    (turned,) = builder.emit(
        "aten.permute.default", [x], [("t", TensorSpec((4, 64, 256), "float32"))], {"dims": (1, 0, 2)}
    )
    attrs = {"trans": False, "add": False, "bias": False, **of_activation("relu")}
    (y,) = builder.emit("LinearPointwise", [turned, w], [("y", TensorSpec((4, 64, 256), "float32"))], attrs)
    tensors = {"x": torch.randn(64, 4, 256), "w": torch.randn(256, 256)}
    program = compile_graph(builder.build([y]), {"w": tensors["w"]})
    assert program.packed_bytes > 0
    assert_close(program, {"x": tensors["x"]}, (tensors["x"].transpose(0, 1) @ tensors["w"]).relu())


@pytest.mark.parametrize("activation", ["none", "gelu"])
@pytest.mark.parametrize(
    ("rows", "columns", "stored"),
    [(32, 1024, True), (32, 1031, True), (2, 24, True), (32, 1024, False)],
    ids=["in blocks", "by oneDNN", "small", "fed"],
)
@pytest.mark.parametrize("bias", [True, False])
def test_a_product_and_the_tensor_that_is_added_to_it(
    rows: int, columns: int, stored: bool, bias: bool, activation: str
) -> None:
    x, weight, other = torch.randn(1, rows, 512), torch.randn(columns, 512), torch.randn(1, rows, columns)
    operands = [x, weight, other, *([torch.randn(columns)] if bias else [])]
    attrs = {"trans": True, "add": True, "bias": bias, **of_activation(activation)}
    kept = {at: operands[at] for at in (1, 3)[: 1 + bias]} if stored else {}
    fed = [operand for at, operand in enumerate(operands) if at not in kept]
    program, feed = compile_one("LinearPointwise", (1, rows, columns), attrs, fed, kept)
    product = functional.linear(x, weight, operands[3] if bias else None)
    assert_close(program, feed, TORCH[activation](product) + other)


def test_a_sum_is_not_written_over_what_is_added() -> None:
    """Kernels write partial sums; `n` dies in the call, and would be lost before it is read."""
    builder, spec = GraphBuilder("layer"), TensorSpec((16, 64), "float32")
    x, w = builder.input("x", spec), builder.param("w", TensorSpec((64, 64), "float32"))
    (negated,) = builder.emit("aten.neg.default", [x], [("n", spec)])
    attrs = {"trans": True, "add": True, "bias": False, **of_activation("none")}
    (sum_,) = builder.emit("LinearPointwise", [x, w, negated], [("sum", spec)], attrs)
    (y,) = builder.emit("aten.neg.default", [sum_], [("y", spec)])
    weight = torch.randn(64, 64)
    program, fed = compile_graph(builder.build([y]), {"w": weight}), torch.randn(16, 64)
    assert "sum" not in [program.plan.slots[vid].name for vid in program.plan.alias]
    assert_close(program, {"x": fed}, fed - fed @ weight.t())


NAMES = ("first", "second")


def feed_forward(
    x: tuple[int, ...],
    other: str,
    biases: bool,
    *,
    activation: str = "gelu",
    turned: tuple[bool, bool] = (False, False),
) -> Graph:
    """Products of 256 and 64 columns; `other` is what is added: `dies`, `stays`, `x`, or nothing."""
    builder, rows = GraphBuilder("layers"), TensorSpec(x, "float32")
    fed = builder.input("x", rows)
    hidden = TensorSpec((*x[:-1], 256), "float32")
    first = builder.param("first", TensorSpec((64, 256) if turned[0] else (256, 64), "float32"))
    second = builder.param("second", TensorSpec((256, 64) if turned[1] else (64, 256), "float32"))
    (negated,) = builder.emit("aten.neg.default", [fed], [("n", rows)])
    added = {"dies": [negated], "stays": [negated], "x": [fed], "": []}[other]
    params = [builder.param(f"b{size}", TensorSpec((size,), "float32")) for size in (256, 64)] if biases else []
    attrs = {
        **{"trans_first": not turned[0], "trans_second": not turned[1], "add": bool(other)},
        **{"bias_first": biases, "bias_second": biases, **of_activation(activation)},
    }
    outs = [("sum", rows), ("hidden", hidden)]
    sum_, _ = builder.emit("FeedForward", [fed, first, second, *added, *params], outs, attrs)
    (y,) = builder.emit("aten.add.Tensor", [sum_, negated], [("both", rows)]) if other == "stays" else [sum_]
    (y,) = builder.emit("aten.neg.default", [y], [("y", rows)])
    return builder.build([y])


@pytest.mark.parametrize(
    ("rows", "bias", "hidden", "refusal"),
    [
        ((), (64,), (64,), r"ranks 1, 2 and 2; expected rows and two matrices"),
        ((8,), (1, 64), (8, 64), r"biases \[\[1, 64\]\]"),
        ((8,), (64,), (4, 64), r"hidden \[4, 64\]; expected \[8, 64\]"),
    ],
)
def test_no_bias_has_the_shape_of_the_result(
    rows: tuple[int, ...], bias: tuple[int, ...], hidden: tuple[int, ...], refusal: str
) -> None:
    """The result may be written over operand 3, which is the first bias where nothing is added."""
    builder, spec = GraphBuilder("layers"), TensorSpec((*rows, 64), "float32")
    x, w = builder.input("x", spec), builder.param("w", TensorSpec((64, 64), "float32"))
    attrs = {"trans_first": True, "trans_second": True, "add": False, "bias_first": True, "bias_second": False}
    ins = [x, w, w, builder.input("bias", TensorSpec(bias, "float32"))]
    with pytest.raises(InternalError, match=refusal):
        outs = [("y", spec), ("h", TensorSpec(hidden, "float32"))]
        builder.emit("FeedForward", ins, outs, {**attrs, **of_activation("relu")})


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize("other", ["dies", "stays", "x", ""])
def test_two_products_and_the_sum_after_them(other: str, biases: bool, packed: bool) -> None:
    """The sum is written over what is added where that dies, except where the products read it too."""
    graph = feed_forward((2, 64, 64), other, biases)
    tensors = {graph.values[vid].name: torch.randn(graph.values[vid].spec.sizes) / 8 for vid in graph.weight_names()}
    program = compile_graph(graph, tensors if packed else None)
    assert program.packed_bytes == packed * sum(tensors[name].nbytes for name in NAMES)
    overwritten = [program.plan.slots[vid].name for vid in program.plan.alias.values()]
    assert ("n" in overwritten) == (other == "dies")
    x = torch.randn(2, 64, 64)
    inner = functional.gelu(functional.linear(x, tensors["first"], tensors.get("b256")))
    expected = functional.linear(inner, tensors["second"], tensors.get("b64"))
    expected = expected + {"dies": -x, "stays": -x, "x": x, "": torch.zeros(())}[other]
    expected = -(expected - x if other == "stays" else expected)
    assert_close(program, {"x": x, **({} if packed else tensors)}, expected)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("packed", [True, False])
def test_two_products_with_every_activation(activation: str, packed: bool) -> None:
    graph = feed_forward((128, 64), "", biases=False, activation=activation, turned=(True, True))
    tensors = {"first": torch.randn(64, 256) / 8, "second": torch.randn(256, 64) / 8}
    x = torch.randn(128, 64)
    program = compile_graph(graph, tensors if packed else None)
    expected = -(TORCH[activation](x @ tensors["first"]) @ tensors["second"])
    assert_close(program, {"x": x, **({} if packed else tensors)}, expected)


@pytest.mark.parametrize("fixed", [("first",), ("second",), NAMES])
@pytest.mark.parametrize("turned", [(True, False), (False, True)])
def test_two_products_of_matrices_in_either_layout_one_of_them_fed(
    turned: tuple[bool, bool], fixed: tuple[str, ...]
) -> None:
    """One matrix may have its columns side by side, and one may come with the feed: then neither is packed."""
    graph = feed_forward((128, 64), "", biases=True, turned=turned)
    tensors = {graph.values[vid].name: torch.randn(graph.values[vid].spec.sizes) / 8 for vid in graph.weight_names()}
    program = compile_graph(graph, {name: tensors[name] for name in fixed})
    assert (program.packed_bytes > 0) == (len(fixed) == 2)
    first, second = (tensors[name].t() if turns else tensors[name] for name, turns in zip(NAMES, turned, strict=True))
    x = torch.randn(128, 64)
    inner = functional.gelu(functional.linear(x, first, tensors["b256"]))
    feed = {"x": x, **{name: tensor for name, tensor in tensors.items() if name not in fixed}}
    assert_close(program, feed, -functional.linear(inner, second, tensors["b64"]))


def test_a_pair_is_packed_where_that_pays_for_both_and_takes_rows() -> None:
    large, small = torch.zeros(64, 64), torch.zeros(1, 64)
    packed = pack_pair(256, large, large)
    assert packed is not None
    assert pack_pair(256, large, small) is None
    x, out = torch.zeros(4, 64, 64), torch.zeros(4, 64, 64)
    assert launch_pair_onto(packed, x, (None, None), out, PLAIN) is not None
    assert launch_pair_onto(packed, x.transpose(0, 1), (None, None), out, PLAIN) is None


def test_two_products_are_replayed_as_operators_of_torch() -> None:
    """Python passes no result on, so C++ walks them; the replay has the bits of the run."""
    graph = feed_forward((2, 64, 64), "dies", biases=True)
    weights = {graph.values[vid].name: torch.randn(graph.values[vid].spec.sizes) for vid in graph.weight_names()}
    program, feed = compile_graph(graph, weights), {"x": torch.randn(2, 64, 64)}
    calls = [call.name for launch in program.context._launches for call in read_operator_calls(launch)]
    assert calls == ["aten::neg", *("mkldnn::_convolution_pointwise", "mkldnn::_convolution_pointwise_"), "aten::neg"]
    torch.testing.assert_close(program.replay(feed)["y"], program.run(feed)["y"], atol=0, rtol=0)


@pytest.mark.parametrize("activation", ["none", "relu", "silu"])
@pytest.mark.parametrize("add", [True, False])
@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_a_convolution_with_norm_sum_and_activation(
    activation: str, add: bool, channels_last: bool, packed: bool
) -> None:
    x, other = torch.randn(2, 32, 12, 12), torch.randn(2, 64, 12, 12)
    weight, bias = torch.randn(64, 32, 3, 3), torch.randn(64)
    norm = [torch.rand(64), torch.randn(64), torch.randn(64), torch.rand(64) + 0.5]
    attrs = {
        "strides": (1, 1),
        "pads": (1, 1),
        "dilations": (1, 1),
        "group": 1,
        "add": add,
        "bias": True,
        "norm": True,
        "epsilon": 1e-3,
        "channels_last": channels_last,
        **of_activation(activation),
    }
    images = [tensor.permute(0, 2, 3, 1).contiguous() if channels_last else tensor for tensor in (x, other)]
    weights = [bias, *norm]
    first = 2 + add
    stored = {1: weight, **dict(enumerate(weights, start=first))}
    fed = [images[0], *([images[1]] if add else [])]
    if not packed:
        stored, fed = {}, [images[0], weight, *fed[1:], *weights]
    sizes = (2, 12, 12, 64) if channels_last else (2, 64, 12, 12)
    program, feed = compile_one("ConvPointwise", sizes, attrs, fed, stored)
    assert (program.packed_bytes > 0) == packed
    convolved = functional.conv2d(x, weight, bias, padding=1)
    y = functional.batch_norm(convolved, norm[2], norm[3], norm[0], norm[1], eps=1e-3)
    expected = TORCH[activation](y + other if add else y)
    assert_close(program, feed, expected.permute(0, 2, 3, 1) if channels_last else expected)


@pytest.mark.parametrize("relu", [True, False])
def test_a_convolution_is_added_in_place_to_what_dies(relu: bool) -> None:
    """The sum of a residual block, whose operand nobody reads afterwards."""
    image = TensorSpec((1, 12, 12, 32), "float32")
    builder = GraphBuilder("block")
    x, w = builder.input("x", image), builder.param("w", TensorSpec((32, 32, 3, 3), "float32"))
    (other,) = builder.emit("aten.neg.default", [x], [("other", image)])
    attrs = {
        **{"strides": (1, 1), "pads": (1, 1), "dilations": (1, 1), "group": 1, "epsilon": 0.0},
        **{"add": True, "bias": False, "norm": False, "channels_last": True},
        **of_activation("relu" if relu else "none"),
    }
    (sum_,) = builder.emit("ConvPointwise", [x, w, other], [("sum", image)], attrs)
    (y,) = builder.emit("aten.neg.default", [sum_], [("y", image)])
    tensors = {"x": torch.randn(1, 12, 12, 32), "w": torch.randn(32, 32, 3, 3)}
    program = compile_graph(builder.build([y]), {"w": tensors["w"]})
    assert program.plan.alias[sum_] == other
    first = tensors["x"].permute(0, 3, 1, 2)
    added = functional.conv2d(first, tensors["w"], padding=1) - first
    expected = -(added.relu() if relu else added)
    assert_close(program, {"x": tensors["x"]}, expected.permute(0, 2, 3, 1))


PLAIN_ATTENTION = {"mask": False, "causal": False, "backend": "auto"}


@pytest.mark.parametrize("backend", ["auto", "math", "flash"])
@pytest.mark.parametrize("causal", [False, True])
def test_each_backend_of_the_cpu_computes_attention(backend: str, causal: bool) -> None:
    fed = [torch.randn(2, 3, 5, 8) for _ in range(3)]
    attrs = {"scale": 0.3, "mask": False, "causal": causal, "backend": backend}
    program, feed = compile_one("ScaledDotProductAttention", (2, 5, 3, 8), attrs, fed, {})
    expected = functional.scaled_dot_product_attention(*fed, is_causal=causal, scale=0.3)
    assert_close(program, feed, expected.transpose(1, 2))


def test_an_unknown_backend_is_refused() -> None:
    fed = [torch.ones(1, 3, 5, 8) for _ in range(3)]
    attrs = {"scale": 0.3, **PLAIN_ATTENTION, "backend": "fast"}
    with pytest.raises(InternalError, match="attr backend='fast'; expected one of"):
        compile_one("ScaledDotProductAttention", (1, 5, 3, 8), attrs, fed, {})


@pytest.mark.parametrize("mask", [None, torch.zeros(1, 1, 1, 7), torch.randn(2, 3, 5, 7)])
def test_attention_with_and_without_a_mask(mask: torch.Tensor | None) -> None:
    query, key, value = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 7, 8), torch.randn(2, 3, 7, 8)
    fed = [query, key, value, *([] if mask is None else [mask])]
    attrs = {"scale": 0.3, "mask": mask is not None, "causal": False, "backend": "auto"}
    program, feed = compile_one("ScaledDotProductAttention", (2, 5, 3, 8), attrs, fed, {})
    scores = query @ key.transpose(2, 3) * 0.3 + (0 if mask is None else mask)
    assert_close(program, feed, (scores.softmax(-1) @ value).transpose(1, 2))


def small_attention(batch: int, scores: tuple[int, ...]) -> tuple[Builder, list[int]]:
    """Of five queries and seven keys, in three heads of width eight."""
    builder = GraphBuilder("attention")
    operands = [
        builder.input(name, TensorSpec((batch, 3, tokens, 8), "float32"))
        for name, tokens in (("q", 5), ("k", 7), ("v", 7))
    ]
    outs = [("y", TensorSpec((batch, 5, 3, 8), "float32")), ("scores", TensorSpec(scores, "float32"))]
    return builder, list(builder.emit("SmallAttention", operands, outs, {"scale": 0.3}))


@pytest.mark.parametrize("batch", [1, 2])
def test_attention_of_few_tokens(batch: int) -> None:
    builder, outs = small_attention(batch, (batch, 3, 5, 7))
    program = compile_graph(builder.build(outs[:1]))
    query, key, value = torch.randn(batch, 3, 5, 8), torch.randn(batch, 3, 7, 8), torch.randn(batch, 3, 7, 8)
    scores = query @ key.transpose(2, 3) * 0.3
    assert_close(program, {"q": query, "k": key, "v": value}, (scores.softmax(-1) @ value).transpose(1, 2))


def test_the_scores_of_attention_are_of_each_query_and_key() -> None:
    with pytest.raises(InternalError, match=r"scores \[1, 3, 7, 5\]; expected \[1, 3, 5, 7\]"):
        small_attention(1, (1, 3, 7, 5))


@pytest.mark.parametrize("shapes", [[(1, 3, 50, 8), (1, 3, 5, 8)], [(1, 3, 50, 4), (1, 3, 50, 8)]])
def test_keys_and_values_fit_each_other(shapes: list[tuple[int, ...]]) -> None:
    """torch's kernel reads beyond values that are fewer than the keys."""
    fed = [torch.ones(shape) for shape in [(1, 3, 5, 8), *shapes]]
    with pytest.raises(InternalError, match="expected as many values as keys, and keys as wide as queries"):
        compile_one("ScaledDotProductAttention", (1, 5, 3, 8), {"scale": 0.3, **PLAIN_ATTENTION}, fed, {})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"activation": "mish"}, "attr activation='mish'; expected one of"),
        ({"activation": "clip", "numbers": (1.0,)}, "attr numbers=\\(1.0,\\); clip has 2"),
        ({"bias": True}, "2 inputs; expected 3 by add, bias"),
    ],
)
def test_a_wrong_call_is_refused_when_it_is_built(given: dict[str, Any], said: str) -> None:
    attrs = {"trans": False, "add": False, "bias": False, "activation": "none", "numbers": (), **given}
    with pytest.raises(InternalError, match=said):
        compile_one("LinearPointwise", (2, 2), attrs, [torch.ones(2, 2), torch.ones(2, 2)], {})
