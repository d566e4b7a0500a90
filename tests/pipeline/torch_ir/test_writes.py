"""Models that write: to buffers of two names, by copies that convert, through views, in memory that several share."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from pipeline.torch_ir import (
    IR,
    ConversionError,
    IRExecutor,
    convert_exported_program,
    execute_ir,
    extract_ir,
    verify_ir_with_state_dict,
)
from tests.pipeline.torch_ir.small_modules import Does


class Twice(nn.Module):
    """A counter and a BatchNorm, each under two names; the model is in train mode, so both are written to."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("a", torch.zeros(4))
        self.register_buffer("b", self.a)
        self.first = nn.BatchNorm1d(4)
        self.second = self.first

    def forward(self, x: Tensor) -> Tensor:
        self.get_buffer("a").add_(x[0])
        return self.second(self.first(x)) * self.get_buffer("b")


@pytest.mark.parametrize("functionalize", [True, False])
def test_a_buffer_with_two_names_that_is_written_to(functionalize: bool) -> None:
    x = torch.arange(8.0).view(2, 4)
    with torch.device("meta"):
        ir = extract_ir(Twice(), (x.to("meta"),), functionalize=functionalize)
    model = Twice()
    ok, report = verify_ir_with_state_dict(ir, model.state_dict(), model, (x,))
    assert ok, report
    executor = IRExecutor(ir, model.state_dict())
    model = copy.deepcopy(model)  # it writes to what it was loaded from
    for _ in range(2):
        assert torch.equal(executor.execute((x,))[0], model(x))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    updates = {ir.weight_name_mapping[name]: tensor for name, tensor in executor.updates.items()}
    for name in updates.keys() & buffers.keys():
        torch.testing.assert_close(updates[name], buffers[name])
    assert {name.rpartition(".")[2] for name in updates} >= {"running_mean", "running_var"}


