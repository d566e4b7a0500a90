"""`--set passes.skip=[fuse_qkv]`: one value of a loaded configuration, replaced from the command line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.config.extends import merge
from pipeline.config.marks import Document, KeyPath, Marks
from pipeline.config.paths import anchor_paths
from pipeline.config.yaml_source import describe, parse_value
from pipeline.errors import ConfigError

__all__ = ["apply_overrides"]


def apply_overrides(document: Document, overrides: Sequence[str]) -> Document:
    """The document with each `key.path=value` put in; a later one wins.

    A mapping replaces a mapping here, so that `--set passes={}` means what it says. Whether the key exists is left
    to validation, which knows the neighbours to suggest.

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
    value = _nested(keys, parse_value(right, title))
    value = anchor_paths(value, Path.cwd())
    cleared = Document(_without(document.data, keys), document.marks.without(keys))
    above = [keys[:depth] for depth in range(1, len(keys)) if keys[:depth] not in document.marks.places]
    return merge(cleared, Document(value, Marks(dict.fromkeys([*above, keys], title))))


def _nested(keys: KeyPath, value: Any) -> dict[str, Any]:
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
