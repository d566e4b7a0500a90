"""An IR is a dataclass: what is changed in it counts, and what its view does not show stays."""

from __future__ import annotations

import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, fields, is_dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from pipeline.ir.text import to_text
from pipeline.torch_ir import (
    IR,
    ExecutionError,
    IRExecutor,
    OpNode,
    SerializationError,
    TensorMeta,
    execute_ir,
    extract_ir,
    verify_ir_with_state_dict,
)

X = torch.tensor([[1.0, -2.0, 4.0], [0.5, 0.25, -1.0]])


class Net(nn.Module):
    """Updates, an exact call (`clamp(max=t)`), bodies, strides, tied weights, a named dim."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.top: Tensor
        self.register_buffer("top", torch.tensor(0.5), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.add(self.second(self.first(self.norm(x))), x, alpha=3)
        z = torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))
        return y.clamp(max=self.top), z.t()


@pytest.fixture(scope="module")
def traced() -> IR:
    return extract_ir(Net(), (X,), strict=False, dynamic_shapes=({0: torch.export.Dim("batch", min=2)},))


@pytest.fixture
def ir(traced: IR) -> IR:
    return traced.snapshot()


def node(ir: IR, kind: str) -> OpNode:
    return next(node for node in ir.nodes if node.op_type.startswith(kind))


def add(ir: IR) -> OpNode:
    return next(node for node in ir.nodes if "alpha" in node.attrs)


def lines(ir: IR) -> list[str]:
    """The text of the Graph, tensors by name."""
    names = [value.name for value in ir.graph.values]
    text = re.sub(r' line "[^"]*"', "", to_text(ir.graph)).replace('"', "")
    return [re.sub(r"%(\d+)( \w+)?", lambda vid: names[int(vid[1])], line.strip()) for line in text.splitlines()]


def difference(ir: IR, edit: Callable[[IR], Any]) -> list[str]:
    """What an edit changes in the text of the Graph, also after a way through JSON."""
    before = lines(ir)
    edit(ir)
    after = lines(ir)
    assert after == lines(IR.from_dict(ir.to_dict()))
    gone, new = ([line for line in pair if line not in other] for pair, other in ((before, after), (after, before)))
    return [*(f"- {line}" for line in gone), *(f"+ {line}" for line in new)]


def test_it_is_a_dataclass(ir: IR) -> None:
    names = [entry.name for entry in fields(IR)]
    assert is_dataclass(IR) and list(asdict(ir)) == names
    assert names[:5] == ["nodes", "graph_inputs", "graph_outputs", "weights", "weight_name_mapping"]
    called = replace(ir, model_name="other")
    assert (called.graph.name, called.to_dict()) == ("other", ir.to_dict() | {"model_name": "other"})
    assert replace(called.graph, name="Net") == ir.graph  # named dims, updates, exact calls, lines, tied names, …


def test_who_looks_changes_nothing(ir: IR) -> None:
    graph = ir.graph
    assert ir.nodes and ir.weights and ir.graph is graph
    ir.nodes = list(ir.nodes)
    assert ir.graph is graph


def an_attribute(ir: IR) -> None:
    add(ir).attrs["alpha"] = 2


def another_type(ir: IR) -> None:
    add(ir).attrs["alpha"] = 3.0


def an_operator(ir: IR) -> None:
    add(ir).op_type = "aten.sub.Tensor"


def names(ir: IR) -> None:
    """Of a node whose exact call is written down, and of a tensor: where it is made, and where it is read."""
    node(ir, "aten.clamp").name = "limit"
    node(ir, "aten.t").outputs[0].name = ir.graph_outputs[1].name = "turned"


def a_shape(ir: IR) -> None:
    """Strides are of the shape that it had."""
    node(ir, "aten.t").outputs[0].shape = (3, 2)


def an_output(ir: IR) -> None:
    ir.nodes.pop()
    del ir.graph_outputs[1]


def a_weight(ir: IR) -> None:
    weight = next(weight for weight in ir.weights if weight.name == "first.weight")
    weight.name = ir.weight_name_mapping["p_first_weight"] = "w"


def another_node(ir: IR) -> None:
    meta = TensorMeta("y", ("batch", 3), "float32")
    ir.nodes = [*ir.nodes, OpNode("relu", "aten.relu.default", [ir.graph_outputs[0]], [meta])]
    ir.graph_outputs = [meta, ir.graph_outputs[1]]


EDITS: dict[Callable[[IR], None], list[str]] = {
    an_attribute: [
        "- add_1: float32[batch, 3] = aten.add.Tensor(linear_1, x) {self: $0, other: $1, alpha: 3} node add_1",
        "+ add_1: float32[batch, 3] = aten.add.Tensor(linear_1, x) {self: $0, other: $1, alpha: 2} node add_1",
    ],
    another_type: [
        "- add_1: float32[batch, 3] = aten.add.Tensor(linear_1, x) {self: $0, other: $1, alpha: 3} node add_1",
        "+ add_1: float32[batch, 3] = aten.add.Tensor(linear_1, x) {self: $0, other: $1, alpha: 3.0} node add_1",
    ],
    an_operator: [
        "- add_1: float32[batch, 3] = aten.add.Tensor(linear_1, x) {self: $0, other: $1, alpha: 3} node add_1",
        "+ add_1: float32[batch, 3] = aten.sub.Tensor(linear_1, x) {self: $0, other: $1, alpha: 3} node add_1",
    ],
    names: [
        "- clamp: float32[batch, 3] = aten.clamp.Tensor(add_1, b_top) {self: $0, max: $1} node clamp",
        "- t: float32[3, batch] strides [1, 3] = aten.t.default(cond_0) {self: $0} node t",
        "- return clamp, t",
        "+ clamp: float32[batch, 3] = aten.clamp.Tensor(add_1, b_top) {self: $0, max: $1} node limit",
        "+ turned: float32[3, batch] strides [1, 3] = aten.t.default(cond_0) {self: $0} node t",
        "+ return clamp, turned",
    ],
    a_shape: [
        "- t: float32[3, batch] strides [1, 3] = aten.t.default(cond_0) {self: $0} node t",
        "+ t: float32[3, 2] = aten.t.default(cond_0) {self: $0} node t",
    ],
    an_output: [
        "- t: float32[3, batch] strides [1, 3] = aten.t.default(cond_0) {self: $0} node t",
        "- return clamp, t",
        "+ return clamp",
    ],
    a_weight: [
        "- param p_first_weight: float32[3, 3] from first.weight, second.weight",
        "+ param p_first_weight: float32[3, 3] from w, second.weight",
    ],
    another_node: [
        "- return clamp, t",
        "+ y: float32[batch, 3] = aten.relu.default(clamp) {self: $0} node relu",
        "+ return y, t",
    ],
}


@pytest.mark.parametrize("edit, said", EDITS.items(), ids=[edit.__name__ for edit in EDITS])
def test_an_edit_counts_and_the_rest_stays(ir: IR, edit: Callable[[IR], None], said: list[str]) -> None:
    assert difference(ir, edit) == said


def test_what_was_edited_is_what_runs(ir: IR) -> None:
    model = Net()
    weights = model.state_dict()
    assert verify_ir_with_state_dict(ir, weights, model, (X,))[0]
    executor = IRExecutor(ir, weights)
    for alpha, valid in ((2, False), (3, True)):
        add(ir).attrs["alpha"] = alpha
        assert verify_ir_with_state_dict(ir, weights, model, (X,))[0] is valid
        assert "alpha: 3" in to_text(executor.ir.graph)  # it has the IR of when it was made
    an_output(ir)
    assert len(execute_ir(ir, (X,), weights)) == 1 and ir.signature.inputs and ir.signature.outputs is None


class Norms(nn.Module):
    """Which of the two a tensor is, weight or bias, the exact call alone says."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.weight = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(F.layer_norm(x, (3,), None, self.bias), (3,), self.weight)


