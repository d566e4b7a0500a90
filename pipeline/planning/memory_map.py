"""A memory map as data: regions, which storage class is in which of them during which calls, and the copies between."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from pipeline.argument_checks import TEXT, expects
from pipeline.errors import UsageError

SIZE: Final = re.compile(r"([0-9]{1,19})(B|KiB|MiB|GiB)")
UNITS: Final = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}

ADDRESSES: Final = 2**63
"""More bytes than that cannot be addressed, nor written into a plan.bin."""


@dataclass(frozen=True, slots=True)
class MemoryRegion:
    """A memory of a machine; `nbytes` is None where it is as large as it has to be."""

    name: str
    nbytes: int | None = None


@dataclass(frozen=True, slots=True)
class Residence:
    """From call `first` to call `last` a storage class is in a region, from byte `offset` on."""

    root: int
    region: int
    offset: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Move:
    """A copy of a storage class from one region to another, between call `before - 1` and call `before`."""

    before: int
    root: int
    source: Residence
    target: Residence


@dataclass(frozen=True, slots=True)
class MemoryMap:
    """Which region holds what, and when; regions are in order, the fastest first."""

    regions: tuple[MemoryRegion, ...]
    residences: tuple[Residence, ...]
    """By root and time. Those of a root follow upon one another without a gap."""
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
        UsageError: there is none, a name that stands twice or that `--pin VALUE=REGION` cannot say, or a size that is
            missing before the last region or that no machine can address.
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
