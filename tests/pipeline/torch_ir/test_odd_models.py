"""Models at the edges: memory that lies in another order, named tuples, sizes as data, writes that torch refuses."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from pipeline.export.source import Example, InputSpec, TorchSource
from pipeline.export.trace import trace_module
from pipeline.torch_ir import (
    IR,
    ConversionError,
    ExecutionError,
    ExportError,
    IRExecutor,
    convert_exported_program,
    deserialize_ir,
    execute_ir,
    extract_ir,
    serialize_ir,
    verify_ir_with_state_dict,
)
from pipeline.torch_ir.command_files import summary
from tests.pipeline.torch_ir.small_modules import Does, Holds

X = torch.arange(8.0).view(2, 4)
Pair = namedtuple("Pair", "left right")


@pytest.mark.parametrize("buffer", [True, False], ids=["buffer", "constant"])
@pytest.mark.parametrize(
    ("held", "why"),
    [
        (torch.arange(12.0).view(4, 3).t(), ""),
        (torch.arange(10.0).as_strided((3, 4), (2, 1)), "'{name}', which had the strides [2, 1] in the trace; a plan"),
        (torch.arange(20.0)[::2], "'{name}', which had the strides [2] in the trace; a plan holds elements"),
    ],
    ids=["transposed", "overlapping", "with gaps"],
)
def test_memory_is_read_as_it_lies(held: Tensor, why: str, buffer: bool, tmp_path: Path) -> None:
    """A plan holds what has an order without gaps; the plain reference reads all else as torch does."""
    model = Holds(held, buffer=buffer)
    ir = extract_ir(model, (X,), strict=False)
    ir.save(tmp_path / "ir.json", threshold=8)
    for version in (ir, IR.load(tmp_path / "ir.json")):
        executor = IRExecutor(version, model.state_dict())
        assert torch.equal(executor.execute((X,))[0], model(X))
        assert why.format(name="b_held" if buffer else "c_held") in executor.not_planned
        assert bool(why) == bool(executor.not_planned)


@pytest.mark.parametrize("offset", [(), (0,), (1,)], ids=["where it begins", "0", "1"])
def test_an_input_that_is_a_slice_is_counted_from_its_storage(offset: tuple[int, ...]) -> None:
    model = Does(lambda x: torch.as_strided(x, (2,), (1,), *offset))
    whole = torch.arange(8.0)
    ir = extract_ir(model, (whole[:4],), strict=False)
    for planned in (True, False):
        executor = IRExecutor(ir, planned=planned)
        for x in (whole[:4], whole[4:], whole[4:].clone()):
            assert torch.equal(executor.execute((x,))[0], model(x))


def test_what_is_counted_through_has_the_strides_of_the_trace() -> None:
    model = Does(lambda x, y: torch.as_strided(x * 2, (3,), (1,)) + y)
    x, y = torch.arange(12.0).view(3, 4), torch.ones(6)
    ir = extract_ir(model, (x, y[:3]), strict=False)
    assert torch.equal(execute_ir(ir, (x, y[::2]))[0], model(x, y[:3]))
    with pytest.raises(ExecutionError, match=r"'args_0': found strides \[1, 3\], but the IR was traced with \[4, 1\]"):
        execute_ir(ir, (x.view(4, 3).t(), y[:3]))
    model, gaps = Does(lambda x: torch.as_strided(x, (4,), (1,)) * 2), x[:, :2]
    assert verify_ir_with_state_dict(extract_ir(model, (gaps,), strict=False), {}, model, (gaps,))[0]


def test_what_is_counted_through_is_a_tensor_by_itself() -> None:
    whole, x = torch.arange(12.0), torch.ones(4)
    with pytest.raises(ConversionError, match=r"modules.py:\d+\) counts through memory of which 'held' is a part"):
        extract_ir(Holds(whole[:2], buffer=True), (x,), strict=False)
    ir = extract_ir(Holds(whole[::2], buffer=True), (x,), strict=False)
    for held in (whole[::2], torch.cat([x, whole])[4::2]):
        assert torch.equal(execute_ir(ir, (x,), {"held": held})[0], whole[:4])
    with pytest.raises(ExecutionError, match=r"weight 'b_held': found strides \[1\], .* traced with \[2\]"):
        execute_ir(ir, (x,), {"held": whole[:6]})


def test_a_cnn_on_channels_last_is_planned_as_it_was_traced() -> None:
    """Whatever order the tensors come in, convolutions take the way that they took in the trace, bit for bit."""
    first = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)
    model = (
        nn.Sequential(*first, nn.Conv2d(8, 64, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        .eval()
        .to(memory_format=torch.channels_last)
    )
    x = torch.randn(2, 3, 50, 50).to(memory_format=torch.channels_last)
    ir = extract_ir(model, (x,), strict=False)
    rows = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    for given, weights in ((x, model.state_dict()), (x.contiguous(), rows)):
        planned, plain = IRExecutor(ir, weights), IRExecutor(ir, weights, planned=False)
        assert torch.equal(planned.execute((given,))[0], plain.execute((given,))[0])
        assert planned.not_planned == ""
        assert torch.equal(planned.execute((given,))[0], model(x))


def test_a_save_leaves_the_constants_of_other_files(tmp_path: Path) -> None:
    saved = {name: torch.full((4,), float(at)) for at, name in enumerate(("m.json", "m.json.zst", "m[1].json", "m"))}
    for name, held in saved.items():
        extract_ir(Holds(held, buffer=False), (X,), strict=False).save(tmp_path / name, threshold=1)
    for name, held in saved.items():
        assert torch.equal(IR.load(tmp_path / name).constants["held"], held)


def test_constants_that_are_conjugated_are_saved(tmp_path: Path) -> None:
    held = torch.randn(4, dtype=torch.complex64).conj()
    extract_ir(Holds(held, buffer=False), (X,), strict=False).save(tmp_path / "ir.json", threshold=0)
    assert torch.equal(IR.load(tmp_path / "ir.json").constants["held"], held.resolve_conj())


def test_named_tuples_go_in_and_come_out() -> None:
    model = Does(lambda pair: Pair(pair.left + pair.right, pair.left))
    ir = extract_ir(model, (Pair(X, X),), strict=False)
    assert torch.equal(execute_ir(ir, (Pair(X, X),), {})[0], X + X)
    ok, report = verify_ir_with_state_dict(ir, {}, model, (Pair(X, X),))
    assert ok, report


def test_a_number_that_json_has_not_is_an_argument(tmp_path: Path) -> None:
    for top in (float("inf"), 2**80):
        ir = extract_ir(Does(lambda x, top: (x.clamp(max=float(top)), top)), (X, top), strict=False)
        ir.save(tmp_path / "ir.json")
        assert torch.equal(execute_ir(IR.load(tmp_path / "ir.json"), (X, top), {})[0], X)


def test_a_nan_is_no_other_number() -> None:
    ir = extract_ir(Does(lambda x: (x + 1, 3.0)), (X,), strict=False)
    ok, report = verify_ir_with_state_dict(ir, {}, Does(lambda x: (x + 1, float("nan"))), (X,))
    assert not ok
    assert report.error_message == "1: the model gives nan, the IR the constant 3.0"


def test_sizes_as_results_are_refused() -> None:
    shapes = (({0: Dim("n")},),)
    with pytest.raises(ConversionError, match="is a number that differs from run to run"):
        extract_ir(Does(lambda x: (x + 1, x.shape[0] * 2)), (X,), strict=False, dynamic_shapes=shapes)


def test_layers_are_not_stamped_with_named_dims() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    with pytest.warns(UserWarning, match="whole: equal layers are traced once where every size is a number"):
        ir = extract_ir(model, (X,), strict=False, dynamic_shapes=({0: Dim("n")},), stamp=True)
    assert ir.graph.dims.keys() == {"n"}


def test_the_larger_of_two_sizes_is_an_expression() -> None:
    shapes = (({0: Dim("h", min=4)}, {0: Dim("g", min=4)}),)
    model = Does(lambda x, y: torch.zeros(max(x.shape[0], y.shape[0])))
    ir = extract_ir(model, (torch.zeros(6), torch.zeros(5)), strict=False, dynamic_shapes=shapes)
    assert execute_ir(ir, (torch.zeros(7), torch.zeros(9)), {})[0].shape == (9,)


def test_all_that_is_wrong_with_inputs_by_name_is_in_one_message() -> None:
    ir = extract_ir(Does(lambda x, y: x + y), (X, X), strict=False)
    first, second = (meta.name for meta in ir.graph_inputs)
    with pytest.raises(ExecutionError) as caught:
        execute_ir(ir, {first: X.double(), "other": X}, {})
    message = str(caught.value)
    assert f"Weight/input '{second}' not found in registry for node 'add'." in message
    assert "'other'" in message
    assert "float64" in message


def test_outputs_of_the_reference_are_the_callers_own() -> None:
    class Gives(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("held", torch.arange(4.0))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.held, x + 1

    weights = Gives().state_dict()
    held, _ = IRExecutor(extract_ir(Gives(), (X,), strict=False), weights, planned=False).execute((X,))
    held.fill_(9)
    assert torch.equal(weights["held"], torch.arange(4.0))


def test_a_model_that_cannot_be_copied_is_refused_in_words() -> None:
    model = Does(lambda x: x + 1)
    model.history = torch.ones(2, requires_grad=True) * 2  # as weight_norm leaves it; torch's deepcopy refuses it
    ir = extract_ir(Does(lambda x: x + 1), (X,), strict=False)
    assert verify_ir_with_state_dict(ir, {}, model, (X,))[0]
    model.part = nn.Linear(2, 2)
    model.part.source = (number for number in range(3))
    with pytest.raises(ExecutionError, match=r"Does cannot be copied, .* its attribute 'part.source', a generator"):
        verify_ir_with_state_dict(ir, {}, model, (X,))


def test_a_module_in_several_places_is_counted_once() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)
            self.b = nn.Sequential(self.a, nn.BatchNorm1d(4))

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x))

    model = Shared().eval()
    extracted = extract_ir(model, (X,), strict=False)
    for ir in (
        extracted,
        IR.from_dict(extracted.to_dict()),
        convert_exported_program(torch.export.export(model, (X,))),
    ):
        assert summary(ir)["total_parameters"] == sum(tensor.numel() for tensor in model.state_dict().values()) - 20
        assert len(ir.weights) == len(set(ir.weight_name_mapping.values())) == 9  # with both names of two
        state = model.state_dict()
        for gone in ("a", "b.0"):
            weights = {name: tensor for name, tensor in state.items() if not name.startswith(f"{gone}.")}
            assert torch.equal(execute_ir(ir, (X,), weights)[0], model(X))
    with pytest.raises(ExecutionError, match=r"the model has it as 'b\.0\.bias' too, and the two tensors"):
        execute_ir(extracted, (X,), {**state, "b.0.bias": torch.zeros(4)})


def asserts(x: Tensor) -> Tensor:
    torch._assert_async(x.sum() > 0, "found none")
    return x.to(torch.float64) * 2


@pytest.mark.parametrize("functionalize", [True, False])
def test_what_only_asserts_is_no_node(functionalize: bool) -> None:
    """torch.export puts an `_assert_tensor_metadata` before each change of dtype."""
    ir = extract_ir(Does(asserts), (X,), strict=False, functionalize=functionalize)
    assert [op.kind for op in ir.graph.ops][-2:] == ["aten.to.dtype", "aten.mul.Tensor"]
    assert not [op.kind for op in ir.graph.ops if "assert" in op.kind]


# Arguments at the edges: keys that are no strings, one tensor in two places, tensors that are not dense.


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
