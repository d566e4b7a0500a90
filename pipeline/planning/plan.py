"""The ExecutionPlan: every decision that a run needs, as data, for one concrete feed signature.

A plan may hold a memory map: the regions, which storage class is in which region during which calls, and the copies
between regions.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from passes.suggest import bytes_text, describe_argument, join_first, plural
from pipeline.argument_checks import A_LIST, TEXT, a, expects
from pipeline.errors import InternalError, UsageError
from pipeline.ir.graph import DTYPE_BITS, Graph, Role, TensorSpec, Value
from pipeline.ir.json import digest_graph
from pipeline.lowering import KernelCall, lower
from pipeline.ops import Kind, Layout, unpack
from pipeline.ops.layout import traced_strides
from pipeline.planning.alias import EXTERNAL, decide_aliases, find_root, storage_classes
from pipeline.planning.arena import ALIGNMENT, Block, Lifetime, assign_offsets, lifetimes, live_peak

SIZE: Final = re.compile(r"([0-9]{1,19})(B|KiB|MiB|GiB)")
UNITS: Final = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}

ADDRESSES: Final = 2**63
"""The most bytes that can be addressed, and written into a plan.bin."""


@dataclass(frozen=True, slots=True)
class MemoryRegion:
    """A memory of a machine; `nbytes` is None where it is as large as it has to be."""

    name: str
    """The name of the memory, such as `sram`."""
    nbytes: int | None = None


@dataclass(frozen=True, slots=True)
class Residence:
    """From call `first` to call `last` a storage class is in a region, beginning at byte `offset`."""

    root: int
    """The vid that names the storage class."""
    region: int
    """The index of the region in the map."""
    offset: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Move:
    """A copy of a storage class from one region to another, between call `before - 1` and call `before`."""

    before: int
    root: int
    """The vid of the storage class that is copied."""
    source: Residence
    """Where the storage class was until the copy."""
    target: Residence
    """Where the storage class is after the copy."""


@dataclass(frozen=True, slots=True)
class MemoryMap:
    """Which region holds what, and when; regions are in order, the fastest first."""

    regions: tuple[MemoryRegion, ...]
    """The regions; residences and pins give a region by its index."""
    residences: tuple[Residence, ...]
    """By root and time. The residences of a root follow one another without a gap."""
    pins: Mapping[int, int] = field(default_factory=dict)
    """{root: region}, as the caller asked."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "pins", MappingProxyType(dict(self.pins)))

    def moves(self) -> tuple[Move, ...]:
        """Spills and fills, in the order of the calls: wherever a root goes from one residence to the next."""
        pairs = zip(self.residences, self.residences[1:], strict=False)
        moves = [Move(after.first, after.root, before, after) for before, after in pairs if before.root == after.root]
        return tuple(sorted(moves, key=lambda move: (move.before, move.root)))


@expects(text=TEXT)
def parse_regions(text: str) -> tuple[MemoryRegion, ...]:
    """`sram:2MiB,dram` as regions, the fastest first; only the last may be as large as it has to be.

    Args:
        text: names with sizes, separated by commas; a size has a unit of bytes, such as KiB.

    Raises:
        UsageError: another form, a size of 0, or regions that `check_regions` refuses.
    """
    regions = []
    for part in text.split(","):
        name, colon, size = (piece.strip() for piece in part.partition(":"))
        found = SIZE.fullmatch(size)
        if not name or (colon and (found is None or not int(found[1]))):
            raise UsageError(
                f"regions: found {part.strip()!r}, expected NAME:SIZE with a size such as 512KiB or 2MiB; "
                "the whole is a list from the fastest to the slowest, such as sram:2MiB,dram"
            )
        regions.append(MemoryRegion(name, int(found[1]) * UNITS[found[2]] if found else None))
    check_regions(regions)
    return tuple(regions)


def check_regions(regions: Sequence[MemoryRegion]) -> None:
    """Check that a plan can be mapped to `regions`.

    Raises:
        UsageError: there is no region; a name occurs twice, or `--pin VALUE=REGION` cannot express it; or a size is
            missing before the last region, or is more than a machine can address.
    """
    if not regions or not all(isinstance(region, MemoryRegion) for region in regions):
        raise UsageError(
            f"regions: found {regions!r}, expected one MemoryRegion or more, the fastest first; parse_regions makes "
            "them of text such as sram:2MiB,dram"
        )
    names = [region.name for region in regions]
    for region in regions:
        if not region.name.isprintable() or not region.name[:1].isalpha() or "=" in region.name:
            raise UsageError(
                f"regions: found the name {region.name!r}, expected one that begins with a letter, such as sram, "
                "that can be printed, and that has no '='"
            )
        if names.count(region.name) > 1:
            raise UsageError(f"regions: found the name {region.name!r} twice, expected another name for each")
        if region.nbytes is not None and not (type(region.nbytes) is int and 0 <= region.nbytes < ADDRESSES):
            raise UsageError(f"regions: {region.name!r} has {region.nbytes} bytes, expected a number below 2^63")
    if unbounded := [region.name for region in regions[:-1] if region.nbytes is None]:
        raise UsageError(f"regions: {unbounded[0]!r} has no size; only the last region may be as large as it has to be")


