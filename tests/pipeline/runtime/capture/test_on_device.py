"""Where the outputs of a program on a device are, what its captures hold, and what its launches read."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import library, nn
from typer.testing import CliRunner

from pipeline.cli import app
from pipeline.errors import InternalError
from pipeline.ir.graph import Graph, TensorSpec
from pipeline.ops import GraphBuilder, Kind
from pipeline.planning.files import PlanFile, encode_plans
from pipeline.runtime import CompiledProgram, RecordingDevice, compile_graph, kernels
from pipeline.runtime.capture.recorders import RECORDERS
from pipeline.runtime.devices import GraphFailure
from pipeline.runtime.kernels.base import Attrs, Ins, Launch, Outs
from pipeline.runtime.states import LostStates
from pipeline.runtime.torch_state import without_autograd
from pipeline.training import record_step
from pipeline.training.graph import moment_name, rate_name, stored_name
from tests.pipeline.runtime.capture.capture_programs import stored, train_graph
from tests.pipeline.runtime.capture.test_obstacles import Around, X, choose
from tests.pipeline.runtime.capture.test_recording_device import FEED, kept_blocks, mixed_graph, on
from tests.support.torch_programs import compile_module, graph_of


@pytest.fixture
def device() -> RecordingDevice:
    return RecordingDevice(2**22)


def test_the_arena_of_a_device_has_its_alignment_and_the_report_its_peak_and_bound(
    device: RecordingDevice, tmp_path: Path
) -> None:
    """Two values of 20 bytes are alive at once, and each begins at a multiple of 256 bytes there."""
    builder = GraphBuilder("difference")
    spec = TensorSpec((5,), "float32")
    x = builder.input("x", spec)
    (double,) = builder.emit("aten.add.Tensor", [x, x], [("double", spec)])
    (square,) = builder.emit("aten.mul.Tensor", [x, x], [("square", spec)])
    graph = builder.build(builder.emit("aten.sub.Tensor", [double, square], [("y", spec)]))
    before = device.memory.used
    context = compile_graph(graph, device=device).context
    assert (context.plan.arena_bytes, context.plan.live_bytes) == (512, 40)
    assert context._arena.nbytes == 512
    assert device.memory.used - before == 512 + 256, "arena and input"
    places = {context._slots[vid].data_ptr() % 256 for vid in context.plan.offsets}
    assert places == {0}
    file = tmp_path / "plan.bin"
    file.write_bytes(encode_plans(PlanFile({"main": context.plan})))
    said = CliRunner().invoke(app, ["plan", "show", str(file)]).stdout
    assert "arena: 512 B, at least 40 B are alive at once (12.800 x)" in said
    assert "peak: 40 B in call 1, Mul:" in said
    assert "double  bytes 0 to 20, calls 0 to 3" in said
    assert "square  bytes 256 to 276, calls 1 to 2" in said


def test_outputs_stay_on_the_device(device: RecordingDevice) -> None:
    program = compile_graph(mixed_graph(), device=device)
    found = [call(FEED, copy=copy)["y"] for call in (program.run, program.replay) for copy in (True, False)]
    assert all(map(device.holds, found))


def test_a_run_reads_nothing_on_the_host_but_where_the_table_says_so(device: RecordingDevice) -> None:
    plain, feed = compile_module(Around(choose), [X])
    choosing = compile_graph(graph_of(Around(choose), [X]), device=device)
    program = compile_graph(mixed_graph(), device=device)
    program.capture(FEED)
    waited = device.synchronizations
    program.run(FEED)
    program.replay(FEED)
    assert device.synchronizations == waited
    (found,) = choosing.run(feed).values()
    assert device.synchronizations > waited, "it chooses elements by a mask"
    torch.testing.assert_close(found, next(iter(plain.run(feed).values())))


def test_what_launches_allocate_comes_from_the_pool_of_the_session_and_is_in_the_report(
    device: RecordingDevice,
) -> None:
    """A normalisation has no `out=`, and a product has one. Blocks are multiples of 256 bytes."""
    program = compile_graph(mixed_graph(), device=device)
    first = program.capture(FEED).report
    assert first.pool_bytes > 0
    assert first.pool_bytes % 256 == 0
    assert f"{first.pool_bytes} B in the pool" in first.summary
    assert first.buffer_bytes == sum(fed.nbytes for fed in FEED.values())
    again = program.capture(FEED, mode="train").report
    assert len(program.captures) == 2
    assert again.pool_bytes == first.pool_bytes, "what one graph has given back is there for the next"
    without = compile_graph(train_graph(), device=device).capture({"x": torch.ones(2)}).report
    assert without.pool_bytes == 0
    assert "in the pool" not in without.summary


def test_contexts_share_weights_and_do_not_wait_for_one_another(device: RecordingDevice) -> None:
    program = compile_graph(mixed_graph(), device=device)
    contexts = [program.new_context() for _ in range(2)]
    (weight,) = program._bound.weights.values()
    assert all(any(slot.data_ptr() == weight.data_ptr() for slot in context._slots) for context in contexts)
    known = []
    for _ in range(2):  # to capture waits for the device, and a replay for nothing
        for stream, context in enumerate(contexts, 1):
            with device.on_stream(stream):
                context.captures.replay(FEED, program._policy)
        known.append((device._clock(1)[2], device._clock(2)[1], device._clock(1)[1]))
    assert known[0][:2] == known[1][:2], "neither stream knows of a new launch of the other"
    assert known[0][2] < known[1][2]


def test_a_device_holds_the_states_of_a_train_step_once(device: RecordingDevice) -> None:
    """A weight of 64 KiB, its two moments and its gradient; the first values stay where the module has them."""
    module = nn.Linear(128, 128, bias=False)
    optimizer = torch.optim.Adam(module.parameters())
    batch = (torch.randn(2, 128), torch.randn(2, 128))
    program = record_step(module, nn.functional.mse_loss, optimizer, batch, device=device)
    assert 4 * 2**16 < device.memory.used < 5 * 2**16
    states = program.snapshot().states
    assert torch.equal(states[stored_name("weight")], module.weight)
    assert not states[moment_name("weight", "exp_avg")].any()


def test_one_launch_updates_all_parameters_by_a_rate_that_its_kernel_reads(device: RecordingDevice) -> None:
    """The state is float64, as schedules of torch compute, and the kernel of a device reads float32."""
    module = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    batch = (torch.randn(5, 6), torch.randint(3, (5,)))
    program = record_step(module, nn.functional.cross_entropy, optimizer, batch, device=device)
    (capture,) = program._captures._captures.values()
    launches = [launch for part in capture._parts for launch in part._launches]  # type: ignore[attr-defined]
    (update,) = (call for call in calls_in(launches) if "adamw" in call.func.__name__)
    assert len(update.args[0]) == 4
    assert update.keywords["lr"].dtype is torch.float32
    assert program.snapshot().states[rate_name(0)].dtype is torch.float64
    program.step(batch)
    assert update.keywords["lr"].item() == torch.tensor(0.1).item()
    optimizer.param_groups[0]["lr"] = 0.01
    program.step(batch)
    assert update.keywords["lr"].item() == torch.tensor(0.01).item()


def calls_in(launches: Any) -> Iterator[partial[Any]]:
    """All calls that launches consist of."""
    for launch in launches:
        if isinstance(launch, partial):
            yield launch
            yield from calls_in(part for item in launch.args if isinstance(item, tuple) for part in item)


def test_memory_at_a_byte_that_kernels_do_not_read_from_is_refused(device: RecordingDevice) -> None:
    """A plan for the CPU has such offsets."""
    with pytest.raises(InternalError, match="byte 64 of the arena is no multiple of 256, as kernels of 'cuda:0'"):
        device.view(device.allocate(512), 64, TensorSpec((4,), "float32"))


def test_a_copy_between_host_and_device_waits_unless_it_says_otherwise(device: RecordingDevice) -> None:
    x, ones = on(device, 3), torch.ones(3)
    with device.scope():
        before = device.synchronizations
        x.copy_(ones, non_blocking=True)
        x.copy_(ones, True)
        x.copy_(x)
        assert device.synchronizations == before
        x.copy_(ones)
        assert device.synchronizations == before + 1


def test_a_large_tensor_is_pinned_as_its_buffer_lies(device: RecordingDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch brings any other pinned memory into the buffer's order by pageable memory, for which the host waits."""
    builder = GraphBuilder("large")
    spec = TensorSpec((128, 256), "float32")
    program = compile_graph(
        builder.build(builder.emit("aten.neg.default", [builder.input("x", spec)], [("y", spec)])), device=device
    )
    x, pinned = torch.randn(256, 128).T, list[torch.Tensor]()
    program.capture({"x": x})
    monkeypatch.setattr(device, "as_source", lambda tensor: pinned.append(tensor) or tensor)
    waited = device.synchronizations
    for call in (program.replay, program.run):
        assert torch.equal(call({"x": x})["y"], -x)
        assert torch.equal(call({"x": x.contiguous()})["y"], -x)
        assert device.synchronizations == waited
        assert [tensor.is_contiguous() for tensor in pinned] == [True, True]
        assert torch.equal(call({"x": device.copy_in(x)})["y"], -x)
        assert len(pinned) == 2, "what is on the device is not pinned"
        pinned.clear()