@pytest.mark.parametrize("handed_on", [lambda ir: ir, deepcopy, replace], ids=["", "copied", "replaced"])
def test_a_node_keeps_its_call_by_whatever_name(handed_on: Callable[[IR], IR]) -> None:
    model = Norms()
    weights = model.state_dict()
    ir = extract_ir(model, (X,), strict=False)
    assert len(ir.nodes) == 2
    ir = handed_on(ir)
    first, second = ir.nodes
    first.name, second.name = second.name, first.name
    first.outputs[0].name = second.inputs[0].name = "between"
    assert torch.equal(execute_ir(ir, (X,), weights)[0], model(X))
    ir.nodes, second.inputs[0], second.name = [second], ir.graph_inputs[0], "only"
    assert torch.equal(execute_ir(ir, (X,), weights)[0], F.layer_norm(X, (3,), model.weight))


def test_an_ir_by_hand_may_change_after_it_has_run() -> None:
    x, y = TensorMeta("x", (2, 3), "float32"), TensorMeta("y", (2, 3), "float32")
    ir = IR([OpNode("mul", "aten.mul.Scalar", [x], [y], {"other": 2})], [x], [y])
    assert torch.equal(execute_ir(ir, (X,))[0], X * 2)
    ir.nodes[0].attrs["other"] = 3
    assert torch.equal(execute_ir(ir, (X,))[0], X * 3)
    ir.nodes = [OpNode("add", "aten.add.Scalar", [x], [y], {"other": 1})]
    assert torch.equal(execute_ir(replace(ir, model_name="sum"), (X,))[0], X + 1)