class Keeps(nn.Module):
    """Copies its input into a float buffer of three columns, which lies in a wider one, and reads it as it lies."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(2, 3))
        self.register_buffer("cut", torch.zeros(2, 4)[:, :3])
        self.register_buffer("seen", torch.zeros(2, 3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows, cut, seen = (self.get_buffer(name) for name in ("rows", "cut", "seen"))
        cut.add_(rows.copy_(x))
        with torch.no_grad():
            seen.copy_(x)
        return (rows * 1).view(-1) / 2, cut * 1, (seen * 1).view(-1)


@pytest.mark.parametrize("functionalize", [True, False])
@pytest.mark.parametrize("planned", [True, False])
@pytest.mark.parametrize("x", [torch.arange(6).view(2, 3), torch.randn(3), torch.randn(3, 2).t()], ids=["", "row", "t"])
def test_a_copy_takes_dtype_shape_and_strides_of_its_target(x: Tensor, planned: bool, functionalize: bool) -> None:
    model = Keeps()
    ir = extract_ir(model, (x,), strict=False, functionalize=functionalize)
    executor = IRExecutor(ir, {name: tensor.clone() for name, tensor in model.state_dict().items()}, planned=planned)
    for _ in range(2):
        for ours, wanted in zip(executor.execute((x,)), model(x), strict=True):
            assert ours.dtype == wanted.dtype
            assert torch.equal(ours, wanted)
    assert torch.equal(executor.updates["b_rows"], model.rows)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("variance", torch.ones(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        trained = F.instance_norm(x, self.mean, self.variance, use_input_stats=True)
        return trained, F.instance_norm(x, self.mean, self.variance, use_input_stats=False)


def test_a_norm_that_trains_beside_one_that_does_not() -> None:
    model, x = Normed(), torch.randn(5, 4, 3)
    ir = extract_ir(copy.deepcopy(model).to("meta"), (x.to("meta"),))
    executor = IRExecutor(ir, copy.deepcopy(model.state_dict()))
    for ours, wanted in zip(executor.execute((x,)), model(x), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-6, atol=1e-6)  # a few roundings of float32
    assert executor.not_planned == ""


@pytest.mark.parametrize("norm", [nn.InstanceNorm1d(4), nn.BatchNorm1d(4, track_running_stats=False)])
def test_a_norm_that_keeps_no_statistics_writes_nothing(norm: nn.Module) -> None:
    x = torch.randn(5, 4, 3)
    executor = IRExecutor(extract_ir(norm, (x,), strict=False, functionalize=False), norm.state_dict())
    torch.testing.assert_close(executor.execute((x,))[0], norm(x), rtol=1e-6, atol=1e-6)  # a few roundings of float32
    assert not executor.writes
    assert executor.not_planned == ""


def test_the_op_that_keeps_an_ir_from_a_plan_is_named(tmp_path: Path) -> None:
    """Who loads an IR gave no option: the sentence says how the IR was made."""
    model, x = Normed(), torch.randn(5, 4, 3)
    extract_ir(model, (x,), strict=False, functionalize=False).save(tmp_path / "ir.json")
    executor = IRExecutor(IR.load(tmp_path / "ir.json"), model.state_dict())
    assert executor.not_planned == (
        "aten.instance_norm.default writes to its arguments, and a plan holds values that no op changes; extract_ir "
        "turns writes into values, unless functionalize=False is given"
    )


@pytest.mark.parametrize(
    "view",
    [lambda x: torch.nn.functional.dropout(x, 0.5, training=False), lambda x: torch.einsum("ij->ji", x)],
    ids=["dropout", "einsum"],
)
def test_a_write_reaches_what_is_a_view_by_no_schema(view: Callable[[Tensor], Tensor]) -> None:
    def does(x: Tensor) -> tuple[Tensor, ...]:
        first = x * 2
        before = view(first)
        first.add_(1)
        after = view(before).mul_(3)
        return first * 1, before * 1, after * 1

    x = torch.arange(6.0).view(2, 3)
    for ours, wanted in zip(execute_ir(extract_ir(Does(does), (x,), strict=False), (x,)), does(x), strict=True):
        assert torch.equal(ours, wanted)


def test_a_constant_goes_before_a_state_by_any_name() -> None:
    x = torch.arange(8.0).view(2, 4)
    executor = IRExecutor(extract_ir(Twice(), (x,), strict=False), Twice().state_dict())
    (first,) = executor.execute((x,))
    norms = {"first.running_mean": torch.zeros(4), "second.running_var": torch.ones(4)}
    for name in ("a", "b", "b_a"):
        assert torch.equal(executor.execute((x,), constants={name: torch.zeros(4), **norms})[0], first), name


class Halves(nn.Module):
    """`a` and `b` are views of one tensor; `does` gets them and the input."""

    def __init__(self, does: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        held = torch.arange(6.0)
        self.register_buffer("a", held[:4])
        self.register_buffer("b", held[2:])
        self.does = does

    def forward(self, x: Tensor) -> Tensor:
        return self.does(self.get_buffer("a"), self.get_buffer("b"), x)


class Flat(nn.Module):
    """All parameters are views of one vector, which optimizers make."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 4)
        vector = nn.utils.parameters_to_vector(self.parameters()).detach()
        nn.utils.vector_to_parameters(vector, self.parameters())

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x.long()).mul_(2.0))


def add_without_grad(to: Tensor, x: Tensor) -> Tensor:
    with torch.no_grad():
        return to.add_(x)


@pytest.mark.parametrize("functionalize", [True, False])
@pytest.mark.parametrize(
    "model",
    [Halves(lambda a, b, x: (a + 1).mul_(x) + b), Halves(lambda a, b, x: (x * 2).add_(a) + b), Flat()],
    ids=["of a sum", "read by a write", "flat parameters"],
)
def test_what_was_made_of_shared_memory_may_be_written_to(model: nn.Module, functionalize: bool) -> None:
    x = torch.arange(4.0)
    ir = extract_ir(model, (x,), strict=False, functionalize=functionalize)
    assert torch.equal(execute_ir(ir, (x,), model.state_dict())[0], model(x))


@pytest.mark.parametrize("functionalize", [True, False])
@pytest.mark.parametrize(
    "writes",
    [
        lambda a, b, x: a[1:].add_(x[1:]) * b[0],
        lambda a, b, x: a.chunk(2)[1].add_(x[:2]) * b[:2],
        lambda a, b, x: torch.einsum("i->i", a).add_(x) * b,
        lambda a, b, x: add_without_grad(a, x) * b,
        lambda a, b, x: torch.add(x, 1, out=a) * b,
    ],
    ids=["a slice", "a chunk", "a view that no schema tells", "a body", "out"],
)
def test_a_buffer_that_is_written_to_while_another_is_a_view_of_it(
    writes: Callable[[Tensor, Tensor, Tensor], Tensor], functionalize: bool
) -> None:
    said = r"node 'add_?' \(.*test_writes.py:\d+\) writes to memory that 'a' and 'b' share; expected one tensor"
    with pytest.raises(ConversionError, match=said):
        extract_ir(Halves(writes), (torch.ones(4),), strict=False, functionalize=functionalize)


