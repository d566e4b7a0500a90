"""Everything is checked first, in one message; nothing of the caller's is written to."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from pipeline.torch_ir import (
    IR,
    ExecutionError,
    IRExecutor,
    WeightLoadError,
    execute_ir,
    extract_ir,
    load_weights,
    load_weights_pt,
    load_weights_safetensors,
    validate_weights_against_ir,
)
from pipeline.torch_ir.engine import MOST_PROGRAMS, Engine
from pipeline.torch_ir.errors import NoWeights
from pipeline.torch_ir.tree import CallSignature
from tests.pipeline.torch_ir.small_modules import BufferVsConstant, Cache, MaskedLinear, Norm, Tied, cache_call

X = torch.arange(4.0).view(1, 4)


def on_meta(kind: Callable[[], nn.Module]) -> IR:
    with torch.device("meta"):
        model = kind()
    with pytest.warns(UserWarning, match="Skipping 1"):
        return extract_ir(model, (X.to("meta"),))


def refusal(ir: IR, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(ExecutionError) as caught:
        execute_ir(ir, *args, **kwargs)
    return str(caught.value)


def refused_with_notes(ir: IR, *args: Any, **kwargs: Any) -> tuple[str, ...]:
    with pytest.raises(ExecutionError) as caught:
        execute_ir(ir, *args, **kwargs)
    return str(caught.value), *caught.value.__notes__


def test_an_absent_tensor_is_said_in_the_words_of_pytorch_ir() -> None:
    ir, state = on_meta(MaskedLinear), MaskedLinear().state_dict()
    mask = "Weight/input 'c_mask' not found in registry for node 'mul'."
    assert refusal(ir, (X,), state) == mask
    bias = "Weight/input 'p_linear_bias' not found in registry for node 'linear'."
    assert refusal(ir, (X,), {"linear.weight": state["linear.weight"]}) == f"{bias}\n{mask}"
    absent = "Weight/input 'x' not found in registry for node 'linear'."
    assert refusal(ir, {}, state, constants={"mask": X[0]}) == absent
    assert refused_with_notes(ir, (), state, constants={"mask": X[0]}) == (
        absent,
        "inputs: Expected 1 inputs, got 0: positional arguments: found tuple of 0, expected tuple of 1; "
        "the graph's own are x",
    )
    ir = replace(ir, signature=CallSignature())
    assert refusal(ir, (), state, constants={"mask": X[0]}) == absent


def test_one_absent_tensor_beside_another_mistake_is_one_line_of_several() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor, *, y: Tensor, n: int) -> Tensor:
            return x * n + y

    ir = extract_ir(Two(), (X,), kwargs={"y": X, "n": 2}, strict=False)
    absent = "Weight/input 'y' not found in registry for node 'add'."
    lacks = "inputs: keyword arguments: without 'y'; expected y, n; the graph's own are x, y"
    assert refused_with_notes(ir, (X,), {}, kwargs={"n": 2}) == (absent, lacks)
    number = "argument n: found 3, but the IR was traced with 2; extract it again"
    assert refusal(ir, (X,), {}, kwargs={"n": 3}).splitlines() == [absent, lacks, number]
    said = refusal(ir, (X,), {}, kwargs={"n": 2, "z": X}).splitlines()
    assert said[0] == absent and "without 'y' and with 'z'" in said[1]
    assert len(refusal(ir, (X.double(),), {}, kwargs={"n": 2}).splitlines()) == 3
    assert "found tuple of 2" in refusal(ir, (X, X), {}, kwargs={"n": 2})
    assert "without 'y', 'n'" in refusal(ir, (X,), {}).splitlines()[1]


def test_every_mismatch_is_in_one_message() -> None:
    ir = on_meta(MaskedLinear)
    weights = {"linear.weight": torch.ones(3, 4), "linear.bias": torch.ones(4, dtype=torch.float16)}
    assert refusal(ir, (X.double(),), weights, constants={"c_mask": torch.ones(5), "maks": X}).splitlines() == [
        "weight 'linear.weight': found float32[3, 4], expected float32[4, 4]",
        "weight 'linear.bias': found float16[4], expected float32[4]",
        "constant 'mask': found float32[5], expected float32[4]",
        "constant 'maks': the IR has no such constant, buffer or weight",
        "input 'x': found float64[1, 4], expected float32[1, 4]",
    ]


def test_what_can_be_matched_is_checked_where_the_nesting_is_wrong() -> None:
    class Nested(nn.Module):
        def forward(self, x: Tensor, y: Tensor, *, more: dict[str, Any]) -> Tensor:
            return x + y + more["a"]["b"] + more["c"]

    batch = torch.export.Dim("batch", min=2, max=9)
    x = torch.ones(3, 4)
    shapes = {"x": {0: batch}, "y": {0: batch}, "more": {"a": {"b": None}, "c": None}}
    kwargs = {"more": {"a": {"b": X}, "c": X}}
    ir = extract_ir(Nested(), (x, x), strict=False, kwargs=kwargs, dynamic_shapes=shapes)
    assert refusal(ir, (x.double(),), {}, kwargs={"more": {"a": {}, "c": X[0]}, "d": 1}).splitlines() == [
        "Weight/input 'y' not found in registry for node 'add'.",
        "Weight/input 'more_a_b' not found in registry for node 'add_1'.",
        "inputs: Expected 2 inputs, got 1: positional arguments: found tuple of 1, expected tuple of 2",
        "inputs: keyword arguments: with 'd', which the trace had not; expected more",
        "inputs: argument more.a: without 'b'; expected b; the graph's own are x, y, more_a_b, more_c",
        "input 'x': found float64[3, 4], expected float32[batch, 4]",
        "input 'more_c': found float32[4], expected float32[1, 4]",
    ]
    said = refusal(ir, (x.double(), x[:2], X), {}, kwargs={"more": 3})
    for part in ("tuple of 3, expected tuple of 2", "more: found int, expected dict of 2", "'y' is [2, 4]", "float64"):
        assert part in said


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("steps", torch.arange(4.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.steps


def test_a_buffer_that_no_checkpoint_has_is_asked_for_by_name() -> None:
    model = Rotary()
    with torch.device("meta"):
        ir = IR.from_dict(extract_ir(Rotary(), (torch.ones(1, 4),)).to_dict())
    said = "'steps' is a non-persistent buffer: no checkpoint has such values"
    absent, hint = refused_with_notes(ir, (X,), model.state_dict())
    assert absent == "Weight/input 'b_steps' not found in registry for node 'mul'."
    assert said in hint and hint.endswith("constants={'steps': tensor}")
    with pytest.raises(NoWeights, match=said):
        execute_ir(ir, (X,))
    constants = {name: tensor.detach() for name, tensor in model.named_parameters()}
    assert refused_with_notes(ir, (X,), constants=constants) == (absent, hint)
    assert torch.equal(execute_ir(ir, (X,), constants={**constants, "steps": model.steps})[0], model(X))


def test_weights_have_to_be_there() -> None:
    ir = on_meta(MaskedLinear)
    with pytest.raises(ValueError, match="Either weights or weights_path"):
        execute_ir(ir, (X,))
    with pytest.raises(ExecutionError, match="Weights not loaded"):
        IRExecutor(ir).execute((X,))
    assert "holds no values" in refusal(ir, (X,), {**MaskedLinear().state_dict(), "linear.bias": X[0].to("meta")})


@pytest.mark.parametrize("old, new, said", [("", "model.", "remove it"), ("linear.", "", "add it")])
def test_a_prefix_is_suggested_and_not_guessed(old: str, new: str, said: str) -> None:
    state = {new + name.removeprefix(old): tensor for name, tensor in MaskedLinear().state_dict().items()}
    absent, hint = refused_with_notes(on_meta(MaskedLinear), (X,), state, constants={"mask": X[0]})
    assert said in hint
    assert absent.count("not found in registry") == 2


def test_constants_go_before_what_the_ir_holds() -> None:
    model = BufferVsConstant()
    ir = extract_ir(model, (X,), strict=False)
    plain = execute_ir(ir, (X,), model.state_dict())[0]
    assert torch.equal(plain, model(X))
    for name in ("offset", "c_offset"):
        other = execute_ir(ir, (X,), model.state_dict(), constants={name: torch.zeros(4)})[0]
        assert torch.equal(other, model.linear(X) * model.scale)


def test_either_name_of_a_tied_weight_does() -> None:
    model, ids = Tied(), torch.tensor([[1, 4]])
    ir = extract_ir(model, (ids,), strict=False)
    for name in ("embed.weight", "head.weight"):
        assert torch.equal(execute_ir(ir, (ids,), {name: model.embed.weight})[0], model(ids))


@pytest.mark.parametrize("planned", [True, False])
def test_a_weight_that_nobody_reads_need_not_be_there(planned: bool) -> None:
    model, ids = Tied(), torch.tensor([[1, 4]])
    model.register_module("unused", torch.nn.Linear(2, 2))
    executor = IRExecutor(extract_ir(model, (ids,), strict=False), Tied().state_dict(), planned=planned)
    executor.execute((ids,))
    assert executor.not_planned == ""


@pytest.mark.parametrize("functionalize", [True, False])
@pytest.mark.parametrize("planned", [True, False])
def test_states_live_in_the_executor(functionalize: bool, planned: bool) -> None:
    model = Cache()
    args, kwargs = cache_call()
    ir = extract_ir(model, args, kwargs=kwargs, strict=False, functionalize=functionalize)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    executor = IRExecutor(ir, state, planned=planned)
    for at in (1, 3):
        given, _ = cache_call(at)
        total, rows = executor.execute(given, kwargs)
        expected = model(*given, **kwargs)
        assert torch.equal(total, expected["sum"])
        assert torch.equal(rows, expected["more"][1])
    assert torch.equal(executor.updates["b_rows"], model.rows)
    assert not state["rows"].any()
    assert ("functionalize=False" in executor.not_planned) == (planned and not functionalize)
    executor.load_weights_from_state_dict(state)
    assert executor.execute(*cache_call(0))[1].count_nonzero() == 3


class Count(nn.Module):
    """Gives back the very buffer that it writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.rows.add_(x.sum(0))
        return self.rows


