"""What a forward pass leaves in its modules is taken out: it stays as it was, and can be called."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD

from pipeline.errors import Unsupported
from pipeline.training import record_step
from pipeline.training.attributes import ModuleAttributes

X, TARGET = torch.ones(2, 4), torch.zeros(2, 4)

Change = Callable[[Any, torch.Tensor], torch.Tensor]


class ChangeableLinear(nn.Module):
    """A linear layer, whose result `change` may do anything with."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.linear, self.change = nn.Linear(4, 4), change
        self.plain, self.kept, self.listed, self.best = torch.zeros(2, 4), dict[Any, Any](), list[Any](), float("nan")
        self.own = np.random.default_rng(0)
        self.register_buffer("absent", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.change(self, self.linear(x))


def lazy_buffer(module: Any, x: torch.Tensor) -> torch.Tensor:
    if module.absent is None:
        module.absent = torch.full((4,), 2.0).masked_fill_(torch.tensor([False, True, False, True]), 0)
    return x * module.absent


def new_buffer(module: Any, x: torch.Tensor) -> torch.Tensor:
    if not hasattr(module, "mask"):
        module.register_buffer("mask", x.new_ones(4))
    return x + module.mask


def cache_in_a_dict(module: ChangeableLinear, x: torch.Tensor) -> torch.Tensor:
    if x.shape[1] not in module.kept:
        module.kept[x.shape[1]] = (torch.arange(4.0), {"one": torch.ones(4)})
    table, rest = module.kept[x.shape[1]]
    return x * table + rest["one"]


def cache_in_itself(module: ChangeableLinear, x: torch.Tensor) -> torch.Tensor:
    if "made" not in module.kept:
        module.kept["made"] = {"table": torch.arange(4.0)}
        module.kept["made"]["again"] = (module.kept["made"],)
    return x * module.kept["made"]["table"]


def keep_the_last(module: ChangeableLinear, x: torch.Tensor) -> torch.Tensor:
    module.plain = module.kept["last"] = x
    module.listed.append(x)
    return x


def draw_and_leave(module: ChangeableLinear, x: torch.Tensor) -> torch.Tensor:
    numbers = random.random(), np.random.rand(), module.own.random()
    return x if len(numbers) == 3 else -x


def draw_and_cache(module: ChangeableLinear, x: torch.Tensor) -> torch.Tensor:
    """Drawing has it recorded ten times, and each time without the cache of the last."""
    return cache_in_a_dict(module, x) if random.random() < 2 else x


@pytest.mark.parametrize(
    "change", [lazy_buffer, new_buffer, cache_in_a_dict, keep_the_last, draw_and_leave, draw_and_cache]
)
@pytest.mark.filterwarnings("ignore:the forward pass or the loss calls")
def test_the_module_is_as_it_was_and_the_steps_are_those_of_torch(change: Change) -> None:
    module = ChangeableLinear(change)
    before = (dict(vars(module)), list(module.state_dict()), dict(module.kept), list(module.listed))
    drawn = _random_states(module)

    program = record_step(module, nn.MSELoss(), SGD(module.parameters(), lr=0.1), (X, TARGET))

    assert before == (vars(module), list(module.state_dict()), module.kept, module.listed)
    assert drawn == [
        repr(state) for state in (random.getstate(), np.random.get_state(), module.own.bit_generator.state)
    ]
    _compare_with_torch(module, program.step)


def test_weights_that_are_computed_at_each_call_are_recorded() -> None:
    """`torch.nn.utils.weight_norm` of old sets an attribute before each call, and reads it only then."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        module = nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 4)))
    program = record_step(module, nn.MSELoss(), SGD(module.parameters(), lr=0.1), (X, TARGET))
    _compare_with_torch(module, program.step)


def _random_states(module: ChangeableLinear) -> list[str]:
    return [repr(state) for state in (random.getstate(), np.random.get_state(), module.own.bit_generator.state)]


@torch.enable_grad()
def _compare_with_torch(module: nn.Module, step: Callable[[tuple[torch.Tensor, torch.Tensor]], torch.Tensor]) -> None:
    optimizer = SGD(module.parameters(), lr=0.1)
    for _ in range(3):
        loss = nn.functional.mse_loss(module(X), TARGET)
        torch.testing.assert_close(step((X, TARGET)), loss.detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def carry_in_a_dict(module: ChangeableLinear, x: torch.Tensor) -> torch.Tensor:
    module.kept["h"] = x + module.kept["h"].detach() if "h" in module.kept else x
    return module.kept["h"]


def carry_in_a_list(module: ChangeableLinear, x: torch.Tensor) -> torch.Tensor:
    y = x + module.listed[-1].detach() if module.listed else x
    module.listed.append(y)
    return y


def carry_in_an_attribute(module: ChangeableLinear, x: torch.Tensor) -> torch.Tensor:
    module.plain = module.plain.detach() + x
    return module.plain


def carry_a_first_state(module: Any, x: torch.Tensor) -> torch.Tensor:
    module.state = torch.tanh(x + (module.state.detach() if hasattr(module, "state") else torch.zeros(2, 4)))
    return module.state


def keep_a_first_draw(module: Any, x: torch.Tensor) -> torch.Tensor:
    if not hasattr(module, "noise"):
        module.noise = torch.rand(4)
    return x + module.noise


def keep_a_first_batch(module: Any, x: torch.Tensor) -> torch.Tensor:
    if not hasattr(module, "first"):
        module.first = torch.zeros(2, 4)
        module.first.copy_(x.detach())
    return x + module.first


def seed_within(_: ChangeableLinear, x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)
    return x + torch.rand(4)


def count_in_a_new_buffer(module: Any, x: torch.Tensor) -> torch.Tensor:
    if not hasattr(module, "seen"):
        module.register_buffer("seen", torch.zeros(()))
    return x * module.seen.add_(1)


def average_into_an_absent_buffer(module: Any, x: torch.Tensor) -> torch.Tensor:
    if module.absent is None:
        module.absent = torch.zeros(4)
    module.absent = x.detach().mean(0) + module.absent * 0.9
    return x - module.absent


def make_a_parameter(module: Any, x: torch.Tensor) -> torch.Tensor:
    if not hasattr(module, "gain"):
        module.gain = nn.Parameter(torch.ones(4))
    return x * module.gain


def fail_behind_a_cache(module: ChangeableLinear, x: torch.Tensor) -> torch.Tensor:
    module.kept["mask"] = module.mask = torch.ones(4)
    return x if x.sum() > 0 else -x


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (carry_in_a_dict, r"sets 'kept.h', a tensor that is neither .* reads it at the next call \(test_attributes"),
        (carry_in_a_list, r"sets 'listed', a tensor"),
        (carry_in_an_attribute, r"sets 'plain', a tensor .*: register it by register_buffer\('plain', …\)"),
        (carry_a_first_state, r"(calls other operators|sets 'state')"),
        (keep_a_first_draw, "sets 'noise'"),
        (keep_a_first_batch, "sets 'first'"),
        (seed_within, "sets the state of torch's random generator"),
        (count_in_a_new_buffer, r"writes to 'seen', a tensor .* \(aten.add_.Tensor, test_attributes.* in __init__"),
        (average_into_an_absent_buffer, "has left a tensor in 'absent', which no step carries .* with its first value"),
        (make_a_parameter, "makes the parameter 'gain' at its first call, which the optimizer does not have"),
        (fail_behind_a_cache, "Python asks for a number of a tensor"),
    ],
)
def test_what_is_refused_leaves_nothing_either(change: Change, said: str) -> None:
    module = ChangeableLinear(change)
    own, drawn = copy.copy(vars(module)), torch.get_rng_state()
    with pytest.raises(Unsupported, match=said):
        record_step(module, nn.MSELoss(), SGD(module.parameters(), lr=0.1), (X, TARGET))
    assert vars(module) == own
    assert (module.kept, module.listed) == ({}, [])
    assert torch.equal(drawn, torch.get_rng_state())
    module(X)


def test_random_numbers_that_decide_nothing_seen_are_warned_of() -> None:
    module = ChangeableLinear(lambda _, x: x if random.random() < 2 else -x)
    with pytest.warns(UserWarning, match="calls Python's or numpy's random generator"):
        record_step(module, nn.MSELoss(), SGD(module.parameters(), lr=0.1), (X, TARGET))


class TracedTensor(torch.Tensor):
    """Stands for a tensor of a recording."""


def change_containers(module: ChangeableLinear) -> None:
    module.kept["other"] = module.kept.pop("itself")  # the same value under another key
    module.listed.reverse()
    del module.best


def draw_from_generators(module: ChangeableLinear) -> None:
    for generator in module.listed:
        generator.random(3) if isinstance(generator, np.random.Generator) else generator.random()


def make_holder() -> ChangeableLinear:
    """With a tensor in a dict, and generators in a list."""
    module = ChangeableLinear(lambda _, x: x)
    module.kept["a"] = X
    module.listed += [random.Random(1), np.random.RandomState(1), np.random.default_rng(1)]
    return module


@pytest.mark.parametrize("change", [change_containers, draw_from_generators])
def test_what_lies_in_containers_is_put_back(change: Callable[[ChangeableLinear], None]) -> None:
    module = make_holder()
    module.kept["itself"] = module.kept
    kept, listed, best = dict(module.kept), list(module.listed), module.best
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        with ModuleAttributes(module):
            change(module)
    assert list(module.kept) == list(kept)
    assert module.listed == listed
    assert module.best is best
    fresh = make_holder().listed
    assert [generator.random() for generator in module.listed] == [generator.random() for generator in fresh]


def test_containers_that_lie_in_themselves_are_looked_through_once() -> None:
    """A dict in itself, in a tuple that a list holds, before a recording and made by one."""
    module = ChangeableLinear(cache_in_itself)
    module.kept["itself"], module.listed[:] = module.kept, [(module.listed, module.kept)]
    step = record_step(module, nn.MSELoss(), SGD(module.parameters(), lr=0.1), (X, TARGET))
    assert module.kept.keys() == {"itself"}
    wanted = nn.functional.mse_loss(module(X), TARGET)
    torch.testing.assert_close(step.step((X, TARGET)), wanted.detach())
    generator = torch.Generator()
    module.kept["drawn"] = (module.listed, {"by": generator})
    assert ModuleAttributes(module).name_of(generator) == "listed"  # which holds the dict


def test_names_are_those_of_the_part_of_the_module() -> None:
    module = nn.Sequential(make_holder())
    (part,) = module
    attributes = ModuleAttributes(module)
    extra = torch.ones(2)
    vars(part).update(best=1.0, extra=extra)
    assert attributes.name_of(extra) == "0.extra"
    assert attributes.put_back() == ["0.best"]


@pytest.mark.parametrize("is_second_constant", [True, False])
def test_constants_of_a_recording_are_taken_out_but_in_place_of_a_tensor(is_second_constant: bool) -> None:
    """With one that is none, a tuple stays whole."""
    module = ChangeableLinear(lambda _, x: x)
    attributes = ModuleAttributes(module)
    first, second = (torch.ones(1).as_subclass(TracedTensor) for _ in range(2))
    module.plain, module.kept["both"] = first, (first, second)
    module.listed.append(second)
    attributes.take_out(lambda tensor: tensor is first or is_second_constant)
    assert module.plain is first
    assert list(module.kept) == ([] if is_second_constant else ["both"])
    assert len(module.listed) == (not is_second_constant)
