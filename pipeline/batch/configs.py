"""From patterns to configurations that are read, each with a name of its own."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from passes.errors import PassError
from pipeline.config import RunConfig
from pipeline.errors import OnnxlineError, UsageError

__all__ = ["Planned", "read_configs"]


@dataclass(frozen=True, slots=True)
class Planned:
    """A file that a pattern named. `config` is None if it cannot be read, and `mistake` then says why."""

    path: Path
    name: str
    config: RunConfig | None
    mistake: OnnxlineError | PassError | None = None


def read_configs(patterns: Sequence[str], overrides: Sequence[str] = ()) -> tuple[Planned, ...]:
    """The configurations that `patterns` name, in their order; what a glob finds is sorted, and taken once.

    Raises:
        UsageError: a pattern names no file, or two configurations have one name, and so one folder.
    """
    planned = tuple(_read(path, overrides) for path in _files(patterns))
    first: dict[str, Planned] = {}
    for one in planned:
        other = first.setdefault(one.name, one) if one.config is not None else one
        if other is not one:
            raise UsageError(
                f"{other.path} and {one.path} are both named {one.name!r}, so they would write into one folder; "
                "give each a `name` of its own"
            )
    return planned


def _read(path: Path, overrides: Sequence[str]) -> Planned:
    try:
        config = RunConfig.from_yaml(path, overrides)
    except (OnnxlineError, PassError) as error:
        return Planned(path, path.stem, None, error)
    return Planned(path, config.name, config)


def _files(patterns: Sequence[str]) -> tuple[Path, ...]:
    found: dict[Path, Path] = {}
    for pattern in patterns:
        files = list(_matches(pattern))
        if not files:
            raise UsageError(f"{pattern!r} names no file; expected configurations, such as 'configs/*.yaml'")
        for path in files:
            found.setdefault(path.resolve(), path)
    return tuple(found.values())


def _matches(pattern: str) -> Iterator[Path]:
    if Path(pattern).is_file():  # its name may hold brackets
        yield Path(pattern)
        return
    found = sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207 - the pattern may be absolute
    yield from (path for path in map(Path, found) if path.is_file())
