"""A stamped graph is the traced one to the letter: names, order, constants, writes, inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline.importers.from_torch import from_torch
from pipeline.importers.from_torch.layer_dedup import DeduplicatedGraph, deduplicate_layers
from pipeline.importers.from_torch.layer_dedup.recorder import MetaResults
from pipeline.ir import Graph, to_text
from tests.pipeline.importers.from_torch.layer_dedup.both_graphs import deduplicate, expect_traced_graph, trace_whole
from tests.pipeline.importers.from_torch.layer_dedup.layered_models import (
    WIDTH,
    Decode,
    LastLayer,
    Layer,
    RegionsByTurns,
    Stack,
    Stateful,
    x,
)


def stack_of(layers: Iterable[nn.Module], kind: type[Stack] = Stack) -> Stack:
    model = kind(0)
    model.layers = nn.ModuleList(layers)
    return model


def test_three_layers_of_which_two_were_traced() -> None:
    """The third has the second's ops, its own parameters and names, and reads the second."""
    graph = expect_traced_graph(Stack(3), (x(),), saved=1)
    assert [line.partition(" line ")[0] for line in to_text(graph).splitlines() if '@"layers.2' in line] == [
        '  %18 "linear_3": float32[2, 4] = aten.linear.default(%17, %6, %7) {input: $0, weight: $1, bias: $2} '
        '@"layers.2.fc" node "linear_3"',
        '  %19 "relu_2": float32[2, 4] = aten.relu.default(%18) {self: $0} @"layers.2" node "relu_2"',
        '  %20 "add_2": float32[2, 4] = aten.add.Tensor(%17, %19) {self: $0, other: $1} @"layers.2" node "add_2"',
    ]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_buffers_constants_writes_and_what_is_between_layers(device: str) -> None:
    with torch.device(device):
        model, scale = Stateful(5).eval(), torch.zeros(1, WIDTH)
        args = [x() for _ in range(6)]
        graph = expect_traced_graph(model, args, {"shift": x(), "scale": scale}, saved=3)
    assert len(graph.updates) == 10


def test_two_constants_in_each_layer() -> None:
    expect_traced_graph(Stack(5, lambda layer, x: layer.fc(x) * torch.tensor(1.5) + torch.tensor(2.5)), (x(),), saved=3)


@pytest.mark.parametrize("strict", [False, True])
def test_caches_of_layers_as_inputs_and_outputs(strict: bool) -> None:
    model = Decode(5, strict)
    expect_traced_graph(model, model.inputs(), saved=3)


