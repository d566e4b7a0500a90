"""Values that a run changes: they live with the program, and the caller's tensors stay as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from pipeline.errors import SourceError, UsageError
from pipeline.ir.graph import Graph, TensorSpec
from pipeline.ops import GraphBuilder
from pipeline.runtime import CompiledProgram, RecordingDevice, compile_graph
from pipeline.runtime.devices import Device
from pipeline.runtime.eager import run_eager
from pipeline.runtime.states import LostStates
from pipeline.runtime.torch_state import FLOAT32, plain_state, without_autograd
from tests.support.torch_programs import Calls, compile_module, feed_of, graph_of, in_float64


class Swap(torch.nn.Module):
    """Each buffer takes the old value of the other; the output shows an old one."""

    a: torch.Tensor
    b: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("a", torch.tensor([1.0, 2.0]))
        self.register_buffer("b", torch.tensor([10.0, 20.0]))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        old = self.a.clone()
        self.a.copy_(self.b)
        self.b.copy_(old)
        return old, self.a + x


class Cache(torch.nn.Module):
    keys: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(4, 2))

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        self.keys.index_copy_(0, at, x)
        self.keys[3:] = x * 2
        return self.keys.sum(0)


def test_two_states_change_places() -> None:
    module, x = Swap(), torch.ones(2)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    program, feed = compile_module(module, [x])
    for copy in (True, False):
        program.reset_states()
        old, total = program.run(feed, copy=copy).values()
        assert (old.tolist(), total.tolist()) == ([1.0, 2.0], [11.0, 21.0])
        assert {name: tensor.tolist() for name, tensor in program.states().items()} == {
            "b_a": [10.0, 20.0],
            "b_b": [1.0, 2.0],
        }
    assert all(torch.equal(module.state_dict()[name], tensor) for name, tensor in before.items())


def set_to_constant() -> tuple[Graph, int]:
    """y = x + s, with s as a further output, then s = [1, 2], which is a constant; and the vid of that."""
    builder, pair = GraphBuilder("reset"), TensorSpec((2,), "float32")
    x, once = builder.input("x", pair), builder.const("once", pair, None)
    state = builder.state("s", pair)
    graph = builder.build([*builder.emit("aten.add.Tensor", [x, state], [("y", pair)]), state])
    return replace(graph, updates={state: once}), once


SET = {"once": torch.tensor([1.0, 2.0]), "s": torch.tensor([5.0, 5.0])}


@pytest.mark.parametrize("device", ["cpu", RecordingDevice(2**20)], ids=str)
def test_a_state_is_set_to_a_constant_which_stays(device: Device | str) -> None:
    graph, _ = set_to_constant()
    for name in ("run", "replay"):
        program = compile_graph(graph, SET, device=device)
        run, feed = getattr(program, name), {"x": torch.ones(2)}
        assert [run(feed)["y"].tolist() for _ in range(3)] == [[6, 6], [2, 3], [2, 3]]
        program.give_states({"s": torch.zeros(2)})
        assert [run(feed)["y"].tolist() for _ in range(2)] == [[1, 1], [2, 3]]
        program.reset_states()
        found = [{key: value.tolist() for key, value in run(feed, copy=False).items()} for _ in range(2)]
        assert found == [{"y": [6, 6], "s": [5, 5]}, {"y": [2, 3], "s": [1, 2]}], "the value before the run"


def swapping(device: Device | str) -> CompiledProgram:
    """Each of two states becomes the other one itself, of which no op makes a copy."""
    builder, pair = GraphBuilder("swap"), TensorSpec((2,), "float32")
    x, first, second = builder.input("x", pair), builder.state("first", pair), builder.state("second", pair)
    graph = builder.build(builder.emit("aten.add.Tensor", [x, first], [("y", pair)]))
    values = {"first": torch.tensor([1.0, 2.0]), "second": torch.tensor([3.0, 4.0])}
    return compile_graph(replace(graph, updates={first: second, second: first}), values, device=device)


@pytest.mark.parametrize("device", ["cpu", RecordingDevice(2**20)], ids=str)
def test_two_states_become_each_other(device: Device | str) -> None:
    feed = {"x": torch.zeros(2)}
    for name in ("run", "replay"):
        program = swapping(device)
        assert [getattr(program, name)(feed)["y"].tolist() for _ in range(3)] == [[1, 2], [3, 4], [1, 2]]
        assert {name: state.tolist() for name, state in program.states().items()} == {"first": [3, 4], "second": [1, 2]}


@pytest.mark.parametrize("device", ["cpu", RecordingDevice(2**20)], ids=str)
def test_a_state_becomes_a_view_of_itself(device: Device | str) -> None:
    builder, square = GraphBuilder("turn"), TensorSpec((2, 2), "float32")
    x, held = builder.input("x", square), builder.state("s", square)
    (y,) = builder.emit("aten.add.Tensor", [x, held], [("y", square)])
    (turned,) = builder.emit("aten.permute.default", [held], [("turned", square)], {"dims": (1, 0)})
    graph, feed = replace(builder.build([y]), updates={held: turned}), {"x": torch.zeros(2, 2)}
    for name in ("run", "replay"):
        program = compile_graph(graph, {"s": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}, device=device)
        found = [getattr(program, name)(feed)["y"].flatten().tolist() for _ in range(3)]
        assert found == [[1, 2, 3, 4], [1, 3, 2, 4], [1, 2, 3, 4]]


@pytest.mark.parametrize("name", ["run", "replay"])
def test_states_of_which_some_were_written_have_no_value(name: str) -> None:
    program, feed = swapping("cpu"), {"x": torch.zeros(2)}
    call = getattr(program, name)
    call(feed)
    states = program.context.states.tensors
    states[max(states)].as_strided_((2,), (0,))  # torch refuses to write to elements that lie on one another
    with pytest.raises(RuntimeError, match="refers to a single memory location"):
        call(feed)
    with pytest.raises(LostStates, match="had begun to write to the states first, second"):
        program.states()


def test_a_constant_that_a_run_would_change_is_refused() -> None:
    """So whoever reads a constant need not ask for its updates."""
    graph, once = set_to_constant()
    with pytest.raises(UsageError, match="'once' has the role const and an update; only params, states and inputs"):
        compile_graph(replace(graph, updates={once: graph.outputs[0]}), SET)


def test_a_cache_is_written_as_torch_writes_it() -> None:
    module, given = Cache(), Cache()
    program, _ = compile_module(given, [torch.ones(1, 2), torch.tensor([0])])
    for step in range(3):
        inputs = [torch.full((1, 2), step + 1.0), torch.tensor([step])]
        (actual,) = program.run(dict(zip(("x", "at"), inputs, strict=True))).values()
        assert torch.equal(actual, module(*inputs))
    assert torch.equal(program.states()["b_keys"], module.keys)
    assert not given.keys.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_in_train_mode_move_their_statistics(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module, x = torch.nn.BatchNorm1d(3).train().to(dtype), torch.randn(5, 3).to(dtype)
    program, feed = compile_module(module, [x])
    actual = next(iter(program.run(feed).values()))
    torch.testing.assert_close(actual, module(x))
    torch.testing.assert_close(program.states()["b_running_var"], module.running_var)
    assert program.states()["b_num_batches_tracked"].item() == 1


def test_states_come_once() -> None:
    graph = graph_of(Swap(), [torch.ones(2)])
    program, feed = compile_graph(graph), feed_of(graph, [torch.ones(2)])
    assert [entry.name for entry in program.feed_signature] == ["x"]
    with pytest.raises(UsageError, match="states without a value: b_a, b_b"):
        program.run(feed)
    program.give_states({"b_a": torch.zeros(2)})
    program.run({**feed, "b_b": torch.ones(2)})
    assert program.states()["b_a"].tolist() == [1.0, 1.0]
    program.run(feed)
    assert program.states()["b_a"].tolist() == [0.0, 0.0]


def test_an_updated_input_is_reported_and_not_touched() -> None:
    class Add(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.add_(1)
            return x * 2

    x = torch.zeros(2)
    graph = graph_of(Add(), [x.clone()])
    outputs, updates = compile_graph(graph).run_updating({"x": x})
    assert ([tensor.tolist() for tensor in outputs.values()], updates["x"].tolist()) == ([[2.0, 2.0]], [1.0, 1.0])
    assert run_eager(graph, {"x": x}).updates["x"].tolist() == [1.0, 1.0]
    assert x.tolist() == [0.0, 0.0]


def test_weights_are_bound_where_they_lie() -> None:
    layer = torch.nn.Linear(2, 2, bias=False)
    program, feed = compile_module(layer, [torch.ones(1, 2)])
    assert [entry.name for entry in program.feed_signature] == ["input"]
    with torch.no_grad():
        layer.weight.fill_(3)
    assert next(iter(program.run(feed).values())).tolist() == [[6.0, 6.0]]


def test_weights_that_do_not_belong_are_all_named() -> None:
    graph = graph_of(torch.nn.Linear(2, 2), [torch.ones(1, 2)])
    with pytest.raises(SourceError) as error:
        compile_graph(graph, {"weight": torch.ones(3), "bais": torch.ones(2)})
    assert "'weight' is float32[3]; the graph declares float32[2, 2]" in str(error.value)
    assert "it has no 'bais'; did you mean 'bias'?" in str(error.value)


class Writes(torch.nn.Module):
    """A cache and a counter, written in `way`; what is shown is read before or after."""

    keys: torch.Tensor

    def __init__(self, way: Callable[..., Any]) -> None:
        super().__init__()
        self.way = way
        self.register_buffer("keys", torch.arange(8.0).view(4, 2))
        self.register_buffer("runs", torch.tensor(0))

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> Any:
        self.runs += 1
        return self.way(self.keys, x, at)


def in_parts(keys: torch.Tensor, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    keys[at] = x
    keys[1:2] = x * 2
    keys[3] = 7.0
    keys.masked_fill_(keys > 6, 0.5)
    keys.index_add_(0, at, x, alpha=3)
    keys.scatter_(0, at[:, None].expand(1, 2), x)
    return keys.sum(0)


def old_and_new(keys: torch.Tensor, x: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, ...]:
    old = keys.clone()
    keys.index_copy_(0, at, x)
    return old, keys.clone(), keys[1:].clone()


def from_itself(keys: torch.Tensor, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    keys.index_copy_(0, at, keys[2:3] + x)
    keys[:2] = keys[2:]
    return keys.t().exp()


def read_late(keys: torch.Tensor, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    part = keys[1:]
    before = part.clone()
    keys.add_(1)
    return (before * 2).sum() + keys.sum() + x.sum() + at.sum()


def filled(keys: torch.Tensor, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    total = keys.sum() + at.sum()
    keys.zero_()
    keys[:1].copy_(x)
    keys[2:].fill_(3)
    return total


@pytest.mark.parametrize(
    ("way", "in_place"),
    [(in_parts, True), (old_and_new, True), (from_itself, True), (read_late, False), (filled, True)],
)
def test_a_state_is_written_where_it_lies_if_its_old_value_is_not_needed(way: Any, in_place: bool) -> None:
    """Nothing is copied then after the run, nor before the write."""
    given, module = Writes(way), Writes(way)
    inputs = [torch.tensor([[10.0, 20.0]]), torch.tensor([2])]
    program, feed = compile_module(given, inputs)
    (keys,) = (slot.vid for slot in program.plan.slots if slot.name == "b_keys")
    assert (program.plan.root(program.plan.updates[keys]) == keys) == in_place
    kept = []
    for run in range(3):
        feed["at"] = inputs[1] = torch.tensor([run])
        actual = list(program.run(feed, copy=run == 0).values())
        wanted = list(tree_leaves(module(*(tensor.clone() for tensor in inputs))))
        assert all(map(torch.equal, actual, wanted))
        assert torch.equal(program.states()["b_keys"], module.keys)
        assert program.states()["b_runs"].item() == run + 1
        kept.append((actual[0].clone(), actual[0])) if run == 0 else None
    assert all(torch.equal(*pair) for pair in kept)
    program.reset_states()
    assert torch.equal(program.states()["b_keys"], given.keys)


class Caches(torch.nn.Module):
    """Three caches; the second one is written at `further`."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("first", "second", "third"):
            self.register_buffer(name, torch.zeros(4, 2))

    def forward(self, x: torch.Tensor, at: torch.Tensor, further: torch.Tensor) -> torch.Tensor:
        for buffer, place in zip(self.buffers(), (at, further, at), strict=True):
            buffer.index_copy_(0, place, x)
        return x + 1


