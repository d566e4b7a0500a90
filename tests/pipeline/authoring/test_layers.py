"""Layers compute what those of torch.nn do, with the same first numbers and the same names."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipeline.authoring import (
    SGD,
    Buffer,
    IRTensor,
    Linear,
    Model,
    ModelBuilder,
    Module,
    Parameter,
    Sequential,
    functional,
)
from pipeline.ir import TensorSpec
from pipeline.planning import PlanFile, decode_plans, encode_plans
from pipeline.runtime import compile_graph
from pipeline.training import record_step
from tests.pipeline.authoring.authored_models import MLP, TWINS

RELATIVE, ABSOLUTE = 1e-5, 1e-6
"""Of float32 by the planned runtime: sums run in another order there. Seen: up to 3e-7."""


def assert_close(found: torch.Tensor | None, expected: torch.Tensor | None) -> None:
    torch.testing.assert_close(found, expected, rtol=RELATIVE, atol=ABSOLUTE)


@pytest.mark.parametrize("name", TWINS)
def test_first_numbers_and_names_are_those_of_torch(name: str) -> None:
    ours, theirs = TWINS[name].make().state_dict(), TWINS[name].make_torch().state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize("name", TWINS)
def test_the_planned_runtime_computes_what_torch_does(name: str) -> None:
    twin = TWINS[name]
    model, module = Model(twin.spec, module=twin.make()), twin.make_torch().eval()
    assert_close(model.predict(twin.batch()), module(twin.batch()))
    fewer = twin.batch()[:2]
    assert_close(model.predict(fewer), module(fewer))


@pytest.mark.parametrize("name", [name for name in TWINS if name != "squashed"])  # two ways to draw the same dropout
def test_the_module_that_is_differentiated_is_torch_bit_for_bit(name: str) -> None:
    twin = TWINS[name]
    ours, theirs = Model(twin.spec, module=twin.make()).to_torch(training=True), twin.make_torch().train()
    found, expected = ours(twin.batch()), theirs(twin.batch())
    assert torch.equal(found, expected)
    found.square().sum().backward()
    expected.square().sum().backward()
    gradients = {key: parameter.grad for key, parameter in theirs.named_parameters()}
    for key, parameter in ours.named_parameters():
        assert_close(parameter.grad, gradients[key])
    for key, buffer in theirs.named_buffers():
        assert torch.equal(ours.get_buffer(key), buffer)


def test_a_state_dict_goes_both_ways() -> None:
    ours, theirs = MLP.make(), MLP.make_torch()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(1)
    ours.load_state_dict(theirs.state_dict())
    other = MLP.make_torch()
    other.load_state_dict(ours.state_dict())
    assert all(torch.equal(value, theirs.state_dict()[key]) for key, value in other.state_dict().items())


def test_dropout_draws_in_training_and_is_nothing_at_inference() -> None:
    twin = TWINS["squashed"]
    model = Model(twin.spec, module=twin.make())
    assert [op.kind for op in model.graph().ops] == [
        *("aten.tanh.default", "aten.layer_norm.default", "aten.sigmoid.default", "aten.softmax.int")
    ]
    module = model.to_torch(training=True)
    first, second = module(twin.batch()), module(twin.batch())
    assert not torch.equal(first, second)
    kept = first != 0
    assert 0.2 < kept.float().mean() < 0.8
    assert_close(first[kept], 2 * model.predict(twin.batch())[kept])


class Attention(Module):
    """One head, whose mask is a buffer, with a table that is read as it is."""

    def __init__(self, places: int, width: int) -> None:
        self.project = [Linear(width, width, bias=False) for _ in range(3)]
        self.places = Parameter(torch.randn(places, width))
        self.mask = Buffer(torch.full((places, places), -30.0).triu(1))
        self.scale = width**-0.5

    def forward(self, x: IRTensor) -> IRTensor:
        x = x + self.places
        q, k, v = (part(x) for part in self.project)
        scores = functional.matmul(q, functional.transpose(k, 1, 2)) * self.scale + self.mask
        return functional.matmul(functional.softmax(scores), v) / 2


def test_a_module_of_the_user_computes_what_its_torch_form_does() -> None:
    torch.manual_seed(0)
    attention = Attention(5, 8)
    assert list(attention.state_dict()) == [
        "places",
        "mask",
        "project.0.weight",
        "project.1.weight",
        "project.2.weight",
    ]
    x = torch.randn(2, 5, 8)
    moved = x + attention.places.data
    q, k, v = (moved @ part.weight.data.T for part in attention.project)
    expected = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=attention.mask.data) / 2
    assert_close(Model((2, 5, 8), module=attention).predict(x), expected)


class Tied(Module):
    """The table of the embedding is the last product too."""

    def __init__(self) -> None:
        self.table = Linear(4, 6, bias=False)
        self.head = Linear(4, 6, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: IRTensor) -> IRTensor:
        return self.head(functional.embedding(ids, self.table.weight))


def test_tied_weights_are_one_value_with_two_names() -> None:
    tied = Tied()
    assert [name for name, _ in tied.named_parameters()] == ["table.weight"]
    assert list(tied.state_dict()) == ["table.weight", "head.weight"]
    graph = Model(TensorSpec((3,), "int64"), module=tied).graph()
    assert list(graph.weight_names().values()) == [("table.weight", "head.weight")]


OPERATIONS = {
    "add": (lambda x: functional.add(1, x), lambda x: 1 + x),
    "sub": (lambda x: functional.sub(x, 2.5) - 1, lambda x: x - 3.5),
    "rsub": (lambda x: 1 - x, lambda x: 1 - x),
    "mul": (lambda x: 3 * functional.mul(x, x), lambda x: 3 * x * x),
    "div": (lambda x: functional.div(x, 4) + 1 / (x + 10), lambda x: x / 4 + 1 / (x + 10)),
    "neg": (lambda x: -x, lambda x: -x),
    "exp, log, sqrt": (lambda x: functional.log(functional.sqrt(functional.exp(x))), lambda x: x.exp().sqrt().log()),
    "absolute": (functional.absolute, torch.abs),
    "log_softmax": (lambda x: functional.log_softmax(x, 1), lambda x: x.log_softmax(1)),
    "sum": (lambda x: functional.sum(x, (0, -1)), lambda x: x.sum((0, -1))),
    "mean": (lambda x: functional.mean(x, 1, keepdim=True), lambda x: x.mean(1, keepdim=True)),
    "amax": (functional.amax, torch.amax),
    "reshape": (lambda x: functional.reshape(x, (4, -1)), lambda x: x.reshape(4, -1)),
    "flatten": (lambda x: functional.flatten(x, 1), lambda x: x.flatten(1)),
    "permute": (lambda x: functional.permute(x, (2, 0, 1)), lambda x: x.permute(2, 0, 1)),
    "concat": (lambda x: functional.concat([x, x * 2], 1), lambda x: torch.cat([x, x * 2], 1)),
    "narrow": (lambda x: functional.narrow(x, -1, 1, 2), lambda x: x.narrow(-1, 1, 2)),
    "cast": (lambda x: functional.cast(x, "float64"), torch.Tensor.double),
    "relu of whole numbers": (
        lambda x: functional.relu(functional.cast(10 * x, "int32")),
        lambda x: nn.functional.relu((10 * x).int()),
    ),
    "methods and functions of torch": (
        lambda x: torch.cat([torch.ones(2, 3, 1), x.clamp(-1, 1)], 2)[:, 1:].mT.unsqueeze(1),
        lambda x: torch.cat([torch.ones(2, 3, 1), x.clamp(-1, 1)], 2)[:, 1:].mT.unsqueeze(1),
    ),
    "layer_norm": (lambda x: functional.layer_norm(x, (3, 4)), lambda x: nn.functional.layer_norm(x, (3, 4))),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_computes_what_torch_does(name: str) -> None:
    ours, theirs = OPERATIONS[name]

    class Operation(Module):
        def forward(self, x: IRTensor) -> IRTensor:
            return ours(x)

    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    assert_close(Model((2, 3, 4), module=Operation()).predict(x), theirs(x))
    assert_close(Operation()(x), theirs(x))  # the same forward on a tensor of torch


def test_the_table_holds_every_operation() -> None:
    assert set(functional.FUNCTIONS) == set(functional.__all__) - {"FUNCTIONS"}
    assert all(callable(function) for function in functional.FUNCTIONS.values())


def test_an_authored_graph_has_a_plan_of_kernels_alone() -> None:
    """Nothing is called by the name of torch's operator, and the plan is a file like any other."""
    model = Model(TWINS["cnn"].spec, module=TWINS["cnn"].make())
    plan = compile_graph(model.graph()).plan
    assert plan.generic_calls() == {}
    assert dict(decode_plans(encode_plans(PlanFile({"main": plan}))).entries) == {"main": plan}


