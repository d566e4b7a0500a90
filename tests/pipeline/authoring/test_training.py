"""A model by hand learns what the same layers of torch do, step for step, and may be stopped and taken up again."""

from __future__ import annotations

import io
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

from pipeline.authoring import (
    SGD,
    Adam,
    AdamW,
    Buffer,
    CrossEntropyLoss,
    Dropout,
    IRTensor,
    Linear,
    Model,
    Module,
    MSELoss,
    OptimizerSpec,
    ReLU,
    functional,
)
from pipeline.console import RunConsole
from pipeline.errors import UsageError
from pipeline.events import EpochEnded, Event, Phase, Progress
from pipeline.ir import TensorSpec
from pipeline.terminal.screen import Screen
from pipeline.training import NotFinite
from tests.pipeline.authoring.authored_models import MLP, TWINS, batches_of
from tests.support.processes import run_forked

STEPS = 100
TOLERANCE = 1e-4
"""Of float32 losses, relative: sums run in another order, and Adam divides by small roots. Seen: up to 5e-7."""

OPTIMIZERS: dict[str, OptimizerSpec] = {
    "SGD": SGD(lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "Adam": Adam(lr=1e-3, amsgrad=True),
    "AdamW": AdamW(lr=3e-3, betas=(0.8, 0.99)),
}


@pytest.mark.parametrize(("name", "optimizer"), [*(("mlp", one) for one in OPTIMIZERS), ("cnn", "AdamW")])
def test_the_steps_are_those_of_torch(name: str, optimizer: str) -> None:
    twin, batches = TWINS[name], batches_of(TWINS[name], STEPS)
    model = Model(twin.spec, module=twin.make())
    model.compile(OPTIMIZERS[optimizer], CrossEntropyLoss(label_smoothing=0.1), quiet=True)
    ours = model.fit(batches, quiet=True).losses
    module = twin.make_torch().train()
    theirs = train_with_torch(module, OPTIMIZERS[optimizer], nn.CrossEntropyLoss(label_smoothing=0.1), batches)
    assert ours == pytest.approx(theirs, rel=TOLERANCE)
    assert len(set(theirs)) == STEPS  # the loss moves
    for key, tensor in module.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], tensor, rtol=1e-3, atol=1e-4)
    module.load_state_dict(model.state_dict())
    torch.testing.assert_close(model.predict(batches[0][0]), module.eval()(batches[0][0]), rtol=1e-5, atol=1e-5)


def train_with_torch(
    module: nn.Module, spec: OptimizerSpec, loss: nn.Module, batches: list[tuple[torch.Tensor, torch.Tensor]]
) -> list[float]:
    optimizer, losses = spec.make(module.parameters()), []
    for x, y in batches:
        optimizer.zero_grad()
        value = loss(module(x), y)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def test_groups_of_parameters_have_settings_of_their_own() -> None:
    def groups(layers: Any) -> torch.optim.Optimizer:
        own = {"params": layers[0].parameters(), "lr": 0.1, "momentum": 0.9}
        return torch.optim.SGD([own, {"params": layers[2].parameters(), "weight_decay": 0.1}], lr=0.01)

    torch.manual_seed(0)
    model = Model((8, 16)).add(Linear(16, 32)).add(ReLU()).add(Linear(32, 10))
    theirs, batches = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10)), batches_of(MLP, 10)
    theirs.load_state_dict(model.state_dict())
    model.compile(groups(model.module), CrossEntropyLoss(), quiet=True).fit(batches, quiet=True)
    optimizer = groups(theirs)
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(theirs(x), y).backward()
        optimizer.step()
    for key, tensor in theirs.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], tensor, rtol=1e-4, atol=1e-6)


def test_squared_errors_and_a_loss_by_hand_are_those_of_torch() -> None:
    def squares(output: IRTensor, target: IRTensor) -> IRTensor:
        return functional.mean((output - target) * (output - target))

    batches = [(MLP.batch(number), torch.randn(8, 10)) for number in range(20)]
    found = []
    for loss in (MSELoss(), squares):
        model = Model(MLP.spec, module=MLP.make()).compile(SGD(lr=0.1), loss, quiet=True)
        found.append(model.fit(batches, quiet=True).losses)
    expected = train_with_torch(MLP.make_torch(), SGD(lr=0.1), nn.MSELoss(), batches)
    assert found[0] == pytest.approx(expected, rel=TOLERANCE)
    assert found[0] == found[1]


