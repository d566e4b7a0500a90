"""Find the Python descendants of this process that run without the guard, and warn of each.

A guarded process registers itself (`startup/hooks.py`). A thread searches /proc for the unguarded processes many
times a second: importing an optimizer takes far longer than one search interval.
Linux only; elsewhere nothing is found."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Final

from passes.guard.startup.hooks import FOLDER, OUR_PROGRAM, VARIABLE, Image, is_registered, read_image

INTERVAL_S: Final = 0.05

STARTUP_S: Final = 3.0
"""How long a Python that starts just before the guard ends may take to register itself."""

PYTHON: Final = re.compile(r"(python|pypy)[\d.]*[a-z]*")
PYTHON_LIBRARY: Final = re.compile(rb"/libpython3[^/]*\.so|\.cpython-3[^/]*\.so")
"""A library that a Python of another name, or a program with an embedded Python, has loaded."""

LOADS_S: Final = 5.0
"""For how long a program is checked again for a loaded Python."""

PR_SET_CHILD_SUBREAPER: Final = 36
"""From Linux's <linux/prctl.h>."""

IGNORES: Final = re.compile(r"-[a-zA-Z]*?([IES])")
"""Options with which Python ignores PYTHONPATH, or runs no `sitecustomize`."""

HELPER: Final = "from multiprocessing.resource_tracker import main"
"""A process that Python runs for itself; it never runs a script's code."""


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose parent ends, so that they stay visible.

    Only for a process of ours: nobody waits for such children, so they stay zombies until it ends.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(libc, "prctl"):
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class ChildKind(Enum):
    GUARDED = auto()
    OURS = auto()
    """A worker of onnxline, and whatever it starts."""
    SUSPECT = auto()
    """A Python that is not registered as guarded; it may still be starting."""
    OTHER = auto()


@dataclass(slots=True)
class Child:
    image: Image
    kind: ChildKind
    command: str = ""
    reason: str = ""
    since: float = 0.0
    before: bool = False
    """Whether it was running when the guard began."""


class ChildWatch:
    """Watches all processes that are started below this one from `start` to `stop`.

    `warn(text)` is called once for each command that runs without the guard, from the thread that watches.
    """

    def __init__(self, folder: str, warn: Callable[[str], object]) -> None:
        self._folder = folder
        self._warn = warn
        self._warned: set[str] = set()
        self._children: dict[int, Child] = {}
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="onnxline guard", daemon=True)

    def start(self) -> None:
        """Begin to watch, and warn at once of each Python that is already running."""
        self._look(before=True)
        for child in self._suspects():
            self._warn_of(child)
            child.since = float("-inf")
        self._thread.start()

    def stop(self) -> None:
        """Stop watching, after waiting for processes that are still starting."""
        self._ends.set()
        self._thread.join()
        self._look()
        while any(child.since > time.monotonic() - STARTUP_S for child in self._suspects()):
            time.sleep(INTERVAL_S)
            self._look()
        for child in self._suspects():
            self._warn_of(child)

    def _run(self) -> None:
        while not self._ends.wait(INTERVAL_S):
            self._look()

    def _suspects(self) -> Iterator[Child]:
        return (child for child in self._children.values() if child.kind is ChildKind.SUSPECT)

    def _look(self, *, before: bool = False) -> None:
        """Look at all processes once, parents first."""
        last, self._children = self._children, {}
        root = read_image(os.getpid())
        if root is None:
            return
        self._children[root.process] = Child(root, ChildKind.GUARDED)
        # Processes whose parent has ended are not found as children, so they are looked up by their numbers.
        waiting = [root.process, *last]
        looked: set[int] = set()
        while waiting:
            process = waiting.pop(0)
            if process in looked:
                continue
            looked.add(process)
            child = self._children.get(process) or self._child(process, last.get(process), before)
            if child is None:
                continue
            self._children[process] = child
            if child.kind is not ChildKind.OURS:
                waiting[:0] = _children_of(process)
        for process, child in last.items():
            now = self._children.get(process)
            ended = now is None or now.image.name != child.image.name
            if child.kind is ChildKind.SUSPECT and ended and not is_registered(child.image, self._folder):
                self._warn_of(child)

    def _child(self, process: int, last: Child | None, before: bool) -> Child | None:
        image = read_image(process)
        if image is None or not image.arguments:  # between two programs
            return None
        if last is not None and last.image.name == image.name:
            if last.kind is ChildKind.SUSPECT and is_registered(image, self._folder):
                last.kind = ChildKind.GUARDED
            if last.kind is not ChildKind.OTHER or time.monotonic() > last.since + LOADS_S:
                return last
        parent = self._children.get(image.parent)
        if parent is not None and parent.image.arguments == image.arguments and not before:  # a fork
            return Child(image, parent.kind, parent.command, parent.reason, time.monotonic())
        words = _command(process)
        if not any(words):  # it has ended meanwhile, and has no command any more
            return None
        if OUR_PROGRAM.decode() in words[1:2]:
            return Child(image, ChildKind.OURS)
        if is_registered(image, self._folder):
            return Child(image, ChildKind.GUARDED)
        since = time.monotonic() if last is None else last.since
        if not _is_python(process) or any(HELPER in word for word in words):
            return Child(image, ChildKind.OTHER, since=since)
        return Child(image, ChildKind.SUSPECT, shlex.join(words), _reason(process, words), since, before)

    def _warn_of(self, child: Child) -> None:
        began = "ran before the guard began" if child.before else "started without the guard"
        reason = "" if child.before else f" ({child.reason})"
        text = f"child python {began}, so no call in it is guarded: {child.command}{reason}"
        if text not in self._warned:
            self._warned.add(text)
            self._warn(text)


def _children_of(process: int) -> list[int]:
    children: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{process}/task").iterdir():
            with contextlib.suppress(OSError):
                children += map(int, (task / "children").read_text().split())
    return children


def _command(process: int) -> list[str]:
    try:
        return os.fsdecode(Path(f"/proc/{process}/cmdline").read_bytes()).rstrip("\0").split("\0")
    except OSError:
        return []


def _is_python(process: int) -> bool:
    try:
        program = str(Path(f"/proc/{process}/exe").readlink())
        loaded = Path(f"/proc/{process}/maps").read_bytes()
    except OSError:  # another user's
        program, loaded = next(iter(_command(process)), ""), b""
    name = Path(program.removesuffix(" (deleted)")).name
    return PYTHON.fullmatch(name) is not None or PYTHON_LIBRARY.search(loaded) is not None


def _reason(process: int, words: list[str]) -> str:
    """Why a Python runs without the guard, as far as can be seen from outside."""
    for word in words[1:]:
        if not word.startswith("-") or word in ("-c", "-m"):
            break
        ignored = IGNORES.match(word)
        if ignored:
            return f"python -{ignored[1]} reads no PYTHONPATH" if ignored[1] != "S" else "python -S loads no site"
    try:
        environment = os.fsdecode(Path(f"/proc/{process}/environ").read_bytes()).split("\0")
    except OSError:
        return "its environment cannot be read"
    names = {name: value for name, _, value in (entry.partition("=") for entry in environment)}
    if VARIABLE not in names:
        return f"{VARIABLE} is not in its environment"
    entries = names.get("PYTHONPATH", "").split(os.pathsep)
    if FOLDER not in entries:
        return "its PYTHONPATH was replaced"
    if entries[0] != FOLDER:
        return "another folder comes first on its PYTHONPATH, maybe with a sitecustomize of its own"
    return "it did not come to run sitecustomize"
