"""Small programs that tests of captures run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pipeline.ir.graph import Graph, TensorSpec
from pipeline.ops import GraphBuilder
from pipeline.runtime import CompiledProgram, compile_graph
from tests.support.planning_graphs import Stored

PAIR = TensorSpec((2,), "float32")
COUNT = TensorSpec((), "int64")


def stored(values: object, dtype: str = "float32") -> Stored:
    return Stored(np.array(values, dtype))


def train_graph(*, weight: bool = True, scale: bool = True) -> Graph:
    """w ← w - scale · x and step ← step + 1; `y` is the new w · x. Without payloads both come with a feed."""
    builder = GraphBuilder("train")
    x = builder.input("x", PAIR)
    w = builder.state("w", PAIR, stored([1, 2]) if weight else None)
    step = builder.state("step", COUNT, stored(0, "int64"))
    factor = builder.param("scale", PAIR, stored([0.5, 0.5]) if scale else None)
    one = builder.const("one", COUNT, stored(1, "int64"))
    (change,) = builder.emit("aten.mul.Tensor", [x, factor], [("change", PAIR)])
    (after,) = builder.emit("aten.sub.Tensor", [w, change], [("after", PAIR)])
    (y,) = builder.emit("aten.mul.Tensor", [after, x], [("y", PAIR)])
    (counted,) = builder.emit("aten.add.Tensor", [step, one], [("counted", COUNT)])
    return replace(builder.build([y]), updates={w: after, step: counted})


def negate(spec: TensorSpec = PAIR, calls: int = 1) -> CompiledProgram:
    """`y`: x, negated so many times."""
    builder = GraphBuilder("negate")
    value = builder.input("x", spec)
    for at in range(calls):
        (value,) = builder.emit("aten.neg.default", [value], [("y" if at == calls - 1 else f"v{at}", spec)])
    return compile_graph(builder.build([value]))


def sum_with(*, fed: bool) -> CompiledProgram:
    """`y`: x + w, with the parameter w of [10, 20], or from the feed."""
    builder = GraphBuilder("sum")
    x, w = builder.input("x", PAIR), builder.param("w", PAIR, None if fed else stored([10, 20]))
    return compile_graph(builder.build(builder.emit("aten.add.Tensor", [x, w], [("y", PAIR)])))