@pytest.mark.parametrize("functionalize", [True, False])
@pytest.mark.parametrize("planned", [True, False])
def test_states_go_from_size_to_size_and_outputs_are_apart(functionalize: bool, planned: bool) -> None:
    rows = torch.export.Dim("rows", min=2, max=9)
    ir = extract_ir(
        Count(), (torch.ones(3, 2),), strict=False, dynamic_shapes=({0: rows},), functionalize=functionalize
    )
    executor = IRExecutor(ir, {"rows": torch.zeros(2)}, planned=planned)
    for size, expected in ((3, 3.0), (5, 8.0), (3, 11.0)):
        (actual,) = executor.execute((torch.ones(size, 2),))
        assert actual.tolist() == [expected, expected]
        actual.fill_(-1)  # an output is the caller's
    assert executor.execute((torch.ones(2, 2),), constants={"rows": torch.zeros(2)})[0].tolist() == [2.0, 2.0]


def test_programs_of_sizes_long_past_are_dropped_and_their_states_go_on() -> None:
    rows = torch.export.Dim("rows", min=2, max=99)
    ir = extract_ir(Count(), (torch.ones(3, 2),), strict=False, dynamic_shapes=({0: rows},))
    engine, stored = Engine(ir.graph, {}, planned=True), {"b_rows": torch.zeros(2)}
    kept = []
    for size in range(2, 2 + MOST_PROGRAMS + 3):
        (actual,) = engine.run(stored, {"x": torch.ones(size, 2)}, strict_sizes=True).values()
        assert actual.tolist() == [sum(range(2, size + 1))] * 2
        assert engine._program is not None
        kept.append(weakref.ref(engine._program._sequence.latest))  # type: ignore[arg-type]
    gc.collect()
    assert [program() is None for program in kept] == [True] * 3 + [False] * MOST_PROGRAMS


