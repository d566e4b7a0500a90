"""A decode loop with a cache of keys and values that replays write in place."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from torch import nn

from pipeline.errors import UsageError
from pipeline.importers import from_onnx
from pipeline.ir import TensorSpec, as_states
from pipeline.ops import GraphBuilder, emitter_of
from pipeline.runtime import CompiledProgram, compile_graph
from tests.support.onnx_models import model_of
from tests.support.torch_programs import compile_module

PLACES, WIDTH, WORDS = 6, 8, 11


class Decoder(nn.Module):
    """One layer of attention over what is cached, written by `way`: index_copy, slices, or a scatter."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.embed, self.project = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(1, PLACES, WIDTH))

    def forward(self, token: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        query, key, value = self.project(self.embed(token)).chunk(3, -1)
        for name, new in (("keys", key), ("values", value)):
            cache = self.get_buffer(name)
            match self.way:
                case "index_copy":
                    cache.index_copy_(1, at, new)
                case "scatter":
                    cache.scatter_(1, at.view(1, 1, 1).expand(1, 1, WIDTH), new)
                case "first row":  # a ring that turns, so that the newest is always in the same place
                    cache.copy_(cache.roll(1, 1))
                    cache[:, :1] = new
                case "slice":  # the newest in front
                    cache.copy_(torch.cat([new, cache[:, :-1]], 1))
        seen = (torch.arange(PLACES) <= at)[None]
        found = nn.functional.scaled_dot_product_attention(
            query, self.get_buffer("keys"), self.get_buffer("values"), attn_mask=seen
        )
        return self.head(found)


def caches_in_place(program: CompiledProgram) -> list[bool]:
    plan = program.plan
    return [plan.root(after) == vid for vid, after in plan.updates.items()]


WAYS = [("index_copy", True), ("scatter", True), ("first row", True), ("slice", False)]


@pytest.mark.parametrize(("way", "in_place"), WAYS)
@pytest.mark.parametrize("mode", ["inference", "train"])
def test_tokens_are_those_of_torch(way: str, in_place: bool, mode: str) -> None:
    torch.manual_seed(0)
    module = Decoder(way).eval()
    program, feed = compile_module(module, [torch.tensor([[1]]), torch.tensor([0])])
    assert caches_in_place(program) == [in_place] * 2
    program.capture(feed, mode=mode)
    start = program.snapshot()

    def decode() -> list[int]:
        token, tokens = torch.tensor([[1]]), []
        for at in range(PLACES):
            logits = next(iter(program.replay(dict(zip(feed, (token, torch.tensor([at])), strict=True))).values()))
            token = logits.argmax(-1)
            tokens.append(int(token))
        return tokens

    wanted, token = [], torch.tensor([[1]])
    with torch.no_grad():
        for at in range(PLACES):
            token = module(token, torch.tensor([at])).argmax(-1)
            wanted.append(int(token))
    assert decode() == wanted
    torch.testing.assert_close(program.states()["b_keys"], module.get_buffer("keys"))
    program.restore(start)
    assert decode() == wanted, "after a restore the caches are empty again"


def test_a_cache_that_onnx_takes_and_gives_back_is_written_where_it_lies() -> None:
    """`past` and `present` become one state, so that no replay copies the cache."""
    text = """
    cache (float[1, 6, 2] past, float[1, 1, 2] new, int64[1, 1, 2] at) => (float[1, 6, 2] present, float[1, 2] y) {
        present = ScatterElements <axis = 1> (past, at, new)
        y = ReduceSum <keepdims = 0> (present, axes)
    }
    """
    graph = from_onnx(model_of(text, axes=np.array([1])), emitter_of=emitter_of)
    program = compile_graph(as_states(graph, {"past": "present"}))
    assert [entry.name for entry in program.feed_signature] == ["new", "at"]
    assert caches_in_place(program) == [True]
    program.give_states({"past": torch.zeros(1, 6, 2)})
    feed = {"new": torch.ones(1, 1, 2), "at": torch.zeros(1, 1, 2, dtype=torch.int64)}
    program.capture(feed)
    address = program.context.states.tensors[program.plan.slots[0].vid].data_ptr()
    for at in range(6):
        found = program.replay({"new": torch.full((1, 1, 2), at + 1.0), "at": feed["at"] + at}, copy=False)
        assert found["y"].tolist() == [[sum(range(at + 2))] * 2]
    assert program.states()["past"][0, :, 0].tolist() == [1, 2, 3, 4, 5, 6]
    assert program.context.states.tensors[program.plan.slots[0].vid].data_ptr() == address


TENSOR_SCATTER = """<ir_version: 11, opset_import: ["": 24]> decode
    (float[1,2,1,4] q, float[1,2,1,4] k, float[1,2,1,4] v, int64[1] at, float[1,6] mask,
     float[1,2,6,4] keys, float[1,2,6,4] values)
    => (float[1,2,1,4] y, float[1,2,6,4] next_keys, float[1,2,6,4] next_values) {
        next_keys = TensorScatter (keys, k, at)
        next_values = TensorScatter (values, v, at)
        turned = Transpose <perm = [0, 1, 3, 2]> (next_keys)
        scores = MatMul (q, turned)
        masked = Add (scores, mask)
        shares = Softmax (masked)
        y = MatMul (shares, next_values)
    }"""

PAST_AND_PRESENT = """<ir_version: 10, opset_import: ["": 23]> decode
    (float[1,2,1,4] q, float[1,2,1,4] k, float[1,2,1,4] v, float[1,2,6,4] keys, float[1,2,6,4] values)
    => (float[1,2,1,4] y, float[1,2,6,4] next_keys, float[1,2,6,4] next_values)
    <int64[1] one = {1}, int64[1] end = {7}, int64[1] axis = {2}> {
        y, present_keys, present_values = Attention (q, k, v, , keys, values)
        next_keys = Slice (present_keys, one, end, axis)
        next_values = Slice (present_values, one, end, axis)
    }"""


@pytest.mark.parametrize(("text", "in_place"), [(TENSOR_SCATTER, True), (PAST_AND_PRESENT, False)])
@pytest.mark.parametrize("mode", ["inference", "train"])
def test_replays_with_a_cache_of_onnx_are_the_steps_of_its_reference(text: str, in_place: bool, mode: str) -> None:
    """ONNX's reference evaluator takes one step after another, and gets each new cache back as the old one."""
    model = onnx.parser.parse_model(text)
    onnx.checker.check_model(model)
    program = compile_graph(
        as_states(from_onnx(model, emitter_of=emitter_of), {"keys": "next_keys", "values": "next_values"})
    )
    assert caches_in_place(program) == [in_place] * 2
    caches = {name: np.zeros((1, 2, 6, 4), np.float32) for name in ("keys", "values")}
    program.give_states({name: torch.from_numpy(cache) for name, cache in caches.items()})
    evaluator, draw = ReferenceEvaluator(model), np.random.default_rng(0)
    for step in range(5):
        feed = {name: draw.normal(size=(1, 2, 1, 4)).astype(np.float32) for name in "qkv"}
        if in_place:
            feed |= {
                "at": np.array([step]),
                "mask": np.where(np.arange(6) <= step, 0, -np.inf).astype(np.float32)[None],
            }
        y, caches["keys"], caches["values"] = evaluator.run(None, {**feed, **caches})
        if step == 0:
            program.capture(feed, mode=mode)
        found = program.replay(feed)
        np.testing.assert_allclose(found["y"].numpy(), y, rtol=1e-5, atol=1e-6)
    for name, cache in program.states().items():
        np.testing.assert_array_equal(cache.numpy(), caches[name])


def test_inputs_that_cannot_be_states_are_refused() -> None:
    builder = GraphBuilder("step")
    past, new = (builder.input(name, TensorSpec(shape, "float32")) for name, shape in (("past", (2,)), ("new", (1,))))
    (present,) = builder.emit("aten.cat.default", [past, new], [("present", TensorSpec((3,), "float32"))], {"dim": 0})
    graph = builder.build([present])
    for pairs, message in (
        ({"pas": "present"}, "has no input 'pas'; did you mean 'past'"),
        ({"past": "now"}, "has no output 'now'"),
        (
            {"past": "present"},
            r"input 'past' is float32\[2\] and output 'present' is float32\[3\]; a state has one shape",
        ),
    ):
        with pytest.raises(UsageError, match=message):
            as_states(graph, pairs)


class CountingCache(nn.Module):
    """A cache whose next place is a state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("at", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("rows", torch.zeros(3, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(6):  # enough operators in a row for a graph
            x = x.neg()
        rows, at = self.get_buffer("rows"), self.get_buffer("at")
        rows.index_copy_(0, at, x)
        at.add_(1)
        return rows.sum(0)


def test_a_capture_at_the_last_place_of_a_cache_stays_inside_of_it() -> None:
    """Warm-up and recording run the step several times, each time from the same place."""
    program, feed = compile_module(CountingCache(), [torch.ones(1, 2)])
    program.give_states({"b_at": torch.tensor([2])})
    assert [tensor.tolist() for tensor in program.replay(feed).values()] == [[1.0, 1.0]]
    assert program.states()["b_at"].tolist() == [3]
