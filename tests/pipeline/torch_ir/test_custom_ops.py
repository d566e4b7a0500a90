"""Operators of the user's own that write to their arguments: dataflow in the IR, and nobody's tensors are written."""

from __future__ import annotations

import copy
import importlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch import library as registry

from pipeline.torch_ir import (
    IR,
    ConversionError,
    ExecutionError,
    IRExecutor,
    execute_ir,
    extract_ir,
    ir_to_mermaid,
    verify_ir_with_state_dict,
)
from pipeline.torch_ir.command_files import summary, summary_text
from tests.pipeline.torch_ir.small_modules import Does
from tests.support.processes import run_forked


@registry.custom_op("onnxline_tests::bump", mutates_args={"x"})
def bump(x: Tensor, by: float) -> None:
    x.add_(by)


@registry.custom_op("onnxline_tests::both", mutates_args={"x", "more"})
def both(x: Tensor, more: list[Tensor], unused: Tensor | None = None) -> Tensor:
    x.add_(1)
    more[1].mul_(2)
    return x.clone()


@both.register_fake
def _(x: Tensor, more: list[Tensor], unused: Tensor | None = None) -> Tensor:
    return torch.empty_like(x)


class Bumps(nn.Module):
    """Into part of a value, into a buffer, into an input, into several at once."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(4))
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        bump(y[:, 1:3], 3.0)
        bump(self.get_buffer("seen"), 1.0)
        bump(x, 1.0)
        rest = both(y, [self.get_buffer("seen"), self.fc(x)])
        return y, rest


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    extract_ir(Bumps(), (torch.zeros(2, 4),), strict=False).save(tmp_path / "ir.json")
    return tmp_path / "ir.json"


@pytest.mark.parametrize("planned", [True, False])
def test_what_an_operator_writes_is_dataflow(saved: Path, planned: bool) -> None:
    model, x = Bumps(), torch.arange(8.0).view(2, 4)
    weights, given = model.state_dict(), x.clone()
    executor = IRExecutor(IR.load(saved), weights, planned=planned)
    outputs = executor.execute((given,))
    assert not executor.not_planned
    assert torch.equal(given, x)
    assert not weights["seen"].any()
    expected = model(x)
    assert [torch.equal(output, other) for output, other in zip(outputs, expected, strict=True)] == [True, True]
    assert torch.equal(executor.updates["b_seen"], weights["seen"])
    assert torch.equal(executor.updates["x"], x)


class Parts(nn.Module):
    """Parts that torch tells by their place in memory; what is written lies in the middle of a plan's arena."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = (x.t() + 0).contiguous()
        bump(y.view(-1)[2:5], 1.0)
        bump(y.transpose(0, 1), 2.0)
        return y, torch.as_strided(y, (2, 2), (1, 1)) * 2


@pytest.mark.parametrize("planned", [True, False])
def test_parts_by_their_place_in_memory(planned: bool) -> None:
    x = torch.arange(40.0)[7:19].view(3, 4)
    executor = IRExecutor(extract_ir(Parts(), (x.clone(),), strict=False), {}, planned=planned)
    outputs = executor.execute((x,))
    assert not executor.not_planned
    assert [output.tolist() for output in outputs] == [output.tolist() for output in Parts()(x)]


def test_parts_of_a_tensor_in_another_order_are_refused() -> None:
    class Transposed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.t() + 0
            bump(y.transpose(0, 1), 1.0)
            return y

    with pytest.raises(ConversionError, match="does not lie row after row"):
        extract_ir(Transposed(), (torch.zeros(3, 4),), strict=False)