def test_a_layer_emits_to_any_builder() -> None:
    builder = ModelBuilder("two")
    x = builder.add_input("x", TensorSpec((2, 4), "float32"))
    first = Linear(4, 4).emit(builder, x)
    second = Sequential(Linear(4, 3)).emit(builder, first)
    graph = builder.build([second.vid])
    assert [value.name for value in graph.values if value.role == "param"] == [
        "linear.weight",
        "linear.bias",
        "sequential.0.weight",
        "sequential.0.bias",
    ]


def test_the_same_forward_computes_and_torch_differentiates_it() -> None:
    attention, x = Attention(5, 8), torch.randn(2, 5, 8)
    found = attention(x)
    assert_close(found, Model((2, 5, 8), module=attention).predict(x))
    places, q, k, v = (attention.places, *(part.weight for part in attention.project))
    moved = x + places
    expected = nn.functional.scaled_dot_product_attention(moved @ q.T, moved @ k.T, moved @ v.T, attention.mask) / 2
    wanted = torch.autograd.grad(expected.square().sum(), (places, q, k, v))
    for gradient, other in zip(torch.autograd.grad(found.square().sum(), (places, q, k, v)), wanted, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-4, atol=1e-5)


def test_a_module_by_hand_is_recorded_with_groups_of_parameters() -> None:
    """`record_step` takes it as it is, with the loss, the groups and the modes of torch."""

    def make() -> tuple[Sequential, torch.optim.Optimizer]:
        module = TWINS["cnn"].make()
        module[0].eval()
        module[1].eval()
        groups = [{"params": module[5].parameters(), "lr": 0.1}, {"params": module[0].parameters()}]
        return module, torch.optim.SGD(groups, lr=0.01, momentum=0.9)

    batch, loss = (TWINS["cnn"].batch(), torch.arange(8)), nn.CrossEntropyLoss(label_smoothing=0.1)
    recorded, own = make()
    program = record_step(recorded, loss, own, batch)
    module, optimizer = make()
    for _ in range(3):
        optimizer.zero_grad()
        value = loss(module(batch[0]), batch[1])
        value.backward()
        optimizer.step()
        assert_close(program.step(batch), value.detach())


