"""What users write and read: names and globs, the nearest name to one that is not there, numbers with their nouns."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import Final

UNITS: Final = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def is_named(name: str, pattern: str) -> bool:
    """Whether `pattern`, a name or a glob, means `name`; a name such as `scale[0]` means itself, too."""
    return name == pattern or fnmatchcase(name, pattern)


def nearest(name: str, known: Iterable[str]) -> str:
    """`"; did you mean 'fuse_qkv'?"`, or nothing when no known name is near, in whatever case."""
    close = nearest_names(name, known, count=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def nearest_names(name: str, known: Iterable[str], count: int, cutoff: float = 0.6) -> list[str]:
    """At most `count` known names that are near, the nearest first; case does not count.

    Args:
        name: what was written.
        known: the names that there are.
        count: the most names to return.
        cutoff: how near a name has to be: at 1 only the same name is, at 0 every name.
    """
    by_letters = {known_name.lower(): known_name for known_name in known}
    return [by_letters[letters] for letters in difflib.get_close_matches(str(name).lower(), by_letters, count, cutoff)]


def plural(count: int, word: str, words: str = "") -> str:
    """`1 pass`, `2 passes`; `words` where the plural is not `word` and an s."""
    return f"{count:,} {word if count == 1 else words or word + 's'}"


def say_count(count: int, word: str, rest: str) -> str:
    """`2 norms in parts`; nothing where there are none."""
    return f"{plural(count, word)} {rest}" if count else ""


def say_left(reasons: Sequence[str], word: str) -> str:
    """`2 guards left, softmax_1: its mask is an input`: how many stay as they are, and why the first does."""
    return f"{plural(len(reasons), word)} left, {reasons[0]}" if reasons else ""


def with_article(noun: str) -> str:
    """`an int`, `a DynamicCache`."""
    return f"{'an' if noun[0] in 'aeiouAEIOU' else 'a'} {noun}"


def bytes_text(count: int) -> str:
    """`329.1 MiB`, `12 B`."""
    for size, unit in UNITS:
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def milliseconds_text(seconds: float) -> str:
    """`0.35 ms`, `140 ms`."""
    milliseconds = seconds * 1000
    return f"{milliseconds:.2f} ms" if milliseconds < 100 else f"{milliseconds:.0f} ms"


def join_first(entries: Sequence[object], most: int, rest: str = " and {} more", separator: str = ", ") -> str:
    """`a, b and 3 more`: the first `most` entries as text; `rest` follows only where entries are left out.

    Args:
        entries: what is listed.
        most: how many entries are shown.
        rest: a text with `{}` where the number of other entries stands; `AND_MORE` and `ELLIPSIS` are others.
        separator: what stands between entries.
    """
    left = len(entries) - most
    return separator.join(map(str, entries[:most])) + (rest.format(left) if left > 0 else "")


def join_words(words: Iterable[str], word: str = "or") -> str:
    """`a, b or c`; "none" where there are none."""
    *first, last = list(words) or ["none"]
    return f"{', '.join(first)} {word} {last}" if first else last


AND_MORE: Final = " (and {} more)"
ELLIPSIS: Final = " …"


def shorten_lines(lines: Iterable[str]) -> str:
    """The lines as one text of ten lines at most: the first is a title, and lines that are left out are counted."""
    rest = iter(lines)
    shown = list(islice(rest, MOST_LINES))
    if left := sum(1 for _ in rest):
        shown[-1] = f"and {left + 1} more lines"
    return "\n  ".join(shown)


def describe_absence(path: Path) -> str:
    """What stands where a file was expected."""
    if path.is_dir():
        return "it is a folder"
    return "it is no regular file" if path.exists() else "no such file"


def describe_argument(item: object) -> str:
    """What a caller has given, in one line: a short value as it is written, of anything else its type."""
    if item is None or isinstance(item, bool | int | float | str | bytes):
        return repr(item) if len(repr(item)) <= MOST_LETTERS else with_article(type(item).__name__)
    return f"the class {item.__name__}" if isinstance(item, type) else with_article(type(item).__name__)


MOST_LINES: Final = 10
"""The longest summary that a result prints of itself."""

MOST_LETTERS: Final = 60
"""The longest value that is shown as it is written."""
