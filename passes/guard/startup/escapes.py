"""Name the commands that take the guard from a Python, where a guarded process starts them.

A child gets the guard by its environment, so a Python misses the guard if it ignores PYTHONPATH (`python -I`), or if
something between it and this process changes its environment: `env -i`, or a shell that unsets or sets a variable. Both
can be read from the command, or from the shell's script. This module is loaded when a guarded process starts its first
program, so it imports little.
"""

from __future__ import annotations

import importlib
import json
import mmap
import os
import re
import shlex
import shutil

TYPE_CHECKING = False  # not typing's, which is slow to load
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

PYTHON = re.compile(r"(python|pypy)[\d.]*[a-z]*")
EMBEDDED = (b"Py_BytesMain", b"libpython3", b"PYTHONPATH")
"""Texts in the file of a program that runs Python, or links to it."""

IN_TEXT = re.compile(r"\b(python|pypy)[\d.]*\b")

IGNORES = re.compile(r"-[a-zA-Z]*?([IES])")
"""Options with which Python ignores PYTHONPATH, or runs no `sitecustomize`."""

SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ksh", "env"})

LARGEST_SCRIPT = 2**20
"""Bytes of a shell script that are read."""

HELPER = "from multiprocessing.resource_tracker import main"
"""A process that Python runs for itself; it never runs a script's code."""


def describe_escape(program: Any, arguments: Any, variable: str, folder: str) -> str:
    """A warning on a command in which a Python runs without the guard; empty if the command shows none.

    Args:
        program: the path of the program that is started, as text or bytes.
        arguments: its arguments, the name of the program first.
        variable: the environment variable that holds the guards.
        folder: the folder that the guard puts first on PYTHONPATH.
    """
    words = [os.fsdecode(word) for word in arguments if isinstance(word, str | bytes)]
    reason = _reason(os.fsdecode(program), words, variable)
    if not reason:
        return ""
    is_text = words[0] == "sh" and words[1:2] == ["-c"] and len(words) == 3
    command = words[2] if is_text else shlex.join(words)
    return f"child python started without the guard, so no call in it is guarded: {command} ({reason})"


def _reason(program: str, words: Sequence[str], variable: str) -> str:
    ignored = next(filter(None, map(IGNORES.match, _own_options(words[1:]))), None)
    if ignored and is_python(program):
        return f"python -{ignored[1]} reads no PYTHONPATH" if ignored[1] != "S" else "python -S loads no site"
    if os.path.basename(program) not in SHELLS and not _is_script(program):  # noqa: PTH119 - pathlib is slow to load
        return ""
    text = "\n".join((shlex.join(words), *words[1:], *_scripts((program, *words[1:]))))
    if not (IN_TEXT.search(text) or any(map(is_python, words[1:]))):
        return ""
    if re.search(rf"\benv\s+(-\S+\s+)*(-i|-|--ignore-environment)\s|\b(unset|-u|--unset=?)\s*{variable}\b", text):
        return f"{variable} is not in its environment"
    if re.search(r"\b(unset|-u|--unset=?)\s+PYTHONPATH\b", text):
        return "its PYTHONPATH was replaced"
    assigned = re.search(r"\bPYTHONPATH=(\S*)", text)
    if assigned and not re.match(r"[\"']?\$", assigned[1]):
        extends = "PYTHONPATH" in assigned[1]
        first = "another folder comes first on its PYTHONPATH, maybe with a sitecustomize of its own"
        return first if extends else "its PYTHONPATH was replaced"
    option = re.search(rf"\b{PYTHON.pattern}(\s+-\w+)*?\s+{IGNORES.pattern}\w*\b", text)
    return f"python -{option[3]} ignores the guard" if option else ""


def _own_options(words: Sequence[str]) -> Iterator[str]:
    """Python's own options: what stands before the script, `-c` or `-m`."""
    for word in words:
        if not word.startswith("-") or word in ("-", "-c", "-m"):
            return
        yield word


def is_python(program: str) -> bool:
    """Whether a file is a Python, whatever its name, or a program with an embedded Python."""
    path = os.path.realpath(shutil.which(program) or program)
    if PYTHON.fullmatch(path.rpartition("/")[2]):
        return True
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:  # noqa: PTH123
            return content[:4] == b"\x7fELF" and any(content.find(mark) >= 0 for mark in EMBEDDED)
    except (OSError, ValueError):  # no file, or an empty one
        return False


def _is_script(program: str) -> bool:
    try:
        with open(program, "rb") as file:  # noqa: PTH123
            return file.read(2) == b"#!"
    except OSError:
        return False


def _scripts(words: Sequence[str]) -> Iterator[str]:
    """The texts of the scripts among `words`."""
    for word in words:
        try:
            with open(word, "rb") as file:  # noqa: PTH123
                content = file.read(LARGEST_SCRIPT)
        except (OSError, ValueError):
            continue
        if b"\0" not in content and not word.endswith(".py"):
            yield content.decode(errors="replace")


def warn(text: str, guards: str) -> None:
    """Write a warning into the log of each of `guards`, which are given as JSON, and print it.

    After the end of a guard its log is gone.
    """
    settings = json.loads(guards)
    event = {"format_version": 1, "event": "warning", "process": os.getpid(), "text": text}
    line = f"{json.dumps(event)}\n".encode()
    for journal in {guard["journal"] for guard in settings if guard["journal"]}:
        try:
            handle = os.open(journal, os.O_WRONLY | os.O_APPEND)
        except OSError:
            continue
        with os.fdopen(handle, "wb", 0) as file:
            file.write(line)
    if all(guard["quiet"] for guard in settings):
        return
    # By its name: an import of the package around this file would load onnx.
    visible = importlib.import_module(f"{__name__.partition('.guard.')[0]}.visible")
    visible.write_to_stderr(f"onnxline guard: warning: {text}")
