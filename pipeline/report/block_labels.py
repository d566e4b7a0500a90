"""Labels of the axes of plots along a model: the blocks of the torch module, each at its first point."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

MOST_LABELS: Final = 16

LONGEST_LABEL: Final = 16
"""Characters of a slanted label of 11 px that fit left of the first point."""


def block_labels(modules: Sequence[str]) -> tuple[tuple[int, str], ...]:
    """(index, label) of the first point of each block; labels that would be too close to the previous one are left out.

    Args:
        modules: the module path of each point, in the order of the axis; an empty path has no label.
    """
    first: dict[str, int] = {}
    for index, module in enumerate(modules):
        if module:
            first.setdefault(_block(module), index)
    labels: list[tuple[int, str]] = []
    for block, index in first.items():
        if not labels or index - labels[-1][0] >= len(modules) / MOST_LABELS:
            labels.append((index, shorten_label(block)))
    return tuple(labels)


def shorten_label(text: str) -> str:
    """`text`, or its end after an ellipsis if `text` is longer than `LONGEST_LABEL`."""
    return text if len(text) <= LONGEST_LABEL else "…" + text[1 - LONGEST_LABEL :]


def _block(module: str) -> str:
    """`encoder.layer.3` of `encoder.layer.3.attention.self`: up to the first number; without one, the first part."""
    parts = module.split(".")
    numbered = next((at for at, part in enumerate(parts) if part.isdecimal()), 0)
    return ".".join(parts[: numbered + 1])
