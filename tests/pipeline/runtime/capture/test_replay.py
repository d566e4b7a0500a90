"""What a replay computes, whose memory it reads and writes, and what it costs."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import DataError, UsageError
from pipeline.ir.graph import Graph, TensorSpec
from pipeline.ops import GraphBuilder
from pipeline.runtime import compile_graph
from pipeline.runtime.capture import CapturePolicy
from pipeline.runtime.capture.recorders import CallLoop
from tests.pipeline.runtime.capture.capture_programs import PAIR, negate, sum_with, train_graph
from tests.support.planning_graphs import graphs
from tests.support.torch_programs import compile_module


@given(graphs(), st.integers(0, 2**31))
def test_replays_compute_what_runs_compute(graph: Graph, seed: int) -> None:
    """Inputs of any content one after the other, as copies and as views, with runs in between."""
    program, other, random = compile_graph(graph), compile_graph(graph), torch.Generator().manual_seed(seed)
    for replay in range(4):
        feed = {
            graph.values[vid].name: torch.randn(graph.values[vid].spec.sizes, generator=random) for vid in graph.inputs
        }
        wanted = other.run(feed)
        found = program.replay(feed, copy=replay % 2 == 0)
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
        if replay == 1:
            assert all(torch.equal(tensor, wanted[name]) for name, tensor in program.run(feed).items())


def test_outputs_are_copies_or_views_that_say_so() -> None:
    program = negate()
    first = program.replay({"x": torch.tensor([1.0, 2.0])})
    views = program.replay({"x": torch.tensor([3.0, 4.0])}, copy=False)
    assert repr(views) == "<views of y: the next replay overwrites them>"
    assert views["y"].tolist() == [-3, -4]
    again = program.replay({"x": torch.tensor([5.0, 6.0])}, copy=False)
    assert (again is views, views["y"].tolist()) == (True, [-5, -6])
    assert first["y"].tolist() == [-1, -2]


def test_a_replay_holds_nothing_of_its_feed() -> None:
    """Its numbers may change and its memory may go as soon as the replay is over."""
    program, x = negate(), torch.tensor([1.0, 2.0])
    views = program.replay({"x": x}, copy=False)
    references = sys.getrefcount(x)
    program.replay({"x": x}, copy=False)
    x.zero_()
    x.untyped_storage().resize_(0)
    assert (views["y"].tolist(), sys.getrefcount(x)) == ([-1, -2], references)


def test_the_storage_of_a_bound_weight_cannot_be_freed() -> None:
    """Torch's operators would read the freed memory without a check."""
    builder, w = GraphBuilder("sum"), torch.tensor([10.0, 20.0])
    x, param = builder.input("x", PAIR), builder.param("w", PAIR)
    program = compile_graph(builder.build(builder.emit("aten.add.Tensor", [x, param], [("y", PAIR)])), {"w": w})
    program.capture({"x": torch.ones(2)})
    with pytest.raises(RuntimeError, match="not resizable"):
        w.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="not resizable"):
        w.resize_(1000)
    del w
    gc.collect()
    assert program.replay({"x": torch.ones(2)})["y"].tolist() == [11, 21]


def test_a_bound_weight_that_was_given_other_memory_is_an_error_at_the_next_capture() -> None:
    """It would compute with the old numbers, and nobody could see them any more."""
    builder, w = GraphBuilder("sum"), torch.nn.Parameter(torch.tensor([10.0, 20.0]))
    x, param = builder.input("x", PAIR), builder.param("w", PAIR)
    graph = builder.build(builder.emit("aten.add.Tensor", [x, param], [("y", PAIR)]))
    program, other = compile_graph(graph, {"w": w}), compile_graph(graph, {"w": w.data.clone()})
    program.check_weights()
    w.data = torch.tensor([30.0, 40.0])
    for call in (program.check_weights, lambda: program.capture({"x": torch.ones(2)})):
        with pytest.raises(UsageError, match="weight 'w' was bound to the memory of a tensor that has other memory"):
            call()
    other.check_weights()
    assert other.replay({"x": torch.ones(2)})["y"].tolist() == [11, 21]
    again = compile_graph(graph, {"w": w})
    del w  # a tensor that is gone cannot be moved; the program has its memory
    gc.collect()
    again.check_weights()
    assert again.replay({"x": torch.ones(2)})["y"].tolist() == [31, 41]


