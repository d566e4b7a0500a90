"""Attributes that say their type, as JSON and as bytes. An argument of a torch operator may be any of them.

In JSON an attribute is an object with one key: `{"float": 0.1}`. A float that JSON cannot spell is the string "inf",
"-inf" or "nan"; a complex number is a pair of floats. A tuple of ints, of floats or of strings is a plain list,
`{"ints": [0, 1]}`; any other tuple is a list of tagged parts, so it may be nested. A constant of torch is its kind and
its name, `{"word": ["dtype", "bfloat16"]}`.

In bytes it is one tag byte, then the value:

    N  none                  nothing
    ?  bool                  1 byte, 0 or 1
    i  int                   8 bytes, signed
    u  int of 2^63 or more   8 bytes, without a sign
    f  float                 8 bytes, IEEE double
    c  complex               two floats, real and imaginary part
    s  str                   4 bytes of length, then UTF-8
    d  dtype                 its name, as a str: `float32`
    l  layout                likewise: `strided`
    m  memory format         likewise: `channels_last`
    D  device                likewise: `cpu`
    o  operator              likewise: `mylib.op.default`
    t  tensor                4 bytes: which operand of the call
    b  body                  4 bytes: which body of the call
    [  list                  4 bytes of count, then each item with its own tag

A number that follows from named dims has no tag byte, since a kernel call is made for concrete sizes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from pipeline.ir.graph import Attr, BodyRef, InputRef, SymExpr, TorchConst

DEEPEST: Final = 16
"""Lists within lists; torch's operators nest them two deep."""

CONSTANTS: Final = {"dtype": b"d", "layout": b"l", "memory_format": b"m", "device": b"D", "operator": b"o"}
"""Kind of a constant of torch → tag byte."""


LARGE: Final = 2**63
"""The first int beyond int64; torch takes ints from here to 2**64 - 1 for uint64."""


class Tag(NamedTuple):
    """How a type of attributes is written: its word in JSON, its byte (empty: never in bytes), and both codecs."""

    word: str
    byte: bytes
    to_json: Callable[[Any], Any]
    from_json: Callable[[Any], Any]
    pack: Callable[[Any], bytes] = lambda _: b""
    unpack: Callable[[bytes, int], tuple[Any, int]] = lambda _, at: (None, at)


def write_attr(item: Attr) -> dict[str, Any]:
    """`item` as JSON."""
    if isinstance(item, tuple):
        kinds = {type(part) for part in item}
        if len(kinds) == 1 and (plain := PLURALS.get(kinds.pop())):
            return {plain: [spell(part) for part in item]}
        return {"list": [write_attr(part) for part in item]} if item else {"ints": []}
    tag = TAGS[type(item)]
    return {tag.word: tag.to_json(item)}


def read_attr(data: Mapping[str, Any]) -> Any:
    """The attribute that `write_attr` wrote.

    Raises:
        ValueError, TypeError: it did not write this.
    """
    if not isinstance(data, Mapping) or len(data) != 1:
        raise ValueError(f"found {data!r:.60}, expected an object whose one key is the type of the attribute")
    ((word, item),) = data.items()
    if word == "list":
        return tuple(read_attr(part) for part in items_of(item))
    if word in SINGULARS:
        return tuple(SINGULARS[word](part) for part in items_of(item))
    if word not in READERS:
        raise ValueError(
            f"no attribute has the type {word!r}; expected one of {', '.join((*READERS, *SINGULARS))}, list"
        )
    return READERS[word](item)


def write_item(item: Attr) -> bytes:
    """`item` as bytes, with its tag.

    Raises:
        TypeError: a type that has no tag byte.
        struct.error: an int that needs more than 8 bytes.
    """
    if isinstance(item, tuple):
        return b"[" + struct.pack("<I", len(item)) + b"".join(map(write_item, item))
    if isinstance(item, TorchConst):
        if item.kind not in CONSTANTS:
            raise TypeError(f"a constant of the kind {item.kind!r}; expected one of {', '.join(CONSTANTS)}")
        return CONSTANTS[item.kind] + write_text(item.name)
    if type(item) is int and item >= LARGE:
        return LARGE_INT.byte + LARGE_INT.pack(item)
    tag = TAGS.get(type(item))
    if tag is None or not tag.byte:
        raise TypeError(f"a {type(item).__name__} ({item}) in a kernel call, which holds concrete values only")
    return tag.byte + tag.pack(item)


def read_item(blob: bytes, at: int, depth: int = 0) -> tuple[Attr, int]:
    """The item that begins at byte `at`, and where it ends.

    Raises:
        ValueError: no such tag, or lists that are nested too deep (UnicodeDecodeError too).
        struct.error: the blob ends within the item.
    """
    (byte,) = struct.unpack_from("<c", blob, at)
    if byte == b"[":
        if depth == DEEPEST:
            raise ValueError(f"lists nested more than {DEEPEST} deep")
        (count,) = struct.unpack_from("<I", blob, at + 1)
        items, at = [], at + 5
        for _ in range(count):
            item, at = read_item(blob, at, depth + 1)
            items.append(item)
        return tuple(items), at
    if byte in CONSTANT_KINDS:
        name, end = read_text(blob, at + 1)
        return TorchConst(CONSTANT_KINDS[byte], name), end
    if byte not in UNPACKERS:
        raise ValueError(f"no value has the tag {byte!r}; expected one of {TAG_BYTES}")
    return UNPACKERS[byte](blob, at + 1)


