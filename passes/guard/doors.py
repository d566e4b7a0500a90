"""Put a door in front of a function, wherever it has been imported to, and take it away again.

To replace `onnxsim.simplify` in its module would miss everyone who wrote `from onnxsim import simplify` before. So the
function object stays, and its `__code__` is swapped: every reference leads through the door. What is not a Python
function (a native one) is replaced in every module that holds it.
"""

from __future__ import annotations

import builtins
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final

__all__ = ["DOOR_FILE", "Door", "close_door", "is_door", "open_door"]

DOOR_FILE: Final = "<onnxline guard>"
"""The file name in the frame of a door."""

DOOR: Final = """
def outside():
    {cells}
    def door(*args, **kwargs):
        if 0: {names}
        from passes.guard.active import through
        return through({key!r}, args, kwargs)
    return door
"""
"""A code object fits a function only if it has as many free variables, so it names some and reads none."""


@dataclass(frozen=True, slots=True)
class Door:
    """A function that is intercepted; `original` is the same function without the door."""

    key: str
    original: Callable[..., Any]
    function: object
    code: CodeType | None
    """The function's own code; None where modules hold a replacement."""
    signed: bool = False
    """Whether the door had to be told the function's signature."""


def open_door(key: str, function: Callable[..., Any]) -> Door:
    """From now on a call of `function` is a call of `passes.guard.active.through(key, args, kwargs)`."""
    if not isinstance(function, FunctionType):
        door = _code(key, ())
        _replace(function, FunctionType(door, {"__builtins__": builtins}, key))
        return Door(key, function, function, None)
    own = function.__code__
    original = FunctionType(own, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    original.__kwdefaults__ = function.__kwdefaults__
    original.__dict__.update(function.__dict__)
    signed = not hasattr(function, "__signature__")
    if signed:
        function.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]  # scripts may ask for it
    function.__code__ = _code(key, own.co_freevars).replace(co_name=own.co_name, co_qualname=own.co_qualname)
    return Door(key, original, function, own, signed)


def close_door(door: Door) -> None:
    """The function is as it was."""
    if door.code is None:
        _replace_back(door)
        return
    assert isinstance(door.function, FunctionType)
    door.function.__code__ = door.code
    if door.signed:
        del door.function.__signature__  # type: ignore[attr-defined]


def is_door(function: object) -> bool:
    """Whether a call of `function` goes through a door already."""
    # Not isinstance: this looks at whatever modules hold, and some of that warns when its class is asked for.
    return type(function) is FunctionType and function.__code__.co_filename == DOOR_FILE


def _code(key: str, free: tuple[str, ...]) -> CodeType:
    text = DOOR.format(key=key, cells=" = ".join((*free, "None")), names=", ".join(free) or "None")
    names: dict[str, Any] = {}
    exec(compile(text, DOOR_FILE, "exec"), names)
    return names["outside"]().__code__


def _replace(old: object, new: object) -> None:
    for module in list(sys.modules.values()):
        names = vars(module) if isinstance(module, ModuleType) else {}
        for name in [name for name, value in list(names.items()) if value is old]:
            setattr(module, name, new)


def _replace_back(door: Door) -> None:
    for module in list(sys.modules.values()):
        names = vars(module) if isinstance(module, ModuleType) else {}
        for name in [name for name, value in list(names.items()) if is_door(value) and value.__name__ == door.key]:
            setattr(module, name, door.original)
