"""The folder of a run: its files, the results of earlier runs, and the lock that keeps a second run out.

Results are kept by keys, to which versions and digests belong: of libraries, and of our own code.

runs/<name>/
  model.onnx …         the artifacts; each gets its final name only when it is complete
  exported.onnx        the model as torch exported it
  .stages/<stage>.json  the result of a stage, with the key of everything that it depends on
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import shutil
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import TypeAdapter

import passes
from passes.recipe.recipe import library_versions
from passes.weights.files import describe_write_error, replace_when_done
from passes.worker.platforms import lock
from pipeline.errors import DISK_ERRORS, UsageError

Record = TypeVar("Record")

REPRODUCERS: Final = "reproducers"
"""The folder of the smallest models that crash a step."""


@dataclass(frozen=True, slots=True)
class Workspace:
    """Reads and writes files below `folder`; every write goes to a temporary name and is renamed."""

    folder: Path

    @property
    def stages(self) -> Path:
        return self.folder / ".stages"

    @property
    def scratch(self) -> Path:
        """For files that do not outlive the run; emptied when the next one begins."""
        return self.stages / "scratch"

    @contextlib.contextmanager
    def acquire(self) -> Iterator[None]:
        """Make the folder, hold its lock, and remove what a killed run has left.

        Raises:
            UsageError: another run holds the folder, it cannot be written, or it was removed before the run ended.
        """
        with self.hold():
            self._clear()
            try:
                yield
            except Exception as error:  # such as that of a library which reads a file of the folder
                if self.scratch.is_dir():
                    raise
                raise UsageError(
                    f"the folder {self.folder} was removed during the run; leave it, and run the same command again"
                ) from error
            shutil.rmtree(self.scratch, ignore_errors=True)

    @contextlib.contextmanager
    def hold(self, *, shared: bool = False) -> Iterator[None]:
        """Make the folder, and hold its lock; with `shared` together with others that share it.

        Raises:
            UsageError: another run holds the folder, or it cannot be written.
        """
        with disk_errors(self.folder):
            make_folder(self.stages)
            with (self.stages / "lock").open("w") as file:
                try:
                    lock(file.fileno(), wait=False, shared=shared)
                except BlockingIOError as error:
                    raise UsageError(
                        f"another run is writing to {self.folder}; wait for it, or choose another folder (--out)"
                    ) from error
                yield

    def write_text(self, name: str, text: str) -> Path:
        path = self.folder / name
        with replace_when_done(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
        return path

    def write_bytes(self, name: str, data: bytes) -> Path:
        path = self.folder / name
        with replace_when_done(path) as temporary:
            temporary.write_bytes(data)
        return path

    def save(self, stage: str, key: str, record: Any, notes: Sequence[str] = ()) -> None:
        """Save the result and the notes of `stage` under `key`, for a later run with the same key."""
        data = {"key": key, "record": json.loads(TypeAdapter(type(record)).dump_json(record)), "notes": list(notes)}
        self.write_text(f".stages/{stage}.json", json.dumps(data))  # with an indent it takes ten times as long

    def load(self, stage: str, key: str, kind: type[Record]) -> Record | None:
        """The record that was saved for this key; None when there is none, or when its files have changed since."""
        try:
            data = json.loads((self.stages / f"{stage}.json").read_text(encoding="utf-8"))
            return TypeAdapter(kind).validate_python(data["record"]) if data["key"] == key else None
        except (OSError, ValueError, KeyError, TypeError, RecursionError):  # what a damaged file can raise
            return None

    def list_anew(self, stage: str, gone: Collection[Path], added: Sequence[str]) -> None:
        """Let the saved result of `stage` depend on its files as they are now, without those that are `gone`."""
        data = json.loads((self.stages / f"{stage}.json").read_text(encoding="utf-8"))
        names = [name for name, *_ in data["record"]["files"] if self.folder / name not in gone]
        data["record"]["files"] = [(name, *stamp(self.folder / name)) for name in dict.fromkeys((*names, *added))]
        self.write_text(f".stages/{stage}.json", json.dumps(data))

    def notes(self, stage: str) -> list[str]:
        """The notes that were saved with the record of `stage`."""
        return json.loads((self.stages / f"{stage}.json").read_text(encoding="utf-8"))["notes"]

    def is_unchanged(self, files: Sequence[tuple[str, int, int]]) -> bool:
        """Whether each file still has the size and time that it is listed with."""
        return all(stamp(self.folder / name) == (size, time) for name, size, time in files)

    def forget(self, stage: str) -> None:
        (self.stages / f"{stage}.json").unlink(missing_ok=True)

    def _clear(self) -> None:
        shutil.rmtree(self.scratch, ignore_errors=True)
        self.scratch.mkdir()
        of_safetensors = self.folder.glob(".tmp??????")  # into which it writes, and which a kill leaves
        for leftover in (*self.folder.glob(".*.tmp"), *self.folder.glob("*/.*.tmp"), *of_safetensors):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink(missing_ok=True)


def key_of(*parts: Any) -> str:
    """Digest of plain data, in any nesting: everything that a stage depends on."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def stamp(path: Path) -> tuple[int, int]:
    """Size and time of a file: enough to see that somebody has changed or removed it. (-1, -1) if it is not there."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return (-1, -1)
    return (status.st_size, status.st_mtime_ns)


def make_folder(folder: Path) -> None:
    """Make `folder`, and those above it.

    Raises:
        UsageError: it cannot exist there, such as below /proc; full or read-only disks are for `disk_errors`.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileNotFoundError as error:
        raise UsageError(f"the folder {folder} cannot be made: {error.strerror}; choose another one") from error
    except (FileExistsError, NotADirectoryError) as error:
        file = next(path for path in (folder, *folder.parents) if path.exists())
        raise UsageError(
            f"the folder {folder} cannot be made: {file} is a file; choose another folder, or move that file away"
        ) from error


@contextlib.contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turn a full disk or a read-only folder into a UsageError; other OSErrors are bugs of ours and pass.

    For code that does more than write to one file; else see `passes.weights.files.write_errors`.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        place = error.filename2 or error.filename or folder
        raise UsageError(describe_write_error(place, error)) from error


@cache
def own_code_digest() -> str:
    """Digest of every file of onnxline's packages, data such as audit tables included: any edit makes cached results
    stale. A process keeps the digest, as it keeps the code: it takes 30 of the 160 ms of a small run."""
    return digest_of_packages(Path(passes.__file__).parent, Path(__file__).parent)


def digest_of_packages(*packages: Path) -> str:
    """Digest of the name and content of each file; `__pycache__` is left out."""
    digest = hashlib.blake2b(digest_size=8)
    for package in packages:
        files = {path.relative_to(package).as_posix(): path for path in package.rglob("*") if path.is_file()}
        for name, path in sorted(files.items()):
            if path.parent.name != "__pycache__":
                digest.update(name.encode() + b"\0")
                digest.update(hashlib.blake2b(path.read_bytes()).digest())
    return digest.hexdigest()


def digest_of_file(path: Path) -> str:
    """Digest of the content of a file, read in pieces; empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=8)).hexdigest()
    except OSError:
        return ""


def versions() -> dict[str, str]:
    """Name → version of Python and of each library that is installed, sorted."""
    libraries = library_versions(("onnxline", "torch", "transformers", "safetensors"))
    return dict(sorted({"python": platform.python_version(), **libraries}.items()))
