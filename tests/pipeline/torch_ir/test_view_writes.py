"""Writes through views, as a matrix: each kind of view by each kind of write gives what torch gives, or is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn

from pipeline.torch_ir import ConversionError, IRExecutor, extract_ir

View = Callable[[Tensor], Tensor]
Write = Callable[[Tensor], object]

VIEWS: Mapping[str, View] = {
    "itself": lambda b: b,
    "as_strided": lambda b: b.as_strided((2, 3), (6, 2)),
    "as_strided from the middle": lambda b: b.as_strided((2, 2), (6, 1), 7),
    "diagonal": lambda b: b.diagonal(),
    "diagonal above": lambda b: b.diagonal(1),
    "diagonal below, of a transposed slice": lambda b: b.T[1:].diagonal(-1),
    "unfold that covers all": lambda b: b.unfold(1, 2, 2),
    "unfold by one": lambda b: b.unfold(1, 1, 1),
    "T": lambda b: b.T,
    "mT": lambda b: b.mT,
    "adjoint": lambda b: b.adjoint(),
    "split_with_sizes": lambda b: b.split_with_sizes([1, 3, 2], 1)[1],
    "tensor_split": lambda b: b.tensor_split(4, 1)[1],
    "chunk": lambda b: b.chunk(4, 0)[1],
    "unsafe_split": lambda b: b.unsafe_split(3, 1)[1],
    "unsafe_split_with_sizes": lambda b: b.unsafe_split_with_sizes([1, 3], 0)[1],
    "unsafe_chunk": lambda b: b.unsafe_chunk(2, 1)[0],
    "unbind": lambda b: b.unbind(1)[2],
    "narrow, transposed": lambda b: b.narrow(1, 1, 2).T,
    "movedim": lambda b: b.movedim(0, 1),
    "select": lambda b: b.select(-1, -1),
    "slice with a step": lambda b: b[1:3, ::2],
    "slices of slices": lambda b: b[1:][:, 2:],
    "view": lambda b: b.view(2, 2, 6),
    "reshape": lambda b: b.reshape(3, 8),
    "unflatten": lambda b: b.unflatten(1, (2, 3)),
    "squeeze": lambda b: b.view(1, 4, 1, 6).squeeze((0, 2)),
    "expand that repeats nothing": lambda b: b.expand(4, 6),
    "view of another dtype": lambda b: b.view(torch.int32),
    "view_as_complex, then real": lambda b: torch.view_as_complex(b.view(4, 3, 2)).real,
    "view_as_complex, then imag": lambda b: torch.view_as_complex(b.view(4, 3, 2)).imag,
    "view_as_real": lambda b: torch.view_as_real(torch.view_as_complex(b.view(4, 3, 2))),
    "einsum": lambda b: torch.einsum("ij->ji", b),
    "detach": lambda b: b.detach(),
    "a dropout at rest": lambda b: nn.functional.dropout(b, 0.5, training=False),
}

LOSE: Mapping[str, View] = {
    "unfold with gaps": lambda b: b.unfold(1, 2, 3),
    "unfold that leaves a rest": lambda b: b.unfold(1, 4, 4),
    "a slice of unfold": lambda b: b.unfold(1, 2, 3)[:, 0],
    "unfold twice": lambda b: b.unfold(1, 2, 2).unfold(0, 2, 3),
    "unfold that overlaps": lambda b: b.unfold(1, 3, 1),
    "expand": lambda b: b[:1].expand(4, 6),
    "a row of expand": lambda b: b[:1].expand(4, 6)[0],
    "as_strided over itself": lambda b: b.as_strided((3, 2), (1, 1)),
}

WRITES: Mapping[str, Write] = {
    "fill_": lambda v: v.fill_(3),
    "mul_": lambda v: v.mul_(torch.arange(v.numel()).reshape(v.shape).to(v.dtype)),
    "copy_": lambda v: v.copy_(torch.arange(100, 100 + v.numel()).reshape(v.shape).to(v.dtype)),
    "setitem": lambda v: v.__setitem__(0, 7),
    "masked_fill_": lambda v: v.masked_fill_(v == v, 9),
    "index_copy_": lambda v: v.index_copy_(0, torch.tensor([v.shape[0] - 1]), torch.full_like(v[:1], 4)),
    "out=": lambda v: torch.add(v, 1, out=v),
}


class Writes(nn.Module):
    """Writes through each view of a tensor of its own, and once through one of a buffer."""

    def __init__(self, views: Mapping[str, View], write: Write, of_buffer: str) -> None:
        super().__init__()
        self.views, self.write, self.of_buffer = views, write, of_buffer
        self.register_buffer("buffer", torch.arange(24.0).reshape(4, 6) + 0.5)

    def forward(self, x: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        outcomes = {}
        for name, view in self.views.items():
            base = self.get_buffer("buffer") if name == self.of_buffer else x * 2
            shown = view(base)
            self.write(shown)
            outcomes[name] = base + 0, shown + 0
        return outcomes


X = torch.arange(24.0).reshape(4, 6)


@pytest.mark.parametrize("write", WRITES)
def test_a_write_through_a_view_reaches_its_base(write: str) -> None:
    of_buffer = list(VIEWS)[list(WRITES).index(write) * 3]
    eager, model = (Writes(VIEWS, WRITES[write], of_buffer) for _ in range(2))
    expected = [tensor for pair in eager(X).values() for tensor in pair]
    ir = extract_ir(model, (X,), strict=False)
    for planned in (True, False):
        executor = IRExecutor(ir, model.state_dict(), planned=planned)
        actual = executor.execute((X,))
        wrong = [list(VIEWS)[at // 2] for at in range(len(expected)) if not torch.equal(actual[at], expected[at])]
        assert wrong == []
        assert torch.equal(executor.updates["b_buffer"], eager.get_buffer("buffer"))


@pytest.mark.parametrize("view", LOSE)
def test_a_write_that_functionalization_would_lose_is_refused(view: str) -> None:
    model = Writes({view: LOSE[view]}, WRITES["fill_"], view)
    with pytest.raises(ConversionError, match=r"view that (leaves|shows)") as refused:
        extract_ir(model, (X,), strict=False)
    assert "test_view_writes.py:" in str(refused.value)
    eager = Writes({view: LOSE[view]}, WRITES["fill_"], view)
    expected = eager(X)[view]
    actual = IRExecutor(extract_ir(model, (X,), strict=False, functionalize=False), model.state_dict()).execute((X,))
    assert all(torch.equal(output, other) for output, other in zip(actual, expected, strict=True))


class Resizes(nn.Module):
    def __init__(self, resize: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self.resize = resize
        self.register_buffer("kept", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        self.resize(self.get_buffer("kept"), x)
        return self.get_buffer("kept") * 2


@pytest.mark.parametrize("resize", [lambda b, x: torch.add(x, 1, out=b), lambda b, x: b.resize_(2).copy_(x)])
def test_a_buffer_that_changes_its_size_is_refused(resize: Callable[[Tensor, Tensor], object]) -> None:
    with pytest.raises(ConversionError, match=r"kept"):
        extract_ir(Resizes(resize), (torch.ones(2),), strict=False)
