"""What became of encodings that were carried: as lines for people, as data for programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from passes.encodings.carry import CarriedEncodings
from passes.suggest import plural

FORMAT_VERSION = 1


def summarize_carried(carried: CarriedEncodings) -> str:
    """One sentence: how many encodings the final model has, and how many are missing."""
    stale = sum(lost.kind != "gone" for lost in carried.lost)
    return (
        f"encodings: {plural(len(carried.encodings), 'tensor')} of the final model; "
        f"of the source's, {len(carried.lost) - stale} are gone and {stale} stale; "
        f"{plural(len(carried.uncovered), 'tensor')} without one"
    )


def describe_carried(carried: CarriedEncodings) -> Iterator[str]:
    """A line for each encoding that was not carried, and for each tensor without one."""
    for lost in carried.lost:
        yield f"{lost.kind}: {lost.tensor}{_by(lost.by)}: {lost.reason}"
    for tensor in carried.uncovered:
        yield f"no encoding: {tensor.tensor}{_by(tensor.by)}: {tensor.reason}"


def _by(author: str) -> str:
    return f" (by {author})" if author else ""


def carried_as_data(carried: CarriedEncodings) -> dict[str, Any]:
    """The same as data that JSON can hold; the encodings themselves have a file of their own."""
    return {
        "format_version": FORMAT_VERSION,
        "encodings": len(carried.encodings),
        "sources": {name: list(sources) for name, sources in carried.sources.items()},
        "lost": [asdict(lost) for lost in carried.lost],
        "uncovered": [asdict(tensor) for tensor in carried.uncovered],
    }
