"""Graphs that declare other sizes than their calls have: a kernel in C++ would read or write beyond its operands.

So none takes such a call: it runs, or fails with its name, as without kernels in C++.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipeline.errors import InternalError, UsageError
from pipeline.ir.graph import TensorSpec
from pipeline.ops import GraphBuilder
from pipeline.runtime import CompiledProgram, compile_graph
from tests.support.native import native_library

PRODUCT = {"trans": False, "add": False, "bias": False, "activation": "none", "numbers": ()}
CONV = {
    **{"strides": (1, 1), "pads": (0, 0), "dilations": (1, 1), "group": 1, "add": False, "bias": False},
    **{"norm": False, "epsilon": 0.0, "channels_last": True, "activation": "none", "numbers": ()},
}
SCALE = {"scale": 0.5}
ATTENTION = {**SCALE, "mask": False, "causal": False, "backend": "auto"}
NORM = {"normalized_shape": (8,), "eps": 1e-5}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    native_library()
    torch.set_num_threads(1)


Sizes = tuple[int, ...]


def program_of(kind: str, ins: list[Sizes], outs: list[Sizes], attrs: dict[str, Any], native: bool) -> CompiledProgram:
    """One call, whose second operand is stored where it is a weight."""
    builder, weights = GraphBuilder("call"), {}
    operands = [builder.input("x", TensorSpec(ins[0], "float32"))]
    for at, sizes in enumerate(ins[1:]):
        name, spec = f"operand{at}", TensorSpec(sizes, "float32")
        is_stored = kind in ("LinearPointwise", "ConvPointwise") and at == 0
        operands.append(builder.param(name, spec) if is_stored else builder.input(name, spec))
        if is_stored:
            weights[name] = torch.ones(sizes)
    made = [(f"y{at}", TensorSpec(sizes, "float32")) for at, sizes in enumerate(outs)]
    return compile_graph(builder.build(builder.emit(kind, operands, made, attrs)), weights, native=native)


@pytest.mark.parametrize(
    ("kind", "ins", "outs", "attrs"),
    [
        pytest.param("aten.matmul.default", [(4, 80), (16, 4)], [(4, 4)], {}, id="depths"),
        pytest.param("aten.matmul.default", [(4, 8), (8, 4)], [(2, 8)], {}, id="result of as many numbers"),
        pytest.param("aten.matmul.default", [(2, 4, 8), (8, 4)], [(4, 2, 4)], {}, id="batch of the result"),
        pytest.param("ReluProduct", [(4, 8), (80, 4)], [(4, 4)], {"bias": False, "gate": False}, id="near depths"),
        pytest.param("ReluProduct", [(4, 8), (8, 4)], [(40, 40)], {"bias": False, "gate": False}, id="near result"),
        pytest.param("LinearPointwise", [(4, 80), (16, 4)], [(4, 4)], PRODUCT, id="depth of a stored matrix"),
        pytest.param("ConvPointwise", [(1, 9, 9, 8), (4, 4, 1, 1)], [(1, 9, 9, 4)], CONV, id="channels of one pixel"),
        pytest.param("ConvPointwise", [(1, 9, 9, 4), (4, 4, 1, 1)], [(1, 9, 9, 8)], CONV, id="columns of one pixel"),
        pytest.param("ConvPointwise", [(1, 9, 9, 4), (4, 4, 3, 3)], [(1, 9, 9, 4)], CONV, id="sides of tiles"),
        pytest.param("ConvPointwise", [(2, 9, 9, 4), (4, 4, 3, 3)], [(1, 7, 7, 4)], CONV, id="images of tiles"),
        pytest.param("ConvPointwise", [(1, 9, 9, 3), (4, 2, 2, 2)], [(1, 8, 8, 4)], CONV, id="channels of lines"),
        pytest.param("aten.softmax.int", [(4, 8)], [(4, 4)], {"dim": 1}, id="softmax"),
        pytest.param("aten.layer_norm.default", [(4, 8), (8,)], [(4, 4)], NORM, id="norm"),
        pytest.param("aten.gelu.default", [(4, 8)], [(4, 4)], {"approximate": "none"}, id="activation"),
        pytest.param(
            "SmallAttention",
            [(1, 4, 3, 8), (1, 1, 5, 8), (1, 1, 5, 8)],
            [(1, 3, 4, 8), (1, 4, 3, 5)],
            SCALE,
            id="heads of keys",
        ),
        pytest.param(
            "SmallAttention",
            [(1, 2, 3, 8), (1, 2, 5, 8), (1, 2, 5, 8)],
            [(1, 2, 3, 8), (1, 2, 3, 5)],
            SCALE,
            id="result by head",
        ),
        pytest.param(
            "ScaledDotProductAttention",
            [(1, 2, 3, 80), (1, 2, 5, 8), (1, 2, 5, 8)],
            [(1, 3, 2, 8)],
            ATTENTION,
            id="widths of queries and keys",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_sizes_that_do_not_fit_are_named_as_by_torch(
    kind: str, ins: list[Sizes], outs: list[Sizes], attrs: Any
) -> None:
    said = []
    for native in (False, True):
        with pytest.raises((InternalError, UsageError)) as refusal:
            run(program_of(kind, ins, outs, attrs, native))
        said.append(str(refusal.value))
    assert said[0] == said[1]


def run(program: CompiledProgram) -> dict[str, torch.Tensor]:
    slots = [program.plan.slots[vid] for vid in program.plan.inputs]
    return program.run({slot.name: torch.linspace(-1, 1, slot.spec.numel).view(slot.spec.sizes) for slot in slots})


@pytest.mark.parametrize(
    ("query", "key", "value"),
    [
        pytest.param((1, 2, 3, 8), (1, 2, 5, 8), (1, 2, 5, 16), id="wider values"),
        pytest.param((1, 4, 3, 8), (1, 1, 5, 8), (1, 1, 5, 8), id="one head of keys for all"),
        pytest.param((4, 2, 3, 8), (1, 2, 5, 8), (1, 2, 5, 8), id="one batch entry of keys for all"),
    ],
)
def test_attention_of_sizes_that_only_torch_knows(query: Sizes, key: Sizes, value: Sizes) -> None:
    ins, outs = [query, key, value], [(query[0], query[2], query[1], value[3])]
    program, plain = (program_of("ScaledDotProductAttention", ins, outs, ATTENTION, native) for native in (True, False))
    assert program.native_calls == 0
    assert torch.equal(run(program)["y0"], run(plain)["y0"])
