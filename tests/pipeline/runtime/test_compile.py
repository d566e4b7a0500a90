"""A graph that was imported without emitters compiles as it is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest
import torch
from torch import library as registry

from pipeline.errors import SourceError, Unsupported, UsageError
from pipeline.importers import from_onnx
from pipeline.importers.from_torch import from_torch
from pipeline.ir import TensorSpec
from pipeline.ir.builder import Builder
from pipeline.lowering import lower, with_kernels
from pipeline.ops import GraphBuilder, emitter_of
from pipeline.planning import make_plan
from pipeline.runtime import compile_graph, compile_graphs
from pipeline.runtime.compile import bind_graph
from pipeline.runtime.eager import run_eager
from tests.support.torch_programs import Calls, graph_of

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


# The plain reference: what it frees, what it shows, what it refuses.


def test_it_shows_every_op() -> None:
    graph = graph_of(Calls([lambda x: x.exp().split(1)]), [torch.zeros(2)])
    seen = []
    run_eager(graph, {"tensors_0": torch.zeros(2)}, observe=lambda op, results: seen.append((op.name, len(results))))
    assert seen == [("exp", 1), ("split", 2)]


def test_other_sizes_only_where_they_are_asked_for() -> None:
    graph = graph_of(Calls([lambda x: x * 2]), [torch.zeros(1, 3)])
    with pytest.raises(UsageError, match=r"float32\[2, 3\]; the graph declares float32\[1, 3\]"):
        run_eager(graph, {"tensors_0": torch.ones(2, 3)})
    (actual,) = run_eager(graph, {"tensors_0": torch.ones(2, 3)}, check=False).outputs.values()
    assert actual.tolist() == [[2.0] * 3] * 2


def test_what_is_not_given_is_named() -> None:
    graph = graph_of(torch.nn.Linear(2, 2), [torch.ones(1, 2)])
    with pytest.raises(UsageError, match=r"param 'p_weight' is not given[\s\S]*input 'input' is not given"):
        run_eager(graph, {"p_bias": torch.ones(2)})


def test_writes_are_for_values() -> None:
    """A graph of a program that was not made functional has operators that write; a plan holds values only."""
    program = torch.export.export(Calls([lambda x: (x + 1).add_(2)]), (torch.ones(2),), strict=False)
    with pytest.raises(Unsupported, match=r"aten.add_.Tensor writes to its arguments"):
        compile_graph(from_torch(program))


def test_an_operator_of_ones_own() -> None:
    with registry._scoped_library("onnxline_tests", "FRAGMENT") as library:
        library.define("double(Tensor x, *, float by=2) -> Tensor")
        library.impl("double", lambda x, by=2: x * by, "CompositeExplicitAutograd")
        library.impl("double", lambda x, by=2: torch.empty_like(x), "Meta")
        operator = torch.ops.onnxline_tests.double
        graph = graph_of(Calls([lambda x: operator(x, by=3.0)]), [torch.ones(2)])
        (actual,) = compile_graph(graph).run({"tensors_0": torch.ones(2)}).values()
        assert actual.tolist() == [3.0, 3.0]


def test_an_operator_that_torch_does_not_know() -> None:
    graph = graph_of(Calls([lambda x: x.exp()]), [torch.ones(2)])
    (op,) = graph.ops
    graph = replace(graph, ops=(replace(op, kind="mylib.exp.default"),))
    with pytest.raises(SourceError, match=r"no operator mylib\.exp\.default; import the module that defines it"):
        compile_graph(graph)
