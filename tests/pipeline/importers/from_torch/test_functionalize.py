"""What functionalizing leaves as it is, and what it has to change: the kinds of op with and without a write beside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch.nn import functional as F  # noqa: N812

from pipeline.errors import Unsupported
from pipeline.importers.from_torch import from_torch, functionalize_program
from pipeline.ir import Graph, to_text


class Beside(nn.Module):
    """`does` of `layer`, and beside it a write to a buffer, or none."""

    def __init__(self, does: Callable[[Any, Tensor], Any], layer: nn.Module | None, *, writes: bool) -> None:
        super().__init__()
        self.does, self.layer, self.writes = does, layer, writes
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Any:
        if self.writes:
            self.get_buffer("calls").add_(1)
        return self.does(self.layer, x)


def ops_of(does: Callable[[Any, Tensor], Any], layer: nn.Module | None, x: Tensor, *, writes: bool) -> list[str]:
    """The op lines, without vids and places; the write itself left out."""
    module = Beside(does, layer, writes=writes).eval()
    graph = from_torch(functionalize_program(torch.export.export(module, (x,), strict=False)))
    lines = [line for line in to_text(graph).splitlines() if '"aten.' in line and "strided" not in line]
    calls = [line.partition(" = ")[2].partition(" @")[0] for line in lines]
    return [line.partition("(")[0] + line.partition(")")[2] for line in calls][int(writes) :]


IMAGE, ROWS = torch.randn(1, 4, 8, 8), torch.randn(2, 4, 8)


@pytest.mark.parametrize(
    ("layer", "x"),
    [
        (nn.BatchNorm2d(4, momentum=0.3, eps=1e-3), IMAGE),
        (nn.BatchNorm2d(4, affine=False), IMAGE),
        (nn.InstanceNorm2d(4), IMAGE),
        (nn.GroupNorm(2, 4), IMAGE),
        (nn.Conv2d(4, 4, 3, padding="same"), IMAGE),
        (nn.LayerNorm(8), ROWS),
        (nn.RMSNorm(8), ROWS),
        (nn.Linear(8, 8), ROWS),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_operators_stay_beside_a_write(layer: nn.Module, x: Tensor) -> None:
    def does(layer: nn.Module, x: Tensor) -> Any:
        return layer(x)

    assert ops_of(does, layer, x, writes=True) == ops_of(does, layer, x, writes=False)


def test_attention_stays_beside_a_write() -> None:
    def attend(_: Any, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x[None], x[None], x[None], is_causal=True)

    assert ops_of(attend, None, ROWS, writes=True) == ops_of(attend, None, ROWS, writes=False)


def mapped(x: Tensor) -> Tensor:
    return torch.vmap(lambda row: row.sin() * torch.vmap(torch.cos)(row))(x)


def kinds(graph: Graph) -> list[str]:
    return [op.kind for op in graph.ops]


def test_mapped_functions_become_calls_on_batches() -> None:
    module = Beside(lambda _, x: mapped(x), None, writes=False)
    program = torch.export.export(module, (torch.randn(2, 3),), strict=False)
    graph = from_torch(functionalize_program(program))
    assert kinds(graph) == ["aten.sin.default", "aten.cos.default", "aten.mul.Tensor"]
    with pytest.raises(Unsupported, match=r"torch\.vmap .* functionalized"):
        from_torch(program)


def test_a_generic_associative_scan_is_its_steps() -> None:
    def does(_: Any, x: Tensor) -> Tensor:
        actual = associative_scan(torch.add, x, dim=0, combine_mode="generic")
        assert isinstance(actual, Tensor)
        return actual

    program = torch.export.export(Beside(does, None, writes=False), (torch.ones(5, 3),), strict=False)
    assert kinds(from_torch(functionalize_program(program))).count("aten.add.Tensor") == 3


@pytest.mark.parametrize("norm", [F.batch_norm, F.instance_norm])
def test_running_statistics_are_written_though_no_schema_says_so(norm: Callable[..., Tensor]) -> None:
    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(4))
            self.register_buffer("variance", torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return norm(x, self.mean, self.variance, None, None, True)

    program = torch.export.export(Running(), (torch.randn(2, 4, 8),), strict=False)
    assert len(from_torch(functionalize_program(program)).updates) == 2
