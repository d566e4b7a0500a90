"""What is otherwise than in a baseline, in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

__all__ = ["changes"]

FLOOR: Final = -9
"""The power of ten below which errors are alike: less than a bit of a float32 near 1."""

SLACK: Final = 1
"""Powers of ten by which an error may differ from one machine to another."""


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """A line for each entry that is not the same; empty if all are.

    Errors are no change while they are within one power of ten.
    """
    return [f"{' › '.join(path)}: {_words(was)} → {_words(now)}" for path, was, now in _leaves((), before, after)]


def _leaves(path: tuple[str, ...], before: Any, after: Any) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    if isinstance(before, dict) and isinstance(after, dict):
        for key in dict.fromkeys((*before, *after)):
            yield from _leaves((*path, str(key)), before.get(key, MISSING), after.get(key, MISSING))
    elif before != after and not _is_alike(before, after):
        yield path, before, after


def _is_alike(before: Any, after: Any) -> bool:
    powers = _power(before), _power(after)
    if None in powers:
        return False
    low, high = (max(one, FLOOR) for one in powers if one is not None)
    return abs(high - low) <= SLACK


def _power(told: Any) -> int | None:
    """The power of ten of an error that is told as `<= 1e-06`; of none at all the least."""
    if told == "0":
        return FLOOR
    return int(told.removeprefix("<= 1e")) if isinstance(told, str) and told.startswith("<= 1e") else None


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_words(one)}" for key, one in value.items())
    return str(value)


MISSING: Final = "(nothing)"
