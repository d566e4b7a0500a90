"""A verification tells what differs, where, and changes nothing."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.while_loop import while_loop

from pipeline.torch_ir import (
    IR,
    ExecutionError,
    IRExecutor,
    VerificationReport,
    extract_ir,
    verify_ir,
    verify_ir_with_state_dict,
)
from pipeline.torch_ir.comparison import compare
from pipeline.torch_ir.tree import Branch, Leaf, Tree, leaves
from pipeline.torch_ir.verify import first_divergence
from tests.pipeline.torch_ir.small_modules import Cache, MaskedLinear, Norm, cache_call

NAN, INF = math.nan, math.inf


def edit_ir(ir: IR, edit: Callable[[dict[str, Any]], None]) -> IR:
    data = copy.deepcopy(ir.to_dict())
    edit(data)
    return IR.from_dict(data)


def every_node(data: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for node in data["nodes"]:
        yield node
        for body in node.get("bodies", ()):
            yield from every_node(body)


def rename_op(kind: str, other: str, nth: int = 0) -> Callable[[dict[str, Any]], None]:
    def edit(data: dict[str, Any]) -> None:
        [node for node in every_node(data) if node["op_type"] == kind][nth]["op_type"] = other

    return edit


@pytest.mark.parametrize(
    "dtype, left, right, close",
    [
        ("float32", [1.0, NAN, INF], [1.0, NAN, INF], True),
        ("float32", [1.0, NAN], [NAN, NAN], False),
        ("float32", [INF], [-INF], False),
        ("float32", [1.0], [1.00003], False),
        ("float64", [1.0], [1.00001], False),
        ("float64", [1.0], [1.0 + 1e-11], True),
        ("bfloat16", [1.0], [1.0078125], True),
        ("bfloat16", [1.0], [1.25], False),
        ("int64", [2**62], [2**62 + 1], False),
        ("bool", [True], [False], False),
        ("float8_e4m3fn", [1.0], [1.25], False),  # two steps: one is a rounding
        ("float8_e4m3fn", [1.0], [1.125], True),
        ("complex64", [1 + 1j], [1 + 1j], True),
        ("complex64", [1 + 1j], [1 - 1j], False),
        ("float32", [], [], True),
    ],
)
def test_values_are_compared_in_their_own_dtype(dtype: str, left: list[Any], right: list[Any], close: bool) -> None:
    pair = [torch.tensor(side, dtype=getattr(torch, dtype)) for side in (left, right)]
    assert compare(pair[0], pair[1]).is_close is close


def test_tolerances_of_the_caller_are_not_for_integers() -> None:
    assert compare(torch.tensor([1.0]), torch.tensor([1.5]), 1, 1).is_close
    assert not compare(torch.tensor([1]), torch.tensor([2]), 1, 1).is_close
    assert compare(torch.zeros(2, 3), torch.zeros(3, 2), 1e-5, 1e-5).max_diff == INF
    said = compare(torch.tensor([NAN, 1.0, INF]), torch.tensor([1.0, 1.0, INF])).why
    counts = "1 NaN and 1 infinite expected, 0 NaN and 1 infinite found"
    assert said == f"1 of 3 elements are NaN or infinite on one side only ({counts})"
    assert compare(torch.zeros(1), torch.zeros(1, dtype=torch.float64)).why == "dtype float64, expected float32"


def test_trees_buffers_and_nothing_changed() -> None:
    model = Cache().train()
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    args, kwargs = cache_call(2)
    ir = extract_ir(model, args, kwargs=kwargs, strict=False)
    calls.clear()
    before, random = copy.deepcopy((dict(model.state_dict()), args, kwargs)), torch.get_rng_state()
    ok, report = verify_ir_with_state_dict(ir, model.state_dict(), model, args, kwargs=kwargs)
    assert ok and str(report).startswith("Verification PASSED"), str(report)
    assert [detail["path"] for detail in report.output_details] == ["sum", "more.1", "buffer rows"]
    assert report.num_outputs == 3
    torch.testing.assert_close((dict(model.state_dict()), args, kwargs), before, rtol=0, atol=0)
    assert model.training and torch.equal(torch.get_rng_state(), random)


WRONG_TREES: dict[str, tuple[Tree, str]] = {
    "a missing key": (
        Branch("dict", ("sum", "scale"), (Leaf(0), Leaf(None, 2.0))),
        "more: the model gives a tuple, the IR nothing",
    ),
    "another class": (
        Branch("dict", ("sum", "more", "scale"), (Leaf(0), Branch("list", None, (Leaf(), Leaf(1))), Leaf(None, 2.0))),
        "more: the model gives a tuple, the IR a list",
    ),
    "a None": (
        Branch("dict", ("sum", "more", "scale"), (Leaf(0), Branch("tuple", None, (Leaf(1), Leaf(2))), Leaf(None, 2.0))),
        "more.0: the model gives None, the IR a tensor",
    ),
    "a constant": (
        Branch("dict", ("sum", "more", "scale"), (Leaf(0), Branch("tuple", None, (Leaf(), Leaf(1))), Leaf(None, 3))),
        "scale: the model gives 2.0, the IR the constant 3",
    ),
}


@pytest.mark.parametrize("tree, said", WRONG_TREES.values(), ids=WRONG_TREES.keys())
def test_a_difference_of_structure_is_named_by_its_path(tree: Tree, said: str) -> None:
    model = Cache()
    args, kwargs = cache_call()
    ir = extract_ir(model, args, kwargs=kwargs, strict=False)
    first, last = ir.graph_outputs
    made = {1: [first], 2: [first, last], 3: [first, first, last]}[
        sum(leaf.index is not None for _, leaf in leaves(tree))
    ]
    ir = replace(ir, signature=replace(ir.signature, outputs=tree), graph_outputs=made)
    ok, report = verify_ir_with_state_dict(ir, model.state_dict(), model, args, kwargs=kwargs)
    assert not ok
    assert said in str(report).splitlines()[-1].removeprefix("  Error: ")
    assert "Max difference: none can be given" in str(report)


def test_an_update_that_is_wrong_is_seen() -> None:
    model, x = Norm().train(), torch.randn(2, 2, 5, 5)
    ir = extract_ir(model, (x,), strict=False)
    assert verify_ir_with_state_dict(ir, model.state_dict(), model, (x,))[0]

    def edit(data: dict[str, Any]) -> None:
        updates = data["updates"]
        updates["b_norm_running_mean"], updates["b_norm_running_var"] = (
            updates["b_norm_running_var"],
            updates["b_norm_running_mean"],
        )

    ok, report = verify_ir_with_state_dict(edit_ir(ir, edit), model.state_dict(), model, (x,))
    assert not ok
    assert [detail["path"] for detail in report.output_details if not detail["is_close"]] == [
        "buffer norm.running_mean",
        "buffer norm.running_var",
    ]


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@pytest.mark.parametrize("nth", [0, 1, 2])
def test_the_first_node_that_differs(nth: int) -> None:
    model, x = Deep(), torch.randn(2, 4)
    ir = edit_ir(extract_ir(model, (x,), strict=False), rename_op("aten.tanh.default", "aten.sigmoid.default", nth))
    ok, report = verify_ir_with_state_dict(ir, model.state_dict(), model, (x,), localize=True)
    name = "tanh" if nth == 0 else f"tanh_{nth}"
    assert not ok
    assert report.first_divergence is not None
    assert report.first_divergence.startswith(f"node {name!r} (aten.sigmoid.default; ")
    assert "test_verify.py:" in report.first_divergence


class Regions(nn.Module):
    """An autocast region, a loop, and the same operators around them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x).tanh()
        with torch.autocast("cpu", torch.bfloat16):
            x = self.linear(self.linear(x).tanh())
        _, x = while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, (y * 2).tanh()), (torch.zeros(()), x.float()))
        return self.linear(x).tanh()


