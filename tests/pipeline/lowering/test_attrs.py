"""The attribute codec: what goes in comes out, bit for bit, and what does not fit is refused by name."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import InternalError
from pipeline.lowering import pack, unpack

I64 = st.integers(-(2**63), 2**63 - 1)
F64 = st.floats(width=64)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "?": st.booleans(),
    "i": I64,
    "f": F64,
    "n": st.one_of(st.booleans(), I64, F64),
    "s": st.text(),
    "i[]": st.lists(I64).map(tuple),
    "f[]": st.lists(F64).map(tuple),
}


@st.composite
def schemas_and_attrs(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    codes = draw(st.lists(st.sampled_from(sorted(VALUES)), max_size=6))
    layout = ",".join(f"field_{at}={code}" for at, code in enumerate(codes))
    return f"some/3:{layout}", {f"field_{at}": draw(VALUES[code]) for at, code in enumerate(codes)}


def bits(value: Any) -> Any:
    """Equal only for the same type and the same bits: NaN is itself, and -0.0 is not 0.0."""
    if isinstance(value, tuple):
        return tuple(map(bits, value))
    return (type(value), struct.pack("<d", value) if isinstance(value, float) else value)


@given(schemas_and_attrs())
def test_round_trip(given_: tuple[str, dict[str, Any]]) -> None:
    schema, attrs = given_
    actual = unpack(schema, pack(schema, attrs))
    assert {name: bits(value) for name, value in actual.items()} == {name: bits(value) for name, value in attrs.items()}
    assert list(actual) == list(attrs)


@given(schemas_and_attrs(), st.binary(min_size=1, max_size=9))
def test_a_blob_of_another_length_is_refused(given_: tuple[str, dict[str, Any]], tail: bytes) -> None:
    schema, attrs = given_
    blob = pack(schema, attrs)
    with pytest.raises(InternalError, match="attr blob"):
        unpack(schema, blob + tail)
    if blob:
        with pytest.raises(InternalError, match="attr blob"):
            unpack(schema, blob[:-1])


def test_the_layout_is_little_endian_and_unpadded() -> None:
    blob = pack("gemm/1:alpha=f,trans_a=?,axes=i[],mode=s", {"alpha": 1.0, "trans_a": True, "axes": (-1,), "mode": "é"})
    assert blob.hex(" ", 8) == bytes.fromhex(
        "000000000000f03f 01 01000000 ffffffffffffffff 02000000 c3a9".replace(" ", "")
    ).hex(" ", 8)


@pytest.mark.parametrize(
    ("layout", "attrs", "message"),
    [
        ("alpha=f,beta=f", {"alpha": 1.0}, r"missing \['beta'\]"),
        ("alpha=f", {"alpha": 1.0, "gamma": 2.0}, r"unknown \['gamma'\]"),
        ("axis=i", {"axis": 1.0}, "axis=1.0 .*expected int"),
        ("axis=i", {"axis": True}, "axis=True .*expected int"),
        ("flag=?", {"flag": 1}, "flag=1 .*expected bool"),
        ("alpha=f", {"alpha": 2**53 + 1}, "alpha=9007199254740993 .*expected float"),
        ("axis=i", {"axis": 2**63}, "axis=9223372036854775808 "),
        ("axes=i[]", {"axes": [1, 2]}, "expected a tuple"),
        ("axes=i[]", {"axes": (1, 2.5)}, "expected int"),
        ("mode=s", {"mode": 3}, "expected a str"),
        ("value=n", {"value": "3"}, "expected a bool, int or float"),
    ],
)
def test_what_does_not_fit_is_named(layout: str, attrs: dict[str, Any], message: str) -> None:
    with pytest.raises(InternalError, match=message):
        pack(f"some/1:{layout}", attrs)


@pytest.mark.parametrize("schema", ["gemm", "gemm:alpha=f", "gemm/x:alpha=f", "gemm/1:alpha", "gemm/1:alpha=q"])
def test_a_schema_that_is_none_is_refused(schema: str) -> None:
    with pytest.raises(InternalError, match="attr schema"):
        pack(schema, {"alpha": 1.0})


def test_a_repeated_field_is_refused() -> None:
    with pytest.raises(InternalError, match="twice"):
        pack("gemm/1:alpha=f,alpha=f", {"alpha": 1.0})
