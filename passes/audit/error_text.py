"""Error messages, normalized so that they are equal on every machine and for every model."""

from __future__ import annotations

import re
from typing import Final

LENGTH: Final = 110

CHANGING: Final = (
    (r"'[^']*'|\"[^\"]*\"|\u2018[^\u2019]*\u2019", "'…'"),  # names of values and nodes
    (r"(?:/[\w.+-]+)+/([\w.+-]+)", r"\1"),  # folders
    (r"0x[0-9a-fA-F]+", "0x…"),
    (r"(?<=references: ).*", "…"),
    (r"\[ONNXRuntimeError\] : \d+ : \w+ : ", ""),
    (r"\S+\.(?:cc|h):\d+ \S.*[)>] (?=[A-Z])", ""),  # the place in C++, with its signature
    (r"(?<=implementation for )\w+", "…"),
    (r"\d+", "#"),
    (r"\(?node name: [^)]*\)?|node:? ?\S* ?name:? ?\S*|Name:\S*", "node"),
)
"""Pattern → replacement."""


def message_of(error: BaseException) -> str:
    """The type of an error and the first non-empty line of its message, normalized."""
    return normalize(f"{type(error).__name__}: {error}")


def normalize(text: str) -> str:
    """Reduce a message to one line of at most 110 characters, without names, paths, numbers and addresses."""
    line = next((part.strip() for part in text.splitlines() if part.strip(" :")), "")
    for pattern, instead in CHANGING:
        line = re.sub(pattern, instead, line)
    line = " ".join(line.split())
    return line if len(line) <= LENGTH else line[: LENGTH - 1].rstrip() + "…"


def signal_in(message: str) -> str:
    """The signal named in the message of a crash, such as `SIGSEGV`; else its exit code or its words on memory."""
    match = re.search(r"signal (SIG\w+)|exit code -?\d+|out of memory|more memory", message)
    return match[1] or match[0] if match else "died"
