"""Parts of the JSON of an IR as they have to be, or what was found in their place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipeline.ir import DimRange

__all__ = ["Unexpected", "dim_range", "mapping", "rows", "shape_of", "strides_of", "text"]


class Unexpected(ValueError):
    """Something else than belongs there; the message says what was found, and what was expected."""


def text(data: Mapping[str, Any], key: str) -> str:
    found = data[key]
    return found if type(found) is str else _as(found, key, "a string", lambda item: isinstance(item, str))


def rows(data: Mapping[str, Any], key: str) -> Sequence[Mapping[str, Any]]:
    """A list of objects."""
    found = _as(data[key], key, "a list", _is_list)
    for index, item in enumerate(found):
        if type(item) is not dict:  # a model has many
            _as(item, f"{key}[{index}]", "an object", lambda item: isinstance(item, Mapping))
    return found


def mapping(data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """An object by name; empty where there is none."""
    return _as(data.get(key) or {}, key, "an object", lambda item: isinstance(item, Mapping))


def shape_of(tensor: Mapping[str, Any]) -> tuple[int | str, ...]:
    return tuple(_as(tensor["shape"], "shape", SIZES, _is_sizes))


def strides_of(tensor: Mapping[str, Any]) -> tuple[int | str, ...] | None:
    found = tensor.get("strides")
    if found is None:
        return None
    rank = len(tensor["shape"])
    what = f"a list of {rank}, as many as dims, each {SIZE}"
    return tuple(_as(found, "strides", what, lambda item: _is_sizes(item) and len(item) == rank))


def dim_range(name: str, item: Any) -> DimRange:
    least, most = _as(item, f"dims: {name}", "the least and the most size, as in [2, 9] or [2, null]", _is_range)
    return DimRange(least, most)


def _as(item: Any, where: str, what: str, fits: Callable[[Any], bool]) -> Any:
    if not fits(item):
        raise Unexpected(f"{where}: found {'null' if item is None else repr(item)[:60]}, expected {what}")
    return item


def _is_list(item: Any) -> bool:
    return type(item) is list or type(item) is tuple


def _is_sizes(item: Any) -> bool:
    if not _is_list(item):
        return False
    for size in item:  # noqa: SIM110  all() takes twice as long, and a model has many shapes
        if type(size) is not str and (type(size) is not int or size < 0):
            return False
    return True


def _is_range(item: Any) -> bool:
    return (
        isinstance(item, list | tuple)
        and len(item) == 2
        and _is_whole(item[0])
        and (item[1] is None or _is_whole(item[1]))
    )


def _is_whole(item: Any) -> bool:
    return type(item) is int and item >= 0


SIZE = "a whole number of 0 or more, or a name"
SIZES = f"a list of sizes, each {SIZE}"