class Placed(nn.Module):
    """Writes the rows at given places, and reads those at others."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(4, 3))

    def forward(self, x: Tensor, at: Tensor, read: Tensor) -> Tensor:
        self.rows.index_copy_(0, at, x)
        return self.rows.gather(0, read)


def inputs_at(at: int, read: int) -> tuple[Tensor, ...]:
    return torch.ones(1, 3), torch.tensor([at]), torch.tensor([[read, 0, 0]])


@pytest.mark.parametrize("functionalize", [True, False])
@pytest.mark.parametrize("planned", [True, False])
def test_an_index_out_of_range_is_the_callers(functionalize: bool, planned: bool) -> None:
    ir = extract_ir(Placed(), inputs_at(0, 0), strict=False, functionalize=functionalize)
    for at, read, said in (
        (9, 0, r"op 'index_copy_?' \(aten\..*, .*test_execute.py:\d+\) failed: .*index 9 is .*from at: int64\[1\]"),
        (0, 9, r"op 'gather' .*failed: .*index 9 is .*out of range in the feed; the op reads it from read: int64"),
    ):
        executor = IRExecutor(ir, Placed().state_dict(), planned=planned)
        with pytest.raises(ExecutionError, match=said):
            executor.execute(inputs_at(at, read))


@pytest.mark.parametrize("functionalize", [True, False])
@pytest.mark.parametrize("planned", [True, False])
def test_states_are_put_back_after_a_run_that_failed(functionalize: bool, planned: bool) -> None:
    ir = extract_ir(Placed(), inputs_at(0, 0), strict=False, functionalize=functionalize)
    executor = IRExecutor(ir, Placed().state_dict(), planned=planned)
    executor.give_states({"b_rows": torch.ones(4, 3)})
    executor.execute(inputs_at(1, 0))
    before = executor.updates["b_rows"]
    executor.updates["b_rows"].fill_(7)
    assert torch.equal(executor.updates["b_rows"], before)
    with pytest.raises(ExecutionError, match="index 9"):
        executor.execute(inputs_at(2, 9))
    if planned and functionalize:  # else op by op on copies: a failed run changes nothing
        for ask in (lambda: executor.updates, lambda: executor.execute(inputs_at(0, 0))):
            with pytest.raises(ExecutionError, match=r"to 'rows', .* as in give_states\({'rows': tensor}\), or load"):
                ask()
    else:
        assert torch.equal(executor.updates["b_rows"], before)
    with pytest.raises(ExecutionError, match=r"state 'rows': found int64.*\nstate 'x': the model .*expected of 'rows'"):
        executor.give_states({"rows": torch.tensor(1), "x": X})
    executor.give_states({"rows": before})
    assert torch.equal(executor.updates["b_rows"], before)
    assert executor.execute(inputs_at(1, 2))[0].tolist() == [[1, 1, 1]]


def test_an_input_that_the_model_writes_to_stays_as_it_is() -> None:
    class Writes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mul_(2).sum()

    x = torch.ones(3)
    for functionalize in (True, False):
        ir = extract_ir(Writes(), (torch.ones(3),), strict=False, functionalize=functionalize)
        executor = IRExecutor(ir, {})
        assert executor.execute((x,))[0] == 6
        assert x.tolist() == [1, 1, 1]
    assert IRExecutor(ir, {}, planned=True).execute((x,))[0] == 6


def test_arguments_nest_as_the_model_takes_them() -> None:
    model = Cache()
    args, kwargs = cache_call()
    ir = extract_ir(model, args, kwargs=kwargs, strict=False)
    names = [meta.name for meta in ir.graph_inputs]
    executor = IRExecutor(ir, model.state_dict())
    first = executor.execute(args, kwargs)[0]
    flat = (args[0], args[1]["x"])
    for given in (args, flat, dict(zip(names, flat, strict=True))):
        assert torch.equal(
            execute_ir(ir, given, model.state_dict(), kwargs=kwargs if given is args else None)[0], first
        )
    wrong = {
        "found 3.0, but the IR was traced with 2.0": (args, {"scale": 3.0}),
        "without 'x' and with 'y'": ((args[0], {"y": args[1]["x"]}), kwargs),
        "found tuple of 1, expected tuple of 2": (args[:1], kwargs),
        "keyword arguments: without 'scale'": (args, {}),
        "the IR has no such input": ({"z": X}, None),
    }
    for said, (inputs, named) in wrong.items():
        with pytest.raises(ExecutionError, match=said):
            executor.execute(inputs, named)


def test_named_dims_are_bound_and_held_to_their_range() -> None:
    batch = torch.export.Dim("batch", min=2, max=9)
    model = nn.Bilinear(4, 3, 2)
    ir = extract_ir(
        model, (torch.randn(3, 4), torch.randn(3, 3)), strict=False, dynamic_shapes=({0: batch}, {0: batch})
    )
    executor = IRExecutor(ir, model.state_dict())
    for size in (2, 5, 2):
        pair = (torch.randn(size, 4), torch.randn(size, 3))
        assert torch.equal(executor.execute(pair)[0], model(*pair))
    with pytest.raises(ExecutionError, match=r"batch = 10; expected 2 \.\. 9"):
        executor.execute((torch.randn(10, 4), torch.randn(10, 3)))
    with pytest.raises(ExecutionError, match=r"'input2' is \[3, 3\]"):
        executor.execute((torch.randn(2, 4), torch.randn(3, 3)))


def test_other_sizes_only_where_they_are_asked_for() -> None:
    model, x = MaskedLinear(), torch.randn(2, 4)
    ir = extract_ir(model, (X,), strict=False)
    assert "found float32[2, 4], expected float32[1, 4]" in refusal(ir, (x,), model.state_dict())
    assert torch.equal(execute_ir(ir, (x,), model.state_dict(), strict_sizes=False)[0], model(x))


def test_planned_runs_are_planned_and_equal_the_reference() -> None:
    model, x = Norm().train(), torch.randn(2, 2, 5, 5)
    ir = extract_ir(model, (x,), strict=False)
    planned, reference = (IRExecutor(ir, model.state_dict(), planned=choice) for choice in (True, False))
    for _ in range(2):
        torch.testing.assert_close(planned.execute((x,)), reference.execute((x,)), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(planned.updates, reference.updates)
    assert planned.not_planned == ""
    assert reference.updates["b_norm_num_batches_tracked"] == 2
    assert model.norm.num_batches_tracked == 0


def test_threads_that_share_an_executor_get_their_own_results() -> None:
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(8)])
    executor = IRExecutor(extract_ir(model, (torch.ones(8, 16),), strict=False), model.state_dict())
    inputs = [torch.full((8, 16), float(thread)) for thread in range(2)]
    expected = [executor.execute((x,))[0] for x in inputs]

    def worker(thread: int) -> list[torch.Tensor]:
        return [executor.execute((inputs[thread],))[0] for _ in range(100)]

    with ThreadPoolExecutor(2) as pool:
        for thread, results in enumerate(pool.map(worker, range(2))):
            assert all(torch.equal(actual, expected[thread]) for actual in results)


def test_weights_of_every_kind_of_file(tmp_path: Path) -> None:
    model = MaskedLinear()
    state = model.state_dict()
    for name in ("w.pt", "w.pth", "w.bin", "odd.name"):
        torch.save(state, tmp_path / name)
    torch.save({"state_dict": state}, tmp_path / "nested.pt")
    save_file(state, tmp_path / "w.safetensors")
    (tmp_path / "w.index.json").write_text('{"weight_map": {"linear.weight": "w.safetensors"}}')
    files = ("w.pt", "w.pth", "w.bin", "nested.pt", "w.safetensors", "w.index.json")
    loaded = [load_weights(tmp_path / name) for name in files]
    loaded += [load_weights_pt(tmp_path / "odd.name"), load_weights_safetensors(str(tmp_path / "w.safetensors"))]
    for entry in loaded:
        torch.testing.assert_close(entry, dict(state), rtol=0, atol=0)
    ir = extract_ir(model, (X,), strict=False)
    assert torch.equal(execute_ir(ir, (X,), weights_path=tmp_path / "w.pt")[0], model(X))
    assert validate_weights_against_ir(state, ir) == []
    assert validate_weights_against_ir({"linear.weight": X}, ir) == [
        "Weight/input 'p_linear_bias' not found in registry for node 'linear'.",
        "weight 'linear.weight': found float32[1, 4], expected float32[4, 4]",
    ]


class Evil:
    def __reduce__(self) -> Any:
        return print, ("code of the file was run",)


def test_files_that_hold_no_weights(tmp_path: Path) -> None:
    torch.save({"w": Evil()}, tmp_path / "evil.pt")
    (tmp_path / "half.safetensors").write_bytes(b"\x10\0\0")
    (tmp_path / "w.onnx").write_bytes(b"")
    for name, said in {
        "evil.pt": "running its code is refused",
        "half.safetensors": "not a whole safetensors file",
        "w.onnx": "expected a folder, .safetensors",
        "none.pt": "Weight file not found",
    }.items():
        with pytest.raises(WeightLoadError, match=said):
            load_weights(tmp_path / name)


def test_a_tensor_that_was_traced_by_place_may_come_by_name() -> None:
    class Takes(nn.Module):
        def forward(self, x: Tensor, y: Tensor, *, z: Tensor) -> Tensor:
            return x - y * z

    x, y, z = torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([3.0])
    ir = extract_ir(Takes(), (x, y), kwargs={"z": z}, strict=False)
    for args, kwargs in (((x, y), {"z": z}), ((x,), {"z": z, "y": y}), ((), {"y": y, "z": z, "x": x})):
        assert execute_ir(ir, args, kwargs=kwargs)[0].tolist() == [-5.0]
    with pytest.raises(ExecutionError, match="with 'y', which the trace had not"):  # the place before it is empty
        execute_ir(ir, (), kwargs={"y": y, "z": z})
