"""Does `make test` catch a mutation, and if not, does one of the tests that only `make test-all` runs?

A process imports the libraries once and forks for each mutation, so that a mutation costs the product's own import and
the tests near its place, up to the first that fails.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Collection, Iterator, Sequence
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import Final

import pytest

from benchmarks.mutations.draw import Mutation, mutate
from benchmarks.mutations.record import Recording

LIBRARIES: Final = (
    "torch", "torch.export", "torch.onnx", "onnx", "onnx_ir", "onnxruntime", "onnxoptimizer", "onnxscript", "jinja2",
    "hypothesis", "pydantic", "typer.testing", "rich.console", "transformers", "numpy.testing",
)  # fmt: skip
MOST_SECONDS: Final = 120.0
"""Of the processor, for the tests of one mutation; where they would take longer, the cheapest are run."""
HANGS: Final = 10.0
"""How many times `MOST_SECONDS`, and a minute, the tests may take: a loop without an end is caught, too."""


class Ending(StrEnum):
    CAUGHT = "caught by make test"
    MOVED = "caught by make test-all alone"
    SURVIVED = "caught by none"


class Judge:
    """Judges one mutation after another, in a copy of the tree that belongs to it alone.

    Args:
        recording: of the tests that `make test` leaves out.
        kept: the tests that `make test` runs.
    """

    def __init__(self, tree: Path, recording: Recording, kept: Collection[str]) -> None:
        self._tree, self._recording, self._kept = tree, recording, kept
        os.environ.update(PYTHONPATH=str(tree), OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="")
        for name in LIBRARIES:
            importlib.import_module(name)

    def judge(self, number: int, mutation: Mutation) -> tuple[Ending, str]:
        """How it ends, and the last lines of pytest."""
        path = self._tree / mutation.file
        before, times = path.read_text(encoding="utf-8"), path.stat()
        path.write_text(mutate(before, mutation), encoding="utf-8")
        os.utime(path, (number, number))  # Python compares times of files in seconds with those of compiled modules
        try:
            for names, ending in self._rows(number, mutation):
                said = self._failure(names) if names else None
                if said is not None:
                    return ending, said
        finally:
            path.write_text(before, encoding="utf-8")
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        return Ending.SURVIVED, ""

    def _rows(self, number: int, mutation: Mutation) -> Iterator[tuple[Sequence[str], Ending]]:
        """Which tests are run one row after the other, and how it ends where one of the row fails."""
        for place in places_near(mutation.file):
            yield sorted(name for name in self._kept if name.startswith(place)), Ending.CAUGHT
        yield self._chosen(self._recording.reached[number]), Ending.MOVED

    def _chosen(self, names: frozenset[str]) -> list[str]:
        chosen, left = [], MOST_SECONDS
        for name in sorted(names, key=lambda name: (self._recording.costs[name], name)):
            left -= self._recording.costs[name]
            if left < 0 and chosen:
                break
            chosen.append(name)
        return chosen

    def _failure(self, names: Sequence[str]) -> str | None:
        """What pytest says of the first test that fails, or dies, or does not end; None if all pass."""
        log = self._tree.parent / "judged.log"
        until = time.monotonic() + 60 + HANGS * MOST_SECONDS
        process = os.fork()
        if process == 0:
            _run(self._tree, names, log)
        while os.waitpid(process, os.WNOHANG) == (0, 0):
            if time.monotonic() > until:
                os.killpg(process, signal.SIGKILL)
                os.waitpid(process, 0)
                return "does not end"
            time.sleep(0.05)
        words = log.read_text(encoding="utf-8", errors="replace").splitlines()
        passed = bool(words) and words[-1] == "exit code 0"
        return None if passed else " ".join([line for line in words if line.startswith(("FAILED", "ERROR"))][:1])


def places_near(file: str) -> tuple[str, ...]:
    """What the names of the tests of a module begin with: its file of tests, then the folder that mirrors its own."""
    path = PurePosixPath(file)
    folder = f"tests/{path.parent}/" if path.parts[0] != "onnxline" else "tests/package/"
    return f"{folder}test_{path.stem}.py::", folder


def _run(tree: Path, names: Sequence[str], log: Path) -> None:
    """In the fork: run the tests, and say at the end of the log how they ended."""
    os.setsid()
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.chdir(tree)
    sys.path.insert(0, str(tree))
    code = 3
    try:
        known = "ignore::pytest.PytestAssertRewriteWarning"  # plugins of pytest that the libraries have imported
        code = int(pytest.main(["-x", "-q", "--all", "-p", "no:cacheprovider", "-W", known, *names]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(1, f"\nexit code {code}".encode())
        os._exit(0)
