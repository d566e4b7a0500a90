"""Entry points of one model: what one run writes to a state, the next run of another entry point reads."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch

from pipeline.errors import UsageError
from pipeline.importers.from_torch.tensors import TensorPayload
from pipeline.ir.graph import Graph, TensorSpec
from pipeline.ops import GraphBuilder
from pipeline.planning import PlanFile, decode_plans, encode_plans
from pipeline.runtime import CompiledEntries, compile_graphs
from tests.support.torch_programs import graph_of


class Cached(torch.nn.Module):
    """A cache of 4 rows, as a decoder has it, and a layer over it."""

    cache: torch.Tensor

    def __init__(self, *, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(3, 3)
        self.register_buffer("cache", torch.zeros(4, 3, dtype=dtype))


class Prefill(Cached):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.cache[:2] = self.layer(rows)
        return self.cache.sum(0)


class Decode(Cached):
    def forward(self, row: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        self.cache.index_copy_(0, at, self.layer(row).to(self.cache.dtype))
        return self.cache.sum(0)


class Read(Cached):
    """Changes nothing."""

    def forward(self, scale: torch.Tensor) -> torch.Tensor:
        return self.cache * scale


ROWS, ROW, AT = torch.arange(6.0).reshape(2, 3), torch.ones(1, 3), torch.tensor([2])


@pytest.fixture(scope="module")
def graphs() -> dict[str, Graph]:
    return {
        "prefill": graph_of(Prefill(), [ROWS]),
        "decode": graph_of(Decode(), [ROW, AT]),
        "read": graph_of(Read(), [torch.ones(1)]),
    }


@pytest.fixture
def entries(graphs: dict[str, Graph]) -> CompiledEntries:
    return compile_graphs(graphs, Prefill().state_dict())


def test_they_share_states_and_weights(entries: CompiledEntries) -> None:
    module = Cached()
    with torch.no_grad():
        module.cache[:2] = module.layer(ROWS)
        (total,) = entries.run("prefill", {"rows": ROWS}).values()
        assert torch.equal(total, module.cache.sum(0))
        for step in (2, 3):
            module.cache[step : step + 1] = module.layer(ROW * step)
            (total,) = entries.run("decode", {"row": ROW * step, "at": torch.tensor([step])}).values()
            assert torch.equal(total, module.cache.sum(0))
        (shown,) = entries.run("read", {"scale": torch.full((1,), 2.0)}).values()
    assert torch.equal(shown, module.cache * 2)
    assert torch.equal(entries.states()["b_cache"], module.cache)
    entries.reset_states()
    assert not entries.states()["b_cache"].any()
    entries.give_states({"b_cache": torch.ones(4, 3)})
    assert torch.equal(next(iter(entries.run("read", {"scale": torch.ones(1)}).values())), torch.ones(4, 3))


def test_an_entry_point_is_replayed_over_the_states_of_all(entries: CompiledEntries) -> None:
    decode, module = entries.entry("decode"), Cached()
    assert decode is entries.entry("decode")
    with torch.no_grad():
        decode.capture({"row": ROW, "at": AT})
        assert not entries.states()["b_cache"].any(), "a capture is no step"
        for round_ in (1, 2):
            module.cache[:2] = module.layer(ROWS * round_)
            entries.run("prefill", {"rows": ROWS * round_})
            before, cache_before = decode.snapshot(), module.cache.clone()
            for step in (2, 3):
                row = ROW * step * round_
                module.cache[step : step + 1] = module.layer(row)
                (total,) = decode.replay({"row": row, "at": torch.tensor([step])}).values()
                assert torch.equal(total, module.cache.sum(0))
        (shown,) = entries.entry("read").replay({"scale": torch.ones(1)}).values()
        assert torch.equal(shown, module.cache)
        decode.restore(before)
        (shown,) = entries.run("read", {"scale": torch.ones(1)}).values()
        assert torch.equal(shown, cache_before)
    other = entries.new_sequence().entry("decode")
    (total,) = other.replay({"row": ROW, "at": AT}).values()
    assert torch.equal(total, module.layer(ROW)[0])
    with pytest.raises(UsageError, match="no entry point 'decod'; did you mean 'decode'"):
        entries.entry("decod")


def with_first_value(graph: Graph, value: float | None) -> Graph:
    """`graph` with a cache that begins with `value` everywhere, or with none."""
    vid = graph.value("b_cache").vid
    payloads = {other: payload for other, payload in graph.payloads.items() if other != vid}
    return replace(graph, payloads=payloads if value is None else {vid: TensorPayload(torch.full((4, 3), value))})


@pytest.mark.parametrize("order", [("prefill", "decode"), ("decode", "prefill")])
def test_the_first_value_of_a_state_is_that_of_any_graph_that_has_one(
    graphs: dict[str, Graph], order: tuple[str, str]
) -> None:
    weights = {name: one for name, one in Cached().state_dict().items() if name != "cache"}
    values = {"prefill": 2.0, "decode": None}
    entries = compile_graphs({name: with_first_value(graphs[name], values[name]) for name in order}, weights)
    assert torch.equal(entries.states()["b_cache"], torch.full((4, 3), 2.0))
    other = {name: with_first_value(graphs[name], value) for name, value in zip(order, (1.0, 2.0), strict=True)}
    with pytest.raises(UsageError, match=rf"'b_cache' begins with other values in '{order[0]}' than in '{order[1]}'"):
        compile_graphs(other, weights)
    given = compile_graphs(other, {**weights, "cache": torch.zeros(4, 3)})
    assert not given.states()["b_cache"].any()


def adds_to(state: str) -> Graph:
    builder, pair = GraphBuilder(state), TensorSpec((2,), "float32")
    x, held = builder.input("x", pair), builder.state(state, pair)
    (after,) = builder.emit("aten.add.Tensor", [held, x], [("after", pair)])
    return replace(builder.build([after]), updates={held: after})


def test_each_entry_point_asks_for_the_states_that_it_reads() -> None:
    """One without a value is missed where it is read, and nowhere else."""
    entries, feed = compile_graphs({"first": adds_to("a"), "second": adds_to("b")}), {"x": torch.ones(2)}
    for name, state in (("first", "a"), ("second", "b")):
        with pytest.raises(UsageError, match=f"states without a value: {state};"):
            entries.run(name, feed)
    entries.give_states({"a": torch.zeros(2)})
    assert entries.run("first", feed)["after"].tolist() == [1, 1]
    assert entries.entry("first").replay(feed)["after"].tolist() == [2, 2]
    with pytest.raises(UsageError, match="the feed lacks 'b'; a capture needs"):
        entries.entry("second").capture(feed)
    entries.give_states({"b": torch.ones(2)})
    assert entries.run("second", feed)["after"].tolist() == [2, 2]


def test_there_is_one_arena_and_one_state(entries: CompiledEntries) -> None:
    slots = [
        (context._slots[slot.vid].data_ptr(), slot.name)
        for context in entries._contexts.values()
        for slot in context.plan.slots
        if slot.name == "b_cache"
    ]
    assert len(slots) == 3
    assert len({address for address, _ in slots}) == 1
    bases = {
        context._slots[vid].data_ptr() - offset
        for context in entries._contexts.values()
        for vid, offset in context.plan.offsets.items()
        if context._slots[vid].numel()
    }
    assert len(bases) == 1
    assert entries.arena_bytes == max(plan.arena_bytes for plan in entries.plans.values())


def test_a_further_sequence_has_states_of_its_own(entries: CompiledEntries) -> None:
    entries.run("prefill", {"rows": ROWS})
    other = entries.new_sequence()
    assert not other.states()["b_cache"].any()
    assert entries.states()["b_cache"].any()


def test_threads_take_turns(entries: CompiledEntries) -> None:
    def count() -> None:
        for _ in range(50):
            entries.run("decode", {"row": ROW, "at": AT})
            entries.run("prefill", {"rows": ROWS})

    threads = [threading.Thread(target=count) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with torch.no_grad():
        layer = Cached().layer
        assert torch.equal(entries.states()["b_cache"][:3], torch.cat([layer(ROWS), layer(ROW)]))


def test_plans_of_all_entry_points_are_one_file(entries: CompiledEntries) -> None:
    assert dict(decode_plans(encode_plans(PlanFile(entries.plans))).entries) == dict(entries.plans)


def test_mistakes_are_named(entries: CompiledEntries, graphs: dict[str, Graph]) -> None:
    with pytest.raises(UsageError, match="no entry point 'decod'; did you mean 'decode'"):
        entries.run("decod", {})
    with pytest.raises(UsageError, match="no entry point has a state 'cach'"):
        entries.give_states({"cach": ROWS})
    with pytest.raises(UsageError, match="found no graphs"):
        compile_graphs({})
    for wrong in ([graphs["read"]], {"read": 3}):
        with pytest.raises(UsageError, match=r"(list|int)[;,] expected \{name of the entry point: graph\}"):
            compile_graphs(wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"no graph has a weight 'layer.weigh'; did you mean 'layer.weight'"):
        compile_graphs({"read": graphs["read"]}, {"layer.weigh": ROWS})
    other = {"decode": graphs["decode"], "half": graph_of(Decode(dtype=torch.float16), [ROW, AT])}
    with pytest.raises(UsageError, match=r"'b_cache' is state float32.* in 'decode', .* state float16.* in 'half'"):
        compile_graphs(other)
