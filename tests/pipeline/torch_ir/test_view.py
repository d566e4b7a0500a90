"""An IR is a frozen dataclass: nothing in it can be changed, and `replace` makes another IR of other parts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields, is_dataclass, replace
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
def ir() -> IR:
    return extract_ir(Net(), (X,), strict=False, dynamic_shapes=({0: torch.export.Dim("batch", min=2)},))


def with_node(ir: IR, kind: str, **changes: Any) -> IR:
    """The IR with other fields in the node of the type `kind` that comes last."""
    at = max(at for at, node in enumerate(ir.nodes) if node.op_type.startswith(kind))
    return replace(ir, nodes=[*ir.nodes[:at], replace(ir.nodes[at], **changes), *ir.nodes[at + 1 :]])


def with_alpha(ir: IR, alpha: Any) -> IR:
    return with_node(ir, "aten.add.Tensor", attrs={"alpha": alpha})


def lines(ir: IR) -> list[str]:
    """The text of the Graph, tensors by name."""
    names = [value.name for value in ir.graph.values]
    text = re.sub(r' line "[^"]*"', "", to_text(ir.graph)).replace('"', "")
    return [re.sub(r"%(\d+)( \w+)?", lambda vid: names[int(vid[1])], line.strip()) for line in text.splitlines()]


def test_it_is_a_dataclass(ir: IR) -> None:
    names = [entry.name for entry in fields(IR)]
    assert is_dataclass(IR)
    assert names[:5] == ["nodes", "graph_inputs", "graph_outputs", "weights", "weight_name_mapping"]
    called = replace(ir, model_name="other")
    assert (called.graph.name, called.to_dict()) == ("other", ir.to_dict() | {"model_name": "other"})
    assert replace(called.graph, name="Net") == ir.graph  # named dims, updates, exact calls, lines, tied names, …


def test_parts_come_back_from_their_data(ir: IR) -> None:
    data = json.loads(json.dumps(ir.to_dict()))
    assert [OpNode.from_dict(item).to_dict() for item in data["nodes"]] == data["nodes"]
    assert [TensorMeta.from_dict(item) for item in data["weights"]] == list(ir.weights)
    with pytest.raises(SerializationError, match=r"^IR JSON: shape: found 3, expected a list of sizes"):
        TensorMeta.from_dict({"name": "x", "shape": 3, "dtype": "float32"})


CHANGES: dict[str, Callable[[IR], Any]] = {
    "the nodes": lambda ir: setattr(ir, "nodes", []),
    "a node": lambda ir: setattr(ir.nodes[0], "name", "x"),
    "an argument": lambda ir: ir.nodes[0].attrs.update(alpha=2),
    "an item": lambda ir: ir.nodes[0].attrs.__setitem__("alpha", 2),
    "an operand": lambda ir: ir.nodes[0].inputs.__setitem__(0, ir.weights[0]),
    "the operands": lambda ir: ir.nodes[0].inputs.reverse(),
    "a tensor": lambda ir: setattr(ir.weights[0], "shape", (1,)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_view_cannot_be_changed(ir: IR, change: Callable[[IR], Any]) -> None:
    before = ir.to_dict()
    with pytest.raises((FrozenInstanceError, TypeError)):
        change(ir)
    assert ir.to_dict() == before


def names(ir: IR) -> IR:
    """Of a node whose exact call is written down, and of a tensor: where it is made, and where it is read."""
    turned = replace(ir.graph_outputs[1], name="turned")
    ir = with_node(
        with_node(ir, "aten.clamp", name="limit"),
        "aten.t",
        outputs=[replace(turned, producer_node=None, strides=(1, 3))],
    )
    return replace(ir, graph_outputs=[replace(ir.graph_outputs[0], producer_node="limit"), turned])


def a_weight(ir: IR) -> IR:
    weights = [replace(weight, name={"first.weight": "w"}.get(weight.name, weight.name)) for weight in ir.weights]
    tied = {"w": ("second.weight",), "second.weight": ("w",)}
    return replace(
        ir, weights=weights, weight_name_mapping={**ir.weight_name_mapping, "p_first_weight": "w"}, tied=tied
    )


def another_node(ir: IR) -> IR:
    meta = TensorMeta("y", ("batch", 3), "float32")
    node = OpNode("relu", "aten.relu.default", [ir.graph_outputs[0]], [meta])
    return replace(ir, nodes=[*ir.nodes, node], graph_outputs=[meta, ir.graph_outputs[1]])


EDITS: dict[str, tuple[Callable[[IR], IR], list[str]]] = {
    "an argument": (
        lambda ir: with_alpha(ir, 2),
        [
            "- add_1: float32[batch, 3] = aten.add.Tensor(linear_1, x) {self: $0, other: $1, alpha: 3} node add_1",
            "+ add_1: float32[batch, 3] = aten.add.Tensor(linear_1, x) {self: $0, other: $1, alpha: 2} node add_1",
        ],
    ),
    "another type": (
        lambda ir: with_alpha(ir, 3.0),
        [
            "- add_1: float32[batch, 3] = aten.add.Tensor(linear_1, x) {self: $0, other: $1, alpha: 3} node add_1",
            "+ add_1: float32[batch, 3] = aten.add.Tensor(linear_1, x) {self: $0, other: $1, alpha: 3.0} node add_1",
        ],
    ),
    "an operator": (
        lambda ir: with_node(ir, "aten.add.Tensor", op_type="aten.sub.Tensor"),
        [
            "- add_1: float32[batch, 3] = aten.add.Tensor(linear_1, x) {self: $0, other: $1, alpha: 3} node add_1",
            "+ add_1: float32[batch, 3] = aten.sub.Tensor(linear_1, x) {self: $0, other: $1, alpha: 3} node add_1",
        ],
    ),
    "names": (
        names,
        [
            "- clamp: float32[batch, 3] = aten.clamp.Tensor(add_1, b_top) {self: $0, max: $1} node clamp",
            "- t: float32[3, batch] strides [1, 3] = aten.t.default(cond_0) {self: $0} node t",
            "- return clamp, t",
            "+ clamp: float32[batch, 3] = aten.clamp.Tensor(add_1, b_top) {self: $0, max: $1} node limit",
            "+ turned: float32[3, batch] strides [1, 3] = aten.t.default(cond_0) {self: $0} node t",
            "+ return clamp, turned",
        ],
    ),
    "a weight": (
        a_weight,
        [
            "- param p_first_weight: float32[3, 3] from first.weight, second.weight",
            "- param p_second_weight: float32[3, 3] from second.weight, first.weight",
            "+ param p_first_weight: float32[3, 3] from w, second.weight",
            "+ param p_second_weight: float32[3, 3] from second.weight, w",
        ],
    ),
    "another node": (
        another_node,
        [
            "- return clamp, t",
            "+ y: float32[batch, 3] = aten.relu.default(clamp) {self: $0} node relu",
            "+ return y, t",
        ],
    ),
}


@pytest.mark.parametrize("edit, said", EDITS.values(), ids=EDITS.keys())
def test_another_ir_of_other_parts(ir: IR, edit: Callable[[IR], IR], said: list[str]) -> None:
    """What changes in the text of the Graph, also after a way through JSON; the rest stays."""
    edited = edit(ir)
    before, after = lines(ir), lines(edited)
    assert after == lines(IR.from_dict(edited.to_dict()))
    gone, new = ([line for line in pair if line not in other] for pair, other in ((before, after), (after, before)))
    assert [*(f"- {line}" for line in gone), *(f"+ {line}" for line in new)] == said


def test_the_parts_are_what_runs(ir: IR) -> None:
    model = Net()
    weights = model.state_dict()
    assert verify_ir_with_state_dict(ir, weights, model, (X,))[0]
    for alpha, valid in ((2, False), (3, True)):
        assert verify_ir_with_state_dict(with_alpha(ir, alpha), weights, model, (X,))[0] is valid


def test_an_ir_by_hand_runs() -> None:
    x, y = TensorMeta("x", (2, 3), "float32"), TensorMeta("y", (2, 3), "float32")
    ir = IR([OpNode("mul", "aten.mul.Scalar", [x], [y], {"other": 2})], [x], [y])
    assert torch.equal(execute_ir(ir, (X,))[0], X * 2)
    summed = replace(ir, nodes=[OpNode("add", "aten.add.Scalar", [x], [y], {"other": 1})], model_name="sum")
    assert torch.equal(execute_ir(summed, (X,))[0], X + 1)


MISTAKES: dict[str, tuple[Callable[[IR], Any], str]] = {
    "a value": (
        lambda ir: with_alpha(ir, "x"),
        r"nodes\[\d\]: aten.add.Tensor: the argument 'alpha' is 'x'; expected number; change that part of it$",
    ),
    "an argument": (
        lambda ir: with_node(ir, "aten.t.", attrs={"zzz": 1}),
        r"nodes\[\d\]: aten.t.default: it has no argument 'zzz'; its arguments: self",
    ),
    "an argument beside an exact call": (
        lambda ir: with_node(ir, "aten.clamp", attrs={"min": 1}),
        r"nodes\[\d\]: aten.clamp.Tensor: min: found 1, expected None, as `call` has it",
    ),
    "attrs": (lambda ir: with_node(ir, "aten.t.", attrs=3), r"nodes\[\d\].attrs: found 3, expected an object"),
    "a node that is needed": (
        lambda ir: replace(ir, nodes=ir.nodes[:-1]),
        r"graph_outputs\[1\]: the tensor 't' is used, and nothing makes it; change",
    ),
    "a state's last value": (
        lambda ir: replace(ir, nodes=[node for node in ir.nodes if node.name != "add"]),
        "updates: the tensor 'add' is used, and nothing makes it",
    ),
    "no nodes": (lambda ir: replace(ir, nodes=None), "nodes: found null, expected a list"),  # type: ignore[arg-type]
    "a name twice": (
        lambda ir: with_node(ir, "aten.t.", name=ir.nodes[0].name),
        r"nodes\[\d\]: name: found '.*', which an earlier node has, expected one of its own",
    ),
    "no node": (lambda ir: replace(ir, nodes=[3]), r"nodes\[0\]: found 3, expected an object"),  # type: ignore[list-item]
    "half of a name": (
        lambda ir: replace(ir, weights=[replace(ir.weights[0], name="w"), *ir.weights[1:]]),
        "nothing makes it: weight_name_mapping has it as 'norm.weight', which weights has not",
    ),
    "a shape where a tensor is read": (
        lambda ir: with_node(
            ir, "aten.add.Tensor", inputs=[ir.graph_outputs[0], replace(ir.graph_inputs[0], shape=(9, 3))]
        ),
        r"nodes\[\d\]: ",
    ),
    "a shape": (
        lambda ir: replace(ir, graph_inputs=[replace(ir.graph_inputs[0], shape=3)]),
        r"graph_inputs\[0\].shape: found 3, expected a list",
    ),
    "an output less": (
        lambda ir: replace(ir, graph_outputs=ir.graph_outputs[:1]),
        "signature.outputs: found .*, expected each tensor of graph_outputs once",
    ),
    "a mapping": (
        lambda ir: replace(ir, weight_name_mapping={"p": 3}),  # type: ignore[dict-item]
        "weight_name_mapping.p: found 3, expected a string",
    ),
}


@pytest.mark.parametrize("edit, said", MISTAKES.values(), ids=MISTAKES.keys())
def test_parts_that_make_no_ir_are_refused_with_their_place(ir: IR, edit: Callable[[IR], Any], said: str) -> None:
    edited = edit(ir)
    assert repr(edited).startswith("IR(")
    with pytest.raises(SerializationError, match=f"^IR, as it was put together: .*{said}"):
        assert edited.graph


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
    last = ir.nodes[-1]
    ir = replace(ir, nodes=[*ir.nodes[:-1], replace(last, inputs=last.inputs[::-1])])
    with pytest.raises(ExecutionError, match=rf"op '{ir.nodes[-1].name}'.*correct the node, or extract the"):
        IRExecutor(ir, {}, planned=planned).execute(args)