@pytest.mark.parametrize("name", ["run", "replay"])
def test_a_small_tensor_is_copied_from_where_it_is(
    name: str, device: RecordingDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA takes a few KiB into its queue, so to pin them would be a copy more."""
    program = compile_graph(mixed_graph(), device=device)
    program.capture(FEED)
    monkeypatch.setattr(device, "as_source", None)
    getattr(program, name)(FEED)


def test_a_weight_of_the_feed_is_written_after_the_replays_that_read_it_on_another_stream(
    device: RecordingDevice,
) -> None:
    """The captures of a session share its buffer: a replay writes there, and so does a further capture."""
    builder = GraphBuilder("sum")
    x, w = builder.input("x", TensorSpec((2,), "float32")), builder.param("w", TensorSpec((2,), "float32"), None)
    (y,) = builder.emit("aten.add.Tensor", [x, w], [("y", TensorSpec((2,), "float32"))])
    program = compile_graph(builder.build([y]), device=device)
    feed = {"x": torch.ones(2), "w": torch.ones(2)}
    with device.on_stream(1):
        program.capture(feed, static_roles=[])
        program.replay(feed)
    with device.on_stream(2), device.scope():
        assert program.replay({**feed, "w": torch.full((2,), 3.0)})["y"].tolist() == [4, 4]
    with device.on_stream(3):
        program.capture({**feed, "w": torch.full((2,), 5.0)}, mode="train", static_roles=[])
        assert program.replay({"x": torch.ones(2)})["y"].tolist() == [6, 6]


def test_a_weight_that_its_owner_moves_to_the_host_is_brought_back(device: RecordingDevice) -> None:
    builder = GraphBuilder("negative")
    w = builder.param("w", TensorSpec((3,), "float32"), None)
    program = compile_graph(
        builder.build(builder.emit("aten.neg.default", [w], [("y", TensorSpec((3,), "float32"))])), device=device
    )
    weight = on(device, 3)
    assert program.run({"w": weight})["y"].tolist() == [-1] * 3
    weight.data = torch.full((3,), 2.0)
    assert program.run({"w": weight})["y"].tolist() == [-2] * 3


def test_a_replay_reads_a_part_of_what_it_has_written_and_given_back(device: RecordingDevice) -> None:
    x, out = on(device, 4), on(device, 2)
    device.record([lambda: torch.add((x * 2)[2:], 1, out=out)], device.new_pool(), ()).replay()
    assert out.tolist() == [3, 3]


def test_two_streams_may_not_write_where_the_other_one_reads(device: RecordingDevice) -> None:
    x, y = on(device, 3), on(device, 3)
    with device.scope(), device.on_stream(1):
        y.copy_(x)
    with device.scope(), device.on_stream(2):
        assert (x + x).tolist() == [2, 2, 2], "both may read"
        with pytest.raises(RuntimeError, match="streams race"):
            x.add_(1)


def test_a_replay_may_not_write_to_memory_that_was_freed(device: RecordingDevice) -> None:
    held = [on(device, 3)]
    graph = device.record([lambda: held[0].fill_(1)], device.new_pool(), ())
    graph.replay()
    held.clear()
    with pytest.raises(RuntimeError, match="touches memory that was freed"):
        graph.replay()


def test_a_graph_may_not_read_what_another_one_of_its_pool_has_given_back(device: RecordingDevice) -> None:
    """A graph may read memory of the pool that it gave back itself: nothing else is there before it is done."""
    x, out, held, pool = on(device, 3), on(device, 3), list[torch.Tensor](), device.new_pool()
    maker = device.record([lambda: held.append(x * 2)], pool, ())
    reader = device.record([lambda: torch.add(held[0], 1, out=out)], pool, ())
    both = device.record([lambda: torch.add(x * 4, 1, out=out)], pool, ())
    held.clear()
    maker.replay()
    with pytest.raises(RuntimeError, match="touches memory that was freed"):
        reader.replay()
    both.replay()
    assert out.tolist() == [5, 5, 5]


def test_a_launch_may_not_read_the_host_within_an_operator_that_calls_others(device: RecordingDevice) -> None:
    x = on(device, 3)
    with without_autograd(), pytest.raises(GraphFailure, match=r"reads the host \(aten.nonzero.default\)"):
        device.record([lambda: torch.ops.aten.nonzero_numpy(x)], device.new_pool(), ())


def test_a_graph_has_to_know_the_generators_that_it_draws_from(device: RecordingDevice) -> None:
    x, generator = on(device, 3), device.generator(3)
    launches = [lambda: x.normal_(generator=generator)]
    with pytest.raises(GraphFailure, match="draws from a generator that the graph does not know"):
        device.record(launches, device.new_pool(), ())
    device.record(launches, device.new_pool(), [generator]).replay()
    assert not torch.equal(x, torch.ones(3))


def test_first_values_of_states_are_kept_and_weights_are_there_on_every_stream(device: RecordingDevice) -> None:
    """Weights are copied on the stream that compiles; a reset reads the first value of a state where it lies."""
    given = on(device, 2)
    with device.on_stream(1), device.scope():
        program = compile_graph(train_graph(weight=False), {"w": given}, device=device)
    block = device.memory.block_of(given)
    assert block is not None and block.first in kept_blocks(program, device)
    with device.on_stream(2):
        assert program.new_context().run({"x": torch.ones(2)})["y"].tolist() == [0.5, 0.5]


READS_STATES: dict[str, Callable[[CompiledProgram], object]] = {
    "all": lambda program: program.states(),
    "one": lambda program: program.state("w"),
    "set": lambda program: program.give_states({"w": torch.ones(2)}),
    "reset": lambda program: program.reset_states(),
    "walk": lambda program: list(program.context.walk({"x": torch.ones(2)})),
}


@pytest.mark.parametrize("name", READS_STATES)
def test_states_are_read_and_set_after_the_runs_on_another_stream(name: str, device: RecordingDevice) -> None:
    program = compile_graph(train_graph(), device=device)
    with device.on_stream(1):
        program.run({"x": torch.ones(2)})
    with device.on_stream(2), device.scope():
        waited = device.synchronizations
        READS_STATES[name](program)
        assert name == "reset" or device.synchronizations == waited


def test_further_launches_read_the_outputs_of_their_own_replay(device: RecordingDevice) -> None:
    """Also an output that lies elsewhere, and is copied in each replay."""
    builder, seen = GraphBuilder("view"), on(device, 2)
    program = compile_graph(builder.build([builder.input("x", TensorSpec((2,), "float32"))]), device=device)
    program.captures.session.further = lambda outputs: [partial(seen.copy_, outputs["x"])]
    for number in (2.0, 3.0):
        program.replay({"x": torch.full((2,), number)})
        with device.scope():
            assert seen.tolist() == [number] * 2


def test_a_capture_is_warmed_up_three_times_on_a_stream_of_its_own(device: RecordingDevice) -> None:
    x, seen = on(device, 3), list[int]()

    def run() -> None:
        with device.scope():
            x.add_(1)
        seen.append(device.thread.stream)

    session = compile_graph(mixed_graph(), device=device).captures.session
    with device.on_stream(5), device.scope():
        x.add_(1)
        RECORDERS["graph"](session).warm_up(run)
        assert (len(seen), len({*seen, 5})) == (3, 2), "one stream, and not the caller's"
        assert x.tolist() == [5] * 3
        x.add_(1)  # no race: the caller's stream waits for the warm-up, as that does for the caller's


# Four faults, each planted in the kernel of a program: a capture or a replay fails and names its call.


def plant(monkeypatch: pytest.MonkeyPatch, launch: Callable[[torch.Tensor, torch.Tensor], object]) -> Graph:
    """A graph whose one kernel is `launch`, of its input and its output."""

    def bind(ins: Ins, outs: Outs, _: Attrs) -> Launch:
        return partial(launch, ins[0], outs[0])

    monkeypatch.setattr(kernels, "KERNELS", {**kernels.KERNELS, Kind.NotFinite: bind})
    builder = GraphBuilder("planted")
    x = builder.input("x", TensorSpec((), "float32"))
    return builder.build(builder.emit("NotFinite", [x], [("y", TensorSpec((), "float32"))]))


PAGEABLE = torch.zeros(())
PLANTED: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], object], str]] = {
    "reads the host": (lambda x, out: out.fill_(x.item()), "it reads the host"),
    "copies from pageable memory": (lambda _, out: out.copy_(PAGEABLE), "it copies from pageable memory"),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_kernel_that_no_graph_can_hold_fails_its_capture(
    fault: str, device: RecordingDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch, reason = PLANTED[fault]
    program = compile_graph(plant(monkeypatch, launch), device=device)
    assert program.run({"x": torch.tensor(0.0)})["y"] == 0, "a run may do it"
    with pytest.raises(InternalError, match=rf"call 0 NotFinite\(x: float32\[\]\) .* is capturing: {reason}"):
        program.capture({"x": torch.tensor(0.0)})


def test_a_kernel_that_allocates_in_a_replay_fails_it(device: RecordingDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator of the user's that takes memory of the device by itself: a graph calls it again."""
    with library._scoped_library("planted", "FRAGMENT") as own:
        own.define("grow(Tensor x, Tensor(a!) out) -> ()")

        def grow(x: torch.Tensor, out: torch.Tensor) -> None:
            out.copy_(device.allocate(4).view(torch.float32)[0].copy_(x))

        own.impl("grow", grow, "CompositeExplicitAutograd")
        program = compile_graph(plant(monkeypatch, torch.ops.planted.grow), device=device)
        program.capture({"x": torch.tensor(2.0)})
        with pytest.raises(InternalError, match=r"call 0 NotFinite.* a replay allocates memory of the device"):
            program.replay({"x": torch.tensor(2.0)})


def test_a_graph_that_fails_takes_the_states_that_any_of_its_launches_writes(
    device: RecordingDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph does not say how far it came: `w` is written before the launch that fails."""
    held = list[torch.Tensor]()
    plant(monkeypatch, lambda _, out: out.copy_(held[0]))
    builder = GraphBuilder("late")
    scalar = TensorSpec((), "float32")
    x, w = builder.input("x", scalar), builder.state("w", scalar, stored(1.0))
    (after,) = builder.emit("aten.add.Tensor", [w, x], [("after", scalar)])
    graph = replace(builder.build(builder.emit("NotFinite", [x], [("y", scalar)])), updates={w: after})
    with device.scope():
        held.append(on(device, 1)[0])
    program = compile_graph(graph, device=device)
    program.capture({"x": torch.tensor(1.0)})
    held.clear()
    with pytest.raises(InternalError, match="a replay touches memory that was freed"):
        program.replay({"x": torch.tensor(1.0)})
    with pytest.raises(LostStates, match="had begun to write to the states w"):
        program.states()


def test_a_kernel_that_reads_memory_which_the_pool_of_another_program_has_freed_fails_its_replay(
    device: RecordingDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = list[torch.Tensor]()

    def keep(x: torch.Tensor, out: torch.Tensor) -> None:
        held[:] = [x * 2]
        out.copy_(held[0])

    maker = compile_graph(plant(monkeypatch, keep), device=device)
    maker.capture({"x": torch.tensor(1.0)})
    reader = compile_graph(plant(monkeypatch, lambda _, out: out.copy_(held[0])), device=device)
    feed = {"x": torch.tensor(1.0)}
    reader.capture(feed)
    maker.replay(feed)
    assert reader.replay(feed)["y"] == 2
    held.clear()
    maker.drop_captures()
    gc.collect()
    with pytest.raises(InternalError, match=r"call 0 NotFinite.* a replay touches memory that was freed"):
        reader.replay(feed)
