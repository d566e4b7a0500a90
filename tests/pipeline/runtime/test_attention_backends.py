"""On a device other than the CPU a plan says which kernel of torch computes each attention."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from onnxline import Builder
from pipeline.errors import Unsupported, UsageError
from pipeline.importers.from_torch import from_torch, functionalize_program
from pipeline.ir.graph import Graph, TensorSpec
from pipeline.ops import Kind, unpack
from pipeline.runtime import CompiledProgram, RecordingDevice, compile_graph
from pipeline.runtime.eager import run_eager
from pipeline.runtime.kernels.attention import attention_call, find_backend, in_aligned_rows
from tests.support.torch_programs import Calls, feed_of


class Attention(torch.nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *masks: torch.Tensor
    ) -> torch.Tensor:
        return scaled_dot_product_attention(query, key, value, *masks, **self.options)  # pyright: ignore[reportArgumentType]


class ByWidth(torch.nn.Module):
    """The last two axes of keys, and of values and the mask if so, are swapped: views whose last axis has gaps."""

    def __init__(self, *, values: bool = False, mask: bool = False) -> None:
        super().__init__()
        self.values, self.mask = values, mask

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        swapped = mask.mT if self.mask and mask is not None else mask
        return scaled_dot_product_attention(query, key.mT, value.mT if self.values else value, swapped)


def graph_of(module: torch.nn.Module, operands: list[torch.Tensor]) -> Graph:
    return from_torch(functionalize_program(torch.export.export(module, tuple(operands), strict=False)))


def draw(heads: int = 2, tokens: int = 5, width: int = 8) -> torch.Tensor:
    return torch.randn(1, heads, tokens, width)


def backends_of(program: CompiledProgram) -> list[str]:
    calls = [call for call in program.plan.calls if call.kind_id == Kind.ScaledDotProductAttention]
    return [unpack(call.attr_schema, call.attr_blob)["backend"] for call in calls]


CASES = {
    "plain": (Attention(), [draw(), draw(), draw()], "flash"),
    "causal, with a scale": (Attention(is_causal=True, scale=0.7), [draw(), draw(), draw()], "flash"),
    "a mask": (Attention(), [draw(), draw(), draw(), torch.randn(1, 1, 5, 5)], "flash"),
    "an empty width": (Attention(scale=1.0), [draw(width=0), draw(width=0), draw()], "math"),
    "heads by token": (Attention(), [draw(4, 16).transpose(1, 2).contiguous().transpose(1, 2)] * 3, "flash"),
    "keys by width": (ByWidth(), [draw(), draw().mT.contiguous(), draw()], "flash"),
    "keys and values by width": (ByWidth(values=True), [draw(), *[draw().mT.contiguous()] * 2], "flash"),
    "a mask by columns": (
        ByWidth(mask=True),
        [draw(), draw().mT.contiguous(), draw(), torch.randn(1, 1, 5, 5)],
        "flash",
    ),
    "truth values": (Attention(), [draw(), draw(), draw(), torch.ones(1, 1, 5, 5, dtype=torch.bool)], None),
    "heads that share keys": (Attention(enable_gqa=True), [draw(4), draw(), draw()], None),
    "one head of keys for all": (Attention(), [draw(4), draw(1), draw(1)], None),
    "float64": (Attention(), [draw().double()] * 3, None),
    "a mask of another dtype": (Attention(), [draw().half()] * 3 + [torch.randn(1, 1, 5, 5)], None),
    "three axes": (Attention(), [draw()[0], draw()[0], draw()[0]], None),
}
"""Name → module, operands, and the backend that torch chooses on the CPU; None where torch chooses at each call."""


@pytest.mark.parametrize("name", CASES)
def test_the_plan_has_torch_s_choice(name: str) -> None:
    module, operands, backend = CASES[name]
    graph = graph_of(module, operands)
    program = compile_graph(graph, device=RecordingDevice())
    assert backends_of(program) == ([] if backend is None else [backend])
    feed = {graph.values[vid].name: tensor for vid, tensor in zip(graph.inputs, operands, strict=True)}
    for run in (program.run, program.replay):
        (found,) = run(feed).values()
        torch.testing.assert_close(found, module(*operands))  # float32, by the same kernel


def test_the_cpu_keeps_torch_s_operator() -> None:
    module, operands, _ = CASES["plain"]
    program = compile_graph(graph_of(module, operands))
    assert not backends_of(program)


@pytest.mark.parametrize(
    ("backend", "device", "mask", "message"),
    [
        ("efficient", "cpu", False, "'efficient': cpu has no such kernel; expected one of auto, math, flash"),
        ("flash", "cuda", True, "'flash': its kernel of cuda takes no mask; expected 'auto' or another one"),
    ],
)
def test_a_kernel_that_cannot_take_a_call_is_refused(backend: str, device: str, mask: bool, message: str) -> None:
    with pytest.raises(Unsupported, match=re.escape(message)):
        attention_call(backend, device, mask=mask)


def test_a_backend_that_the_device_lacks_is_refused_and_no_bug_of_ours() -> None:
    builder, spec = Builder("g"), TensorSpec((1, 2, 5, 8), "float32")
    operands = [builder.input(name, spec) for name in ("query", "key", "value")]
    attrs: dict[str, Any] = {"scale": 1.0, "mask": False, "causal": False, "backend": "cudnn"}
    out = builder.emit("ScaledDotProductAttention", operands, [("y", TensorSpec((1, 5, 2, 8), "float32"))], attrs)
    with pytest.raises(Unsupported, match="cpu has no such kernel"):
        compile_graph(builder.build(out)).run({name: draw() for name in ("query", "key", "value")})
    mask = builder.input("mask", TensorSpec((1, 1, 5, 5), "float32"))
    with pytest.raises(UsageError, match="a mask, and causal=True; expected one of them"):
        attrs |= {"mask": True, "causal": True, "backend": "auto"}
        builder.emit(
            "ScaledDotProductAttention", [*operands, mask], [("z", TensorSpec((1, 5, 2, 8), "float32"))], attrs
        )


def test_masks_of_a_gpu_s_kernels_have_aligned_rows() -> None:
    whole = torch.randn(1, 1, 3, 32)
    assert in_aligned_rows(None) is None and in_aligned_rows(whole) is whole
    for mask in (
        torch.randn(1, 1, 3, 33)[..., 1:].expand(2, 4, 3, 32),
        torch.randn(1, 1, 32, 3).mT,
        whole[..., :1].expand(1, 1, 3, 32),
    ):
        found = in_aligned_rows(mask)
        assert found is not None and torch.equal(found, mask)
        assert found.stride(-1) == 1 and not any(stride % 16 for stride in found.stride()[:-1])
        assert found.untyped_storage().nbytes() == 3 * 32 * 4, "what is repeated is not copied"


@pytest.mark.parametrize(
    ("chosen", "width", "keys", "backend"),
    [
        (1, 64, None, "flash"),
        (1, 60, None, "auto"),
        (2, 60, 48, "efficient"),
        (2, 64, 40, "auto"),
        (3, 64, 40, "auto"),
        (3, 64, None, "cudnn"),
        (0, 60, 40, "math"),
        (4, 64, None, "auto"),
    ],
)
def test_operands_that_a_kernel_of_a_gpu_needs_padded_stay_with_torch(
    monkeypatch: pytest.MonkeyPatch, chosen: int, width: int, keys: int | None, backend: str
) -> None:
    """On meta, since there is no card: torch has no choice there, so each choice is given."""
    monkeypatch.setattr(torch.ops.aten, "_fused_sdp_choice", lambda *_, **__: chosen)
    query = torch.empty(1, 2, 8, width, device="meta")
    mask = None if keys is None else torch.empty(1, 2, 8, keys, device="meta")
    assert find_backend(query, query, query, mask, False, 1.0) == backend
    narrow = torch.empty(1, 2, 8, 12, device="meta")
    assert (find_backend(query, query, narrow, mask, False, 1.0) == "auto") is (chosen == 1 or backend == "auto")


@pytest.mark.parametrize("is_causal", [False, True])
def test_torch_is_asked_about_the_very_call(monkeypatch: pytest.MonkeyPatch, is_causal: bool) -> None:
    """On the CPU its choice is the same for causal attention, and on a GPU it need not be."""
    asked = list[Any]()
    monkeypatch.setattr(torch.ops.aten, "_fused_sdp_choice", lambda *args, scale: asked.append((args[3:], scale)) or 0)
    graph = graph_of(Attention(is_causal=is_causal, scale=0.7), [draw()] * 3)
    assert backends_of(compile_graph(graph, device=RecordingDevice())) == ["math"]
    assert asked == [((None, 0.0, is_causal), 0.7)]


@pytest.mark.parametrize("sizes", [(0, 2, 3, 8), (3, 0, 3, 8), (3, 2, 0, 8)], ids=str)
def test_attention_of_nothing_is_computed_by_products(sizes: tuple[int, ...]) -> None:
    """A kernel of the CPU that torch chooses for no heads ends the process, since it divides by their number."""
    operands = [torch.empty(sizes) for _ in range(3)]
    graph = graph_of(Attention(), operands)
    program = compile_graph(graph, device=RecordingDevice(2**20))
    assert backends_of(program) == ["math"]
    feed = {graph.values[vid].name: operand for vid, operand in zip(graph.inputs, operands, strict=True)}
    (found,) = program.run(feed).values()
    assert found.shape == sizes


def flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    made = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)
    gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        made[0], query, key, value, *made, 0.0, False
    )
    return *made, *gradients


@pytest.mark.parametrize(
    ("heads", "queries", "keys"), [(0, 3, 4), (2, 0, 4), (2, 3, 0), (2, 3, 4)], ids=("heads", "queries", "keys", "all")
)
def test_a_kernel_of_the_cpu_that_a_program_calls_computes_nothing_too(heads: int, queries: int, keys: int) -> None:
    """torch's own kernel divides by their numbers, which ends the process; so do the checks that try small calls."""
    ins = [draw(heads, queries), draw(heads, keys), draw(heads, keys)]
    graph = graph_of(Calls([lambda *given: tuple(part + 0 for part in flash(*given))]), ins)
    found = list(compile_graph(graph).run(feed_of(graph, ins)).values())
    for made in (found, run_eager(graph, feed_of(graph, ins)).outputs.values()):
        for ours, wanted in zip(made, flash(*ins) if heads and queries and keys else [], strict=False):
            torch.testing.assert_close(ours, wanted)
    assert [list(part.shape) for part in found[:2]] == [[1, heads, queries, 8], [1, heads, queries]]
    assert [part.shape for part in found[2:]] == [operand.shape for operand in ins]
    if not keys:
        assert not found[0].any() and found[1].isneginf().all()
    query, key, value = ins
    named = attention_call("flash", "cpu", mask=False)(query, key, value, None, False, 8**-0.5)
    torch.testing.assert_close(named, found[0])
