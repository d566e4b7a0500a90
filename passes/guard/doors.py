"""Put a door in front of a function, wherever it has been imported to, and take it away again.

To replace `onnxsim.simplify` in its module would miss everyone who wrote `from onnxsim import simplify` before. So the
function object stays, and its `__code__` is swapped: every reference leads through the door. What is not a Python
function (a native one) is replaced in every module that holds it.
"""

from __future__ import annotations

import builtins
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any, Final

from passes.guard.startup.launches import replace_everywhere

__all__ = ["DOOR_FILE", "Door", "close_door", "is_door", "open_door"]

DOOR_FILE: Final = "<onnxline guard>"
"""The file name in the frame of a door."""

DOOR: Final = """
def outside():
    {cells}
    def door(*args, **kwargs):
        if 0: {names}
        dispatch = "dispatch"
        return dispatch({key!r}, args, kwargs)
    return door
"""
"""A code object fits a function only if it has as many free variables, so it names some and reads none. The constant
"dispatch" becomes the function: an import would be the script's, which may have a module of our name."""


@dataclass(frozen=True, slots=True)
class Door:
    """A function that is intercepted; `original` is the same function without the door."""

    key: str
    original: Callable[..., Any]
    function: object
    code: CodeType | None
    """The function's own code; None where modules hold a replacement."""
    replacement: object = None
    """What modules hold in place of a function that has no code."""
    signed: bool = False
    """Whether the door had to be told the function's signature."""


def open_door(key: str, function: Callable[..., Any], dispatch: Callable[..., Any]) -> Door:
    """From now on a call of `function` is a call of `dispatch(key, args, kwargs)`."""
    if not isinstance(function, FunctionType):
        replacement = FunctionType(_code(key, (), dispatch), {"__builtins__": builtins}, key)
        for name in ("__module__", "__name__", "__qualname__", "__doc__"):  # pickle finds it by these
            if isinstance(getattr(function, name, None), str):
                setattr(replacement, name, getattr(function, name))
        replace_everywhere(function, replacement)
        return Door(key, function, function, None, replacement)
    own = function.__code__
    original = FunctionType(own, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    original.__kwdefaults__ = function.__kwdefaults__
    original.__dict__.update(function.__dict__)
    signed = not hasattr(function, "__signature__")
    if signed:
        function.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]  # scripts may ask for it
    function.__code__ = _code(key, own.co_freevars, dispatch).replace(co_name=own.co_name, co_qualname=own.co_qualname)
    return Door(key, original, function, own, signed=signed)


def close_door(door: Door) -> None:
    """The function is as it was."""
    if door.code is None:
        replace_everywhere(door.replacement, door.original)
        return
    assert isinstance(door.function, FunctionType)
    door.function.__code__ = door.code
    if door.signed:
        del door.function.__signature__  # type: ignore[attr-defined]


def is_door(function: object) -> bool:
    """Whether a call of `function` goes through a door already."""
    # Not isinstance: this looks at whatever modules hold, and some of that warns when its class is asked for.
    return type(function) is FunctionType and function.__code__.co_filename == DOOR_FILE


def _code(key: str, free: tuple[str, ...], dispatch: Callable[..., Any]) -> CodeType:
    text = DOOR.format(key=key, cells=" = ".join((*free, "None")), names=", ".join(free) or "None")
    names: dict[str, Any] = {}
    exec(compile(text, DOOR_FILE, "exec"), names)
    code: CodeType = names["outside"]().__code__
    return code.replace(co_consts=tuple(dispatch if one == "dispatch" else one for one in code.co_consts))
