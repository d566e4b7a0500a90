"""`onnxline guard`: run a command, and hold a policy in every optimizer that it calls."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

import typer

import passes
from pipeline.commands.shared import add_command, split_names
from pipeline.terminal import print_line

NOT_FOUND: Final = 127
NOT_EXECUTABLE: Final = 126
"""Exit codes of a command that cannot be started, as shells give them."""


def register(app: typer.Typer) -> None:
    add_command(app, "guard", guard, context_settings={"allow_interspersed_args": False})


def guard(
    command: list[str],
    keep: list[str] | None = None,
    skip: list[str] | None = None,
    watch: bool = True,
    compare: bool = True,
    log: Path | None = None,
    timeout_s: float = 600.0,
    memory_gib: float | None = None,
    quiet: bool = False,
) -> None:
    """Run COMMAND and hold a policy in each call of onnxsim, onnxoptimizer and onnxslim, children included.

    The exit code is that of COMMAND.
    """
    wishes = passes.guard(
        split_names("--keep", keep),
        split_names("--skip", skip),
        watch=watch,
        compare=compare,
        log=log,
        timeout_s=timeout_s,
        memory_gib=memory_gib,
        quiet=quiet,
    )
    with wishes:
        code = _run(command)
    raise typer.Exit(code)


def _run(command: Sequence[str]) -> int:
    """Run the command; return its exit code as a shell gives it: 128 and the signal's number after a signal."""
    try:
        process = subprocess.Popen(command)
    except FileNotFoundError:
        print_line(f"onnxline: no command {command[0]!r}", err=True)
        return NOT_FOUND
    except OSError as error:
        print_line(f"onnxline: {command[0]} cannot be run: {error.strerror}", err=True)
        return NOT_EXECUTABLE
    with _forward_signals(process):
        code = process.wait()
    return 128 - code if code < 0 else code


@contextmanager
def _forward_signals(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Forward signals that would end us to the command; Ctrl-C reaches it from the terminal already."""

    def forward(number: int, frame: FrameType | None) -> None:
        if number != signal.SIGINT:
            process.send_signal(number)

    numbers = {signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}  # Windows has no SIGHUP
    before = {number: signal.signal(number, forward) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
