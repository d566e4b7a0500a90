"""Values that say their type: one tag byte, then the value. An argument of a torch operator may be any of them.

    N  none                  nothing
    ?  bool                  1 byte, 0 or 1
    i  int                   8 bytes, signed
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

A number that follows from named dims has no tag, since a kernel call is made for concrete sizes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any, Final

from pipeline.ir.graph import Attr, BodyRef, InputRef, TorchConst

DEEPEST: Final = 16
"""Lists within lists; torch's operators nest them two deep."""

CONSTANTS: Final = {"dtype": b"d", "layout": b"l", "memory_format": b"m", "device": b"D", "operator": b"o"}
"""Kind of a constant of torch → tag."""


def write_item(item: Attr) -> bytes:
    """`item` with its tag.

    Raises:
        TypeError: a type that has no tag.
        struct.error: an int that needs more than 8 bytes.
    """
    if isinstance(item, tuple):
        return b"[" + struct.pack("<I", len(item)) + b"".join(map(write_item, item))
    if isinstance(item, TorchConst):
        if item.kind not in CONSTANTS:
            raise TypeError(f"a constant of the kind {item.kind!r}; expected one of {', '.join(CONSTANTS)}")
        return CONSTANTS[item.kind] + write_text(item.name)
    row = WRITERS.get(type(item))
    if row is None:
        raise TypeError(f"a {type(item).__name__} ({item}) in a kernel call, which holds concrete values only")
    tag, write = row
    return tag + write(item)


def read_item(blob: bytes, at: int, depth: int = 0) -> tuple[Attr, int]:
    """The item that begins at byte `at`, and where it ends.

    Raises:
        ValueError: no such tag, or lists that are nested too deep (UnicodeDecodeError too).
        struct.error: the blob ends within the item.
    """
    (tag,) = struct.unpack_from("<c", blob, at)
    if tag == b"[":
        if depth == DEEPEST:
            raise ValueError(f"lists nested more than {DEEPEST} deep")
        (count,) = struct.unpack_from("<I", blob, at + 1)
        items, at = [], at + 5
        for _ in range(count):
            item, at = read_item(blob, at, depth + 1)
            items.append(item)
        return tuple(items), at
    if tag in CONSTANT_KINDS:
        name, end = read_text(blob, at + 1)
        return TorchConst(CONSTANT_KINDS[tag], name), end
    if tag not in READERS:
        raise ValueError(f"no value has the tag {tag!r}; expected one of {TAGS}")
    return READERS[tag](blob, at + 1)


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


def _read_number(layout: str, make: Callable[..., Any]) -> Callable[[bytes, int], tuple[Any, int]]:
    def read(blob: bytes, at: int) -> tuple[Any, int]:
        return make(*struct.unpack_from(layout, blob, at)), at + struct.calcsize(layout)

    return read


WRITERS: Mapping[type, tuple[bytes, Callable[[Any], bytes]]] = {
    type(None): (b"N", lambda _: b""),
    bool: (b"?", lambda item: struct.pack("<?", item)),
    int: (b"i", lambda item: struct.pack("<q", item)),
    float: (b"f", lambda item: struct.pack("<d", item)),
    complex: (b"c", lambda item: struct.pack("<2d", item.real, item.imag)),
    str: (b"s", write_text),
    InputRef: (b"t", lambda item: struct.pack("<I", item.index)),
    BodyRef: (b"b", lambda item: struct.pack("<I", item.index)),
}

READERS: Mapping[bytes, Callable[[bytes, int], tuple[Any, int]]] = {
    b"N": lambda _, at: (None, at),
    b"?": read_bool,
    b"i": _read_number("<q", int),
    b"f": _read_number("<d", float),
    b"c": _read_number("<2d", complex),
    b"s": read_text,
    b"t": _read_number("<I", InputRef),
    b"b": _read_number("<I", BodyRef),
}

CONSTANT_KINDS: Final = {tag: kind for kind, tag in CONSTANTS.items()}

TAGS: Final = b"".join([*READERS, *CONSTANT_KINDS, b"["]).decode()
