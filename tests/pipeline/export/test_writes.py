"""What forward writes to is an input and an output of the graph: three calls of both give the same."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from torch import nn

from pipeline.config import ExportConfig, ModelConfig, RunConfig
from pipeline.errors import ConfigError, SourceError, Unsupported
from pipeline.export import as_configured, draw_inputs, export_onnx, run_torch
from pipeline.export.build_source import assemble
from pipeline.export.source import Example, TorchSource, with_dynamic_shapes
from pipeline.torch_ir import ExportError, extract_ir

MODEL = RunConfig.from_mapping({"model": {"factory": "net.py:make"}}).model


class Steps(nn.Module):
    """A module of one buffer, `state`, and of a forward from outside."""

    def __init__(
        self, forward: Callable[..., Any], state: torch.Tensor | None = None, *, persistent: bool = True
    ) -> None:
        super().__init__()
        self.steps = forward
        self.table = nn.Embedding(10, 3)
        self.kept: Any = None
        self.plain: Any = [torch.zeros(1, 3)]
        if state is not None:
            self.register_buffer("state", state, persistent=persistent)

    def forward(self, *args: torch.Tensor) -> Any:
        return self.steps(self, *args)


def attend(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.state[:, 1:2].view(1, 3).copy_(x)
    return self.state.softmax(1).sum(1) + x


def slide(self: Any, x: torch.Tensor) -> torch.Tensor:
    whole = torch.cat([self.state, x[:, None]], 1)
    self.state.copy_(whole[:, 1:])
    return whole.sum(1)


def assign(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.state = self.state * 0.5 + x
    return self.state * 2


def count(self: Any, x: torch.Tensor) -> torch.Tensor:
    result = self.table(self.state) + x
    self.state += 1
    return result


def convert(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.state.copy_(self.state.float() + x)
    return self.state.float() * 2


def remember(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.state.logical_or_(x > 0)
    return torch.where(self.state, x, -x)


def source_of(module: nn.Module, *args: torch.Tensor, model: ModelConfig = MODEL, **export: Any) -> TorchSource:
    settings = ExportConfig(**export)
    example = Example(args, {})
    return as_configured(assemble(module, example, with_dynamic_shapes(model, settings)), settings)


@pytest.mark.parametrize(
    ("forward", "state"),
    [
        (attend, torch.zeros(1, 4, 3)),
        (slide, torch.zeros(1, 2, 3)),
        (assign, torch.zeros(1, 3)),
        (count, torch.tensor(0)),
        (convert, torch.zeros(1, 3, dtype=torch.float16)),
        (remember, torch.zeros(1, 3, dtype=torch.bool)),
    ],
)
@pytest.mark.parametrize("persistent", [True, False])
def test_a_written_buffer_goes_in_and_out(forward: Any, state: torch.Tensor, persistent: bool, tmp_path: Any) -> None:
    module = Steps(forward, state, persistent=persistent)
    source = source_of(module, torch.randn(1, 3))
    assert [spec.name for spec in source.inputs][1:] == ["state"]
    assert source.outputs == ("output", "state_out")
    assert torch.equal(module.get_buffer("state"), state)  # neither the call nor the trace leaves its writes
    export_onnx(source, ExportConfig(), tmp_path / "m.onnx")
    session = ort.InferenceSession(tmp_path / "m.onnx")
    eager, held = copy.deepcopy(module), state.numpy()
    for step in range(3):
        x = torch.randn(1, 3, generator=torch.Generator().manual_seed(step))
        expected = eager(x)
        found, held = session.run(None, {source.inputs[0].name: x.numpy(), "state": held})
        np.testing.assert_allclose(found, expected.detach().numpy(), atol=2e-3 if forward is convert else 1e-5)


def test_the_first_draw_has_the_first_state_and_others_are_drawn() -> None:
    source = source_of(Steps(slide, torch.full((1, 2, 3), 4.0)), torch.randn(1, 3))
    first, again = (run_torch(source, draw_inputs(source.inputs, {}, 5)) for _ in range(2))
    assert all(np.array_equal(first[name], again[name]) for name in first)
    (spec,) = source.inputs[1:]
    assert spec.first is not None
    assert (spec.first == 4).all()
    assert 0 < spec.low < spec.high  # what is positive, such as a variance, stays so


def test_a_buffer_under_two_names_is_one_state() -> None:
    inner = Steps(slide, torch.zeros(1, 2, 3))
    source = source_of(nn.Sequential(inner, inner), torch.randn(1, 3))
    assert [(value.before, value.after) for value in source.lifted] == [("0.state", "0.state_out")]


def test_a_change_that_torch_export_loses_is_refused() -> None:
    inner = Steps(assign, torch.zeros(1, 3))
    with pytest.raises(Unsupported, match=r"changes the buffer '0\.state', and torch\.export loses the change"):
        source_of(nn.Sequential(inner, inner), torch.randn(1, 3))


def point_elsewhere(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.state.data = self.state + x
    return self.state * 2


def point_weight_elsewhere(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.table.weight.data = self.table.weight * 0.5
    return x + self.table.weight.sum()


def point_input_elsewhere(self: Any, x: torch.Tensor) -> torch.Tensor:
    x.data = x * 2
    return x + self.state


def write_through_data(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.state.data.add_(x)
    return self.state * 2


def replace_in_table(self: Any, x: torch.Tensor) -> torch.Tensor:
    self._buffers["state"] = self.state + x
    return self.state * 2


FOREIGN = nn.Parameter(torch.ones(1, 3))


def write_to_global(self: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        FOREIGN.add_(1)
    return x * FOREIGN


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (point_elsewhere, r"points the buffer 'state' at other memory .*; write .* as in self\.state\.copy_\(value\)"),
        (point_weight_elsewhere, r"points the parameter 'table\.weight' at other memory .*; compute the new value"),
        (point_input_elsewhere, r"points the input 'args\.0' at other memory .* or write in place"),
        (write_through_data, r"does not see it: through `\.data` or `set_`"),
        (replace_in_table, r"as where forward sets self\._buffers.*as in self\.state\.copy_\(value\)"),
        (write_to_global, r"to a tensor of a closure or a global name; make it a buffer"),
    ],
)
def test_a_write_that_torch_export_does_not_see_is_named(forward: Any, message: str) -> None:
    module = Steps(forward, torch.zeros(1, 3))
    weight = module.table.weight.data_ptr(), module.table.weight.clone()
    with pytest.raises((Unsupported, SourceError), match=message):
        export_onnx(source_of(module, torch.randn(1, 3)), ExportConfig())
    assert module.table.weight.data_ptr() == weight[0]
    assert torch.equal(module.table.weight, weight[1])


class BufferAndInput(nn.Module):
    """Its buffer and its input have one name."""

    def __init__(self, *, by_table: bool) -> None:
        super().__init__()
        self.register_buffer("x", torch.zeros(1, 3))
        self.by_table = by_table

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.by_table:
            self._buffers["x"] = self.x + x
        else:
            self.x = self.x + x
        return self.x * 2


def test_a_buffer_with_the_name_of_an_input() -> None:
    with pytest.raises(Unsupported, match=r"changes the buffer 'x', and torch\.export loses the change"):
        source_of(BufferAndInput(by_table=True), torch.randn(1, 3))
    source = source_of(BufferAndInput(by_table=False), torch.randn(1, 3))
    assert [spec.name for spec in source.inputs] == ["x", "x_2"]
    assert "(x as x_2 → x_2_out)" in source.notes[-1]


def test_a_tensor_on_the_cpu_in_a_module_on_meta() -> None:
    def scale(self: Any, x: torch.Tensor) -> torch.Tensor:
        return x * FOREIGN

    with pytest.raises(ExportError, match="forward computes with a tensor that lies on the CPU, while the module"):
        extract_ir(Steps(scale).to("meta"), (torch.empty(1, 3, device="meta"),))


def keep_in_list(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.kept = [self.kept[0] + x] if self.kept else [x]
    return self.kept[0] * 2


def keep_growing(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.kept = x if self.kept is None else torch.cat([self.kept, x], 1)
    return self.kept.sum(1)


def show(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.kept = x.softmax(-1) + torch.rand_like(x) * 0
    return self.kept * 2


def make_once(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.kept = self.kept or {}
    if 3 not in self.kept:
        self.kept[3] = torch.arange(3.0)
    return x + self.kept[3]


@pytest.mark.parametrize(
    ("forward", "carries"), [(keep_in_list, True), (keep_growing, True), (show, False), (make_once, False)]
)
def test_tensors_in_attributes_are_put_back_and_noted_where_the_next_call_reads_them(
    forward: Any, carries: bool, tmp_path: Any
) -> None:
    module = Steps(forward)
    x = torch.randn(1, 3)
    source = source_of(module, x)
    exported = export_onnx(source, ExportConfig(), tmp_path / "m.onnx")
    assert module.kept is None
    assert any("forward keeps tensors in kept for the next call" in note for note in exported.notes) == carries
    found = ort.InferenceSession(tmp_path / "m.onnx").run(None, {source.inputs[0].name: x.numpy()})
    np.testing.assert_allclose(found[0], forward(module, x), atol=1e-6)  # what the first call computes


def count_in_list(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.plain[1][0] += 1
    return x * self.plain[1][0]


def turn(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.kept, sign = "down", 1 if self.kept is None else -1
    return x * sign


def remember_the_kind(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.kept = str(x.dtype)
    return x * 2


@pytest.mark.parametrize(("forward", "named"), [(count_in_list, "plain"), (turn, "kept"), (remember_the_kind, None)])
def test_texts_and_containers_are_noted_where_the_next_call_reads_them(forward: Any, named: str | None) -> None:
    module = Steps(forward)
    module.plain = (*module.plain, [1])
    source = source_of(module, torch.randn(1, 3))
    noted = [note.partition(":")[0] for note in source.notes if "a value of Python" in note]
    assert noted == ([f"forward changes {named}, a value of Python"] if named else [])
    assert module.kept is None and module.plain[1] == [1]


def write_weight(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x + self.table.weight.mul_(0.5).sum()


def write_attribute(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.plain[0].add_(x) * 2


def grow(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.state = torch.cat([self.state, x], 1)
    return self.state.sum(1)


def write_view(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.state.add_(x)
    return self.whole.sum(0)


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (write_weight, r"writes to the parameter 'table\.weight', and the next call reads the new value"),
        (write_attribute, "writes to a tensor in the attribute 'plain', which is no buffer"),
        (grow, "changes the shape of the buffer 'state'"),
        (write_view, "the buffer 'state', which shares its memory with 'whole'"),
    ],
)
def test_writes_that_no_graph_has_are_refused(forward: Any, message: str) -> None:
    whole = torch.zeros(2, 1, 3)
    module = Steps(forward, whole[0])
    module.register_buffer("whole", whole if forward is write_view else None)
    with pytest.raises(Unsupported, match=message):
        source_of(module, torch.randn(1, 3))


def test_names_that_are_taken() -> None:
    source = source_of(
        Steps(lambda self, state: {"state_out": assign(self, state)}, torch.zeros(1, 3)), torch.randn(1, 3)
    )
    names = [spec.name for spec in source.inputs], source.outputs
    assert len({*names[0], *names[1]}) == 4


@pytest.mark.parametrize(
    ("forward", "outputs"),
    [
        (lambda self, cache, x: cache.view(-1)[1:3].mul_(x) + cache.sum(), ("output", "args.0_out")),
        (lambda self, cache, x: {"args.0": cache.add_(x[0])}, ("args.0_out",)),  # it is returned under this very name
        (lambda self, cache, x: cache.add_(x[0]), ("output", "args.0_out")),
    ],
)
def test_a_written_input_comes_out(forward: Any, outputs: tuple[str, ...], assert_agrees: Any) -> None:
    source = source_of(Steps(forward), torch.randn(2, 3), torch.randn(2))
    assert source.outputs == outputs
    assert_agrees(export_onnx(source, ExportConfig()))


def norm(self: Any, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.batch_norm(x, self.state, torch.ones(3), training=True)


@pytest.mark.parametrize("forward", [lambda self, x: x * 2 + 0 * self.state.copy_(x[0]), norm])
def test_what_no_output_depends_on_is_left_alone(forward: Any, assert_agrees: Any) -> None:
    exported = export_onnx(source_of(Steps(forward, torch.zeros(3)), torch.randn(4, 3)), ExportConfig())
    assert not exported.source.lifted
    assert any("forward writes to state, on which no output depends" in note for note in exported.notes)
    assert_agrees(exported)


def move(self: Any, x: torch.Tensor) -> torch.Tensor:
    """CTRL moves its table of positions to the device of the input, where it is already."""
    self.state = self.state.to(device=x.device, dtype=x.dtype)
    return self.state + x


def test_a_buffer_that_gets_its_own_value_is_a_weight(assert_agrees: Any) -> None:
    exported = export_onnx(source_of(Steps(move, torch.rand(3)), torch.randn(4, 3)), ExportConfig())
    assert not exported.source.lifted
    assert_agrees(exported)


def test_refuse_names_the_buffer() -> None:
    with pytest.raises(
        Unsupported, match=r"forward writes to the buffer 'state', and export\.written_buffers is refuse"
    ):
        source_of(Steps(assign, torch.zeros(1, 3)), torch.randn(1, 3), written_buffers="refuse")


def test_the_range_of_a_lifted_buffer() -> None:
    model = RunConfig.from_mapping({"model": {"factory": "n.py:f", "inputs": {"state": {"range": [2, 3]}}}}).model
    source = source_of(Steps(assign, torch.zeros(1, 3)), torch.randn(1, 3), model=model)
    assert (source.inputs[1].low, source.inputs[1].high) == (2, 3)
    with pytest.raises(ConfigError, match="'state' is a buffer that no output depends on"):
        source_of(Steps(lambda self, x: x + self.state, torch.zeros(1, 3)), torch.randn(1, 3), model=model)


def test_dims_by_the_new_name_of_an_input() -> None:
    names: Any = {"input_names": ("image",), "dynamic_shapes": {"image": {0: "batch"}}}
    source = source_of(nn.Linear(4, 4), torch.randn(2, 4), **names)
    assert [(spec.name, spec.shape) for spec in source.inputs] == [("image", ("batch", 4))]


@pytest.mark.parametrize("input_names", [None, ("image",)])
def test_an_unknown_name_is_that_of_the_key_which_has_it(input_names: tuple[str, ...] | None) -> None:
    names: Any = {"input_names": input_names, "dynamic_shapes": {"imag": {0: "batch"}}}
    hint = "; did you mean 'image'?" if input_names else "; it has: input"
    with pytest.raises(SourceError, match=re.escape(f"export.dynamic_shapes: the example has no tensor 'imag'{hint}")):
        source_of(nn.Linear(4, 4), torch.randn(2, 4), **names)
    declared = RunConfig.from_mapping({"model": {"factory": "n.py:f", "inputs": {"imag": {"range": [2, 3]}}}}).model
    with pytest.raises(SourceError, match=r"model\.inputs: the example has no tensor 'imag'"):
        source_of(nn.Linear(4, 4), torch.randn(2, 4), model=declared, **names)


def test_names_that_a_user_may_write_are_listed() -> None:
    names: Any = {"input_names": ("image",), "dynamic_shapes": {"tokens": {0: "batch"}}}
    with pytest.raises(SourceError, match=r"'tokens'; it has: input, under export\.input_names: image$"):
        source_of(nn.Linear(4, 4), torch.randn(2, 4), **names)


class Counts(nn.Module):
    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        self.calls += 1
        return x * scale + self.calls + float(np.random.rand())


def test_numbers_of_python_are_noted_and_restored() -> None:
    module = Counts()
    source = assemble(module, Example((torch.randn(2), 2.0), {}), MODEL)
    assert module.calls == 0
    assert any("scale=2.0" in note for note in source.notes)
    assert any("forward changes calls, a value of Python" in note for note in source.notes)
    assert any("random generator" in note for note in source.notes)


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: (torch._check_tensor_all(x < 1e9, lambda: "large"), x * 2)[1],
        lambda self, x: (torch._assert_async(~x.isnan().any()), x * 2)[1],
        lambda self, x: (torch._check((x.abs().sum() >= 0).item()), x * 2)[1],
    ],
)
def test_checks_of_values_are_left_out_with_a_note(forward: Any, assert_agrees: Any) -> None:
    exported = export_onnx(source_of(Steps(forward), torch.randn(2, 3)), ExportConfig())
    assert any("leaves out 1 check of values" in note and "test_writes.py" in note for note in exported.notes)
    assert_agrees(exported)


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: x.squeeze(1) * 2,
        lambda self, x: x[:, :1].squeeze((1, 2)) * 2,
        lambda self, x: x[:, :1].squeeze(-2).squeeze(-1) * 2,
        lambda self, x: x.sum().squeeze(0) + x[:1].squeeze(),
    ],
)
def test_squeeze_leaves_wide_dims(forward: Any, assert_agrees: Any) -> None:
    assert_agrees(export_onnx(source_of(Steps(forward), torch.randn(2, 3, 4)), ExportConfig()))
