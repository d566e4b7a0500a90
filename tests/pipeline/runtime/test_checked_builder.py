"""onnxline.Builder refuses a wrong op where it is emitted, and has what seed document 004 names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pipeline.errors import UsageError
from pipeline.ir import TensorSpec, from_text, to_text
from pipeline.runtime import CheckedBuilder, compile_graph

F23, F44 = TensorSpec((2, 3), "float32"), TensorSpec((4, 4), "float32")


def test_states_are_updated_and_values_are_declared_first() -> None:
    builder = CheckedBuilder("counter")
    x, total = builder.input("x", F23), builder.state("total", F23)
    after = builder.value("after", F23)
    assert builder.emit("aten.add.Tensor", [total, x], [after], hints={"lane": 2}, saved=(0, 2)) == (after,)
    builder.update(total, after)
    graph = builder.build([after])
    assert from_text(to_text(graph)) == graph
    op = graph.ops[0]
    assert (dict(op.hints), op.saved, graph.updates) == ({"lane": 2}, (0, 2), {total: after})
    program = compile_graph(graph, {"total": torch.zeros(2, 3)})
    program.run({"x": torch.ones(2, 3)})
    assert program.run({"x": torch.ones(2, 3)})["after"].unique().tolist() == [2.0]


MISTAKES: dict[str, tuple[Callable[[CheckedBuilder, int], Any], str]] = {
    "a shape": (
        lambda b, x: b.emit("aten.relu.default", [x], [("y", F44)], name="act"),
        r"^op aten.relu.default 'act': found float32\[4, 4\] for what it makes, expected float32\[2, 3\]$",
    ),
    "a dtype": (
        lambda b, x: b.emit("aten.eq.Scalar", [x], [("y", F23)], {"other": 1}),
        r"found float32\[2, 3\] for what it makes, expected bool\[2, 3\]",
    ),
    "operands": (
        lambda b, x: b.emit("aten.mm.default", [x, x], [("y", F23)]),
        r"torch refuses it on float32\[2, 3\], float32\[2, 3\] \(",
    ),
    "no such operator": (
        lambda b, x: b.emit("aten.no_such.default", [x], [("y", F23)]),
        "^op aten.no_such.default: torch",
    ),
    "no such kind": (
        lambda b, x: b.emit("Relu", [x], [("y", F23)]),
        "op Relu: there is no operator of this name; expected one of torch",
    ),
    "an unknown vid": (lambda b, x: b.emit("aten.relu.default", [x + 7], [("y", F23)]), r"reads vids \[7\]"),
    "a value that nothing makes": (lambda b, x: b.build([b.value("y", F23)]), "'y'"),
    "an update of another shape": (
        lambda b, x: (b.update(b.state("s", F44), x), b.build([x])),
        r"'s' is float32\[4, 4\], and its update",
    ),
    "a place that is not there": (
        lambda b, x: b.build(b.emit("aten.relu.default", [x], [("y", F23)], saved=(2,))),
        "saves the place 2; it has 2 inputs and outputs",
    ),
}


@pytest.mark.parametrize("emit, said", MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_the_callers(emit: Callable[[CheckedBuilder, int], Any], said: str) -> None:
    builder = CheckedBuilder("wrong")
    x = builder.input("x", F23)
    with pytest.raises(UsageError, match=said):
        emit(builder, x)
