"""Emitters: one per kind, each refuses the call that its kernel could not run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import InternalError
from pipeline.ir.graph import TensorSpec
from pipeline.ops import Kind, unpack
from pipeline.ops.tables import FAMILIES, KINDS, join

RELEASED = Path(__file__).parent / "kind_ids.txt"
SCHEMAS = Path(__file__).parent / "attr_schemas.txt"


def f32(*shape: int) -> TensorSpec:
    return TensorSpec(shape, "float32")


def i64(*shape: int) -> TensorSpec:
    return TensorSpec(shape, "int64")


def test_released_numbers_stand() -> None:
    """A new kind is a new line here; a line never goes, so no kind takes the number of one that is gone."""
    rows = [line.split() for line in RELEASED.read_text().splitlines()]
    assert len({number for number, *_ in rows}) == len(rows)
    assert {kind.name: kind.value for kind in Kind} == {name: int(number) for number, name, *gone in rows if not gone}


def test_every_kind_has_a_row_and_every_row_its_kind() -> None:
    assert set(KINDS) == {kind.name for kind in Kind}
    assert sum(len(family.KINDS) for family in FAMILIES) == len(Kind)


def test_families_share_no_hundred() -> None:
    owners: dict[int, set[str]] = {}
    for family in FAMILIES:
        for row in family.KINDS:
            owners.setdefault(row.kind.value // 100 * 100, set()).add(family.__name__)
    assert {hundred: names for hundred, names in owners.items() if len(names) > 1} == {}


def test_released_schemas_stand() -> None:
    """A schema is part of the ABI: a new field is a new version, and a new line."""
    released = dict(line.split(" ", 1) for line in SCHEMAS.read_text().splitlines())
    assert {name: row.schema for name, row in KINDS.items()} == released


def test_a_kind_in_two_families_is_refused() -> None:
    with pytest.raises(InternalError, match="two families have a row for Pad"):
        join([{"Pad": 1, "Tile": 2}, {"Pad": 3}])


def test_an_emitter_fixes_the_call() -> None:
    attrs = {"dim": 0, "descending": False}
    kernel = KINDS["Sort"].emit(attrs, [f32(3, 4)], [f32(3, 4), i64(3, 4)])
    assert kernel.kind_id == Kind["Sort"]
    assert kernel.attr_schema == "sort/1:dim=i,descending=?"
    assert unpack(kernel.attr_schema, kernel.attr_blob) == attrs


CONV = {
    **{"strides": (1, 1), "pads": (0, 0), "dilations": (1, 1), "group": 1, "add": False, "bias": False, "norm": False},
    **{"epsilon": 0.0, "channels_last": False, "activation": "none", "numbers": ()},
}
SLICE = {"starts": (0,), "ends": (1,), "axes": (0,), "steps": (1,)}


@pytest.mark.parametrize(
    ("kind", "attrs", "ins", "outs", "message"),
    [
        ("Identity", {"alpha": 1.0}, [f32(3)], [f32(3)], "unknown .*alpha"),
        ("Split", {"sizes": (3,)}, [f32(3)], [f32(3)], "missing .*axis"),
        ("Expand", {"shape": (3,)}, [f32(3), f32(3)], [f32(3)], "2 inputs; expected 1"),
        ("Split", {"axis": 0, "sizes": ()}, [f32(3)], [], "0 outputs; expected at least 1"),
        ("Expand", {"shape": (3,)}, [f32(3)], [i64(3)], r"dtypes \['float32', 'int64'\]"),
        ("Gather", {"dim": 0, "order": ()}, [f32(3)], [f32(3)], "1 operands; expected 2"),
        ("Cast", {"to": "float16"}, [f32(3)], [f32(3)], "the output is float32"),
        ("Unbind", {"axis": 2}, [f32(3, 4)], [f32(3, 4)], "axis=2 .*out of range for rank 2"),
        (
            "ConvPointwise",
            CONV | {"pads": (0,)},
            [f32(1, 2, 5, 5), f32(3, 2, 1, 1)],
            [f32(1, 3, 5, 5)],
            "pads=.*expected 2",
        ),
        ("ConvPointwise", CONV, [f32(1, 2), f32(3, 2)], [f32(1, 3)], "1 to 3 more"),
        (
            "ScaledDotProductAttention",
            {"scale": 1.0, "mask": True, "causal": False, "backend": "auto"},
            [*[f32(1, 2, 4, 8)] * 3, f32(1, 1, 3, 4)],
            [f32(1, 4, 2, 8)],
            r"a mask \[1, 1, 3, 4\] of the scores \[1, 2, 4, 4\]",
        ),
        ("Reshape", {"shape": (2, 2)}, [f32(3)], [f32(2, 2)], "3 elements into"),
        ("Transpose", {"perm": (0, 0)}, [f32(3, 4)], [f32(3, 4)], "no permutation"),
        ("Split", {"axis": 0, "sizes": (1,)}, [f32(3)], [f32(1), f32(2)], "sizes=.*expected 2 items"),
        ("Slice", SLICE | {"ends": (1, 2)}, [f32(3)], [f32(1)], "differ in length"),
        ("Slice", SLICE | {"steps": (0,)}, [f32(3)], [f32(1)], "steps holds one below 1"),
    ],
)
def test_a_call_that_no_kernel_could_run_is_refused(
    kind: str, attrs: dict[str, Any], ins: list[TensorSpec], outs: list[TensorSpec], message: str
) -> None:
    with pytest.raises(InternalError, match=message):
        KINDS[kind].emit(attrs, ins, outs)


VIEWS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "Contiguous": ({}, (2, 3)),
    "Diagonal": ({"distance": 0, "first": 0, "second": 1}, (2,)),
    "Expand": ({"shape": (2, 3)}, (2, 3)),
    "Identity": ({}, (2, 3)),
    "Reshape": ({"shape": (6,)}, (6,)),
    "Select": ({"axis": 0, "index": 1}, (3,)),
    "Slice": (SLICE, (1, 3)),
    "Split": ({"axis": 0, "sizes": (2,)}, (2, 3)),
    "Transpose": ({"perm": (1, 0)}, (3, 2)),
    "Unbind": ({"axis": 0}, (3,)),
    "Unfold": ({"axis": 0, "size": 2, "step": 1}, (1, 3, 2)),
}
"""Kind with a view rule → attributes and the shape of the result, for an operand of 2×3."""


def test_no_view_changes_the_dtype() -> None:
    """The planner puts views on the storage of their operand without a look at their dtype."""
    assert set(VIEWS) == {name for name, row in KINDS.items() if row.view is not None}
    for name, (attrs, shape) in VIEWS.items():
        assert KINDS[name].emit(attrs, [f32(2, 3)], [f32(*shape)]).kind_id == Kind[name]
        with pytest.raises(InternalError, match="dtype"):
            KINDS[name].emit(attrs, [f32(2, 3)], [i64(*shape)])
