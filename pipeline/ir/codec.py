"""Fields of files: how each is written as JSON and as bytes, and read back from either.

A record of fields is one table for both: `ir.json`, `plan.json` and `plan.bin` are such tables. As JSON a field stands
under its key; as bytes fields follow upon one another in the order of the table.

Bytes are little-endian and unpadded. Texts are in one table, and a field holds the place of its text there.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from operator import attrgetter
from typing import Any, Final, NamedTuple

from pipeline.ir.tagged import int_of, items_of, read_attr, read_bool, read_item, same, text_of, write_attr, write_item


class FieldError(ValueError):
    """A field that cannot be read: `place` is the way to it, `calls[0].in_vids`."""

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(f"{place}: {reason}" if place else reason)
        self.place, self.reason = place, reason


class FieldWriter:
    """Collects the fields of a file, and the table of its texts in the order of their first use."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.texts: dict[bytes, int] = {}

    def pack(self, layout: str, *values: int) -> None:
        self.parts.append(struct.pack(f"<{layout}", *values))

    def text(self, text: str) -> None:
        self.pack("I", self.texts.setdefault(text.encode(), len(self.texts)))

    def blob(self, data: bytes) -> None:
        self.pack("I", len(data))
        self.parts.append(data)


class FieldReader:
    """Takes fields from a file, starting at byte `at`. Each method raises struct.error beyond the end.

    `alignment`: of the offsets in the file, as its header says it.
    """

    def __init__(self, data: bytes, at: int, alignment: int = 1) -> None:
        self.data, self.at, self.alignment = data, at, alignment
        self.texts: list[str] = []

    def number(self, layout: str = "I") -> int:
        (found,) = struct.unpack_from(f"<{layout}", self.data, self.at)
        self.at += struct.calcsize(f"<{layout}")
        return found

    def text(self) -> str:
        return self.texts[self.number()]

    def blob(self) -> bytes:
        count = self.number()
        (found,) = struct.unpack_from(f"<{count}s", self.data, self.at)
        self.at += count
        return found

    def take(self, read: Callable[[bytes, int], tuple[Any, int]]) -> Any:
        """What `read(data, at)` finds here; it also says where that ends."""
        found, self.at = read(self.data, self.at)
        return found

    def end(self) -> None:
        if self.at != len(self.data):
            raise ValueError(f"its last field ends at byte {self.at} of {len(self.data)}")


class Form(NamedTuple):
    """How a value is written as JSON and as bytes. A reader of JSON refuses another type with a ValueError."""

    to_json: Callable[[Any], Any]
    from_json: Callable[[Any], Any]
    write: Callable[[FieldWriter, Any], None]
    read: Callable[[FieldReader], Any]


class Field(NamedTuple):
    """A field of a record. `of` is the attribute that has it, by default `key`, or a function of the object; with
    `default` it is left out of JSON where it has that value."""

    key: str
    form: Form
    of: str | Callable[[Any], Any] = ""
    default: Any = ...


def number(layout: str) -> Form:
    """An integer, in bytes by a letter of Python's struct."""
    return Form(same, int_of, lambda writer, item: writer.pack(layout, item), lambda reader: reader.number(layout))


def choice(kind: type[Enum]) -> Form:
    """A member of `kind`: its value in JSON, and its place among the members, one byte, in bytes."""
    members = list(kind)
    return Form(
        lambda item: item.value,
        kind,
        lambda writer, item: writer.pack("B", members.index(item)),
        lambda reader: members[reader.number("B")],
    )


def optional(form: Form) -> Form:
    """None, which is null in JSON, or what `form` writes; in bytes one byte says which it is, 0 or 1."""

    def write(writer: FieldWriter, item: Any) -> None:
        writer.pack("B", item is not None)
        if item is not None:
            form.write(writer, item)

    return Form(
        lambda item: None if item is None else form.to_json(item),
        lambda data: None if data is None else form.from_json(data),
        write,
        lambda reader: form.read(reader) if reader.take(read_bool) else None,
    )