def make_model() -> Model:
    """With dropout, so that random numbers belong to what a training has to go on with."""
    torch.manual_seed(0)
    model = Model((8, 16)).add(Linear(16, 32)).add(ReLU()).add(Dropout(0.2)).add(Linear(32, 10))
    return model.compile(Adam(lr=1e-2), CrossEntropyLoss(), schedule=one_cycle, quiet=True)


def one_cycle(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return OneCycleLR(optimizer, max_lr=1e-2, total_steps=20, cycle_momentum=False)


def batches_by_epoch(epoch: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return batches_of(MLP, 5 * (epoch + 1))[5 * epoch :]


def train_whole() -> tuple[Model, tuple[float, ...]]:
    model = make_model()
    torch.manual_seed(3)
    return model, model.fit(batches_by_epoch, 4, quiet=True).losses


class Interrupting:
    """Batches, before one of which somebody presses Ctrl-C."""

    def __init__(self, after: int) -> None:
        self.left = after

    def __call__(self, epoch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for batch in batches_by_epoch(epoch):
            if not self.left:
                os.kill(os.getpid(), signal.SIGINT)
            self.left -= 1
            yield batch


@pytest.mark.parametrize("after", [2, 5, 13])
def test_a_training_that_was_stopped_goes_on_to_the_same_bits(after: int, tmp_path: Path) -> None:
    whole, losses = train_whole()
    path, handler = tmp_path / "states.safetensors", signal.getsignal(signal.SIGINT)
    stopped = make_model()
    torch.manual_seed(3)
    with pytest.raises(KeyboardInterrupt):
        stopped.fit(Interrupting(after), 4, path=path, quiet=True)
    assert signal.getsignal(signal.SIGINT) is handler
    assert stopped.history.losses == losses[:after]
    again = make_model()
    history = again.fit(batches_by_epoch, 4, path=path, resume=True, quiet=True)
    assert history.losses == losses
    assert [record.step for record in history.records] == list(range(1, 21))
    assert all(torch.equal(value, whole.state_dict()[key]) for key, value in again.state_dict().items())


def test_a_batch_that_cannot_be_made_loses_no_step(tmp_path: Path) -> None:
    """The data of an epoch end early; the steps until then are saved, and the training goes on after them."""
    _, losses = train_whole()
    path = tmp_path / "states.safetensors"

    def broken(epoch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        yield from batches_by_epoch(epoch)[: 5 - 2 * epoch]
        if epoch:
            raise OSError("the data are gone")

    stopped = make_model()
    torch.manual_seed(3)
    with pytest.raises(OSError, match="the data are gone"):
        stopped.fit(broken, 4, path=path, quiet=True)
    assert make_model().fit(batches_by_epoch, 4, path=path, resume=True, quiet=True).losses == losses


def test_what_is_finished_is_not_trained_on_again(tmp_path: Path) -> None:
    path = tmp_path / "states.safetensors"
    first = make_model()
    first.fit(batches_by_epoch, 4, path=path, quiet=True)
    again = make_model()
    assert again.fit(batches_by_epoch, 4, path=path, resume=True, quiet=True).losses == first.history.losses
    assert again.program.steps_done == 20


def make_plain() -> Model:
    torch.manual_seed(0)
    model = Model((8, 16)).add(Linear(16, 10))
    return model.compile(SGD(lr=0.1, momentum=0.9), CrossEntropyLoss(), quiet=True)


@pytest.mark.parametrize(("epochs", "steps"), [(1, None), (3, 5)])
def test_a_fit_after_states_of_more_epochs_trains(epochs: int, steps: int | None, tmp_path: Path) -> None:
    """The states are ahead of what the first fit may do; the batches that it did not leave out are not owed later."""
    path, batches = tmp_path / "states.safetensors", batches_of(MLP, 5)
    make_plain().fit(batches, 3, path=path, quiet=True)
    model = make_plain()
    model.fit(batches, epochs, steps=steps, path=path, resume=True, quiet=True)
    assert model.program.steps_done == 15
    model.fit(batches, quiet=True)
    assert model.program.steps_done == 20


def train_in_stages(first: Path, second: Path, epochs: int = 2) -> Model:
    model, batches = make_plain(), batches_of(MLP, 5)
    model.fit(batches, 2, path=first, resume=True, quiet=True)
    model.fit(batches, epochs, path=second, resume=True, quiet=True)
    return model


def test_stages_with_paths_of_their_own_go_on(tmp_path: Path) -> None:
    """A script with two stages, stopped in its second one, then run again, then run again when it is finished."""
    first, second = tmp_path / "first", tmp_path / "second"
    whole = make_plain().fit(batches_of(MLP, 5), 4, quiet=True)
    train_in_stages(first, second, epochs=1)
    for _ in range(2):
        again = train_in_stages(first, second)
        assert again.program.steps_done == 20
        assert again.history.losses == whole.losses


def test_stages_with_one_path_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "states"
    with pytest.raises(UsageError, match="of a fit that began at step 0, and this one begins at step 10"):
        train_in_stages(path, path)


def test_a_history_that_is_ahead_of_the_states_is_cut(tmp_path: Path) -> None:
    """As after kill -9 between the two writes."""
    path = tmp_path / "states.safetensors"
    make_model().fit(batches_by_epoch, 2, path=path, quiet=True)
    file = tmp_path / "states.safetensors.history.json"
    written = json.loads(file.read_text())
    file.write_text(json.dumps({**written, "steps": [*written["steps"], [11, 0.5, 9.0]]}))
    history = make_model().fit(batches_by_epoch, 4, path=path, resume=True, quiet=True)
    assert [record.step for record in history.records] == list(range(1, 21))
    assert history.records[10].loss != 0.5


def test_limits_end_a_training() -> None:
    model = make_model()
    assert len(model.fit(batches_by_epoch, 4, steps=7, quiet=True).records) == 7
    model = Model((8, 16)).add(Linear(16, 10)).compile(SGD(lr=0.0), CrossEntropyLoss(), quiet=True)
    history = model.fit(batches_of(MLP, 60), until=100.0, quiet=True)
    assert len(history.records) == 50  # as soon as there is a mean of 50 steps
    assert history.last_loss < 100


def test_a_schedule_that_ends_too_early_is_said() -> None:
    with pytest.raises(UsageError, match=r"^the schedule refuses step 21: "):
        make_model().fit(batches_by_epoch, 5, quiet=True)


def test_the_last_good_states_are_kept_where_the_loss_is_not_finite(tmp_path: Path) -> None:
    batches = batches_of(MLP, 3)
    batches[2][0].fill_(float("nan"))
    path, model = tmp_path / "states.safetensors", make_model()
    with pytest.raises(NotFinite, match="step 3"):
        model.fit(batches, path=path, quiet=True)
    again = make_model()
    again.program.load(path)
    assert again.program.steps_done == 2
    assert all(torch.isfinite(value).all() for value in model.state_dict().values())


def test_the_phases_are_seen() -> None:
    events: list[Event] = []
    model = Model((8, 16)).add(Linear(16, 10))
    model.compile(SGD(lr=0.1), CrossEntropyLoss(), observer=events.append)
    model.fit(batches_of(MLP, 3), 2, observer=events.append)
    names = [event.name for event in events if isinstance(event, Phase)]
    assert names == [phase.name for phase in model.phases]
    assert (names[:2], names[-2:]) == (["Trace", "Compile"], ["Capture", "Replay"])
    assert all(phase.seconds > 0 for phase in model.phases)
    assert [(event.epoch, event.step) for event in events if isinstance(event, EpochEnded)] == [(1, 3), (2, 6)]
    assert isinstance(events[names.index("Capture") + 1], Progress)


def test_a_file_gets_plain_lines() -> None:
    file = io.StringIO()
    screen = RunConsole(Screen(file=file))
    model = Model((8, 16)).add(Linear(16, 10)).compile(SGD(lr=0.1), CrossEntropyLoss(), observer=screen.show)
    model.fit(batches_of(MLP, 3), 2, observer=screen.show)
    lines = file.getvalue().splitlines()
    assert lines[0].startswith("phase Trace: ")
    assert [line.split(": mean loss")[0] for line in lines if line.startswith("epoch")] == [
        "epoch 1 of 2",
        "epoch 2 of 2",
    ]
    assert lines[-1].startswith("phase Replay: ")


def test_an_evaluation_is_the_mean_over_all_samples() -> None:
    model = Model((8, 16), module=MLP.make()).compile(SGD(lr=0.1), CrossEntropyLoss(), quiet=True)
    batches = batches_of(MLP, 2)
    batches.append((batches[0][0][:3], batches[0][1][:3]))
    found = model.evaluate(batches, accuracy=lambda output, target: (output.argmax(1) == target).float().mean())
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    output = MLP.make_torch()(x)
    assert found.samples == 19
    assert found.loss == pytest.approx(nn.functional.cross_entropy(output, y).item(), rel=1e-5)
    assert found.metrics["accuracy"] == pytest.approx((output.argmax(1) == y).float().mean().item())


class Tied(Module):
    """The table is the last product too; `graph` and `train` are names that a module of torch has already."""

    def __init__(self) -> None:
        self.graph = Linear(8, 20, bias=False)
        self.train: Any = Linear(8, 20, bias=False)  # type: ignore[assignment, method-assign]
        self.train.weight = self.graph.weight

    def forward(self, ids: IRTensor) -> IRTensor:
        return self.train(functional.embedding(ids, self.graph.weight))


def test_tied_weights_are_trained_as_one() -> None:
    torch.manual_seed(0)
    model = Model(TensorSpec((8,), "int64"), module=Tied())
    table = torch.nn.Parameter(model.state_dict()["graph.weight"].clone())
    model.compile(SGD(lr=0.1), CrossEntropyLoss(), quiet=True)
    ids, classes = torch.arange(8), torch.arange(8) + 3
    model.fit([(ids, classes)] * 5, quiet=True)
    optimizer = torch.optim.SGD([table], lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        nn.functional.cross_entropy(table[ids] @ table.T, classes).backward()
        optimizer.step()
    found = model.state_dict()
    torch.testing.assert_close(found["graph.weight"], table.detach())
    assert torch.equal(found["graph.weight"], found["train.weight"])


def test_a_state_dict_may_be_loaded_after_compile() -> None:
    model, other = make_model(), make_model()
    before = model.predict(MLP.batch())
    model.fit(batches_by_epoch, quiet=True)
    assert not torch.equal(model.predict(MLP.batch()), before)
    model.load_state_dict(other.state_dict())
    assert torch.equal(model.predict(MLP.batch()), before)
    torch.manual_seed(3)
    found = model.program.state_dict()["module"]
    assert all(torch.equal(found[key], value) for key, value in other.state_dict().items())


KILLED = """
import os, signal, sys
import torch
from pipeline.authoring import AdamW, CrossEntropyLoss, Dropout, Linear, Model, ReLU
from torch.optim.lr_scheduler import CosineAnnealingLR

path, killed_at = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
model = Model((6, 4)).add(Linear(4, 16)).add(Dropout(0.3)).add(ReLU()).add(Linear(16, 3))
model.compile(AdamW(lr=0.01), CrossEntropyLoss(), schedule=lambda made: CosineAnnealingLR(made, 12), quiet=True)


def batches(epoch):
    draw = torch.Generator().manual_seed(epoch)
    for number in range(4):
        if 4 * epoch + number == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        x = torch.randn(6, 4, generator=draw)
        yield x, x.argmax(1) % 3


history = model.fit(batches, 3, path=path, resume=True, save_every=1, quiet=True)
print([loss.hex() for loss in history.losses])
print({name: tensor.reshape(-1).view(torch.uint8).tolist() for name, tensor in model.program.snapshot().states.items()})
"""


def test_a_fit_that_was_killed_between_steps_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    """With dropout and a schedule; killed in the first epoch, then in the second, then at its begin."""

    def run(name: str, killed_at: int) -> tuple[str, int]:
        done = run_forked("-c", KILLED, tmp_path / name, str(killed_at))
        return done.stdout, done.returncode

    whole, code = run("whole", -1)
    assert (code, len(whole.splitlines())) == (0, 2)
    for killed_at in (2, 7, 8):
        assert run("killed", killed_at) == ("", -signal.SIGKILL)
    assert run("killed", -1) == (whole, 0)


def add_one(module: Any) -> None:
    module.count += 1


def add_by_another_name(module: Any) -> None:
    count = module.count
    count.add_(1)


@pytest.mark.parametrize(
    ("write", "after"),
    [(add_one, 3), (add_by_another_name, 3), (lambda module: module.count.copy_(torch.full((2,), 7.0)), 7)],
    ids=["by an operator", "by a method", "a constant"],
)
def test_a_buffer_that_forward_writes_is_a_state(write: Callable[[Any], None], after: float) -> None:
    class Counter(Module):
        def __init__(self) -> None:
            self.count = Buffer(torch.zeros(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                write(self)
            return x * 1

    model = Model((4, 2)).add(Linear(2, 2)).add(Counter())
    model.compile(SGD(lr=0.1), MSELoss())
    model.fit([(torch.ones(4, 2), torch.ones(4, 2))] * 3, quiet=True)
    assert model.state_dict()["1.count"].tolist() == [after, after]
