"""Models that have to be traced whole, and what is said of each; and that a wrong proof would be seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline.errors import Unsupported
from pipeline.importers.from_torch import from_torch
from pipeline.importers.from_torch.layer_dedup import DeduplicatedGraph, deduplicate_layers, proof
from pipeline.ir import Graph, to_text
from tests.pipeline.importers.from_torch.layer_dedup.both_graphs import deduplicate, trace_whole, why_whole
from tests.pipeline.importers.from_torch.layer_dedup.layered_models import (
    WIDTH,
    Decode,
    Layer,
    RegionsByTurns,
    Stack,
    x,
)


def other_eps(layer: Layer, x: Tensor) -> Tensor:
    return functional.layer_norm(x, (WIDTH,), eps=1e-6 if layer.index == 3 else 1e-5)


def test_another_scalar() -> None:
    assert why_whole(Stack(5, other_eps), (x(),)) == (
        "Stack is traced whole, with the same graph in more time: layers.3 does not do as layers.1 does: it calls "
        "layer_norm(tensor, (4), weight=None, bias=None, eps=1e-06) in place of "
        "layer_norm(tensor, (4), weight=None, bias=None, eps=1e-05)."
    )


@pytest.mark.parametrize(
    "does",
    [
        lambda layer, x: layer.fc(x) + layer.index,
        lambda layer, x: functional.dropout(layer.fc(x), 0.1 * layer.index, training=False),  # leaves no operator
        lambda layer, x: layer.fc(x) * torch.tensor(float(layer.index)),
        lambda layer, x: layer.fc(x).relu() if layer.index == 2 else layer.fc(x).tanh(),
        lambda layer, x: layer.fc(x)[: 2 if layer.index != 3 else None].sum(0) + x,
    ],
    ids=["added", "dropout", "constant", "branch", "slice"],
)
def test_the_index_of_the_layer_as_data(does: Any) -> None:
    assert "does not do as layers.1 does" in why_whole(Stack(5, does), (x(),))


def test_a_tensor_outside_of_the_module_is_no_weight_of_a_layer() -> None:
    outside = torch.ones(WIDTH)

    def multiply(layer: Layer, x: Tensor) -> Tensor:
        return layer.fc(x) * (layer.fc.weight[0] if layer.index == 3 else outside)

    said = why_whole(Stack(5, multiply), (x(),))
    assert "reads an earlier constant in place of a constant of the layer before" in said


def test_a_counter_outside_of_the_module_is_refused() -> None:
    """The run on meta counts too, so the trace that follows would have the numbers 6 to 10 in place of 1 to 5."""
    calls = iter(range(1, 100))
    with pytest.raises(
        Unsupported,
        match=r"Stack computes something else each time that it runs: layers.0 calls TensorBase.mul with 1, and with 6",
    ):
        why_whole(Stack(5, lambda layer, x: layer.fc(x) * next(calls)), (x(),))


def test_weights_shared_by_two() -> None:
    model = Stack(6)
    model.layers[5].fc = model.layers[3].fc  # pyright: ignore
    sentence = why_whole(model, (x(),))
    assert sentence.endswith(
        "layers.3 does not do as layers.1 does: linear(tensor, tensor, tensor) reads layers.5.fc.weight in place of "
        "its own fc.weight."
    )


class EarlierResult(Stack):
    """Each layer reads what the second one made."""

    def forward(self, x: Tensor) -> Tensor:
        outputs = [self.layers[0](x)]
        for layer in [*self.layers][1:]:
            outputs.append(layer(outputs[-1] + outputs[1] if outputs[1:] else outputs[0]))
        return outputs[-1]


class AllResults(Stack):
    """Gives all layers' results to one op."""

    def forward(self, x: Tensor) -> Tensor:
        results = [x := layer(x) for layer in self.layers]
        return torch.stack(results)


class Twice(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.layers, *self.layers):
            x = layer(x)
        return x


