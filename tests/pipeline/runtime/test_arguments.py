"""Wrong arguments at the doors of the Python API, each refused in one sentence; calls of programs, and their texts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pipeline.errors import SourceError, UsageError
from pipeline.ir import Graph, from_json, from_text, to_json, to_text
from pipeline.runtime import SizedProgram, compile_graph, compile_graphs, compile_open_graph
from pipeline.torch_ir import extract_ir
from pipeline.training import as_module, record_step, with_weights

X = torch.randn(3, 4)


class TwoResults(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer(x) + y, x.sum()


MODULE = TwoResults()
GRAPH = extract_ir(MODULE, (X, torch.randn(3, 2)), strict=False).graph
WEIGHTS = dict(MODULE.named_parameters())
PROGRAM = compile_graph(GRAPH, WEIGHTS)
SIZED = compile_open_graph(GRAPH, WEIGHTS)
ENTRIES = compile_graphs({"main": GRAPH}, WEIGHTS)
FEED = {"x": X, "y": torch.ones(3, 2)}

NO_FEEDS: tuple[Any, ...] = (X, [X], (X,), None, 3, "x", b"x", True, object(), dict)

FEED_DOORS: dict[str, Callable[[Any], object]] = {
    **{
        f"{type(program).__name__}.{name}": getattr(program, name)
        for program in (PROGRAM, SIZED)
        for name in ("run", "run_updating", "capture", "replay", "give_states")
    },
    "CompiledEntries.run": lambda feed: ENTRIES.run("main", feed),
    "CompiledEntries.give_states": ENTRIES.give_states,
    "EntryPoint.replay": lambda feed: ENTRIES.entry("main").replay(feed),
    "compile_graphs": compile_graphs,
}


@pytest.mark.parametrize("door", FEED_DOORS)
def test_what_is_no_feed_is_refused(door: str) -> None:
    for feed in NO_FEEDS:
        with pytest.raises(UsageError, match=r"^(feed|states|graphs) is .*; expected (a mapping|{name)") as refused:
            FEED_DOORS[door](feed)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "feed",
    [
        {},
        {"z": X},
        {1: X, "y": X},
        {**FEED, "x": X.double()},
        {**FEED, "x": None},
        {**FEED, "x": [1.0]},
        {**FEED, 2: X},
    ],
)
@pytest.mark.parametrize("program", [PROGRAM, SIZED], ids=["plan", "sizes"])
def test_a_feed_with_other_keys_or_tensors_is_refused(program: Any, feed: Any) -> None:
    for door in (program.run, program.replay, program.capture):
        with pytest.raises(UsageError):
            door(feed)


STEP_MODULE = nn.Linear(4, 2)
BATCH = (X, torch.randn(3, 2))


def record(**options: Any) -> object:
    return record_step(STEP_MODULE, nn.MSELoss(), torch.optim.SGD(STEP_MODULE.parameters(), lr=0.1), BATCH, **options)


OTHER_DOORS: tuple[tuple[str, Callable[[], object]], ...] = (
    *((f"native is {bad!r}", lambda bad=bad: compile_graph(GRAPH, native=bad)) for bad in ("yes", 1, None)),  # type: ignore[misc]
    ("native is 'yes'", lambda: compile_open_graph(GRAPH, native="yes")),  # type: ignore[arg-type]
    ("native is 1", lambda: record(native=1)),
    ("large is 'all'", lambda: record(large="all")),
    ("observe is 3", lambda: record(observe=3)),
    ("graph is an IR", lambda: compile_graph(extract_ir(MODULE, (X, X[:, :2]), strict=False))),  # type: ignore[arg-type]
    ("graph is None", lambda: compile_open_graph(None)),  # type: ignore[arg-type]
    ("weights is a list", lambda: compile_graph(GRAPH, [X])),  # type: ignore[arg-type]
    ("copy is 1", lambda: PROGRAM.run(FEED, copy=1)),  # type: ignore[arg-type]
    ("snapshot is a dict", lambda: PROGRAM.restore({})),  # type: ignore[arg-type]
    ("restore is 3", lambda: PROGRAM.replay(FEED, restore=3)),  # type: ignore[arg-type]
    ("changed is 3", lambda: PROGRAM.replay(FEED, changed=3)),  # type: ignore[arg-type]
    ("mode is None", lambda: PROGRAM.capture(FEED, mode=None)),  # type: ignore[arg-type]
    ("name is a list", lambda: PROGRAM.state([])),  # type: ignore[arg-type]
    ("graph is 3", lambda: to_json(3)),  # type: ignore[arg-type]
    ("graph is None", lambda: to_text(None)),  # type: ignore[arg-type]
    ("data is a list", lambda: from_json([])),  # type: ignore[arg-type]
    ("text is None", lambda: from_text(None)),  # type: ignore[arg-type]
    ("model is a Tensor", lambda: as_module(X)),  # type: ignore[arg-type]
    ("trained is a dict", lambda: with_weights("model.onnx", {})),  # type: ignore[arg-type]
)


@pytest.mark.parametrize(("begin", "call"), OTHER_DOORS, ids=[row[0] for row in OTHER_DOORS])
def test_another_argument_is_refused(begin: str, call: Callable[[], object]) -> None:
    with pytest.raises(UsageError) as refused:
        call()
    assert str(refused.value).startswith(f"{begin}; expected ")


@pytest.mark.parametrize("program", [PROGRAM, SIZED, ENTRIES.entry("main")], ids=["plan", "sizes", "entry"])
def test_a_program_is_called_with_tensors_in_order_or_by_name(program: Any) -> None:
    wanted = MODULE(*FEED.values())
    for found in (program(*FEED.values()), program(**FEED), program(FEED["x"], y=FEED["y"])):
        assert isinstance(found, tuple)
        torch.testing.assert_close(found, wanted)
    with pytest.raises(UsageError, match="found 3 tensors in order; inputs: x, y"):
        program(X, X, X)
    with pytest.raises(UsageError, match="'x' comes in order and by name"):
        program(X, x=X)


def test_one_output_comes_alone_and_a_train_program_takes_its_batch() -> None:
    one = compile_graph(extract_ir(STEP_MODULE, (X,), strict=False).graph, dict(STEP_MODULE.named_parameters()))
    torch.testing.assert_close(one(X), STEP_MODULE(X))
    program: Any = record()
    assert float(program(*BATCH)) > float(program(*BATCH))
    assert program.steps_done == 2
    assert repr(program).startswith("TrainProgram(input: float32[3, 4], target: float32[3, 2]) -> loss: ")


def test_texts_are_short() -> None:
    for item in (GRAPH, PROGRAM, SIZED, ENTRIES, ENTRIES.entry("main"), PROGRAM.plan, PROGRAM.capture(FEED)):
        assert type(item).__name__ in repr(item)
        assert len(repr(item)) < 400
        assert repr(item).count("\n") < 10
    assert isinstance(SIZED, SizedProgram)


def test_a_branch_without_outputs_is_refused_when_it_is_read() -> None:
    class Branches(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,))

    graph: Graph = extract_ir(Branches(), (X,), strict=False).graph
    data = to_json(graph)
    (cond,) = [op for op in data["ops"] if op["kind"] == "higher_order.cond"]
    body = cond["bodies"][1]
    for outputs in ([], body["outputs"] * 2):
        body["outputs"] = outputs
        with pytest.raises(SourceError, match="the body 'false_fn' of op"):
            from_json(data)