class Exchange(torch.nn.Module):
    """Outputs that are inputs, a weight, a state, and a view of a transposed result."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([7.0, 8.0]))
        self.register_buffer("old", torch.tensor([1.0, 2.0]))

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        before = self.get_buffer("old").clone()
        self.get_buffer("old").copy_(a)
        return a, b, self.weight, before, torch.outer(a, b).t()


def test_outputs_that_show_inputs_weights_or_states_have_memory_of_their_own() -> None:
    """Views that are fed again, exchanged, are read before they are overwritten."""
    program, feed = compile_module(Exchange(), [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])])
    (a, b), names = feed, [program.plan.slots[vid].name for vid in program.plan.outputs]
    found = [program.replay(feed, copy=False)[name] for name in names]
    assert [tensor.tolist() for tensor in found] == [[1, 2], [3, 4], [7, 8], [1, 2], [[3, 6], [4, 8]]]
    program.replay({a: found[1], b: found[0]}, copy=False)
    assert [tensor.tolist() for tensor in found[:2]] == [[3, 4], [1, 2]]
    found[2].zero_()
    assert program.replay(feed)[names[2]].tolist() == [7, 8]


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_it_replays_in_every_mode_and_takes_tensors_of_every_kind(mode: type) -> None:
    with mode():
        program = sum_with(fed=True)
        program.capture({"x": torch.zeros(2), "w": torch.tensor([10.0, 20.0], requires_grad=mode is torch.enable_grad)})
        fed = [
            torch.arange(4.0)[::2],
            torch.arange(4.0).view(2, 2).t()[0],
            np.array([0.0, 2.0], np.float32),
            torch.nn.Parameter(torch.tensor([0.0, 2.0])),
            torch.tensor([0.0, 2.0], requires_grad=True),
            torch.tensor([0.0, -2.0])._neg_view(),
        ]
    for x in fed:
        found = program.replay({"x": x})["y"]
        assert (found.tolist(), found.requires_grad) == ([10, 22], False)


def test_a_feed_that_does_not_fit_is_refused_in_one_sentence() -> None:
    program, x = sum_with(fed=True), torch.zeros(2)
    with pytest.raises(UsageError, match="the feed lacks 'w'; a capture needs every input, and each weight once"):
        program.replay({"x": x})
    capture = program.capture({"x": x, "w": x})
    wrong = {
        r"input 'x' is float32\[3\] on cpu; expected float32\[2\]": {"x": torch.zeros(3)},
        r"input 'x' is float64\[2\] on cpu": {"x": x.double()},
        r"input 'x' is float32\[2\] on meta": {"x": x.to("meta")},
        "expected a torch tensor or a numpy array": {"x": [1.0, 2.0]},
        "the feed lacks 'x'": {},
        "the feed has 'v', which is no input; inputs: x, w": {"x": x, "v": x},
        r"input 'x' is of the layout torch\.sparse_coo; expected a dense one": {"x": x.to_sparse()},
    }
    for message, feed in wrong.items():
        with pytest.raises(UsageError, match=message):
            program.replay(feed)
    with pytest.raises(UsageError, match="the feed has 'v'"):
        program.capture({"x": x, "v": x})
    with pytest.raises(UsageError, match=r"input 'x' is float32\[3\] on cpu; this capture is for float32\[2\] on cpu"):
        capture.replay({"x": torch.zeros(3)})
    assert program.replay({"x": x + 1})["y"].tolist() == [1, 1]


def test_only_what_changed_is_copied_on_request() -> None:
    builder = GraphBuilder("sum")
    x, y = builder.input("x", PAIR), builder.input("y", PAIR)
    program = compile_graph(builder.build(builder.emit("aten.sub.Tensor", [x, y], [("d", PAIR)])))
    one, two = torch.ones(2), torch.full((2,), 2.0)
    with pytest.raises(UsageError, match="there is no capture yet"):
        program.replay({"x": one}, changed=["x"])
    assert program.replay({"x": two, "y": one})["d"].tolist() == [1, 1]
    assert program.replay({"x": one * 5}, changed=["x"])["d"].tolist() == [4, 4]
    assert program.replay({"x": one, "y": two}, changed=["y"])["d"].tolist() == [3, 3]
    assert program.replay({}, changed=[])["d"].tolist() == [3, 3]
    for feed, changed, message in (
        ({"x": one}, ["z"], "'z' is not copied at a replay"),
        ({"x": one}, ["y"], "the feed lacks 'y'"),
        ({"x": torch.ones(3)}, ["x"], r"input 'x' is float32\[3\]"),
    ):
        with pytest.raises(UsageError, match=message):
            program.replay(feed, changed=changed)


def test_roles_may_be_static_copied_or_live() -> None:
    x, w = torch.ones(2), torch.tensor([10.0, 20.0])
    static = sum_with(fed=True).capture({"x": x, "w": w}, static_roles=["input", "param", "const"], copy_roles=[])
    assert static.replay({})["y"].tolist() == [11, 21]
    copied = sum_with(fed=True).capture({"x": x, "w": w}, copy_roles=["input", "param"])
    assert copied.replay({"x": x, "w": x})["y"].tolist() == [2, 2]
    live = sum_with(fed=True).capture({"x": x, "w": w}, static_roles=[])
    assert live.replay({"x": x + 1})["y"].tolist() == [12, 22]
    assert live.replay({"x": x, "w": x})["y"].tolist() == [2, 2]
    assert live.replay({"x": x})["y"].tolist() == [2, 2]
    assert (static.report.static, copied.report.copied, live.report.live) == (("x", "w"), ("x", "w"), ("w",))


def test_a_policy_that_cannot_be_is_refused() -> None:
    for wrong, message in (
        ({"mode": "trian"}, "no capture mode 'trian'; did you mean 'train'"),
        ({"static_roles": ["tmp"]}, "static_roles: no role 'tmp'"),
        ({"copy_roles": ["inputs"]}, "copy_roles: no role 'inputs'; did you mean 'input'"),
        ({"static_roles": ["input"]}, "role input is in static_roles and in copy_roles"),
    ):
        with pytest.raises(UsageError, match=message):
            CapturePolicy.of(**wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="copy_roles: param 'w' was bound when the graph was compiled"):
        sum_with(fed=False).capture({"x": torch.ones(2)}, copy_roles=["input", "param"])


def test_an_index_out_of_range_is_named_and_takes_its_states() -> None:
    class Cache(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("keys", torch.zeros(4, 2))
            self.register_buffer("count", torch.tensor(0))

        def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
            self.get_buffer("keys").index_copy_(0, at, x)
            self.get_buffer("count").add_(1)
            return x + 1

    program, feed = compile_module(Cache(), [torch.ones(1, 2), torch.tensor([0])])
    with pytest.raises(DataError, match=r"op 'index_copy' .*index 9 is out of bounds"):
        program.capture({**feed, "at": torch.tensor([9])})
    assert not program.states()["b_keys"].any(), "a capture that fails puts all states back"
    program.replay(feed)
    before = program.snapshot()
    with pytest.raises(DataError, match=r"op 'index_copy' .*index 9 is out of bounds"):
        program.replay({**feed, "at": torch.tensor([9])})
    with pytest.raises(UsageError, match="had begun to write to the states b_keys: give all"):
        program.replay(feed)
    program.replay(feed, restore=before)
    assert program.states()["b_count"].item() == 2


def test_a_view_may_be_pointed_elsewhere() -> None:
    program, x = negate(), torch.ones(2)
    program.replay({"x": x}, copy=False)["y"].set_(torch.zeros(5).untyped_storage())
    assert program.replay({"x": x})["y"].tolist() == [-1, -1]


def test_a_replay_that_is_interrupted_leaves_no_half_written_state() -> None:
    program, x = compile_graph(train_graph()), {"x": torch.ones(2)}
    capture = program.capture(x)
    start = program.snapshot()

    def interrupt() -> None:
        raise KeyboardInterrupt

    parts, capture._parts = capture._parts, (CallLoop([*capture._parts[0]._launches, interrupt]),)  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        program.replay(x)
    capture._parts = parts
    with pytest.raises(UsageError, match="had begun to write to the states step, w"):
        program.replay(x)
    assert program.replay(x, restore=start)["y"].tolist() == [0.5, 1.5]


def allocations(replay: Callable[[], object]) -> int:
    """How often torch allocates while `replay` is called once, by torch's profiler."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        replay()
    events = profile.events()
    assert events is not None
    return sum(event.name == "[memory]" for event in events)


