"""The table says truly which operators read the host: with fake tensors, which have no values, such reads fail."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import library
from torch._subclasses.fake_tensor import FakeTensorMode

from pipeline.errors import DataError, Unsupported, UsageError
from pipeline.ir import InputRef, TensorSpec
from pipeline.ops import KINDS, GraphBuilder
from pipeline.ops.aten import READS_HOST
from pipeline.ops.rows import HOST_SYNC
from pipeline.runtime import CompiledProgram, RecordingDevice, compile_graph, operators, own_layers
from pipeline.runtime.capture.segments import DATA_SHAPE, TAGS, _aten_obstacles
from pipeline.runtime.operators import dequantize, quantize
from tests.pipeline.runtime.capture.capture_programs import PAIR, negate
from tests.support.host_reads import reads_host
from tests.support.torch_programs import Calls, compile_module, feed_of, graph_of

Make = Callable[..., torch.Tensor]


def recurrent(make: Make, **options: Any) -> Any:
    x, state = make(3, 2, 4), make(1, 2, 5)
    lengths = make(2).long() if options.pop("lengths", False) else None
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[options["kind"]] * 5
    weights = make(1, gates, 4), make(1, gates, 5), make(1, 2 * gates)
    cell = state if options["kind"] == "LSTM" else None
    return own_layers.recurrent(x, *weights, state, cell, lengths, **options)


CALLS: dict[str, tuple[str, Callable[[Make], Any]]] = {
    "LSTM": ("Recurrent", lambda make: recurrent(make, kind="LSTM")),
    "LSTM of rows of several lengths": ("Recurrent", lambda make: recurrent(make, kind="LSTM", lengths=True)),
    "GRU": ("Recurrent", lambda make: recurrent(make, kind="GRU", clip=0.5, reset_after=True)),
    "RNN against time": ("Recurrent", lambda make: recurrent(make, kind="RNN", direction="reverse")),
    "power": ("Pow", lambda make: torch.pow(make(3), make(1))),
    "quantize": ("Quantize", lambda make: quantize(make(2, 4), make(()), to="int8")),
    "quantize, 4 bits": ("Quantize", lambda make: quantize(make(2, 4), make(4), to="int8", low=-8, high=7)),
    "dequantize": ("Dequantize", lambda make: dequantize(make(2, 4).char(), make(()), to="float32")),
    "cast": ("CastFloat8", lambda make: operators.cast_float8._init_fn(make(4), "float8_e4m3fn")),
    "cast, not saturated": (
        "CastFloat8",
        lambda make: operators.cast_float8._init_fn(make(4), "float8_e5m2", saturate=False),
    ),
    "boxes": ("RoiAlign", lambda make: own_layers.roi_align(make(1, 2, 4, 4), make(2, 4), make(2).long(), [2, 2])),
    "unsigned": (
        "Unsigned",
        lambda make: operators.unsigned(make(2).to(torch.uint32), make(2).to(torch.uint32), "remainder"),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_reads_the_host_has_a_row_and_nothing_else(name: str) -> None:
    """`.item()`, `.tolist()` and `.numpy()` of a fake tensor raise."""
    kind, call = CALLS[name]
    with FakeTensorMode():
        try:
            call(lambda *sizes: torch.ones(*sizes))
            reads_host = False
        except Exception as error:
            reads_host = True
            assert isinstance(error, Unsupported) or "numpy" in str(error), error
    assert reads_host is ("cuda" in KINDS[kind].obstacles)


MATRIX = torch.eye(4) + 0.1
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(READS_HOST, (MATRIX,)),
    **dict.fromkeys(("linalg_lstsq", "linalg_solve"), (MATRIX, MATRIX)),
    **dict.fromkeys(("linalg_matrix_rank", "linalg_pinv"), (MATRIX, 1e-5)),
    "_linalg_check_errors": (torch.zeros(1, dtype=torch.int32), "solve"),
    "linalg_tensorinv": (MATRIX, 1),
    "linalg_tensorsolve": (MATRIX, torch.ones(4)),
    "multinomial": (MATRIX, 1),
}


@pytest.mark.parametrize("name", sorted(READS_HOST))
def test_an_operator_that_looks_for_mistakes_reads_the_host(name: str) -> None:
    options = {"is_matrix": True} if name == "_linalg_check_errors" else {}
    assert reads_host(lambda: getattr(torch.ops.aten, name).default(*ARGUMENTS[name], **options))


FILLS: dict[str, Callable[..., torch.Tensor]] = {
    "masked": lambda x, mask, value: x.masked_fill(mask, value),
    "rows": lambda x, mask, value: x.index_fill(-1, torch.tensor([0, -1]), value),
    "rows, in another dtype": lambda x, mask, value: x.half().index_fill(0, torch.tensor([1]), value),
}


@pytest.mark.parametrize("fill", FILLS)
def test_a_value_that_a_kernel_computed_fills_without_the_host(fill: str) -> None:
    """torch's own kernels for it read the value by `.item()`."""

    def function(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return FILLS[fill](x * 2, mask, x.amax())

    x, mask = MATRIX, MATRIX > 1
    graph = graph_of(Calls([function]), [x, mask])
    assert any(op.kind in ("aten.masked_fill.Tensor", "aten.index_fill.int_Tensor") for op in graph.ops)
    program = compile_graph(graph, device=RecordingDevice(2**20))
    feed = feed_of(graph, [x, mask])
    assert program.capture(feed).report.is_whole
    assert not reads_host(program.run, feed)
    for run in (program.run, program.replay, compile_graph(graph).run):
        assert torch.equal(next(iter(run(feed).values())), function(x, mask))


def test_what_waits_in_the_host_code_of_cuda_alone_splits_a_capture_there() -> None:
    """`linalg_lu` has no tag and checks no values; found with torch 2.11's host code for CUDA."""
    graph = graph_of(Calls([lambda x: torch.linalg.lu(x)[2].tanh()]), [MATRIX])
    feed = feed_of(graph, [MATRIX])
    on_device = compile_graph(graph, device=RecordingDevice(2**20)).capture(feed).report
    assert [segment.reason for segment in on_device.eager] == [HOST_SYNC]
    assert compile_graph(graph).capture(feed).report.is_whole


@pytest.mark.parametrize("count", [1, 3])
def test_draws_from_a_distribution_read_no_host(count: int) -> None:
    assert not reads_host(operators.multinomial, torch.zeros(2, 5), count, "int64", 0)


@pytest.mark.parametrize("kind", ["aten.linalg_inv.default", "aten.linalg_cholesky.default"])
def test_a_capture_is_split_where_torch_looks_for_mistakes(kind: str) -> None:
    builder, square = GraphBuilder("g"), TensorSpec((4, 4), "float32")
    x = builder.input("x", square)
    (y,) = builder.emit(kind, [x], [("y", square)], {} if "inv" in kind else {"self": InputRef(0)})
    (z,) = builder.emit("aten.relu.default", [y], [("z", square)])
    report = compile_graph(builder.build([z])).capture({"x": MATRIX}).report
    assert [segment.is_captured for segment in report.segments] == [False, True]
    assert report.segments[0].reason == HOST_SYNC


def test_a_trace_of_boxes_is_refused_in_a_sentence() -> None:
    with FakeTensorMode(), pytest.raises(Unsupported, match="RoiAlign takes as many samples as its boxes have pixels"):
        own_layers.roi_align(torch.ones(1, 2, 4, 4), torch.ones(2, 4), torch.zeros(2).long(), [2, 2])


def test_the_rest_of_a_sorted_axis_is_not_in_the_arena() -> None:
    builder = GraphBuilder("top")
    x, few = builder.input("x", TensorSpec((1000,), "float32")), (3,)
    outputs = [("values", TensorSpec(few, "float32")), ("places", TensorSpec(few, "int64"))]
    program = compile_graph(builder.build(builder.emit("onnxline.top_k.default", [x], outputs, {"k": 3, "dim": 0})))
    assert program.plan.arena_bytes == 128
    found = program.run({"x": torch.arange(1000.0) // 2})
    assert (found["values"].tolist(), found["places"].tolist()) == ([499, 499, 498], [998, 999, 996])


# Random numbers: each replay draws new ones, warm-up and capture draw none, and a snapshot goes back.


def draw_of_onnx() -> tuple[CompiledProgram, dict[str, torch.Tensor]]:
    """x plus two draws of the same seed, each from a generator of its own."""
    builder = GraphBuilder("draw")
    x = builder.input("x", PAIR)
    attrs = {"size": (2,), "mean": 0.0, "scale": 1.0, "dtype": "float32", "seed": 3}
    (first,) = builder.emit("onnxline.random_normal.default", [], [("first", PAIR)], attrs)
    (second,) = builder.emit("onnxline.random_normal.default", [], [("second", PAIR)], attrs)
    (both,) = builder.emit("aten.add.Tensor", [first, second], [("both", PAIR)])
    return compile_graph(builder.build(builder.emit("aten.add.Tensor", [x, both], [("y", PAIR)]))), {
        "x": torch.zeros(2)
    }


def draw_of_torch() -> tuple[CompiledProgram, dict[str, torch.Tensor]]:
    torch.manual_seed(7)
    return compile_module(torch.nn.Dropout(0.5).train(), [torch.ones(64)])


@pytest.mark.parametrize("make", [draw_of_onnx, draw_of_torch])
def test_replays_draw_on_and_a_snapshot_goes_back(make: object) -> None:
    program, feed = make()  # type: ignore[operator]
    state = torch.get_rng_state()
    program.capture(feed)
    assert torch.equal(torch.get_rng_state(), state), "a capture draws nothing"

    def draw(**options: object) -> list[float]:
        return next(iter(program.replay(feed, **options).values())).tolist()

    first, at_one = draw(), program.snapshot()
    rest = [draw() for _ in range(3)]
    assert len({str(drawn) for drawn in (first, *rest)}) == 4
    assert [draw(restore=at_one), draw(), draw()] == rest


def test_the_first_replay_draws_what_a_run_draws() -> None:
    program, feed = draw_of_onnx()
    run = program.run(feed)["y"]
    assert torch.equal(program.run(feed)["y"], run), "runs repeat"
    assert torch.equal(program.replay(feed)["y"], run)
    assert not torch.equal(program.replay(feed)["y"], run)


def test_dropout_draws_from_the_generator_that_the_user_seeds() -> None:
    program, feed = draw_of_torch()
    program.capture(feed)
    torch.manual_seed(11)
    found = next(iter(program.replay(feed).values()))
    torch.manual_seed(11)
    assert torch.equal(found, torch.nn.functional.dropout(torch.ones(64), 0.5))


def test_a_program_without_random_numbers_leaves_the_default_generator_alone() -> None:
    """Another thread may be drawing from it."""
    program, before = negate(), negate().snapshot()
    torch.rand(3)
    state = torch.get_rng_state()
    program.replay({"x": torch.ones(2)}, restore=before)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_random_state_of_another_program_is_refused() -> None:
    with pytest.raises(UsageError, match="the random state of a snapshot is that of another program"):
        draw_of_onnx()[0].restore(negate().snapshot())


# Calls that cannot be captured split the plan, and the report says where and why.

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


def put_two(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.index_put(x, [mask], torch.tensor([0.5, 1.5]))


def repeat(x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.repeat_interleave.self_Tensor(x, counts, output_size=4)


MASK = torch.tensor([True, False, True])

CASES: dict[str, tuple[Callable[..., Any], Sequence[torch.Tensor], str]] = {
    "higher-order": (choose, (), "op 'cond' .*: it is a higher-order operator"),
    "a mask that is written to": (put, (MASK,), "op 'index_put' .*: it makes a result whose shape depends on the data"),
    "a mask of bytes": (
        put_two,
        (MASK.byte(),),
        "op 'index_put' .*: it makes a result whose shape depends on the data",
    ),
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


@pytest.mark.parametrize("tag", TAGS, ids=str)
def test_what_torch_says_of_an_operator_is_believed(tag: torch.Tag) -> None:
    """Operators of others have such tags too."""
    with library._scoped_library("obstacles", "FRAGMENT") as added:
        added.define("tagged(Tensor x) -> Tensor", tags=(tag,))
        assert [*_aten_obstacles("obstacles.tagged.default", [PAIR], "cpu")] == [TAGS[tag]]
    assert not [*_aten_obstacles("aten.relu.default", [PAIR], "cpu")]
    assert [*_aten_obstacles("aten.index.Tensor", [PAIR, PAIR], "cpu")] == [DATA_SHAPE], "no mask has its own kind"


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
