"""Arguments at the edges: keys that are no strings, one tensor in two places, tensors that are not dense."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pipeline.export.source import Example, InputSpec, TorchSource
from pipeline.export.trace import trace_module
from pipeline.torch_ir import (
    ExecutionError,
    ExportError,
    IRExecutor,
    deserialize_ir,
    execute_ir,
    extract_ir,
    serialize_ir,
    verify_ir_with_state_dict,
)
from tests.pipeline.torch_ir.small_modules import Does, Holds

X = torch.arange(8.0).view(2, 4)


def test_keys_of_a_dict_are_kept_whatever_they_are() -> None:
    model = Does(lambda table: {1: table["1"] - table[1], "1": table[1], (0, None): table["[1]"], "[1]": table["1"]})
    given = {"1": X, 1: X * 3, "[1]": X + 1}
    ir = deserialize_ir(serialize_ir(extract_ir(model, (given,), strict=False)))
    ok, report = verify_ir_with_state_dict(ir, {}, model, (dict(reversed(given.items())),))
    assert ok, report
    assert [detail["path"] for detail in report.output_details] == ["[1]", "1", "[(0, None)]", "['[1]']"]
    ok, report = verify_ir_with_state_dict(ir, {}, Does(lambda table: {1: table["1"]}), (given,))
    assert "  1: the model gives nothing, the IR something" in str(report)
    with pytest.raises(
        ExecutionError, match=r"argument 0: without \[1\] and with \[2\], which the trace had not"
    ) as caught:
        execute_ir(ir, ({"1": X, 2: X, "[1]": X},), {})
    assert "Weight/input" in str(caught.value)


@pytest.mark.parametrize("own", [False, True], ids=["the same tensor twice", "a weight of the model"])
def test_an_example_may_give_one_tensor_in_several_places(own: bool) -> None:
    """torch.export would take both for one, and the IR be right for no other call."""
    model = nn.Bilinear(4, 4, 2) if not own else Holds(torch.ones(4), buffer=True)
    ir = extract_ir(model, (X, X[:]) if not own else (model.held,), strict=False)
    given = (X, X + 1) if not own else (X[0],)
    assert torch.equal(execute_ir(ir, given, model.state_dict())[0], model(*given))
    ir = extract_ir(Does(lambda x, y: x - y), (X, X), strict=False)
    assert torch.equal(execute_ir(ir, (X, X + 1), {})[0], -torch.ones(2, 4))


def test_the_way_to_onnx_has_such_examples_too() -> None:
    inputs = tuple(InputSpec(name, (2, 4), "float32", 0, 1) for name in ("x", "y"))
    source = TorchSource(Does(lambda x, y: x - y), Example((X, X), {}), inputs, ("difference",))
    program, _ = trace_module(source)
    assert torch.equal(program.module()(X, X + 1), -torch.ones(2, 4))


def test_a_tensor_is_an_only_argument_and_no_row_of_them() -> None:
    ir = extract_ir(Does(lambda x: x + 1), X, strict=False)
    assert ir.graph_inputs[0].shape == (2, 4)
    assert torch.equal(execute_ir(ir, X, {})[0], X + 1)
    assert verify_ir_with_state_dict(ir, {}, Does(lambda x: x + 1), X)[0]
    with pytest.raises(ExportError, match=r"found a dict, expected .*; give arguments by name as kwargs="):
        extract_ir(Does(lambda x: x + 1), {"x": X}, strict=False)  # type: ignore[arg-type]


ODD: dict[str, tuple[Callable[[], Tensor], str]] = {
    "sparse": (X.to_sparse, "a sparse tensor (torch.sparse_coo), expected a dense one: call .to_dense()"),
    "packed": (X.to_mkldnn, "a packed tensor (torch._mkldnn), expected a dense one"),
    "nested": (
        lambda: torch.nested.as_nested_tensor([X[0], X[1]], layout=torch.jagged),
        "a nested tensor, expected a dense one",
    ),
}


@pytest.mark.parametrize("make, said", ODD.values(), ids=ODD.keys())
def test_tensors_that_are_not_dense_are_refused_in_words(make: Callable[[], Tensor], said: str) -> None:
    given = make()
    model = Does(lambda batch: batch["x"] + 1)
    ir = extract_ir(model, ({"x": X},), strict=False)
    with pytest.raises(ExecutionError) as caught:
        execute_ir(ir, ({"x": given},), {})
    assert said in str(caught.value)
    with pytest.raises(ExportError) as refused:
        extract_ir(model, ({"x": given},), strict=False)
    assert "argument 0.x is " in str(refused.value)
    assert said in str(refused.value)


@pytest.mark.parametrize("functionalize", [True, False])
@pytest.mark.parametrize("planned", [True, False])
def test_conjugates_and_negatives_that_torch_has_only_marked(functionalize: bool, planned: bool) -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("turn", torch.tensor([1 + 2j, 3 - 1j]))

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            self.turn.add_(x)
            return torch.view_as_real(self.turn), torch.view_as_real(x) * y.view(2, 1)

    x = torch.tensor([2 + 5j, 4 + 7j])
    ir = extract_ir(Parts(), (x, x.imag.clone()), strict=False, functionalize=functionalize)
    model = Parts()
    model.turn = model.turn.conj().resolve_conj()
    executor = IRExecutor(ir, {"turn": Parts().turn.conj()}, planned=planned)
    given = (x.conj(), x.conj().imag)
    assert given[0].is_conj()
    assert given[1].is_neg()
    for _ in range(2):
        expected = model(given[0].resolve_conj(), given[1].resolve_neg())
        assert all(map(torch.equal, executor.execute(given), expected))


class WritesToOne(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x * y


def test_one_tensor_in_two_places_of_which_one_is_written_is_refused() -> None:
    vector = torch.ones(2)
    ir = extract_ir(WritesToOne(), (vector, vector), strict=False)
    assert torch.equal(execute_ir(ir, (vector, vector.clone()))[0], torch.full((2,), 2.0))
    halves = torch.ones(2, 2)
    assert torch.equal(execute_ir(ir, (halves[0], halves[1]))[0], torch.full((2,), 2.0))
    with pytest.raises(ExecutionError, match="input 'x' shares memory with 'y', and the model writes to it"):
        execute_ir(ir, (vector, vector))
    with pytest.raises(ExecutionError, match="input 'x' shares memory with 'y'"):
        execute_ir(ir, (halves.view(4)[:2], halves.view(4)[1:3]))
    ok, report = verify_ir_with_state_dict(ir, {}, WritesToOne(), (vector, vector))
    assert not ok
    assert "shares memory with 'y'" in str(report.error_message)
    assert torch.equal(vector, torch.ones(2))