@pytest.mark.parametrize("nth", [1, 2, 3], ids=["autocast", "while_loop", "after both"])
def test_the_first_node_that_differs_may_lie_in_a_region(nth: int) -> None:
    model, x = Regions().requires_grad_(False), torch.randn(2, 4)
    whole = extract_ir(model, (x,), strict=False)
    ok, report = verify_ir_with_state_dict(
        edit_ir(whole, rename_op("aten.tanh.default", "aten.sigmoid.default", nth)),
        model.state_dict(),
        model,
        (x,),
        localize=True,
    )
    assert not ok
    line = Regions.forward.__code__.co_firstlineno + (1, 3, 4, 5)[nth]
    assert f"(aten.sigmoid.default; {__file__}:{line}): " in (report.first_divergence or "")
    if nth == 3:
        right = IRExecutor(whole, model.state_dict())
        assert first_divergence(right, model, (x,), {}) == "not found: every node agrees with a trace of the model"


def test_wrong_weights_are_a_divergence_too() -> None:
    model, x = Deep(), torch.randn(2, 4)
    ir = extract_ir(model, (x,), strict=False)
    state = {**model.state_dict(), "layers.1.bias": torch.ones(4)}
    _, report = verify_ir_with_state_dict(ir, state, model, (x,), localize=True)
    assert report.first_divergence is not None
    assert report.first_divergence.startswith("node 'linear_1' (aten.linear.default; module layers.1, ")


