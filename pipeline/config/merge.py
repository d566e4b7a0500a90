"""Merges one configuration from several sources: the files that it `extends:`, then `--set KEY.PATH=VALUE`.

Mappings are merged deeply, everything else is replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.config.paths import anchor_paths
from pipeline.config.yaml_source import Document, KeyPath, Marks, describe, parse_value, read_yaml
from pipeline.errors import ConfigError


def read_with_bases(path: Path, above: tuple[Path, ...] = ()) -> Document:
    """Read a file and merge it over the files that it extends; a later base wins over an earlier one.

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
    data = _merge_data(below.data, above.data, (), replaced := [])
    for path in replaced:
        marks = marks.without(path)
    return Document(data, above.marks.over(marks))


def _merge_data(below: dict[str, Any], above: dict[str, Any], path: KeyPath, replaced: list[KeyPath]) -> dict[str, Any]:
    result = dict(below)
    for key, value in above.items():
        old = below.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            result[key] = _merge_data(old, value, (*path, key), replaced)
            continue
        replaced.append((*path, key))
        result[key] = value
    return result


def apply_overrides(document: Document, overrides: Sequence[str]) -> Document:
    """The document with each `key.path=value` applied; a later one wins.

    A mapping replaces a mapping here, so that `--set passes={}` empties the section. Unknown keys are left to
    validation, which can suggest the nearest one.

    Raises:
        ConfigError: no `=`, an empty key, a value that is not YAML, or a path through something that is no mapping.
    """
    for text in overrides:
        document = _apply(document, text)
    return document


def _apply(document: Document, text: str) -> Document:
    title = f"--set {text}"
    dotted, equals, right = text.partition("=")
    keys: KeyPath = tuple(key.strip() for key in dotted.split("."))
    if not equals or not all(keys):
        raise ConfigError(f"{title}: expected key.path=value, such as passes.skip=[fuse_qkv]")
    _refuse_detour(document, keys, title)
    value = _nest(keys, parse_value(right, title))
    value = anchor_paths(value, Path.cwd())
    cleared = Document(_without(document.data, keys), document.marks.without(keys))
    above = [keys[:depth] for depth in range(1, len(keys)) if keys[:depth] not in document.marks.places]
    return merge(cleared, Document(value, Marks(dict.fromkeys([*above, keys], title))))


def _nest(keys: KeyPath, value: Any) -> dict[str, Any]:
    for key in reversed(keys):
        value = {key: value}
    return value


def _refuse_detour(document: Document, keys: KeyPath, title: str) -> None:
    here: Any = document.data
    for depth, key in enumerate(keys[:-1], start=1):
        here = here.get(key)
        if here is None:
            return
        if not isinstance(here, dict):
            name = ".".join(map(str, keys[:depth]))
            raise ConfigError(f"{title}: {name} is {describe(here)}, which has no keys; set {name} as a whole")


def _without(data: dict[str, Any], keys: KeyPath) -> dict[str, Any]:
    first, *rest = keys
    copy = dict(data)
    if not rest:
        copy.pop(str(first), None)
    elif isinstance(copy.get(str(first)), dict):
        copy[str(first)] = _without(copy[str(first)], tuple(rest))
    return copy