def test_a_run_that_fails_leaves_no_half_written_state() -> None:
    program, feed = compile_module(Caches(), [torch.ones(1, 2), torch.tensor([0]), torch.tensor([1])])
    program.run(feed)
    before = program.states()
    with pytest.raises(UsageError, match="index 9 is out of bounds"):
        program.run({**feed, "further": torch.tensor([9])})
    for ask in (program.states, lambda: program.run(feed)):
        with pytest.raises(UsageError, match="had begun to write to the states b_first, b_second: give all"):
            ask()
    program.give_states({name: before[name] for name in ("b_first", "b_second")})
    assert all(torch.equal(tensor, before[name]) for name, tensor in program.states().items())
    program.run(feed)
    with pytest.raises(UsageError):
        program.run({**feed, "at": torch.tensor([9])})
    program.reset_states()
    assert not any(tensor.any() for tensor in program.states().values())


def test_a_walk_that_fails_loses_the_states_that_it_had_begun_to_write() -> None:
    """None where the feed cannot be written; one that is left in the middle has begun some."""
    program, feed = compile_module(Caches(), [torch.ones(1, 2), torch.tensor([0]), torch.tensor([1])])
    program.run(feed)
    before, context = program.states(), program.context

    def walk(x: torch.Tensor) -> torch.Tensor:
        return next(context.walk({**feed, "x": x}))[1][0]

    with pytest.raises(UsageError, match=r"input 'x' is inside of torch\.vmap"):
        torch.vmap(walk)(torch.ones(3, 1, 2))
    assert all(torch.equal(tensor, before[name]) for name, tensor in program.states().items())
    started = context.walk(feed)
    next(started)
    started.close()
    with pytest.raises(UsageError, match="had begun to write to the states b_first: give all"):
        program.states()
    program.give_states({"b_first": before["b_first"]})
    with pytest.raises(UsageError, match="index 9 is out of bounds"):
        list(context.walk({**feed, "further": torch.tensor([9])}))
    with pytest.raises(UsageError, match="had begun to write to the states b_first, b_second: give all"):
        program.states()