class Stack(nn.Module):
    def __init__(self, *between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.between = between
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        for function in self.between:
            x = function(x)
        return self.linear(x)


@pytest.mark.parametrize(
    "between, said",
    [
        ([torch.relu], "; before it, 1 node has no counterpart in a trace of the model (relu)"),
        ([torch.relu, torch.sin, torch.cos, torch.exp, torch.tan, torch.relu], " (relu, sin, cos, exp, and 2 more)"),
    ],
    ids=["one", "many"],
)
def test_nodes_without_a_counterpart_may_be_the_first_that_differ(between: Any, said: str) -> None:
    model, x = Stack(torch.sigmoid), torch.randn(2, 4)
    ir = extract_ir(Stack(*between), (x,), strict=False)
    _, report = verify_ir_with_state_dict(ir, model.state_dict(), model, (x,), localize=True)
    assert (report.first_divergence or "").startswith("node 'linear_1' (aten.linear.default; module linear, ")
    assert (report.first_divergence or "").endswith(said)


def test_what_cannot_run_is_a_report(tmp_path: Any) -> None:
    model, x = MaskedLinear(), torch.randn(1, 4)
    ir = extract_ir(model, (x,), strict=False)
    ok, report = verify_ir_with_state_dict(ir, {}, model, (x,))
    assert not ok
    assert report.error_message is not None
    assert "not found in registry for node 'linear'." in report.error_message
    assert "Outputs compared: none\n  Error: Weight/input 'p_linear_weight'" in str(report)
    assert (report.max_diff, "difference" in str(report)) == (INF, False)
    with pytest.raises(ExecutionError, match=r"MaskedLinear itself does not run on these inputs, .* TypeError"):
        verify_ir_with_state_dict(ir, model.state_dict(), model, (x, x))
    torch.save(model.state_dict(), tmp_path / "w.pt")
    assert verify_ir(ir, tmp_path / "w.pt", model, (x,))[0]


def test_dropout_draws_the_same_on_both_sides() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).train(), torch.randn(8, 4)
    ir = extract_ir(model, (x,), strict=False)
    assert verify_ir_with_state_dict(ir, model.state_dict(), model, (x,))[0]
    assert not verify_ir_with_state_dict(ir, model.state_dict(), copy.deepcopy(model).eval(), (x,))[0]


def test_a_verification_leaves_the_caller_s_generators_as_they_were() -> None:
    """CUDA keeps a seed until it begins."""
    model, x = nn.Dropout(0.5).train(), torch.randn(8, 4)
    ir = extract_ir(model, (x,), strict=False)
    torch.cuda.manual_seed_all(7)
    before, waiting = torch.get_rng_state(), list(torch.cuda._lazy_seed_tracker.get_calls())
    assert verify_ir_with_state_dict(ir, {}, model, (x,))[0]
    assert torch.equal(torch.get_rng_state(), before)
    assert list(torch.cuda._lazy_seed_tracker.get_calls()) == waiting


@pytest.mark.gpu
def test_a_verification_on_a_gpu_leaves_the_caller_s_generators_as_they_were() -> None:
    model, x = nn.Dropout(0.5).train(), torch.randn(8, 4, device="cuda")
    ir = extract_ir(model, (x,), strict=False)
    before = torch.get_rng_state(), torch.cuda.get_rng_state()
    assert verify_ir_with_state_dict(ir, {}, model, (x,), device="cuda")[0]
    assert torch.equal(torch.get_rng_state(), before[0]) and torch.equal(torch.cuda.get_rng_state(), before[1])


def test_a_report_reads_as_in_pytorch_ir() -> None:
    text = str(VerificationReport(False, 0.1, 0.05, 1, error_message="Test error"))
    assert [word in text for word in ("FAILED", "Test error", "1.00e-01", "5.00e-02")] == [True] * 4
    many = VerificationReport(False, INF, INF, 0, error_message="\n".join(map(str, range(100))))
    assert str(many).splitlines()[-2:] == ["         10", "         and 89 more; output_details has all"]


def scaled(x: Tensor, weight: Tensor) -> Tensor:
    return (x + 1) * weight


def writes_to_the_input(x: Tensor, weight: Tensor) -> Tensor:
    return x.add_(1) * weight


def writes_to_the_weight(x: Tensor, weight: Tensor) -> Tensor:
    result = (x + 1) * weight
    weight.data.mul_(2)
    return result


class Applied(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, NAN]))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


@pytest.mark.parametrize(
    "traced, run, said",
    [
        (writes_to_the_input, writes_to_the_input, None),
        (scaled, writes_to_the_input, "input x: 2 of 2 elements differ"),
        (writes_to_the_input, scaled, "input x: 2 of 2 elements differ"),
        (scaled, writes_to_the_weight, "parameter weight: 1 of 2 elements differ"),
    ],
)
def test_what_one_side_writes_to_is_compared(traced: Any, run: Any, said: str | None) -> None:
    x = torch.ones(2)
    ir = extract_ir(Applied(traced), (x,), strict=False)
    ok, report = verify_ir_with_state_dict(ir, Applied(run).state_dict(), Applied(run), (x,))
    assert ok is (said is None)
    assert (report.error_message or "").startswith(said or "")
    assert torch.equal(x, torch.ones(2))
