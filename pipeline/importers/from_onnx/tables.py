"""Every op type that can be imported: the tables of the family files, joined."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.errors import InternalError
from pipeline.importers.from_onnx import (
    contrib,
    conv,
    elementwise,
    index,
    linear,
    norm,
    random,
    recurrent,
    reduce,
    sequence,
    shape,
)
from pipeline.importers.from_onnx.node import Importer

__all__ = ["FAMILIES", "importers", "join"]


def importers() -> dict[str, Importer]:
    """Op type → the function that imports it. Shape, Size, Range and Constant have none: they are numbers by then."""
    return join(FAMILIES)


def join(families: Mapping[str, Mapping[str, Importer]]) -> dict[str, Importer]:
    """One table of all `families`.

    Raises:
        InternalError: two families have the same op type.
    """
    table: dict[str, Importer] = {}
    owner: dict[str, str] = {}
    for family, entries in families.items():
        for kind, importer in entries.items():
            if kind in table:
                raise InternalError(f"op type {kind} is in the tables of {owner[kind]} and {family}; keep one of them")
            table[kind], owner[kind] = importer, family
    return table


FAMILIES: dict[str, Mapping[str, Importer]] = {
    "elementwise": elementwise.IMPORTERS,
    "linear": linear.IMPORTERS,
    "conv": conv.IMPORTERS,
    "norm": norm.IMPORTERS,
    "reduce": reduce.IMPORTERS,
    "shape": shape.IMPORTERS,
    "index": index.IMPORTERS,
    "recurrent": recurrent.IMPORTERS,
    "random": random.IMPORTERS,
    "sequence": sequence.IMPORTERS,
    "contrib": contrib.IMPORTERS,
}
