"""The text of a Graph as tokens, each with its place. The grammar is in `parse`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Token", "tokens"]


@dataclass(frozen=True, slots=True)
class Token:
    kind: str
    """vid, use, hex, number, string, word, mark, end, or bad for a character that begins nothing."""
    text: str
    """As written: a string keeps its quotes, so that it is never taken for a keyword."""
    line: int
    column: int


def tokens(text: str) -> Iterator[Token]:
    """The tokens of `text`, then `end` tokens as often as asked for. Blanks and comments are passed over."""
    line, start = 1, 0
    for match in TOKEN.finditer(text):
        kind = match.lastgroup or "bad"
        if kind == "newline":
            line, start = line + 1, match.end()
        elif kind != "blank":
            yield Token(kind, match.group(), line, match.start() - start + 1)
    while True:
        yield Token("end", "", line, len(text) - start + 1)


TOKEN = re.compile(
    r"""
      (?P<newline> \n )
    | (?P<blank>   [ \t\r]+ | \#[^\n]* )
    | (?P<vid>     %[0-9]+ )
    | (?P<use>     \$[0-9]+ )
    | (?P<hex>     0x[0-9a-f]* )
    | (?P<number>  -?[0-9]+(?:\.(?!\.)[0-9]*)?(?:e[+-]?[0-9]+)? | -inf )
    | (?P<string>  "(?:[^"\\\n]|\\.)*" )
    | (?P<word>    [A-Za-z_][A-Za-z0-9_]* )
    | (?P<mark>    [][(){},:=@] | \.\. )
    | (?P<bad>     . )
    """,
    re.VERBOSE,
)