# What the caller's thread has switched on in torch changes no result: autocast, a default dtype, a default device.

X = torch.linspace(-1, 1, 2 * 3 * 6 * 6).reshape(2, 3, 6, 6)


@contextmanager
def autocast_of_a_card() -> Iterator[None]:
    """What `torch.autocast("cuda")` does where there is a card."""
    torch.set_autocast_enabled("cuda", True)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)


def test_autocast_of_a_card_is_off_in_a_run_and_on_for_its_caller() -> None:
    with autocast_of_a_card():
        with plain_state():
            assert not torch.is_autocast_enabled("cuda")
        assert torch.is_autocast_enabled("cuda")
        with without_autograd():
            assert not torch.is_autocast_enabled("cuda")
        assert torch.is_autocast_enabled("cuda")


SWITCHED_ON: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "a default dtype": in_float64,
    "a device": lambda: torch.device("meta"),
}


def numbers() -> torch.nn.Module:
    """Products that autocast rounds, and numbers that take torch's default dtype."""
    conv = torch.nn.Conv2d(3, 4, 3)
    return torch.nn.Sequential(conv, Calls([lambda x: x @ x.mT + torch.arange(4) / 3 + torch.full((4,), 0.1)]))


@pytest.mark.parametrize("name", SWITCHED_ON)
def test_the_plan_and_the_plain_reference_compute_as_without(name: str) -> None:
    module = numbers().eval()
    graph, held = graph_of(module, [X]), module.state_dict()
    named = {graph.values[vid].name: held[key] for vid, (key, *_) in graph.sources.items() if key in held}
    feed = feed_of(graph, [X])
    (expected,) = run_eager(graph, {**named, **feed}).outputs.values()
    weights = {
        key: tensor for key, tensor in held.items() if key in {k for keys in graph.sources.values() for k in keys}
    }
    with SWITCHED_ON[name]():
        program = compile_graph(graph, weights)
        found = [
            *run_eager(graph, {**named, **feed}).outputs.values(),
            *program.run(feed).values(),
            *program.replay(feed).values(),
        ]
    before, _ = compile_module(module, [X])
    (planned,) = before.run(feed).values()
    assert torch.equal(found[0], expected)
    assert all(torch.equal(one, planned) for one in found[1:])
    assert planned.dtype is torch.float32


def test_a_region_of_autocast_is_part_of_the_graph() -> None:
    """Its body runs inside of the shield, and has to be cast all the same."""
    layer = torch.nn.Linear(3, 3)

    def in_region(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return layer(x)

    module = Calls([in_region])
    module.add_module("layer", layer)
    program, feed = compile_module(module, [X[0, 0, :2, :3].contiguous()])
    (plain,) = program.run(feed).values()
    with in_float64():
        (shielded,) = program.run(feed).values()
    assert plain.dtype is shielded.dtype is torch.bfloat16
    assert torch.equal(plain, shielded)


def test_the_last_to_leave_puts_the_default_dtype_back() -> None:
    """All threads share it, and one of them may leave while another still runs."""
    seen = []
    with in_float64():
        FLOAT32.__enter__()
        FLOAT32.__enter__()
        for _ in range(2):
            seen.append(torch.get_default_dtype())
            FLOAT32.__exit__()
        seen.append(torch.get_default_dtype())
    assert seen == [torch.float32, torch.float32, torch.float64]


def test_it_costs_no_context_where_nothing_is_on() -> None:
    assert plain_state() is plain_state()