@dataclass(frozen=True, slots=True)
class Slot:
    """An entry of the slot table: the value that is bound to `vid` at run time."""

    vid: int
    name: str
    """The name of the value in the graph."""
    spec: TensorSpec
    """Shape, dtype and device of the bound tensor."""
    role: Role
    """Where the value comes from, which says who owns its storage."""
    strides: tuple[int, ...] | None = None
    """Traced strides of an input or stored value, in elements; None if the value was contiguous."""


@dataclass(frozen=True, slots=True)
class FeedEntry:
    """One tensor that the caller gives."""

    name: str
    """The name by which the caller gives the tensor."""
    spec: TensorSpec
    """The shape, dtype and device that the tensor has to have."""
    strides: tuple[int, ...] | None = None
    """Strides while the plan runs, None for row-major; a tensor with other strides is copied."""


FeedSignature = tuple[FeedEntry, ...]
"""Hashable: the key under which a plan, and later a capture, may be cached."""


@dataclass(frozen=True, slots=True)
class ExecutionPlan:
    """Kernel calls in order, and where every value lives.

    A value has its storage from the caller or the model (external roles), from `alias`, or from `offsets`; exactly one
    of the three. `slots[vid]` describes value `vid`.
    """

    graph_name: str
    """The name of the graph that was planned."""
    slots: tuple[Slot, ...]
    calls: tuple[KernelCall, ...]
    """The kernel calls in the order in which they run."""
    order: tuple[int, ...]
    """The id of the graph's op that each call came from."""
    inputs: tuple[int, ...]
    """The vids of the graph's inputs, in the caller's order."""
    outputs: tuple[int, ...]
    """The vids of the graph's outputs, in the caller's order."""
    alias: Mapping[int, int]
    """{out_vid: in_vid}: shares storage with a value bound earlier."""
    layouts: Mapping[int, Layout]
    """{vid: strides and offset in its root's storage}, for values that are not row-major from its first element:
    aliases, and inputs and stored values that had other strides in the trace."""
    offsets: Mapping[int, int]
    """{vid: byte offset in the arena}, for the values that own their storage there."""
    arena_bytes: int
    """The size of the arena that the plan needs, in bytes, with the alignment."""
    live_bytes: int
    """The most bytes alive in one call: the lower bound for `arena_bytes`, before alignment."""
    feed_signature: FeedSignature
    """Graph inputs in order, then the weights that have no payload, which come with the feed."""
    updates: Mapping[int, int] = field(default_factory=dict)
    """{vid of a state or input: vid of the value that it has after the run}."""
    bodies: Mapping[int, tuple[ExecutionPlan, ...]] = field(default_factory=dict)
    """{index of a call: the plans of its bodies}; each has an arena of its own."""
    graph_digest: str = ""
    """The `digest_graph` of the graph that the plan was made of. Empty in a plan that was put together by hand."""
    memory: MemoryMap | None = None
    """A map over several regions, for machines that have them; None for the one arena."""
    alignment: int = ALIGNMENT
    """Offsets are multiples of this number of bytes, a power of two that the kernels of the device ask for."""
    _roots: dict[int, int] = field(default_factory=dict, init=False, repr=False, compare=False)
    """A cache for the method `root`."""

    def __post_init__(self) -> None:
        for name in ("slots", "calls", "order", "inputs", "outputs"):
            if not isinstance(found := getattr(self, name), tuple):
                raise UsageError(f"ExecutionPlan: {name} is {describe_argument(found)}; expected a tuple")
        for name in ("alias", "layouts", "offsets", "updates", "bodies"):
            if not isinstance(found := getattr(self, name), Mapping):
                raise UsageError(f"ExecutionPlan: {name} is {describe_argument(found)}; expected a mapping by vid")
            object.__setattr__(self, name, MappingProxyType(dict(found)))

    def __repr__(self) -> str:
        return (
            f"ExecutionPlan({self.graph_name!r}): {plural(len(self.calls), 'call')}, "
            f"{plural(len(self.slots), 'value')}, arena of {bytes_text(self.arena_bytes)}"
        )

    def root(self, vid: int) -> int:
        """The value that owns the storage of `vid`: an external value, or one with an offset in the arena."""
        return find_root(vid, self.alias, self._roots)

    def layout(self, vid: int) -> Layout:
        """The layout of `vid` in the storage of its root."""
        return self.layouts.get(vid) or Layout.contiguous(self.slots[vid].spec.sizes)

    def strides(self, vid: int) -> tuple[int, ...] | None:
        """Strides of `vid` in elements; None for row-major from the first element of the storage."""
        return self.layouts[vid].strides if vid in self.layouts else None

    def generic_calls(self) -> dict[str, int]:
        """How often the plan and its bodies call each operator of torch by name, the most frequent first."""
        by_name = Counter(
            str(unpack(call.attr_schema, call.attr_blob)["op"])
            for call in self.calls
            if call.kind_id in (Kind.Aten, Kind.HigherOrder)
        )
        for body in (body for bodies in self.bodies.values() for body in bodies):
            by_name.update(body.generic_calls())
        return dict(by_name.most_common())


