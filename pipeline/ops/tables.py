"""All families in one table, one row for each kind of kernel; and a Builder that knows the table.

With it a graph can be written by hand:

builder = GraphBuilder("g")
x = builder.input("x", TensorSpec((2, 3), "float32"))
(y,) = builder.emit("aten.mul.Tensor", [x], [("y", builder.spec(x))], {"other": 2})
graph = builder.build([y])
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TypeVar

from pipeline.errors import InternalError
from pipeline.ir.builder import Builder, Emitter
from pipeline.ir.graph import Attr
from pipeline.ops import aten, fallback, fused, optimizer, row_programs, shape
from pipeline.ops.aten import call_attrs, is_call
from pipeline.ops.attrs import template_of
from pipeline.ops.kinds import Kind
from pipeline.ops.rows import KernelKind

Key = TypeVar("Key", bound=str | int)
Row = TypeVar("Row")


def join(tables: Iterable[Mapping[Key, Row]]) -> Mapping[Key, Row]:
    """One read-only table of all rows.

    Raises:
        InternalError: two tables have a row for the same kind.
    """
    joined: dict[Key, Row] = {}
    for table in tables:
        twice = sorted(joined.keys() & table.keys())
        if twice:
            raise InternalError(
                f"two families have a row for {', '.join(map(str, twice))}; a kind belongs to one family"
            )
        joined |= table
    return MappingProxyType(joined)


FAMILIES = (shape, optimizer, fused, row_programs, fallback, aten)

KINDS: Mapping[str, KernelKind] = join({row.kind.name: row} for family in FAMILIES for row in family.KINDS)


def emitter_of(kind: str) -> Emitter | None:
    """The emitter of an op of this kind; operators of torch are too many for a table."""
    if aten.is_call(kind):
        return aten.emitter_of(kind)
    row = KINDS.get(kind)
    return row.emit if row and row.kind not in aten.CALL_KINDS else None


def wrong_schema(kind_id: int, schema: str) -> str:
    """What is wrong with a kernel's number and attribute schema; nothing for one that this release has."""
    if kind_id not in Kind.__members__.values():
        return f"no kernel has the kind_id {kind_id}"
    row = KINDS[Kind(kind_id).name]
    if template_of(schema) != row.schema:
        return f"{row.kind.name} has the attr schema {schema!r}; expected {row.schema!r}"
    return ""


class GraphBuilder(Builder):
    """Each op gets the kernel call of its operator, and a call of torch finds its operands in their order."""

    def __init__(self, name: str) -> None:
        super().__init__(name, emitter_of)

    def complete_arguments(self, kind: str, operands: int, given: Mapping[str, Attr]) -> dict[str, Attr]:
        """Say where the operands of a call go, in the order of its signature, unless `given` says so itself."""
        return call_attrs(kind, operands, given) if is_call(kind) else dict(given)
