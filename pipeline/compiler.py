"""The C++ compiler of this machine, which kernels in C++ need. It is looked for without torch, before a run begins."""

from __future__ import annotations

import os
import shlex
import shutil

from pipeline.errors import UsageError

__all__ = ["LEAVE_OUT", "find_compiler"]

COMPILERS = ("c++", "g++", "clang++")

LEAVE_OUT = "or leave out `native`, without which torch computes everything"


def find_compiler() -> tuple[str, ...]:
    """`$CXX`, which may have arguments or be a compiler behind ccache, or the first of `COMPILERS` that is there.

    Raises:
        UsageError: none is there.
    """
    chosen = os.environ.get("CXX", "")
    try:
        program, *arguments = shlex.split(chosen) or [""]
    except ValueError as error:
        raise UsageError(f"native: $CXX is {chosen!r}, which has no end ({error}); write a command") from error
    path = next(filter(None, map(shutil.which, [program] if program else COMPILERS)), None)
    if path is None:
        tried = f"{program!r} of $CXX" if program else f"any of {', '.join(COMPILERS)}"
        raise UsageError(f"native needs a C++ compiler, and did not find {tried}; install one, {LEAVE_OUT}")
    return path, *arguments
