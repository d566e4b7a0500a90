"""The file that all processes of a guard append to, one JSON object a line, and the lines on standard error."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from passes.guard.record import GuardedCall, call_from_json, call_to_json
from passes.guard.settings import Settings
from passes.worker.platforms import lock

__all__ = ["read_calls", "read_warnings", "say", "warn", "write_call"]


def write_call(call: GuardedCall, guards: Sequence[Settings]) -> None:
    _append(call_to_json(call), guards)
    if not all(one.quiet for one in guards):
        say(call.lines())


def warn(text: str, guards: Sequence[Settings]) -> None:
    """What concerns no single call."""
    _append({"event": "warning", "process": os.getpid(), "text": text}, guards)
    if not all(one.quiet for one in guards):
        say([f"warning: {text}"])


def say(lines: Iterable[str]) -> None:
    """Lines for people. A script that has closed its standard error does not want them."""
    text = "".join(f"onnxline guard: {line}\n" for line in lines)
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(text)
        sys.stderr.flush()


def read_calls(path: str) -> tuple[GuardedCall, ...]:
    return tuple(call_from_json(one) for one in _read(path) if one["event"] == "call")


def read_warnings(path: str) -> tuple[str, ...]:
    return tuple(one["text"] for one in _read(path) if one["event"] == "warning")


def _append(event: Mapping[str, Any], guards: Sequence[Settings]) -> None:
    """In one write under a lock, since other processes write there too. After the guard has ended the file is gone."""
    line = f"{json.dumps(event)}\n".encode()
    for path in dict.fromkeys(one.journal for one in guards if one.journal):
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
