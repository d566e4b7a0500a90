"""The C++ compiler of this machine, which kernels in C++ need. It is looked for without torch, before a run begins."""

from __future__ import annotations

import os
import shlex
import shutil

from pipeline.errors import UsageError

COMPILERS = ("c++", "g++", "clang++")

LEAVE_OUT = "or leave out `native`, without which torch computes everything"


def find_compiler() -> tuple[str, ...]:
    """The words of `$CXX`, a path or a command with arguments, or the first of `COMPILERS` that is there.

    Raises:
        UsageError: none is there.
    """
    chosen = os.environ.get("CXX", "").strip()
    for program, *arguments in [[chosen], _split_words(chosen)] if chosen else [[name] for name in COMPILERS]:
        path = shutil.which(program)
        if path is not None:
            return path, *arguments
    tried = f"{chosen!r} of $CXX" if chosen else f"any of {', '.join(COMPILERS)}"
    raise UsageError(f"native needs a C++ compiler, and did not find {tried}; install one, {LEAVE_OUT}")


def _split_words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:  # a quote that does not end
        return [command]
