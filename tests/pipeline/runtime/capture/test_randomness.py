"""Random numbers: each replay draws new ones, warm-up and capture draw none, and a snapshot goes back."""

from __future__ import annotations

import pytest
import torch

from pipeline.errors import UsageError
from pipeline.ops import GraphBuilder
from pipeline.runtime import CompiledProgram, compile_graph
from tests.pipeline.runtime.capture.capture_programs import PAIR, negate
from tests.support.torch_programs import compile_module


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
