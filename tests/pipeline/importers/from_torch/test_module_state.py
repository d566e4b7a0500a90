"""An extraction leaves the caller's module as it is, and sees which module makes a call."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from pipeline.importers.from_torch.modules import preserve_module_state
from pipeline.torch_ir import execute_ir, extract_ir


class Lazy(nn.Module):
    """Fills a table when it is first asked, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.rows, self.table = 0, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > self.rows:
            self.rows, self.table = x.shape[0], torch.arange(float(x.shape[0])).cos()[:, None]
        return self.linear(x) * self.table[: x.shape[0]]


class Counting(nn.Module):
    """Writes to buffers of whole numbers, and what a gradient flows through."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 4), 0
        self.register_buffer("step", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.step += 1
        y = self.linear(x)
        self.mean.add_(y.mean(0))
        return y


class Registering(nn.Module):
    """Makes its buffer when it is first run."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if "scale" not in self._buffers:
            self.register_buffer("scale", torch.full((4,), 2.0))
        return self.linear(x) * self.scale


class Hooking(nn.Module):
    """Collects what a layer gives by a hook that the first run installs, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.is_hooked = nn.Linear(4, 4), False

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        self.found = found
        if not self.is_hooked:
            self.linear.register_forward_hook(lambda module, args, result: self.found.append(result))
            self.is_hooked = True
        self.linear(x)
        return found


def test_hooks_that_a_run_installs_are_taken_off() -> None:
    """Kept without the flag, they would be installed twice, and collect each result twice."""
    model = Hooking()
    own = model.linear.register_forward_pre_hook(lambda module, args: None)
    for _ in range(3):
        with preserve_module_state(model):
            assert len(model(torch.ones(1, 4))) == 1
        assert not model.linear._forward_hooks
        assert list(model.linear._forward_pre_hooks) == [own.id]


class Either(nn.Module):
    """The fourth layer takes another of two modules that do the same."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear, self.number = nn.Linear(4, 4), number
        self.left, self.right = nn.ReLU(), nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.left if self.number != 3 else self.right)(self.linear(x))


def stack_layers(layer: type[nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer() for _ in range(5)))