def several(form: Form) -> Form:
    """A tuple: a list in JSON; in bytes how many there are, and then each."""

    def read_json(data: Any) -> tuple[Any, ...]:
        found = []
        for at, item in enumerate(items_of(data)):
            found.append(_read_at(f"[{at}]", form, item))
        return tuple(found)

    def write(writer: FieldWriter, items: Sequence[Any]) -> None:
        writer.pack("I", len(items))
        for item in items:
            form.write(writer, item)

    return Form(
        lambda items: [*map(form.to_json, items)],
        read_json,
        write,
        lambda reader: tuple(form.read(reader) for _ in range(reader.number())),
    )


def by_key(key: Form, form: Form) -> Form:
    """A dict: an object in JSON, whose keys are texts; in bytes how many there are, and then each key and its value."""

    def read_json(data: Any) -> dict[Any, Any]:
        if not isinstance(data, Mapping):
            raise ValueError(f"found {data!r:.60}, expected an object")
        return {_read_at(f".{name}", key, name): _read_at(f".{name}", form, item) for name, item in data.items()}

    def write(writer: FieldWriter, items: Mapping[Any, Any]) -> None:
        writer.pack("I", len(items))
        for name, item in items.items():
            key.write(writer, name)
            form.write(writer, item)

    return Form(
        lambda items: {str(key.to_json(name)): form.to_json(item) for name, item in items.items()},
        read_json,
        write,
        lambda reader: {key.read(reader): form.read(reader) for _ in range(reader.number())},
    )


def record(make: Callable[..., Any], *fields: Field, derived: Callable[[Any], Mapping[str, Any]] | None = None) -> Form:
    """An object with these fields: `make(*values)` in their order.

    `derived`: what JSON says besides, for people; no reader needs it.
    """
    getters = [field.of if callable(field.of) else attrgetter(field.of or field.key) for field in fields]
    rows = [(field.key, get, field.form.to_json, field.default) for field, get in zip(fields, getters, strict=True)]

    def to_json(item: Any) -> dict[str, Any]:
        data = {} if derived is None else {**derived(item)}
        for key, get, write, default in rows:
            value = get(item)
            if default is ... or value != default:
                data[key] = write(value)
        return data

    def from_json(data: Any) -> Any:
        if not isinstance(data, Mapping):
            raise FieldError("", f"found {data!r:.60}, expected an object with {', '.join(row[0] for row in rows)}")
        values = []
        for key, form, _, default in fields:
            if key in data:
                values.append(_read_at(f".{key}", form, data[key]))
            elif default is not ...:
                values.append(default)
            else:
                raise FieldError("", f"needs {key!r}, which is not there")
        return make(*values)

    def write(writer: FieldWriter, item: Any) -> None:
        for field, get in zip(fields, getters, strict=True):
            field.form.write(writer, get(item))

    return Form(to_json, from_json, write, lambda reader: make(*[field.form.read(reader) for field in fields]))


def _read_at(step: str, form: Form, data: Any) -> Any:
    """What `form` reads; an error says at which step of the way it was."""
    try:
        return form.from_json(data)
    except FieldError as error:
        raise FieldError(step + error.place, error.reason) from error
    except (TypeError, ValueError) as error:
        raise FieldError(step, str(error)) from error


def as_tuple(*values: Any) -> tuple[Any, ...]:
    """What a record reads where no object is made of its fields."""
    return values


def only_json(to_json: Callable[[Any], Any], from_json: Callable[[Any], Any]) -> Form:
    """A field of files that are never bytes."""

    def refuse(*_: Any) -> Any:
        raise TypeError("this field is of files in JSON only")

    return Form(to_json, from_json, refuse, refuse)


U32: Final = number("I")
U64: Final = number("Q")
I64: Final = number("q")
VIDS: Final = several(U32)
TEXT: Final = Form(same, text_of, FieldWriter.text, FieldReader.text)
BLOB: Final = Form(bytes.hex, lambda data: bytes.fromhex(text_of(data)), FieldWriter.blob, FieldReader.blob)

ATTR: Final = Form(
    write_attr,
    read_attr,
    lambda writer, item: writer.parts.append(write_item(item)),
    lambda reader: reader.take(read_item),
)
"""An attribute, which says its type."""
