"""What torch's dispatcher leaves out while launches run, and that the caller's thread is afterwards as it was."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import pytest
import torch

from pipeline.errors import DataError
from pipeline.runtime import Capture, CompiledProgram
from pipeline.runtime.capture.recorders import CallLoop
from pipeline.runtime.torch_state import make_guard, without_autograd
from tests.pipeline.runtime.capture.capture_programs import negate
from tests.support.torch_programs import Calls, compile_module, in_float64

X = {"x": torch.tensor([1.0, 2.0])}


CALLERS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "nothing": nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast off": lambda: torch.autocast("cpu", enabled=False),
    "a device": lambda: torch.device("cpu"),
    "a default dtype": in_float64,
    "a guard": make_guard,
}


def state_of_torch() -> dict[str, object]:
    """All that a replay could leave behind in its thread."""
    return {
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "default dtype": torch.get_default_dtype(),
        "function modes": vars(torch._C)["_len_torch_function_stack"](),
        "keys": [keys().raw_repr() for keys in TLS],
    }


TLS = [vars(torch._C)[f"_dispatch_tls_local_{kind}_set"] for kind in ("include", "exclude")]


def spy_on(capture: Capture, spy: Callable[[], object]) -> None:
    """Let each replay of a capture of one part call `spy` after its launches."""
    (part,) = capture._parts
    capture._parts = (CallLoop([*part._launches, spy]),)  # type: ignore[attr-defined]


def lookup() -> tuple[CompiledProgram, dict[str, torch.Tensor]]:
    """Rows of a table by their numbers, of which there are four."""
    table = torch.arange(8.0).view(4, 2)
    return compile_module(Calls([lambda at: table[at] + 1]), [torch.tensor([0, 1])])


@pytest.mark.parametrize("name", CALLERS)
def test_the_caller_is_afterwards_as_before(name: str) -> None:
    """After captures and replays of every kind, whether they succeed, fail or are interrupted."""
    program, feed = lookup()
    ((index, _),) = feed.items()
    outside, wrong = {index: torch.tensor([9, 9])}, {index: torch.empty(2, dtype=torch.int64, device="meta")}

    def fail(error: BaseException) -> None:
        raise error

    def replay_with(error: BaseException) -> None:
        capture = program.capture(feed)
        parts = capture._parts
        spy_on(capture, partial(fail, error))
        try:
            with pytest.raises(type(error)):
                program.replay(feed)
        finally:
            capture._parts = parts

    def refuse(call: Callable[[dict[str, torch.Tensor]], object], feed: dict[str, torch.Tensor]) -> None:
        with pytest.raises(DataError if feed is outside else Exception, match=r"out of range|out of bounds|on meta"):
            call(feed)

    steps: dict[str, Callable[[], object]] = {
        "a capture": lambda: program.capture(feed),
        "a replay": lambda: program.replay(feed),
        "views": lambda: program.replay(feed, copy=False),
        "a replay of the capture": lambda: program.capture(feed).replay(feed),
        "what changed": lambda: program.replay(feed, changed=[index]),
        "a new signature": lambda: (program.drop_captures(), program.replay(feed)),
        "a launch that fails": lambda: refuse(program.replay, outside),
        "a feed that does not fit": lambda: refuse(program.replay, wrong),
        "an interrupt": lambda: replay_with(KeyboardInterrupt()),
        "a fault": lambda: replay_with(MemoryError()),
        "a capture that fails": lambda: (program.drop_captures(), refuse(program.capture, outside)),
        "a replay that captures and fails": lambda: (program.drop_captures(), refuse(program.replay, outside)),
        "a replay in the end": lambda: program.replay(feed),
    }
    plain = state_of_torch()
    with CALLERS[name]():
        before = state_of_torch()
        for step, run in steps.items():
            run()
            assert state_of_torch() == before, step
    assert state_of_torch() == plain


@pytest.mark.parametrize("name", CALLERS)
def test_launches_see_no_grad_mode_and_no_autocast(name: str) -> None:
    """SDPA and LSTM choose kernels by grad mode; torch asks the key of autocast whether that is on."""
    program, weight, seen = negate(), torch.ones(2, 2, requires_grad=True), []

    def look() -> None:
        product = weight @ weight
        seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), product.requires_grad, product.dtype))
        seen.append(state_of_torch()["keys"])

    with CALLERS[name]():
        spy_on(program.capture(X), look)
        program.replay(X)
        program.replay(X, copy=False)
        program.capture(X).replay(X)
        with torch.autocast("cpu", enabled=False), vars(torch._C)["_AutoDispatchBelowAutograd"]():
            keys = state_of_torch()["keys"]
    assert seen == [(False, False, False, torch.float32), keys] * 3


@pytest.mark.parametrize("name", CALLERS)
def test_warm_ups_and_records_run_as_replays_do(name: str) -> None:
    """What a kernel keeps from a warm-up must not be an inference tensor, which no later replay could write to."""
    with CALLERS[name](), without_autograd():
        state = state_of_torch()
        kept = torch.ones(2)
    assert (state["grad mode"], state["inference mode"], kept.is_inference()) == (False, False, False)
    assert state["autocast"][0] is False  # type: ignore[index]
    kept.add_(1)


@pytest.mark.parametrize("name", [name for name in CALLERS if name != "inference_mode"])
def test_outputs_can_be_trained_with(name: str) -> None:
    """In a caller's own inference mode they are what that mode makes; otherwise they are plain leaves."""
    program = negate()
    with CALLERS[name]():
        copied = program.replay(X)["y"]
        viewed = program.replay(X, copy=False)["y"]
    assert not (copied.is_inference() or viewed.is_inference() or copied.requires_grad)
    factor = torch.ones(2, requires_grad=True)
    (factor * copied).sum().backward()
    assert factor.grad is not None
    assert factor.grad.tolist() == [-1, -2]


