"""The nearest name to one that is not there."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["nearest"]


def nearest(name: str, known: Iterable[str]) -> str:
    """`"; did you mean 'fuse_qkv'?"`, or nothing when no known name is near, in whatever case."""
    by_letters = {one.lower(): one for one in known}
    close = difflib.get_close_matches(name.lower(), by_letters, n=1, cutoff=0.6)
    return f"; did you mean {by_letters[close[0]]!r}?" if close else ""
