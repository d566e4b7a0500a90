"""The nodes of a graph by module, with modules folded until the picture has few enough boxes to be read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final

from pipeline.ir import Graph

SMALL: Final = 60
"""Nodes of a graph that is drawn as it is, with all its layers."""


@dataclass(slots=True)
class ModuleBox:
    """A call of a module: consecutive ops. `name` is its path relative to the outer box; `items` are op indices and
    inner boxes.

    A folded box shows none of its items, because there is no room, or because the box before it looks the same; then
    it may stand for several calls.
    """

    name: str
    path: str
    items: list[int | ModuleBox]
    is_folded: bool = False
    like: str = ""
    """The path of the box before it, if that looks the same."""
    kinds: tuple[str, ...] = field(default=(), repr=False)
    """The kinds of all its ops, in order."""

    @property
    def detail(self) -> str:
        """The second line of a folded box."""
        return f"like {self.like}" if self.like else f"{len(self.kinds)} nodes"

    @property
    def ops(self) -> Iterator[int]:
        for item in self.items:
            if isinstance(item, ModuleBox):
                yield from item.ops
            else:
                yield item


def parts_of(graph: Graph, most: int) -> tuple[list[int | ModuleBox], int]:
    """What to draw, and how many ops are left out since even folded there is no room for them.

    Unless the graph is small, consecutive modules that look the same are merged: the first is drawn, the others become
    one box beside it. If there is no room for all nodes, modules are opened from the outside inwards while there is.
    """
    items = _group_by_module(graph, range(len(graph.ops)), "")
    if len(graph.ops) > min(most, SMALL):
        items = _with_repeats_merged(items)
        shown = len(items)
        waiting = [item for item in items if isinstance(item, ModuleBox)]
        while waiting:
            part = waiting.pop(0)
            part.is_folded = bool(part.like) or shown + len(part.items) - 1 > most
            if not part.is_folded:
                shown += len(part.items) - 1
                waiting += [item for item in part.items if isinstance(item, ModuleBox)]
    left = sum(1 if isinstance(item, int) else len(item.kinds) for item in items[most:])
    return items[:most], left


def _with_repeats_merged(items: Sequence[int | ModuleBox]) -> list[int | ModuleBox]:
    merged: list[int | ModuleBox] = []
    for item in items:
        last = merged[-1] if merged else None
        if isinstance(item, int) or not isinstance(last, ModuleBox):
            merged.append(item)
        elif last.like and item.kinds * len(last.items) == last.kinds:
            last.items.append(item)
            last.kinds += item.kinds
            last.name = f"{last.name.partition(' … ')[0]} … {item.name}"
        elif item.kinds == last.kinds:
            merged.append(ModuleBox(item.name, item.path, [item], like=last.path, kinds=item.kinds))
        else:
            merged.append(item)
    for item in merged:
        if isinstance(item, ModuleBox) and not item.like:
            item.items = _with_repeats_merged(item.items)
    return merged


def _group_by_module(graph: Graph, ops: Sequence[int], path: str) -> list[int | ModuleBox]:
    """Ops in the order of the graph; neighbours in one module below `path` are put into a box."""
    depth = len(path.split(".")) if path else 0
    items: list[int | ModuleBox] = []
    for below, run in groupby(ops, key=lambda at: ".".join(_path(graph, at)[: depth + 1])):
        members = list(run)
        if len(members) == 1 or len(below.split(".")) <= depth or not below:
            items += members
            continue
        inner = _group_by_module(graph, members, below)
        while len(inner) == 1 and isinstance(inner[0], ModuleBox):  # nothing but another module
            below, inner = inner[0].path, inner[0].items
        name = below.removeprefix(f"{path}.") if path else below
        items.append(ModuleBox(name, below, inner, kinds=tuple(graph.ops[at].kind for at in members)))
    return items


def _path(graph: Graph, at: int) -> list[str]:
    return graph.ops[at].origin.split(".") if graph.ops[at].origin else []