def blocks_left_by(replay: Callable[[], object], times: int) -> int:
    """Python's memory blocks that are allocated afterwards and were not before."""
    gc.collect()
    gc.disable()
    try:
        for _ in range(100):  # the collector has emptied the free lists
            replay()
        before = sys.getallocatedblocks()
        for _ in range(times):
            replay()
        return sys.getallocatedblocks() - before
    finally:
        gc.enable()


def test_a_replay_allocates_nothing() -> None:
    """No tensor, by torch's count of allocations; and no Python object is left over, by the count of blocks."""
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8), torch.nn.Softmax(-1))
    modules = [(layers, (4, 8)), (torch.nn.Linear(64, 64), (32, 64))]
    compiled = [compile_module(module.eval(), [torch.randn(sizes)]) for module, sizes in modules]
    replays = [partial(program.replay, feed, copy=False) for program, feed in compiled]
    train = compile_graph(train_graph())
    train.capture({"x": torch.ones(2)}, mode="train")
    x = {"x": torch.ones(2)}
    assert allocations(lambda: torch.empty(10)) > 0, "the profiler counts"
    for replay in (*replays, lambda: train.replay(x, copy=False)):
        for _ in range(10):
            replay()
        assert allocations(replay) == 0
        assert blocks_left_by(replay, 500) < 10


def test_the_addresses_of_a_replay_never_change() -> None:
    program = negate(TensorSpec((64, 512), "float32"), calls=3)
    addresses = {
        tuple(view.data_ptr() for view in program.replay({"x": torch.randn(64, 512)}, copy=False).values())
        for _ in range(20)
    }
    assert len(addresses) == 1
