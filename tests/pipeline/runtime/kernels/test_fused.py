"""Every fused kind against the ops that it stands for, in each of its forms: packed and unpacked, in every layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.nn import functional

from pipeline.errors import InternalError
from pipeline.ir.builder import Builder
from pipeline.ir.graph import TensorSpec
from pipeline.ops import GraphBuilder
from pipeline.ops.fused import ACTIVATIONS
from pipeline.runtime import CompiledProgram, compile_graph

KINDS = ("LinearPointwise", "ConvPointwise", "ScaledDotProductAttention", "SmallAttention")
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
