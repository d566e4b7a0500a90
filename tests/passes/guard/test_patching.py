"""A door stands in front of the function itself, so every reference leads through it."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import onnxoptimizer
import pytest

import passes
from passes.guard.calls import TARGETS
from passes.guard.patching import intercept, is_intercepted, restore
from passes.guard.startup.hooks import LIBRARIES
from tests.support.onnx_models import attention


def plain(a: int, b: int = 2, *, c: int = 3) -> tuple[int, int, int]:
    return a, b, c


def enclosed() -> Callable[..., Any]:
    factor, offset = 10, 5

    @functools.wraps(plain)
    def scaled(*args: int, **kwargs: int) -> list[int]:
        return [factor * value + offset for value in plain(*args, **kwargs)]

    return scaled


@pytest.mark.parametrize(("function", "expected"), [(plain, (1, 2, 4)), (enclosed(), [15, 25, 45])])
def test_the_original_works_behind_the_door_and_the_function_is_the_same_again(function: Any, expected: object) -> None:
    code, signature, attributes = function.__code__, inspect.signature(function), dict(function.__dict__)
    calls: list[tuple[Any, ...]] = []
    door = intercept("a key", function, lambda *call: calls.append(call))
    try:
        assert is_intercepted(function) and not is_intercepted(door.original)
        assert door.original(1, c=4) == expected
        assert inspect.signature(function) == signature
        function(1, c=2)
        assert calls == [("a key", (1,), {"c": 2})]
    finally:
        restore(door)
    assert (function.__code__, function.__dict__) == (code, attributes)
    assert function(1, c=4) == expected


def test_a_release_without_the_function_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(onnxoptimizer, "optimize")
    with passes.guard(quiet=True) as log:
        pass
    assert log.warnings == ("this onnxoptimizer has no onnxoptimizer.optimize, so no call of it is guarded",)


def test_a_release_where_the_function_is_native_is_warned_of_and_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    native = functools.partial(onnxoptimizer.optimize)
    monkeypatch.setattr(onnxoptimizer, "optimize", native)
    with passes.guard(quiet=True, compare=False) as log:
        onnxoptimizer.optimize(attention(), ["nop"])
    assert onnxoptimizer.optimize is native
    assert len(log.calls) == 1
    assert log.warnings == ("onnxoptimizer.optimize is native here; only what modules hold of it is guarded",)


def test_what_is_no_python_function_is_replaced_wherever_a_module_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    native = functools.partial(plain, 1)
    library, script = ModuleType("a_library"), ModuleType("a_script")
    library.simplify = script.by_another_name = native  # type: ignore[attr-defined]
    for module in (library, script):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    door = intercept("a.key", native, print)
    assert is_intercepted(library.simplify) and is_intercepted(script.by_another_name)
    assert door.original is native
    restore(door)
    assert library.simplify is native and script.by_another_name is native


def test_the_hooks_know_each_library_with_a_function_to_intercept() -> None:
    """They name the libraries themselves: at the start of each Python child no adapter is loaded yet."""
    assert {target.package for target in TARGETS} == set(LIBRARIES)
