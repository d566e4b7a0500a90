"""A page's console blocks as commands, each with what the page says that it writes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

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
    """The first line of `shown` that does not come in `written`, in this order; None if all do. Blanks and the frames
    of tables are no matter."""
    lines = iter([_without_frames(line) for line in written.splitlines()])
    for line in shown:
        pattern = re.compile(".*".join(re.escape(piece) for piece in _without_frames(line).split("…")))
        if not any(pattern.fullmatch(written_line) for written_line in lines):
            return line
    return None


def _without_frames(line: str) -> str:
    return " ".join(re.sub("[│┃|]", " ", line).split())
