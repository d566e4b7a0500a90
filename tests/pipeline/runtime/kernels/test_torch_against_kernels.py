"""Torch op by op against the kernels of a plan, on the cases of the kernels; torch records the gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from pipeline.ir.graph import Graph
from pipeline.ops import Kind
from pipeline.runtime import compile_graph
from pipeline.runtime.eager import REFUSED, apply, run_eager
from pipeline.runtime.tensors import as_tensor, to_numpy
from tests.pipeline.runtime.kernels import (
    test_elementwise,
    test_linear_conv,
    test_norm_reduce,
    test_recurrent,
    test_shape_index,
)
from tests.pipeline.runtime.kernels.kernel_reference import OWN_KINDS, Case, assert_close, expected, graph_of

CASES = [
    case
    for module in (test_elementwise, test_linear_conv, test_norm_reduce, test_recurrent, test_shape_index)
    for case in module.CASES
    if case.kind not in OWN_KINDS
]

FLAT = {
    *("Floor", "Ceil", "Round", "Sign", "IsNaN", "IsInf", "ArgMax", "ArgMin"),
    *("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"),
}
"""Kinds of floats that have no gradient, or one that is zero everywhere."""

TRAINED = {"BatchNormalization": 3}
"""How many of the first operands have a gradient: torch has none for the stored statistics."""


@pytest.mark.parametrize("case", CASES, ids=str)
def test_torch_and_kernel_agree(case: Case) -> None:
    graph = graph_of(case, expected(case))
    feed = {f"in{at}": array for at, array in enumerate(case.inputs)}
    by_kernels = compile_graph(graph).run(feed)
    tensors = {name: as_tensor(np.array(array, order="C")) for name, array in feed.items()}
    by_torch = run_eager(graph, tensors).outputs
    assert by_torch.keys() == by_kernels.keys()
    for name, tensor in by_kernels.items():
        assert_close(to_numpy(by_torch[name]), to_numpy(tensor))


def differentiable_cases() -> dict[str, Case]:
    """One case of each kind that reads and gives floats."""
    found: dict[str, Case] = {}
    for case in CASES:
        if case.inputs[0].dtype == np.float32 and case.kind not in FLAT and case.attrs.get("to") != "int64":
            found.setdefault(case.kind, case)
    return found


@pytest.mark.parametrize("case", differentiable_cases().values(), ids=lambda case: case.kind)
def test_torch_records_an_op_with_its_gradient(case: Case) -> None:
    """On fake tensors, which have no values, so no op may look at one."""
    graph = graph_of(case, expected(case))
    tensors = [as_tensor(np.array(array, order="C")) for array in case.inputs]

    def gradients(*ins: torch.Tensor) -> list[torch.Tensor]:
        asked = [tensor.requires_grad_() for tensor in ins[: TRAINED.get(case.kind)] if tensor.is_floating_point()]
        total = sum(result.float().sum() for result in run_once(graph, ins) if result.requires_grad)
        assert isinstance(total, torch.Tensor)
        return [one for one in torch.autograd.grad(total, asked, allow_unused=True) if one is not None]

    recorded = make_fx(gradients, tracing_mode="fake")(*tensors)
    found, wanted = recorded(*tensors), gradients(*(tensor.clone() for tensor in tensors))
    assert found
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


def run_once(graph: Graph, ins: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    slots = dict(zip(graph.inputs, ins, strict=True))
    slots |= {vid: as_tensor(payload.numpy()) for vid, payload in graph.payloads.items()}
    for op in graph.ops:
        results = apply(op, [slots[vid] for vid in op.inputs], {})
        slots |= dict(zip(op.outputs, results, strict=True))
    return [slots[vid] for vid in graph.outputs]


def test_every_kind_that_is_no_operator_of_torch_has_a_reason() -> None:
    assert REFUSED.keys() == set(Kind)
