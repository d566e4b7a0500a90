"""What has launches is neither copied nor pickled, and the message says what to do in place of it."""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable

import pytest
import torch

from pipeline.errors import UsageError
from pipeline.ir import Graph
from pipeline.runtime import compile_graph, compile_graphs, compile_open_graph
from pipeline.training import record_step
from tests.support.torch_programs import graph_of

COPIERS: dict[str, Callable[[object], object]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "torch.save": lambda made: torch.save(made, io.BytesIO()),
    "deepcopy within a list": lambda made: copy.deepcopy([made]),
}


def linear() -> tuple[torch.nn.Module, torch.Tensor]:
    return torch.nn.Linear(2, 2), torch.ones(1, 2)


def train_program() -> object:
    module, x = linear()
    return record_step(module, torch.nn.MSELoss(), torch.optim.SGD(module.parameters(), 0.1), (x, x))


def graph() -> Graph:
    module, x = linear()
    return graph_of(module, [x])


AGAIN = "pickle the graph and its weights, and compile them again where they are read"

MADE: dict[str, tuple[Callable[[], object], str]] = {
    "CompiledProgram": (lambda: compile_graph(graph()), f"take `new_context()` for states of its own, or {AGAIN}"),
    "SizedProgram": (lambda: compile_open_graph(graph()), AGAIN),
    "CompiledEntries": (
        lambda: compile_graphs({"only": graph()}),
        f"take `new_sequence()` for states of its own, or {AGAIN}",
    ),
    "EntryPoint": (lambda: compile_graphs({"only": graph()}).entry("only"), AGAIN),
    "Context": (lambda: compile_graph(graph()).new_context(), AGAIN),
    "TrainProgram": (
        train_program,
        "`save` its states, or pickle its `snapshot()`, and record the step again where they are read",
    ),
}


@pytest.mark.parametrize("name", MADE)
def test_a_copy_is_refused_in_one_sentence(name: str) -> None:
    make, instead = MADE[name]
    made = make()
    article = "an" if name == "EntryPoint" else "a"
    said = f"{article} {name} can be neither copied nor pickled, since its launches hold memory of this process"
    message = f"{said}; {instead}"
    for copier in COPIERS.values():
        with pytest.raises(UsageError, match=f"^{re.escape(message)}$"):
            copier(made)


def test_a_capture_is_refused_too() -> None:
    module, x = linear()
    recorded = graph_of(module, [x])
    program = compile_graph(recorded, dict(module.state_dict()))
    ((name, feed),) = {recorded.values[vid].name: x for vid in recorded.inputs}.items()
    with pytest.raises(UsageError, match="a Capture can be neither copied nor pickled"):
        copy.deepcopy(program.capture({name: feed}))


def test_what_the_messages_name_can_be_done() -> None:
    """Graph and weights are pickled, compiled again, and compute the same."""
    module, x = linear()
    recorded = graph_of(module, [x])
    (name,) = (recorded.values[vid].name for vid in recorded.inputs)
    again, weights = pickle.loads(pickle.dumps((recorded, dict(module.state_dict()))))
    (found,), (wanted,) = (
        compile_graph(one, held).run({name: x}).values()
        for one, held in ((again, weights), (recorded, dict(module.state_dict())))
    )
    assert torch.equal(found, wanted)
    module, x = linear()
    program = record_step(module, torch.nn.MSELoss(), torch.optim.SGD(module.parameters(), 0.1), (x, x))
    program.step((x, x))
    states = pickle.loads(pickle.dumps(program.snapshot())).states
    assert all(torch.equal(states[name], tensor) for name, tensor in program.snapshot().states.items())
