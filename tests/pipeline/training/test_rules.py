"""The rules of a recorded step, each on its own, and the traps that implementations of such steps have fallen into."""

from __future__ import annotations

import gc
import math

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW

from pipeline.ir import Role
from pipeline.training import TrainProgram, record_step
from tests.pipeline.training.steps import LOSS, MODELS, record, seeded, step_of_torch

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Noisy(nn.Module):
    """BatchNorm and dropout: buffers and random numbers beside the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 32)
        self.norm = nn.BatchNorm1d(32)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(torch.relu(self.norm(self.inner(x)))))


def batch_of(number: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    x, label = MODELS["mlp"].batch(number)
    return x.to(device), label.to(device)


def begun(device: str) -> tuple[nn.Module, AdamW]:
    """A module and its optimizer in the middle of a training."""
    module = seeded(Noisy).to(device)
    optimizer = AdamW(module.parameters(), lr=1e-2)
    for number in range(3):
        step_of_torch(module, optimizer, batch_of(number, device))
    return module, optimizer


def flat(found: object, path: str = "") -> dict[str, object]:
    """The leaves of nested dicts and lists, by path."""
    pairs = found.items() if isinstance(found, dict) else enumerate(found) if isinstance(found, list) else None
    if pairs is None:
        return {path: found.clone() if isinstance(found, torch.Tensor) else found}
    return {name: leaf for key, value in pairs for name, leaf in flat(value, f"{path}.{key}").items()}


def assert_same_bits(found: dict[str, object], expected: dict[str, object]) -> None:
    assert found.keys() == expected.keys()
    for name, leaf in expected.items():
        other = found[name]
        same = torch.equal(other, leaf) if isinstance(leaf, torch.Tensor) else other == leaf  # type: ignore[arg-type]
        assert same, name


@pytest.mark.parametrize("device", DEVICES)
def test_recording_leaves_everything_as_it_was(device: str) -> None:
    """A warm-up on live state would have advanced the training by a step."""
    module, optimizer = begun(device)
    before = {"module": flat(module.state_dict()), "optimizer": flat(optimizer.state_dict())}
    random = torch.get_rng_state()
    program = record_step(module, LOSS, optimizer, batch_of(3, device))
    assert torch.equal(torch.get_rng_state(), random)
    assert_same_bits(flat(module.state_dict()), before["module"])
    assert_same_bits(flat(optimizer.state_dict()), before["optimizer"])
    found = program.state_dict()
    assert_same_bits(flat(found["module"]), before["module"])
    assert_same_bits(flat(found["optimizer"]), before["optimizer"])
    assert program.steps_done == 3


@pytest.mark.parametrize("device", DEVICES)
def test_equal_states_and_batches_give_equal_bits_at_every_replay(device: str) -> None:
    module, optimizer = begun(device)
    program = record_step(module, LOSS, optimizer, batch_of(0, device))
    start = program.snapshot()

    def replay() -> dict[str, object]:
        program.restore(start)
        losses = [program.step(batch_of(number, device)).item() for number in range(3)]
        return {**flat(dict(program.snapshot().states)), **flat(losses, "losses")}

    first = replay()
    for _ in range(3):
        assert_same_bits(replay(), first)


@pytest.mark.filterwarnings("ignore:the batch has")
@pytest.mark.parametrize("device", DEVICES)
def test_what_a_batch_has_for_a_state_changes_no_bit(device: str) -> None:
    def loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return LOSS(output, batch["label"])

    module, optimizer = begun(device)
    x, label = batch_of(0, device)
    program = record_step(module, loss, optimizer, {"x": x, "label": label})
    start = program.snapshot()
    plain = [program.step({"x": x, "label": label}).item() for _ in range(2)]
    program.restore(start)
    fed = {"x": x, "label": label, "inner.weight": torch.zeros(32, 16), "step": torch.tensor(99.0), "rate.0": x}
    assert [program.step(fed).item() for _ in range(2)] == plain
    assert program.steps_done == 5


def test_the_learning_rate_is_no_attribute() -> None:
    program, *_ = record(MODELS["mlp"], lambda params: SGD(params, lr=0.1234))
    assert not any(value == 0.1234 for op in program.graph.ops for value in op.attrs.values())
    assert "optimizer.rate.0" in {value.name for value in program.graph.with_role(Role.STATE)}
    program.optimizer.param_groups[0]["lr"] = 0.0
    before = program.state_dict()["module"]
    program.step(batch_of(0))
    assert_same_bits(flat(program.state_dict()["module"]), flat(before))
    program.optimizer.param_groups[0]["lr"] = 0.5
    program.step(batch_of(0))
    assert not torch.equal(program.state_dict()["module"]["0.weight"], before["0.weight"])


def test_bias_correction_counts_from_one() -> None:
    """By hand, in Python: the gradient of `loss = w` is 1, so both corrected moments are 1 at every step."""
    module = nn.Linear(1, 1, bias=False).double()
    start = module.weight.item()
    program = record_step(module, lambda output, _: output.sum(), Adam(module.parameters(), lr=0.1, eps=0.0), ONES)
    for step in range(1, 4):
        program.step(ONES)
        assert program.state_dict()["module"]["weight"].item() == pytest.approx(start - 0.1 * step, rel=1e-9)
        first = program.state_dict()["optimizer"]["state"][0]["exp_avg"].item()
        assert first == pytest.approx(1 - math.pow(0.9, step))


ONES = torch.ones(1, 1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)


def test_what_leaves_the_program_is_not_its_memory() -> None:
    program, *_ = record(MODELS["mlp"], lambda params: Adam(params, lr=1e-2))
    loss = program.step(batch_of(0))
    number, state, snapshot = loss.item(), program.state_dict(), program.snapshot()
    kept = {**flat(state), **flat(dict(snapshot.states), "snapshot")}
    other = program.step(batch_of(1)).item()
    assert loss.item() == number != other
    assert_same_bits({**flat(state), **flat(dict(snapshot.states), "snapshot")}, kept)
    program.restore(snapshot)
    loss.fill_(0.0)
    for tensor in state["module"].values():
        tensor.zero_()
    assert program.step(batch_of(1)).item() == other


def test_a_batch_is_known_by_its_numbers_and_not_by_its_address() -> None:
    program, *_ = record(MODELS["mlp"], lambda params: SGD(params, lr=0.0))

    def loss_of(x: torch.Tensor) -> float:
        return program.step((x, torch.zeros(8, dtype=torch.int64))).item()

    x = torch.ones(8, 16)
    losses = [loss_of(x), loss_of(x.mul_(2))]
    for factor in (1.0, 2.0):
        del x
        gc.collect()
        x = torch.full((8, 16), factor)  # often where the last one was
        losses.append(loss_of(x))
    assert losses[:2] == losses[2:]
    assert losses[0] != losses[1]


def test_the_signature_of_a_replay_has_the_batch_alone() -> None:
    program, *_ = record(MODELS["mlp"], lambda params: Adam(params))
    assert [fed.name for fed in program.capture.key.feed_signature] == ["input", "target"]


@pytest.mark.parametrize("model", ["transformer with dropout", "cnn with BatchNorm"])
def test_an_early_update_waits_for_the_last_reader(model: str) -> None:
    """Every parameter on its own and in place, tied weights too: the same bits as all updates at the end."""

    def losses(program: TrainProgram) -> list[float]:
        torch.manual_seed(5)
        return [program.step(MODELS[model].batch(number)).item() for number in range(5)]

    early, *_ = record(MODELS[model], lambda params: SGD(params, lr=0.1), large=0)
    late, *_ = record(MODELS[model], lambda params: SGD(params, lr=0.1), large=2**40)
    assert losses(early) == losses(late)
