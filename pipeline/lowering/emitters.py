"""The families joined: what can be emitted, what may be written in place, what is only a view."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TypeVar

from pipeline.errors import InternalError
from pipeline.ir.builder import Emitter
from pipeline.lowering import aten, conv, elementwise, index, linear, norm, random, recurrent, reduce, shape
from pipeline.lowering.layout import ViewRule

__all__ = ["EMITTERS", "FAMILIES", "INPLACE", "VIEWS", "emitter_of", "join"]

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


FAMILIES = (elementwise, linear, conv, norm, reduce, shape, index, recurrent, random, aten)

EMITTERS: Mapping[str, Emitter] = join(family.EMITTERS for family in FAMILIES)
INPLACE: Mapping[str, tuple[int, ...]] = join(family.INPLACE for family in FAMILIES)
VIEWS: Mapping[str, ViewRule] = join(family.VIEWS for family in FAMILIES)


def emitter_of(kind: str, emitters: Mapping[str, Emitter] = EMITTERS) -> Emitter | None:
    """The emitter of an op of this kind; operators of torch are too many for a table."""
    return emitters.get(kind) or (aten.emitter_of(kind) if aten.is_call(kind) else None)
