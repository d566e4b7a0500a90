"""A graph that was imported without emitters compiles as it is."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from pipeline.errors import Unsupported, UsageError
from pipeline.importers import from_onnx
from pipeline.ir import TensorSpec
from pipeline.ir.builder import Builder
from pipeline.lowering import lower, with_kernels
from pipeline.ops import GraphBuilder, emitter_of
from pipeline.planning import make_plan
from pipeline.runtime import compile_graph, compile_graphs
from pipeline.runtime.compile import bind_graph

TEXT = """
<ir_version: 9, opset_import: ["": 20]>
g (float[2, 3] x) => (float[2, 3] y) { a = Relu (x) y = Softmax <axis = 1> (a) }
"""


def test_emitters_that_come_late_fix_the_same_calls() -> None:
    model = onnx.parser.parse_model(TEXT)
    early, late = from_onnx(model, emitter_of=emitter_of), from_onnx(model)
    assert [op.kernel for op in late.ops] == [None, None]
    assert with_kernels(late) == early
    assert with_kernels(early) is early


def test_compile_and_run() -> None:
    x = np.array([[1, 2, -3], [0, 0, 0]], np.float32)
    (y,) = compile_graph(from_onnx(onnx.parser.parse_model(TEXT))).run({"x": x}).values()
    positive = np.maximum(x, 0)
    expected = np.exp(positive) / np.exp(positive).sum(1, keepdims=True)
    np.testing.assert_allclose(y.numpy(), expected, rtol=1e-6)


def test_an_unknown_kind_is_still_listed() -> None:
    builder = Builder("g")
    spec = TensorSpec((2,), "float32")
    (value,) = builder.emit("Frobnicate", [builder.input("x", spec)], [("y", spec)])
    with pytest.raises(Unsupported, match="Frobnicate"):
        compile_graph(builder.build([value]))


@pytest.mark.parametrize("shape", [(2**31, 2**31), (0, 2**62, 2**62), (10**30,)])
def test_sizes_that_no_machine_has_are_refused(shape: tuple[int, ...]) -> None:
    """As a file may claim them; without elements they are no better, since strides are counted without the 0."""
    builder = GraphBuilder("g")
    spec = TensorSpec(shape, "float32")
    (y,) = builder.emit("aten.relu.default", [builder.input("x", spec)], [("y", spec)])
    with pytest.raises(UsageError, match=r"'x' is float32\[.*\], and no machine can address so many bytes"):
        compile_graph(builder.build([y]))


def test_a_plan_for_more_memory_than_there_is_says_what_needs_it() -> None:
    """4 TiB for each value: a plan can be made of it, for another machine, and no program."""
    builder = GraphBuilder("g")
    x = builder.input("x", TensorSpec((1,), "float32"))
    wide = TensorSpec((2**20, 2**20), "float32")
    (a,) = builder.emit("aten.expand.default", [x], [("a", wide)], {"size": wide.shape})
    (b,) = builder.emit("aten.neg.default", [a], [("b", wide)])
    graph = builder.build([b])
    assert make_plan(graph, lower(graph)).arena_bytes == 2**42
    message = (
        r"graph 'g' needs 4096.0 GiB .*; its largest values are 'b' float32\[1048576, 1048576\] of 4096.0 GiB, 'x'"
    )
    with pytest.raises(UsageError, match=message):
        compile_graph(graph)
    with pytest.raises(UsageError, match=message):
        compile_graphs({"only": graph})


def test_an_input_for_more_memory_than_there_is_is_refused() -> None:
    builder = GraphBuilder("g")
    x = builder.input("x", TensorSpec((2**20, 2**20), "float32"))
    (y,) = builder.emit("aten.slice.Tensor", [x], [("y", TensorSpec((1, 2**20), "float32"))], {"end": 1})
    with pytest.raises(UsageError, match=r"graph 'g' needs 4096.0 GiB"):
        compile_graph(builder.build([y]))


def test_a_kernel_without_memory_is_no_bug_of_ours() -> None:
    bound = bind_graph(from_onnx(onnx.parser.parse_model(TEXT)))
    for error in (MemoryError("Unable to allocate 4.00 TiB"), RuntimeError("you tried … can't allocate memory")):
        found = bound.failure(bound.steps[0], error)
        assert isinstance(found, UsageError)
        assert "take smaller inputs" in str(found)
