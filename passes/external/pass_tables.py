"""What is known of a library's passes: tables of text next to this file, a row for each pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from passes.step import Description

TABLES: Final = Path(__file__).with_name("tables")

OF_EQUALS: Final = " (equal parts)"
"""Marks a pass that destroys a structure only if the structure has two equal parts."""


@dataclass(frozen=True, slots=True)
class PassTable:
    """Pass → what it does and reads, and the structures that it destroys; see the fields of `Step` with these names."""

    describes: Mapping[str, Description]
    destroys: Mapping[str, tuple[str, ...]]
    destroys_equals: tuple[str, ...]


def read_table(library: str) -> PassTable:
    """The table of `library`: a row is `pass | reads | destroys | what it does`."""
    describes: dict[str, Description] = {}
    destroys: dict[str, tuple[str, ...]] = {}
    equals: list[str] = []
    for line in (TABLES / f"{library}.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        name, reads, kinds, does = (cell.strip() for cell in line.split("|"))
        if does:
            describes[name] = Description(does, "values" if reads == "values" else "structure")
        if kinds:
            destroys[name] = tuple(kinds.removesuffix(OF_EQUALS).split(", "))
        if kinds.endswith(OF_EQUALS):
            equals.append(name)
    return PassTable(describes, destroys, tuple(equals))


def read_groups(file: Path) -> dict[str, tuple[str, ...]]:
    """Group → its words: a line `group:`, then indented lines of words."""
    groups: dict[str, tuple[str, ...]] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.endswith(":"):
            groups[line.removesuffix(":")] = ()
        elif line.startswith(" "):
            groups[list(groups)[-1]] += tuple(line.split())
    return groups
