"""Redirect calls of a function to another function, in every module that has imported it; and undo that.

Replacing `onnxsim.simplify` in its module would miss code that ran `from onnxsim import simplify` before. So the
function object stays, and its `__code__` is replaced. A native function has no code: it is replaced in each module that
holds it.
"""

from __future__ import annotations

import builtins
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any, Final

from passes.guard.startup.hooks import replace_everywhere

INTERCEPT_FILE: Final = "<onnxline guard>"
"""The file name in the frame of an intercepted function."""

TEMPLATE: Final = """
def outside():
    {cells}
    def intercepted(*args, **kwargs):
        if 0: {names}
        dispatch = "dispatch"
        return dispatch({key!r}, args, kwargs)
    return intercepted
"""
"""A code object fits a function only with the same number of free variables, so the template names them without reading
them. The constant "dispatch" is replaced by the function: an import could find a module of the script with our name."""


@dataclass(frozen=True, slots=True)
class Interception:
    """An intercepted function.

    key: what `dispatch` gets to know the function by.
    original: computes what the function did: a copy with the original code, or the native function.
    function: the object that callers hold.
    """

    key: str
    original: Callable[..., Any]
    function: object
    code: CodeType | None
    """The function's own code; None where modules hold a replacement."""
    replacement: object = None
    """What modules hold in place of a function that has no code."""
    signed: bool = False
    """Whether `__signature__` was set on the function."""


def intercept(key: str, function: Callable[..., Any], dispatch: Callable[..., Any]) -> Interception:
    """Redirect calls of `function` to `dispatch(key, args, kwargs)`; `restore` undoes it."""
    if not isinstance(function, FunctionType):
        replacement = FunctionType(_code(key, (), dispatch), {"__builtins__": builtins}, key)
        for name in ("__module__", "__name__", "__qualname__", "__doc__"):  # pickle finds it by these
            if isinstance(getattr(function, name, None), str):
                setattr(replacement, name, getattr(function, name))
        replace_everywhere(function, replacement)
        return Interception(key, function, function, None, replacement)
    own = function.__code__
    original = FunctionType(own, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    original.__kwdefaults__ = function.__kwdefaults__
    original.__dict__.update(function.__dict__)
    signed = not hasattr(function, "__signature__")
    if signed:
        function.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]  # scripts may ask for it
    function.__code__ = _code(key, own.co_freevars, dispatch).replace(co_name=own.co_name, co_qualname=own.co_qualname)
    return Interception(key, original, function, own, signed=signed)


def restore(interception: Interception) -> None:
    """Undo an interception."""
    if interception.code is None:
        replace_everywhere(interception.replacement, interception.original)
        return
    function = interception.function
    assert isinstance(function, FunctionType)
    function.__code__ = interception.code
    if interception.signed:
        del function.__signature__  # type: ignore[attr-defined]


def is_intercepted(function: object) -> bool:
    """Whether `function` is intercepted already."""
    # Not isinstance: `function` is any object of any module, and some objects warn when their `__class__` is read.
    return type(function) is FunctionType and function.__code__.co_filename == INTERCEPT_FILE


def _code(key: str, free: tuple[str, ...], dispatch: Callable[..., Any]) -> CodeType:
    """The code of a function that calls `dispatch(key, args, kwargs)` and has the free variables `free`."""
    text = TEMPLATE.format(key=key, cells=" = ".join((*free, "None")), names=", ".join(free) or "None")
    names: dict[str, Any] = {}
    exec(compile(text, INTERCEPT_FILE, "exec"), names)
    code: CodeType = names["outside"]().__code__
    return code.replace(co_consts=tuple(dispatch if value == "dispatch" else value for value in code.co_consts))
