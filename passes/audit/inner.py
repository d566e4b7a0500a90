"""What a step of many passes does wrong is told of the passes in it that are at fault; so only they are left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from passes.advisories import UNSAFE, Finding
from passes.advisories.table import round_trips
from passes.audit.subject import Subject
from passes.run.narrow import culprits

__all__ = ["told_of_inner"]

NARROWED: Final = UNSAFE | {"raised"}

MOST: Final = 3
"""Passes that can be at fault together; of more, none is."""


def told_of_inner(
    findings: Sequence[Finding], subjects: Sequence[Subject], tried: Callable[[Subject], Sequence[Finding]]
) -> tuple[Finding, ...]:
    """The findings on one case, where a bad one of a step is that of the smallest set of passes without which the step
    does nothing bad. It stays the step's own where there is no such set.

    Args:
        tried: every finding of a subject on the same case.
    """
    by_name = {subject.name: subject for subject in subjects}
    bad = [one for one in findings if one.kind in NARROWED]
    round_trip = {(one.name, one.kind) for one in bad}
    at_fault: dict[str, tuple[str, ...]] = {}
    for one in bad:
        own = round_trip.isdisjoint((name, one.kind) for name in round_trips(one.name))
        if own and one.name not in at_fault and by_name[one.name].inner:
            at_fault[one.name] = _culprits(by_name[one.name], tried)
    return tuple(told for one in findings for told in _told(one, at_fault.get(one.name, ())))


def _culprits(subject: Subject, tried: Callable[[Subject], Sequence[Finding]]) -> tuple[str, ...]:
    def is_good(left_out: tuple[str, ...]) -> bool:
        found = tried(replace(subject, left_out=left_out))
        return not any(one.kind in NARROWED for one in found)

    found = culprits(subject.inner, (), is_good) or ()
    return found if len(found) <= MOST else ()


def _told(one: Finding, at_fault: Sequence[str]) -> Iterator[Finding]:
    if one.kind in NARROWED and at_fault:
        yield from (replace(one, name=f"{one.name}/{bare}") for bare in at_fault)
    else:
        yield one
