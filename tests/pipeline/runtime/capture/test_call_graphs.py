"""Launches that C++ walks as a graph: the same bits as a loop of Python, and a reason where there is no graph."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import pytest
import torch

from pipeline.runtime.capture.call_graphs import LEAST_CALLS, UnreadableLaunchError, read_operator_calls
from pipeline.runtime.capture.recorders import CpuRecorder, GraphedLoop, LoopRecorder, Recording
from pipeline.runtime.kernels import Launch
from pipeline.runtime.kernels.base import OverloadCall, ResultMismatch, copy_all, copy_result, in_turn
from tests.pipeline.runtime.capture.capture_programs import negate


class Memory:
    """Two rows of numbers, results of them, and launches of every form from the one to the other."""

    def __init__(self) -> None:
        self.x, self.w, self.index = torch.zeros(4, 4), torch.arange(16.0).view(4, 4) / 7, torch.tensor([2, 0])
        self.results = [torch.zeros(4, 4) for _ in range(9)]
        self.rows, self.wide, self.whole = torch.zeros(2, 4), torch.zeros(4, 8), torch.zeros(4, dtype=torch.int64)

    def launches(self) -> list[Launch]:
        x, w, made = self.x, self.w, self.results
        return [
            partial(torch.addmm, w[0], x, w, out=made[0]),
            partial(torch.mul, made[0], 0.1, out=made[1]),
            partial(torch.clamp, made[1], None, 2.5, out=made[2]),
            partial(torch.softmax, made[2], -1, out=made[3]),
            partial(torch.div, made[3], w[1], rounding_mode=None, out=made[4]),
            OverloadCall.bind(torch.ops.aten.leaky_relu.out, made[4], 0.2, out=made[5]),
            partial(torch.ops.aten.elu.out, made[5], 0.5, 1, 1, out=made[6]),
            partial(torch.cat, [x, made[6]], 1, out=self.wide),
            partial(torch.index_select, x, 0, self.index, out=self.rows),
            partial(torch.argmax, x, dim=1, keepdim=False, out=self.whole),
            in_turn(partial(made[7].copy_, made[6].t()), partial(torch.Tensor.add_, made[7], x, alpha=2)),
            copy_result(partial(torch.layer_norm, made[7], [4], w[1], None, 1e-5, False), [made[8]]),
            copy_result(OverloadCall.bind(torch.ops.aten.var_mean.correction, x, [1], correction=0), [w[2], w[3]]),
            partial(torch.sum, x, dim=[0], keepdim=True, dtype=torch.float32, out=made[0][:1]),
            partial(vars(torch._C)["_nn"].gelu, x, approximate="tanh", out=made[1]),
        ]

    def content(self) -> list[torch.Tensor]:
        return [tensor.clone() for tensor in (*self.results, self.rows, self.wide, self.whole, self.w)]


def record(recorder: LoopRecorder, launches: Sequence[Launch]) -> Recording:
    with torch.inference_mode():
        recording = recorder.record(launches)
        recorder.settle(recording.replay)
    return recording


def test_a_graph_computes_the_bits_of_the_loop() -> None:
    """FusedOperands of every kind of type, operands that share memory, and results that are copied."""
    found, random = [], torch.Generator().manual_seed(0)
    feeds = [torch.randn(4, 4, generator=random) for _ in range(3)]
    for recorder in (LoopRecorder(), CpuRecorder()):
        memory = Memory()
        recording = record(recorder, memory.launches())
        memory.w.copy_(torch.arange(16.0).view(4, 4) / 7)
        with torch.inference_mode():
            for x in feeds:
                memory.x.copy_(x)
                recording.replay()
                found.append(memory.content())
    assert (recording.reasons, recording.has_graphs) == ({}, True)  # type: ignore[attr-defined]
    for loop, graph in zip(found[: len(feeds)], found[len(feeds) :], strict=True):
        assert all(map(torch.equal, loop, graph))


def negations(count: int) -> list[Launch]:
    tensors = [torch.ones(2) for _ in range(count + 1)]
    return [partial(torch.neg, x, out=y) for x, y in pairwise(tensors)]


def call_python() -> None:
    """Something that no graph holds."""


@pytest.mark.parametrize(
    ("launch", "reason"),
    [
        (call_python, "call_python is a function of Python"),
        (partial(torch.rand, 2, generator=torch.Generator()), "no overload of aten::rand takes these arguments"),
        (
            partial(torch._foreach_add_, [torch.ones(2)], [torch.ones(2)]),
            "aten::_foreach_add_ writes to tensors in lists, which TorchScript takes for unread",
        ),
        (partial(torch.ops.prims.neg.default, torch.ones(2)), "prims::neg is an operator of another library"),
    ],
)
def test_what_is_no_operator_is_called_by_python_and_says_why(launch: Launch, reason: str) -> None:
    with pytest.raises(UnreadableLaunchError, match=reason):
        read_operator_calls(launch)
    recording = GraphedLoop([*negations(LEAST_CALLS), launch, *negations(LEAST_CALLS)])
    assert list(recording.reasons) == [LEAST_CALLS]
    assert len(recording._pieces) == 3


def test_a_graph_that_torchscript_rewrites_is_not_used() -> None:
    """It drops an operator whose result nobody reads, though a Python loop would run it."""
    unread = partial(copy_all, partial(torch.neg, torch.ones(2)), [torch.zeros(2)], {0})
    recording = record(CpuRecorder(), [*negations(LEAST_CALLS), unread])
    assert recording.reasons == {0: "TorchScript rewrites the graph that begins here"}
    recording.replay()


@pytest.mark.parametrize(
    ("made", "declared"),
    [(torch.int64, torch.float32), (torch.float32, torch.int64), (torch.float32, torch.float16)],
)
def test_several_results_have_the_dtypes_that_the_graph_declares_or_narrower_floats(
    made: torch.dtype, declared: torch.dtype
) -> None:
    outs = [torch.zeros(2), torch.zeros(2)]
    copy_all(lambda: (torch.ones(2), torch.full((2,), 3.0, dtype=torch.float16)), outs, ())
    assert [out.tolist() for out in outs] == [[1.0, 1.0], [3.0, 3.0]]
    with pytest.raises(ResultMismatch):
        copy_all(lambda: (torch.ones(2, dtype=made),), [torch.zeros(2, dtype=declared)], ())


def test_a_graph_knows_which_launch_failed() -> None:
    """With the error of that launch, and not with a trace of the interpreter."""
    table, index, row = torch.ones(3, 2), torch.zeros(1, dtype=torch.int64), torch.zeros(1, 2)
    launches = negations(LEAST_CALLS)
    launches[3:3] = [partial(torch.index_select, table, 0, index, out=row)]
    recording = record(CpuRecorder(), [call_python, *launches])
    index.fill_(9)
    with torch.inference_mode(), pytest.raises(IndexError, match=r"^index out of range in self$"):
        recording.replay()
    assert recording.begun == 5


def test_graphs_that_fail_before_they_were_ever_right_are_not_used() -> None:
    """The loop in their place has the error, if it is one of the launches."""
    table, index, row = torch.ones(3, 2), torch.full((1,), 9), torch.zeros(1, 2)
    launches = [partial(torch.index_select, table, 0, index, out=row), *negations(LEAST_CALLS)]
    recorder = CpuRecorder()
    with torch.inference_mode():
        recording = recorder.record(launches)
        with pytest.raises(IndexError, match="index out of range"):
            recorder.settle(recording.replay)
        index.zero_()
        recording.replay()
    assert recording.reasons == {0: "the graph that begins here failed: index out of range in self"}


def test_graphs_warn_of_nothing_and_report_what_python_calls() -> None:
    program = negate(calls=2 * LEAST_CALLS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = program.capture({"x": torch.ones(2)}).report
        assert program.replay({"x": torch.tensor([1.0, -2.0])})["y"].tolist() == [1, -2]
    assert report.by_python == ()


def test_constants_that_compare_equal_are_not_one() -> None:
    """TorchScript keeps one constant of 0.0 and -0.0; a graph with NaN is as it was built."""
    x, made = torch.ones(3), [torch.zeros(3) for _ in range(9)]
    before = [partial(torch.neg, x if not at else made[at - 1], out=made[at]) for at in range(6)]
    signs = [partial(torch.mul, made[5], zero, out=made[at]) for at, zero in ((6, -0.0), (7, 0.0))]
    recording = record(CpuRecorder(), [*before, *signs])
    recording.replay()
    assert [torch.signbit(made[at]).all().item() for at in (6, 7)] == [True, False]
    assert list(recording.reasons.values()) == ["TorchScript rewrites the graph that begins here"]
    nan = partial(torch._C._nn.leaky_relu, made[5], float("nan"), out=made[8])
    assert not record(CpuRecorder(), [*before, nan]).reasons


def test_without_the_passes_of_the_executor_there_is_no_graph() -> None:
    x, made = torch.ones(3), [torch.zeros(3) for _ in range(6)]
    with torch.jit.optimized_execution(False):
        recording = record(CpuRecorder(), [partial(torch.neg, x, out=result) for result in made])
        recording.replay()
    assert all(torch.equal(result, -x) for result in made)
