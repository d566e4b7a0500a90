"""Checked access to parts of the JSON of an IR; messages say what was found and what was expected."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from pipeline.torch_ir.errors import SerializationError

TEXT = "IR JSON"
"""The subject of messages where there is no file to name."""


class Unexpected(ValueError):
    """A part of the data is wrong; the message says what was found, and what was expected."""


@contextmanager
def report_unexpected(what: str = TEXT, advice: str = "save the IR again") -> Iterator[None]:
    """Turn an Unexpected that is raised inside into a SerializationError about `what`."""
    try:
        yield
    except Unexpected as error:
        raise SerializationError(f"{what}: {error}; {advice}") from error


def text(data: Mapping[str, Any], key: str, default: str | None = None) -> str:
    """A string; where there is none, the `default`.

    Raises:
        KeyError: there is none, and no default.
    """
    found = data[key] if default is None else data.get(key, default)
    return found if type(found) is str else as_expected(found, key, "a string", is_text)


def rows(data: Mapping[str, Any], key: str) -> Sequence[Mapping[str, Any]]:
    """A list of objects."""
    found = as_expected(data[key], key, "a list", is_list)
    for index, item in enumerate(found):
        if type(item) is not dict:  # a model has many
            as_expected(item, f"{key}[{index}]", "an object", is_object)
    return found


def mapping(data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """An object by name; empty where there is none."""
    return as_expected(data.get(key) or {}, key, "an object", is_object)


def shape_of(tensor: Mapping[str, Any]) -> tuple[int | str, ...]:
    found = tensor["shape"]
    return tuple(found if _is_sizes(found) else as_expected(found, "shape", SIZES, _is_sizes))


def whole_shape(data: Mapping[str, Any]) -> tuple[int, ...]:
    """The shape of a tensor that is at hand, so without names."""
    what = "a list of sizes, each a whole number of 0 or more"
    return tuple(as_expected(data["shape"], "shape", what, lambda item: is_list(item) and all(map(is_whole, item))))


def strides_of(tensor: Mapping[str, Any]) -> tuple[int | str, ...] | None:
    found = tensor.get("strides")
    if found is None:
        return None
    rank = len(tensor["shape"])
    what = f"a list of {rank}, as many as dims, each {SIZE}"
    return tuple(as_expected(found, "strides", what, lambda item: _is_sizes(item) and len(item) == rank))


def as_expected(item: Any, where: str, what: str, fits: Callable[[Any], object]) -> Any:
    """`item`, if it `fits`.

    Raises:
        Unexpected: it does not; the message says what was found, and that `what` was expected.
    """
    if not fits(item):
        raise Unexpected(f"{where}: found {'null' if item is None else repr(item)[:60]}, expected {what}")
    return item


def is_text(item: Any) -> bool:
    return isinstance(item, str)


def is_object(item: Any) -> bool:
    return isinstance(item, Mapping)


def are_names(item: Any) -> bool:
    return is_list(item) and all(map(is_text, item))


def is_list(item: Any) -> bool:
    return type(item) is list or type(item) is tuple


def _is_sizes(item: Any) -> bool:
    if not is_list(item):
        return False
    for size in item:  # noqa: SIM110  all() takes twice as long, and a model has many shapes
        if type(size) is not str and (type(size) is not int or not 0 <= size < LIMIT):
            return False
    return True


def is_whole(item: Any) -> bool:
    return type(item) is int and 0 <= item < LIMIT


LIMIT = 2**63
"""torch's whole numbers have 64 bits."""

SIZE = "a whole number of 0 or more, or a name"
SIZES = f"a list of sizes, each {SIZE}"
