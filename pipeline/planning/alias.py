"""Which outputs need no storage of their own: views of an operand, and results written over an operand that dies.

Storage is a class of values that share bytes. A class is named by its root, the value that owns the storage: an
external value (the caller's tensor, a weight) or a value in the arena.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipeline.ir.graph import Graph, Role, Value
from pipeline.lowering import KernelCall
from pipeline.planning.lifetime import Lifetime

__all__ = ["EXTERNAL", "decide_aliases", "storage_classes"]

EXTERNAL = frozenset({Role.INPUT, Role.PARAM, Role.STATE, Role.CONST})
"""Roles whose storage belongs to the caller or to the model file: read, never written."""


def decide_aliases(graph: Graph, calls: Sequence[KernelCall], lives: Mapping[int, Lifetime]) -> dict[int, int]:
    """{out_vid: in_vid}: the first output of a call takes the storage of that operand.

    Greedy, in the order of the calls, so a storage class is complete up to the call that looks at it: a value that
    joined it later would be a view of a member, and that member would still be alive.
    """
    alias: dict[int, int] = {}
    classes = _Classes(graph.values)
    for index, call in enumerate(calls):
        source = _view_source(call, classes)
        if source is None:
            source = _inplace_source(call, index, classes, lives)
        if source is not None:
            alias[call.out_vids[0]] = source
            classes.join(call.out_vids[0], source)
    return alias


def storage_classes(alias: Mapping[int, int], vids: Sequence[int]) -> dict[int, list[int]]:
    """root → the vids that share its storage, root included."""
    classes: dict[int, list[int]] = {}
    for vid in vids:
        root = vid
        while root in alias:
            root = alias[root]
        classes.setdefault(root, []).append(vid)
    return classes


class _Classes:
    """The storage classes so far."""

    def __init__(self, values: Sequence[Value]) -> None:
        self.values = values
        self._root = list(range(len(values)))
        self._members = [[vid] for vid in range(len(values))]

    def join(self, vid: int, source: int) -> None:
        self._root[vid] = self._root[source]
        self._members[self._root[source]].append(vid)

    def root(self, vid: int) -> int:
        return self._root[vid]

    def members(self, vid: int) -> list[int]:
        return self._members[self._root[vid]]


def _view_source(call: KernelCall, classes: _Classes) -> int | None:
    position = call.constraints.get("view")
    if not isinstance(position, int):
        return None
    out, source = classes.values[call.out_vids[0]], classes.values[call.in_vids[position]]
    if out.spec.nbytes != source.spec.nbytes or out.spec.dtype != source.spec.dtype:
        return None
    # A graph output keeps storage of its own: the caller may hold it while it changes an input or another output.
    shared = [classes.values[vid].role for vid in classes.members(source.vid)]
    if out.role is Role.OUTPUT and any(role in EXTERNAL or role is Role.OUTPUT for role in shared):
        return None
    return source.vid


def _inplace_source(call: KernelCall, index: int, classes: _Classes, lives: Mapping[int, Lifetime]) -> int | None:
    positions = call.constraints.get("inplace", ())
    for position in positions if isinstance(positions, tuple) else ():
        source = call.in_vids[int(position)]
        if _may_overwrite(call, source, index, classes, lives):
            return source
    return None


def _may_overwrite(call: KernelCall, source: int, index: int, classes: _Classes, lives: Mapping[int, Lifetime]) -> bool:
    values = classes.values
    if values[source].spec != values[call.out_vids[0]].spec:
        return False
    if values[classes.root(source)].role in EXTERNAL:
        return False
    # Graph outputs are alive to the end, so this also keeps every result off their storage.
    if any(lives[vid].last > index for vid in classes.members(source)):
        return False
    # Mul(x, x) would be safe and ScatterND(x, i, x) is not: one operand on the storage is the rule for both.
    return [classes.root(vid) for vid in call.in_vids].count(classes.root(source)) == 1
