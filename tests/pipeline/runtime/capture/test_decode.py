"""A decode loop with a cache of keys and values that replays write in place."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from pipeline.errors import UsageError
from pipeline.importers import from_onnx
from pipeline.ir import Builder, TensorSpec, as_states
from pipeline.lowering import EMITTERS
from pipeline.runtime import CompiledProgram, compile_graph
from tests.support.onnx_models import model_of
from tests.support.torch_programs import compile_module

PLACES, WIDTH, WORDS = 6, 8, 11


class Decoder(nn.Module):
    """One layer of attention over what is cached, written by `way`: index_copy, a slice, or a scatter."""

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


@pytest.mark.parametrize(("way", "in_place"), [("index_copy", True), ("scatter", True), ("slice", False)])
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
    graph = from_onnx(model_of(text, axes=np.array([1])), emitters=EMITTERS)
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


def test_inputs_that_cannot_be_states_are_refused() -> None:
    builder = Builder("step", EMITTERS)
    past, new = (builder.input(name, TensorSpec(shape, "float32")) for name, shape in (("past", (2,)), ("new", (1,))))
    (present,) = builder.emit("Concat", [past, new], [("present", TensorSpec((3,), "float32"))], {"axis": 0})
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
