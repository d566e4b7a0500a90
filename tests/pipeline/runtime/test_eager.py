"""The plain reference: what it frees, what it shows, what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import library as registry

from pipeline.errors import SourceError, Unsupported, UsageError
from pipeline.importers.from_torch import from_torch
from pipeline.runtime import compile_graph
from pipeline.runtime.eager import run_eager
from tests.support.torch_programs import Calls, graph_of


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
