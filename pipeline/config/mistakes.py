"""What pydantic refuses of a configuration, in sentences with file, line, what was found and what was expected."""

from __future__ import annotations

import contextlib
import json
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from passes.suggest import MOST_LETTERS, nearest
from pipeline.config.yaml_source import Document, KeyPath, describe, key_text
from pipeline.errors import ConfigError


def to_config_error(error: ValidationError, root: type[BaseModel], document: Document, title: str) -> ConfigError:
    """One error for all mistakes of a configuration; `title` is the name of the whole."""
    lines = explain(error, root, document)
    if len(lines) == 1:
        return ConfigError(lines[0])
    listing = "\n".join(f"  {line}" for line in lines)
    return ConfigError(f"{title} has {len(lines)} mistakes:\n{listing}")


def explain(error: ValidationError, root: type[BaseModel], document: Document) -> list[str]:
    """One line for each mistake, in the order of the file; errors of the branches of one union count as one."""
    grouped: dict[tuple[KeyPath, bool], list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False):
        unknown = detail["type"] == "extra_forbidden"
        loc = detail["loc"]
        path = _in_data(loc, document)
        if unknown or (detail["type"] == "missing" and isinstance(loc[-1], str)):
            path = (*_in_data(loc[:-1], document), loc[-1])
        grouped.setdefault((path, unknown), []).append(detail)
    lines = [
        _line(path, details, root, document)
        for (path, _), details in grouped.items()
        if not _is_other_branch(path, details, [other for other, _ in grouped])
    ]
    return sorted(lines, key=_file_and_line)


def _is_other_branch(path: KeyPath, details: Sequence[ErrorDetails], paths: Sequence[KeyPath]) -> bool:
    """Whether the mistake is that a branch of a union was not taken, where the branch that was has one inside."""
    names_branch = all(len(detail["loc"]) > len(path) for detail in details)
    return names_branch and any(len(deeper) > len(path) and deeper[: len(path)] == path for deeper in paths)


def _file_and_line(line: str) -> tuple[str, int]:
    place = re.match(r"(.*?):(\d+): ", line)
    return (place[1], int(place[2])) if place else ("", 0)


def suggest(found: str, known: Sequence[str]) -> str:
    """`; did you mean 'x'?`, or the list of known names."""
    listing = f"; expected one of: {', '.join(known)}" if known else "; expected no keys here"
    return nearest(found, known) or listing


def _line(path: KeyPath, details: list[ErrorDetails], root: type[BaseModel], document: Document) -> str:
    detail = details[0]
    place = document.marks.place(path)
    above = key_text(path[:-1])
    if detail["type"] == "extra_forbidden":
        is_file = re.search(r":\d+$", place)  # which may have `extends`; the loader has taken it out
        key, known = str(path[-1]), ["extends"] * (not above and bool(is_file)) + keys_at(root, path[:-1])
        return f"{place}: unknown key {key!r}{f' in {above}' if above else ''}{suggest(key, known)}"
    if detail["type"] == "missing" and isinstance(detail["loc"][-1], str):
        return f"{place}: {f'{above}: ' if above else ''}the key {str(path[-1])!r} is missing"
    name = key_text(path)
    title = f"{place}: {name or 'the file'}" if name or re.search(r":\d+$", place) else place
    if detail["type"] == "value_error":
        said = str(detail["ctx"]["error"]) if "ctx" in detail else detail["msg"]
        whole = said if said.startswith("found ") else f"found {describe(detail['input'])}, {said}"
        return f"{title}: {whole}"
    expected = " or ".join(dict.fromkeys(_expectation(mistake) for mistake in details))
    found, size = detail["input"], _size(_annotation(root, path))
    if size and detail["type"] in ("missing", "too_long", "tuple_type"):
        shown = str(list(found)) if isinstance(found, list | tuple) else describe(found)
        return f"{title}: found {shown if len(shown) <= MOST_LETTERS else describe(found)}, expected a list of {size}"
    if detail["type"] == "tuple_type" and isinstance(found, str | int) and _is_item(found, _annotation(root, path)):
        expected += f": [{json.dumps(found)}]"
    return f"{title}: found {describe(found)}, expected {expected}"