def test_it_replays_from_a_mode_into_another() -> None:
    """Captured in each, replayed in each; inference tensors come in, and only that mode makes some that go out."""
    for captured in CALLERS.values():
        program = negate(calls=8)
        with captured():
            program.capture({"x": torch.ones(2, dtype=torch.float32)})
        for replayed in CALLERS.values():
            with replayed():
                x = torch.tensor([1.0, 2.0], dtype=torch.float32)
                y = program.replay({"x": x})["y"]
                assert (y.tolist(), y.is_inference()) == ([1, 2], torch.is_inference_mode_enabled())


def test_a_replay_over_views_that_backward_needs_is_an_error_there() -> None:
    """The guard still counts versions, so torch sees that numbers which it saved are gone."""
    program, factor = negate(), torch.ones(2, requires_grad=True)
    product = (factor * program.replay(X, copy=False)["y"]).sum()
    program.replay(X, copy=False)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_threads_in_different_modes_keep_them() -> None:
    """All in the middle of a replay at once, of one program."""
    program, turn = negate(), threading.Barrier(len(CALLERS) - 1)

    def replay(name: str) -> bool:
        with CALLERS[name]():
            before = state_of_torch()
            spy_on(program.capture(X), partial(turn.wait, 20))
            same = [program.replay(X)["y"].tolist() == [-1, -2] and state_of_torch() == before for _ in range(50)]
        return all(same) and state_of_torch()["keys"] == [keys().raw_repr() for keys in TLS]

    names = [name for name in CALLERS if name != "a default dtype"]  # all threads share that one
    with ThreadPoolExecutor(len(names)) as pool:
        assert list(pool.map(replay, names)) == [True] * len(names)


def test_a_thread_that_replays_the_capture_of_another_enters_no_guard_of_it() -> None:
    """A guard keeps what its thread had; whoever enters it a second time would put that back into the wrong thread."""
    inside, done, seen = threading.Event(), threading.Event(), []
    program = negate()
    capture = program.capture(X)

    def look() -> None:
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            done.wait(20)
        seen.append(torch.is_autocast_enabled("cpu"))

    def stand() -> bool:
        with torch.autocast("cpu"):
            before = state_of_torch()
            capture.replay(X)
            return state_of_torch() == before

    spy_on(capture, look)
    plain = state_of_torch()
    with ThreadPoolExecutor(1) as pool:
        standing = pool.submit(stand)
        assert inside.wait(20)
        capture.replay(X)
        after = state_of_torch()
        done.set()
        assert standing.result(20)
    assert after == plain
    assert seen == [False, False]


def test_a_replay_within_a_replay_puts_back_what_the_outer_one_needs() -> None:
    program, seen = negate(), []
    capture = program.capture(X)

    def replay_once() -> None:
        if not seen:
            seen.append(state_of_torch())
            capture.replay(X)
            seen.append(state_of_torch())

    spy_on(capture, replay_once)
    with torch.autocast("cpu"):
        capture.replay(X)
        assert torch.is_autocast_enabled("cpu")
    assert seen[0] == seen[1]
    assert seen[0]["grad mode"] is False


def test_an_output_that_cannot_be_copied_takes_no_state() -> None:
    """Copies are made after all launches, so a lack of memory there is no launch that failed."""
    program = negate()
    capture = program.capture(X)

    def fail() -> torch.Tensor:
        raise MemoryError

    capture._clones = [("y", fail)]
    before = state_of_torch()
    with pytest.raises(MemoryError):
        capture.replay(X)
    assert state_of_torch() == before
    assert capture.replay(X, copy=False)["y"].tolist() == [-1, -2]
