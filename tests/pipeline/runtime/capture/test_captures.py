"""Captures by key: what finds one again, how many are kept, and what a dropped one gives back."""

from __future__ import annotations

import gc
import warnings
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.errors import UsageError
from pipeline.ir.graph import Graph, TensorSpec
from pipeline.ops import GraphBuilder
from pipeline.runtime import SizedProgram, compile_graph
from pipeline.runtime.capture import CaptureKey, CaptureWarning, FedTensor
from pipeline.runtime.capture.feed_buffers import signature_of
from tests.pipeline.runtime.capture.capture_programs import PAIR, negate, stored, sum_with

WIDTH = 256


def sized_graph() -> Graph:
    """y = tanh(x · w + count), with x: [batch, 256]; count goes up by one."""
    builder = GraphBuilder("sized")
    rows = TensorSpec(("batch", WIDTH), "float32")
    x, w = builder.input("x", rows), builder.param("w", TensorSpec((WIDTH,), "float32"), stored([2.0] * WIDTH))
    count = builder.state("count", TensorSpec((), "float32"), stored(0.0))
    one = builder.const("one", TensorSpec((), "float32"), stored(1.0))
    (product,) = builder.emit("aten.mul.Tensor", [x, w], [("product", rows)])
    (total,) = builder.emit("aten.add.Tensor", [product, count], [("total", rows)])
    (y,) = builder.emit("aten.tanh.default", [total], [("y", rows)])
    (after,) = builder.emit("aten.add.Tensor", [count, one], [("after", TensorSpec((), "float32"))])
    return replace(builder.build([y]), updates={count: after})


def test_the_key() -> None:
    key = negate().capture({"x": torch.ones(2)}, mode="train").key
    fed = FedTensor("x", torch.Size([2]), torch.float32, torch.device("cpu"))
    assert key == CaptureKey("train", key.plan_key, ("const", "param", "state"), ("input",), (fed,))
    assert key.plan_key == negate().capture({"x": torch.ones(2)}).key.plan_key
    elsewhere = signature_of(["x"], {"x": torch.ones(2, device="meta")})
    assert elsewhere == (fed._replace(device=torch.device("meta")),), "a feed on another device has a key of its own"
    assert key.plan_key != negate(calls=2).capture({"x": torch.ones(2)}).key.plan_key


def test_a_capture_is_found_again_whatever_the_strides_are() -> None:
    program = sum_with(fed=True)
    first = program.capture({"x": torch.ones(2), "w": torch.ones(2)})
    for x in (torch.zeros(2), torch.arange(4.0)[::2], torch.ones(3)[1:], np.zeros(2, np.float32)):
        assert program.capture({"x": x}) is first
        program.replay({"x": x})
    assert program.context.captures.keys == (first.key,)


def test_each_policy_has_a_capture_of_its_own() -> None:
    program, x = sum_with(fed=True), torch.ones(2)
    first = program.capture({"x": x, "w": x})
    train = program.capture({"x": x}, mode="train")
    copied = program.capture({"x": x, "w": x * 5}, copy_roles=["input", "param"])
    assert len({first, train, copied}) == len(program.context.captures) == 3
    assert copied.replay({"x": x, "w": x * 7})["y"].tolist() == [8, 8]
    assert train.replay({"x": x})["y"].tolist() == first.replay({"x": x})["y"].tolist() == [2, 2]
    assert program.capture({"x": x}) is first


def many_weights(count: int) -> Graph:
    builder = GraphBuilder("weights")
    value = builder.input("x", PAIR)
    for at in range(count):
        weight = builder.param(f"w{at}", PAIR)
        (value,) = builder.emit("aten.add.Tensor", [value, weight], [(f"v{at}", PAIR)])
    return builder.build([value])


class CountingFeed(dict[str, torch.Tensor]):
    """A feed that counts how often it is asked for a value."""

    asked = 0

    def __getitem__(self, name: str) -> torch.Tensor:
        self.asked += 1
        return super().__getitem__(name)


