"""Processes of their own that cost no import of torch, and whether processes that nobody waits for have ended."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from tests.support.paths import ROOT

LOADED: Final = (
    "torch.onnx", "torch.export", "torch._dynamo", "onnxruntime", "safetensors.torch", "yaml",
    "pipeline.cli", "pipeline.run", "pipeline.export", "pipeline.training", "pipeline.authoring", "pipeline.quantsim",
)  # fmt: skip
"""What the process has imported from which all are forked; to import it takes seconds of the processor."""


def start_forked(
    *words: str | Path, said: Path, errors: Path | None = None, folder: Path = ROOT, file_limit: int = 0
) -> BaseProcess:
    """`python` with `words` (`-c CODE …`, or `-m onnxline …`) in a process group of its own; for tests that stop a
    process, and not of how it starts.

    Args:
        said: the file for what it writes to standard output.
        errors: the file for standard error, if that is another.
        folder: its working directory.
        file_limit: the most bytes of a file, as on a disk that is full; 0 for no limit.
    """
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(list(LOADED))
    arguments = (list(map(str, words)), (said, errors or said), folder, dict(os.environ), file_limit)
    process = processes.Process(target=_become, args=arguments)
    process.start()
    return process


def run_forked(*words: str | Path, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """`start_forked`, to its end."""
    with TemporaryDirectory() as place:
        said, errors = Path(place, "said.txt"), Path(place, "errors.txt")
        process = start_forked(*words, said=said, errors=errors, folder=folder)
        process.join(300)
        assert process.exitcode is not None, "it does not end"
        return subprocess.CompletedProcess(words, process.exitcode, said.read_text(), errors.read_text())


def _become(
    words: list[str], streams: tuple[Path, Path], folder: Path, environment: dict[str, str], file_limit: int
) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for number, path in enumerate(streams, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
    if file_limit:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))
    how, what, *rest = words
    if how == "-c":
        sys.argv = ["-c", *rest]
        exec(compile(what, "<code>", "exec"), {"__name__": "__main__"})
    else:
        assert words[:2] == ["-m", "onnxline"], words
        from pipeline.cli import main

        sys.argv = ["onnxline", *rest]
        main()


def still_running(processes: Iterable[int], within_s: float = 5.0) -> list[int]:
    """Those that do not end in this time."""
    left = list(processes)
    until = time.monotonic() + within_s
    while (left := [process for process in left if _runs(process)]) and time.monotonic() < until:
        time.sleep(0.05)
    return left


def _runs(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"  # nobody may be there to bury it
