"""`extends:` one file stands on others. Mappings are merged deeply, everything else is replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.config.marks import Document, KeyPath, Marks
from pipeline.config.paths import anchor_paths
from pipeline.config.yaml_source import describe, read_yaml
from pipeline.errors import ConfigError

__all__ = ["merge", "read_with_bases"]


def read_with_bases(path: Path, above: tuple[Path, ...] = ()) -> Document:
    """A file merged over the files that it extends; a later base wins over an earlier one.

    Relative paths are resolved here, file by file, since each is relative to the file that it is written in.

    Raises:
        ConfigError: a file is missing or malformed, or the files extend each other in a circle.
    """
    if path.resolve() in [other.resolve() for other in above]:
        circle = " → ".join(str(step) for step in (*above, path))
        raise ConfigError(f"{path}: extends itself: {circle}; take one of these out")
    own = read_yaml(path)
    bases = _bases(own)
    own = Document(anchor_paths({k: v for k, v in own.data.items() if k != "extends"}, path.parent), own.marks)
    merged = Document({}, Marks({}))
    for base in bases:
        merged = merge(merged, _read_base(path, base, own, above))
    return merge(merged, own)


def _read_base(path: Path, base: str, own: Document, above: tuple[Path, ...]) -> Document:
    target = path.parent / base
    if not target.is_file():
        raise ConfigError(f"{own.marks.place(('extends',))}: extends: no file {str(target)!r}; expected a YAML file")
    return read_with_bases(target, (*above, path))


def _bases(document: Document) -> list[str]:
    value = document.data.get("extends", [])
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        place = document.marks.place(("extends",))
        raise ConfigError(f"{place}: extends: found {describe(value)}, expected a path or a list of paths")
    return names


def merge(below: Document, above: Document) -> Document:
    """`above` over `below`: mappings are joined key by key, any other value is replaced as a whole."""
    marks = below.marks
    data = _merged(below.data, above.data, (), replaced := [])
    for path in replaced:
        marks = marks.without(path)
    return Document(data, above.marks.over(marks))


def _merged(below: dict[str, Any], above: dict[str, Any], path: KeyPath, replaced: list[KeyPath]) -> dict[str, Any]:
    result = dict(below)
    for key, value in above.items():
        old = below.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            result[key] = _merged(old, value, (*path, key), replaced)
            continue
        replaced.append((*path, key))
        result[key] = value
    return result
