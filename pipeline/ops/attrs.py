"""The attribute blob: a kernel's attributes as bytes, laid out by a schema that a person can read.

A schema is `name/version:field=code,…`, for example `gemm/1:alpha=f,beta=f,trans_a=?,trans_b=?`. The codes:

    ?    bool                  1 byte, 0 or 1
    i    int                   8 bytes, signed
    f    float                 8 bytes, IEEE double
    n    bool, int or float    1 tag byte (one of `?if`), then that code
    s    str                   4 bytes of length, then UTF-8
    i[]  tuple of int          4 bytes of count, then each
    f[]  tuple of float        4 bytes of count, then each
    v    any of the above, and what else an operator of torch takes: 1 tag byte, then the value (`ir/tagged.py`)
    {…}  arguments by name     a `v` for each name: `call={self,dim,keepdim}`

Everything is little-endian and unpadded, in the order of the schema. The blob carries no names: the schema is the ABI
tag, and a field that is added or moved needs a new version. NaN and infinities survive bit for bit.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final

from pipeline.errors import InternalError
from pipeline.ir.graph import Attr
from pipeline.ir.tagged import read_bool, read_item, read_text, write_item, write_text

FIELD: Final = re.compile(r"([^=,{}]+)=(\{[^={}]*\}|[^=,{}]+)(?:,|$)")

Packed = Attr | Mapping[str, Attr]
"""What a field holds: an attribute, or arguments by name."""


@lru_cache(maxsize=1024)  # a graph has many calls and few schemas: 6 % of compiling a transformer
def fields(schema: str) -> Mapping[str, str]:
    """Field name → code, in the order of the layout.

    Raises:
        InternalError: the schema is not `name/version:field=code,…`, or repeats a field.
    """
    head, colon, layout = schema.partition(":")
    name, slash, version = head.partition("/")
    if not (colon and slash and name and version.isdigit()):
        raise InternalError(f"attr schema {schema!r} is not 'name/version:field=code,...'")
    pairs: list[tuple[str, str]] = FIELD.findall(layout)
    is_whole = ",".join(f"{field}={code}" for field, code in pairs) == layout
    if not is_whole or any(code not in CODES and not code.startswith("{") for _, code in pairs):
        raise InternalError(
            f"attr schema {schema!r}: every field is 'name=code' with a code of {', '.join(CODES)}, or {{names}}"
        )
    codes = dict(pairs)
    if len(codes) != len(pairs) or any(len({*names}) != len(names) for names in map(_names, codes.values())):
        raise InternalError(f"attr schema {schema!r} names a field twice")
    return MappingProxyType(codes)


def template_of(schema: str) -> str:
    """`schema` without the names of arguments, which differ from call to call: `aten/2:op=s,call={},orders=v`."""
    return re.sub(r"\{[^}]*\}", "{}", schema)


def pack(schema: str, attrs: Mapping[str, Packed]) -> bytes:
    """`attrs` as bytes in the layout of `schema`.

    Raises:
        InternalError: an attribute is missing, unknown, of another type than its code, or out of range.
    """
    layout = fields(schema)
    missing, unknown = [name for name in layout if name not in attrs], [name for name in attrs if name not in layout]
    if missing or unknown:
        raise InternalError(
            f"attrs {sorted(attrs)} do not fit {schema!r}: missing {missing}, unknown {unknown}; "
            "expected every field of the layout and no other"
        )
    return b"".join(_pack_field(schema, name, code, attrs[name]) for name, code in layout.items())


def unpack(schema: str, blob: bytes) -> dict[str, Any]:
    """The attributes that `pack(schema, …)` was given; an int in an `f` field comes back as that float.

    Raises:
        InternalError: the blob is shorter or longer than the layout, or a tag in it is unknown.
    """
    attrs: dict[str, Any] = {}
    at = 0
    for name, code in fields(schema).items():
        try:
            attrs[name], at = _read(code, blob, at)
        except (struct.error, ValueError, KeyError) as error:
            raise InternalError(
                f"attr blob of {len(blob)} bytes does not fit {schema!r}: field {name!r} at byte {at}: {error}"
            ) from error
    if at != len(blob):
        raise InternalError(f"attr blob has {len(blob)} bytes, but {schema!r} ends after {at}")
    return attrs


def _names(code: str) -> list[str]:
    """The names of arguments in a code `{…}`; none for any other code."""
    return [name for name in code[1:-1].split(",") if name] if code.startswith("{") else []


def _pack_field(schema: str, name: str, code: str, value: Packed) -> bytes:
    try:
        return _write(code, value)
    except (TypeError, OverflowError, UnicodeEncodeError, struct.error) as error:
        raise InternalError(
            f"attr {name}={value!r} ({type(value).__name__}) does not fit code {code!r} of {schema!r}: {error}"
        ) from error


def _write(code: str, value: Any) -> bytes:
    if code.startswith("{"):
        if not isinstance(value, Mapping) or value.keys() != {*_names(code)}:
            raise TypeError(f"expected the arguments {_names(code)}")
        return b"".join(write_item(value[name]) for name in _names(code))
    if code == "v":
        return write_item(value)
    if code.endswith("[]"):
        if not isinstance(value, tuple):
            raise TypeError("expected a tuple")
        return struct.pack("<I", len(value)) + b"".join(_write(code[0], item) for item in value)
    if code == "s":
        if not isinstance(value, str):
            raise TypeError("expected a str")
        return write_text(value)
    if code == "n":
        tag = TAGS.get(type(value))
        if tag is None:
            raise TypeError("expected a bool, int or float")
        return tag.encode() + _write(tag, value)
    return struct.pack(CODES[code], _exact(code, value))


def _exact(code: str, value: Any) -> bool | int | float:
    """`value` if its type fits the code; an int is accepted for the float that equals it."""
    if type(value) is int and code == "f" and int(float(value)) == value:
        return float(value)
    if TAGS.get(type(value)) != code or not isinstance(value, bool | int | float):
        raise TypeError(f"expected {' or '.join(kind.__name__ for kind, tag in TAGS.items() if tag == code)}")
    return value


def _read(code: str, blob: bytes, at: int) -> tuple[Any, int]:
    if code.startswith("{"):
        arguments: dict[str, Attr] = {}
        for name in _names(code):
            arguments[name], at = read_item(blob, at)
        return arguments, at
    if code == "v":
        return read_item(blob, at)
    if code.endswith("[]"):
        (count,) = struct.unpack_from("<I", blob, at)
        layout = f"<{count}{ITEMS[code]}"
        return struct.unpack_from(layout, blob, at + 4), at + 4 + struct.calcsize(layout)
    if code == "s":
        return read_text(blob, at)
    if code == "?":
        return read_bool(blob, at)
    if code == "n":
        (tag,) = struct.unpack_from("<c", blob, at)
        return _read(NUMBERS[tag], blob, at + 1)
    (value,) = struct.unpack_from(CODES[code], blob, at)
    return value, at + struct.calcsize(CODES[code])


CODES = {"?": "<?", "i": "<q", "f": "<d", "n": "", "s": "", "i[]": "", "f[]": "", "v": ""}
ITEMS = {"i[]": "q", "f[]": "d"}
TAGS: dict[type, str] = {bool: "?", int: "i", float: "f"}
NUMBERS = {b"?": "?", b"i": "i", b"f": "f"}
