"""Which storage class is where in the arena of a plan, and when; and a memory map over several regions, fastest first.

A storage class of the plan is a value with all values that share its bytes. A machine with a small fast memory and a
large slow memory keeps in the fast memory what the next calls need, so a storage class moves between regions. Each
move is a copy before a call: a spill to a slower region, a fill to a faster region. The map is data for compilers and
simulators; this runtime runs in one arena and does not read the map. Inputs and stored values stay where the caller has
them.

The first region is filled like a cache whose future is known: the class that is read last is evicted first. Time is
counted in half calls, so that during a move both places are taken, and moves before the same call do not collide.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from passes.suggest import bytes_text, join_first, nearest, plural
from pipeline.argument_checks import A_LIST, MAPPING, WHOLE, a, expects
from pipeline.errors import UsageError
from pipeline.planning.arena import Block, Lifetime, align, assign_offsets
from pipeline.planning.plan import ExecutionPlan, MemoryMap, MemoryRegion, Residence, check_regions


@dataclass(frozen=True, slots=True)
class Occupant:
    """A storage class in the arena, named by its root."""

    root: int
    """The vid that names the storage class."""
    name: str
    """The name of that value, for messages."""
    offset: int
    """Where the storage class begins in the arena, in bytes."""
    nbytes: int
    """The size of the storage class, in bytes."""
    life: Lifetime
    """The life of a graph output, and of the new value of a state, ends at the number of calls."""
    calls: tuple[int, ...]
    """The calls that read or write it, in order."""


@expects(plan=a(ExecutionPlan, "an ExecutionPlan"))
def occupants(plan: ExecutionPlan) -> dict[int, Occupant]:
    """By root, in the order of offsets in the plan; classes without bytes are left out.

    Args:
        plan: the plan whose arena is read.
    """
    calls: dict[int, list[int]] = {root: [] for root in plan.offsets}
    for at, call in enumerate(plan.calls):
        for root in {plan.root(vid) for vid in (*call.in_vids, *call.out_vids)} & calls.keys():
            calls[root].append(at)
    leaving = {plan.root(vid) for vid in (*plan.outputs, *plan.updates.values())}
    return {
        root: Occupant(
            root,
            plan.slots[root].name,
            plan.offsets[root],
            plan.slots[root].spec.nbytes,
            Lifetime(seen[0], len(plan.calls) if root in leaving else seen[-1]),
            tuple(seen),
        )
        for root, seen in calls.items()
        if plan.slots[root].spec.nbytes
    }


@expects(everyone=A_LIST, calls=WHOLE)
def alive_bytes(everyone: Sequence[Occupant], calls: int) -> list[int]:
    """By call, the bytes that are alive in it.

    Args:
        everyone: the occupants of a plan, in any order.
        calls: how many calls the plan has.
    """
    change = [0] * (calls + 2)
    for occupant in everyone:
        change[occupant.life.first] += occupant.nbytes
        change[min(occupant.life.last, calls) + 1] -= occupant.nbytes
    alive, found = 0, []
    for step in change[:calls]:
        alive += step
        found.append(alive)
    return found


SHOWN: Final = 3
"""Values that an error names."""


@expects(plan=a(ExecutionPlan, "an ExecutionPlan"), pins=MAPPING.or_none())
def map_memory(
    plan: ExecutionPlan, regions: Sequence[MemoryRegion], pins: Mapping[str, str] | None = None
) -> ExecutionPlan:
    """`plan` with a memory map.

    Args:
        plan: the plan, which stays as it is.
        regions: from the fastest to the slowest.
        pins: name of a value → name of the region that holds the value during its whole life.

    Raises:
        UsageError: a pin of a value or region that is not there, or regions that are too small or that
            `check_regions` refuses.
    """
    check_regions(regions)
    pinned = _resolve_pins(plan, regions, pins or {})
    stays = occupants(plan)
    last = len(regions) - 1
    fixed = [
        [_whole_life(stays[root]) for root, region in pinned.items() if region == at] for at in range(len(regions))
    ]
    free = [stay for root, stay in stays.items() if root not in pinned]
    residences: list[Residence] = []
    rest: list[_Span] = []
    for at, region in enumerate(regions):
        base = _place_pinned(region, at, fixed[at], residences, plan.alignment)
        room = None if region.nbytes is None else region.nbytes - base
        if at == 0 and room is not None and last:
            rest = _spans_in_cache(free, room, plan.alignment)
        elif at == 0:
            rest = _whole_lives(free)
        placed, beyond = _place(rest, room, base, at, plan.alignment)
        if at == last and beyond:
            raise UsageError(
                f"regions: {region.name!r} has {bytes_text(region.nbytes or 0)}, which does not hold "
                f"{_names(plan, beyond)}; expected a last region without a size, or a larger one"
            )
        residences += placed
        rest = _complement(free, residences) if at == 0 else beyond
    order = sorted(residences, key=lambda residence: (residence.root, residence.first))
    return replace(plan, memory=MemoryMap(tuple(regions), tuple(order), dict(sorted(pinned.items()))))


@dataclass(frozen=True, slots=True)
class _Span:
    """Calls `first` to `last` in the life of a storage class, in one region; `life` is the whole life."""

    root: int
    nbytes: int
    first: int
    last: int
    life: Lifetime

    @property
    def taken(self) -> Lifetime:
        """In half calls: the place is taken from the move that fills it to the move that empties it, both included."""
        return Lifetime(
            2 * self.first + (self.first == self.life.first), 2 * self.last + (1 if self.last == self.life.last else 2)
        )


def _resolve_pins(plan: ExecutionPlan, regions: Sequence[MemoryRegion], pins: Mapping[str, str]) -> dict[int, int]:
    """{root: region} for values and regions by name."""
    names = [region.name for region in regions]
    vids: dict[str, list[int]] = {}
    for slot in plan.slots:
        vids.setdefault(slot.name, []).append(slot.vid)
    found: dict[int, int] = {}
    for name, region in pins.items():
        if name not in vids:
            raise UsageError(f"pins: the plan has no value {name!r}{nearest(str(name), vids)}")
        if region not in names:
            raise UsageError(f"pins: {name!r} is pinned to {region!r}; expected one of {', '.join(names)}")
        if len(vids[name]) > 1:
            raise UsageError(f"pins: {len(vids[name])} values are called {name!r}; pin a value that has its own name")
        root = plan.root(vids[name][0])
        if root not in plan.offsets:
            raise UsageError(f"pins: {name!r} is not in the arena; its bytes stay where the caller has them")
        if found.setdefault(root, names.index(region)) != names.index(region):
            raise UsageError(f"pins: {name!r} shares its bytes with a value that is pinned to another region")
    return {root: at for root, at in found.items() if plan.slots[root].spec.nbytes}


def _place_pinned(
    region: MemoryRegion, at: int, spans: Sequence[_Span], residences: list[Residence], alignment: int
) -> int:
    """Place pinned spans at the front of a region; returns how many bytes they take there."""
    placed, _ = _place(spans, None, 0, at, alignment)
    base = max((region.offset + span.nbytes for region, span in zip(placed, spans, strict=True)), default=0)
    if region.nbytes is not None and base > region.nbytes:
        raise UsageError(
            f"pins: they take {bytes_text(base)} of {region.name!r}, which has {bytes_text(region.nbytes)}; expected "
            "fewer or smaller values, or a larger region"
        )
    residences += placed
    return align(base, alignment)


def _place(
    spans: Sequence[_Span], room: int | None, base: int, region: int, alignment: int
) -> tuple[list[Residence], list[_Span]]:
    """Residences for the spans that fit into `room` bytes starting at `base`, and the spans that do not fit."""
    offsets, _ = assign_offsets([Block(at, span.nbytes, span.taken) for at, span in enumerate(spans)], alignment)
    fits = [room is None or offsets[at] + span.nbytes <= room for at, span in enumerate(spans)]
    placed = [
        Residence(span.root, region, base + offsets[at], span.first, span.last)
        for at, span in enumerate(spans)
        if fits[at]
    ]
    return placed, [span for at, span in enumerate(spans) if not fits[at]]


def _names(plan: ExecutionPlan, spans: Sequence[_Span]) -> str:
    """The values that have these spans, the first of them by name."""
    names = list(dict.fromkeys(plan.slots[span.root].name for span in spans))
    return f"{plural(len(names), 'value')} of the plan ({join_first(names, SHOWN, ', …')})"


def _whole_life(stay: Occupant) -> _Span:
    return _Span(stay.root, stay.nbytes, stay.life.first, stay.life.last, stay.life)


def _whole_lives(stays: Sequence[Occupant]) -> list[_Span]:
    return [_whole_life(stay) for stay in stays]


def _spans_in_cache(stays: Sequence[Occupant], room: int, alignment: int) -> list[_Span]:
    """When each class is in a cache of `room` bytes, if all calls can have their operands there."""
    by_call: dict[int, list[Occupant]] = {}
    for stay in stays:
        for call in stay.calls:
            by_call.setdefault(call, []).append(stay)
    cache = _Cache(room, alignment)
    for call in sorted(by_call):
        wanted = sorted(by_call[call], key=lambda stay: (stay.root not in cache.since, stay.nbytes))
        kept: set[int] = set()
        for stay in wanted:
            if cache.hold(stay, call, kept):
                kept.add(stay.root)
        for stay in by_call[call]:
            if stay.life.last == call:
                cache.leave(stay, call)
    for stay in [*cache.since.values()]:
        cache.leave(stay[0], stay[0].life.last)
    return cache.spans


@dataclass(slots=True)
class _Cache:
    """The current content of the first region, and the spans of its earlier content."""

    room: int
    alignment: int
    used: int = 0
    """The bytes in use; those of each class are rounded up to the alignment."""
    since: dict[int, tuple[Occupant, int]] = field(default_factory=dict)
    spans: list[_Span] = field(default_factory=list)

    def hold(self, stay: Occupant, call: int, kept: set[int]) -> bool:
        """Bring a class in for `call`, and evict other classes, but none of `kept`; False if there is no room."""
        if stay.root in self.since:
            return True
        needed = self.used + align(stay.nbytes, self.alignment) - self.room
        if needed > 0 and not self._evict(needed, call, kept):
            return False
        self.since[stay.root] = stay, call
        self.used += align(stay.nbytes, self.alignment)
        return True

    def _evict(self, nbytes: int, call: int, kept: set[int]) -> bool:
        """Evict the classes that are needed last, but none of `kept`, until `nbytes` are free; False if that is
        impossible."""
        rest = [other for root, (other, _) in self.since.items() if root not in kept]
        if sum(align(block.nbytes, self.alignment) for block in rest) < nbytes:
            return False
        rest.sort(key=lambda other: (_next_call(other, call), other.nbytes, other.root))
        while nbytes > 0:
            victim = rest.pop()
            self.leave(victim, victim.calls[bisect_left(victim.calls, call) - 1])
            nbytes -= align(victim.nbytes, self.alignment)
        return True

    def leave(self, stay: Occupant, last: int) -> None:
        """End the span of a class that the cache may hold."""
        held = self.since.pop(stay.root, None)
        if held is not None:
            self.used -= align(stay.nbytes, self.alignment)
            self.spans.append(_Span(stay.root, stay.nbytes, held[1], last, stay.life))


def _next_call(stay: Occupant, call: int) -> int:
    """The first call that needs a class, at `call` or later; the end of the class's life if none does."""
    at = bisect_left(stay.calls, call)
    return stay.calls[at] if at < len(stay.calls) else stay.life.last + 1


def _complement(stays: Sequence[Occupant], residences: Sequence[Residence]) -> list[_Span]:
    """The parts of all classes' lives that are in no region yet."""
    by_root: dict[int, list[Residence]] = {}
    for residence in sorted(residences, key=lambda residence: residence.first):
        by_root.setdefault(residence.root, []).append(residence)
    return [span for stay in stays for span in _gaps(stay, by_root.get(stay.root, []))]


def _gaps(stay: Occupant, held: Sequence[Residence]) -> Iterator[_Span]:
    begin = stay.life.first
    for residence in held:
        if begin < residence.first:
            yield replace(_whole_life(stay), first=begin, last=residence.first - 1)
        begin = residence.last + 1
    if begin <= stay.life.last:
        yield replace(_whole_life(stay), first=begin)
