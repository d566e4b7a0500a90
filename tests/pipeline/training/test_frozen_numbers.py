"""Numbers of Python that change from call to call are no part of a recorded step, and are refused by name."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import SGD
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.errors import Unsupported
from pipeline.training import TrainProgram, record_step
from pipeline.training.frozen_numbers import CallLog, MixedNorms, RandomGuard, RefusedCalls
from tests.pipeline.training.steps import LOSS, MODELS, mlp

X, LABEL = MODELS["mlp"].batch(0)

COUNTER = itertools.count()


class ChangeableMlp(nn.Module):
    """An MLP whose result is changed by a function of the module and the result."""

    def __init__(self, change: Callable[[ChangeableMlp, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.mlp, self.change, self.calls = mlp(), change, 0
        self.fixed = 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.change(self, self.mlp(x))


def count(module: ChangeableMlp, x: torch.Tensor) -> torch.Tensor:
    module.calls += 1
    return x * module.calls


def count_seldom(module: ChangeableMlp, x: torch.Tensor) -> torch.Tensor:
    module.calls += 1
    return x if module.calls % 100 else -x


def record(change: Callable[[ChangeableMlp, torch.Tensor], torch.Tensor]) -> tuple[ChangeableMlp, TrainProgram]:
    module = ChangeableMlp(change)
    return module, record_step(module, LOSS, SGD(module.parameters(), lr=0.1), (X, LABEL))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda _, x: x * random.random(),
            r"another number when it is recorded again: 0\.\d+, then 0\.\d+, in aten.mul",
        ),
        (lambda _, x: x + np.random.rand(), "another number"),
        (lambda _, x: x * time.perf_counter(), "another number"),
        (lambda _, x: x * next(COUNTER), r"another number when it is recorded again: \d+, then \d+"),
        (lambda _, x: x * torch.tensor([random.random(), 1, 1, 1]).sum(), r"another number .* of \[0\.\d+, 1\.0, 1"),
        (lambda _, x: x * torch.from_numpy(np.random.rand(10).astype(np.float32)), "another number"),
        (
            lambda _, x: torch.sin(x) if random.random() < 0.5 else torch.tanh(x),
            r"calls other operators when it is recorded again: aten\.(sin|tanh)\.\w+, then aten\.(sin|tanh)",
        ),
        (lambda _, x: x if random.random() < 0.6 else torch.tanh(x), "calls other"),  # the first three are below 0.6
        (count, "another number when it is recorded again: 1, then 2"),
    ],
)
@pytest.mark.filterwarnings("ignore:the forward pass changes")
def test_a_number_that_changes_is_refused_with_its_line(
    change: Callable[[ChangeableMlp, torch.Tensor], torch.Tensor], said: str
) -> None:
    random.seed(3)
    with pytest.raises(Unsupported, match=rf"{said}.*\(test_frozen_numbers.py:\d+\); a step would keep the first"):
        record(change)


def test_a_number_of_the_loss_is_refused() -> None:
    module = mlp()
    with pytest.raises(Unsupported, match="the forward pass or the loss computes with another number"):
        record_step(module, lambda out, label: LOSS(out, label) * random.random(), SGD(module.parameters()), (X, LABEL))


def test_a_counter_is_warned_of_and_put_back() -> None:
    """Its effect shows after a hundred calls, which no recording sees."""
    with pytest.warns(UserWarning, match="the forward pass changes 'calls', a number of Python"):
        module, program = record(count_seldom)
    assert module.calls == 0
    program.step((X, LABEL))


def test_numbers_that_stay_and_random_numbers_of_torch_are_recorded() -> None:
    def change(module: ChangeableMlp, x: torch.Tensor) -> torch.Tensor:
        draw = random.Random(5).random()  # a generator of its own, the same each time
        return nn.functional.dropout(x * module.fixed, 0.5) * torch.rand(()) + draw

    _, program = record(change)
    assert len({program.step((X, LABEL)).item() for _ in range(4)}) == 4


WEIGHTS = [torch.randn(size) for layer in range(2) for size in ((40, 16 if not layer else 10), (40, 10), 40, 40)]  # type: ignore[arg-type]


class CallsLstm(nn.Module):
    """Two layers by one direct call, which a look at modules does not find."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.own = nn.ParameterList(WEIGHTS)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        zeros = (torch.zeros(2, 1, 10), torch.zeros(2, 1, 10))
        found = torch.lstm(x[:, None], zeros, list(self.own), True, 2, self.dropout, self.training, False, False)
        return found[0][:, 0]


def test_a_direct_call_of_lstm_with_dropout_is_refused() -> None:
    module, batch = CallsLstm(0.5), (X[:2], LABEL[:2])  # the rows are its steps, each of which torch writes out
    said = r"torch\.lstm is called with 2 layers and dropout=0\.5 \(test_frozen_numbers\.py:\d+\)"
    with pytest.raises(Unsupported, match=said):
        record_step(module, LOSS, SGD(module.parameters()), batch)
    for plain in (CallsLstm(0.0), CallsLstm(0.5).eval()):
        record_step(plain, LOSS, SGD(plain.parameters(), lr=0.1), batch).step(batch)


