"""Arguments as the callee would see them, less those that say nothing."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from passes.guard.calls.base import LetThrough
from passes.suggest import nearest

__all__ = ["bound", "known_only", "without_defaults"]


def bound(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Name → value of the arguments that were given.

    Raises:
        LetThrough: the function does not take them.
    """
    try:
        return dict(inspect.signature(function).bind(*args, **kwargs).arguments)
    except TypeError as error:
        raise LetThrough(str(error)) from error


def without_defaults(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Those that are not what the function would take anyway: a command line passes every one."""
    defaults = {name: one.default for name, one in inspect.signature(function).parameters.items()}
    return {
        name: value for name, value in given.items() if not _same(value, defaults.get(name, inspect.Parameter.empty))
    }


def known_only(
    options: Mapping[str, Any], key: str, known: Collection[str], library: str
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Without names in the list `key` that the library does not have and ignores in silence; and a note for each."""
    names = options.get(key)
    if not isinstance(names, list | tuple):
        return dict(options), ()
    notes = tuple(
        f"{key} names {name!r}, which this {library} does not have{nearest(str(name), known)}"
        for name in names
        if name not in known
    )
    return {**options, key: [name for name in names if name in known]}, notes


def _same(value: object, default: object) -> bool:
    plain = isinstance(value, str | int | float | bool) and type(value) is type(default)
    return value is default or (plain and value == default)