@pytest.mark.parametrize("layer", [Lazy, Counting, Registering])
def test_attributes_and_buffers_are_as_before(layer: type[nn.Module]) -> None:
    model, x = stack_layers(layer), torch.randn(3, 4)
    untouched = copy.deepcopy(model)
    before = [dict(vars(child)) for child in model.modules()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it may be traced whole
        ir = extract_ir(model, (x,), strict=False, stamp=True)
    for held, module in zip(before, model.modules(), strict=True):
        assert held == vars(module)
    assert untouched.state_dict().keys() == model.state_dict().keys()
    for (name, was), (_, now) in zip(untouched.named_buffers(), model.named_buffers(), strict=True):
        assert torch.equal(was, now), name
        assert now.is_leaf, name
    (actual,) = execute_ir(ir, (x,), weights=untouched.state_dict())
    assert torch.equal(actual, untouched(x))


class Tabled(nn.Module):
    """Computes a table once, and keeps it where `kept` says."""

    def __init__(self, kept: Callable[[Tabled, int], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.kept = nn.Linear(4, 4), kept
        self.own: dict[int, torch.Tensor] = {}
        self.beside = Beside()
        self.held = {"key": Beside(), "list": [(Beside(),)], "deque": deque([Beside()]), "set": {Beside()}}
        self.held |= {"object": SimpleNamespace(inner=Beside()), "frozen": Frozen()}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.kept(self, x.shape[0])


class Beside:
    """A plain object of a module."""

    def __init__(self) -> None:
        self.table: torch.Tensor | None = None
        self.tables: list[torch.Tensor] = []


class Frozen:
    """Its own attributes are set past it."""

    def __setattr__(self, name: str, item: object) -> None:
        raise AssertionError("may not be called")


def cosines(rows: int) -> torch.Tensor:
    return torch.arange(float(rows)).cos()[:, None]


def fill_row(table: dict[int, torch.Tensor], rows: int) -> torch.Tensor:
    if rows not in table:
        table[rows] = cosines(rows)
    return table[rows]


def beside(layer: Tabled, rows: int) -> torch.Tensor:
    if layer.beside.table is None:
        layer.beside.table = cosines(rows)
        layer.beside.tables.append(layer.beside.table)
    return layer.beside.tables[0]


def within(find: Callable[[Any], Any]) -> Callable[[Tabled, int], torch.Tensor]:
    def keep_table(layer: Tabled, rows: int) -> torch.Tensor:
        place = find(layer.held)
        if getattr(place, "table", None) is None:
            object.__setattr__(place, "table", cosines(rows))
        return place.table

    return keep_table


INSIDE: dict[str, Callable[[Any], Any]] = {
    "value": lambda held: held["key"],
    "list": lambda held: held["list"][0][0],
    "deque": lambda held: held["deque"][0],
    "set": lambda held: next(iter(held["set"])),
    "inner": lambda held: held["object"].inner,
    "frozen": lambda held: held["frozen"],
}


@pytest.mark.parametrize("stamp", [False, True])
@pytest.mark.parametrize(
    "kept",
    [lambda layer, rows: fill_row(layer.own, rows), beside, *map(within, INSIDE.values())],
    ids=["module", "object", *INSIDE],
)
@pytest.mark.filterwarnings("ignore:The tensor attribute", "ignore:Sequential is traced whole")
def test_a_table_that_is_filled_once(kept: Callable[[Tabled, int], torch.Tensor], stamp: bool) -> None:
    """torch.export by itself leaves a tensor without data in most of these, and so spoils the next run."""
    model, x = nn.Sequential(*(Tabled(kept) for _ in range(5))), torch.randn(3, 4)
    ir = extract_ir(model, (x,), strict=False, stamp=stamp)
    with torch.no_grad():
        expected = model(x)
    assert type(expected) is torch.Tensor
    assert torch.equal(execute_ir(ir, (x,), weights=model.state_dict())[0], expected)


class Odd(dict[str, Any]):
    """Has opinions on all that is done with it."""

    def _refused(self, *_: object) -> Any:
        raise AssertionError("may not be called")

    __setitem__ = __getitem__ = __iter__ = __eq__ = __len__ = clear = items = copy = _refused
    __hash__ = None


class Shelf(dict[str, Any]):
    """A container with attributes of its own."""

    label = "before"


class Noting(nn.Module):
    """Counts, collects and throws away, in other places than its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.notes: dict[str, Any] = {"gone": 1, "step": 0, "names": ["first"]}
        self.last, self.order = deque([1, 2], maxlen=2), OrderedDict(a=1, b=2)
        self.odd, self.seen = Odd(a=1), {1}
        self.shelf = Shelf(a=1)
        self.shelf.label = "own"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.notes["step"] += 1
        self.notes.pop("gone", None)
        self.notes["names"].append("next")
        self.last.append(self.notes["step"])
        self.order.move_to_end("a")
        dict.update(self.odd, a=2, b=3)
        self.seen.add(2)
        self.shelf.label = "after"
        return self.linear(x) + self.notes["step"]

    def state_text(self) -> str:
        return str((self.notes, self.last, [*self.order], dict.__repr__(self.odd), self.seen, self.shelf.label))


@pytest.mark.parametrize("stamp", [False, True])
@pytest.mark.filterwarnings("ignore:Sequential is traced whole")
def test_numbers_and_names_are_as_before_too(stamp: bool) -> None:
    model, x = stack_layers(Noting), torch.randn(3, 4)
    before = [layer.state_text() for layer in model]
    ir = extract_ir(model, (x,), strict=False, stamp=stamp)
    assert [layer.state_text() for layer in model] == before
    assert torch.equal(execute_ir(ir, (x,), weights=model.state_dict())[0], model(x))


def test_another_module_of_a_layer_is_another_path() -> None:
    model = nn.Sequential(*(Either(number) for number in range(5)))
    with pytest.warns(UserWarning, match="is called in 'unit 0.right' in place of 'unit 0.left'"):
        ir = extract_ir(model, (torch.randn(3, 4),), strict=False, stamp=True)
    assert [op.origin for op in ir.graph.ops if "relu" in op.kind] == [
        "0.left",
        "1.left",
        "2.left",
        "3.right",
        "4.left",
    ]
