"""Calls that cannot be captured split the plan, and the report says where and why."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from pipeline.errors import DataError
from pipeline.ir.graph import InputRef, TensorSpec
from pipeline.ops import GraphBuilder
from pipeline.runtime import compile_graph
from tests.pipeline.runtime.capture.capture_programs import negate
from tests.support.torch_programs import compile_module

X = torch.tensor([1.0, -2.0, 3.0])


class Around(torch.nn.Module):
    """A call with `function` between two others."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        return self.function(x.exp(), *more).tanh()


def choose(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 30, lambda x: x + 1, lambda x: x - 1, (x,))


def put(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.index_put(x, [mask], torch.tensor(0.5))


def repeat(x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.repeat_interleave.self_Tensor(x, counts, output_size=4)


MASK = torch.tensor([True, False, True])

CASES: dict[str, tuple[Callable[..., Any], Sequence[torch.Tensor], str]] = {
    "higher-order": (choose, (), "op 'cond' .*: it is a higher-order operator"),
    "a mask that is written to": (put, (MASK,), "op 'index_put' .*: it makes a result whose shape depends on the data"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_captured_runs_between_captured_segments(case: str) -> None:
    function, more, reason = CASES[case]
    module = Around(function)
    program, feed = compile_module(module, [X, *more])
    report = program.capture(feed).report
    assert [segment.is_captured for segment in report.segments] == [True, False, True]
    (eager,) = report.eager
    assert not report.is_whole
    assert re.search(reason, str(eager))
    (x, *_) = feed
    for scale in (1.0, 2.0, 0.5):
        found = next(iter(program.replay({**feed, x: X * scale}).values()))
        assert torch.equal(found, module(X * scale, *more))


def test_the_report_as_text() -> None:
    program, feed = compile_module(Around(choose), [X])
    lines = str(program.capture(feed).report).splitlines()
    assert lines[0] == "captured for inference: 2 captured segments, 1 eager call, 12 B of buffers"
    assert lines[1].startswith("  captured: ")
    assert lines[2].startswith("  eager: op 'cond' (higher_order.cond")
    assert lines[3] == "  captured: 1 call"
    assert str(negate(calls=2).capture({"x": X[:2]}).report).endswith("B of buffers\n  captured: 2 calls")


def test_elements_at_computed_places_are_captured() -> None:
    """No value is read on the host, as it was by a kernel of our own."""
    builder = GraphBuilder("gather")
    x, at = builder.input("x", TensorSpec((3,), "float32")), builder.input("at", TensorSpec((2,), "int64"))
    call = {"self": InputRef(0), "indices": (InputRef(1),)}
    (picked,) = builder.emit("aten.index.Tensor", [x, at], [("picked", TensorSpec((2,), "float32"))], call)
    (y,) = builder.emit("aten.neg.default", [picked], [("y", TensorSpec((2,), "float32"))])
    program, feed = compile_graph(builder.build([y])), {"x": X, "at": torch.tensor([2, -3])}
    assert program.capture(feed).report.is_whole
    assert program.replay(feed)["y"].tolist() == [-3, -1]


@pytest.mark.parametrize("saturates", [True, False])
def test_a_cast_to_float8_is_captured(saturates: bool) -> None:
    builder = GraphBuilder("cast")
    x, narrow = builder.input("x", TensorSpec((3,), "float32")), TensorSpec((3,), "float8_e4m3fn")
    attrs = {"to": narrow.dtype, "saturate": saturates}
    program = compile_graph(builder.build(builder.emit("onnxline.cast_float8.default", [x], [("y", narrow)], attrs)))
    assert program.capture({"x": X}).report.is_whole
    found = program.replay({"x": X * 1e6})["y"].float()
    assert found.tolist() == [448, -448, 448] if saturates else found.isnan().all()


def test_a_failure_after_an_eager_call_names_its_own_call() -> None:
    def pick(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return choose(x)[at]

    program, feed = compile_module(Around(pick), [X, torch.tensor([0, 1])])
    assert len(program.capture(feed).report.eager) == 1
    with pytest.raises(DataError, match=r"op 'index' .*index 9 is out of bounds"):
        program.replay({**feed, list(feed)[1]: torch.tensor([0, 9])})
