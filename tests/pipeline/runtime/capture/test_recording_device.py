"""The rules of a CUDA capture, each on the recording device, which fails where one of them is broken."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from pipeline.errors import DataError, InternalError, UsageError
from pipeline.ir.graph import Graph, TensorSpec
from pipeline.ops import GraphBuilder
from pipeline.runtime import CompiledProgram, compile_graph, compile_graphs, compile_open_graph
from pipeline.runtime.devices import GraphFailure
from pipeline.runtime.recording import RecordingDevice, RecordingOrder
from pipeline.training import NotFinite, record_step
from tests.pipeline.runtime.capture.capture_programs import stored, train_graph
from tests.pipeline.runtime.capture.test_captures import sized_graph
from tests.pipeline.runtime.capture.test_obstacles import MASK, Around, X, choose, put
from tests.support.torch_programs import compile_module, graph_of

SQUARE = TensorSpec((4, 4), "float32")


@pytest.fixture
def device() -> RecordingDevice:
    return RecordingDevice(2**22)


def on(device: RecordingDevice, *sizes: int) -> torch.Tensor:
    return device.copy_in(torch.ones(*sizes))


def host() -> torch.Tensor:
    return torch.zeros(3)


BROKEN: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "reads a number": (lambda x: x.sum().item(), "reads the host"),
    "asks for places": (torch.nonzero, "reads the host"),
    "copies what is not pinned": (lambda x: x.copy_(host()), "copies from pageable memory"),
    "adds memory of the host": (lambda x: x + host(), "expected all tensors on the device"),
    "makes a tensor on the host and copies it": (lambda x: x.copy_(torch.arange(3.0)), "copies from pageable memory"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_launch_that_breaks_a_rule_is_not_recorded(name: str, device: RecordingDevice) -> None:
    launch, reason = BROKEN[name]
    x, y = on(device, 3), on(device, 3)
    with pytest.raises(GraphFailure, match=reason) as failure:
        device.record([partial(y.add_, x), partial(launch, x)], device.new_pool(), ())
    assert failure.value.at == 1
    assert y.tolist() == [1, 1, 1], "what is recorded is not run"


def test_nothing_may_wait_while_a_graph_is_recorded(device: RecordingDevice) -> None:
    with pytest.raises(GraphFailure, match="not permitted when stream is capturing: it waits"):
        device.record([device.synchronize], device.new_pool(), ())


def test_a_graph_computes_with_what_its_operands_hold_then(device: RecordingDevice) -> None:
    x, total = on(device, 3), on(device, 3)
    graph = device.record([partial(torch.mul, x, 2, out=total), lambda: total.add_(x * x)], device.new_pool(), ())
    for number in (1.0, 3.0):
        x.fill_(number)
        graph.replay()
        assert total.tolist() == [2 * number + number**2] * 3
    with device.scope():
        twice = device.record([partial(total.add_, 1)], device.new_pool(), ())
    assert len(twice) == 1, "a scope in a scope records a call once"


def test_a_replay_that_allocates_fails(device: RecordingDevice) -> None:
    x = on(device, 3)
    graph = device.record([partial(x.add_, 1)], device.new_pool(), ())
    (call,) = graph._calls
    graph._calls[0] = type(call)(lambda *_: device.allocate(4), call.args, {}, call.read, call.written, call.fresh)
    with pytest.raises(RuntimeError, match="a replay allocates memory"):
        graph.replay()


def test_a_replay_that_reads_what_the_pool_of_another_graph_gave_back_fails(device: RecordingDevice) -> None:
    x, out, held = on(device, 3), on(device, 3), list[torch.Tensor]()
    maker = device.record([lambda: held.append(x * 2)], device.new_pool(), ())
    reader = device.record([partial(torch.add, held[0], 1, out=out)], device.new_pool(), ())
    maker.replay()
    reader.replay()
    assert out.tolist() == [3, 3, 3]
    held.clear()
    with pytest.raises(RuntimeError, match="touches memory that was freed"):
        reader.replay()
    del maker
    gc.collect()
    with pytest.raises(RuntimeError, match="touches memory that was freed"):
        reader.replay()


def test_two_streams_without_an_order_race(device: RecordingDevice) -> None:
    x = on(device, 3)
    graph = device.record([partial(x.add_, 1)], device.new_pool(), ())
    graph.replay()
    with device.on_stream(1), pytest.raises(RuntimeError, match="streams race"):
        graph.replay()
    device.wait(1, 0)
    with device.on_stream(1):
        graph.replay()


def mixed_graph() -> Graph:
    """y = tanh(x @ w) · x + table[ids], with a launch that allocates."""
    builder = GraphBuilder("mixed")
    x, ids = builder.input("x", SQUARE), builder.input("ids", TensorSpec((4,), "int64"))
    w = builder.param("w", SQUARE, stored([[0.1 * row + column for column in range(4)] for row in range(4)]))
    (product,) = builder.emit("aten.mm.default", [x, w], [("product", SQUARE)])
    (normal,) = builder.emit("aten.layer_norm.default", [product], [("normal", SQUARE)], {"normalized_shape": (4,)})
    (bent,) = builder.emit("aten.tanh.default", [normal], [("bent", SQUARE)])
    (rows,) = builder.emit("aten.embedding.default", [w, ids], [("rows", SQUARE)])
    (y,) = builder.emit("aten.add.Tensor", [bent, rows], [("y", SQUARE)])
    return builder.build([y])


FEED = {"x": torch.arange(16.0).view(4, 4), "ids": torch.tensor([0, 3, 1, 1])}


def test_a_plan_runs_captures_and_replays_as_on_the_cpu(device: RecordingDevice) -> None:
    expected = compile_graph(mixed_graph()).run(FEED)["y"]
    program = compile_graph(mixed_graph(), device=device)
    plan = program.plan
    assert {slot.spec.device for slot in plan.slots} == {"cuda:0"}
    assert plan.alignment == 256
    assert not any(offset % 256 for offset in plan.offsets.values())
    found = program.run(FEED)["y"]
    torch.testing.assert_close(found, expected)
    assert program.capture(FEED).report.is_whole
    waited = device.synchronizations
    for scale in (1.0, -2.0):
        feed = {**FEED, "x": FEED["x"] * scale}
        assert torch.equal(program.replay(feed)["y"], program.run(feed)["y"])
    assert device.synchronizations == waited, "no run and no replay waits for the device"


def test_a_feed_may_lie_on_either_side(device: RecordingDevice) -> None:
    program = compile_graph(mixed_graph(), device=device)
    there = {name: device.copy_in(tensor) for name, tensor in FEED.items()}
    assert torch.equal(program.run(there)["y"], program.run(FEED)["y"])
    assert torch.equal(program.replay(there)["y"], program.replay(FEED)["y"])
    with pytest.raises(UsageError, match=r"input 'x' is .* on meta; expected float32\[4, 4\] on cuda:0"):
        program.run({**FEED, "x": torch.empty(4, 4, device="meta")})


@pytest.mark.filterwarnings("ignore:the feed has")
def test_replays_of_a_train_step_are_its_eager_runs(device: RecordingDevice) -> None:
    """Warm-up and capture take no step; what a feed has for `w` and `step` changes nothing."""
    eager = compile_graph(train_graph())
    program = compile_graph(train_graph(), device=device)
    feed = {"x": torch.tensor([1.0, 2.0])}
    key = program.capture(feed, mode="train").key
    assert (key.mode, key.static_roles, key.copy_roles) == ("train", ("const", "param", "state"), ("input",))
    assert [fed.device for fed in key.feed_signature] == [torch.device("cpu")]
    assert program.state("step") == 0
    for step in range(1, 4):
        given = {**feed, "w": torch.zeros(2), "step": torch.tensor(77)}
        assert torch.equal(program.replay(given)["y"], eager.run(feed)["y"])
        assert (program.state("step"), program.state("w").tolist()) == (step, eager.state("w").tolist())
    assert compile_graph(train_graph()).capture(feed, mode="train").key.plan_key != key.plan_key


def test_a_snapshot_takes_replays_back(device: RecordingDevice) -> None:
    program = compile_graph(train_graph(), device=device)
    feed = {"x": torch.tensor([1.0, 2.0])}
    program.capture(feed, mode="train")
    before = program.snapshot()
    first = program.replay(feed)["y"]
    program.replay(feed)
    assert torch.equal(program.replay(feed, restore=before)["y"], first)


@pytest.mark.parametrize("function", [choose, put])
def test_what_reads_the_host_runs_between_graphs(function: Callable[..., Any], device: RecordingDevice) -> None:
    more = [MASK] if function is put else []
    program, feed = compile_module(Around(function), [X, *more])
    moved = compile_graph(graph_of(Around(function), [X, *more]), device=device)
    report = moved.capture(feed).report
    assert [segment.is_captured for segment in report.segments] == [True, False, True]
    name = next(iter(feed))
    for scale in (1.0, 2.0, 0.5):
        given = {**feed, name: X * scale}
        torch.testing.assert_close([*moved.replay(given).values()], [*program.run(given).values()])


def test_dropped_captures_give_their_memory_back(device: RecordingDevice) -> None:
    program = compile_graph(mixed_graph(), device=device)
    program.run(FEED)
    gc.collect()
    before = device.memory.used
    program.capture(FEED)
    assert device.memory.used > before
    program.drop_captures()
    gc.collect()
    assert device.memory.used == before
    del program
    gc.collect()
    assert device.memory.used == 0


def test_a_replay_runs_on_the_stream_of_its_caller_after_what_ran_on_another(device: RecordingDevice) -> None:
    program = compile_graph(train_graph(), device=device)
    feed = {"x": torch.tensor([1.0, 2.0])}
    program.capture(feed, mode="train")
    for stream in (1, 2, 1, 0):
        with device.on_stream(stream):
            program.replay(feed)
    for stream in (2, 1):
        with device.on_stream(stream):
            program.run(feed)
    assert program.state("step") == 6
    waited = device.synchronizations
    program.synchronize()
    assert device.synchronizations == waited + 1, "also where it has no index to look at"


def views_graph() -> Graph:
    """`y`: x by columns; w ← the old w by columns. A capture copies both before they change."""
    builder = GraphBuilder("views")
    x, w = builder.input("x", SQUARE), builder.state("w", SQUARE, stored([[1.0] * 4] * 4))
    (y,) = builder.emit("aten.permute.default", [x], [("y", SQUARE)], {"dims": (1, 0)})
    (after,) = builder.emit("aten.permute.default", [w], [("after", SQUARE)], {"dims": (1, 0)})
    return replace(builder.build([y]), updates={w: after})


def finite_graph() -> Graph:
    """A kernel that has memory of its own between its two launches."""
    builder = GraphBuilder("finite")
    x = builder.input("x", TensorSpec((), "float32"))
    return builder.build(builder.emit("NotFinite", [x], [("y", TensorSpec((), "float32"))]))


@pytest.mark.parametrize("make", [mixed_graph, train_graph, views_graph, finite_graph])
def test_no_memory_of_a_program_is_given_away_while_a_stream_uses_it(
    make: Callable[[], Graph], device: RecordingDevice
) -> None:
    """Arena, states, weights, flags of indices and buffers: all that the program has on the device before a run."""
    program = compile_graph(make(), device=device)
    gc.collect()
    before = kept_blocks(program, device)
    assert before == live_blocks(device)
    order = program.context.states.order
    assert isinstance(order, RecordingOrder)
    arena = program.context._arena  # itself: torch's allocator of CUDA does not know the storages of its parts
    assert any(memory is arena for memory in order.kept.values())
    feeds = {mixed_graph: FEED, train_graph: {"x": torch.tensor([1.0, 2.0])}, views_graph: {"x": FEED["x"]}}
    program.capture(feeds.get(make, {"x": torch.tensor(1.0)}))
    gc.collect()
    assert kept_blocks(program, device) == live_blocks(device) > before
    program.drop_captures()
    gc.collect()
    assert kept_blocks(program, device) == before


def kept_blocks(program: CompiledProgram, device: RecordingDevice) -> set[int]:
    """The first bytes of the blocks that a stream keeps, but for those of graphs, which their pools keep."""
    order = program.context.states.order
    assert isinstance(order, RecordingOrder)
    blocks = [device.memory.block_of(memory) for memory in order.kept.values()]
    return {block.first for block in blocks if block is not None and block.pool is None}


def live_blocks(device: RecordingDevice) -> set[int]:
    blocks = device.memory._blocks.values()
    return {block.first for block in blocks if block.is_live and block.pool is None}


def test_a_pool_ends_with_its_last_graph(device: RecordingDevice) -> None:
    """torch fails where a graph is recorded into a pool that no graph uses any more: `use_count > 0`."""
    pool = device.new_pool()
    graph = device.record([], pool, ())
    del graph
    with pytest.raises(GraphFailure, match="the last graph of this pool is gone") as failure:
        device.record([], pool, ())
    assert failure.value.at == 0, "no launch has begun"
    program = compile_graph(mixed_graph(), device=device)
    program.capture(FEED)
    shared = program.captures.session._pool
    program.capture(FEED, mode="train")
    assert len(program.captures) == 2
    assert program.captures.session._pool is shared, "a further graph has the pool of the first one"
    program.drop_captures()
    program.replay(FEED)
    assert program.captures.session._pool is not shared


def test_what_is_kept_is_forgotten_with_its_capture(device: RecordingDevice) -> None:
    program = compile_graph(mixed_graph(), device=device)
    order = program.context.states.order
    assert isinstance(order, RecordingOrder)
    before = len(order.kept)
    for _ in range(3):
        program.capture(FEED)
        program.drop_captures()
    gc.collect()
    assert len(order.kept) == before


def test_two_contexts_on_two_streams_share_weights_and_need_no_order(device: RecordingDevice) -> None:
    program = compile_graph(mixed_graph(), device=device)
    first, second = program.new_context(), program.new_context()
    policy = program._policy
    results = []
    for context, stream in ((first, 1), (second, 2), (first, 1), (second, 2)):
        with device.on_stream(stream):
            results.append(context.captures.replay(FEED, policy)["y"])
    assert all(torch.equal(result, results[0]) for result in results)


def test_a_wrong_index_selects_a_row_and_fails_a_later_run(device: RecordingDevice) -> None:
    """On CUDA a kernel that reads it would end the context."""
    program = compile_graph(mixed_graph(), device=device)
    wrong = {**FEED, "ids": torch.tensor([0, 9, 1, 1])}
    program.run(wrong)
    with pytest.raises(DataError, match="an index is out of range, in this run or an earlier one"):
        program.run(FEED)
    program.run(FEED)
    program.replay(FEED)
    program.replay(wrong)
    with pytest.raises(DataError, match="an index is out of range, in this run or an earlier one"):
        program.replay(FEED)
    program.replay({**FEED, "ids": torch.tensor([0, -1, 1, 1])})
    with pytest.raises(DataError, match=r"ids: int64\[4\]"):
        program.synchronize()
    for stream in (1, 2, 3):
        with device.on_stream(stream), device.scope(), pytest.raises(DataError) if stream == 2 else nullcontext():
            program.replay(wrong if stream == 1 else FEED)
    program.synchronize()


def test_constant_indices_are_checked_when_a_program_is_bound(device: RecordingDevice) -> None:
    """Positions, say, cost a replay nothing; a wrong constant is found as a wrong index of the feed is. A parameter may
    change where it lies."""
    for number, is_param, is_checked in ((3, False, False), (4, False, True), (3, True, True)):
        builder = GraphBuilder("rows")
        table, add = builder.input("table", SQUARE), builder.param if is_param else builder.const
        ids = add("ids", TensorSpec((2,), "int64"), stored([0, number], "int64"))
        (y,) = builder.emit("aten.embedding.default", [table, ids], [("y", TensorSpec((2, 4), "float32"))])
        program = compile_graph(builder.build([y]), device=device)
        assert (program.capture({"table": torch.ones(4, 4)}).flags is not None) is is_checked


def test_debug_says_at_once_which_launch_failed(device: RecordingDevice) -> None:
    program = compile_graph(mixed_graph(), device=device, debug=True)
    launches = len(program.context._launches)
    before = device.synchronizations
    program.run(FEED)
    assert device.synchronizations >= before + launches
    with pytest.raises(DataError, match="an index is out of range"):
        program.run({**FEED, "ids": torch.tensor([0, 9, 1, 1])})
    assert program.capture(FEED).report.is_whole


@pytest.mark.parametrize("source", ["CUDA error", "Triton Error [CUDA]"])
def test_an_error_that_cuda_reports_late_says_how_to_find_its_launch(source: str, device: RecordingDevice) -> None:
    error = RuntimeError(f"{source}: an illegal memory access was encountered")
    for debug in (False, True):
        bound = compile_graph(mixed_graph(), device=device, debug=debug).context.bound
        failure = bound.failure(bound.steps[0], error)
        assert isinstance(failure, InternalError)
        assert ("compile the graph with debug=True" in str(failure)) is not debug


def test_open_dims_and_entry_points_share_states_there(device: RecordingDevice) -> None:
    program, plain = compile_open_graph(sized_graph(), device=device), compile_open_graph(sized_graph())
    for batch in (1, 3, 1):
        x = torch.randn(batch, 256)
        torch.testing.assert_close(program.replay({"x": x})["y"], plain.replay({"x": x})["y"])
    entries = compile_graphs({"first": train_graph(), "second": train_graph()}, device=device)
    feed = {"x": torch.tensor([1.0, 2.0])}
    for name in ("first", "second", "first"):
        entries.entry(name).replay(feed)
    assert entries.states()["step"] == 3


def test_one_launch_updates_all_parameters_on_a_device(device: RecordingDevice) -> None:
    module, batch = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), (torch.randn(3, 4), torch.tensor([0, 1, 1]))
    adam = torch.optim.AdamW(module.parameters())

    def updates(place: RecordingDevice | str, large: int | None) -> int:
        program = record_step(module, nn.functional.cross_entropy, adam, batch, device=place, large=large)
        return sum(op.kind == "Adam" for op in program.graph.ops)

    assert (updates(device, None), updates(device, 0)) == (1, 4)
    wide = nn.Sequential(nn.Linear(4, 2**16), nn.Linear(2**16, 2))  # of 1 MiB and half of that
    module, adam = wide, torch.optim.AdamW(wide.parameters())
    assert (updates(RecordingDevice(2**25), None), updates("cpu", None)) == (1, 2)


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.SGD])
def test_a_recorded_step_is_that_of_torch(optimizer: Any, device: RecordingDevice) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3))
    batch = (torch.randn(5, 6), torch.randint(3, (5,)))
    plain = record_step(module, nn.functional.cross_entropy, optimizer(module.parameters(), lr=0.01), batch)
    program = record_step(
        module, nn.functional.cross_entropy, optimizer(module.parameters(), lr=0.01), batch, device=device
    )
    assert program.capture.is_whole
    waited = device.synchronizations
    for _ in range(5):
        torch.testing.assert_close(program.step(batch), plain.step(batch))
    assert device.synchronizations == waited
    assert program._late is not None
    sum_of_losses = device.memory.block_of(program._late._sum)
    assert sum_of_losses is not None and sum_of_losses.first in kept_blocks(program._compiled, device)
    broken = (torch.full((5, 6), torch.nan), batch[1])
    program.step(broken)
    with device.scope():
        program._late._sum.fill_(torch.nan)  # as a step before the host knows of the first one
    for _ in range(2):
        with pytest.raises(NotFinite, match="which cuda:0 shows after the step"):
            program.step(batch)
        torch.testing.assert_close(program.step(batch), plain.step(batch))


def test_generators_of_a_program_go_on_from_replay_to_replay(device: RecordingDevice) -> None:
    builder = GraphBuilder("noise")
    spec = TensorSpec((64,), "float32")
    attrs = {"size": (64,), "mean": 0.0, "scale": 1.0, "dtype": "float32", "seed": 3}
    program = compile_graph(
        builder.build(builder.emit("onnxline.random_normal.default", [], [("y", spec)], attrs)), device=device
    )
    assert torch.equal(program.run({})["y"], program.run({})["y"]), "a run begins with the seed"
    assert program.capture({}).report.is_whole
    before = program.snapshot()
    first, second = program.replay({})["y"], program.replay({})["y"]
    assert not torch.equal(first, second)
    assert torch.equal(program.replay({}, restore=before)["y"], first)


def test_native_kernels_are_for_the_cpu(device: RecordingDevice) -> None:
    with pytest.raises(UsageError, match="native: its kernels in C\\+\\+ are for the CPU"):
        compile_graph(mixed_graph(), device=device, native=True)
