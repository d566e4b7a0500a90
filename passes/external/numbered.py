"""Number the nodes of a model, so that they are known again in what a library makes of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from onnx import ModelProto, NodeProto

__all__ = ["name_again", "number", "quote_own_names"]

NUMBERED: Final = "onnxline.node/"


def number(model: ModelProto) -> list[str]:
    """Name each node by its place, in place; returns the names that they had.

    What is carried across a pass anyway goes, since it takes longer to read than many a pass to run.
    """
    del model.metadata_props[:]
    names = []
    for place, node in enumerate(model.graph.node):
        names.append(node.name)
        node.name = f"{NUMBERED}{place}"
        node.ClearField("doc_string")
        del node.metadata_props[:]
    return names


def name_again(made: ModelProto, names: Sequence[str], source: Sequence[NodeProto]) -> None:
    """Give the nodes of `made` their `names`, where those are numbers the names of the `source` nodes."""
    for node, name in zip(made.graph.node, names, strict=True):
        place = name.removeprefix(NUMBERED)
        node.name = name if place == name else source[int(place)].name


def quote_own_names(message: str, source: Sequence[NodeProto]) -> str:
    """What a library says of a numbered model, with the names that its nodes have in `source`."""

    def find_name(number: re.Match[str]) -> str:
        place = int(number[1])
        node = source[place] if place < len(source) else NodeProto()
        return next((name for name in (node.name, *node.output) if name), number[0])

    return re.sub(rf"{re.escape(NUMBERED)}(\d+)", find_name, message)