MISTAKES: dict[str, tuple[Callable[[IR], Any], str]] = {
    "a value": (
        lambda ir: add(ir).attrs.update(alpha="x"),
        r"nodes\[\d\]: aten.add.Tensor: alpha: found 'x', expected number; change that part of it$",
    ),
    "an argument": (
        lambda ir: node(ir, "aten.clamp").attrs.update(zzz=1),
        r"nodes\[\d\]: aten.clamp.Tensor: found the argument 'zzz', expected only self, min, max",
    ),
    "attrs": (lambda ir: setattr(ir.nodes[0], "attrs", [1]), r"nodes\[0\]: attrs: found \[1\], expected an object"),
    "a node that is needed": (
        lambda ir: ir.nodes.pop(),
        r"graph_outputs\[1\]: the tensor 't' is used, and nothing makes it; change",
    ),
    "a state's last value": (
        lambda ir: ir.nodes.remove(next(node for node in ir.nodes if node.name == "add")),
        "updates: the tensor 'add' is used, and nothing makes it",
    ),
    "no nodes": (lambda ir: setattr(ir, "nodes", None), "nodes: found null, expected a list"),
    "a name twice": (
        lambda ir: setattr(ir.nodes[1], "name", ir.nodes[0].name),
        r"nodes\[1\]: name: found '.*', which an earlier node has, expected one of its own",
    ),
    "no node": (lambda ir: setattr(ir, "nodes", [3]), r"nodes\[0\]: found an int, expected one of type OpNode"),
    "half of a name": (
        lambda ir: setattr(ir.weights[0], "name", "w"),
        "nothing makes it: weight_name_mapping has it as 'norm.weight', which weights has not",
    ),
    "a shape where a tensor is read": (
        lambda ir: setattr(add(ir).inputs[1], "shape", (9, 3)),
        r"nodes\[\d\].inputs: 'x': found float32\[9, 3\], expected float32\['batch', 3\], as it is made",
    ),
    "a shape": (
        lambda ir: setattr(ir.graph_inputs[0], "shape", 3),
        r"graph_inputs\[0\]: shape: found 3, expected a list",
    ),
    "a mapping": (
        lambda ir: setattr(ir, "weight_name_mapping", {"p": 3}),
        "weight_name_mapping: p: found 3, expected the",
    ),
}


@pytest.mark.parametrize("edit, said", MISTAKES.values(), ids=MISTAKES.keys())
def test_an_edit_that_makes_no_ir_is_refused_with_its_place(ir: IR, edit: Callable[[IR], Any], said: str) -> None:
    edit(ir)
    with pytest.raises(SerializationError, match=f"^IR, as it was put together: .*{said}"):
        assert ir.graph


@pytest.mark.parametrize("field", ["nodes", "graph_inputs", "graph_outputs", "weights"])
def test_a_part_that_is_none_can_be_looked_at(ir: IR, field: str) -> None:
    setattr(ir, field, None)
    assert "=None" in repr(ir)


INDEX = torch.tensor([0, 1])
REVERSED: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "embedding": (lambda w, i: F.embedding(i, w), (torch.randn(3, 4), INDEX)),
    "index_select": (lambda x, i: x.index_select(0, i), (torch.randn(3, 4), INDEX)),
    "index_put": (lambda x, i, s: x.index_put((i,), s), (torch.randn(3, 3), INDEX, torch.randn(2, 3))),
    "nll_loss": (lambda x, i: F.nll_loss(x, i), (torch.randn(2, 3), INDEX)),
    "batch_norm": (lambda x, m, v: F.batch_norm(x, m, v), (torch.randn(2, 3), torch.randn(3), torch.ones(3))),
}


@pytest.mark.parametrize("planned", [True, False])
@pytest.mark.parametrize("name", REVERSED)
def test_reversed_inputs_are_reported_at_the_node(name: str, planned: bool) -> None:
    function, args = REVERSED[name]

    class Calls(nn.Module):
        def forward(self, *args: Tensor) -> Tensor:
            return function(*args)

    ir = extract_ir(Calls(), args, strict=False)
    ir.nodes[-1].inputs.reverse()
    with pytest.raises(ExecutionError, match=rf"op '{ir.nodes[-1].name}'.*correct the node, or extract the"):
        IRExecutor(ir, {}, planned=planned).execute(args)
