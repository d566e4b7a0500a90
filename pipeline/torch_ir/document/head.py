"""What the JSON of an IR says beside its tensors and nodes.

It is little, so it is read as soon as a file is loaded; tensors and nodes wait until somebody asks for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.torch_ir.document.dims import read_dims
from pipeline.torch_ir.document.expected import TEXT, are_names, as_expected, is_object, is_text, mapping, refused
from pipeline.torch_ir.document.signature import read_trees
from pipeline.torch_ir.document.writing import FORMAT_VERSION
from pipeline.torch_ir.errors import SerializationError
from pipeline.torch_ir.tree import Tree

__all__ = ["Head", "constants_in", "read_head"]


@dataclass(frozen=True, slots=True)
class Head:
    """The fields of an IR with these names; `trees` are those of the arguments and of the result."""

    model_name: str
    pytorch_version: str
    trees: tuple[Tree | None, Tree | None]
    unsaved: frozenset[str]


def read_head(data: Mapping[str, Any], what: str = TEXT) -> Head:
    """The data is of the file `what`.

    Raises:
        SerializationError: the data is no IR, or of a later format, or its signature, dims or guards are none.
    """
    with refused(what):
        as_expected(data, "the top level", "an object", is_object)
        _refuse_other_formats(data, what)
        read_dims(data)  # the Graph takes them, when it is asked for
        unsaved = as_expected(data.get("unsaved") or (), "unsaved", "a list of names of buffers", are_names)
        return Head(_text(data, "model_name"), _text(data, "pytorch_version"), read_trees(data), frozenset(unsaved))


def constants_in(data: Mapping[str, Any], what: str = TEXT) -> Mapping[str, Mapping[str, Any]]:
    """What is written of each constant, by name.

    Raises:
        SerializationError: it is no object of objects.
    """
    with refused(what):
        found = mapping(data, "constants")
        for name, one in found.items():
            as_expected(one, f"constants: {name}", "an object of data and dtype", is_object)
        return found


def _refuse_other_formats(data: Mapping[str, Any], what: str) -> None:
    version = data.get("format_version", FORMAT_VERSION)
    if version != FORMAT_VERSION:
        raise SerializationError(
            f"{what}: found format_version {version!r}, expected {FORMAT_VERSION}; "
            "read it with the release that wrote it"
        )
    missing = [key for key in ("graph_inputs", "graph_outputs", "weights", "nodes") if key not in data]
    if missing:
        said = f"the key {missing[0]} is" if len(missing) == 1 else f"the keys {', '.join(missing)} are"
        raise SerializationError(f"{what}: {said} missing; expected what IR.save writes")


def _text(data: Mapping[str, Any], key: str) -> str:
    return as_expected(data.get(key, ""), key, "a string", is_text)
