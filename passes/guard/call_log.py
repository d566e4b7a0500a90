"""Record the calls of a guard: the caller, the record, its line of JSON, and the lines that people read.

All processes of a guard append to one file.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Any, Final

from passes.guard.patching import INTERCEPT_FILE
from passes.guard.settings import Settings
from passes.guard.startup.hooks import LIBRARIES
from passes.suggest import plural
from passes.visible import write_to_stderr
from passes.worker.platforms import lock

FORMAT_VERSION: Final = 1
"""The version of the format of the log's lines."""

HERE = str(Path(__file__).parent)
STANDARD = sysconfig.get_path("stdlib")


class Returned(StrEnum):
    """What the caller got."""

    GUARDED = "guarded"
    """The optimizer's result under the policy, proven."""
    UNGUARDED = "unguarded"
    """The optimizer's own result, in which nothing was found lost; the guarded run did not work."""
    AS_GIVEN = "as given"
    """The model that came in: no other result could be proven sound."""
    NOT_JUDGED = "not judged"
    """The optimizer's own result, unchecked: the call has no model to which a policy applies."""
    RAISED = "raised"
    """The optimizer's own exception, as without a guard."""


@dataclass(frozen=True, slots=True)
class GuardedCall:
    """One call of an optimizer.

    `file`, `line` and `caller` (the function's name) are the nearest place outside of the libraries. `kept` counts what
    the policy holds, by kind, in the model that was returned; `missing` are the entries of `keep` that match nothing in
    this model. `would_have_lost` and `unguarded_fault` say what the same call does without a guard, and
    `unguarded_nodes` counts the nodes of its result; None if it was not compared or has no result.
    """

    function: str
    file: str
    line: int
    caller: str
    process: int
    thread: str
    model: str
    returned: Returned
    nodes_before: int = 0
    nodes_after: int = 0
    proof: str = ""
    """`numbers`, or `structure` where onnxruntime cannot compare what the model computes."""
    kept: Mapping[str, int] | None = None
    missing: tuple[str, ...] = ()
    reverted: Mapping[str, str] | None = None
    """Pass → why it was reverted, or failed."""
    skipped: Mapping[str, str] | None = None
    compared: bool = False
    unguarded_nodes: int | None = None
    unguarded_fault: str = ""
    """`differs: …` or `crashed: …`: any other fault of the unguarded result."""
    would_have_lost: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    def lines(self) -> Iterator[str]:
        """Lines for people: one on the outcome, then one for each detail."""
        where = f"{_display_path(self.file)}:{self.line} in {self.caller}"
        yield f"{where}: {self.function}{self._outcome()} ({self.seconds:.1f} s)"
        for structure in self.would_have_lost:
            yield f"  without the guard lost: {structure}"
        if self.unguarded_fault:
            yield f"  without the guard: {self.unguarded_fault}"
        for name, why in (self.reverted or {}).items():
            yield f"  reverted {name}: {why}"
        if self.skipped:
            yield f"  skipped {', '.join(self.skipped)}"
        for note in self.notes:
            yield f"  note: {note}"

    def _outcome(self) -> str:
        if self.returned in (Returned.RAISED, Returned.NOT_JUDGED):
            return f" {self.returned}"
        kept = ", ".join(f"{kind} ×{count}" for kind, count in (self.kept or {}).items() if count)
        nodes = f", {self.nodes_before} → {plural(self.nodes_after, 'node')}"
        if self.unguarded_nodes is not None:
            nodes += f" ({self.unguarded_nodes} without the guard)"
        return nodes + (f", kept {kept}" if kept else "") + self._caution()

    def _caution(self) -> str:
        words = {Returned.UNGUARDED: ", the optimizer's own result", Returned.AS_GIVEN: ", the model as it was given"}
        return words.get(self.returned, "")


def _display_path(file: str) -> str:
    """Shorten a path below the working directory to a relative one."""
    try:
        relative = os.path.relpath(file)
    except ValueError:
        return file
    return file if relative.startswith("..") else relative


def write_call(call: GuardedCall, guards: Sequence[Settings]) -> None:
    """Write a guarded call to the log of each guard, and to standard error if a guard is not quiet."""
    _append({"event": "call", **asdict(call)}, guards)
    if not all(settings.quiet for settings in guards):
        say(call.lines())


def warn(text: str, guards: Sequence[Settings]) -> None:
    """Write down and print a warning that concerns no single call."""
    _append({"event": "warning", "process": os.getpid(), "text": text}, guards)
    if not all(settings.quiet for settings in guards):
        say([f"warning: {text}"])


def say(lines: Iterable[str]) -> None:
    """Print lines on standard error; a script that has closed it gets none."""
    write_to_stderr(*(f"onnxline guard: {line}" for line in lines))


def read_calls(path: str) -> tuple[GuardedCall, ...]:
    """The guarded calls in the log at `path`."""
    return tuple(_call_from_json(event) for event in _read(path) if event["event"] == "call")


def read_warnings(path: str) -> tuple[str, ...]:
    """The warnings in the log at `path`."""
    return tuple(event["text"] for event in _read(path) if event["event"] == "warning")


def _append(event: Mapping[str, Any], guards: Sequence[Settings]) -> None:
    """Append a line in one write, under a lock since other processes write too. After the end of the guard the file is
    gone."""
    line = f"{json.dumps({'format_version': FORMAT_VERSION, **event})}\n".encode()
    for path in dict.fromkeys(settings.journal for settings in guards if settings.journal):
        with contextlib.suppress(OSError):
            handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                lock(handle)
                os.write(handle, line)
            finally:
                os.close(handle)


def _read(path: str) -> list[dict[str, Any]]:
    if not Path(path).is_file():
        return []
    with Path(path).open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def _call_from_json(data: Mapping[str, Any]) -> GuardedCall:
    lists = {key: tuple(value) for key, value in data.items() if isinstance(value, list)}
    values = {key: value for key, value in data.items() if key not in ("event", "format_version")}
    return GuardedCall(**{**values, **lists, "returned": Returned(data["returned"])})


def call_site() -> tuple[str, int, str]:
    """File, line and function of the intercepted call: the nearest frame outside of the optimizers and of this package.

    A frame of the standard library counts only if there is no other, as when a pool's thread calls the optimizer.
    """
    frames = list(_frames_outside(sys._getframe(1)))
    best = next((frame for frame in frames if not _is_standard(frame.f_code.co_filename)), None)
    frame = best or (frames[0] if frames else sys._getframe(1))
    return frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name


def _frames_outside(frame: FrameType | None) -> Iterator[FrameType]:
    roots = [HERE, *(path for name in LIBRARIES if name in sys.modules for path in sys.modules[name].__path__)]
    while frame is not None:
        file = frame.f_code.co_filename
        if file != INTERCEPT_FILE and not any(file.startswith(f"{root}/") for root in roots):
            yield frame
        frame = frame.f_back


def _is_standard(file: str) -> bool:
    return file.startswith("<frozen ") or (file.startswith(f"{STANDARD}/") and "-packages/" not in file)
