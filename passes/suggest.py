"""Words of messages: the nearest name to one that is not there, and a number with its noun."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["nearest", "plural"]


def nearest(name: str, known: Iterable[str]) -> str:
    """`"; did you mean 'fuse_qkv'?"`, or nothing when no known name is near, in whatever case."""
    by_letters = {one.lower(): one for one in known}
    close = difflib.get_close_matches(name.lower(), by_letters, n=1, cutoff=0.6)
    return f"; did you mean {by_letters[close[0]]!r}?" if close else ""


def plural(count: int, word: str, words: str = "") -> str:
    """`1 pass`, `2 passes`; `words` where the plural is not `word` and an s."""
    return f"{count:,} {word if count == 1 else words or word + 's'}"