@expects(graph=a(Graph, "a Graph"), calls=A_LIST)
def make_plan(graph: Graph, calls: Sequence[KernelCall], alignment: int = ALIGNMENT) -> ExecutionPlan:
    """Decide aliases and arena offsets for `calls`, the result of `lower(graph)`.

    `alignment`: bytes, of the device that the plan is for.

    Args:
        graph: a graph with concrete sizes.
        calls: the result of `lower(graph)`.
        alignment: in bytes, of each offset in the arena; the device of the plan asks for it.

    Raises:
        UsageError: a dimension is still a name, or a value is larger than any memory.
        InternalError: the calls are not those of the graph.
    """
    refuse_named_dims(graph)
    _refuse_endless_values(graph)
    if len(calls) != len(graph.ops):
        raise InternalError(
            f"{plural(len(calls), 'call')} for {plural(len(graph.ops), 'op')} of graph {graph.name!r}; lower it again"
        )
    lives = lifetimes(graph, calls)
    sharing = decide_aliases(graph, calls, lives)
    blocks = _blocks(graph, sharing.alias, lives)
    offsets, arena_bytes = assign_offsets(blocks, alignment)
    return ExecutionPlan(
        graph_name=graph.name,
        slots=tuple(_slot(value) for value in graph.values),
        calls=tuple(calls),
        order=tuple(op.oid for op in graph.ops),
        inputs=graph.inputs,
        outputs=graph.outputs,
        alias=sharing.alias,
        layouts=sharing.layouts,
        offsets=offsets,
        arena_bytes=arena_bytes,
        live_bytes=live_peak(blocks),
        feed_signature=_feed_signature(graph, sharing.layouts),
        updates=graph.updates,
        bodies={
            at: tuple(make_plan(body, lower(body), alignment) for body in op.bodies)
            for at, op in enumerate(graph.ops)
            if op.bodies
        },
        graph_digest=digest_graph(graph),
        alignment=alignment,
    )


def _blocks(graph: Graph, alias: Mapping[int, int], lives: Mapping[int, Lifetime]) -> list[Block]:
    """One block for each storage class in the arena. An expanded view shows more bytes than its root has."""
    return [
        Block(
            root,
            graph.values[root].spec.nbytes,
            Lifetime(min(lives[vid].first for vid in vids), max(lives[vid].last for vid in vids)),
        )
        for root, vids in storage_classes(alias, range(len(graph.values))).items()
        if graph.values[root].role not in EXTERNAL
    ]


def _slot(value: Value) -> Slot:
    return Slot(value.vid, value.name, value.spec, value.role, traced_strides(value))


def _feed_signature(graph: Graph, layouts: Mapping[int, Layout]) -> FeedSignature:
    """Inputs, then the weights without a payload that something reads.

    States that runs update stay with the executor: they are given once, and not with each feed.
    """
    bound = {*graph.payloads, *graph.updates} - set(graph.inputs)
    read = {vid for op in graph.ops for vid in op.inputs} | {*graph.outputs, *graph.updates.values()}
    given = [value.vid for value in graph.with_role(*EXTERNAL - {Role.INPUT})]
    weightless = [vid for vid in given if vid not in bound and vid in read]
    return tuple(
        FeedEntry(graph.values[vid].name, graph.values[vid].spec, layouts[vid].strides if vid in layouts else None)
        for vid in (*graph.inputs, *weightless)
    )


SHOWN = 3


def _refuse_endless_values(graph: Graph) -> None:
    """Check that the bytes of every value can be addressed.

    Raises:
        UsageError: a value has 2⁶³ bytes or more; a size of 0 does not help, since strides are counted without it.
    """
    for value in graph.values:
        extent = math.prod(max(size, 1) for size in value.spec.sizes) * DTYPE_BITS[value.spec.dtype] // 8
        if extent >= ADDRESSES:
            shown = "×".join(f"{size}" if size < ADDRESSES else "…" for size in value.spec.sizes)
            raise UsageError(
                f"graph {graph.name!r}: {value.name!r} is {value.spec.dtype}[{shown}], and no machine can address so "
                "many bytes; look at the sizes in the file that the graph was read from"
            )


@expects(graph=a(Graph, "a Graph"))
def refuse_named_dims(graph: Graph) -> None:
    """Check that every size of the graph is a number.

    Args:
        graph: the graph to check.

    Raises:
        UsageError: a dimension is still a name.
    """
    named = [f"{value.name}{list(value.spec.shape)}" for value in graph.values if not value.spec.is_static]
    if named:
        raise UsageError(
            f"graph {graph.name!r}: {plural(len(named), 'value')} with named dims ({join_first(named, SHOWN, ', …')}); "
            "a plan needs concrete sizes: export with fixed shapes, or give the dims sizes first, by fix_dims"
        )