def write_text(text: str) -> bytes:
    """4 bytes of length, then UTF-8."""
    encoded = text.encode()
    return struct.pack("<I", len(encoded)) + encoded


def read_text(blob: bytes, at: int) -> tuple[str, int]:
    """The text that begins at byte `at`, and where it ends.

    Raises:
        UnicodeDecodeError: it is not UTF-8.
        struct.error: the blob ends within it.
    """
    (length,) = struct.unpack_from("<I", blob, at)
    (text,) = struct.unpack_from(f"<{length}s", blob, at + 4)
    return text.decode(), at + 4 + length


def read_bool(blob: bytes, at: int) -> tuple[bool, int]:
    """The bool at byte `at`, and where it ends.

    Raises:
        ValueError: a byte other than 0 and 1.
        struct.error: the blob ends before it.
    """
    (byte,) = struct.unpack_from("<B", blob, at)
    if byte > 1:
        raise ValueError(f"{byte} is no bool; expected 0 or 1")
    return byte == 1, at + 1


def items_of(item: Any) -> Sequence[Any]:
    """`item` if it is a list: a text, or the keys of an object, would be taken for several items."""
    if not isinstance(item, list | tuple):
        raise ValueError(f"found {item!r:.60}, expected a list")
    return item


def text_of(item: Any) -> str:
    if not isinstance(item, str):
        raise ValueError(f"found {item!r:.60}, expected a text")
    return item


def int_of(item: Any) -> int:
    """`item` if it is an integer; 1.5 and true are none, though Python converts them."""
    if type(item) is not int:
        raise ValueError(f"found {item!r:.60}, expected an integer")
    return item


def large_int_of(number: int) -> int:
    """`number` if it needs the tag of large ints: no two byte strings mean one int."""
    if number < LARGE:
        raise ValueError(f"found {number} with the tag of ints of 2**63 or more")
    return number


def float_of(item: Any) -> float:
    """A number, or the text for one that JSON does not have."""
    try:
        if type(item) in (int, float) or item in ("inf", "-inf", "nan"):
            return float(item)
    except OverflowError:
        pass
    raise ValueError(f"found {item!r:.60}, expected a number of float64, or the text inf, -inf or nan")


def bool_of(item: Any) -> bool:
    if type(item) is not bool:
        raise ValueError(f"found {item!r:.60}, expected true or false")
    return item


def same(item: Any) -> Any:
    return item


def spell(item: Any) -> Any:
    """`item`, or the text for a float that JSON does not have."""
    return repr(item) if isinstance(item, float) and not math.isfinite(item) else item


def _number(
    word: str, byte: bytes, layout: str, from_json: Callable[[Any], Any], make: Any, number: Callable[[Any], Any] = same
) -> Tag:
    """Of items that are one number: `number(item)` is that, and `make(number)` the item."""
    size = struct.calcsize(layout)
    return Tag(
        word,
        byte,
        lambda item: spell(number(item)),
        from_json,
        lambda item: struct.pack(layout, number(item)),
        lambda blob, at: (make(*struct.unpack_from(layout, blob, at)), at + size),
    )


PLURALS: dict[type, str] = {int: "ints", float: "floats", str: "strings"}
SINGULARS: dict[str, Callable[[Any], Attr]] = {"ints": int_of, "floats": float_of, "strings": text_of}

TAGS: Mapping[type, Tag] = {
    type(None): Tag("none", b"N", same, lambda _: None),
    bool: Tag("bool", b"?", same, bool_of, lambda item: struct.pack("<?", item), read_bool),
    int: _number("int", b"i", "<q", int_of, int),
    float: _number("float", b"f", "<d", float_of, float),
    complex: Tag(
        "complex",
        b"c",
        lambda item: [spell(item.real), spell(item.imag)],
        lambda item: complex(*map(float_of, items_of(item))),
        lambda item: struct.pack("<2d", item.real, item.imag),
        lambda blob, at: (complex(*struct.unpack_from("<2d", blob, at)), at + 16),
    ),
    str: Tag("string", b"s", same, text_of, write_text, read_text),
    InputRef: _number("use", b"t", "<I", lambda item: InputRef(int_of(item)), InputRef, lambda item: item.index),
    BodyRef: _number("body", b"b", "<I", lambda item: BodyRef(int_of(item)), BodyRef, lambda item: item.index),
    TorchConst: Tag(
        "word", b"", lambda item: [item.kind, item.name], lambda item: TorchConst(*map(text_of, items_of(item)))
    ),
    SymExpr: Tag("size", b"", lambda item: item.expression, lambda item: SymExpr(text_of(item))),
}
"""The row of each type. A constant of torch has a tag byte by its kind."""

LARGE_INT: Final = _number("int", b"u", "<Q", int_of, large_int_of)
"""How an int of LARGE or more is written in bytes; JSON has one word for all ints."""

READERS: Final = {tag.word: tag.from_json for tag in TAGS.values()}

UNPACKERS: Final = {tag.byte: tag.unpack for tag in (*TAGS.values(), LARGE_INT) if tag.byte}

CONSTANT_KINDS: Final = {byte: kind for kind, byte in CONSTANTS.items()}

TAG_BYTES: Final = b"".join([*UNPACKERS, *CONSTANT_KINDS, b"["]).decode()
