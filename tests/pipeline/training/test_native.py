"""Train steps by the kernels in C++: torch's losses for a hundred steps, the same bits again, and NaN as before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW

from pipeline.authoring import Adam as AdamSpec
from pipeline.authoring import CrossEntropyLoss, Linear, Model
from pipeline.errors import DataError, UsageError
from pipeline.runtime.kernels import load_library
from pipeline.training import NotFinite, TrainProgram, record_step
from tests.pipeline.training.steps import KEY_BIASES, LOSS, MODELS, MakeOptimizer, seeded, step_of_torch
from tests.pipeline.training.test_not_finite import Division

STEPS = 100

TOLERANCE = 1e-4
"""Of float32 losses, relative, as for a step without these kernels (`test_equal_to_torch.py`). Seen: up to 1e-6."""

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "SGD with momentum": lambda params: SGD(params, lr=0.05, momentum=0.9),
    "Adam": lambda params: Adam(params, lr=1e-3),
    "Adam with AMSGrad": lambda params: Adam(params, lr=1e-3, amsgrad=True, weight_decay=1e-2),
}

CASES = [("mlp", optimizer) for optimizer in OPTIMIZERS] + [(model, "AdamW") for model in MODELS]
OPTIMIZERS["AdamW"] = lambda params: AdamW(params, lr=1e-3)


@pytest.fixture(scope="module", autouse=True)
def kernels():
    """One thread, as the kernels for products have."""
    try:
        load_library()
    except UsageError as error:
        pytest.skip(f"the kernels in C++ cannot be built here: {error}")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def record(name: str, optimizer: str, **options: Any) -> tuple[TrainProgram, nn.Module]:
    module = seeded(MODELS[name].make)
    made = OPTIMIZERS[optimizer](module.parameters())
    return record_step(module, LOSS, made, MODELS[name].batch(0), native=True, **options), module


@pytest.mark.parametrize(("model", "optimizer"), CASES)
def test_a_hundred_steps(model: str, optimizer: str) -> None:
    program, _ = record(model, optimizer)
    twin = seeded(MODELS[model].make)
    theirs_of = OPTIMIZERS[optimizer](twin.parameters())
    begin = program.snapshot()
    torch.manual_seed(7)
    ours = [program.step(MODELS[model].batch(number)).item() for number in range(STEPS)]
    torch.manual_seed(7)
    theirs = [step_of_torch(twin, theirs_of, MODELS[model].batch(number)) for number in range(STEPS)]
    assert ours == pytest.approx(theirs, rel=TOLERANCE)
    found = program.state_dict()["module"]
    for name, tensor in twin.state_dict().items():
        if not name.endswith(KEY_BIASES):
            torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-4)
    after = program.snapshot()
    program.restore(begin)
    torch.manual_seed(7)
    assert [program.step(MODELS[model].batch(number)).item() for number in range(STEPS)] == ours
    for name, tensor in program.snapshot().states.items():
        assert torch.equal(tensor, after.states[name]), name


def test_the_step_of_a_perceptron_is_one_graph_without_python() -> None:
    program, _ = record("mlp", "Adam")
    assert program.capture.by_python == ()
    assert program.capture.is_whole


def test_early_updates_and_clipping() -> None:
    """Beside a step of torch's own kernels with the same clipping."""
    module = seeded(MODELS["mlp"].make)
    optimizer = OPTIMIZERS["Adam"](module.parameters())
    by_torch = record_step(module, LOSS, optimizer, MODELS["mlp"].batch(0), max_norm=0.1, large=0)
    program, _ = record("mlp", "Adam", max_norm=0.1, large=0)
    for number in range(20):
        batch = MODELS["mlp"].batch(number)
        assert program.step(batch).item() == pytest.approx(by_torch.step(batch).item(), rel=TOLERANCE)


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_a_loss_that_is_not_finite_stops_and_changes_nothing(number: float) -> None:
    program, _ = record("mlp", "Adam")
    x, label = MODELS["mlp"].batch(0)
    program.step((x, label))
    before = program.snapshot()
    broken = x.clone()
    broken[3, 5] = number
    with pytest.raises(NotFinite, match="step 2: the loss is nan; input held such values before the step"):
        program.step((broken, label))
    for name, tensor in program.snapshot().states.items():
        assert torch.equal(tensor, before.states[name]), name
    program.step((x, label))
    assert program.steps_done == 2


def test_the_operator_at_fault_is_named() -> None:
    module = seeded(Division)
    x, label = MODELS["mlp"].batch(0)
    program = record_step(module, LOSS, Adam(module.parameters()), (x, label), native=True)
    with pytest.raises(NotFinite, match=r"step 1: the loss is nan; the first operator .* is 'div', aten.div.Tensor"):
        program.step((torch.zeros(8, 16), label))


def test_a_label_that_is_no_class_is_refused_as_without() -> None:
    x, label = MODELS["mlp"].batch(0)
    messages = []
    for native in (False, True):
        module = seeded(MODELS["mlp"].make)
        program = record_step(module, LOSS, Adam(module.parameters()), (x, label), native=native)
        program.step((x, label))
        before = program.snapshot()
        with pytest.raises((DataError, UsageError)) as error:
            program.step((x, label + 10))
        messages.append(str(error.value))
        for name, tensor in program.snapshot().states.items():
            assert torch.equal(tensor, before.states[name]), name
    assert messages[0] == messages[1]


def test_a_model_by_hand() -> None:
    model = Model((8, 16)).add(Linear(16, 10))
    model.compile(AdamSpec(), CrossEntropyLoss(), native=True, quiet=True)
    history = model.fit([MODELS["mlp"].batch(0)], steps=20, epochs=20, quiet=True)
    losses = [record.loss for record in history.records]
    assert losses[-1] < losses[0]
