"""Functions of the user's for single kinds of op."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline.torch_ir import (
    IR,
    ConversionError,
    ExecutionError,
    IRExecutor,
    OpNode,
    TensorMeta,
    execute_ir,
    extract_ir,
    list_registered_ops,
    register_executor,
    register_op,
)
from pipeline.torch_ir.registry import REGISTERED, NodeInfo

X = torch.tensor([1.0, -2.0])


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    REGISTERED.executors.clear()
    REGISTERED.conversions.clear()


def gate() -> IR:
    value = TensorMeta("x", (2,), "float32")
    metas = [TensorMeta("low", (2,), "float32"), TensorMeta("high", (2,), "float32")]
    node = OpNode("gate", "mylib.gate", [value], metas, {"by": 0.5, "modes": ["a", None]})
    return IR([node], [value], metas[::-1])


def test_an_op_that_torch_does_not_know_runs_also_when_it_was_saved() -> None:
    seen: list[dict[str, Any]] = []

    @register_executor("mylib.gate")
    def run(inputs: list[Tensor], attrs: dict[str, Any]) -> list[Tensor]:
        seen.append(attrs)
        return [inputs[0].clamp(max=attrs["by"]), inputs[0].clamp(min=attrs["by"])]

    for ir in (gate(), IR.from_dict(gate().to_dict())):
        high, low = execute_ir(ir, (X,))
        assert (high.tolist(), low.tolist()) == ([1.0, 0.5], [0.5, -2.0])
    assert seen == [{"by": 0.5, "modes": ["a", None]}] * 2
    assert list_registered_ops() == {"execution": ["mylib.gate"], "conversion": []}


def test_without_it_or_with_other_outputs_it_is_refused() -> None:
    with pytest.raises(Exception, match=r"mylib.*gate"):
        execute_ir(gate(), (X,))
    register_executor("mylib.gate")(lambda inputs, attrs: inputs)
    with pytest.raises(ExecutionError, match="gave 1 outputs; expected a list of 2"):
        execute_ir(gate(), (X,))


def test_an_executor_goes_before_the_operator_of_torch() -> None:
    ir = extract_ir(nn.ReLU(), (X,), strict=False)
    assert execute_ir(ir, (X,))[0].tolist() == [1.0, 0.0]
    register_executor("aten.relu")(lambda inputs, attrs: [inputs[0] * 10])
    assert execute_ir(ir, (X,))[0].tolist() == [10.0, -20.0]
    assert "your own run aten.relu.default" in IRExecutor(ir).not_planned
    assert IRExecutor(ir, registry=type(REGISTERED)()).execute((X,))[0].tolist() == [1.0, 0.0]


def test_a_conversion_writes_the_node_down() -> None:
    seen: list[NodeInfo] = []

    @register_op("aten.leaky_relu.default")
    def convert(info: NodeInfo) -> OpNode:
        seen.append(info)
        return OpNode(info.name, "mylib.leak", info.input_metas, info.output_metas, {**info.attrs, "extra": True})

    ir = extract_ir(nn.LeakyReLU(0.5), (X,), strict=False)
    assert (ir.nodes[0].op_type, ir.nodes[0].attrs) == ("mylib.leak", {"negative_slope": 0.5, "extra": True})
    assert seen[0].target is torch.ops.aten.leaky_relu.default
    register_executor("mylib.leak")(lambda inputs, attrs: [inputs[0] * attrs["negative_slope"]])
    assert execute_ir(IR.from_dict(ir.to_dict()), (X,))[0].tolist() == [0.5, -1.0]


def test_all_that_a_conversion_returns_counts_or_is_refused() -> None:
    @register_op("aten.relu")
    def convert(info: NodeInfo) -> OpNode:
        return OpNode(info.name + "_x", "mylib.op", info.input_metas, [TensorMeta("relu", (1,), "int64")], {"by": 2})

    (node,) = extract_ir(nn.ReLU(), (X,), strict=False).nodes
    assert node == OpNode("relu_x", "mylib.op", node.inputs, [TensorMeta("relu", (1,), "int64")], {"by": 2})
    x = TensorMeta("x", (2,), "float32")
    for wrong, said in {
        "renames": (lambda node: replace(node, outputs=[replace(node.outputs[0], name="y")]), "with the outputs relu"),
        "reshapes": (lambda node: replace(node, inputs=[replace(x, name="input", shape=(3,))]), "reads 'input' as"),
        "reads": (lambda node: replace(node, inputs=[x]), "reads 'x'; no such tensor"),
        "itself": (lambda node: replace(node, inputs=node.outputs), "not sound"),
        "shape": (lambda node: replace(node, outputs=[TensorMeta("relu", (-1,), "float32")]), "may not be negative"),
        "another": (lambda node: replace(node, op_type="aten.add.Tensor"), "aten.add.Tensor: it lacks 1 argument"),
        "raises": (lambda node: node.attrs["none"], "conversion of aten.relu.default failed: KeyError: 'none'"),
        "argument": (lambda node: replace(node, op_type="aten.neg.default", attrs={"by": 2}), "no argument 'by'"),
    }.values():
        register_op("aten.relu")(lambda info, wrong=wrong: wrong(_as_it_is(info)))
        with pytest.raises(ConversionError, match=said):
            extract_ir(nn.ReLU(), (X,), strict=False)


def _as_it_is(info: NodeInfo) -> OpNode:
    return OpNode(info.name, str(info.target), info.input_metas, info.output_metas, info.attrs)


def test_a_conversion_reaches_bodies_and_other_inputs() -> None:
    class Branches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cond(x.sum() > 0, lambda x: x.relu() + 1, lambda x: x - x.tanh(), (x,))

    register_op("aten.relu")(lambda info: replace(_as_it_is(info), op_type="aten.neg.default"))
    # x - tanh(x) becomes x - x: the schema says which tensor is which argument
    register_op("aten.sub.Tensor")(lambda info: replace(_as_it_is(info), inputs=[info.input_metas[0]] * 2))
    ir = extract_ir(Branches(), (X,), strict=False)
    assert execute_ir(ir, (X.abs(),))[0].tolist() == [0.0, -1.0]
    assert execute_ir(ir, (-X.abs(),))[0].tolist() == [0.0, 0.0]
