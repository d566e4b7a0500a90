"""Reads YAML strictly, and keeps the file and line of each value."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from passes.suggest import describe_argument
from pipeline.errors import ConfigError

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Marks:
    """Key path → `file:line`. A path without a mark takes that of the nearest key above it."""

    places: Mapping[KeyPath, str]

    @classmethod
    def none(cls, title: str) -> Marks:
        """Marks for data that comes from no file."""
        return cls({(): title})

    def place(self, path: KeyPath) -> str:
        """Where `path` was written."""
        while path not in self.places:
            if not path:
                return "configuration"
            path = path[:-1]
        return self.places[path]

    def over(self, other: Marks) -> Marks:
        """These marks, completed by those of `other`."""
        return Marks({**other.places, **self.places})

    def without(self, prefix: KeyPath) -> Marks:
        """These marks without those at or under `prefix`, whose value was replaced as a whole."""
        return Marks({path: place for path, place in self.places.items() if path[: len(prefix)] != prefix})


@dataclass(frozen=True, slots=True)
class Document:
    """The plain data of one or more files, and where each value came from."""

    data: dict[str, Any]
    marks: Marks = field(default_factory=lambda: Marks({}))

    def find(self, name: str) -> tuple[str, str]:
        """(`file:line`, `passes.keep[0]`) of the first key or value `name`, also of `name:function`.

        Two empty texts if no file has it.
        """
        pending: list[tuple[KeyPath, Any]] = [((), self.data)]
        while pending:
            path, value = pending.pop(0)
            place = self.marks.place(path)
            is_text = isinstance(value, str) and (repr(value)[1:-1] == name or value.startswith(f"{name}:"))
            is_named = path[-1:] == (name,) or value == name or is_text
            if is_named and re.search(r":\d+$", place):
                return place, key_text(path)
            items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
            pending += [((*path, key), item) for key, item in items]
        return "", ""


_TAG = "tag:yaml.org,2002:"
_DROPPED = {f"{_TAG}timestamp", f"{_TAG}value"}
_SCALARS = {f"{_TAG}{name}" for name in ("str", "int", "float", "bool", "null", "merge")}
_TAGS = {yaml.ScalarNode: _SCALARS, yaml.SequenceNode: {f"{_TAG}seq"}, yaml.MappingNode: {f"{_TAG}map"}}
LIMIT = 100_000
"""Most values in one file: aliases of aliases can make billions out of a few lines."""

DEPTH = 100
"""Most levels of one value."""

LONGEST_NUMBER = 1000
"""The most characters of a number: Python refuses some thousands, or takes long."""

BITS = 64
"""Most bits of an integer."""

_MERGE = f"{_TAG}merge"


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's own name and form
        letter: [(tag, pattern) for tag, pattern in rules if tag not in _DROPPED]
        for letter, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Flatten as PyYAML does, then keep each key once: merges of merges would grow exponentially."""
        super().flatten_mapping(node)
        last = {
            (key.tag, key.value) if isinstance(key, yaml.ScalarNode) else id(key): (key, v) for key, v in node.value
        }
        node.value = list(last.values())


_BROKEN = re.compile("[\0\ud800-\udfff]")
_EXPONENT = re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$")
_Loader.add_implicit_resolver(f"{_TAG}float", _EXPONENT, list("-+0123456789"))


def _looks_otherwise(text: str, value: float) -> bool:
    """Whether YAML 1.1 reads another number than people do: 8 from 010, and 90 from 1:30."""
    digits = text.lstrip("+-0").replace("_", "")
    return ":" in text or (isinstance(value, int) and digits.isdigit() and int(digits) != abs(value))


def read_yaml(path: Path) -> tuple[Any, Marks]:
    """What one file holds, and where each value stands.

    Raises:
        ConfigError: it is missing, is not YAML, or repeats a key.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; expected a YAML configuration") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{path}: cannot be read: {reason}; expected a YAML configuration") from None
    reader = _YamlReader(str(path))
    return reader.read(text), Marks(reader.places)


def parse_value(text: str, title: str) -> Any:
    """The value on the right of `--set key=value`. Messages begin with `title` in place of file and line."""
    return _YamlReader(title, numbered=False).read(text)


def key_text(path: KeyPath) -> str:
    """A path of keys as messages have it: `model.inputs.x.shape[1]`."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).lstrip(".")


def describe(value: object) -> str:
    """A value in a few words, for messages."""
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, str | int | float):
        return describe_argument(value)
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def check_plain(data: object, title: str, path: KeyPath = ()) -> None:
    """Refuse what no file, no path and no number of a run can hold, also in data that Python gives.

    Raises:
        ConfigError: half of a surrogate pair or a NUL in a text, an integer of more than `BITS` bits, or values nested
            more than `DEPTH` deep.
    """
    if len(path) > DEPTH:
        raise ConfigError(f"{title}: nested more than {DEPTH} levels deep, expected a configuration")
    place = f"{title}: {key_text(path)}" if path else title
    match data:
        case str() if _BROKEN.search(data):
            raise ConfigError(f"{place}: found {describe(data)}, expected text without NUL and without lone surrogates")
        case int() if data.bit_length() > BITS:
            raise ConfigError(f"{place}: found an integer of {data.bit_length()} bits, expected at most {BITS}")
        case Mapping() | list() | tuple():
            for key, value in data.items() if isinstance(data, Mapping) else enumerate(data):
                check_plain(key, title, path)
                check_plain(value, title, (*path, key))


