"""Contexts: what threads share and what they do not, and how a feed reaches its slots."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest
import torch

from pipeline.errors import InternalError, UsageError
from pipeline.ir.graph import TensorSpec
from pipeline.ops import GraphBuilder
from pipeline.planning import FeedEntry
from pipeline.runtime import CompiledProgram, compile_graph
from pipeline.runtime.devices import CPU
from pipeline.runtime.feeding import PointedSlot, SlotPointer, operands
from tests.support.torch_programs import compile_module

LARGE = TensorSpec((128, 256), "float32")
SMALL = TensorSpec((2, 3), "float32")


def sum_and_transpose(spec: TensorSpec) -> CompiledProgram:
    """`x + w` and the transposed `x`, of which a view is made; `w` comes with the feed."""
    builder = GraphBuilder("sum")
    x, w = builder.input("x", spec), builder.param("w", spec)
    (total,) = builder.emit("aten.add.Tensor", [x, w], [("total", spec)])
    turned = TensorSpec(spec.shape[::-1], spec.dtype)
    (view,) = builder.emit("aten.permute.default", [x], [("view", turned)], {"dims": (1, 0)})
    (negative,) = builder.emit("aten.neg.default", [view], [("negative", turned)])
    return compile_graph(builder.build([total, negative]))


@pytest.mark.parametrize("spec", [SMALL, LARGE], ids=["copied", "pointed at"])
def test_each_run_reads_what_it_was_given(spec: TensorSpec) -> None:
    program = sum_and_transpose(spec)
    wide = torch.randn(3, *spec.sizes)
    weights = torch.randn(spec.sizes), torch.nn.Parameter(torch.randn(spec.sizes))
    for run in range(6):
        x = wide[run % 3] if run < 4 else torch.randn(spec.sizes[::-1]).t()  # in the middle of a storage; other strides
        w = weights[run // 3]
        found = program.run({"x": x, "w": w}, copy=run % 2 == 0)
        assert torch.equal(found["total"], x + w)
        assert torch.equal(found["negative"], -x.t())


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "its elements": lambda w: w.mul_(2),
    "its memory": lambda w: w.set_(torch.randn(4, 4)),  # type: ignore[call-overload]
    "its axes": lambda w: w.t_(),
    "its place": lambda w: w.set_(w.untyped_storage(), 4, (4, 4)),  # type: ignore[call-overload]
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_weight_that_its_owner_changes_is_read_as_it_is_then(change: str) -> None:
    program, x, w = sum_and_transpose(TensorSpec((4, 4), "float32")), torch.zeros(4, 4), torch.randn(5, 4)[:4]
    for _ in range(3):
        assert torch.equal(program.run({"x": x, "w": w})["total"], w)
        is_shown = w.data_ptr() in {slot.data_ptr() for slot in program.context._slots}
        assert is_shown is w.is_contiguous(), "a weight is not copied, and stays"
        CHANGES[change](w)
    w.data = w.data.view(torch.int32)  # at the same address
    with pytest.raises(UsageError, match=r"input 'w' is int32\[4, 4\]"):
        program.run({"x": x, "w": w})
    w.data = w.data.view(torch.float32)
    w.resize_(2, 4)
    with pytest.raises(UsageError, match=r"input 'w' is float32\[2, 4\]"):
        program.run({"x": x, "w": w})


def test_an_output_that_shows_a_large_input_still_shows_it_after_the_run() -> None:
    builder = GraphBuilder("view")
    x = builder.input("x", LARGE)
    program = compile_graph(builder.build([x]))
    first, second = torch.randn(LARGE.sizes), torch.randn(LARGE.sizes)
    view = program.run({"x": first}, copy=False)["x"]
    program.run({"x": second}, copy=False)
    assert view.data_ptr() == first.data_ptr()
    assert torch.equal(view, first)


def test_a_large_new_value_of_an_input_is_made_where_the_caller_has_it() -> None:
    builder = GraphBuilder("cache")
    cache = builder.input("cache", LARGE)
    (after,) = builder.emit("aten.neg.default", [cache], [("after", LARGE)])
    (y,) = builder.emit("aten.sum.default", [after], [("y", TensorSpec((), "float32"))])
    program = compile_graph(replace(builder.build([y]), updates={cache: after}))
    first, second = torch.randn(2, *LARGE.sizes)
    found = [program.run_updating({"cache": x})[1]["cache"] for x in (first, second)]
    assert torch.equal(torch.stack(found), -torch.stack([first, second]))
    assert [*program.context._large] == [after], "the one value that a run writes to new memory"


def test_a_slot_that_was_half_pointed_at_a_tensor_is_pointed_anew() -> None:
    """A part of it refuses to move; the tensor that was held before is shown again by the next run that brings it."""
    entry, home = FeedEntry("w", TensorSpec((3,), "float32"), None), torch.zeros(3)
    shown, elsewhere = home.detach(), torch.zeros(3, device="meta")
    pointer = SlotPointer(home, [shown])
    slot = PointedSlot(entry, CPU, pointer, stays=True)
    first, second = torch.ones(3), torch.full((3,), 2.0)
    slot.write(slot.accept(first))
    pointer._shown.append((elsewhere, 0, elsewhere.size(), elsewhere.stride()))
    with pytest.raises(RuntimeError, match="storage on different device"):
        slot.write(slot.accept(second))
    assert shown.tolist() == [2, 2, 2]
    pointer._shown.pop()
    slot.write(slot.accept(first))
    assert shown.tolist() == [1, 1, 1]


def test_a_large_feed_and_a_large_output_are_not_kept_alive() -> None:
    program = sum_and_transpose(LARGE)
    x, w = torch.randn(LARGE.sizes), torch.randn(LARGE.sizes)
    array = x.numpy().copy()
    alive = weakref.ref(array)
    output = program.run({"x": array, "w": w})["total"]
    del array
    assert alive() is None
    kept = output.clone()
    program.run({"x": x + 1, "w": w})
    assert torch.equal(output, kept)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_it_runs_in_every_mode_and_on_tensors_of_every_mode(mode: type) -> None:
    with mode():
        program = sum_and_transpose(LARGE)
        x = torch.randn(LARGE.sizes)
    with torch.inference_mode():
        w = torch.randn(LARGE.sizes)
    wanted = x + w
    for inner in (mode, torch.inference_mode, torch.enable_grad):
        with inner():
            found = program.run({"x": x, "w": w})["total"]
            assert torch.equal(found, wanted)
            assert not found.requires_grad
    graded = x.clone().requires_grad_()
    assert not program.run({"x": graded, "w": w})["total"].requires_grad
    small = sum_and_transpose(SMALL)
    given = torch.randn(SMALL.sizes, requires_grad=True)
    found = small.run({"x": given, "w": given})["total"]
    assert not found.requires_grad
    assert torch.equal(found, given.detach() * 2)


def test_eight_threads_share_a_program() -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 512)).eval()
    program, feed = compile_module(module, [torch.randn(64, 64)])
    (name,) = feed
    inputs = [torch.randn(64, 64) for _ in range(8)]
    wanted = [program.run({name: x}) for x in inputs]

    def differences(at: int) -> int:
        found = [program.run({name: inputs[at]}, copy=run % 2 == 0) for run in range(50)]
        return sum(not torch.equal(one[key], wanted[at][key]) for one in found for key in one)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(differences, range(8))) == [0] * 8


def test_a_run_waits_for_no_other_run() -> None:
    """One thread stands in the middle of a run until another one has finished a run of the same program."""
    inside, done = threading.Event(), threading.Event()
    builder = GraphBuilder("two")
    x = builder.input("x", SMALL)
    program = compile_graph(builder.build(builder.emit("aten.neg.default", [x], [("y", SMALL)])))

    def stand() -> torch.Tensor:
        context = program.context
        launches = [inside.set, partial(done.wait, 20), *context._launches]
        context._launches = launches
        return program.run({"x": torch.ones(SMALL.sizes)})["y"]

    with ThreadPoolExecutor(1) as pool:
        standing = pool.submit(stand)
        assert inside.wait(20)
        assert program.run({"x": torch.zeros(SMALL.sizes)})["y"].unique().tolist() == [0]
        assert not standing.done()
        done.set()
        assert standing.result(20).unique().tolist() == [-1]


class Counter(torch.nn.Module):
    runs: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("runs", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return x + self.runs


def test_threads_take_turns_where_there_are_states_and_a_new_context_has_its_own() -> None:
    program, feed = compile_module(Counter(), [torch.zeros(2)])
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: int(next(iter(program.run(feed).values()))[0]), range(100)))
    assert sorted(found) == list(range(1, 101))
    assert program.states()["b_runs"].item() == 100
    other = program.new_context()
    other.run(feed)
    assert other.states.values()["b_runs"].item() == 1
    assert program.states()["b_runs"].item() == 100


def test_a_missing_name_beside_a_wrong_one_is_named() -> None:
    with pytest.raises(UsageError, match="the feed has 'v', which is no input; inputs: x, w"):
        sum_and_transpose(SMALL).run({"x": torch.zeros(2, 3), "v": torch.zeros(2, 3)})


def test_a_tensor_in_a_closure_cannot_be_listed() -> None:
    out = torch.zeros(2)

    def launch() -> None:
        out.fill_(1)

    assert [tensor is out for tensor in operands(partial(out.copy_, out))] == [True, True]
    with pytest.raises(InternalError, match="holds a tensor in a closure"):
        list(operands(launch))
