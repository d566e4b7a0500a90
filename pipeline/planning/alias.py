"""Decide which outputs need no storage of their own: views of an operand, and results written over a dead operand.

Values that share bytes form a storage class. A class is named by its root, the value that owns the storage: an external
value (the caller's tensor, a weight) or a value in the arena.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.ir.graph import Graph, Role, Value
from pipeline.lowering import KernelCall
from pipeline.ops import KINDS, Kind, Layout, unpack
from pipeline.ops.layout import first_layout
from pipeline.planning.arena import Lifetime

EXTERNAL = frozenset({Role.INPUT, Role.PARAM, Role.STATE, Role.CONST})
"""Roles whose storage belongs to the caller or to the model file: read, never written. States that runs change are
the program's own, and are written where their old value is not needed any more."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """Which values share storage: `alias` is {out_vid: in_vid}, `layouts` are relative to the storage of the root.

    A value that is row-major from the first element of its root has no layout. A root has a layout only if it is an
    input or a weight.
    """

    alias: Mapping[int, int]
    layouts: Mapping[int, Layout]


def decide_aliases(graph: Graph, calls: Sequence[KernelCall], lives: Mapping[int, Lifetime]) -> Sharing:
    """Decide which outputs take the storage of an operand.

    The outputs of a call are views of one operand; or the first output overwrites an operand; or each output overwrites
    the operand that the kernel names for it. The calls are taken in order, so a storage class is complete up to the
    call that asks for it: a value that joins later is a view of a member, which is still alive.

    Args:
        graph: the graph that was lowered.
        calls: its kernel calls, in the order in which they run.
        lives: vid → the first and the last call that use the value.
    """
    alias: dict[int, int] = {}
    classes = _Classes(graph, lives)
    for index, call in enumerate(calls):
        for out, (source, layout) in _shared_by(call, index, classes).items():
            alias[out] = source
            classes.join(out, source, layout)
    placed = [*alias, *(value.vid for value in graph.values if value.producer is None)]
    return Sharing(alias, {vid: classes.layouts[vid] for vid in placed if not _is_plain(classes.layouts[vid])})


def _shared_by(call: KernelCall, index: int, classes: _Classes) -> dict[int, tuple[int, Layout]]:
    """{out: (operand, layout)} for the outputs of a call that need no storage of their own."""
    return _views(call, classes) or _in_place(call, index, classes) or _all_in_place(call, index, classes)


def storage_classes(alias: Mapping[int, int], vids: Sequence[int]) -> dict[int, list[int]]:
    """root → the vids that share its storage, root included."""
    roots: dict[int, int] = {}
    classes: dict[int, list[int]] = {}
    for vid in vids:
        classes.setdefault(find_root(vid, alias, roots), []).append(vid)
    return classes


def find_root(vid: int, alias: Mapping[int, int], known: dict[int, int]) -> int:
    """The last value in the alias chain of `vid`.

    Args:
        vid: where the chain begins.
        alias: value → the value whose storage it takes.
        known: a cache, vid → root, which is added to: a chain as long as the model, such as a residual stream that is
            added to in place, is walked once.
    """
    chain = []
    while vid in alias and vid not in known:
        chain.append(vid)
        vid = alias[vid]
    root = known.get(vid, vid)
    known.update(dict.fromkeys(chain, root))
    return root


class _Classes:
    """The storage classes so far, and the layout of each value in the storage of its class."""

    def __init__(self, graph: Graph, lives: Mapping[int, Lifetime]) -> None:
        self.values = graph.values
        self.layouts = [first_layout(value) for value in graph.values]
        self._root = list(range(len(graph.values)))
        self._last = [lives[vid].last for vid in range(len(graph.values))]
        """By root, the last call that reads a member of its class."""
        self._roles = [{value.role} for value in graph.values]
        """By root, the roles in its class."""
        self._lives = lives
        self._changed = {vid for vid in graph.updates if graph.values[vid].role is not Role.INPUT}

    def join(self, vid: int, source: int, layout: Layout) -> None:
        self.layouts[vid] = layout
        self._root[vid] = root = self._root[source]
        self._last[root] = max(self._last[root], self._lives[vid].last)
        self._roles[root].add(self.values[vid].role)

    def root(self, vid: int) -> int:
        return self._root[vid]

    def last(self, vid: int) -> int:
        """The last call that reads a value on the storage of `vid`."""
        return self._last[self._root[vid]]

    def roles(self, vid: int) -> set[Role]:
        """The roles of all values on the storage of `vid`."""
        return self._roles[self._root[vid]]

    def may_hold(self, vid: int, out: Value) -> bool:
        """Whether `out` may be written over `vid`: in the arena, or on a state if `out` is no graph output."""
        root = self._root[vid]
        if root in self._changed:
            return out.role is not Role.OUTPUT
        return self.values[root].role not in EXTERNAL


def _views(call: KernelCall, classes: _Classes) -> dict[int, tuple[int, Layout]]:
    """{out: (operand, layout)} for all outputs of the call, or nothing: a kernel that runs writes every output."""
    position = call.constraints.get("view")
    if not isinstance(position, int) or not _may_share(call, call.in_vids[position], classes):
        return {}
    source, outs = call.in_vids[position], [classes.values[vid].spec for vid in call.out_vids]
    rule, attrs = KINDS[Kind(call.kind_id).name].view, unpack(call.attr_schema, call.attr_blob)
    layouts = (rule and rule(attrs, classes.layouts[source], outs)) or ()
    # Sizes other than the declared ones are left to the kernel, whose error names the call.
    if [layout.sizes for layout in layouts] != [out.sizes for out in outs]:
        return {}
    return {vid: (source, layout) for vid, layout in zip(call.out_vids, layouts, strict=True)}


def _may_share(call: KernelCall, source: int, classes: _Classes) -> bool:
    """Whether the outputs may be views of `source`. They have its dtype: no kind with a view rule changes the dtype."""
    outs = [classes.values[vid] for vid in call.out_vids]
    # A graph output keeps storage of its own: the caller may hold it while it changes an input or another output.
    leaving = [out for out in outs if out.role is Role.OUTPUT]
    return not leaving or (len(leaving) == 1 and classes.roles(source).isdisjoint({*EXTERNAL, Role.OUTPUT}))


def _in_place(call: KernelCall, index: int, classes: _Classes) -> dict[int, tuple[int, Layout]]:
    """The first output over the first operand, of those that the kernel may overwrite, whose storage is free."""
    positions = call.constraints.get("inplace", ())
    for position in positions if isinstance(positions, tuple) else ():
        source = call.in_vids[int(position)]
        if _may_overwrite(call, source, index, classes, call.out_vids[0]):
            return {call.out_vids[0]: (source, classes.layouts[source])}
    return {}


def _all_in_place(call: KernelCall, index: int, classes: _Classes) -> dict[int, tuple[int, Layout]]:
    """Each output over the operand that the kernel names for it, where that operand's storage is free."""
    positions = call.constraints.get("overwrites", ())
    pairs = zip(call.out_vids, positions, strict=True) if isinstance(positions, tuple) and positions else ()
    found = ((out, call.in_vids[int(position)]) for out, position in pairs)
    return {
        out: (source, classes.layouts[source])
        for out, source in found
        if _may_overwrite(call, source, index, classes, out)
    }


def _may_overwrite(call: KernelCall, source: int, index: int, classes: _Classes, out: int) -> bool:
    """Whether the output `out` of the call at `index` may be written over its operand `source`."""
    values = classes.values
    if values[source].spec != values[out].spec:
        return False
    if not classes.may_hold(source, values[out]):
        return False
    # Kernels write row-major results; in an expanded operand one write would hit many elements.
    if not classes.layouts[source].is_contiguous:
        return False
    # Graph outputs and new values of states are alive to the end, so no result is written over their storage.
    if classes.last(source) > index:
        return False
    # Mul(x, x) would be safe and ScatterND(x, i, x) is not: one operand on the storage is the rule for both.
    return [classes.root(vid) for vid in call.in_vids].count(classes.root(source)) == 1


def _is_plain(layout: Layout) -> bool:
    return layout.is_contiguous and not layout.offset