class Backwards(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for layer in reversed(self.layers):
            x = layer(x)
        return x


class Past(Stack):
    """Calls `forward` itself, so that nothing tells which layer it is in."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer.forward(x)
        return x


class Numbered(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for index in range(5):
            x = self.layers[index](x)
        return x


class OnData(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) if x.sum() > 0 else x
        return x


class OneRegion(Stack):
    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            return super().forward(x)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (EarlierResult, "layers.2 does not do as layers.1 does: it calls add(tensor, tensor) in place of linear("),
        (
            AllResults,
            "with 2 layers in place of 5 the model does something else after the layers: it calls "
            "stack((tensor, tensor)) in place of stack((tensor, tensor, tensor, tensor, tensor))",
        ),
        (Numbered, "with 2 layers in place of 5 it does not run without data: IndexError: index 2 is out of range"),
        (Twice, "layers.0 is called more than once"),
        (Backwards, "the layers of layers are not called one after the other"),
        (Past, "layers.0 is not called as a module"),
        (OneRegion, "several layers are in one region"),
        (OnData, "it does not run without data"),
    ],
)
def test_another_way_through_the_layers(kind: type[Stack], said: str) -> None:
    with torch.device("meta"):
        assert said in why_whole(kind(5), (x(),))


def either(_: nn.Module, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))


class EitherAfter(Stack):
    def forward(self, x: Tensor) -> Tensor:
        return either(self, super().forward(x))


@pytest.mark.parametrize(("model", "where"), [(EitherAfter(3), "the model"), (Stack(3, either), "layers.0")])
def test_an_operator_with_bodies(model: Stack, where: str) -> None:
    """torch compiles it with what surrounds it, and remembers that: nothing may be left of the run without data."""
    said = f": {where} calls the higher-order operator cond, whose bodies a run without data does not enter."
    assert why_whole(model, (x(),)).endswith(said)
    assert sum(bool(op.bodies) for op in trace_whole(model, (x(),)).ops) == (1 if where == "the model" else 3)


def test_what_a_hook_does_is_its_layers() -> None:
    model = Stack(5)
    model.layers[3].register_forward_hook(lambda *called: called[-1] * 2)
    assert "layers.3 does not do as layers.1 does: it also calls mul(tensor, 2)" in why_whole(model, (x(),))


def test_a_list_inside_of_a_layer_that_nobody_calls() -> None:
    """The weights of experts are stacked: no layers, and nothing to warn of."""

    def stacked(layer: Layer, x: Tensor) -> Tensor:
        experts: list[Tensor] = [expert.get_parameter("weight") for expert in layer.get_submodule("experts").children()]
        return x @ torch.stack(experts).sum(0)

    model = Stack(2, stacked)
    for layer in model.layers:
        layer.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
    outcome = deduplicate(model, (x(),))
    assert not isinstance(outcome, DeduplicatedGraph)
    assert outcome.run is None


def test_too_few_layers() -> None:
    assert why_whole(Stack(2), (x(),)) == "Stack has no list of more than 2 layers that look the same."


def test_named_dims() -> None:
    def trace(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Graph:
        dims = ({0: torch.export.Dim("batch")},)
        return from_torch(torch.export.export(module, args, kwargs, dynamic_shapes=dims, strict=False))

    with torch.no_grad():
        outcome = deduplicate_layers(Stack(4), (x(),), {}, trace)
    assert not isinstance(outcome, DeduplicatedGraph)
    assert "have no fixed size" in outcome.reason


def in_autocast(layer: Layer, x: Tensor) -> Tensor:
    """Off in one layer, where float32 would be kept anyhow: nothing but the region shows it."""
    with torch.autocast("cpu", torch.bfloat16, enabled=False, cache_enabled=layer.index != 3):
        return layer.fc(x)


def test_regions_that_differ() -> None:
    assert "layers.3 does not do as layers.1 does: it calls _enter_autocast" in why_whole(Stack(5, in_autocast), (x(),))


def test_a_wrong_correspondence_of_inputs_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the comparison of texts is worth: keys and values of one layer exchanged, and nothing else."""

    def exchanged(*given: Any) -> proof.Proof:
        right = proof.prove_equal_units(*given)
        wrong = [dict(names) for names in right.inputs]
        if len(wrong) > 1:  # not where the two traced units are checked
            (key, first), (other_key, second) = [(here, own) for here, own in wrong[-1].items() if here != own]
            wrong[-1].update({key: second, other_key: first})
        return proof.Proof(tuple(wrong), right.frames)

    model = Decode(4)
    right = deduplicate(model, model.inputs())
    monkeypatch.setattr("pipeline.importers.from_torch.layer_dedup.deduplicate.prove_equal_units", exchanged)
    wrong = deduplicate(model, model.inputs())
    assert isinstance(right, DeduplicatedGraph) and isinstance(wrong, DeduplicatedGraph)
    whole = to_text(trace_whole(model, model.inputs()))
    assert to_text(right.graph) == whole
    assert to_text(wrong.graph) != whole


def test_an_op_given_to_the_wrong_layer_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regions are held by their own origin alone, which they do not have: the weights in them tell."""
    monkeypatch.setattr(
        "pipeline.importers.from_torch.layer_dedup.whole_graph._unit_of",
        lambda run, op: (run.locate(op.origin) or (None,))[0],
    )
    assert "torch lists layers.2.fc.weight with the ops of layers.3" in why_whole(RegionsByTurns(7), (x(),))