class _YamlReader:
    """Walks the composed nodes of one text, noting the line of every key and item."""

    def __init__(self, title: str, numbered: bool = True) -> None:
        self.title = title
        self.numbered = numbered
        self.places: dict[KeyPath, str] = {}
        self.values = 0

    def read(self, text: str) -> Any:
        loader = None
        try:
            loader = _Loader(text)
            node = loader.get_single_node()
            return None if node is None else self._value(loader, node, (), ())
        except yaml.MarkedYAMLError as error:
            raise ConfigError(self._syntax_error(error)) from None
        except yaml.YAMLError as error:
            raise ConfigError(f"{self.title}: not YAML: {' '.join(str(error).split())}") from None
        except ValueError as error:
            raise ConfigError(f"{self.title}: {error}") from None
        except RecursionError:
            raise ConfigError(f"{self.title}: nested too deeply to be a configuration") from None
        finally:
            if loader is not None:
                loader.dispose()

    def _value(self, loader: _Loader, node: yaml.Node, path: KeyPath, above: tuple[int, ...]) -> Any:
        if id(node) in above:
            raise ConfigError(f"{self._place(node)}: an alias inside its own anchor; expected a finite value")
        self.values += 1
        if self.values > LIMIT:
            raise ConfigError(f"{self._place(node)}: more than {LIMIT} values, with every alias written out")
        if len(above) > DEPTH:
            raise ConfigError(f"{self._place(node)}: nested more than {DEPTH} levels deep, expected a configuration")
        self.places.setdefault(path, self._place(node))
        above = (*above, id(node))
        self._check_tag(node)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(loader, node, path, above)
        if isinstance(node, yaml.SequenceNode):
            return [self._value(loader, item, (*path, index), above) for index, item in enumerate(node.value)]
        return self._scalar(loader, node)

    def _scalar(self, loader: _Loader, node: yaml.Node) -> Any:
        """The value of a scalar. PyYAML raises whatever Python does for a text that the tag cannot have."""
        if node.tag == _MERGE:
            return node.value
        is_number = node.tag in (f"{_TAG}int", f"{_TAG}float")
        if not (is_number and len(node.value) > LONGEST_NUMBER):
            with contextlib.suppress(KeyError, IndexError, ValueError, OverflowError):
                value = loader.construct_object(node)
                check_plain(value, self._place(node))
                if is_number and _looks_otherwise(node.value, value):
                    expected = f"expected a number without a colon or zeros before it: YAML reads {value} there"
                    raise ConfigError(f"{self._place(node)}: found {node.value}, {expected}; text goes in quotes")
                return value
        is_long = is_number and len(node.value) > LONGEST_NUMBER
        limit = f" of at most {LONGEST_NUMBER} characters" if is_long else ""
        expected = f"a value of the tag !!{node.tag.removeprefix(_TAG)}{limit}"
        raise ConfigError(f"{self._place(node)}: found {describe(node.value)}, expected {expected}")

    def _check_tag(self, node: yaml.Node) -> None:
        if node.tag not in _TAGS[type(node)]:
            tag = node.tag.replace(_TAG, "!!")
            known = "text, a number, true, false, null, a list or a mapping, without a tag"
            raise ConfigError(f"{self._place(node)}: found the tag {describe(tag)}, expected {known}")

    def _mapping(
        self, loader: _Loader, node: yaml.MappingNode, path: KeyPath, above: tuple[int, ...]
    ) -> dict[str, Any]:
        seen: dict[str, int] = {}
        for key_node, _ in node.value:
            key = self._key(loader, key_node)
            if key in seen:
                already = f"the key {key!r} is already on line {seen[key]}"
                raise ConfigError(f"{self._place(key_node)}: {already}; keep one of them")
            seen[key] = key_node.start_mark.line + 1
        loader.flatten_mapping(node)  # merged keys (`<<: *anchor`) come first, so that own keys win
        found: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self._key(loader, key_node)
            self.places[(*path, key)] = self._place(key_node)
            found[key] = self._value(loader, value_node, (*path, key), above)
        return found

    def _key(self, loader: _Loader, node: yaml.Node) -> str:
        if node.tag == _MERGE:
            return "<<"
        if not isinstance(node, yaml.ScalarNode):
            found = "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"
            raise ConfigError(f"{self._place(node)}: the key is {found}, expected text; put it in quotes")
        self._check_tag(node)
        key = self._scalar(loader, node)
        if isinstance(key, int) and not isinstance(key, bool):
            return str(key)  # an axis; the schema reads it as a number again
        if not isinstance(key, str):
            raise ConfigError(f"{self._place(node)}: the key is {describe(key)}, expected text; put it in quotes")
        return key

    def _place(self, node: yaml.Node) -> str:
        return self._at(node.start_mark)

    def _at(self, mark: yaml.Mark | None) -> str:
        return f"{self.title}:{mark.line + 1}" if mark is not None and self.numbered else self.title

    def _syntax_error(self, error: yaml.MarkedYAMLError) -> str:
        mark = error.problem_mark or error.context_mark
        return f"{self._at(mark)}: not YAML: {error.problem or error.context or 'cannot be parsed'}"
