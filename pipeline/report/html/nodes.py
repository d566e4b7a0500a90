"""The nodes of the final model, packed: what many nodes share is written once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.report.pictures import NodeRow

__all__ = ["packed"]


def packed(nodes: Sequence[NodeRow], values: Mapping[str, str]) -> dict[str, Any]:
    """`words` is every text once; all else is places in it.

    A row is name, op, shapes, module, author, list of inputs, list of outputs. An author is empty for a node of the
    source; so is the module where none is known. `values` are pairs: a value that no node makes, its dtype and shape.
    """
    words: dict[str, int] = {}

    def place(text: str) -> int:
        return words.setdefault(text, len(words))

    rows = [
        [
            *(place(text) for text in (one.name, one.op, ", ".join(one.shapes), one.module or "", one.made_by)),
            [place(name) for name in one.inputs],
            [place(name) for name in one.outputs],
        ]
        for one in nodes
    ]
    types = [(place(name), place(shape)) for name, shape in values.items()]
    return {"words": list(words), "rows": rows, "values": types}
