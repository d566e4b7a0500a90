"""Print a graph for people: operators and their connections, without the numbers in weights."""

from __future__ import annotations

import re
import textwrap
from typing import Final

import onnx

from passes.graph.traversal import bodies_of

__all__ = ["COLUMNS", "graph_text"]

COLUMNS: Final = 100

SHORT: Final = 24
"""Tensors of up to this many characters are printed, such as pads and axes; longer ones are weights."""

STORED: Final = re.compile(r" =  \{([^{}]*)\}")
CONSTANT: Final = re.compile(r"\{([-+0-9.einfa,]+)\}", re.IGNORECASE)
TYPED: Final = re.compile(r"\b(\w+): (?:int|float|string|tensor|graph)s? = ")


def graph_text(model: onnx.ModelProto) -> str:
    """ONNX text of the main graph, wrapped at `COLUMNS`; the numbers in weights, types of inner values and names of
    operators are left out."""
    bare = onnx.GraphProto()
    bare.CopyFrom(model.graph)
    _strip(bare)
    text = onnx.printer.to_text(bare)
    text = STORED.sub(lambda match: f" = {{{match[1]}}}" if len(match[1]) <= SHORT else "", text)
    text = CONSTANT.sub(lambda match: match[0] if len(match[1]) <= SHORT else "{…}", text)
    text = TYPED.sub(r"\1 = ", text)
    return "\n".join(part for line in text.splitlines() for part in _wrap(line))


def _strip(graph: onnx.GraphProto) -> None:
    del graph.value_info[:]
    for node in graph.node:
        node.ClearField("name")
        for attribute in node.attribute:
            for inner in bodies_of(attribute):
                _strip(inner)


def _wrap(line: str) -> list[str]:
    space = " " * (len(line) - len(line.lstrip()))
    return textwrap.wrap(
        line.strip(),
        COLUMNS,
        initial_indent=space,
        subsequent_indent=f"{space}    ",
        break_long_words=False,
        break_on_hyphens=False,
    )
