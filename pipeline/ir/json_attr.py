"""One attribute as JSON that says its type: `{"float": 0.1}`, `{"ints": [0, 1]}`, `{"word": ["dtype", "bfloat16"]}`.

A float that JSON cannot spell is the string "inf", "-inf" or "nan"; a complex number is a pair of floats. A tuple of
ints, of floats or of strings is a plain list; any other tuple is a list of tagged parts, so it may be nested.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from pipeline.ir.attr import Attr, Body, Size, Use, Word

__all__ = ["read_attr", "write_attr"]


def write_attr(item: Attr) -> dict[str, Any]:
    if isinstance(item, tuple):
        kinds = {type(part) for part in item}
        if len(kinds) == 1 and (plain := PLURALS.get(kinds.pop())):
            return {plain: [spell(part) for part in item]}
        return {"list": [write_attr(part) for part in item]} if item else {"ints": []}
    tag, write = WRITERS[type(item)]
    return {tag: write(item)}


def read_attr(data: Mapping[str, Any]) -> Any:
    ((tag, item),) = data.items()
    if tag == "list":
        return tuple(read_attr(part) for part in item)
    if tag in SINGULARS:
        return tuple(SINGULARS[tag](part) for part in item)
    return READERS[tag](item)


def spell(item: Any) -> Any:
    return repr(item) if isinstance(item, float) and not math.isfinite(item) else item


def same(item: Any) -> Any:
    return item


PLURALS: dict[type, str] = {int: "ints", float: "floats", str: "strings"}
SINGULARS: dict[str, Callable[[Any], Attr]] = {"ints": int, "floats": float, "strings": str}

WRITERS: dict[type, tuple[str, Callable[[Any], Any]]] = {
    type(None): ("none", same),
    bool: ("bool", same),
    int: ("int", same),
    float: ("float", spell),
    str: ("string", same),
    complex: ("complex", lambda item: [spell(item.real), spell(item.imag)]),
    Use: ("use", lambda item: item.index),
    Body: ("body", lambda item: item.index),
    Word: ("word", lambda item: [item.kind, item.name]),
    Size: ("size", lambda item: item.expression),
}

READERS: dict[str, Callable[[Any], Attr]] = {
    "none": lambda item: None,
    "bool": bool,
    "int": int,
    "float": float,
    "string": str,
    "complex": lambda item: complex(float(item[0]), float(item[1])),
    "use": Use,
    "body": Body,
    "word": lambda item: Word(*item),
    "size": Size,
}
