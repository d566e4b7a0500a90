"""The nodes of the final model, packed: what many nodes share is written once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.report.pictures import NodeRow

__all__ = ["packed"]


def packed(nodes: Sequence[NodeRow]) -> dict[str, Any]:
    """`words` is every text once, and `rows` are places in it: name, op, shapes, module, author.

    An author is empty for a node of the source; so is the module where none is known.
    """
    words: dict[str, int] = {}

    def place(text: str) -> int:
        return words.setdefault(text, len(words))

    rows = [
        [place(text) for text in (one.name, one.op, ", ".join(one.shapes), one.module or "", one.made_by)]
        for one in nodes
    ]
    return {"words": list(words), "rows": rows}
