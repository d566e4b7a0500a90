"""Each layer and loss of torch.nn, emitted by itself and in a Module, computes what torch does or is refused."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from pipeline.authoring import SGD, IRTensor, Model, ModelBuilder, Module, emit
from pipeline.authoring.tensors import spec_of
from pipeline.errors import Unsupported, UsageError
from pipeline.ir import Graph
from pipeline.runtime import compile_graph
from tests.pipeline.authoring.torch_layers import EXAMPLES, NO_LAYERS

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
"""torch warns of classes of its own: NLLLoss2d, and the encoder that makes nested tensors at inference."""

REFUSED = {
    "AdaptiveLogSoftmaxWithLoss": "nonzero found bool[3]: it asks for values of tensors",
    "CTCLoss": "torch does not say without values what its result looks like",
    "CrossMapLRN2d": "expected LocalResponseNorm",
    "GaussianNLLLoss": "it asks for values of tensors, and a graph has none while it is built",
}

RANDOM = ("Dropout", "FractionalMaxPool", "RReLU", "Transformer")
"""Parts of the names of layers that draw; in training their results have the shapes of torch's."""


class Holder(Module):
    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    def forward(self, *inputs: Any) -> Any:
        return self.layer(*inputs)


def graph_of(module: nn.Module, inputs: Sequence[torch.Tensor], *, training: bool) -> Graph:
    builder = ModelBuilder(training=training)
    result = emit(builder, module, *(builder.add_input(f"x{at}", spec_of(x)) for at, x in enumerate(inputs)))
    return builder.build([leaf.vid for leaf in pytree.tree_leaves(result) if isinstance(leaf, IRTensor)])


def test_the_examples_are_all_layers_of_torch() -> None:
    layers = {name for name, kind in vars(nn).items() if inspect.isclass(kind) and issubclass(kind, nn.Module)}
    assert EXAMPLES.keys() | set(NO_LAYERS.split()) == layers


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", [name for name in EXAMPLES if name not in REFUSED])
def test_a_layer_computes_what_torch_does(name: str, training: bool) -> None:
    torch.manual_seed(0)
    layer, inputs = EXAMPLES[name].make(name).train(training), EXAMPLES[name].draw()
    if name.startswith("Lazy"):
        with pytest.raises(UsageError, match="has no shape yet, since no tensor has reached the layer"):
            graph_of(layer, inputs, training=training)
        layer(*inputs)
    graph = graph_of(Holder(layer) if training else layer, inputs, training=training)
    expected = [leaf for leaf in pytree.tree_leaves(copy.deepcopy(layer)(*inputs)) if leaf is not None]
    found = compile_graph(graph).run({f"x{at}": x for at, x in enumerate(inputs)}).values()
    for actual, wanted in zip(found, expected, strict=True):
        if name.startswith("Fractional") or (training and any(part in name for part in RANDOM)):
            assert (actual.shape, actual.dtype) == (wanted.shape, wanted.dtype)
        else:
            torch.testing.assert_close(actual, wanted.detach())


@pytest.mark.parametrize("name", REFUSED)
def test_a_layer_that_needs_values_is_refused_in_a_sentence(name: str) -> None:
    layer, inputs = EXAMPLES[name].make(name), EXAMPLES[name].draw()
    for module in (layer, Holder(layer)):
        with pytest.raises(UsageError) as refused:
            graph_of(module, inputs, training=False)
        assert REFUSED[name] in str(refused.value)
        assert "\n" not in str(refused.value)


class Recurrent(Module):
    """The last state of an LSTM, which gets its first one, decides."""

    def __init__(self) -> None:
        self.lstm, self.out = nn.LSTM(4, 6), nn.Linear(6, 2)

    def forward(self, x: Any) -> Any:
        start = torch.ones(1, x.shape[1], 6, dtype=x.dtype, device=x.device)
        _, (hidden, _) = self.lstm(x, (start, start))
        return self.out(hidden[-1]) * torch.where(x[0, :, :2] == 0, 0.0, 1.0)


def test_a_module_takes_tuples_and_torch_differentiates_it() -> None:
    module, x = Recurrent(), torch.randn(3, 2, 4)
    program = compile_graph(graph_of(module, [x], training=True))
    torch.testing.assert_close(next(iter(program.run({"x0": x}).values())), module(x).detach())
    trained = Model((3, 2, 4), module=module).to_torch(training=True)
    trained(x).square().sum().backward()
    module(x).square().sum().backward()
    torch.testing.assert_close(trained.get_parameter("lstm.weight_hh_l0").grad, module.lstm.weight_hh_l0.grad)


