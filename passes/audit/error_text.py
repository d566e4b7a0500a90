"""What went wrong, in words that are the same on every machine and for every model."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["message_of", "normalize", "signal_in"]

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
"""Pattern → what stands for it."""


def message_of(error: BaseException) -> str:
    """The type of an error and the first line that says something, without what differs from model to model."""
    return normalize(f"{type(error).__name__}: {error}")


def normalize(text: str) -> str:
    """One line of at most 110 characters."""
    line = next((one.strip() for one in text.splitlines() if one.strip(" :")), "")
    for pattern, instead in CHANGING:
        line = re.sub(pattern, instead, line)
    line = " ".join(line.split())
    return line if len(line) <= LENGTH else line[: LENGTH - 1].rstrip() + "…"


def signal_in(message: str) -> str:
    """`SIGSEGV` out of what is said of a process that died, or what it says of memory."""
    found = re.search(r"signal (SIG\w+)|exit code -?\d+|out of memory|more memory", message)
    return found[1] or found[0] if found else "died"
