"""Whether a view of an IR still says what it said."""

from __future__ import annotations

from typing import Any

from pipeline.torch_ir.nodes import OpNode, Parts, TensorMeta

__all__ = ["alike"]


def alike(one: Any, other: Any) -> bool:
    """To the type of each number: 1, 1.0 and True are three, and so are 0.0, -0.0 and nan."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    match one:
        case TensorMeta():
            return one == other
        case OpNode() | Parts():
            return all(alike(getattr(one, name), getattr(other, name)) for name in one.__match_args__)
        case list() | tuple():
            return len(one) == len(other) and all(map(alike, one, other))
        case dict():
            return one.keys() == other.keys() and all(alike(item, other[key]) for key, item in one.items())
        case _:
            return repr(one) == repr(other)