def test_an_input_from_the_middle_of_its_memory() -> None:
    class Given(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            bump(x.view(-1)[1:3], 1.0)
            return x * 1

    x = torch.arange(20.0)[5:11]
    ir = extract_ir(Given(), (torch.zeros(6),), strict=False)
    for planned in (True, False):
        (actual,) = IRExecutor(ir, {}, planned=planned).execute((x,))
        assert actual.tolist() == [5, 7, 8, 8, 9, 10]


def test_it_is_verified(saved: Path) -> None:
    model = Bumps()
    ok, report = verify_ir_with_state_dict(IR.load(saved), model.state_dict(), model, (torch.randn(2, 4),))
    assert ok, report


def test_one_that_is_not_imported_is_named(saved: Path) -> None:
    saved.write_text(saved.read_text().replace("onnxline_tests.both", "elsewhere.both"))
    ir = IR.load(saved)
    with pytest.raises(
        ExecutionError, match=r"no operator elsewhere\.both\.default; import the module that defines it"
    ):
        execute_ir(ir, (torch.zeros(2, 4),), Bumps().state_dict())


LATER = """
import sys
import torch
from pipeline.torch_ir import IR, ExecutionError, IRExecutor
ir = IR.load(sys.argv[1])
assert ir.graph.ops[0].kind == "onnxline_later.mix.default"
import later
given = (torch.arange(4.0), torch.ones(4))
for planned in (True, False):
    try:
        print(IRExecutor(ir, planned=planned).execute(given)[0].tolist())
    except ExecutionError as error:
        print(error)
"""

DEFINES = """
import torch
from torch import library as registry
@registry.custom_op("onnxline_later::mix", mutates_args=())
def mix(x: torch.Tensor, parts: list[torch.Tensor], scale: float, bias: torch.Tensor | None = None) -> torch.Tensor:
    return x * scale + parts[0] * 10 - parts[1] - bias
mix.register_fake(lambda x, parts, scale, bias=None: torch.empty_like(x))
"""


def test_one_that_is_imported_after_the_file_was_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file says which tensor is which argument, as nobody can ask a schema when it is read."""
    (tmp_path / "later.py").write_text(DEFINES)
    monkeypatch.syspath_prepend(str(tmp_path))
    mix = importlib.import_module("later").mix
    data = extract_ir(Does(lambda x, y: mix(x, [y, x], 3.0, y)), (torch.ones(4), torch.ones(4)), strict=False).to_dict()
    files = {"ours.json": data, "in_a_row.json": copy.deepcopy(data)}
    del files["in_a_row.json"]["nodes"][0]["call"]  # as pytorch-ir has it
    said = []
    for name, document in files.items():
        (tmp_path / name).write_text(json.dumps(document))
        said.append(run_forked("-c", LATER, tmp_path / name))
    assert said[0].stdout.splitlines() == [str([9.0 + 2 * x for x in range(4)])] * 2, said[0].stderr
    for line in said[1].stdout.splitlines():
        assert line.startswith("node 'mix': onnxline_later.mix.default was not there when the IR was read"), said[1]
    assert execute_ir(IR.load(tmp_path / "in_a_row.json"), (torch.ones(4), torch.ones(4)))[0].tolist() == [11.0] * 4


@registry.custom_op("onnxline_tests::fill", mutates_args={"x"})
def fill(x: Tensor, value: float) -> None:
    x.fill_(value)


@fill.register_fake
def _(x: Tensor, value: float) -> None:
    return None


@registry.custom_op("onnxline_tests::fill_all", mutates_args={"several"})
def fill_all(several: list[Tensor], unused: Tensor | None) -> None:
    for tensor in several:
        tensor.fill_(1)


@registry.custom_op("onnxline_tests::shifted", mutates_args=())
def shifted(x: Tensor, count: int) -> list[Tensor]:
    return [x + at for at in range(count)]


@shifted.register_fake
def _(x: Tensor, count: int) -> list[Tensor]:
    return [torch.empty_like(x) for _ in range(count)]


def fills(x: Tensor) -> Tensor:
    y = x * 2
    fill(y, 2.0)
    return y


def fills_all(x: Tensor) -> Tensor:
    y, z = x * 2, x * 3
    fill_all([y, z], None)
    return y + z


def without_some_results(x: Tensor) -> Tensor:
    mean = x.mean(1, keepdim=True)
    return torch.ops.aten.native_layer_norm_backward(x, x, [4], mean, mean, None, None, [True, False, False])[0]


def branches(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))


@pytest.mark.parametrize("forward", [fills, fills_all, lambda x: sum(shifted(x, 3), x), without_some_results, branches])
def test_every_kind_of_result_has_a_view_that_can_be_changed(
    forward: Callable[[Tensor], Tensor], tmp_path: Path
) -> None:
    """An operator that returns nothing, one with a list, one of whose results some are None, one with bodies."""
    x = torch.arange(8.0).view(2, 4) + 1
    model = Does(forward)
    ir = extract_ir(model, (x,), strict=False)
    assert len(ir.nodes) == len(ir.graph.ops)
    assert ir_to_mermaid(ir) and repr(ir) and summary_text(summary(ir))
    last = replace(ir.nodes[-1], name="last")
    metas = [replace(meta, producer_node="last" if meta.producer_node else None) for meta in ir.graph_outputs]
    ir = replace(ir, nodes=[*ir.nodes[:-1], last], graph_outputs=metas)
    ir.save(tmp_path / "m.json")
    loaded = IR.load(tmp_path / "m.json")
    assert loaded.nodes[-1].name == "last"
    for planned in (True, False):
        (actual,) = IRExecutor(loaded, {}, planned=planned).execute((x,))
        assert torch.equal(actual, forward(x))