FORWARDS = {
    "a list as an index": lambda x: x[:, [0, 2]],
    "another dtype": lambda x: x.to("cpu", torch.float64),
    "the dtype of another": lambda x: x.to(x.double()),
    "no other device": lambda x: x.to(x.device),
    "the host": lambda x: x.cpu(),
    "a new tensor": lambda x: x + x.new_tensor([1.0, 2.0, 3.0]),
    "a tensor like it": lambda x: torch.zeros_like(x) + torch.arange(3.0, device=x.device),
    "equal elements": lambda x: (x == 1) & (x != 2) | ~(x >= 0),
    "integers": lambda x: x // 1 + x % 2 + 1 // (x + 2),
    "bits": lambda x: (x.to(torch.int64) << 3) >> 1,
}


@pytest.mark.parametrize("name", FORWARDS)
def test_the_same_forward_computes_and_is_recorded(name: str) -> None:
    class Does(Module):
        def forward(self, x: Any) -> Any:
            return FORWARDS[name](x)

    x = torch.tensor([[0.0, 1.0, 2.0], [-1.0, 1.5, 3.0]])
    (found,) = compile_graph(graph_of(Does(), [x], training=False)).run({"x0": x}).values()
    assert torch.equal(found, Does()(x))


@pytest.mark.parametrize("name", ["tolist", "numpy"])
def test_values_for_python_are_refused(name: str) -> None:
    class Reads(Module):
        def forward(self, x: Any) -> Any:
            return getattr(x, name)()

    with pytest.raises(UsageError, match=rf"Reads\(\): {name} found float32\[2\]: it asks for values of tensors"):
        graph_of(Reads(), [torch.ones(2)], training=False)


TRAINED = ("BCEWithLogitsLoss", "KLDivLoss", "MultiLabelSoftMarginLoss", "MultiMarginLoss", "PoissonNLLLoss")


@pytest.mark.parametrize("name", TRAINED)
def test_a_loss_of_torch_trains_as_in_torch(name: str) -> None:
    torch.manual_seed(0)
    loss, (x, target) = EXAMPLES[name].make(name), EXAMPLES[name].draw()
    model, expected = Model(tuple(x.shape)).add(nn.Linear(5, 5)), []
    layer = copy.deepcopy(model.module)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        found = loss(layer(x), target)
        found.backward()
        optimizer.step()
        expected.append(float(found.detach()))
    history = model.compile(SGD(lr=0.1), loss, quiet=True).fit([(x, target)] * 2, quiet=True)
    assert history.losses == pytest.approx(expected, rel=1e-5)  # float32


def test_a_loss_that_torch_records_wrongly_is_refused() -> None:
    with pytest.raises(Unsupported, match="counts what stands after the first -1 among the labels as further labels"):
        Model((3, 5)).add(nn.Linear(5, 5)).compile(SGD(lr=0.1), nn.MultiLabelMarginLoss(), quiet=True)


class Positions(Module):
    """A table that is read at constant places, as GPT-2 reads its positions."""

    def __init__(self) -> None:
        self.table, self.mix = nn.Embedding(8, 4), nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        places = torch.arange(x.shape[1])
        return x + self.table(places) + self.mix(torch.ones(1, 4))


def test_a_layer_takes_a_constant() -> None:
    module, x = Positions(), torch.randn(2, 3, 4)
    (found,) = compile_graph(graph_of(module, [x], training=False)).run({"x0": x}).values()
    torch.testing.assert_close(found, module(x).detach())


MISTAKES = {
    "dropout between layers": (
        lambda: graph_of(nn.LSTM(4, 4, 2, dropout=0.5), [torch.ones(3, 2, 4)], training=True),
        "layer 'lstm', LSTM(4, 4, num_layers=2, dropout=0.5): found 2 layers with dropout=0.5 in training, which torch "
        "leaves out of a recording; expected dropout=0, or modules of one layer with Dropout between them",
    ),
    "a tuple as the output of a model": (
        lambda: Model((3, 4)).add(nn.LSTM(4, 4)),
        "the model gives a tuple, expected one tensor: take the part of it that is meant in the forward of a Module, "
        "as in `return self.lstm(x)[0]`",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_sentence(name: str) -> None:
    make, sentence = MISTAKES[name]
    with pytest.raises(UsageError) as refused:
        make()
    assert str(refused.value) == sentence
