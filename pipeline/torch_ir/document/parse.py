"""Plain data → dataclasses, by pydantic; a mistake is one sentence that says where, what was found and expected."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError, WrapValidator
from pydantic_core import PydanticCustomError

from pipeline.torch_ir.errors import SerializationError, Unexpected

T = TypeVar("T")

TEXT = "IR JSON"
"""The subject of messages where there is no file to name."""


@contextmanager
def report_unexpected(what: str = TEXT, advice: str = "save the IR again") -> Iterator[None]:
    """Turn an Unexpected that is raised inside into a SerializationError about `what`."""
    try:
        yield
    except Unexpected as error:
        raise SerializationError(f"{what}: {error}; {advice}") from error


def parse(cls: type[T], data: Any, where: Sequence[str | int] = ()) -> T:
    """`data`, which lies at `where` in its document, as a dataclass.

    Raises:
        Unexpected: a key is missing, or an item is of another type than its field.
    """
    try:
        return _adapter(cls).validate_python(data)
    except ValidationError as error:
        raise Unexpected(_explain(error, where)) from error


def explain_as(what: str) -> WrapValidator:
    """The words for a field whose type does not say enough: all that is wrong inside is said of the whole field."""
    return WrapValidator(partial(_check, what))


def describe_mistake(item: Any, what: str) -> str:
    """`found 5, expected a string`."""
    return f"found {'null' if item is None else repr(item)[:60]}, expected {what}"


def write_place(path: Sequence[str | int]) -> str:
    """`nodes[0].inputs[1].shape`; "the top level" of nothing."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)[1:] or "the top level"


@cache
def _adapter(cls: type[T]) -> TypeAdapter[T]:
    return TypeAdapter(cls)


def _check(what: str, item: Any, check: Any) -> Any:
    try:
        return check(item)
    except ValidationError as error:
        raise PydanticCustomError("expected", "{what}", {"what": what}) from error


def _explain(error: ValidationError, where: Sequence[str | int]) -> str:
    first = error.errors(include_url=False)[0]
    path = (*where, *first["loc"])
    if first["type"] == "missing":
        return f"{write_place(path[:-1])}: the key {path[-1]!r} is missing; expected what IR.save writes"
    return f"{write_place(path)}: {describe_mistake(first['input'], EXPECTED.get(first['type'], first['msg']))}"


EXPECTED = {
    "string_type": "a string",
    "int_type": "an integer",
    "tuple_type": "a list",
    "mapping_type": "an object",
    "dict_type": "an object",
    "dataclass_type": "an object",
}
"""What pydantic's types of errors ask for (pydantic 2)."""