def test_a_layer_that_writes_into_a_view_of_its_buffer() -> None:
    class Rolling(Layer):
        def __init__(self, index: int) -> None:
            super().__init__(index)
            self.register_buffer("rows", torch.zeros(2, 2 * WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            self.get_buffer("rows")[:, WIDTH:].copy_(x)
            return self.fc(self.get_buffer("rows")[:, :WIDTH] + self.get_buffer("rows")[:, WIDTH:])

    graph = expect_traced_graph(stack_of(map(Rolling, range(4))), (x(),), saved=2)
    assert len(graph.updates) == 4


def test_an_unequal_layer_at_the_end() -> None:
    model = Decode(5, last=LastLayer(4))
    expect_traced_graph(model, model.inputs(), saved=2)


def test_layers_that_alternate() -> None:
    """Two kinds by turns, and one left over, which stands before the units."""

    class Sliding(Layer):
        def __init__(self, index: int) -> None:
            super().__init__(index)
            self.sliding = index % 2 == 0

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x) if self.sliding else self.fc(x).tanh()

    expect_traced_graph(stack_of(map(Sliding, range(7))), (x(),), saved=2)


class Beside(Stack):
    """Norms and heads in lists of their own, by turns with the layers."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(count))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 2) for _ in range(count))

    def forward(self, x: Tensor) -> Any:
        outputs = []
        for index, layer in enumerate(self.layers):
            x = x + layer(self.norms[index](x))
            outputs.append(self.heads[index](x))
        return [self.after(x), *outputs]


class Unpacked(Stack):
    """A layer is a list, or a dict, that nobody calls."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            first, second = layer.children()
            x = second(first(x) + x) + x
        return self.after(x)


@pytest.mark.parametrize("kind", [nn.ModuleList, lambda pair: nn.ModuleDict(dict(zip("ab", pair, strict=True)))])
def test_layers_that_are_containers(kind: Callable[[list[nn.Module]], nn.Module]) -> None:
    """What the first one's result is added to is no layer's, so it stands for itself."""
    layers = (kind([Layer(index), nn.Linear(WIDTH, WIDTH)]) for index in range(5))
    expect_traced_graph(stack_of(layers, Unpacked), (x(),), saved=2)


class FirstForAll(Stack):
    """Each layer reads what the first one made."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.layers[0](x)
        for layer in [*self.layers][1:]:
            x = layer(x + first)
        return x


def test_a_weight_of_all_layers() -> None:
    """torch.export calls it by the name that it has in the last, which stands for itself therefore."""
    model = Stack(5)
    for layer in model.layers:
        layer.fc.weight = model.layers[0].fc.weight  # pyright: ignore
    expect_traced_graph(model, (x(),), saved=2)


def test_weights_shared_by_pairs() -> None:
    model = Stack(8)
    for index in range(1, 8, 2):
        model.layers[index].fc = model.layers[index - 1].fc  # pyright: ignore
    expect_traced_graph(model, (x(),), saved=4)


def tanh(layer: Layer, x: Tensor) -> Tensor:
    return layer.fc(x).tanh()


class Stages(nn.Module):
    """Stacks one after the other."""

    def __init__(self, *stacks: nn.Module) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stacks)

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return x


class StatelessNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(x, (WIDTH,)) * torch.tensor(0.5)


def test_a_run_beside_one_that_cannot_be_stamped() -> None:
    model = Stages(Stack(6, lambda layer, x: layer.fc(x) * layer.index), Stack(4))
    outcome = deduplicate(model, (x(),))
    assert isinstance(outcome, DeduplicatedGraph)
    assert [run.path for run in outcome.runs] == ["stages.1.layers"]
    assert [reason.partition(" does")[0] for reason in outcome.left] == ["stages.0.layers.0"]
    assert to_text(outcome.graph) == to_text(trace_whole(model, (x(),)))


def test_what_a_trace_shows_costs_one_more_trace_a_run() -> None:
    seen: list[int] = []

    def trace(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Graph:
        seen.append(sum(isinstance(child, Layer) for child in module.modules()))
        raise ValueError("no")

    assert not isinstance(
        deduplicate_layers(Stages(*(Stack(2 + extra) for extra in (1, 2, 3))), (x(),), {}, trace), DeduplicatedGraph
    )
    assert seen == [6, 7, 9]


def in_regions(layer: Layer, x: Tensor) -> Tensor:
    with torch.enable_grad(), torch.autocast("cpu", torch.bfloat16):
        x = layer.fc(x)
        with torch.no_grad():
            x = torch.relu(x) * torch.tensor(2.0)
    return layer.fc(x.float())


@pytest.mark.parametrize("grad", [False, True])
def test_regions(grad: bool) -> None:
    with torch.set_grad_enabled(grad):
        program = torch.export.export(Stack(5, in_regions), (x(),), strict=False)
        outcome = deduplicate_layers(Stack(5, in_regions), (x(),), {}, lambda *call: from_torch(exported(*call)))
    assert isinstance(outcome, DeduplicatedGraph)
    assert to_text(outcome.graph) == to_text(from_torch(program))
    assert sum(bool(op.bodies) for op in outcome.graph.ops) == 15


class LastTwo(Stack):
    """As `hidden_states[-2]`."""

    def forward(self, x: Tensor) -> Tensor:
        results = [x := layer(x) for layer in self.layers]
        return results[-1] * results[-2]


def exported(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.export.ExportedProgram:
    return torch.export.export(module, args, kwargs, strict=False)


def test_a_result_from_the_middle_of_the_layer_before() -> None:
    class Remembering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(WIDTH, WIDTH)

        def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            x, middle = pair
            inner = self.fc(x)
            return inner.relu() + middle, inner

    class Pairs(Stack):
        def forward(self, x: Tensor) -> Tensor:
            pair = x, self.before(x)
            for layer in self.layers:
                pair = layer(pair)
            return self.after(pair[0])

    expect_traced_graph(stack_of((Remembering() for _ in range(5)), Pairs), (x(),), saved=3)


def test_a_loop_over_a_number_in_the_config() -> None:
    """`range(count)` in place of the list: the copy's number is shortened with the list."""

    class Counting(Stack):
        def __init__(self, count: int) -> None:
            super().__init__(count)
            self.num_layers = count

        def forward(self, x: Tensor) -> Tensor:
            for index in range(self.num_layers):
                x = self.layers[index](x)
            return self.after(x)

    model = Counting(4)
    expect_traced_graph(model, (x(),), saved=2)
    assert model.num_layers == 4


def test_only_two_layers_are_traced_and_the_model_stays_as_it_was() -> None:
    model = Stack(6)
    before = dict(model.named_modules())
    seen: list[int] = []

    def trace(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Graph:
        seen.append(len(module.get_submodule("layers")._modules))
        return trace_whole(module, args, kwargs)

    def fail(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Graph:
        raise ValueError("no")

    assert isinstance(deduplicate_layers(model, (x(),), {}, trace), DeduplicatedGraph)
    assert not isinstance(deduplicate_layers(model, (x(),), {}, fail), DeduplicatedGraph)
    assert seen == [2]
    assert dict(model.named_modules()) == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_call_that_makes_a_new_tensor_runs_once_and_a_view_each_time() -> None:
    class Counted:
        def __init__(self, operator: Any) -> None:
            self.operator, self._schema, self.calls = operator, operator._schema, 0

        def __call__(self, *args: Tensor) -> Tensor:
            self.calls += 1
            return self.operator(*args)

    results, data = MetaResults(), torch.empty(2, 3, device="meta")
    relu, transpose = Counted(torch.ops.aten.relu.default), Counted(torch.ops.aten.t.default)
    for _ in range(2):
        assert results.call(relu, "form", [data], (data,), {}).shape == (2, 3)
        assert results.call(transpose, "form", [data], (data,), {})._is_view()
    assert (relu.calls, transpose.calls) == (1, 2)


MODELS = {
    "lists beside the layers": (Beside(5), 3),
    # They look the same; what they do shows that a unit is two of them.
    "layers that alternate by their number": (
        Stack(7, lambda layer, x: layer.fc(x).tanh() if layer.index % 2 else layer.fc(x)),
        2,
    ),
    # All layers look the same; the others are the run.
    "the first does more": (Stack(5, lambda layer, x: layer.fc(x) if layer.index else layer.fc(x).tanh()), 2),
    "the last does more": (Stack(5, lambda layer, x: layer.fc(x).sum(0) if layer.index == 4 else layer.fc(x)), 2),
    "first and last do more": (
        Stack(6, lambda layer, x: layer.fc(x).tanh() if layer.index in (0, 5) else layer.fc(x)),
        2,
    ),
    "the first gives all a value": (FirstForAll(5), 2),
    "a sequential is a list too": (nn.Sequential(*map(Layer, range(4))), 2),
    "two runs in one list": (stack_of([*map(Layer, range(4)), *(StatelessNorm() for _ in range(5))]), 5),
    # The stages differ; the layers of two of them are runs, and those of the third too few.
    "stages of blocks": (Stages(Stack(4), Stack(5, tanh), Stack(2)), 5),
    # Blocks of a stage that is repeated are traced one by one.
    "equal stages of blocks": (Stages(*(Stack(3) for _ in range(4))), 2),
    "what is read is of the right layer: regions by turns": (RegionsByTurns(7), 2),
    "what is read is of the right layer: the last two": (LastTwo(4), 2),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_stamped_graph_is_the_traced_one(name: str) -> None:
    model, saved = MODELS[name]
    expect_traced_graph(model, (x(),), saved=saved)