class FrozenNorm(Module):
    def __init__(self) -> None:
        self.norms = (nn.BatchNorm1d(4).eval(), nn.BatchNorm1d(4))

    def forward(self, x: IRTensor) -> IRTensor:
        first, second = self.norms
        return second(first(x))


def test_a_part_in_eval_emits_what_it_does_at_inference() -> None:
    graph = Model((8, 4), module=FrozenNorm()).graph(training=True)
    assert [graph.values[vid].name for vid in graph.updates] == [
        "norms.1.num_batches_tracked",
        "norms.1.running_mean",
        "norms.1.running_var",
    ]
    assert Model((8, 4), module=FrozenNorm().eval()).graph(training=True).updates == {}


def test_layers_and_losses_of_torch_stand_in_a_model() -> None:
    def make() -> nn.Sequential:
        torch.manual_seed(0)
        parts = (nn.Conv2d(1, 4, 3, padding="same"), nn.BatchNorm2d(4), nn.Hardswish(), nn.AvgPool2d(2))
        return nn.Sequential(*parts, nn.Flatten(), nn.Linear(64, 3), nn.LogSoftmax(1))

    x, classes, loss = torch.randn(8, 1, 8, 8), torch.arange(8) % 3, nn.NLLLoss(weight=torch.tensor([1.0, 2.0, 3.0]))
    model = Model((8, 1, 8, 8))
    for part in make():
        model.add(part)
    found = model.compile(SGD(lr=0.1), loss, quiet=True).fit([(x, classes)] * 3, quiet=True).losses
    module = make()
    optimizer, expected = torch.optim.SGD(module.parameters(), lr=0.1), []
    for _ in range(3):
        optimizer.zero_grad()
        value = loss(module(x), classes)
        value.backward()
        optimizer.step()
        expected.append(value.item())
    assert found == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(model.predict(x), module.eval()(x), rtol=1e-4, atol=1e-5)
