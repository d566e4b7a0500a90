"""Files that a command writes: a place that will not do is named before the work, and what is there replaced after."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from passes.weights.files import replace_when_done
from pipeline.errors import UsageError

__all__ = ["check_place", "write_text", "written"]


def check_place(path: Path, endings: tuple[str, ...] = ()) -> None:
    """
    Raises:
        UsageError: `path` ends in none of `endings`, is a folder, or lies in none.
    """
    if path.is_dir():
        raise UsageError(f"{path} is a folder; expected a file, as in {path}/name{endings[0] if endings else '.txt'}")
    if endings and not path.name.endswith(endings):
        raise UsageError(f"{path}: expected {', '.join(endings[:-1])} or {endings[-1]}")
    if not path.parent.is_dir():
        raise UsageError(f"{path} cannot be written: there is no folder {path.parent}; make it first")


@contextmanager
def written(path: Path, endings: tuple[str, ...] = ()) -> Iterator[Path]:
    """A temporary path beside `path`, which it becomes in the end.

    Raises:
        UsageError: it cannot be written there.
    """
    check_place(path, endings)
    try:
        with replace_when_done(path) as temporary:
            yield temporary
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}") from error


def write_text(path: Path, text: str) -> None:
    """Write `text` and the end of its line, at once."""
    with written(path) as temporary:
        temporary.write_text(f"{text}\n", encoding="utf-8")
