"""Fields of files: one table writes JSON and bytes, and a mistake has its place."""

from typing import Any, NamedTuple

import pytest

from pipeline.ir.codec import (
    ATTR,
    I64,
    TEXT,
    U32,
    Field,
    FieldError,
    FieldReader,
    FieldWriter,
    by_key,
    optional,
    record,
    several,
)


class Picture(NamedTuple):
    name: str
    sizes: tuple[int, ...]
    place: int | None
    facts: dict[str, Any]
    notes: tuple[str, ...] = ()


FORM = record(
    Picture,
    Field("title", TEXT, "name"),
    Field("sizes", several(I64)),
    Field("place", optional(U32)),
    Field("facts", by_key(TEXT, ATTR)),
    Field("notes", several(TEXT), default=()),
    derived=lambda picture: {"rank": len(picture.sizes)},
)

WRITTEN = {"rank": 2, "title": "a", "sizes": [2, -1], "place": 7, "facts": {"view": {"int": 0}}}

BYTES = (
    b"\0\0\0\0"  # the first text
    + b"\2\0\0\0" + b"\2" + bytes(7) + b"\xff" * 8
    + b"\1" + b"\7\0\0\0"
    + b"\1\0\0\0" + b"\1\0\0\0" + b"i" + bytes(8)
    + b"\0\0\0\0"
)  # fmt: skip


def test_one_table_for_json_and_bytes() -> None:
    picture = Picture("a", (2, -1), 7, {"view": 0})
    writer = FieldWriter()
    FORM.write(writer, picture)
    assert (FORM.to_json(picture), b"".join(writer.parts), [*writer.texts]) == (WRITTEN, BYTES, [b"a", b"view"])
    reader = FieldReader(BYTES, 0)
    reader.texts = ["a", "view"]
    assert FORM.from_json(WRITTEN) == FORM.read(reader) == picture
    reader.end()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"title": 3}, ".title: found 3, expected a text"),
        ({"sizes": [1, True]}, ".sizes[1]: found True, expected an integer"),
        ({"sizes": "ab"}, ".sizes: found 'ab', expected a list"),
        ({"facts": []}, ".facts: found [], expected an object"),
        ({"facts": {"view": {"flot": 0}}}, ".facts.view: no attribute has the type 'flot'"),
        ({"facts": {"view": 0}}, ".facts.view: found 0, expected an object whose one key is the type"),
    ],
)
def test_a_mistake_has_its_place(change: dict[str, Any], message: str) -> None:
    with pytest.raises(FieldError) as caught:
        FORM.from_json(WRITTEN | change)
    assert str(caught.value).startswith(message)


def test_a_field_that_is_missing_is_named() -> None:
    with pytest.raises(FieldError, match="needs 'title', which is not there"):
        FORM.from_json({})
