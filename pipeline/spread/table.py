"""What became of each job, one JSON line each, so that the next start knows what is done already."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Self

from pydantic import TypeAdapter, ValidationError

from passes.worker.platforms import lock
from pipeline.errors import UsageError
from pipeline.spread.job import Job, Outcome, State
from pipeline.workspace import disk_errors, key_of, make_folder

__all__ = ["Table"]


class Table:
    """Outcomes in a file to which lines are only ever added.

    A line counts for a job if it has the job's key, and the digest of the call, its arguments and the versions: a job
    that was changed is another one. Of several lines the last counts. One that is not whole is passed over, since the
    writer may have been killed on the way.

    Args:
        path: of the file; made, with its folder, when it is opened.
        versions: everything beside the arguments that decides what comes of a job.
    """

    def __init__(self, path: Path, versions: Mapping[str, str]) -> None:
        self.path = path
        self._versions = dict(versions)
        self._known: dict[tuple[str, str], Outcome] = {}
        self._file: IO[bytes] | None = None

    @contextlib.contextmanager
    def opened(self) -> Iterator[Self]:
        """Read what is known, and stand ready for more.

        Raises:
            UsageError: another process writes to the file, or it cannot be written.
        """
        with disk_errors(self.path):
            make_folder(self.path.parent)
            with self.path.open("a+b") as file:
                _lock(file, self.path)
                file.seek(0)
                text = file.read()
                self._known = dict(filter(None, map(_read, text.split(b"\n"))))
                if text and not text.endswith(b"\n"):
                    file.write(b"\n")
                self._file = file
                try:
                    yield self
                finally:
                    self._file = None

    def known(self, job: Job) -> Outcome | None:
        """What came of this very job; None if that is not known, or if it was not done."""
        found = self._known.get((job.key, self._digest(job)))
        return found if found is not None and found.status is State.DONE else None

    def add(self, job: Job, outcome: Outcome) -> None:
        """Write a line, at once."""
        if self._file is None:
            raise ValueError("the table is not open")
        digest = self._digest(job)
        line = json.dumps({"digest": digest, **dataclasses.asdict(outcome)})
        self._file.write(line.encode() + b"\n")
        self._file.flush()
        self._known[job.key, digest] = outcome

    def _digest(self, job: Job) -> str:
        return key_of(job.call, job.arguments, self._versions)[:DIGITS]


def _lock(file: IO[bytes], path: Path) -> None:
    try:
        lock(file.fileno(), wait=False)  # the system drops it with the process
    except BlockingIOError as error:
        raise UsageError(f"another onnxline writes to {path}; wait for it, or choose another folder") from error


def _read(line: bytes) -> tuple[tuple[str, str], Outcome] | None:
    try:
        data = json.loads(line)
        digest = data.pop("digest")
        outcome = OUTCOME.validate_python(data)
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError, ValidationError):
        return None
    return (outcome.key, digest), outcome


OUTCOME = TypeAdapter(Outcome)

DIGITS = 32
"""Of a digest, in hexadecimal."""