class KeyAndValue(nn.Module):
    """Two caches in one tensor: one after the other, or side by side."""

    def __init__(self, axis: int) -> None:
        super().__init__()
        key, value = torch.zeros(2, 4, 3).transpose(0, axis).unbind(axis)
        self.register_buffer("key", key)
        self.register_buffer("value", value)

    def forward(self, at: Tensor, x: Tensor) -> Tensor:
        key, value = self.get_buffer("key"), self.get_buffer("value")
        key.index_copy_(0, at, x)
        torch.einsum("ij->ij", value)[1:3].add_(x)
        return key @ value.t()


@pytest.mark.parametrize("functionalize", [True, False])
@pytest.mark.parametrize("axis", [0, 1])
def test_caches_in_one_memory_that_share_no_byte(axis: int, functionalize: bool) -> None:
    model, x = KeyAndValue(axis), torch.ones(1, 3)
    ir = extract_ir(model, (torch.tensor([2]), x), strict=False, functionalize=functionalize)
    assert verify_ir_with_state_dict(ir, model.state_dict(), model, (torch.tensor([2]), x))[0]
    executor, eager = IRExecutor(ir, model.state_dict()), KeyAndValue(axis)
    for at in range(3):
        given = torch.tensor([at]), x + at
        assert torch.equal(executor.execute(given)[0], eager(*given))
    assert all(torch.equal(executor.updates[f"b_{name}"], tensor) for name, tensor in eager.named_buffers())
    assert not any(tensor.any() for tensor in model.buffers())


@pytest.mark.filterwarnings("ignore:No complete tensor found")  # of torch's way to save views
def test_a_saved_program_that_writes_to_shared_memory(tmp_path: Path) -> None:
    model = Halves(lambda a, b, x: a.view(2, 2)[1].add_(x[:2]) * b[:2])
    torch.export.save(torch.export.export(model, (torch.ones(4),), strict=False), tmp_path / "program.pt2")
    with pytest.raises(ConversionError, match="writes to memory that 'a' and 'b' share"):
        convert_exported_program(torch.export.load(tmp_path / "program.pt2"))


class Names(nn.Module):
    """A buffer of two names, which is written to by its second, and a parameter of two names that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.ones(4))
        self.q = self.p
        self.register_buffer("a", torch.zeros(4))
        self.register_buffer("b", self.a)

    def forward(self, x: Tensor) -> Tensor:
        return self.get_buffer("b").add_(x) * 1


def test_weights_have_the_same_names_whether_functionalized_or_not() -> None:
    for functionalize in (True, False):
        ir = extract_ir(Names(), (torch.ones(4),), strict=False, functionalize=functionalize)
        assert list(ir.weight_name_mapping.values()) == ["p", "q", "a"]  # a write to b is one to a
        executor = IRExecutor(ir, Names().state_dict())
        assert [executor.execute((torch.ones(4),))[0].max() for _ in range(2)] == [1, 2]
        assert executor.updates["b_a"].max() == 2


# Writes through views, as a matrix: each kind of view by each kind of write gives what torch gives, or is refused.

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
    assert "test_writes.py:" in str(refused.value)
    eager = Writes({view: LOSE[view]}, WRITES["fill_"], view)
    expected = eager(X)[view]
    actual = IRExecutor(extract_ir(model, (X,), strict=False, functionalize=False), model.state_dict()).execute((X,))
    assert all(torch.equal(output, other) for output, other in zip(actual, expected, strict=True))


def test_a_write_to_an_element_shown_any_number_of_times_is_refused() -> None:
    model = Writes({"expand": lambda b: b[:1, :1].expand(b.shape[0], 6)}, WRITES["fill_"], "")
    with pytest.raises(ConversionError, match=r"a view that shows one element in several places"):
        extract_ir(model, (X,), strict=False, dynamic_shapes=({0: torch.export.Dim("rows")},))


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
