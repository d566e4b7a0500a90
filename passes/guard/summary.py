"""The last lines of a guard."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from passes.guard.record import GuardedCall
from passes.guard.settings import Settings

__all__ = ["summary"]


def summary(calls: Sequence[GuardedCall], settings: Settings) -> Iterator[str]:
    """What was intercepted, what was saved, and what was asked for in vain."""
    if not calls:
        yield "no call of an optimizer was intercepted"
        return
    kept: Counter[str] = Counter()
    for call in calls:
        kept.update(call.kept or {})
    lost = sum(len(call.would_have_lost) for call in calls)
    faulty = sum(bool(call.unguarded_fault) for call in calls)
    words = [f"{len(calls)} call{'s' * (len(calls) != 1)} of an optimizer"]
    words += [f"kept {kind} ×{count}" for kind, count in kept.items() if count]
    words += [f"{lost} would have been lost without the guard"] if lost else []
    words += [f"{faulty} would have gone wrong without the guard"] if faulty else []
    yield ", ".join(words)
    for entry in settings.keep:
        if not entry.endswith("?") and not kept[entry]:
            yield f"warning: keep: {entry} matches nothing in any of the models"
