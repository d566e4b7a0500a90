"""A page's console blocks as commands, each with what the page says that it writes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ANYTHING = "…"

EXIT_CODE = re.compile(r"\[exit code (\d+)\]")


@dataclass(frozen=True, slots=True)
class Command:
    """Shell `text`; `shown` are the lines below it, `code` the exit code (`[exit code 1]` in a line of its own)."""

    text: str
    shown: tuple[str, ...]
    code: int


def commands_of(page: Path) -> list[Command]:
    """`$ ` begins a command, `> ` goes on with it; what follows is what it writes, `…` for anything."""
    blocks = re.findall(r"^```console\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [_command(part) for block in blocks for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]]


def _command(part: str) -> Command:
    first, *lines = part.splitlines()
    length = next((place for place, line in enumerate(lines) if not line.startswith(">")), len(lines))
    text = "\n".join([first, *(line.removeprefix(">").removeprefix(" ") for line in lines[:length])])
    shown = [line for line in lines[length:] if line.strip() and not EXIT_CODE.fullmatch(line)]
    codes = [int(match[1]) for line in lines if (match := EXIT_CODE.fullmatch(line))]
    return Command(text, tuple(shown), codes[0] if codes else 0)


def missing_line(shown: tuple[str, ...], written: str) -> str | None:
    """The first line of `shown` that does not come in `written` where the page has it; None if all do.

    `…` alone stands for any lines, and within a line for any text. Without it line follows line, from the first line
    written to the last. Blanks and the frames of tables are no matter. A command of which a page shows nothing may
    write anything.
    """
    lines = [line for line in map(_without_frames, written.splitlines()) if line]
    blocks: list[list[str]] = [[]]
    for line in shown:
        if line.strip() == ANYTHING:
            blocks.append([])
        else:
            blocks[-1].append(line)
    place = 0
    for number, block in enumerate(blocks):
        last = len(lines) - len(block)
        starts = range(place, last + 1)
        if number == 0:
            starts = range(1)
        elif number == len(blocks) - 1 and block:
            starts = range(max(last, 0), last + 1)
        misses = [(_count_alike(block, lines[start:]), start) for start in starts] or [(0, 0)]
        alike, start = max(misses, key=lambda found: (found[0], -found[1]))
        if alike < len(block):
            return block[alike]
        place = start + len(block)
    if shown and len(blocks) == 1 and place < len(lines):
        return f"(the page ends before) {lines[place]}"
    return None


def _count_alike(block: list[str], lines: list[str]) -> int:
    """How many lines of `block` are those of `lines`, from the first of both."""
    for place, line in enumerate(block):
        pattern = ".*".join(re.escape(piece) for piece in _without_frames(line).split(ANYTHING))
        if place >= len(lines) or not re.fullmatch(pattern, lines[place]):
            return place
    return len(block)


def _without_frames(line: str) -> str:
    return " ".join(re.sub("[│┃|]", " ", line).split())