def _expectation(detail: ErrorDetails) -> str:
    rule = EXPECTED.get(detail["type"])
    if rule is None:  # no section has this type of error today; fall back to pydantic's sentence
        return detail["msg"].removeprefix("Input should be ")
    return rule(detail.get("ctx", {}))


def _in_data(loc: KeyPath, document: Document) -> KeyPath:
    """The part of pydantic's location that exists in the data; the rest names branches of unions."""
    here: Any = document.data
    path: list[Any] = []
    for key in loc:
        try:
            here = here[key]
        except (KeyError, IndexError, TypeError):
            continue
        path.append(key)
    return tuple(path)


def keys_at(root: type[BaseModel], path: KeyPath) -> list[str]:
    """The keys that the mapping at `path` may have."""
    return list(_fields(_section(_annotation(root, path))))


def _annotation(root: type[BaseModel], path: KeyPath) -> Any:
    """The type that a configuration has at `path`; None where it has none."""
    here: Any = root
    for key in path:
        here = _fields(section).get(str(key)) if (section := _section(here)) else _item(here)
    return here


def _size(annotation: Any) -> str:
    """How many entries a list of a fixed length has, such as `2 numbers`; empty for any other type."""
    for branch in _branches(annotation):
        entries = typing.get_args(branch) if typing.get_origin(branch) is tuple else ()
        if entries and Ellipsis not in entries:
            return f"{len(entries)} {'numbers' if all(_branches(entry) == [float] for entry in entries) else 'entries'}"
    return ""


def _is_item(found: str | int, annotation: Any) -> bool:
    """Whether the list that is expected may hold what was found."""
    with contextlib.suppress(ValidationError):
        TypeAdapter(_item(annotation)).validate_python(found)
        return True
    return False


def _fields(section: type[BaseModel] | None) -> dict[str, Any]:
    return {field.alias or name: field.annotation for name, field in (section.model_fields if section else {}).items()}


def _section(annotation: Any) -> type[BaseModel] | None:
    return next((type_ for type_ in _branches(annotation) if isinstance(type_, type(BaseModel))), None)


def _item(annotation: Any) -> Any:
    for branch in _branches(annotation):
        origin, args = typing.get_origin(branch), typing.get_args(branch)
        if origin in (dict, tuple):
            return args[1] if origin is dict else args[0]
    return None


def _branches(annotation: Any) -> list[Any]:
    """The types of a union, without what `Annotated` adds to them."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _branches(args[0])
    is_union = origin in (typing.Union, types.UnionType)
    return [branch for arg in args for branch in _branches(arg)] if is_union else [annotation]


def _says(text: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda _: text


EXPECTED: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "int_type": _says("an integer"),
    "float_type": _says("a number"),
    "float_parsing": _says("a number"),
    "string_type": _says("text"),
    "bool_type": _says("true or false"),
    "dict_type": _says("a mapping"),
    "model_type": _says("a mapping"),
    "tuple_type": _says("a list"),
    "too_short": lambda ctx: f"at least {ctx['min_length']} entries",
    "too_long": lambda ctx: f"at most {ctx['max_length']} entries",
    "string_too_short": _says("text that is not empty"),
    "string_pattern_mismatch": _says("letters, digits, '_', '.' and '-', at most 100 (it names a folder)"),
    "less_than_equal": lambda ctx: f"at most {ctx['le']:g}",
    "less_than": lambda ctx: f"less than {ctx['lt']}",
    "greater_than": lambda ctx: f"more than {ctx['gt']:g}",
    "greater_than_equal": lambda ctx: f"{ctx['ge']:g} or more",
    "finite_number": _says("a finite number"),
    "literal_error": lambda ctx: f"one of {ctx['expected']}",
}
