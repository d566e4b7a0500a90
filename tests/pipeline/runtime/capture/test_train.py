"""Train steps: warm-up and capture are no steps, states advance, and a feed cannot reset them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import pytest
import torch

from pipeline.errors import UsageError
from pipeline.runtime import CaptureWarning, CompiledProgram, compile_graph
from tests.pipeline.runtime.capture.capture_programs import negate, train_graph
from tests.support.torch_programs import compile_module

X = {"x": torch.tensor([1.0, 2.0])}


def states(program: CompiledProgram) -> dict[str, object]:
    return {name: tensor.tolist() for name, tensor in program.states().items()}


def bits(outputs: Mapping[str, torch.Tensor]) -> list[object]:
    return [tensor.tolist() for tensor in outputs.values()]


@pytest.mark.parametrize("mode", ["inference", "train"])
def test_warm_up_and_capture_are_no_steps(mode: str) -> None:
    program = compile_graph(train_graph())
    before = states(program)
    program.capture(X, mode=mode)
    program.capture(X, mode=mode)
    assert states(program) == before == {"w": [1, 2], "step": 0}


def test_every_replay_is_one_step_and_goes_on_where_a_run_ended() -> None:
    program, other = compile_graph(train_graph()), compile_graph(train_graph())
    program.capture(X, mode="train")
    for step in range(1, 7):
        found = program.run(X) if step % 3 == 0 else program.replay(X)
        assert torch.equal(found["y"], other.run(X)["y"])
        assert states(program) == {"w": [1 - 0.5 * step, 2 - step], "step": step}


def test_what_a_feed_has_for_static_roles_is_ignored_with_one_warning() -> None:
    """`w` is not set back, `step` goes on, and the parameter stays."""
    program = compile_graph(train_graph())
    program.capture(X, mode="train")
    other = {"w": torch.tensor([100.0, 100.0]), "step": torch.tensor(50), "scale": torch.zeros(2)}
    with pytest.warns(CaptureWarning, match="the feed has 'scale', 'step', 'w', whose roles are static") as warned:
        found = [bits(program.replay({**X, **other})) for _ in range(3)]
        program.capture({**X, **other}, mode="train")
    assert len(warned) == 1
    assert found == [[[0.5, 2]], [[0, 0]], [[-0.5, -2]]]
    assert states(program) == {"w": [-0.5, -1], "step": 3}


def test_a_new_capture_does_not_set_states_back() -> None:
    program = compile_graph(train_graph())
    program.replay(X)
    with pytest.warns(CaptureWarning, match="whose roles are static"):
        program.capture({**X, "w": torch.zeros(2)}, mode="train")
    assert states(program) == {"w": [0.5, 1], "step": 1}


def test_in_inference_a_state_that_is_fed_is_taken_over() -> None:
    program = compile_graph(train_graph())
    program.replay(X)
    program.replay({**X, "step": torch.tensor(50)})
    program.replay(X)
    assert states(program)["step"] == 52


def test_equal_input_after_restore_gives_equal_results() -> None:
    program = compile_graph(train_graph())
    capture = program.capture(X, mode="train")
    program.replay(X)
    at_one = program.snapshot()
    second = bits(program.replay(X))
    assert bits(program.replay(X)) != second
    assert bits(program.replay(X, restore=at_one)) == second
    assert bits(capture.replay(X, restore=at_one)) == second
    assert states(program)["step"] == 2
    program.restore(at_one)
    assert states(program) == {"w": [0.5, 1], "step": 1}
    assert bits(program.replay(X)) == second


def test_a_snapshot_of_another_program_is_refused() -> None:
    program = compile_graph(train_graph())
    with pytest.raises(UsageError, match="the snapshot lacks the state 'step'"):
        program.restore(negate().snapshot())
    with pytest.raises(UsageError, match="'w', which is no input"):
        negate().restore(program.snapshot())


def test_states_and_weights_without_a_value_come_with_the_feed_of_the_first_capture() -> None:
    program = compile_graph(train_graph(weight=False, scale=False))
    first = {"w": torch.tensor([1.0, 2.0]), "scale": torch.tensor([0.5, 0.5])}
    with pytest.raises(UsageError, match="the feed lacks 'w'"):
        program.capture({**X, "scale": first["scale"]}, mode="train")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program.capture({**X, **first}, mode="train")
        first["scale"].zero_()
        program.replay(X)
    assert states(program) == {"step": 1, "w": [0.5, 1]}
    program.drop_captures()
    assert states(program)["step"] == 1
    with pytest.raises(UsageError, match="the feed lacks 'scale'"):
        program.replay(X)
    program.replay({**X, "scale": torch.zeros(2)})
    assert states(program) == {"step": 2, "w": [0.5, 1]}


class Swap(torch.nn.Module):
    """Each buffer takes the old value of the other, so neither may be written before both are read."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("a", torch.tensor([1.0, 2.0]))
        self.register_buffer("b", torch.tensor([10.0, 20.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.get_buffer("a"), self.get_buffer("b")
        old = a.clone()
        a.copy_(b)
        b.copy_(old)
        return old + x


def test_states_that_change_places() -> None:
    program, feed = compile_module(Swap(), [torch.zeros(2)])
    program.capture(feed, mode="train")
    assert [bits(program.replay(feed)) for _ in range(3)] == [[[1, 2]], [[10, 20]], [[1, 2]]]
    assert states(program) == {"b_a": [10, 20], "b_b": [1, 2]}


def test_inputs_that_the_graph_updates() -> None:
    class AddTo(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.add_(1)
            return x * 2

    program, feed = compile_module(AddTo(), [torch.zeros(2)])
    capture = program.capture(feed)
    assert bits(capture.replay(feed)) == [[2, 2]]
    assert bits(capture.updated_inputs()) == [[1, 1]]
    assert bits(feed) == [[0, 0]]


def test_batch_norm_moves_its_statistics_as_torch_does() -> None:
    torch.manual_seed(0)
    module = torch.nn.BatchNorm1d(3).train()
    program, feed = compile_module(module, [torch.randn(5, 3)])
    (name,) = feed
    program.capture(feed, mode="train")
    for _ in range(3):
        x = torch.randn(5, 3)
        torch.testing.assert_close(next(iter(program.replay({name: x}).values())), module(x).detach())
    torch.testing.assert_close(program.states()["b_running_var"], module.running_var)
    assert program.states()["b_num_batches_tracked"].item() == 3