def test_a_hit_looks_at_inputs_only_however_many_weights_are_fed() -> None:
    program = compile_graph(many_weights(300))
    weights = {f"w{at}": torch.ones(2) for at in range(300)}
    program.capture({"x": torch.zeros(2), **weights})
    feed = CountingFeed({"x": torch.zeros(2), **weights})
    with pytest.warns(CaptureWarning, match="the feed has 'w0', 'w1', 'w10', …, whose roles are static"):
        program.replay(feed)
    feed.asked = 0
    assert program.replay(feed)["v299"].tolist() == [300, 300]
    assert feed.asked == 2, "once for the signature, once to copy it"
    with pytest.raises(UsageError, match="the feed has 'w300', which is no input"):
        program.replay({**feed, "w300": torch.ones(2)})


def test_every_size_is_captured_once_and_continues_the_same_states() -> None:
    program = SizedProgram(sized_graph())
    for replay, batch in enumerate([1, 3, 1, 2, 3, 1]):
        x = torch.randn(batch, WIDTH)
        assert torch.equal(program.replay({"x": x})["y"], torch.tanh(x * 2 + replay))
    assert [key.feed_signature[0].shape[0] for key in program.captures.keys] == [2, 3, 1]
    at_six = program.snapshot()
    first = program.replay({"x": x})["y"]
    assert torch.equal(program.replay({"x": x}, restore=at_six)["y"], first)
    for run, batch in enumerate([2, 4, 1]):  # runs and replays are one sequence
        x = torch.randn(batch, WIDTH)
        assert torch.equal(program.run({"x": x})["y"], torch.tanh(x * 2 + 7 + run))
    assert torch.equal(program.replay({"x": x})["y"], torch.tanh(x * 2 + 10))


def test_a_state_of_a_size_that_a_feed_decides_is_refused() -> None:
    builder = GraphBuilder("cache")
    rows = TensorSpec(("batch", 2), "float32")
    x, cache = builder.input("x", rows), builder.state("cache", rows)
    (after,) = builder.emit("aten.add.Tensor", [x, cache], [("after", rows)])
    with pytest.raises(UsageError, match="the state 'cache' has a named dim"):
        SizedProgram(replace(builder.build([after]), updates={cache: after}))
    with pytest.raises(UsageError, match="nothing was run or captured yet"):
        SizedProgram(sized_graph()).snapshot()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * 4096


@pytest.mark.parametrize("count", [200, 1000])
def test_a_thousand_signatures_leave_the_memory_of_the_last_few(count: int) -> None:
    """Each has an input buffer and an arena of 0.5 to 1.5 MiB, a thousand 2 GiB; what is dropped is dead at once."""
    program, dropped = SizedProgram(sized_graph(), limit=4), []
    with pytest.warns(CaptureWarning, match="more than 4 signatures") as warned:
        for number in range(count):
            batch = 500 + number * 389 % 1000  # each once, small and large ones mixed
            dropped.append(weakref.ref(program.capture({"x": torch.zeros(batch, WIDTH)})))
            if number == 50:
                gc.collect()
                before = resident_bytes()
    assert len(warned) == 1
    assert len(program.captures) == 4
    assert [reference() is None for reference in dropped] == [True] * (count - 4) + [False] * 4
    gc.collect()
    # 150 signatures would be 300 MiB. The allocator keeps some of what was freed: 38 MiB once, on a loaded machine.
    assert resident_bytes() - before < 100 * 2**20


def test_dropped_captures_can_be_made_again() -> None:
    program = negate()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = weakref.ref(program.capture({"x": torch.ones(2)}))
        program.drop_captures()
        assert (first(), len(program.context.captures)) == (None, 0)
        assert program.replay({"x": torch.ones(2)})["y"].tolist() == [-1, -1]


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(UsageError, match="limit=0; expected 1 or more sizes to keep"):
        SizedProgram(sized_graph(), limit=0)
