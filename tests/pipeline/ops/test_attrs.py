"""The attribute codec: what goes in comes out, bit for bit, and what does not fit is refused by name."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import InternalError
from pipeline.ir.graph import BodyRef, InputRef, SymExpr, TorchConst
from pipeline.ops import pack, unpack
from pipeline.ops.aten.signatures import OperatorSignature

I64 = st.integers(-(2**63), 2**63 - 1)
F64 = st.floats(width=64)
WORDS = st.sampled_from(["dtype", "layout", "memory_format", "device", "operator"])
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    I64,
    F64,
    st.complex_numbers(),
    st.text(),
    st.builds(TorchConst, WORDS, st.text()),
    st.builds(InputRef, st.integers(0, 2**32 - 1)),
    st.builds(BodyRef, st.integers(0, 2**32 - 1)),
)
ITEMS = st.recursive(SCALARS, lambda items: st.lists(items, max_size=3).map(tuple), max_leaves=6)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "v": ITEMS,
    "{}": st.just({}),
    "{self,dim}": st.fixed_dictionaries({"self": ITEMS, "dim": ITEMS}),
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
    if isinstance(value, dict):
        return {name: bits(item) for name, item in value.items()}
    if isinstance(value, complex):
        return (complex, bits(value.real), bits(value.imag))
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
        ("value=v", {"value": SymExpr("2*batch")}, "a SymExpr .*concrete values only"),
        ("value=v", {"value": TorchConst("stream", "0")}, "a constant of the kind 'stream'"),
        ("call={self,dim}", {"call": {"dim": 1}}, r"expected the arguments \['self', 'dim'\]"),
    ],
)
def test_what_does_not_fit_is_named(layout: str, attrs: dict[str, Any], message: str) -> None:
    with pytest.raises(InternalError, match=message):
        pack(f"some/1:{layout}", attrs)


@pytest.mark.parametrize(
    "schema", ["gemm", "gemm:alpha=f", "gemm/x:alpha=f", "gemm/1:alpha", "gemm/1:alpha=q", "a/1:b={c", "a/1:b={c},,"]
)
def test_a_schema_that_is_none_is_refused(schema: str) -> None:
    with pytest.raises(InternalError, match="attr schema"):
        pack(schema, {"alpha": 1.0})


@pytest.mark.parametrize("layout", ["alpha=f,alpha=f", "call={self,self}"])
def test_a_repeated_field_is_refused(layout: str) -> None:
    with pytest.raises(InternalError, match="twice"):
        pack(f"gemm/1:{layout}", {"alpha": 1.0})


def test_an_argument_begins_with_its_tag() -> None:
    call = {"self": InputRef(1), "dim": (-1, None), "dtype": TorchConst("dtype", "half")}
    assert pack("aten/2:call={self,dim,dtype}", {"call": call}).hex(" ", 1) == (
        "74 01 00 00 00 "  # t 1
        "5b 02 00 00 00 69 ff ff ff ff ff ff ff ff 4e "  # [ 2 items: i -1, N
        "64 04 00 00 00 68 61 6c 66"  # d "half"
    )


def test_an_int_beyond_int64_is_written_without_a_sign() -> None:
    """torch multiplies by 2**63 and fills with 2**64 - 1; such a call was an internal error."""
    schema = "aten/2:call={other}"
    for number in (2**63 - 1, 2**63, 2**64 - 1):
        blob = pack(schema, {"call": {"other": number}})
        assert blob[:1] == (b"i" if number < 2**63 else b"u")
        assert unpack(schema, blob) == {"call": {"other": number}}
    with pytest.raises(InternalError, match=r"with the tag of ints of 2\*\*63 or more"):
        unpack(schema, b"u" + bytes(8))


@given(schemas_and_attrs(), st.binary(max_size=40))
def test_hostile_blobs_are_read_or_refused_in_one_sentence(given_: tuple[str, dict[str, Any]], blob: bytes) -> None:
    """What is read is written again as the same bytes, so no two blobs mean one call."""
    schema, _ = given_
    try:
        attrs = unpack(schema, blob)
    except InternalError:
        return
    assert pack(schema, attrs) == blob


def test_deep_lists_are_refused() -> None:
    with pytest.raises(InternalError, match="nested more than 16 deep"):
        unpack("some/1:value=v", b"[\x01\x00\x00\x00" * 5000)


@pytest.mark.parametrize("blob", [b"z", b"?\x02", b"s\x01\x00\x00\x00\xff"])
def test_a_value_that_is_none_is_refused(blob: bytes) -> None:
    with pytest.raises(InternalError, match="field 'value'"):
        unpack("some/1:value=v", blob)


def test_an_operand_or_a_number_has_a_field_for_each() -> None:
    signature = OperatorSignature.parse("add.Tensor(T self, T|n other, n alpha=1)")
    assert signature.layout() == "tensor_other=?,other=n,alpha=n"