def draw_with_a_seed(_: ChangeableMlp, x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return x + torch.randn(10)


def draw_in_a_fork(_: ChangeableMlp, x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng(devices=[]):
        return x + torch.randn(10)


def put_the_state_back(_: ChangeableMlp, x: torch.Tensor) -> torch.Tensor:
    state = torch.get_rng_state()
    y = nn.functional.dropout(x)
    torch.set_rng_state(state)
    return y + nn.functional.dropout(x)


def drop_in_a_checkpoint(_: ChangeableMlp, x: torch.Tensor) -> torch.Tensor:
    """torch draws the same dropout again in the backward pass; a recording would have two."""
    return torch.utils.checkpoint.checkpoint(nn.functional.dropout, x.sin(), use_reentrant=False).sin()


@pytest.mark.parametrize("change", [draw_with_a_seed, draw_in_a_fork, put_the_state_back, drop_in_a_checkpoint])
def test_a_state_of_random_numbers_that_is_set_and_put_back_is_refused(change: Callable[..., torch.Tensor]) -> None:
    module = ChangeableMlp(change)
    before = torch.get_rng_state()
    with pytest.raises(Unsupported, match="sets the state of torch's random generator"):
        record_step(module, LOSS, SGD(module.parameters(), lr=0.1), (X, LABEL))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_thread_may_draw_before_or_after_a_recording() -> None:
    def forward(_: ChangeableMlp, x: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=torch.rand, args=(3,))
        thread.start()
        thread.join()
        return nn.functional.dropout(x)

    module = ChangeableMlp(forward)
    with pytest.raises(Unsupported, match=r"or another thread draws from it .* let other threads draw before or after"):
        record_step(module, LOSS, SGD(module.parameters(), lr=0.1), (X, LABEL))


def test_a_generator_is_refused_by_the_name_of_its_attribute() -> None:
    own = torch.Generator().manual_seed(0)

    with pytest.raises(Unsupported, match=r"torch.randn draws from a torch.Generator \(test_frozen_numbers.*no step"):
        record(lambda _, x: x + torch.randn(10, generator=own))
    module = ChangeableMlp(lambda module, x: x * torch.empty_like(x).bernoulli_(generator=module.noise))
    module.noise = own
    state = own.get_state()
    with pytest.raises(
        Unsupported, match=r"torch.bernoulli_ draws from the torch.Generator 'noise' .*leave generator="
    ):
        record_step(module, LOSS, SGD(module.parameters(), lr=0.1), (X, LABEL))
    assert torch.equal(own.get_state(), state)


@pytest.mark.parametrize("cell", [torch.gru, torch.rnn_tanh, torch.rnn_relu])
def test_direct_calls_of_other_cells_are_refused_by_place_and_by_name(cell: Callable[..., object]) -> None:
    gates = 3 if cell is torch.gru else 1
    tensors = (torch.ones(1, 1, 2), torch.ones(2, 1, 2), [torch.ones(2 * gates, 2) for _ in range(4)])
    names = {"num_layers": 2, "dropout": 0.5, "train": True, "bidirectional": False, "batch_first": False}
    with RefusedCalls(lambda _: ""):
        for call in (lambda: cell(*tensors, False, *names.values()), lambda: cell(*tensors, False, **names)):
            with pytest.raises(Unsupported, match=f"torch.{cell.__name__} is called with 2 layers and dropout=0.5"):
                call()
        cell(tensors[0], tensors[1][:1], tensors[2][:2], False, 1, 0.5, True, False, False)  # nothing between layers


def test_a_constant_without_plain_numbers_is_known_by_its_form() -> None:
    with CallLog(RandomGuard()) as log:
        torch.ones(2, device="meta").neg()
        torch.eye(2).to_sparse().neg()
    texts = [text for call in log.calls for text in call]
    assert "torch.float32[2]" in texts
    assert "torch.float32[2, 2]" in texts


aten = torch.ops.aten

NORMS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]] = {
    "layer": lambda x, w, saved: aten.native_layer_norm_backward(x, x, [4], saved, saved, w, w, [True] * 3),
    "group": lambda x, w, saved: aten.native_group_norm_backward(x, x, saved, saved, w, 2, 4, 1, 1, [True] * 3),
    "batch": lambda x, w, saved: aten.native_batch_norm_backward(x, x, w, w, w, saved, saved, True, 1e-5, [True] * 3),
}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32])
def test_statistics_in_float32_alone_mix_no_norm(norm: str, weights: torch.dtype) -> None:
    """CUDA has them for a module in bfloat16, and its kernels take them with operands of one dtype only."""
    found = list[torch.dtype]()

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found.extend([args[0].dtype] if "norm" in str(func) else [])
            return func(*args, **(kwargs or {}))

    saved = torch.ones(4) if norm == "batch" else torch.ones(2, 1)
    with FakeTensorMode(allow_non_fake_inputs=True), Log(), MixedNorms():
        NORMS[norm](torch.ones(2, 4).bfloat16(), torch.ones(4, dtype=weights), saved)
    assert found[0] == weights
